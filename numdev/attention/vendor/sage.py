"""SageAttention from its package, which quantises q and k to INT8 inside; it has no backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.base import KernelArithmetic, Output, check_shapes, softmax_scale
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.tiling import Order
from numdev.attention.vendor.dispatch import Packaged, Result
from numdev.errors import Unsupported


@dataclass(frozen=True)
class SageAttention(Packaged):
    """`sageattn`, inputs and output in `fmt`. Version 2 of the package chooses a kernel by the GPU."""

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET, "kernel", (BF16, FP16))

    fmt: Format = BF16

    @property
    def family(self) -> str:
        return "sageattention"

    @property
    def places(self) -> Mapping[str, str]:
        return {"sageattention": "sageattention"}

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        """The policy `sage1` of version 1, but for the output; it quantises the inputs before they are rounded to `fmt`."""
        if self.digest.startswith("sageattention 2"):
            return KernelArithmetic(self.precision, why="version 2 has other kernels for each GPU; precision=sage2 is Hopper's")
        return KernelArithmetic(Precision.parse("sage1").with_step(output=self.fmt), bc=64, order=Order.FORWARD)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """What the package cannot run is refused with its own reason. Version 1 returns no LSE."""
        check_shapes(q, k, v, mask)
        function = self.function("sageattn", q.device)
        for name in ("window", "key_lengths"):
            if getattr(mask, name) is not None:
                raise Unsupported(f"problem.{name}", "SageAttention takes no mask but a causal one; leave it out")
        if mask.causal and q.shape[-2] != k.shape[-2]:
            raise Unsupported("problem.causal", "SageAttention has a causal limit only for as many queries as keys")
        factor = softmax_scale(q, scale)
        q, k, v = q.to(self.storage), k.to(self.storage), v.to(self.storage)

        def run() -> Result:
            # Version 1 takes the mean of the keys out of k in place, and ignores that an LSE is wanted.
            result = function(q, k.clone(), v, is_causal=mask.causal, sm_scale=factor, return_lse=True)
            return result if isinstance(result, tuple) else (result, None)

        return self.launched(run, q, k, v, mask, factor)
