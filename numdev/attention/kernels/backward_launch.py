"""Launch settings of the portable backward kernels: a tile for dK and dV, and one for dQ.

A tile's `br` decides the order in which dK and dV are added up, that of dQ its `bc`. Those of 16-bit formats were found by
compiling for compute capability 9.0: the largest tiles whose sums stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numdev.arithmetic.formats import Format
from numdev.attention.kernels.launch import INTERPRETED, Device, Launch


@dataclass(frozen=True)
class Launches:
    """Of the kernel of dK and dV, which keeps a block of keys, and of that of dQ, which keeps a block of rows."""

    keys: Launch
    rows: Launch


_NARROW = {  # formats of 16 bits, by the largest head_dim
    64: Launches(Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
    128: Launches(Launch(64, 128, 8, 2), Launch(128, 64, 8, 2)),
    256: Launches(Launch(32, 64, 8, 1), Launch(64, 32, 8, 1)),
}
_WIDE = {
    64: Launches(Launch(32, 64, 8, 1), Launch(64, 32, 8, 1)),
    128: Launches(Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
    256: Launches(Launch(16, 32, 8, 1), Launch(32, 16, 8, 1)),
}
_LEAST = Launch(16, 16, 4, 1)


def choose(fmt: Format, head_dim: int, device: Device, br: int | None = None, bc: int | None = None) -> Launches:
    """The launches for a request; sides that are given replace those of both kernels.

    A tile that does not fit into the shared memory of the device loses stages, then half of its longer side at a time.
    """
    if device.generation == "interpreter":
        found = Launches(INTERPRETED, INTERPRETED)
    else:
        table = _NARROW if fmt.bits <= 16 else _WIDE
        found = table[min(dim for dim in table if dim >= head_dim)]
    sides = {name: side for name, side in (("br", br), ("bc", bc)) if side is not None}
    fitted = (_fitted(replace(each, **sides), fmt, head_dim, device, bool(sides)) for each in (found.keys, found.rows))
    return Launches(*fitted)


def shared_bytes(launch: Launch, fmt: Format, head_dim: int) -> int:
    """A bound on the shared memory of either kernel: two resident tiles, two streamed ones for each stage, P and dS."""
    inner = max(16, 1 << (head_dim - 1).bit_length())
    br, bc = (max(16, 1 << (side - 1).bit_length()) for side in (launch.br, launch.bc))
    stored = 2 if fmt.bits <= 16 else 4
    return 2 * (max(br, bc) + launch.stages * max(br, bc)) * inner * stored + 2 * br * bc * 4


def _fitted(launch: Launch, fmt: Format, head_dim: int, device: Device, given: bool) -> Launch:
    def too_large(each: Launch) -> bool:
        return device.shared is not None and shared_bytes(each, fmt, head_dim) > device.shared

    while too_large(launch) and launch.stages > 1:
        launch = replace(launch, stages=launch.stages - 1)
    while too_large(launch) and not given and launch != _LEAST:
        longer = "br" if launch.br > launch.bc else "bc"
        launch = replace(launch, **{longer: max(16, getattr(launch, longer) // 2)})
    return launch
