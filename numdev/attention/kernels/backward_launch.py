"""Launch settings of the portable backward kernels: a tile for dK and dV, and one for dQ.

The `br` of a tile decides the order in which dK and dV are summed, its `bc` that of dQ. The tiles of 16-bit formats are the
largest that the compiler keeps in registers for compute capability 9.0 (`tests.compiled_backward` shows it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numdev.arithmetic.formats import Format
from numdev.attention.kernels.launch import INTERPRETED, Device, Launch
from numdev.attention.mask import Mask


@dataclass(frozen=True)
class Launches:
    """The launch of the kernel for dK and dV, which keeps a block of keys, and of that for dQ, which keeps a block of rows."""

    keys: Launch
    rows: Launch


# By the largest head_dim.
_NARROW = {
    64: Launches(Launch(32, 128, 8, 2), Launch(128, 64, 8, 3)),
    128: Launches(Launch(32, 128, 8, 2), Launch(128, 64, 8, 2)),
    256: Launches(Launch(32, 32, 8, 1), Launch(64, 32, 8, 2)),
}
_WIDE = {
    64: Launches(Launch(32, 64, 8, 1), Launch(64, 32, 8, 1)),
    128: Launches(Launch(32, 32, 8, 1), Launch(32, 32, 4, 1)),
    256: Launches(Launch(16, 32, 8, 1), Launch(32, 16, 8, 1)),
}
_UNMASKED = Launch(64, 128, 8, 2)  # of dK and dV up to d = 64, where no tile needs the registers of a mask
_LARGE = 64 * 64  # pairs of a tile; a larger one needs the registers of eight warps


def choose(fmt: Format, head_dim: int, mask: Mask, device: Device, br: int | None = None, bc: int | None = None) -> Launches:
    """The launches for a request; `br` and `bc`, if given, replace the sides of both kernels.

    A launch that does not fit into the shared memory of the device gets fewer stages; if that is not enough and the sides are
    not given, the longer side of its tile is halved until it fits.
    """
    table = _NARROW if fmt.bits <= 16 else _WIDE
    found = Launches(INTERPRETED, INTERPRETED)
    if device.generation != "interpreter":
        found = table[min(dim for dim in table if dim >= min(head_dim, max(table)))]
        if table is _NARROW and head_dim <= 64 and mask.is_none:
            found = replace(found, keys=_UNMASKED)
    sides = {name: side for name, side in (("br", br), ("bc", bc)) if side is not None}
    keys, rows = (_with_sides(launch, sides) for launch in (found.keys, found.rows))
    return Launches(
        _fitted(keys, fmt, head_dim, device, False, bool(sides)), _fitted(rows, fmt, head_dim, device, True, bool(sides))
    )


def shared_bytes(launch: Launch, fmt: Format, head_dim: int, of_rows: bool) -> int:
    """An upper bound on the shared memory of a kernel, from what the compiler keeps there.

    It holds two tiles for the whole loop (k and v, or q and do if the kernel is `of_rows`), two for each stage, two more while
    their layout is converted, and P and dS.
    """
    inner = max(16, 1 << (head_dim - 1).bit_length())
    br, bc = (max(16, 1 << (side - 1).bit_length()) for side in (launch.br, launch.bc))
    stored = 2 if fmt.bits <= 16 else 4
    resident, streamed = (br, bc) if of_rows else (bc, br)
    return 2 * (resident + (launch.stages + 1) * streamed) * inner * stored + br * bc * 4


def _with_sides(launch: Launch, sides: dict[str, int]) -> Launch:
    if not sides:
        return launch
    given = replace(launch, **sides)
    return replace(given, warps=8 if given.br * given.bc > _LARGE else 4)


def _fitted(launch: Launch, fmt: Format, head_dim: int, device: Device, of_rows: bool, given: bool) -> Launch:
    def fits() -> bool:
        return device.shared is None or shared_bytes(launch, fmt, head_dim, of_rows) <= device.shared

    while not fits() and launch.stages > 1:
        launch = replace(launch, stages=launch.stages - 1)
    while not fits() and not given and max(launch.br, launch.bc) > 16:
        longer = "br" if launch.br > launch.bc else "bc"
        launch = replace(launch, **{longer: getattr(launch, longer) // 2})
    return launch
