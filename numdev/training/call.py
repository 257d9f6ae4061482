"""One call of torch's `scaled_dot_product_attention`: as a model makes it, and as implementations of attention take it.

The mask tensor of a model is read as a `Mask`: a causal limit, a sliding window, and a number of keys per batch entry where these
state it, which kernels have; else as the tensor that it is.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from numdev.attention.mask import Bias, Dropout, Mask
from numdev.errors import BadInput, Unsupported

_MASK = "attn_mask"


@dataclass(frozen=True)
class Arguments:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, under torch's own names and with its defaults.

    A softcap is one of `softcapped_attention` alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None

    def cast(self) -> Arguments:
        """Within autocast with q, k and v in its dtype: torch's function is on autocast's list. FP64 is left alone, as there."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (self.query, self.key, self.value))
        return replace(self, query=q, key=k, value=v)


@dataclass(frozen=True)
class Call:
    """A call as implementations of attention take it: q, k and v are `[batch, heads, tokens, dim]`, the scale may be None.

    `leading` are the dimensions of the model's own output before queries and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    leading: tuple[int, ...]

    @staticmethod
    def of(arguments: Arguments, reader: MaskReader) -> Call:
        """The call that computes what torch's function would with these arguments.

        Raises BadInput or Unsupported, naming the argument, for shapes that do not fit together, for what no implementation here
        has, and for a mask that is learned.
        """
        for name, tensor in (("query", arguments.query), ("key", arguments.key), ("value", arguments.value)):
            if tensor.is_nested:
                hint = "it is a nested tensor; pad the sequences, or give enable_nested_tensor=False to the model"
                raise Unsupported(name, hint)
            if tensor.ndim < 2 or 0 in tensor.shape:
                raise BadInput(name, tuple(tensor.shape), "give [..., heads, tokens, head_dim], none of them 0")
            if (dims := arguments.query.ndim) != tensor.ndim:
                hint = f"give it the {dims} dimensions of query; no implementation here repeats one over the other's batch"
                raise BadInput(name, tuple(tensor.shape), hint)
        if arguments.is_causal and arguments.attn_mask is not None:
            raise BadInput("is_causal", True, "give it or attn_mask, not both")
        arguments = arguments.cast()
        q, k, v = (_four(x) for x in (arguments.query, arguments.key, arguments.value))
        if q.shape[1] != k.shape[1] and not arguments.enable_gqa and k.shape[1] != 1:
            raise BadInput("enable_gqa", False, f"q has {q.shape[1]} heads and k {k.shape[1]}; give enable_gqa=True")
        leading, (queries, keys), mask = arguments.query.shape[:-2], (q.shape[-2], k.shape[-2]), Mask()
        if arguments.is_causal:
            if queries > keys:
                why = f"torch aligns it top left, so that the last {queries - keys} queries see every key, which no Mask states"
                raise Unsupported("is_causal", f"{why}; call attention for these queries apart")
            k, v = k[..., :queries, :], v[..., :queries, :]  # what is beyond, no query sees: the rest has one alignment
            mask = Mask(causal=True)
        elif arguments.attn_mask is not None:
            mask = reader.read(arguments.attn_mask, (*leading, queries, keys))
        if arguments.dropout_p > 0:
            kept = reader.kept(arguments.query, keys, arguments.dropout_p)
            mask = replace(mask, dropout=Dropout(_four(kept)[..., : k.shape[-2]], arguments.dropout_p))
        if arguments.softcap is not None:
            mask = replace(mask, softcap=arguments.softcap)
        return Call(q, k, v, mask, arguments.scale, tuple(leading))

    def shaped(self, out: Tensor) -> Tensor:
        """O as the model expects it."""
        return out if len(self.leading) == 2 else out.reshape(*self.leading, *out.shape[-2:])


def _four(x: Tensor) -> Tensor:
    """`[batch, heads, tokens, dim]`; without heads there is one, and what is before them counts as batch."""
    return x if x.ndim == 4 else x.reshape(-1, x.shape[-3] if x.ndim > 4 else 1, *x.shape[-2:])


@dataclass
class MaskReader:
    """Reads mask tensors, and keeps the last one of a device: a model gives the same to all of its layers.

    A mask on a device is refused unless the host `waits` to read it.
    """

    waits: bool = False
    learns: bool = False  # whether who computes has a gradient by a mask tensor
    drops: bool = False  # whether dropout is drawn
    _last: tuple[Tensor, tuple[object, ...], Mask] | None = field(default=None, repr=False)

    def read(self, tensor: Tensor, shape: tuple[int, ...]) -> Mask:
        """The `Mask` that says the same as a mask tensor of scores of a shape `[..., heads, queries, keys]`.

        Raises BadInput for a tensor that does not fit the scores; Unsupported for one that is learned, that hides every key by
        the lowest number, or that the host must not wait for.
        """
        bias = sys.modules.get("torch.nn.attention.bias")
        if bias is not None and isinstance(tensor, bias.CausalBias):  # states a mask without holding one
            if tensor.variant is bias.CausalVariant.UPPER_LEFT and shape[-2] != shape[-1]:
                raise Unsupported(_MASK, "it is aligned top left, which no Mask states for other than as many queries as keys")
            return Mask(causal=True)
        learned = tensor.requires_grad and torch.is_grad_enabled()
        if learned and not self.learns:
            hint = "it is learned; ExactBackward and TiledBackward have a gradient by it within attend, else use torch.no_grad()"
            raise Unsupported(_MASK, hint)
        if tensor.device.type == "cpu":
            if not learned:
                return _read(tensor, shape)
            source = _of_scores(tensor, shape)
            return Mask(bias=Bias(_biases(source), source))
        # Equal for two views of the same values, while one of them is held; torch counts no changes of inference tensors.
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, shape
        known = () if tensor.is_inference() else (*place, tensor._version)
        if known and self._last is not None and self._last[1] == known:
            return self._last[2]
        if not self.waits:
            why = f"it lies on {tensor.device.type}, and the host would have to wait to read it"
            raise Unsupported(_MASK, f"{why}; give read_masks=True, or a model without a mask tensor (is_causal=True)")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(_MASK, "it cannot be read while a CUDA graph is captured; give a model without a mask tensor")
        mask = _read(tensor, shape)
        self._last = (tensor, known, mask)  # holds the tensor: its memory is no other's while it is known
        return mask

    def kept(self, query: Tensor, keys: int, p: float) -> Tensor:
        """What dropout keeps of `[..., queries, keys]`, drawn from torch's generator as torch's matrix products draw it."""
        if not self.drops:
            hint = "give dropout=True to attend or shadow, set the model's dropout to 0, or call model.eval()"
            raise Unsupported("dropout_p", f"{p:g}: {hint}")
        return query.new_empty(*query.shape[:-1], keys).bernoulli_(1 - p).bool()


def _read(tensor: Tensor, shape: tuple[int, ...]) -> Mask:
    values = _biases(_of_scores(tensor, shape))
    seen = values > float("-inf")
    if bool(((values != 0) & seen).any()) or not bool((seen == seen[:, :1]).all()):
        return Mask(bias=Bias(values))
    seen = seen[:, 0]
    batch, (queries, keys) = math.prod(shape[:-3]) if len(shape) > 3 else math.prod(shape[:-2]), shape[-2:]
    counted = (seen.any(-2) * torch.arange(1, keys + 1)).amax(-1).tolist()  # up to the last key that any query sees
    lengths = tuple(counted * (batch // len(counted)))
    padded = None if min(lengths) == keys else lengths
    widest = max(int(seen.sum(-1).amax()), 1)
    for causal in (False, True):
        for window in (None, widest if causal else (widest + 1) // 2):
            mask = Mask(causal, window, padded)
            visible = mask.visible(queries, keys, (0, queries), (0, keys), seen.device)
            if bool(seen.all() if visible is None else (visible[:, 0] == seen).all()):
                return mask
    return Mask(bias=Bias(values))


def _biases(tensor: Tensor) -> Tensor:
    """What is added to the scores, in FP64. Where a mask only hides, the lowest number of its dtype counts as minus infinity.

    Some models write that. Beside a key that is seen, the P of both is exactly 0; in a row that sees none it is not.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bool:
        return torch.zeros(tensor.shape, dtype=torch.float64).masked_fill_(~tensor, float("-inf"))
    lowest = torch.finfo(tensor.dtype).min
    if bool(((tensor <= lowest / 2) & (tensor > float("-inf"))).any(-1).logical_and((tensor <= lowest / 2).all(-1)).any()):
        why = "a row sees no key and holds the lowest number, with which torch gives the mean of all values"
        raise Unsupported(_MASK, f"{why}; give minus infinity")
    return tensor.double().masked_fill(tensor == lowest, float("-inf"))


def _of_scores(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[batch or 1, heads or 1, queries, keys]`, of a tensor that fits scores of a shape."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    if not 2 <= x.ndim <= len(shape) or not all(size in (1, other) for size, other in pairs):
        raise BadInput(_MASK, tuple(x.shape), f"it must fit the scores, {tuple(shape)}")
    x = x[(None,) * (len(shape) - x.ndim)].expand(*(-1,) * (len(shape) - 2), *shape[-2:])
    x = _four(x if x.ndim < 5 else x.expand(*shape[:-3], *x.shape[-3:]))
    return x[: 1 if x.stride(0) == 0 else None, : 1 if x.stride(1) == 0 else None]
