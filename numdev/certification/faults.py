"""Faults of structure that kernels have shipped with, by exact attention of what the faulty kernel computes.

Each fault gives out and LSE in FP64. Their difference from golden, added to the declared prediction, is what a kernel of the
declared arithmetic with that fault returns, but for errors of rounding that are small beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from numdev.attention.tiling import Order, Tiling
from numdev.certification.cases import Inputs
from numdev.certification.catalogue import Outputs

_NEVER = float("-inf")
_LATE = 4  # of the tiles that a fault can be in, the first ones
_SPLITS = (2, 4, 8)
TITLES = {
    "limit=+1": "a causal limit of one key too many",
    "limit=-1": "a causal limit of one key too few",
    "limit=top left": "a causal limit aligned at the first key, not at the last",
    "window=+1": "a window of one key too many",
    "window=-1": "a window of one key too few",
    "lengths ignored": "padded keys that are read",
    "lengths as zeros": "padded keys that count as zeros",
    "heads interleaved": "heads of q mapped to heads of k and v in turn",
    "last head zero": "a last head that is not computed",
    "last tile dropped": "a ragged last tile left out",
    "padding counted": "padding of the last tile counted in the row sum",
    "v shifted": "v of one tile read a key too early",
    "rescale missed": "one rescale of the accumulator missed",
    "rescale of l missed": "one rescale of the row sum missed",
    "splits unweighed": "splits of the keys averaged without their LSE",
}


def exact(
    inputs: Inputs, seen: Tensor, *, head: Tensor | None = None, v: Tensor | None = None, **changed: Tensor | float
) -> Outputs:
    """Attention in FP64.

    Args:
        inputs: of the case.
        seen: whether each query sees each key.
        head: the head of k and v that each head of q reads; the usual one unless given.
        v: in place of that of the inputs.
        changed: `weights`, factors of the terms of O; `weights_of_sum`, of those of l; `more`, added to l in units of exp(0).
    """
    q, k, own = (x.double() for x in inputs.qkv)
    v = own if v is None else v.double()
    heads = torch.arange(q.shape[1])
    head = heads // (q.shape[1] // k.shape[1]) if head is None else head
    k, v = inputs.mask.without_padding(k)[:, head], (inputs.mask.without_padding(v))[:, head]
    s = (q @ k.mT * inputs.scale).masked_fill(~seen, _NEVER)
    m = s.amax(-1, keepdim=True)
    m = m.masked_fill(m == _NEVER, 0.0)
    p = torch.exp(s - m)
    total = (p * changed.get("weights_of_sum", 1.0)).sum(-1, keepdim=True) + changed.get("more", 0.0) * torch.exp(-m)
    out = (p * changed.get("weights", 1.0)) @ v / total.masked_fill(total == 0, 1.0)
    return {"out": out, "lse": (m + total.log()).squeeze(-1)}


def seen_keys(inputs: Inputs, *, shift: int | None = None, more: int = 0, window: int = 0, lengths: bool = True) -> Tensor:
    """Whether each query sees each key `[batch or 1, 1, queries, keys]`: as the mask says, or with limits that are off."""
    mask, queries, keys = inputs.mask, inputs.tensors["q"].shape[-2], inputs.tensors["k"].shape[-2]
    position = torch.arange(queries)[:, None] + (keys - queries if shift is None else shift)
    key = torch.arange(keys)[None]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if mask.causal:
        seen = seen & (key <= position + more)
    if mask.window is not None:
        seen = seen & ((position - key).abs() < mask.window + window)
    if lengths and mask.key_lengths is not None:
        seen = seen & (key < torch.tensor(mask.key_lengths)[:, None, None, None])
    return seen


def structural(inputs: Inputs, tiling: Tiling) -> Iterator[tuple[str, Outputs]]:
    """The faults that change the result of these inputs in these tiles; behind # stands the tile in which a fault is."""
    tiling = replace(tiling, splits=1)
    yield from _limits(inputs)
    yield from _heads(inputs)
    yield from _tiles(inputs, tiling)
    yield from _rescales(inputs, tiling)


def _limits(inputs: Inputs) -> Iterator[tuple[str, Outputs]]:
    mask, usual = inputs.mask, seen_keys(inputs)
    changed = {
        "limit=+1": seen_keys(inputs, more=1),
        "limit=-1": seen_keys(inputs, more=-1),
        "limit=top left": seen_keys(inputs, shift=0),
        "window=+1": seen_keys(inputs, window=1),
        "window=-1": seen_keys(inputs, window=-1),
    }
    for name, seen in changed.items():
        if not torch.equal(seen, usual):
            yield name, exact(inputs, seen)
    if mask.key_lengths is not None:
        unlimited = Inputs(inputs.tensors, type(mask)(mask.causal, mask.window), inputs.scale)
        yield "lengths ignored", exact(unlimited, seen_keys(inputs, lengths=False))
        yield "lengths as zeros", exact(inputs, seen_keys(inputs, lengths=False))


def _heads(inputs: Inputs) -> Iterator[tuple[str, Outputs]]:
    heads, kv_heads, seen = inputs.tensors["q"].shape[1], inputs.tensors["k"].shape[1], seen_keys(inputs)
    if heads != kv_heads:
        yield "heads interleaved", exact(inputs, seen, head=torch.arange(heads) % kv_heads)
    whole = exact(inputs, seen)
    yield "last head zero", whole | {"out": whole["out"] * (torch.arange(heads) < heads - 1)[:, None, None]}


def _tiles(inputs: Inputs, tiling: Tiling) -> Iterator[tuple[str, Outputs]]:
    seen, v, keys, bc = seen_keys(inputs), inputs.tensors["v"], inputs.tensors["k"].shape[-2], tiling.bc
    key = torch.arange(keys)
    if keys % bc and keys > bc:
        yield "last tile dropped", exact(inputs, seen & (key < keys // bc * bc))
    if keys % bc:
        yield "padding counted", exact(inputs, seen, more=float(bc - keys % bc))
    for place, (start, stop) in enumerate(tiling.key_tiles(keys)[0][:_LATE]):
        if place > 0 and start > 0:
            shifted = v.clone()
            shifted[:, :, start:stop] = v[:, :, start - 1 : stop - 1]
            yield f"v shifted#{place}", exact(inputs, seen, v=shifted)
    for splits in _SPLITS:
        parts = Tiling(bc=bc, splits=splits).key_tiles(keys)
        ranges = [(min(tile[0] for tile in part), max(tile[1] for tile in part)) for part in parts if part]
        if len(ranges) == splits and tiling.order is Order.FORWARD:
            of_parts = [exact(inputs, seen & (key >= start) & (key < stop))["out"] for start, stop in ranges]
            yield f"splits unweighed#{splits}", {"out": torch.stack(of_parts).mean(0), "lse": exact(inputs, seen)["lse"]}


def _rescales(inputs: Inputs, tiling: Tiling) -> Iterator[tuple[str, Outputs]]:
    """The rescale at a tile missed, so that what was added before it has a factor `exp(m' - m)` too many."""
    (q, k, _), seen = (x.double() for x in inputs.qkv), seen_keys(inputs)
    k = inputs.mask.without_padding(k).repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q @ k.mT * inputs.scale).masked_fill(~seen, _NEVER)
    tiles = tiling.key_tiles(k.shape[-2])[0]
    largest = torch.stack([s[..., start:stop].amax(-1) for start, stop in tiles], -1).cummax(-1).values
    rank = torch.empty(k.shape[-2], dtype=torch.long)
    for place, (start, stop) in enumerate(tiles):
        rank[start:stop] = place
    for place in range(1, min(_LATE, len(tiles))):
        rise = (largest[..., place] - largest[..., place - 1]).nan_to_num(0.0, posinf=0.0)
        weights = torch.where(rank < place, rise.exp()[..., None], 1.0)
        yield f"rescale missed#{place}", exact(inputs, seen, weights=weights)
        yield f"rescale of l missed#{place}", exact(inputs, seen, weights_of_sum=weights)
