"""The random numbers of stochastic rounding: a function of the seed, the rounding event and the place, and of nothing else.

An event is the rounding of one tensor in one step of the algorithm, for one tile of keys of one split. Different events draw
independent numbers at the same place, so that equal sums are rounded independently each time. A place is the position of an
element in the whole problem, so that processing fewer rows at a time changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float

from numdev.lazy import torch

_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64's finaliser (Steele et al. 2014)
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


@dataclass
class Noise:
    """Random numbers for one run over a block of rows.

    Attributes:
        rows: the first row of the block in the whole problem.
        total_rows: rows of the whole problem, which distinguish places of different heads.
        event: number of the next draw; `at` starts a group of events, and each draw takes the next number of the group.
    """

    rows: int = 0
    total_rows: int = 1
    event: int = 0

    def at(self, split: int, tile: int, rows: int) -> None:
        """Begin the events of one tile of one split, for a block of rows that starts at `rows`; -1 is what follows all tiles."""
        self.rows = rows
        self.event = ((split + 2) << 40) + ((tile + 1) << 16)  # above those of a run that never calls this

    def uniform(self, x: Float[torch.Tensor, "*shape"], seed: int) -> Float[torch.Tensor, "*shape"]:
        """One multiple of `2^-p` in [0, 1) for each element of `x`, where p is the precision of its dtype; uses up one event.

        The last two dimensions of `x` are rows of the block and columns; the leading ones are heads and batch entries.
        """
        key = _mix_number(_mix_number(seed * _GOLDEN + 1) ^ self.event * 0xD1342543DE82EF95)
        self.event += 1
        columns = torch.arange(x.shape[-1] if x.ndim else 1, device=x.device)
        rows = torch.arange(x.shape[-2] if x.ndim > 1 else 1, device=x.device) + self.rows
        heads = torch.arange(x.numel() // max(1, rows.numel() * columns.numel()), device=x.device)
        place = (heads[:, None] * max(self.total_rows, self.rows + rows.numel()) + rows)[..., None] * (1 << 24) + columns
        width = 24 if x.dtype is torch.float32 else 53
        hashed = _mix(place * _signed(_GOLDEN) + _signed(key))
        return (((hashed >> (64 - width)) & ((1 << width) - 1)).to(x.dtype) * 2.0**-width).view(x.shape)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser, on int64 tensors, whose arithmetic wraps."""
    for shift, factor in _MULTIPLIERS:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_number(z: int) -> int:
    z &= _WORD
    for shift, factor in _MULTIPLIERS:
        z = ((z ^ (z >> shift)) * factor) & _WORD
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The two's complement reading of the low 64 bits."""
    value &= _WORD
    return value - (1 << 64) if value >= 1 << 63 else value
