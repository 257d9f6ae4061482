"""PyTorch's scaled_dot_product_attention, pinned to one of its backends, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import KernelArithmetic, Output, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Recompute
from numdev.attention.tiling import KernelLaunch, Order
from numdev.attention.vendor.dispatch import IN_TORCH, ByAutograd, InDtype, Result, dense, hides_rows
from numdev.attention.vendor.flash_attn import flash_2, flash_2_gradients  # PyTorch's flash is FlashAttention-2
from numdev.errors import BadInput, Unsupported
from numdev.settings import setting

_FIELD = "attention.backend"


class Backend(Enum):
    """Which of PyTorch's implementations."""

    FLASH = "flash"
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATH = "math"


_BACKENDS = {
    Backend.FLASH: SDPBackend.FLASH_ATTENTION,
    Backend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Backend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Backend.MATH: SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sdpa(InDtype):
    """`torch.nn.functional.scaled_dot_product_attention` by one backend and no other, inputs and output in `fmt`."""

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | {_FIELD}, "kernel", IN_TORCH)
    field: ClassVar[str] = _FIELD

    backend: Backend = setting(Backend.FLASH, "which implementation of PyTorch is asked for: flash, cudnn, efficient or math")
    fmt: Format = BF16

    @property
    def family(self) -> str:
        return self.backend.value

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """The math backend is vanilla attention, on FP32 copies of 16-bit inputs."""
        if self.backend is Backend.MATH:
            width = Width(max(4.0, self.fmt.bits / 8), self.fmt.bits / 8)
            return CostModel(Algorithm.VANILLA, width, holds_scores=True, packed_rows=1)
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.fmt), packed_rows=1)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        policy = self.precision
        if self.backend is Backend.FLASH:
            return flash_2(policy, shape)
        if self.backend is Backend.EFFICIENT:  # the names of its kernels: 64x64, 64x128, 32x128
            return KernelArithmetic(policy, bc=64 if shape.head_dim <= 64 else 128, order=Order.FORWARD)
        return KernelArithmetic(policy)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """No LSE: the function does not return it. What the backend cannot run is refused with PyTorch's own reason."""
        check_shapes(q, k, v, mask)
        if q.device.type != "cuda" and self.backend not in (Backend.FLASH, Backend.MATH):
            raise Unsupported(_FIELD, f"{self.backend.value} runs on CUDA devices; on a CPU there are flash and math")
        factor = softmax_scale(q, scale)
        q, k, v = q.to(self.storage), k.to(self.storage), v.to(self.storage)
        arguments = _arguments(self.backend, mask, q.shape[0], q.shape[-2], k.shape[-2], q.device)
        arguments |= {"scale": factor, "enable_gqa": q.shape[1] != k.shape[1]}

        def run() -> Result:
            with sdpa_kernel([_BACKENDS[self.backend]]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments), None

        return self.launched(run, q, k, v, mask, factor)


def _arguments(backend: Backend, mask: Mask, batch: int, queries: int, keys: int, device: torch.device) -> dict[str, Any]:
    """The arguments that state the mask. torch aligns `is_causal` top left, numdev bottom right: equal only for equal lengths."""
    causal = mask == Mask(causal=True)
    if mask.is_none:
        return {}
    if causal and queries == keys:
        return {"is_causal": True}
    if hides_rows(mask, batch, queries, keys):
        raise Unsupported("problem", "some rows see no key, for which PyTorch does not define a result")
    seen = dense(mask, queries, keys, device)
    if seen is None:
        return {}
    if causal and backend in (Backend.FLASH, Backend.EFFICIENT) and device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # late: it imports torch's compiler

        return {"attn_mask": causal_lower_right(queries, keys)}
    if backend is Backend.FLASH:
        field = "problem.window" if mask.window is not None else "problem.key_lengths" if mask.key_lengths else "problem.causal"
        raise Unsupported(field, "flash takes no mask but a causal one, on a CPU only for as many queries as keys")
    return {"attn_mask": seen.expand(batch, 1, queries, keys)}


_NAMES = ("_saved_logsumexp", "_saved_log_sumexp")  # by the names of torch's derivatives.yaml


@dataclass(frozen=True)
class SavingSdpa(Sdpa):
    """`Sdpa` as it runs when gradients are required: O and LSE are those that PyTorch's own backward pass reads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        with torch.enable_grad():
            q, k, v = (x.detach().to(self.storage).requires_grad_() for x in (q, k, v))
            output = super().__call__(q, k, v, mask, scale)
        return Output(output.out.detach(), self._saved_lse(output.out), launch=output.launch)

    def _saved_lse(self, out: Tensor) -> Tensor:
        """LSE `[batch, heads, queries]`: cuDNN's has one more dimension, that of efficient attention more rows than queries."""
        node: Any = out.grad_fn
        while node is not None:
            for name in _NAMES:
                lse = getattr(node, name, None)
                if lse is not None:
                    return (lse.squeeze(-1) if lse.ndim == out.ndim else lse)[..., : out.shape[-2]].detach()
            node = node.next_functions[0][0] if node.next_functions else None
        raise Unsupported("attention.backend", f"{self.backend.value} saves no LSE for its backward pass")


@dataclass(frozen=True)
class SdpaBackward(ByAutograd):
    """The gradients of `torch.nn.functional.scaled_dot_product_attention` by one backend and no other; see `Sdpa`.

    PyTorch's kernels round dK and dV of each head before they sum those of the heads that share a KV head.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | {"backward.backend"}, "kernel", IN_TORCH)
    field: ClassVar[str] = "backward.backend"

    backend: Backend = setting(Backend.FLASH, "which implementation of PyTorch is asked for: flash, cudnn, efficient or math")
    fmt: Format = BF16

    @property
    def forward(self) -> Sdpa:
        return Sdpa(self.backend, self.fmt)

    @property
    def forward_pass(self) -> Sdpa:
        """It returns the LSE that the backward pass reads; `math` saves none."""
        return self.forward if self.backend is Backend.MATH else SavingSdpa(self.backend, self.fmt)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        """Of the CUDA kernel if there is a GPU, else of the CPU kernel.

        Raises:
            BadInput: for heads that share a KV head: no policy here rounds dK and dV of each head before they are summed.
        """
        if shape.heads != shape.kv_heads:
            hint = "give as many as heads: PyTorch rounds dK and dV of each head before it sums them, which no policy expresses"
            raise BadInput("problem.kv_heads", shape.kv_heads, hint)
        if self.backend is Backend.FLASH:
            return flash_2_gradients(self.fmt, shape) if torch.cuda.is_available() else _flash_on_cpu(self.fmt, shape)
        if self.backend is Backend.MATH:
            return KernelArithmetic(self.precision, why="it has no tiles")
        return super().arithmetic(shape, mask)


def _flash_on_cpu(fmt: Format, shape: Shape) -> KernelArithmetic[BackwardPrecision]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu_backward`, whose running sums are in the dtype of its outputs.

    It multiplies dS by the scale before dS is rounded. If the scale is a power of two, this equals scaling the sums at the end;
    otherwise it rounds once less.
    """
    policy = BackwardPrecision.kernel(fmt).with_step(dq_sum=fmt, dk_sum=fmt, dv_sum=fmt)
    br = 256 if shape.queries >= 768 else 64 if shape.queries >= 192 else 32
    return KernelArithmetic(policy, recompute=Recompute(), br=br, bc=512, order=Order.FORWARD, query_order=Order.FORWARD)
