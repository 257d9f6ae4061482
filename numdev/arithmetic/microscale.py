"""Microscaling: a short run of numbers shares one scale that is itself a number of a narrow format.

`x ~ X P`, with an element `P` of 4 to 8 bits and a scale `X` for every `block` of them. The Open Compute Project's MX formats
hold `X` in E8M0, a power of two (OCP Microscaling Formats v1.0, section 5); NVIDIA's NVFP4 holds it in E4M3, relative to one
FP32 scale for the tensor (Pretraining LLMs with NVFP4, arXiv 2509.25149, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jaxtyping import Float

from numdev.arithmetic.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.errors import BadInput
from numdev.lazy import torch

_SCALE_RANGE = 127  # exponents of E8M0: -127 to 127 (OCP MX v1.0, section 5.4.1)


class BlockScale(Enum):
    """Scales of a block, with `a` the largest magnitude in it and `top` the largest element."""

    E8M0 = "e8m0"  # 2^(floor(log2 a) - emax), emax of the element format (OCP MX v1.0, section 6.3)
    E4M3 = "e4m3"  # e4m3(a / top), nearest even and saturating
    E4M3_FP32 = "e4m3_fp32"  # t e4m3(a / (top t)), t = fp32(max |x| / (top 448)) over the whole tensor: NVFP4


@dataclass(frozen=True)
class Microscaled:
    """Rounding to a microscaled format: `X element(x / X)` for each block of the last dimension, elements saturating.

    The result is returned dequantised. The last block of a row may be shorter. A block of zeros, or one whose E4M3 scale rounds
    to zero, is zero. NaN or Inf makes the whole block NaN (OCP MX v1.0, section 6.3).

    Attributes:
        element: the cast of an element, which saturates.
        block: numbers that share a scale.
        scale: see `BlockScale`.
    """

    element: Cast
    block: int
    scale: BlockScale

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("microscaled.block", self.block, "give the number of elements per scale, at least 1")
        if self.element.overflow is not Overflow.SATURATE:
            hint = f"elements saturate (OCP MX v1.0, section 6.3); write {self.element.to}:saturate"
            raise BadInput("microscaled.element", str(self.element), hint)

    @staticmethod
    def parse(text: str) -> Microscaled:
        """Read a name of `MICROSCALED`, or `element/block/scale` such as `e2m1finite/32/e8m0`."""
        if text in MICROSCALED:
            return MICROSCALED[text]
        element, _, rest = text.partition("/")
        block, _, scale = rest.partition("/")
        if not block.isdigit() or scale not in {member.value for member in BlockScale}:
            hint = f"use one of {', '.join(MICROSCALED)}, or element/block/scale, such as e2m1finite/32/e8m0"
            raise BadInput("microscaled", text, f"{hint}; scales are {', '.join(member.value for member in BlockScale)}")
        return Microscaled(Cast.parse(element), int(block), BlockScale(scale))

    @staticmethod
    def is_named_by(text: str) -> bool:
        """Whether a text is meant as a microscaled format, and should be parsed and reported as one."""
        return "/" in text or text in MICROSCALED

    def __str__(self) -> str:
        return _NAMES.get(self, f"{self.element}/{self.block}/{self.scale.value}")

    describe = __str__  # in a configuration

    def __repr__(self) -> str:
        return f"Microscaled({self})"

    @property
    def largest(self) -> float:
        """Infinity: there is no largest result, since the scale adapts to the numbers."""
        return float("inf")

    def __call__(self, x: Float[torch.Tensor, "*shape last"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape last"]:
        """`x` rounded along its last dimension, in a tensor of the same dtype. `noise` is as in `Cast.apply_`."""
        return self.apply_(x.clone(), noise)

    def apply_(self, x: Float[torch.Tensor, "*shape last"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape last"]:
        """Round `x` in place and return it."""
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = self._scales(largest).masked_fill_(~largest.isfinite(), float("nan"))
        each = scale.expand(blocks.shape).flatten(-2)[..., : x.shape[-1]]
        return self.element.apply_(x.div_(torch.where(each == 0, 1.0, each)), noise).mul_(each)

    def along(self, x: Float[torch.Tensor, "*shape"], dim: int, noise: Noise | None = None) -> Float[torch.Tensor, "*shape"]:
        """`x` rounded along another dimension."""
        return self(x.transpose(dim, -1).contiguous(), noise).transpose(dim, -1).contiguous()

    def _scales(self, largest: Float[torch.Tensor, "*shape 1"]) -> Float[torch.Tensor, "*shape 1"]:
        """The scale of each block from its largest magnitude."""
        if self.scale is BlockScale.E8M0:
            _, exponent = torch.frexp(largest)  # a = f 2^e, 1/2 <= f < 1
            power = (exponent.long() - 1 - self.element.to.emax).clamp_(-_SCALE_RANGE, _SCALE_RANGE)
            return ((power + 1023) << 52).view(torch.float64).to(largest.dtype)  # 2^power, from its bits
        top = self.element.to.max
        if self.scale is BlockScale.E4M3:
            return _E4M3(largest / top)
        whole = (largest.amax() / (top * E4M3FN.max)).float().to(largest.dtype)
        return _E4M3(largest / (top * torch.where(whole == 0, 1.0, whole))) * whole


_E4M3 = Cast(E4M3FN, overflow=Overflow.SATURATE)
_FP4 = Cast(E2M1)

MICROSCALED = {
    "mxfp8_e4m3": Microscaled(_E4M3, 32, BlockScale.E8M0),
    "mxfp8_e5m2": Microscaled(Cast(E5M2, overflow=Overflow.SATURATE), 32, BlockScale.E8M0),
    "mxfp6_e3m2": Microscaled(Cast(E3M2), 32, BlockScale.E8M0),
    "mxfp6_e2m3": Microscaled(Cast(E2M3), 32, BlockScale.E8M0),
    "mxfp4": Microscaled(_FP4, 32, BlockScale.E8M0),
    "nvfp4": Microscaled(_FP4, 16, BlockScale.E4M3_FP32),
}
"""The published formats (OCP MX v1.0, table 1; NVFP4)."""
_NAMES = {fmt: name for name, fmt in MICROSCALED.items()}
