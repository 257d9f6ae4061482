"""Descriptors of tensors for the copy engine of a Hopper GPU, and how many heads its L2 cache holds."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_L2_BYTES = 24e6  # half of the L2 cache of an H100: what the heads that are processed together may read


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of a tensor `[batch, heads, tokens, dim]`, in blocks of `rows` tokens and `columns` of dim."""
    block = [1, 1, rows, columns]
    # A dimension of size 1 may have any stride in torch; the copy engine still requires a multiple of 16 bytes.
    strides = [s if n > 1 else tensor.shape[-1] for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, _layout(rows, columns, tensor.dtype))


def row_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of one number per row, `[batch, heads, queries]` in FP32, in blocks of `rows`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows], layout)


@lru_cache(maxsize=32)
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], DTYPES[dtype])


def heads_in_cache(tokens: int, head_dim: int) -> int:
    """How many pairs of tensors `[tokens, head_dim]` of 16 bits share half of the cache; at least one."""
    return max(1, int(_L2_BYTES / (4 * tokens * head_dim)))
