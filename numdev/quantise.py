"""Quantised inputs: q, k and v on a coarse grid with a scale, as FP8 and INT8 attention receives them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput
from numdev.rounding import Cast


class Scale(Enum):
    """How many numbers share one scale."""

    TENSOR = "tensor"
    BLOCK = "block"  # `block` rows of one head
    ROW = "row"


class Smoothing(Enum):
    """Whose mean over tokens is taken out before quantisation (SageAttention 1 takes k's, 2 also q's)."""

    NONE = "none"
    K = "k"
    QK = "qk"


@dataclass(frozen=True)
class Quantised:
    """Rounding with a scale: `x ~ s * to(x / s)`, `s = max |x| / to.max` over the numbers that share it.

    The result is returned dequantised, in FP64: multiplying codes by scales after the product is the same in exact
    arithmetic, and differs by the carrier's roundoff, far below the format's. Rotation and smoothing are undone after
    rounding for the same reason: `(R q).(R k) = q.k` for an orthogonal R, and a mean taken out of k adds the same
    `q.mean(k)` to every score of a row, which softmax ignores and LSE does not.

    Attributes:
        to: the grid, for example `Cast.parse("e4m3fn")` or `Cast.parse("int8")`.
        scale: see `Scale`.
        block: rows per scale with `Scale.BLOCK`.
        hadamard: rotate q and k by a random Hadamard matrix first (FlashAttention-3, section 3.3: incoherent
            processing), which spreads an outlier over all of head_dim.
        smoothing: see `Smoothing`.
        values: the cast of v where it is not quantised like q and k (SageAttention keeps it in FP16).
        seed: of the signs of the Hadamard rotation.
    """

    to: Cast
    scale: Scale = Scale.TENSOR
    block: int = 128
    hadamard: bool = False
    smoothing: Smoothing = Smoothing.NONE
    values: Cast | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("precision.quantise.block", self.block, "give the number of rows per scale, at least 1")

    @property
    def idle(self) -> dict[str, str]:
        """Settings that are not read as the others are, and what reads them."""
        found = {} if self.scale is Scale.BLOCK else {"precision.quantise.block": "precision.quantise.scale=block"}
        return found if self.hadamard else found | {"precision.quantise.seed": "precision.quantise.hadamard=true"}

    def __str__(self) -> str:
        parts = [f"{self.to}", f"scale per {self.scale.value}"]
        if self.scale is Scale.BLOCK:
            parts[-1] += f" of {self.block} rows"
        if self.hadamard:
            parts.append("Hadamard")
        if self.smoothing is not Smoothing.NONE:
            parts.append(f"mean of {self.smoothing.value} removed")
        if self.values is not None:
            parts.append(f"values {self.values}")
        return ", ".join(parts)

    def __call__(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        v: Float[Tensor, "batch kv_heads keys dim"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v after quantisation and its undoing, in FP64."""
        rotation = random_hadamard(q.shape[-1], self.seed).to(q.device) if self.hadamard else None
        q = self._smooth_rotate(q.double(), rotation, self.smoothing is Smoothing.QK)
        k = self._smooth_rotate(k.double(), rotation, self.smoothing is not Smoothing.NONE)
        return q, k, self._round(v.double()) if self.values is None else self.values(v.double())

    def _smooth_rotate(self, x: Tensor, rotation: Tensor | None, smooth: bool) -> Tensor:
        mean = x.mean(-2, keepdim=True) if smooth else torch.zeros_like(x[..., :1, :])
        centred = x - mean
        if rotation is None:
            return self._round(centred) + mean
        return self._round(centred @ rotation) @ rotation.T + mean

    def _round(self, x: Tensor) -> Tensor:
        batch, heads, tokens, _ = x.shape
        if self.scale is Scale.TENSOR:
            largest = x.abs().amax().expand(1, 1, 1, 1)
        elif self.scale is Scale.ROW:
            largest = x.abs().amax(-1, keepdim=True)
        else:
            missing = -tokens % self.block
            padded = torch.nn.functional.pad(x.abs().amax(-1), (0, missing))
            per_block = padded.view(batch, heads, -1, self.block).amax(-1)
            largest = per_block.repeat_interleave(self.block, -1)[..., :tokens, None]
        top = self.to.to.max
        scale = torch.where(largest > 0, largest / top, 1.0)
        return self.to((x / scale).clamp(-top, top)) * scale  # the quotient's roundoff must not overflow


def random_hadamard(dim: int, seed: int) -> Float[Tensor, "dim dim"]:
    """A random orthogonal matrix `diag(s) H / sqrt(n)` in FP64, with random signs `s` and Sylvester's `H`.

    Where `dim` is no power of two, blocks of the largest power of two that divides it stand on the diagonal.
    """
    size = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (dim,), generator=generator, dtype=torch.float64) * 2 - 1
    return signs[:, None] * torch.block_diag(*[block] * (dim // size)) / size**0.5
