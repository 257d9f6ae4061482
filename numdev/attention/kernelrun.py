"""A tiled run by the instrumented kernel: its request, its launch, and what the kernel refuses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP16, FP32
from numdev.attention.base import Output, softmax_scale
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernels.launch import Launch, with_stages
from numdev.attention.kernels.runtime import check_scale, device_of
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax, ScaleOn
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, Unsupported

INSTRUMENTED = "numdev instrumented"


@dataclass(frozen=True)
class KernelRun:
    """The portable kernel with the casts of a policy compiled in.

    Attributes:
        precision, tiling, softmax: as those of `Tiled`.
    """

    precision: Precision
    tiling: Tiling
    softmax: OnlineSoftmax

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, FP32 out, of shapes that fit together.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, for what the kernel does not have.
        """
        from numdev.attention.kernels import portable

        factor, launch = self._factor(q, scale), self._launch(q)
        request = portable.Request(*self._settings, exactly=True, warps=launch.warps, stages=launch.stages)
        if self.softmax.scale_on is ScaleOn.QUERIES:
            log_scale = self.softmax.log_scale
            q, factor = self.precision.scale_queries(q.float(), factor * log_scale), 1.0 / log_scale
        out, lse = portable.run(request, q.to(self.storage), k.to(self.storage), v.to(self.storage), mask, factor)
        used = KernelLaunch(INSTRUMENTED, launch.br, launch.bc, launch.warps, launch.stages, self.tiling.splits)
        return Output(self.precision.output.apply_(out), lse, launch=used)

    def refusal(self, q: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> str | None:
        """Why the kernel does not take a run, in its own words; None where it does, unless a tile does not fit into the GPU."""
        from numdev.attention.kernels import portable

        try:
            factor = self._factor(q, scale)
            portable.check_dims(q, v)
            portable.code(portable.Request(*self._settings, exactly=True), mask, q.shape[-1], factor * self.softmax.log_scale)
        except (BadInput, Unsupported) as error:
            return str(error)
        return None

    @property
    def storage(self) -> torch.dtype:
        """The dtype in which the inputs are held, so that a call converts nothing."""
        from numdev.attention.kernels import portable

        return portable.storage(self.precision)

    def _factor(self, q: Tensor, scale: float | None) -> float:
        if self.precision.carrier is not torch.float32:
            raise Unsupported("precision", "kernels compute in FP32, and a step of this policy needs FP64; use attention=tiled")
        return check_scale(softmax_scale(q, scale))

    def _launch(self, q: Tensor) -> Launch:
        """Four warps hold a tile of 64 x 64 in registers, and eight a larger one; as many stages as fit, up to two."""
        br, bc, stored = self.tiling.br, self.tiling.bc, FP32 if self.storage == torch.float32 else FP16
        return with_stages(Launch(br, bc, 8 if br * bc > 64 * 64 else 4, 2), stored, q.shape[-1], device_of(q.device))

    @property
    def _settings(self) -> tuple[Precision, Tiling, OnlineSoftmax]:
        return self.precision, self.tiling, self.softmax
