"""The mask tensor of a model, read as a `Mask`: a causal limit, a sliding window, and a number of keys per batch entry."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported

_FIELD = "attn_mask"
_STATED = "a causal limit, a sliding window and padding behind the last key"


@dataclass
class MaskReader:
    """Reads mask tensors, and keeps the last one that it read: a model gives the same to all of its layers.

    A mask on a CPU is known by its content, since NumPy changes shared memory without a trace; one on a device, for whose content
    the host would wait, by its memory and torch's count of changes.

    Attributes:
        waits: whether a mask on a device is read, for which the host waits; False refuses it.
    """

    waits: bool = False
    _last: tuple[Tensor, tuple[object, ...], Mask] | None = field(default=None, repr=False)

    def read(self, tensor: Tensor, shape: tuple[int, ...]) -> Mask:
        """The `Mask` that says the same as a mask tensor of scores of a shape `[..., heads, queries, keys]`.

        Raises:
            BadInput: for a tensor that does not fit the scores.
            Unsupported: for one that is added to the scores, that no `Mask` states, or that the host must not wait for.
        """
        aligned = _aligned(tensor, shape)
        if aligned is not None:
            return aligned
        if tensor.requires_grad:
            raise Unsupported(_FIELD, "it is learned, and no implementation here adds to the scores or has a gradient by them")
        content = tensor.device.type == "cpu"
        known = (tensor.shape, tensor.dtype, shape) if content else _identity(tensor, shape)
        if self._last is not None and known and self._last[1] == known and (not content or torch.equal(self._last[0], tensor)):
            return self._last[2]
        self._check_device(tensor)
        mask = _read(tensor, shape)
        held = tensor.clone() if content else tensor  # holds a device's tensor: its memory is no other's while it is known
        self._last = (held, known, mask) if known else None
        return mask

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            return
        if not self.waits:
            why = f"it lies on {tensor.device.type}, and the host would have to wait to read it"
            raise Unsupported(_FIELD, f"{why}; give read_masks=True, or a model without a mask tensor (is_causal=True)")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(_FIELD, "it cannot be read while a CUDA graph is captured; give a model without a mask tensor")


def _aligned(tensor: Tensor, shape: tuple[int, ...]) -> Mask | None:
    """The mask that torch's own `causal_upper_left` and `causal_lower_right` state without holding one."""
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(tensor, bias.CausalBias):
        return None
    if tensor.variant is bias.CausalVariant.UPPER_LEFT and shape[-2] != shape[-1]:
        raise Unsupported(_FIELD, "it is aligned top left, which no Mask states for other than as many queries as keys")
    return Mask(causal=True)


def _identity(tensor: Tensor, shape: tuple[int, ...]) -> tuple[object, ...]:
    """Equal for two views of the same values, while one of them is held; empty where torch does not count changes."""
    if tensor.is_inference():
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor._version, shape


def _read(tensor: Tensor, shape: tuple[int, ...]) -> Mask:
    if tensor.ndim < 2 or not _fits(tensor.shape, shape):
        raise BadInput(_FIELD, tuple(tensor.shape), f"it must fit the scores, {tuple(shape)}")
    seen = _of_entries(_boolean(tensor), shape)
    batch, (queries, keys) = math.prod(shape[:-3]) if len(shape) > 3 else math.prod(shape[:-2]), shape[-2:]
    counted = (seen.any(-2) * torch.arange(1, keys + 1)).amax(-1).tolist()  # up to the last key that any query sees
    lengths = tuple(counted * (batch // len(counted)))
    padded = None if min(lengths) == keys else lengths
    widest = max(int(seen.sum(-1).amax()), 1)
    for causal in (False, True):
        for window in (None, widest if causal else (widest + 1) // 2):
            mask = Mask(causal, window, padded)
            if _says(mask, seen, queries, keys):
                return mask
    raise Unsupported(_FIELD, f"no Mask states it: it is none of {_STATED}; pad behind the sequences, or give is_causal=True")


def _fits(given: torch.Size, shape: tuple[int, ...]) -> bool:
    pairs = zip(reversed(given), reversed(shape), strict=False)
    return len(given) <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)


def _says(mask: Mask, seen: Tensor, queries: int, keys: int) -> bool:
    """Whether a `Mask` is the same as what is seen, `[batch or 1, queries, keys]`."""
    stated = mask.visible(queries, keys, (0, queries), (0, keys), seen.device)
    return bool(seen.all()) if stated is None else bool((stated[:, 0] == seen).all())


def _boolean(tensor: Tensor) -> Tensor:
    """Whether a key is seen. A mask of zeros and minus infinity adds nothing to a score that counts.

    Some models write the lowest number of the dtype for minus infinity. Beside a key that is seen, the P of both is exactly 0; in
    a row that sees none it is not.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bool:
        return tensor
    seen, lowest = tensor == 0, tensor == torch.finfo(tensor.dtype).min
    if not bool((seen | lowest | (tensor == float("-inf"))).all()):
        why = "it adds to the scores, which no implementation here does"
        raise Unsupported(_FIELD, f"{why}; give a boolean mask, or one of zeros and minus infinity")
    if bool((lowest.any(-1) & ~seen.any(-1)).any()):
        why = "a row sees no key and holds the lowest number, with which torch gives the mean of all values"
        raise Unsupported(_FIELD, f"{why}; give minus infinity")
    return seen


def _of_entries(seen: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[batch or 1, queries, keys]` of a mask that is the same for all heads."""
    seen = seen[(None,) * (len(shape) - seen.ndim)].expand(*(-1,) * (len(shape) - 2), *shape[-2:])
    while seen.ndim < 4:
        seen = seen.unsqueeze(-3)
    if seen.ndim > 4:
        seen = seen.expand(*shape[:-3], *seen.shape[-3:]).flatten(0, -4)
    if seen.shape[1] > 1 and seen.stride(1) != 0 and not bool((seen == seen[:, :1]).all()):
        raise Unsupported(_FIELD, "it differs between heads, which no Mask states")
    return seen[:1, 0] if seen.stride(0) == 0 else seen[:, 0]
