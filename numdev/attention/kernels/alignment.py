"""Which tensors the copy engine (TMA) of a Hopper GPU can read."""

from __future__ import annotations

from torch import Tensor

_BYTES = 16  # of which every address and stride is a multiple (CUDA C++ Programming Guide, tensor maps)


def misalignment(**tensors: Tensor) -> str | None:
    """The reason why the copy engine cannot read one of these tensors, the first such one; None if it can read all."""
    for name, tensor in tensors.items():
        if not _is_aligned(tensor):
            return f"the copy engine needs {name} and its rows aligned to {_BYTES} bytes, and a contiguous head_dim"
    return None


def _is_aligned(tensor: Tensor) -> bool:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    inner = tensor.stride(-1) == 1
    return (
        inner and tensor.data_ptr() % _BYTES == 0 and all(s > 0 and s * tensor.element_size() % _BYTES == 0 for s in strides[:-1])
    )
