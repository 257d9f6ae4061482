"""Names near to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def one_of(wrong: object, names: Iterable[str], most: int = 64) -> str:
    """The mend for a name that does not exist: those that look like it, and all there are unless they are more than `most`."""
    known = list(names)
    near = difflib.get_close_matches(str(wrong), known, n=3, cutoff=0.6)
    rest = [name for name in known if name not in near]
    if not near:
        return "use one of " + ", ".join(rest if len(rest) <= most else [*rest[:most], "..."])
    meant = f"did you mean {' or '.join(near)}"
    return f"{meant}, or another of {', '.join(rest)}" if 0 < len(rest) <= most else meant
