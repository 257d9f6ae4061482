"""The dot product of a tensor core, to the bit: products and accumulator are aligned to the largest of them, cut and added.

One instruction adds a fixed number of products to an FP32 accumulator `c`. With `e(x)` the exponent of `x` as it is stored (that
of the smallest normal number for a subnormal), the exponent of a product is `e(a) + e(b)`: significands of products, in [1, 4),
are not normalised. Then

    E = max(floor, e(c), e(a_k) + e(b_k))                       over what is not zero
    s = sum_k trunc(a_k b_k / 2^(E - fraction)) + trunc(c / 2^(E - fraction))         an integer: no order, no carry is lost
    c' = s 2^(E - fraction), cut toward zero to `stored` fraction bits

and longer products are a chain of instructions, each with the sum of the one before for `c`. Subnormal numbers are kept, in and
out. Results beyond FP32 are infinite; NaN and infinities are as in IEEE 754's sum; a sum of zero, or cut to it, is +0.

The rules are those of Khattak & Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004, with MATLAB models in
https://github.com/north-numerical-computing/MATLAB-tensor-core), and of Xie et al., "MMA-Sim" (arXiv 2511.10909); both were
compared with GPUs on random operands. They differ in `floor`, the smallest exponent that terms are aligned to: here the former's,
while MMA-Sim has -126, also where `c` is 0. What is cut to zero keeps its sign in MMA-Sim and is +0 on an H100, on which `pytest
-m gpu tests/arithmetic/test_tensor_cores.py` found the bits of these rules: 2^20 sums in each of 120 cases, with ties,
cancellations, subnormals, NaN and infinities. Before them, on Volta to Hopper: Fasi et al. 2021 (PeerJ CS 7:e330), "FTTN"
(arXiv 2403.00232).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from jaxtyping import Float

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.lazy import torch

_EXPONENT = 0x7FF << 52  # of an FP64 number
_TERMS, _TERMS_ON_GPU = 1 << 17, 1 << 24  # in memory at once: three such arrays fit the second cache of one core


Two: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class Unit:
    """What adds the products of one instruction.

    Attributes:
        products: how many one instruction, or one of the steps that it consists of, adds.
        fraction: bits kept below the largest exponent.
        stored: fraction bits of the sum as it is stored in FP32.
        floor: the smallest exponent that terms are aligned to.
        smallest: the exponents of the smallest normal numbers of the formats of both factors.
    """

    products: int
    fraction: int
    stored: int = 23
    floor: int = -133
    smallest: tuple[int, int] = (FP32.emin, FP32.emin)

    def __call__(
        self,
        a: Float[torch.Tensor, "*batch rows inner"],
        b: Float[torch.Tensor, "*#batch inner columns"],
        start: Float[torch.Tensor, "*batch rows columns"] | None = None,
    ) -> Float[torch.Tensor, "*batch rows columns"]:
        """`start + a b`, FP32 numbers in the dtype of `a`; `start` is of FP32 numbers, 0 without it.

        Factors are numbers of their formats, so that products are exact in FP64.
        """
        matrices, (inner, columns) = math.prod(b.shape[:-2]), b.shape[-2:]
        left = a.double().reshape(matrices, -1, inner)
        total = left.new_zeros(matrices, left.shape[1], columns)
        if start is not None:
            total += start.reshape(total.shape)
        terms = _TERMS if a.device.type == "cpu" else _TERMS_ON_GPU
        rows = max(1, terms // (columns * min(self.products, inner)))
        for one, right, sums in zip(left, b.double().reshape(matrices, inner, columns), total, strict=True):
            right_powers, is_finite = _powers(right, self.smallest[1]), bool(right.isfinite().all())
            for part, c in zip(one.split(rows), sums.split(rows), strict=True):
                powers, finite = _powers(part, self.smallest[0]), is_finite and bool(part.isfinite().all())
                for k in range(0, inner, self.products):
                    here = slice(k, k + self.products)
                    factors = (part.T[here, :, None], right[here, None, :])
                    c.copy_(self._add(factors, (powers.T[here, :, None], right_powers[here, None, :]), c, finite=finite))
        return total.reshape(*a.shape[:-1], columns).to(a.dtype)

    def _add(self, factors: Two, powers: Two, c: torch.Tensor, *, finite: bool) -> torch.Tensor:
        """One instruction: `[k, rows, 1]` and `[k, 1, columns]`, their powers of two, and the accumulator `[rows, columns]`."""
        top = torch.maximum((powers[0] * powers[1]).amax(0), _powers(c, FP32.emin)).clamp_(min=2.0**self.floor)
        scale = 2.0**self.fraction / top
        products = factors[0] * factors[1]
        exact = None if finite and bool(c.isfinite().all()) else products.sum(0) + c
        total = products.mul_(scale).trunc_().sum(0).add_((c * scale).trunc_()).div_(scale)
        quantum = _powers(total, FP32.emin).clamp_(min=2.0**FP32.emin).mul_(2.0**-self.stored)
        stored = total.div_(quantum).trunc_().mul_(quantum).float().double() + 0.0  # too large is infinite; never -0
        return stored if exact is None else torch.where(exact.isfinite(), stored, exact)


def _powers(x: torch.Tensor, smallest: int) -> torch.Tensor:
    """`2^e(x)` in FP64, at least `2^smallest`; 0 of 0."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64).clamp_(min=2.0**smallest).mul_(x != 0)


class Architecture(Enum):
    """Whose tensor cores."""

    VOLTA = "volta"
    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"

    def unit(self, left: Format | None, right: Format | None) -> Unit | None:
        """The unit for operands of two formats; None where the architecture has none for them."""
        for formats, unit in UNITS[self].items():
            if left in formats and right in formats and left and right:
                return replace(unit, smallest=(left.emin, right.emin))
        return None


_FP8, _FP16, _BF16 = (E4M3FN, E5M2), (FP16,), (BF16,)  # both FP8 formats may meet in one product
UNITS: dict[Architecture, dict[tuple[Format, ...], Unit]] = {
    # V100: `mma` of 4 products. Both sources. It has no floor: that of an FP32 accumulator changes nothing.
    Architecture.VOLTA: {_FP16: Unit(4, 23, floor=FP32.emin)},
    # A100, A2, A30: `mma` of 16 products adds 8 at a time. Both sources.
    Architecture.AMPERE: dict.fromkeys((_FP16, _BF16), Unit(8, 24, floor=-132)),
    # RTX 1000, L40S: `mma` of 32 FP8 products adds 16 at a time. Both sources.
    Architecture.ADA: {**dict.fromkeys((_FP16, _BF16), Unit(8, 24, floor=-132)), _FP8: Unit(16, 13, 13, -132)},
    # H100, H200: `wgmma`. Both sources, and readings of our own: beside 256 an FP8 product of 2^-5 is kept and one of 2^-6 is
    # not, and of 16 bits 1.5 becomes 1 beside 2^23.
    Architecture.HOPPER: {**dict.fromkeys((_FP16, _BF16), Unit(16, 25)), _FP8: Unit(32, 13, 13)},
    # B200: `tcgen05.mma`. Both sources.
    Architecture.BLACKWELL: {**dict.fromkeys((_FP16, _BF16), Unit(16, 25)), _FP8: Unit(32, 25)},
}
"""The units that add to FP32, by the formats of their operands. Of Turing the sources disagree."""
