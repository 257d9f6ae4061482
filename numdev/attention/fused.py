"""Our fast kernels as operators of torch, through which autograd, autocast and `torch.compile` work without a break."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention.base import Saved
from numdev.attention.differentiable import check_dtypes
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton, TritonBackward
from numdev.errors import BadInput

_FORMATS = {fmt.dtype: fmt for fmt in (BF16, FP16, FP32)}


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    key_lengths: Sequence[int] | None = None,
    scale: float | None = None,
) -> Tensor:
    """`softmax(scale Q K^T) V` by our fast kernels, differentiable once, under `Precision.kernel(F)` of the dtype F of q, k, v.

    It calls the operator `torch.ops.numdev.attention`, which returns O and the LSE. Within autocast q, k and v are cast as torch
    casts those of `scaled_dot_product_attention`.

    Args:
        q: `[batch, heads, queries, dim]` in BF16, FP16 or FP32.
        k: `[batch, kv_heads, keys, dim]`, where kv_heads divides heads.
        v: likewise.
        causal: query i sees key j if `j <= i + Nk - Nq`.
        window: how many keys a query sees to either side, itself among them.
        key_lengths: the keys that exist, for each batch entry.
        scale: `1/sqrt(dim)` unless given.

    Raises:
        BadInput: for shapes and dtypes that do not fit.
        Unsupported: naming the field, for what no kernel has, and where no kernel can run.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    out: Tensor = torch.ops.numdev.attention(q, k, v, causal, window, key_lengths, scale)[0]
    return out


@lru_cache(maxsize=4)
def _kernels(dtype: torch.dtype) -> TritonBackward:
    if dtype not in _FORMATS:
        raise BadInput("q", str(dtype), f"give q, k and v in one of {', '.join(map(str, _FORMATS))}")
    fmt = _FORMATS[dtype]
    return TritonBackward(Triton(fmt), fmt)


def _mask(causal: bool, window: int | None, key_lengths: Sequence[int] | None) -> Mask:
    return Mask(causal, window, None if key_lengths is None else tuple(key_lengths))


@torch.library.custom_op("numdev::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: int | None = None,
    key_lengths: Sequence[int] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_dtypes(q, k, v)
    output = _kernels(q.dtype).forward(q, k, v, _mask(causal, window, key_lengths), scale)
    assert output.lse is not None, "as of each of our kernels"
    return output.out, output.lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("numdev::attention_backward", mutates_args=())
def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    window: int | None,
    key_lengths: Sequence[int] | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    do = do.contiguous() if 0 in do.stride() else do  # the gradient of a sum is a broadcast tensor, which kernels cannot read
    made = _kernels(q.dtype).backward(q, k, v, do, Saved(out, lse), _mask(causal, window, key_lengths), scale)
    return made.dq, made.dk, made.dv


@_gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor, _: object) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.numdev.attention_backward(*ctx.saved_tensors, do, *ctx.rest)
    return *gradients, *(None,) * len(ctx.rest)


_attention.register_autograd(_differentiate, setup_context=_save)
