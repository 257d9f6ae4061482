"""In which formats a run computes, and the scaling of the loss that FP16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

_FIRST_SCALE = 2.0**16
_CLEAN_STEPS = 2000  # after which the scale is doubled, as torch.amp.GradScaler does


class Numerics(Enum):
    """Formats of weights and of products.

    `fp32`: everything in FP32, no TF32. `autocast_bf16` and `autocast_fp16`: FP32 weights under `torch.autocast`, FP16 with a
    scaled loss (Micikevicius et al. 2018). `bf16_weights`: weights, gradients and moments of the optimizer in BF16, the rest as
    under autocast.
    """

    FP32 = "fp32"
    BF16 = "autocast_bf16"
    FP16 = "autocast_fp16"
    BF16_WEIGHTS = "bf16_weights"

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if self is Numerics.BF16_WEIGHTS else torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are of a scaled loss."""
        return self is Numerics.FP16

    def casting(self, device: torch.device) -> AbstractContextManager[object]:
        """Within it the model is called."""
        if self is Numerics.FP32:
            return nullcontext()
        return torch.autocast(device.type, torch.float16 if self is Numerics.FP16 else torch.bfloat16)


class LossScale:
    """By how much the loss is multiplied, so that its gradients do not underflow FP16.

    A step whose gradients are not finite is skipped and halves the scale; 2,000 clean steps in a row double it. A power of two
    rounds nothing above the subnormals. Everything stays on the device: nothing waits for it, and a CUDA graph can hold it.

    Attributes:
        scale: the factor, 0-dim FP32.
        clean: steps since the scale last changed, 0-dim FP32.
        overflow: 1 where the gradients of this step are not finite, else 0; AdamW reads it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), _FIRST_SCALE, device=device)
        self.clean = torch.zeros((), device=device)
        self.overflow = torch.zeros((), device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "clean": self.clean}

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        torch._foreach_mul_(gradients, self.scale.reciprocal())

    def update(self, norm: Float[Tensor, ""]) -> None:
        """Take note of the norm of the unscaled gradients, before the optimizer's step."""
        self.overflow.copy_(norm.isfinite().logical_not())
        failed, clean = self.overflow > 0, self.clean + 1
        grown = clean >= _CLEAN_STEPS
        up = torch.where(grown, 2 * self.scale, self.scale)
        self.scale.copy_(torch.where(failed, self.scale / 2, up))
        self.clean.copy_(torch.where(failed | grown, torch.zeros_like(clean), clean))
