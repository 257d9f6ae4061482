"""Forward passes as their authors write them, right ones and ones with a fault that such kernels have shipped with.

They follow the literature, not numdev's emulation, with which they share no code: the loops of FlashAttention-1 to -4, split-K
decoding with a merge of states (flashinfer), the tutorial of Triton, two passes over the keys, and softmax by whole rows (SDPA).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from numdev.attention.mask import Mask

Step = Callable[..., Any]
LOG2E = math.log2(math.e)
_NEVER = float("-inf")


def same(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fp16(x: Tensor) -> Tensor:
    return x.half().float()


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e5m2(x: Tensor) -> Tensor:
    return x.clamp(-57344, 57344).to(torch.float8_e5m2).float()


def truncated(x: Tensor) -> Tensor:
    """BF16 by dropping bits, as fast conversions do."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def scaled(to: Step, factor: float) -> Step:
    return lambda x: to(x * factor) / factor


def per_head(x: Tensor, heads: Tensor) -> Tensor:
    return x.float()[:, heads]


def groups(heads: int, kv_heads: int) -> Tensor:
    """The head of k and v that each head of q reads."""
    return torch.arange(heads) // (heads // kv_heads)


def visible(i: Tensor, j: Tensor, shift: int, mask: Mask, reach: int = 0, wider: int = 0) -> Tensor:
    """Whether query i sees key j; `shift` aligns the last query with the last key."""
    seen = torch.ones(1, 1, i.shape[0], j.shape[1], dtype=torch.bool)
    if mask.causal:
        seen = seen & (j <= i + shift + reach)
    if mask.window is not None:
        seen = seen & ((i + shift - j).abs() < mask.window + wider)
    if mask.key_lengths is not None:
        seen = seen & (j < torch.tensor(mask.key_lengths)[:, None, None, None])
    return seen


def of_lengths(change: Step) -> Step:
    """What is seen where the lengths of the keys are read otherwise."""
    return lambda i, j, shift, mask: visible(
        i, j, shift, replace(mask, key_lengths=mask.key_lengths and change(mask.key_lengths))
    )


def of(name: str, change: Step) -> Step:
    """q, k, v and dO as they are read, of which one is changed."""
    return lambda *tensors: tuple(
        change(x) if each == name else x for each, x in zip(("q", "k", "v", "do"), tensors, strict=False)
    )


def spans(keys: int, bc: int) -> list[tuple[int, int]]:
    return [(start, min(start + bc, keys)) for start in range(0, keys, bc)]


def without_padding(x: Tensor, mask: Mask) -> Tensor:
    """k or v with zeros in place of the rows that do not exist."""
    lengths = torch.tensor(mask.key_lengths or (x.shape[2],) * x.shape[0])
    return x.masked_fill(torch.arange(x.shape[2])[:, None] >= lengths[:, None, None, None], 0.0)


@dataclass(frozen=True)
class Flash:
    """The loop of FlashAttention over tiles of keys. Each step is a function that a fault replaces.

    Attributes:
        bc, reverse, splits: tiles of keys, their order, and parts of the keys that are merged at the end.
        base2: exponentials are 2^x, of scores that have been multiplied by log2 e.
        lazy: the growth of the maximum, in powers of 2, below which nothing is rescaled (FlashAttention-4).
        normalised: O is divided in every tile (FlashAttention-1), not once.
        clean, load: k or v without what the mask says is padding; q, k, v as they are read.
        scale, product, scores: the scale; `Q K^T` and S as they are stored.
        top, alpha, exp: the maximum of the old one and of S; the factors so far, of which the last applies; e^x or 2^x.
        summand, total, p, pv, rescaled, o: of the row sum; l; P and V of the product; the product; alpha O; O.
        divide, lse, out: O / l; of m, l and the factor of the logarithm; what is returned.
        part: O and LSE of one split.
        merge: outputs and LSEs of the splits into one.
        hidden: the score of a key that is not seen.
        heads, seen, tiles: which k and v, which keys, which tiles.
    """

    bc: int = 80
    reverse: bool = False
    splits: int = 1
    base2: bool = False
    lazy: float = 0.0
    normalised: bool = False
    clean: Step = without_padding
    load: Step = lambda q, k, v: (q, k, v)
    scale: Step = same
    product: Step = same
    scores: Step = same
    top: Step = lambda m, s: torch.maximum(m, s.amax(-1, keepdim=True))
    alpha: Step = lambda factors: factors[-1]
    sum_alpha: Step = lambda factors: factors[-1]
    exp: Step | None = None
    summand: Step = same
    total: Step = same
    p: Step = bf16
    pv: Step = lambda p, v, tile: p @ v[:, :, tile[0] : tile[1]]
    rescaled: Step = same
    o: Step = same
    divide: Step = lambda o, total: o / total
    lse: Step = lambda m, total, base: m / base + total.log()
    out: Step = lambda out: out.bfloat16()
    part: Step = lambda out, lse: (out, lse)
    merge: Step | None = None
    hidden: float = _NEVER
    heads: Step = groups
    seen: Step = visible
    tiles: Step = spans

    def but(self, **changed: Any) -> Flash:
        return replace(self, **changed)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        heads, shift = self.heads(q.shape[1], k.shape[1]), k.shape[2] - q.shape[2]
        q, k, v = self.load(q.float(), per_head(self.clean(k, mask), heads), per_head(self.clean(v, mask), heads))
        seen = self.seen(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None], shift, mask)
        tiles = self.tiles(k.shape[2], self.bc)
        each = math.ceil(len(tiles) / self.splits)
        parts = [tiles[start : start + each] for start in range(0, len(tiles), each)]
        states = [self.part(*self.split(q, k, v, seen, part[::-1] if self.reverse else part, scale)) for part in parts]
        outs, lses = map(torch.stack, zip(*states, strict=True))
        out, lse = states[0] if len(states) == 1 else (self.merge or merged)(outs, lses)
        return self.out(out), lse.squeeze(-1)

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, tiles: list[tuple[int, int]], scale: float
    ) -> tuple[Tensor, Tensor]:
        base = LOG2E if self.base2 else 1.0
        exp = self.exp or (torch.exp2 if self.base2 else torch.exp)
        m, total = q.new_full((*q.shape[:-1], 1), _NEVER), q.new_zeros(*q.shape[:-1], 1)
        o, factors = q.new_zeros(*q.shape[:-1], v.shape[-1]), list[Tensor]()
        for tile in tiles:
            s = self.scores(self.product(q @ k[:, :, tile[0] : tile[1]].mT) * self.scale(scale) * base)
            s = s.masked_fill(~seen[..., tile[0] : tile[1]], self.hidden)
            top = self.top(m, s)
            if self.lazy:
                top = torch.where(top - m <= self.lazy * base / LOG2E, m, top)
            shift = top.masked_fill(top == _NEVER, 0.0)
            p = exp(s - shift)
            factors.append(exp(m - shift))
            before, m = total, top
            total = self.total(self.sum_alpha(factors) * total + self.summand(p).sum(-1, keepdim=True))
            kept = self.rescaled(self.alpha(factors) * (o * before if self.normalised else o))
            o = kept + self.pv(self.p(p), v, tile)
            o = self.o(o / total.masked_fill(total == 0, 1.0) if self.normalised else o)
        lse = self.lse(m.masked_fill(m == _NEVER, 0.0), total, base)
        return (o if self.normalised else self.divide(o, total.masked_fill(total == 0, 1.0))), lse


def merged(outs: Tensor, lses: Tensor, stored: Step = same) -> tuple[Tensor, Tensor]:
    """The output of all keys from those of parts, weighed by the sums of their exponentials (FlashDecoding)."""
    most = lses.amax(0)
    exact = (lses - most.masked_fill(most == _NEVER, 0.0)).exp()
    weights = stored(exact)
    out = (weights * outs).sum(0) / weights.sum(0).masked_fill(most == _NEVER, 1.0)
    return out, most.masked_fill(most == _NEVER, 0.0) + exact.sum(0).log()


@dataclass(frozen=True)
class Rows:
    """Softmax by whole rows, as eager code has it: S, P before the division, and P after it, each as it is stored."""

    scores: Step = same
    p: Step = same
    weights: Step = bf16

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        heads, shift = groups(q.shape[1], k.shape[1]), k.shape[2] - q.shape[2]
        q, (k, v) = q.float(), (per_head(without_padding(x, mask), heads) for x in (k, v))
        seen = visible(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None], shift, mask)
        s = self.scores(q @ k.mT * scale).masked_fill(~seen, _NEVER)
        m = s.amax(-1, keepdim=True)
        p = self.p((s - m.masked_fill(m == _NEVER, 0.0)).exp())
        total = self.p(p.sum(-1, keepdim=True))
        lse = m + total.log()
        return (self.weights(p / total.masked_fill(total == 0, 1.0)) @ v).bfloat16(), lse.squeeze(-1)


def two_passes(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """The LSE first, in tiles of 112; then P = exp(S - LSE), normalised before it is rounded, in tiles of 40."""
    lse = Flash(112)(q, k, v, mask=mask, scale=scale)[1][..., None]
    fixed = lse.masked_fill(lse == _NEVER, 0.0)
    known = Flash(40, top=lambda m, s: fixed, alpha=lambda _: 1.0, sum_alpha=lambda _: 1.0, divide=lambda o, total: o)
    return known(q, k, v, mask=mask, scale=scale)[0], lse.squeeze(-1)


def exp_of_degree(*coefficients: float) -> Step:
    """2^x by a polynomial of its fraction, as FlashAttention-4 and the fast paths of vector libraries have it."""

    def exp2(x: Tensor) -> Tensor:
        whole = x.floor()
        fraction = torch.where(x == _NEVER, 0.0, x - whole)
        result = torch.zeros_like(x)
        for coefficient in reversed(coefficients):
            result = result * fraction + coefficient
        return torch.ldexp(result, whole.clamp(-200, 200).int()).masked_fill(x == _NEVER, 0.0)

    return exp2


def schraudolph(x: Tensor) -> Tensor:
    """2^x of the bits of a float: linear between powers of 2."""
    return ((x.clamp(min=-126.0) + 126.94) * 2**23).int().view(torch.float32).masked_fill(x < -126, 0.0)


def of_keys(every: int, first: int, then: Step) -> Step:
    """2^x, but for one key of so many by other means, in P alone (as FlashAttention-4 relieves the unit of exponentials)."""

    def exp2(x: Tensor) -> Tensor:
        is_other = (torch.arange(x.shape[-1]) % every == first) & (x.shape[-1] > 1)
        return torch.where(is_other, then(x), torch.exp2(x))

    return exp2


def reduced(ln2: float, whole: Step = torch.round) -> Step:
    """e^x as 2^n e^(x - n ln 2), of an ln 2 that has been rounded (Cody and Waite's reduction without its second part)."""

    def exp(x: Tensor) -> Tensor:
        n = whole(x.clamp(min=-100.0) * LOG2E)
        return torch.ldexp((x.clamp(min=-100.0) - n * ln2).exp(), n.int()).masked_fill(x < -100.0, 0.0)

    return exp


def clamped(least: float, base: float = math.e) -> Step:
    """Powers no smaller than that of a number, against underflow; keys that are not seen stay out."""
    return lambda x: (base ** x.clamp(min=least)).masked_fill(x == _NEVER, 0.0)


def quantised_by_tiles(p: Tensor, side: int = 48) -> Tensor:
    """P in INT8, with a scale of each query and so many keys."""
    tiles = p.split(side, -1)
    scales = [x.amax(-1, keepdim=True).clamp(min=1e-30) / 127 for x in tiles]
    return torch.cat([(x / scale).round() * scale for x, scale in zip(tiles, scales, strict=True)], -1)


def ring(outs: Tensor, lses: Tensor, stored: Step = bf16, of_lse: Step = same) -> tuple[Tensor, Tensor]:
    """Context parallelism: each part is merged into the output so far, which is stored (ring attention's update by a sigmoid)."""
    out, lse = stored(outs[0]), of_lse(lses[0])
    for part, its_lse in zip(outs[1:], lses[1:], strict=True):
        out = stored(out - torch.sigmoid(of_lse(its_lse) - lse).nan_to_num(0.0) * (out - stored(part)))
        lse = of_lse(torch.logaddexp(lse, of_lse(its_lse)))
    return out, lse


def merged_in_base_e(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weights e^LSE of logarithms in base 2, and an LSE of their sum."""
    out, lse = merged(outs, lses * LOG2E)
    return out, lse / LOG2E


def merged_in_base_2(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weights 2^LSE of natural logarithms."""
    return merged(outs, lses / LOG2E)[0], merged(outs, lses)[1]


def once(place: int, wrong: Step) -> Step:
    """The factors but for one tile."""
    return lambda factors: wrong(factors) if len(factors) == place + 1 else factors[-1]


def without_last_rescale(bc: int) -> Flash:
    """O is not rescaled in the last tile, of which an epilogue has a copy of the loop."""
    last = 0

    def tiles(keys: int, bc: int) -> list[tuple[int, int]]:
        nonlocal last
        last = len(spans(keys, bc))
        return spans(keys, bc)

    return Flash(bc, tiles=tiles, alpha=lambda factors: torch.ones_like(factors[-1]) if len(factors) == last else factors[-1])


def rotated(k: Tensor) -> Tensor:
    """A rotary embedding that has been applied to the keys once too often, in its slowest pair of dimensions."""
    angle = torch.arange(k.shape[2])[:, None] * 2e-4
    half = k.shape[-1] // 2
    x, y, rest, z = k[..., :1], k[..., half : half + 1], k[..., 1:half], k[..., half + 1 :]
    return torch.cat([x * angle.cos() - y * angle.sin(), rest, x * angle.sin() + y * angle.cos(), z], -1)


def channel_scales(v: Tensor) -> Tensor:
    """V in its own units, whose scale for each channel has been kept in E4M3."""
    scales = v.abs().amax(2, keepdim=True).clamp(min=1e-30)
    return v / scales * scaled(e4m3, 1.0)(scales)


def stale(k: Tensor) -> Tensor:
    """Every 16th row of K is that of the row before: a copy that was read before it had arrived."""
    k = k.clone()
    k[:, :, 15::16] = k[:, :, 14 : k.shape[2] - 1 : 16]
    return k


def four_bits_of_groups(k: Tensor) -> Tensor:
    """A cache of 4 bits, which keeps the least number and the step of each 32 columns of a token of K."""
    groups = k.unflatten(-1, (-1, 32))
    least = groups.amin(-1, keepdim=True)
    step = ((groups.amax(-1, keepdim=True) - least) / 15).clamp(min=1e-30)
    return (((groups - least) / step).round() * step + least).flatten(-2)


def quantised(names: str, most: float, stored: Step, dim: int) -> Step:
    """Inputs of which the largest number over a dimension becomes the largest of the format."""

    def load(*qkv: Tensor) -> tuple[Tensor, ...]:
        scales = [x.abs().amax(dim, keepdim=True).clamp(min=1e-30) / most for x in qkv]
        return tuple(stored(x / y) * y if name in names else x for name, x, y in zip("qkv", qkv, scales, strict=True))

    return load


def less_its_mean(k: Tensor) -> Tensor:
    """SageAttention's smoothing of K, whose mean changes the LSE alone."""
    mean = k.mean(2, keepdim=True)
    return bf16(k - mean) + mean


def by_pairs(p: Tensor) -> Tensor:
    """The sum of the numbers of a row, as a tree in BF16."""
    p = bf16(p)
    while p.shape[-1] > 1:
        p = torch.nn.functional.pad(p, (0, p.shape[-1] % 2))
        p = bf16(p[..., ::2] + p[..., 1::2])
    return p


def dropped_weights(p: Tensor) -> Tensor:
    """One of 1,000 weights is 0, and what is left is not scaled up: a dropout that evaluation did not switch off."""
    return bf16(p * (torch.rand(p.shape, generator=torch.Generator().manual_seed(p.shape[-1])) > 1e-3))


def biased_head(out: Tensor) -> Tensor:
    bias = torch.zeros(out.shape[1], 1, 1)
    bias[-1] = 0.02
    return (out + bias * out.abs().mean()).bfloat16()


def dithered(out: Tensor) -> Tensor:
    """Noise of half a unit before the rounding."""
    noise = torch.rand(out.shape, generator=torch.Generator().manual_seed(3)) - 0.5
    return (out * (1 + noise * 2**-6)).bfloat16()


def linear_bias(s: Tensor) -> Tensor:
    """ALiBi's slope, left on."""
    return s + 0.01 * torch.arange(s.shape[-1]) / s.shape[-1] * (torch.arange(s.shape[1]) + 1)[:, None, None]


def zeroed(count: int) -> Step:
    """Every `count`-th element of the output is not written."""

    def out(x: Tensor) -> Tensor:
        x = x.bfloat16().contiguous()
        x.view(-1)[count // 2 :: count] = 0
        return x

    return out


def swapped_rows(out: Tensor) -> Tensor:
    """Two rows of the last fragment are stored in each other's place."""
    out = out.bfloat16().clone()
    if out.shape[2] > 9:
        out[:, :, [-9, -1]] = out[:, :, [-1, -9]]
    return out


def zero_padded(bc: int) -> Step:
    """Rows of zeros behind the keys fill the last tile, and no mask hides them."""
    return lambda q, k, v: (q, *(torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % bc)) for x in (k, v)))


def changing_queries(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    return Flash()(q.mul_(1.015625), k, v, mask=mask, scale=scale)


F, B2 = Flash(), Flash(112, base2=True)
CORRECT: dict[str, Step] = {
    "FA2, 16": Flash(16),
    "FA2, 48": Flash(48),
    "FA2, 80 reverse": Flash(80, reverse=True),
    "FA2, 112": Flash(112),
    "FA3, 176 reverse": Flash(176, reverse=True, base2=True),
    "FA3, 192 forward": Flash(192, base2=True),
    "FA4, 128 lazy": Flash(128, base2=True, lazy=8.0),
    "FA4, 144 reverse lazy": Flash(144, reverse=True, base2=True, lazy=8.0),
    "FA1, 96": Flash(96, normalised=True),
    "FA1, 256": Flash(256, normalised=True),
    "decoding, 4 splits of 64": Flash(64, splits=4, base2=True),
    "decoding, 3 splits of 80": Flash(80, splits=3),
    "decoding, 5 splits of 32": Flash(32, splits=5, base2=True),
    "decoding, 7 splits of 48 reverse": Flash(48, splits=7, reverse=True),
    "Triton's tutorial, 64": Flash(64, base2=True),
    "P in FP16": Flash(160, p=fp16),
    "output in FP32": Flash(48, base2=True, out=same),
    "two passes": two_passes,
    "whole rows, FP32": Rows(),
    "whole rows, P before its division": Flash(1 << 20),
    "whole maxima, 48": Flash(48, base2=True, top=lambda m, s: torch.maximum(m, s.amax(-1, keepdim=True).ceil())),
    "reciprocal": Flash(208, divide=lambda o, total: o * (1 / total)),
}
"""Kernels that differ in all that a policy leaves open."""

PRECISION: dict[str, tuple[Step, str]] = {
    "l in BF16, 80": (F.but(total=bf16), "row_sum"),
    "l in BF16, FA1": (Flash(48, normalised=True, total=bf16), "row_sum"),
    "l in FP16, 112": (B2.but(total=fp16), "row_sum"),
    "l in BF16, 5 splits": (Flash(48, splits=5, base2=True, total=bf16), "row_sum"),
    "tile sums in BF16": (Flash(144, summand=bf16, total=bf16, reverse=True), "row_sum|of which l is the sum"),
    "l over P in E4M3": (Flash(160, p=e4m3, summand=e4m3), "probabilities"),
    "S in BF16, 48": (Flash(48, product=bf16), "scores"),
    "S in BF16 after its scale": (Flash(192, reverse=True, scores=bf16), "scores"),
    "S in FP16, 160": (Flash(160, product=fp16), "scores"),
    "S in BF16 times log2 e": (Flash(80, base2=True, scores=bf16), "scores"),
    "O in BF16, 80": (F.but(o=bf16), "accumulator"),
    "O in BF16, 112 reverse": (B2.but(o=bf16, reverse=True), "accumulator"),
    "O in FP16, 192": (Flash(192, o=fp16), "accumulator"),
    "O in BF16, FA1": (Flash(144, normalised=True, o=bf16), "accumulator"),
    "alpha O in BF16, 48": (Flash(48, rescaled=bf16), "accumulator"),
    "P V in BF16": (Flash(80, base2=True, pv=lambda p, v, t: bf16(p @ v[:, :, t[0] : t[1]])), "values"),
    "P V in FP16": (Flash(48, pv=lambda p, v, t: fp16(p @ v[:, :, t[0] : t[1]])), "values"),
    "partial outputs in BF16": (Flash(80, splits=4, part=lambda o, lse: (bf16(o), lse)), "accumulator|split"),
    "partial LSEs in BF16": (Flash(48, splits=6, part=lambda o, lse: (o, bf16(lse))), "lse|split|row_sum"),
    "P in E4M3, 112": (Flash(112, p=e4m3), "probabilities"),
    "P in E4M3 times 448": (Flash(176, reverse=True, base2=True, p=scaled(e4m3, 448.0)), "probabilities"),
    "P in E5M2": (Flash(80, p=e5m2), "probabilities"),
    "P in E4M3 times 600, saturating": (Flash(160, p=scaled(e4m3, 600.0)), "probabilities"),
    "P truncated": (Flash(112, p=truncated), "probabilities"),
    "exponent in BF16": (Flash(80, base2=True, exp=lambda x: bf16(torch.exp2(bf16(x)))), "exp"),
    "exponent in FP16": (Flash(48, base2=True, exp=lambda x: fp16(torch.exp2(fp16(x)))), "exp"),
    "S - m in BF16": (Flash(144, exp=lambda x: torch.exp(bf16(x))), "exp"),
    "2^x of degree 2": (Flash(112, base2=True, exp=exp_of_degree(1.0, 0.65571, 0.34429)), "exp"),
    "Schraudolph's exponential": (Flash(80, base2=True, exp=schraudolph), "exp"),
    "output times 0.99": (F.but(out=lambda x: (0.99 * x).bfloat16()), "output"),
    "2^x of degree 3": (Flash(160, base2=True, exp=exp_of_degree(1.0, 0.6951, 0.2276, 0.0773)), "exp"),
    "2^x of a table": (Flash(112, base2=True, exp=lambda x: torch.exp2((x * 64).floor() / 64)), "exp"),
    "V in E4M3 by columns": (Flash(96, load=quantised("v", 448.0, e4m3, -2)), "^v="),
    "K in INT8 by tokens": (Flash(80, base2=True, load=quantised("k", 127.0, torch.round, -1)), "^k="),
    "Q and K in INT8 by tokens": (Flash(144, load=quantised("qk", 127.0, torch.round, -1)), "^q.k="),
    "K less its mean": (Flash(64, reverse=True, load=of("k", less_its_mean)), "^k="),
    "l by pairs": (Flash(128, summand=by_pairs), "row_sum"),
    "weights of splits truncated": (Flash(32, splits=5, merge=partial(merged, stored=truncated)), "split"),
    "alpha in BF16, 48": (Flash(48, alpha=lambda f: bf16(f[-1]), sum_alpha=lambda f: bf16(f[-1])), "rescale"),
    "alpha of O in BF16, 32": (Flash(32, reverse=True, alpha=lambda f: bf16(f[-1])), "rescale"),
    "alpha in FP16, 112": (B2.but(alpha=lambda f: fp16(f[-1]), sum_alpha=lambda f: fp16(f[-1])), "rescale"),
    "m in BF16": (Flash(48, top=lambda m, s: torch.maximum(m, bf16(s.amax(-1, keepdim=True)))), "maximum"),
    "division in BF16": (Flash(64, divide=lambda o, total: bf16(bf16(o) * bf16(1 / total))), "division"),
    "1 / l in BF16": (Flash(112, divide=lambda o, total: o * bf16(1 / total)), "division"),
    "output truncated": (B2.but(out=lambda x: truncated(x).bfloat16()), "output"),
    "output through FP16": (F.but(out=lambda x: x.half().bfloat16()), "output"),
    "output through E5M10, flushed": (F.but(out=lambda x: fp16(x).masked_fill(x.abs() < 2**-14, 0).bfloat16()), "output"),
    "LSE in BF16": (Flash(112, lse=lambda m, t, b: bf16(m / b + t.log())), "lse"),
    "LSE in FP16": (Flash(48, base2=True, lse=lambda m, t, b: fp16(m / b + t.log())), "lse"),
    # Times scale times log2 e; the scale of 64 dimensions is a power of 2
    "q times the scale, in BF16": (B2.but(bc=80, load=of("q", lambda q: bf16(q * LOG2E)), scale=lambda x: x / LOG2E), "scale"),
    "log2 e as 1.44": (Flash(112, scale=lambda x: x * 1.44 / LOG2E), "scale"),
    "1/sqrt(d) as 0.12": (Flash(48, scale=lambda x: x * 0.96), "scale"),
    "1/sqrt(d + 1)": (Flash(80, scale=lambda x: 1 / math.sqrt(1 / x**2 + 1)), "scale"),
    "softmax in BF16": (Rows(scores=bf16, p=bf16), "scores"),
    "S and O in BF16": (Flash(112, product=bf16, o=bf16), "scores|accumulator"),
    "S clamped at 2": (Flash(48, scores=lambda s: s.clamp(max=2.0)), "scores"),
    "S capped by tanh": (F.but(scores=lambda s: 10 * (s / 10).tanh()), "scores"),
    "a line for every fourth key": (Flash(112, base2=True, exp=of_keys(4, 3, exp_of_degree(1.0, 1.0))), "exp"),
    "a line for every second key": (Flash(96, base2=True, exp=of_keys(2, 0, exp_of_degree(0.97, 0.97))), "exp"),
    "a parabola every fourth key": (Flash(128, base2=True, exp=of_keys(4, 3, exp_of_degree(1.0, 0.656, 0.344))), "exp"),
    "argument of exp at least -6": (Flash(80, exp=clamped(-6.0)), "exp"),
    "argument of exp2 at least -13": (Flash(48, base2=True, exp=clamped(-13.0, 2.0)), "exp"),
    "ln 2 in BF16": (Flash(48, exp=reduced(0.69140625)), "exp"),
    "ln 2 in FP16, rounded down": (Flash(112, exp=reduced(0.693359375, torch.floor)), "exp"),
    "splits merged in base 2": (Flash(48, splits=4, merge=merged_in_base_2), "split"),
    "splits of base 2 merged in base e": (Flash(64, splits=5, merge=merged_in_base_e), "split"),
    "ring of 12": (Flash(64, splits=12, merge=ring), "split|accumulator"),
    "ring of 12, of 16 keys": (Flash(16, splits=12, merge=ring), "split|accumulator"),
    "ring of 12, its LSE in BF16": (Flash(48, splits=12, merge=partial(ring, stored=same, of_lse=bf16)), "split|lse"),
    "partial outputs in BF16, of 144": (Flash(144, splits=3, part=lambda o, lse: (bf16(o), lse)), "accumulator|split"),
    "l in BF16, splits of 176": (Flash(176, splits=2, total=bf16), "row_sum"),
    "P in FP16, flushed": (Flash(32, reverse=True, p=lambda p: fp16(p).masked_fill(fp16(p) < 2**-14, 0)), "probabilities"),
    "O in BF16, 24": (Flash(24, rescaled=bf16, o=bf16), "accumulator"),
    "P in INT8 by tiles of 48": (Flash(48, p=quantised_by_tiles), "probabilities"),
    "K in INT4 of 32 columns": (Flash(64, reverse=True, load=of("k", four_bits_of_groups)), "^k="),
    "last rescale of O missed": (without_last_rescale(88), "rescale"),
    "length of the first entry": (F.but(seen=of_lengths(lambda lengths: lengths[:1] * len(lengths))), "lengths"),
    "next head of k and v": (F.but(heads=lambda heads, kv: groups(heads, kv)[[*range(1, heads), heads - 1]]), "heads"),
    "P in INT8 by 48 of 144": (Flash(144, reverse=True, base2=True, p=quantised_by_tiles), "probabilities"),
}
"""Kernels whose step errs, and a pattern of the step's name."""

STRUCTURE: dict[str, Step] = {
    "limit at the first key": F.but(seen=lambda i, j, shift, mask: visible(i, j, 0, mask)),
    "limit + 1": B2.but(seen=partial(visible, reach=1)),
    "limit - 1": Flash(48, reverse=True, seen=partial(visible, reach=-1)),
    "window + 1": Flash(144, seen=partial(visible, wider=1)),
    "window - 1": Flash(48, seen=partial(visible, wider=-1)),
    "window ignored": F.but(seen=lambda i, j, shift, mask: visible(i, j, shift, replace(mask, window=None))),
    "lengths ignored": F.but(seen=of_lengths(lambda _: None)),
    "lengths to a multiple of 16": F.but(seen=of_lengths(lambda lengths: tuple(-(-n // 16) * 16 for n in lengths))),
    "heads in turn": B2.but(heads=lambda heads, kv_heads: torch.arange(heads) % kv_heads),
    "first head of k and v": F.but(heads=lambda heads, kv_heads: torch.arange(heads) * 0),
    "ragged tile dropped": B2.but(tiles=lambda keys, bc: spans(keys, bc)[: max(1, keys // bc)]),
    "small tile dropped": Flash(48, tiles=lambda keys, bc: [t for t in spans(keys, bc) if t[1] - t[0] > 15] or spans(keys, bc)),
    "first tile dropped": F.but(reverse=True, tiles=lambda keys, bc: spans(keys, bc)[1:] or spans(keys, bc)),
    "second tile dropped": Flash(48, tiles=lambda keys, bc: [t for t in spans(keys, bc) if t[0] != bc]),
    "padding counted": Flash(64, load=zero_padded(64)),
    "rescale of O missed": F.but(alpha=once(1, lambda f: torch.ones_like(f[-1]))),
    "rescale of l missed": B2.but(sum_alpha=once(2, lambda f: torch.ones_like(f[-1]))),
    "alpha of the tile before": Flash(48, alpha=lambda f: f[-2] if len(f) > 2 else f[-1]),
    "O never rescaled": Flash(112, alpha=lambda f: torch.ones_like(f[-1])),
    "maximum of the first tile": Flash(128, top=lambda m, s: torch.where(m == _NEVER, s.amax(-1, keepdim=True), m)),
    "-10,000 in place of -inf": F.but(hidden=-1e4),
    "no maximum": B2.but(top=lambda m, s: torch.zeros_like(s[..., :1]), alpha=lambda f: 1.0, sum_alpha=lambda f: 1.0),
    "splits unweighed": Flash(80, splits=4, merge=lambda outs, lses: (outs.mean(0), merged(outs, lses)[1])),
    "splits weighed in base 2": Flash(48, splits=3, merge=merged_in_base_2),
    "third split lost": Flash(48, splits=3, merge=lambda outs, lses: merged(outs[:2], lses[:2])),
    "V of the tile before": F.but(pv=lambda p, v, t: p @ v[:, :, t[0] - (t[0] == 160) * 80 : t[1] - (t[0] == 160) * 80]),
    "LSE times ln 2": F.but(lse=lambda m, total, base: (m + total.log()) / LOG2E),
    "LSE in base 2": B2.but(lse=lambda m, total, base: m + total.log2()),
    "LSE of mixed bases": B2.but(lse=lambda m, total, base: m / base + total.log2()),
    "LSE without the maximum": F.but(lse=lambda m, total, base: total.log()),
    "LSE of unscaled scores": F.but(lse=lambda m, total, base: m * 8 + total.log()),
    "one of 20,000 not written": F.but(out=zeroed(20_011)),
    "rows of a fragment swapped": B2.but(out=swapped_rows),
    "empty rows NaN": B2.but(part=lambda out, lse: (out.masked_fill(lse == _NEVER, math.nan), lse)),
    "padding leaks": F.but(clean=lambda x, mask: x),
    "random order": F.but(tiles=lambda keys, bc: [spans(keys, bc)[i] for i in torch.randperm(len(spans(keys, bc)))]),
    "changes q": changing_queries,
    "last head not written": F.but(out=lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1).bfloat16()),
}
"""Kernels whose loop is wrong."""

OUTSIDE: dict[str, Step] = {
    "noise on K": F.but(load=of("k", lambda k: k + 0.02 * torch.randn(k.shape, generator=torch.Generator().manual_seed(5)))),
    "rotation of K": B2.but(load=of("k", rotated)),
    "scales of V in E4M3": F.but(load=of("v", channel_scales)),
    "stale rows of K": Flash(48, load=of("k", stale)),
    "K in INT4": B2.but(load=quantised("k", 7.0, torch.round, -1)),
    "tokens of V mixed": F.but(load=of("v", lambda v: 0.98 * v + 0.02 * v.roll(1, 2))),
    "dropout of 0.1 %": Flash(144, p=dropped_weights),
    "bias of a head": F.but(out=biased_head),
    "dithered output": B2.but(out=dithered),
    "linear bias": Flash(1 << 20, scores=linear_bias),
    "temperature by head": B2.but(load=of("q", lambda q: q * (1 + 0.03 * (-1.0) ** torch.arange(q.shape[1]))[:, None, None])),
}
"""Faults that surely no catalogue has, so that a name would be wrong."""
