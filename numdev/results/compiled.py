"""By which compiled code of numdev points ran, of the texts that their records have for `kernel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_OURS = "numdev"  # the first word; the second is the name, and launch settings follow


def compiled(kernels: Iterable[str]) -> dict[str, int]:
    """How many points each of them ran: `{"numdev fused": 12}`.

    A point whose replicates ran by several counts for each. Kernels of others and tensor operations are left out.
    """
    found: Counter[str] = Counter()
    for kernel in kernels:
        words = (part.split()[:2] for part in kernel.split("; "))
        found.update(sorted({" ".join(each) for each in words if each[:1] == [_OURS]}))
    return dict(found)
