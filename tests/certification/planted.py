"""Kernels in plain PyTorch, right ones and ones with a planted fault: FP32 inside, BF16 outside, tiles of their own.

They share no code with numdev's emulation, so that an error of that cannot hide one of the judgement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from numdev.attention.mask import Mask

_NEVER = float("-inf")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POLYNOMIALS = {2: (1.0, 0.6565, 0.3435), 3: (1.0, 0.695146143, 0.227564394, 0.077119090)}


def rounded(x: Tensor, fmt: str) -> Tensor:
    """x rounded to a format, in FP32."""
    if fmt == "e4m3":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return x if fmt == "fp32" else x.to(_DTYPES[fmt]).float()


@dataclass(frozen=True)
class Planted:
    """Tiled attention as an author might write it; each field is a choice of design or a fault.

    Attributes:
        bc, reverse, splits, binary, lazy: tiles of keys, their order, split keys, 2^x, and the threshold of rescaling.
        s, m, alpha, row_sum, o, kept, p, divide, lse: the format in which each is stored.
        out: that of the output.
        degree: of a polynomial for 2^f, or 0.
        bug: the name of a fault of structure.
    """

    bc: int = 64
    reverse: bool = False
    splits: int = 1
    binary: bool = False
    lazy: float = 0.0
    s: str = "fp32"
    m: str = "fp32"
    alpha: str = "fp32"
    row_sum: str = "fp32"
    o: str = "fp32"
    kept: str = "fp32"
    p: str = "bf16"
    divide: str = "fp32"
    lse: str = "fp32"
    out: str = "bf16"
    p_scale: float = 1.0
    sum_rounded: bool = False
    scale_q: bool = False
    factor: float = 1.0
    degree: int = 0
    bug: str = ""

    def but(self, **changed: Any) -> Planted:
        return replace(self, **changed)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        if self.bug == "changes q":
            q.mul_(1.015625)
        heads, kv_heads = q.shape[1], k.shape[1]
        head = torch.arange(heads) % kv_heads if self.bug == "heads interleaved" else torch.arange(heads) // (heads // kv_heads)
        q, k, v = q.float(), k.float()[:, head], v.float()[:, head]
        scale *= self.factor
        if mask.key_lengths is not None and self.bug != "padding leaks":
            gone = (torch.arange(k.shape[2])[None] >= torch.tensor(mask.key_lengths)[:, None])[:, None, :, None]
            k, v = k.masked_fill(gone, 0.0), v.masked_fill(gone, 0.0)
        if self.scale_q:
            q, scale = rounded(q * scale, "bf16"), 1.0
        seen = self.seen(q.shape[2], k.shape[2], mask)
        parts = [self.part(q, k, v, seen, tiles, scale) for tiles in self.tiles(k.shape[2])]
        out, lse = self.combined(parts)
        if self.bug in ("empty rows mean", "empty rows nan"):
            bad = v.mean(-2, keepdim=True).expand_as(out) if "mean" in self.bug else torch.full_like(out, math.nan)
            out = torch.where(seen.any(-1, keepdim=True).expand_as(lse), out, bad)
        if self.bug == "last head zero":
            out = out * (torch.arange(heads) < max(heads - 1, 1))[:, None, None]
        if self.bug == "one element":
            out = out.clone()
            out.view(-1)[777_777::1_000_003] += 0.02
        lse = {"base 2": lse / math.log(2), "times ln 2": lse * math.log(2)}.get(self.lse, lse)
        lse = rounded(lse, self.lse) if self.lse in ("bf16", "fp16") else lse
        return (out.float() if self.out == "fp32" else rounded(out, self.out).bfloat16()), lse.squeeze(-1)

    def seen(self, queries: int, keys: int, mask: Mask) -> Tensor:
        shift = 0 if self.bug == "limit top left" else keys - queries
        i, j = torch.arange(queries)[:, None] + shift, torch.arange(keys)[None]
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if mask.causal:
            seen = seen & (j <= i + {"limit +1": 1, "limit -1": -1}.get(self.bug, 0))
        if mask.window is not None:
            seen = seen & ((i - j).abs() < mask.window + {"window +1": 1, "window -1": -1}.get(self.bug, 0))
        if mask.key_lengths is not None and self.bug != "lengths ignored":
            seen = seen & (j < torch.tensor(mask.key_lengths)[:, None, None, None])
        return seen

    def tiles(self, keys: int) -> list[list[tuple[int, int]]]:
        tiles = [(start, min(start + self.bc, keys)) for start in range(0, keys, self.bc)]
        if self.bug == "last tile dropped" and keys % self.bc and keys > self.bc:
            tiles = tiles[:-1]
        if self.bug == "random order":
            tiles = [tiles[i] for i in torch.randperm(len(tiles))]
        cuts = [round(i * len(tiles) / self.splits) for i in range(self.splits + 1)]
        parts = [tiles[a:b] for a, b in pairwise(cuts)]
        return [part[::-1] if self.reverse else part for part in parts if part]

    def combined(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if len(parts) == 1:
            return parts[0]
        outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse.masked_fill(lse == _NEVER, 0.0))
        if self.bug == "splits unweighed":
            weights = torch.full_like(weights, 1 / len(parts))
        return (weights * outs).sum(0), lse

    def part(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, tiles: list[tuple[int, int]], scale: float
    ) -> tuple[Tensor, Tensor]:
        log2e = math.log2(math.e) if self.binary or self.degree else 1.0
        m, total = q.new_full((*q.shape[:-1], 1), _NEVER), q.new_zeros(*q.shape[:-1], 1)
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for place, (a, b) in enumerate(tiles):
            s = (rounded(q @ k[:, :, a:b].mT, self.s) * (scale * log2e)).masked_fill(~seen[..., a:b], _NEVER)
            top = torch.maximum(m, rounded(s.amax(-1, keepdim=True), self.m))
            if self.lazy:
                top = torch.where(top - m > self.lazy * (1 if log2e > 1 else math.log(2)), top, m)
            if self.bug == "stale maximum":
                top = torch.where(m == _NEVER, top, m)
            shift = top.masked_fill(top == _NEVER, 0.0)
            alpha, p = rounded(self.exp(m - shift), self.alpha), self.exp(s - shift)
            stored = rounded(p * self.p_scale, self.p) / self.p_scale
            more = (stored if self.sum_rounded else p).sum(-1, keepdim=True)
            if self.bug == "padding counted" and b - a < self.bc:
                more = more + (self.bc - b + a) * self.exp(-shift)
            missed = place == 2
            kept_sum = total if self.bug == "l rescale missed" and missed else alpha * total
            total = rounded(kept_sum + more, self.row_sum)
            values = v[:, :, a - 1 : b - 1] if self.bug == "v shifted" and place == 1 and a > 0 else v[:, :, a:b]
            kept = o if self.bug == "rescale missed" and missed else rounded(alpha * o, self.kept)
            o, m = rounded(kept + stored @ values, self.o), top
        lse = m.masked_fill(m == _NEVER, 0.0) / log2e + torch.log(total)
        total = total.masked_fill(total == 0, 1.0)
        if self.divide == "fp32":
            return o / total, lse
        return rounded(rounded(o, self.divide) * rounded(1 / total, self.divide), self.divide), lse

    def exp(self, x: Tensor) -> Tensor:
        if self.degree:
            whole = x.floor()
            fraction = torch.where(x == _NEVER, 0.0, x - whole)
            return sum(c * fraction**i for i, c in enumerate(_POLYNOMIALS[self.degree])) * torch.exp2(whole)
        return torch.exp2(x) if self.binary else torch.exp(x)


K = Planted
RIGHT = {
    "64 forward": K(),
    "16 forward": K(16),
    "32 reverse": K(32, True),
    "96 forward, exp2": K(96, binary=True),
    "128 reverse, exp2": K(128, True, binary=True),
    "256 forward": K(256),
    "128 forward, lazy": K(128, binary=True, lazy=8.0),
    "96 reverse, lazy": K(96, True, binary=True, lazy=8.0),
    "64, 4 splits": K(64, binary=True, splits=4),
    "64 reverse, FP32 output": K(64, True, out="fp32"),
    "P in FP16": K(64, p="fp16"),
}
# kernel, and the step that the sentence must name
STEPS = {
    "l in BF16": (K(64, row_sum="bf16"), "row_sum"),
    "l in BF16, 96 reverse": (K(96, True, binary=True, row_sum="bf16"), "row_sum"),
    "l over rounded P": (K(128, binary=True, sum_rounded=True), "sum_over"),
    "O in BF16": (K(64, True, o="bf16"), "accumulator"),
    "O in BF16, 96": (K(96, binary=True, o="bf16"), "accumulator"),
    "O in FP16": (K(64, o="fp16"), "accumulator"),
    "alpha O in BF16": (K(32, kept="bf16"), "accumulator"),
    "S in BF16": (K(128, True, binary=True, s="bf16"), "scores"),
    "S in BF16, 96": (K(96, s="bf16"), "scores"),
    "S in FP16": (K(64, s="fp16"), "scores"),
    "P in E4M3": (K(64, p="e4m3"), "probabilities"),
    "P in E4M3 times 256": (K(128, True, p="e4m3", p_scale=256.0), "probabilities"),
    "P saturates": (K(96, p="e4m3", p_scale=1024.0), "probabilities"),
    "exp by degree 2": (K(128, degree=2), "exp"),
    "exp by degree 3": (K(96, True, degree=3), "exp"),
    "m in BF16": (K(64, m="bf16"), "maximum"),
    "alpha in BF16": (K(32, alpha="bf16"), "rescale"),
    "alpha in BF16, 96 reverse": (K(96, True, binary=True, alpha="bf16"), "rescale"),
    "division in BF16": (K(64, divide="bf16"), "division"),
    "LSE in BF16": (K(64, lse="bf16"), "lse"),
    "LSE in FP16": (K(128, True, lse="fp16"), "lse"),
    "LSE base 2": (K(128, binary=True, lse="base 2"), "lse base 2"),
    "LSE times ln 2": (K(32, lse="times ln 2"), "lse scaled"),
    "scale + 0.1 %": (K(64, factor=1.001), "scale"),
    "scale + 1 %": (K(96, True, factor=1.01), "scale"),
    "scale - 2 %": (K(128, factor=0.98), "scale"),
    "scale on q": (K(64, scale_q=True), "scale_on"),
    "output through FP16": (K(64, True, out="fp16"), "output"),
}
STRUCTURE = {
    "splits unweighed": K(64, splits=4, bug="splits unweighed"),
    "rescale missed": K(64, bug="rescale missed"),
    "l rescale missed": K(96, bug="l rescale missed"),
    "stale maximum": K(128, bug="stale maximum"),
    "last tile dropped": K(96, bug="last tile dropped"),
    "padding counted": K(64, bug="padding counted"),
    "limit +1": K(64, True, bug="limit +1"),
    "limit -1": K(128, bug="limit -1"),
    "limit top left": K(64, bug="limit top left"),
    "window +1": K(96, bug="window +1"),
    "window -1": K(64, bug="window -1"),
    "heads interleaved": K(64, bug="heads interleaved"),
    "lengths ignored": K(128, True, bug="lengths ignored"),
    "empty rows mean": K(64, bug="empty rows mean"),
    "empty rows nan": K(64, bug="empty rows nan"),
    "v shifted": K(64, bug="v shifted"),
    "last head zero": K(64, True, bug="last head zero"),
    "padding leaks": K(64, bug="padding leaks"),
    "random order": K(64, bug="random order"),
    "changes q": K(128, bug="changes q"),
    "one element": K(64, bug="one element"),
}
