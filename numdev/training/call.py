"""One call of torch's `scaled_dot_product_attention`: as a model makes it, and as implementations of attention take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported
from numdev.training.masks import MaskReader

_NO_DROPOUT = "no implementation here drops probabilities; set the model's dropout to 0, or call model.eval()"


@dataclass(frozen=True)
class Asked:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, under torch's own names.

    Attributes:
        query: `[..., heads, queries, dim]`.
        key: `[..., kv_heads, keys, dim]`.
        value: `[..., kv_heads, keys, values]`.
        attn_mask: boolean, true where a key is seen; or added to the scores.
        dropout_p: share of P that is dropped.
        is_causal: key `j` is seen by query `i` only if `j <= i`: aligned top left.
        scale: of the scores; `1/sqrt(dim)` where it is None.
        enable_gqa: whether heads share KV heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As torch's function takes them."""
        place = self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal
        return place, {"scale": self.scale, "enable_gqa": self.enable_gqa}

    def cast(self) -> Asked:
        """Within autocast with q, k and v in its dtype: torch's function is on autocast's list. FP64 is left alone, as there."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)

        def one(x: Tensor) -> Tensor:
            return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

        return replace(self, query=one(self.query), key=one(self.key), value=one(self.value))


@dataclass(frozen=True)
class Call:
    """What implementations of attention take.

    Attributes:
        q: `[batch, heads, queries, dim]`.
        k: `[batch, kv_heads, keys, dim]`.
        v: `[batch, kv_heads, keys, values]`.
        mask: which keys a query sees.
        scale: of the scores; `1/sqrt(dim)` where it is None.
        leading: the dimensions of the model's own output before queries and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    leading: tuple[int, ...]

    @staticmethod
    def of(asked: Asked, reader: MaskReader) -> Call:
        """The call that computes what is asked for.

        Raises:
            BadInput: naming the argument of torch's function, for shapes that do not fit together.
            Unsupported: naming the argument, for what no implementation here has, or what no `Mask` states.
        """
        _check(asked)
        asked = asked.cast()
        q, k, v = (_four(x) for x in (asked.query, asked.key, asked.value))
        if q.shape[1] != k.shape[1] and not asked.enable_gqa and k.shape[1] != 1:
            raise BadInput("enable_gqa", False, f"q has {q.shape[1]} heads and k {k.shape[1]}; give enable_gqa=True")
        queries, keys = q.shape[-2], k.shape[-2]
        mask = Mask()
        if asked.is_causal and asked.attn_mask is not None:
            raise BadInput("is_causal", True, "give it or attn_mask, not both")
        if asked.is_causal:
            if queries > keys:
                why = f"torch aligns it top left, so that the last {queries - keys} queries see every key, which no Mask states"
                raise Unsupported("is_causal", f"{why}; call attention for these queries apart")
            k, v = k[..., :queries, :], v[..., :queries, :]  # what is beyond, no query sees: the rest has one alignment
            mask = Mask(causal=True)
        elif asked.attn_mask is not None:
            mask = reader.read(asked.attn_mask, (*asked.query.shape[:-2], queries, keys))
        return Call(q, k, v, mask, asked.scale, tuple(asked.query.shape[:-2]))

    def shaped(self, out: Tensor) -> Tensor:
        """O as the model expects it."""
        return out if len(self.leading) == 2 else out.reshape(*self.leading, *out.shape[-2:])


def _check(asked: Asked) -> None:
    tensors = {"query": asked.query, "key": asked.key, "value": asked.value}
    for name, tensor in tensors.items():
        if tensor.is_nested:
            raise Unsupported(name, "it is a nested tensor; pad the sequences, or give enable_nested_tensor=False to the model")
        if tensor.ndim < 2 or 0 in tensor.shape:
            raise BadInput(name, tuple(tensor.shape), "give [..., heads, tokens, head_dim], none of them 0")
        if tensor.ndim != asked.query.ndim:
            mend = (
                f"give it the {asked.query.ndim} dimensions of query; no implementation here repeats one over the other's batch"
            )
            raise BadInput(name, tuple(tensor.shape), mend)
    if asked.dropout_p > 0:
        raise Unsupported("dropout_p", f"{asked.dropout_p:g}: {_NO_DROPOUT}")


def _four(x: Tensor) -> Tensor:
    """`[batch, heads, tokens, dim]`; without heads there is one, and what is before them counts as batch."""
    while x.ndim < 4:
        x = x.unsqueeze(-3)
    return x if x.ndim == 4 else x.flatten(0, -4)
