"""A pass of attention in FP64 with places that have names, in which a candidate rounds or changes what passes.

A kernel works in FP32 and rounds what it stores: `Simulation` is that in FP64, in one of the layouts that kernels have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.arithmetic.formats import E4M3FN, E5M2, Format
from numdev.arithmetic.quantise import MICROSCALED, Scale, round_shared
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.mask import Mask
from numdev.attention.steps import LOG2_E
from numdev.attention.tiling import Order, Tiling

Tensors = dict[str, Tensor]
Change = Callable[..., Any]
OF_KEYS = ("k", "v", "dk", "dv")
"""Tensors that have the heads and the tokens of k; others have those of q."""
OF_SUMS = ("running sum", "products", "tiles")
"""Of a gradient, what depends on the layout."""
OF_POLICY = {"probabilities": "P", "ds": "dS", "output": "the output"}
"""Places of what a policy rounds."""
NEVER = float("-inf")
WHOLE = 1 << 20  # the side of a tile that holds every token
_QUERIES = 128  # in a tile
_ROWS = 96  # of each head, in which predictions are kept
LAZY = 8.0 * math.log(2)
_SCALES = {"token": Scale.ROW, "column": Scale.CHANNEL, "tile": Scale.BLOCK, "head": Scale.HEAD, "tensor": Scale.TENSOR}


def symbol(name: str) -> str:
    """Of a tensor as formulas have it: Q, dQ, ..."""
    return name[:-1] + name[-1].upper()


@dataclass(frozen=True)
class Inputs:
    """Rounded inputs of a case in the dtype of the kernel, on the CPU, whose replicates are batch entries."""

    tensors: Tensors
    mask: Mask
    scale: float
    replicates: int = 1
    whole: Tensors | None = None  # those of all replicates that the kernel is given, where these are of the first one
    shared: dict[str, tuple[Any, frozenset[str], Any]] = field(default_factory=dict, init=False)  # see `Simulation.shared`

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self["q"], self["k"], self["v"]

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys."""
        return self["q"].shape[-2], self["k"].shape[-2]

    @cached_property
    def first(self) -> Inputs:
        """The first replicate."""
        batch = len(self["q"]) // self.replicates
        mask = replace(self.mask, key_lengths=self.mask.key_lengths and self.mask.key_lengths[:batch])
        return Inputs({name: x[:batch] for name, x in self.tensors.items()}, mask, self.scale, whole=self.tensors)

    def rows(self, outputs: Tensors, most: int = WHOLE) -> Tensors:
        """The queries that see a key, and at most so many, and every key, `[replicates, numbers]` in FP64."""
        every = (self._seen > 0) & (self._seen <= most)
        some, queries = some_rows({"q": every})["q"], every.shape[2]
        rows = {name: x if name in OF_KEYS else x[every if x.shape[2] == queries else some] for name, x in outputs.items()}
        return {name: x.double().reshape(self.replicates, -1) for name, x in rows.items()}

    @cached_property
    def _seen(self) -> Tensor:
        """How many keys each query sees."""
        (queries, keys), batch = self.sizes, len(self["q"])
        ranges = [self.mask.key_range(queries, keys, torch.arange(queries), each) for each in self.mask.lengths(batch, keys)]
        return torch.stack([high - low for low, high in ranges])[:, None].expand(self["q"].shape[:-1])

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self["q"].shape[1] // self["k"].shape[1]


def some_rows(outputs: Tensors) -> Tensors:
    """At most `_ROWS` tokens, evenly spread, by which candidates are told apart."""
    return {name: x[:, :, :: math.ceil(x.shape[2] / _ROWS)].contiguous() for name, x in outputs.items()}


@dataclass(frozen=True)
class Stored:
    """Rounding to a format of a number times a factor, which saturates if the format has but 8 bits; -inf stays.

    Or else with a scale of `each` of `_SCALES`, by which its largest number is that of the format; or to MXFP8 in blocks of the
    dimension `dim`, which is summed over. A tile has the rows of one of the layout, and all columns, unless it has a `size`.
    """

    fmt: Format
    factor: float = 1.0
    rounding: Rounding = Rounding.NEAREST_EVEN
    each: str = ""
    size: tuple[int, int] | None = None

    def __call__(self, x: Tensor, rows: int = WHOLE, whole: Tensor | None = None, dim: int = -1) -> Tensor:
        cast = Cast(self.fmt, self.rounding, Overflow.SATURATE if self.fmt.bits == 8 else None)
        if self.each == "block":
            return MICROSCALED[f"{self}".lower()].along(x, dim)
        if not self.each and self.factor == 1 and self.fmt.has_infinity and self.fmt.bits > 8:
            return cast(x)
        if not self.each:
            return torch.where(x.isneginf(), x, cast(x * self.factor) / self.factor)
        rows, columns = self.size or (rows, x.shape[-1])
        flat = pad(x.reshape(*x.shape[:2], -1, x.shape[-1]), (0, -x.shape[-1] % columns))
        tiles = flat.unflatten(-1, (-1, columns)).movedim(-2, 2)
        stored = round_shared(tiles.flatten(1, 2), cast, _SCALES[self.each], rows, whole=whole).view_as(tiles)
        return stored.movedim(2, -2).flatten(-2)[..., : x.shape[-1]].reshape(x.shape)

    def __str__(self) -> str:
        name = {E4M3FN: "E4M3", E5M2: "E5M2"}.get(self.fmt, str(self.fmt).upper())
        if self.each == "block":
            return f"MXFP8_{name}"
        size = f" of {self.size[0]} quer{'ies' if self.size[0] > 1 else 'y'} by {self.size[1]} keys" if self.size else ""
        times = "" if self.factor == 1 else f" times {self.factor:.4g}"
        truncated = "" if self.rounding is Rounding.NEAREST_EVEN else ", truncated"
        return f"{name}{times}{truncated}" + (f" with a scale of each {self.each}{size}" if self.each else "")


class Scheme(Enum):
    """By what P is shifted, or divided, before it is rounded."""

    RUNNING = ""  # the maximum so far
    LAZY = "lazy rescales"  # one that is kept until it has risen by more than `LAZY`
    WHOLE = "whole maxima"  # the maximum so far, rounded up to a multiple of log 2, which makes rescales exact
    TILE = "a maximum of each tile"  # FlashAttention-1
    DIVIDED = "P divided before it is rounded"  # also by l, of whole rows


class Cut(Enum):
    """Where splits end."""

    TILES = ""  # after as many tiles each
    EVEN = ", even"  # after as many tiles each as can be, the last ones too
    KEYS = " of as many keys"  # within tiles too


@dataclass(frozen=True)
class Layout:
    """How a kernel cuts the keys: tiles, their order, splits, and its scheme."""

    bc: int = WHOLE
    reverse: bool = False
    splits: int = 1
    cut: Cut = Cut.TILES
    scheme: Scheme = Scheme.RUNNING

    def __str__(self) -> str:
        order = [f"{self.splits} splits{self.cut.value}"] * (self.splits > 1) + ["reverse"] * self.reverse or ["forward"]
        tiles = ["whole rows"] if self.bc == WHOLE else [f"tiles of {self.bc} keys", *order]
        return ", ".join([*tiles, *[self.scheme.value] * (self.scheme is not Scheme.RUNNING)])

    @property
    def tiling(self) -> Tiling:
        """For the emulation, whose splits are even."""
        return Tiling(self.bc, self.bc, Order.REVERSE if self.reverse else Order.FORWARD, self.splits)

    def ranges(self, keys: int) -> list[tuple[int, int]]:
        """The keys of each split that has any."""
        unit = 1 if self.cut is Cut.KEYS else min(self.bc, keys)
        units = math.ceil(keys / unit)
        each = units / self.splits if self.cut is Cut.EVEN else math.ceil(units / self.splits)
        bounds = [min(round(i * each) * unit, keys) for i in range(self.splits + 1)]
        return [(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]

    def parts(self, keys: int) -> tuple[tuple[int, int], ...]:
        """The first key of each split, and the keys of its tiles, in which alone layouts of the same order can differ."""
        return tuple((start, min(self.bc, stop - start)) for start, stop in self.ranges(keys))


@dataclass(frozen=True)
class Simulation:
    """A pass in FP64, which a candidate changes in some places; `of_kernel` are the results that it should have."""

    inputs: Inputs
    policy: Any
    layout: Layout
    changes: Mapping[str, Change]
    of_kernel: Tensors = field(default_factory=dict)
    places: set[str] = field(default_factory=set, init=False)  # the places that were met

    def shared(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result, kept for all candidates that change no place that was met before it.

        A search takes 0.6 to 0.8 of the time: 44 s in place of 53 on one core for
        `numdev certify vanilla backward=vanilla head_dim=32 only=[normal,ramp,few_keys]`.
        """
        policy, places, value = self.inputs.shared.get(name, (None, frozenset[str](), None))
        if policy is self.policy and not places & self.changes.keys():
            self.places.update(places)
            return value
        value = compute()
        if self.inputs.replicates == 1 and not self.places & self.changes.keys():
            self.inputs.shared[name] = self.policy, frozenset(self.places), value
        return value

    def at(self, place: str, x: Any) -> Any:
        """A result as the candidate has it; in base 2 too, where scores are multiples of log 2."""
        return self._in_base_2(place, self.by(place)(x))

    def _in_base_2(self, place: str, x: Any) -> Any:
        binary = self.by(f"{place} in base 2", None)
        return x if binary is None else binary(x * LOG2_E) / LOG2_E

    def by(self, name: str, usual: Any = lambda x: x) -> Any:
        """A function, or that which the candidate has in its place."""
        self.places.add(name)
        return self.changes.get(name, usual)

    def _sum(self, x: Tensor) -> Tensor:
        return self.by("sum", lambda x, ones: x.sum(-1, keepdim=True))(x, x.new_ones(x.shape[-1], 1))

    def _stored(self, step: str, x: Tensor) -> Tensor:
        """A result that the policy rounds, unless the candidate has another format for it."""
        return self.by(OF_POLICY[step], Stored(getattr(self.policy, step).to))(x)

    @property
    def _heads(self) -> Tensor:
        """The head of k and v that each head of q reads."""
        return self.at("heads", torch.arange(self.inputs["q"].shape[1]) // self.inputs.group) % self.inputs["k"].shape[1]

    def _read(self, *names: str) -> Iterator[Tensor]:
        """Inputs, which a kernel may store in another format, with a scale of each tile, or of blocks of a dimension.

        Of k and v those of each head of q.
        """
        clean = self.by("padding", self.inputs.mask.without_padding)
        for name in names:
            x = clean(self.inputs[name].double()) if name in OF_KEYS else self.inputs[name].double()
            if (stored := self.by(symbol(name), None)) is not None:
                whole, rows = (self.inputs.whole or self.inputs.tensors)[name], _QUERIES if name == "q" else self.layout.bc
                x = stored(x, rows=rows, whole=whole, dim=-2 if name in ("v", "do") else -1)
            yield x[:, self._heads] if name in OF_KEYS else x

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """`scale Q K^T`, and -inf where a query does not see a key."""
        mask, (queries, keys), scale = self.inputs.mask, self.inputs.sizes, self.at("scale", self.inputs.scale)
        q, k = self.at("scaled Q", self._in_base_2("Q", q) * scale), self.at("scaled K", k * scale) / scale
        s = self.by("product", torch.matmul)(q, k.mT) / scale
        s = self.at("scaled scores", self.at("scores", s) * scale)
        position, key = self.at("position", torch.arange(queries)[:, None] + (keys - queries)), torch.arange(keys)
        hidden = self.at("hidden", NEVER)
        if mask.causal:
            s = s.masked_fill(key > self.at("limit", position), hidden)
        if mask.window is not None:
            s = s.masked_fill((position - key).abs() >= self.at("window", mask.window), hidden)
        if mask.key_lengths is not None:
            s = s.masked_fill(key >= self.at("lengths", torch.tensor(mask.key_lengths))[:, None, None, None], hidden)
        return s

    def forward(self) -> Tensors:
        """Out and LSE; splits are merged in FP64."""
        q, k, v = self.shared("inputs", lambda: tuple(self._read("q", "k", "v")))
        s, keys, parts = self.shared("S", lambda: self._scores(q, k)), self.inputs.sizes[1], list[tuple[Tensor, Tensor, Tensor]]()
        bc = min(self.layout.bc, self.at("the most keys of a tile", keys))
        unseen = self.at("padding of tiles", NEVER) if self.inputs.mask.is_none else NEVER
        for start, stop in self.layout.ranges(keys):
            rest = (start - stop) % bc
            scores = pad(s[..., start:stop], (0, rest), value=unseen).unflatten(-1, (-1, bc))
            values = pad(v[..., start:stop, :], (0, 0, 0, rest)).unflatten(-2, (-1, bc))
            parts.append(self._split(self.at("tiles of scores", scores), self.at("tiles of V", values)))
        out, lse, m = (torch.stack(each) for each in zip(*parts, strict=True))
        if self.layout.splits > 1:
            out, lses = self.at("the O of splits", out), self.at("the LSE of splits", lse)
            lse = self.by("the LSE of all splits", partial(torch.logsumexp, dim=0, keepdim=True))(lses)
            logs = self.by("what weighs splits", lambda lses, m: lses)(lses, m)
            weights = self.at("weights of splits", torch.softmax(logs, 0).nan_to_num(0.0))
            merged = (weights * out).sum(0, keepdim=True), lse
            out, lse = self.by("merge", lambda *_: merged)(out, lses) if len(parts) > 1 else merged
        out, lse = self.by("results", lambda out, lse, of_kernel: (out, lse))(out[0], self.at("the LSE", lse[0]), self.of_kernel)
        return {"out": self._stored("output", out), "lse": lse.squeeze(-1)}

    def _split(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """O / l, LSE and m over some tiles, of scores `[batch, heads, queries, tiles, keys]`."""
        if self.layout.reverse:
            s, v = s.flip(-2), v.flip(-3)
        top, scheme = s.amax(-1), self.layout.scheme
        m = self._maximum(self.at("the running maximum", (top * LOG2_E).ceil() / LOG2_E if scheme is Scheme.WHOLE else top))
        shift = m.masked_fill(m == NEVER, 0.0)
        falls = self.at("the fall of m", pad(self.at("the maximum that is kept", m[..., :-1]), (1, 0), value=NEVER) - shift)
        alpha = self.at("alpha", self.by("exp of alpha", torch.exp)(falls))
        of_o, of_l = self.at("alpha of O", alpha), self.at("alpha of l", alpha)
        p = self.at("exponentials", self.by("exp", torch.exp)(self.at("S - m", s - self.at("the m of P", shift)[..., None])))
        divisor = torch.ones(())
        if scheme is Scheme.DIVIDED:
            divisor = self.at("the row sum", p.sum(-1, keepdim=True)).clamp(min=1e-300)
        if scheme is Scheme.TILE:
            divisor = torch.exp(top - shift).masked_fill(top == NEVER, 1.0)[..., None]
        p, stored = self.at("terms of l", (p, self._stored("probabilities", p / divisor) * divisor))
        sums = self.at("the row sum of each tile", self._sum(p))
        products = self.at("the product P V", self.by("product of P and V", torch.matmul)(stored.transpose(2, 3), v))
        total, o = torch.zeros_like(sums[..., 0, :]), torch.zeros_like(products[:, :, 0])
        for tile in range(s.shape[-2]):
            total = self.at("the row sum", of_l[..., tile, None] * total + sums[..., tile, :])
            rescaled = self.at("the rescaled accumulator", of_o[..., tile, None] * o)
            o = self.at("the accumulator", rescaled + products[:, :, tile])
            o = self.by("the sum of P V", lambda *_, x=o: x)(rescaled, stored[..., tile, :], v[..., tile, :, :])
            if self.by("the accumulator divided in every tile", None) is not None:
                o = self.at("the accumulator divided in every tile", o / total.clamp(min=1e-300)) * total
        last = self.at("the m of the LSE", m[..., -1:].masked_fill(m[..., -1:] == NEVER, 0.0))
        lse, total = last + self.at("the l of the LSE", total).log(), total.masked_fill(total == 0, 1.0)
        return self.at("the dividend O", o) * self.at("1 / l", 1 / self.at("the divisor l", total)), lse, last

    def _maximum(self, top: Tensor) -> Tensor:
        """The running maximum of those of the tiles; a lazy one stays until it is too low by more than a threshold."""
        threshold = self.at("threshold", LAZY * (self.layout.scheme is Scheme.LAZY))

        def risen(m: Tensor, each: Tensor) -> Tensor:
            kept = self.at("the maximum that is kept", m)
            return torch.where(each - kept > threshold, each, kept)

        return torch.stack(list(itertools.accumulate(top.unbind(-1), risen)), -1)

    def backward(self) -> Tensors:
        """The gradients, from the O and the LSE that were saved."""
        q, k, v, do = self.shared("inputs", lambda: tuple(self._read("q", "k", "v", "do")))
        p, scale = self.shared("P", lambda: self._probabilities(q, k)), self.inputs.scale
        dp = self.shared("dP", lambda: self.at("dP", self.at("the dO of dP", do) @ v.mT))
        delta = self.shared("delta", self._delta)
        of_rows = self.by("of rows", lambda p, delta, dp, k, of_kernel: (p, delta))
        p, delta = of_rows(p, delta, dp, k * scale, self.of_kernel)
        of_v = self.shared("sum of dV", lambda: self._summed("dV", self._stored("probabilities", p).mT, do))
        dv = self.shared("dV", lambda: self.at("dV", self._of_groups(of_v)))
        ds = self.shared("dS", lambda: self._stored("ds", self._difference(p, dp, delta)))
        of_q, of_k = self.at("scaled Q that dK reads", q * scale) / scale, self.at("scaled K that dQ reads", k * scale) / scale
        dk = self.shared("dK", lambda: self._of_groups(self._summed("dK", ds.mT, of_q) * self.at("scale of dK", scale)))
        dk, dv = self.shared("dK and dV", lambda: [self._stored("output", x) for x in self.at("dK and dV", (dk, dv))])
        dq = self.shared("dQ", lambda: self._stored("output", self._summed("dQ", ds, of_k) * self.at("scale of dQ", scale)))
        return {"dq": dq, "dk": dk, "dv": dv}

    def _probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        lse = self.inputs["lse"].double()[..., None]
        below = (self._scores(q, k) - self.at("the LSE that is read", lse)).masked_fill(lse == NEVER, NEVER)
        return self.at("exponentials", self.by("exp", torch.exp)(self.at("S - m", below)))

    def _delta(self) -> Tensor:
        terms = self.at("the terms of delta", self.inputs["do"] * self.at("the O that is read", self.inputs["out"].double()))
        return self.at("delta", self._sum(terms))

    def _difference(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        """dS before it is rounded."""
        if self.by("P dP", None) is not None:
            return self.at("P dP", p * dp) - self.at("P delta", p * delta)
        return p * self.at("dP - delta", dp - delta)

    def _summed(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """`a b`, of which the products of tiles, and their running sum, may be stored."""
        if not any(self.by(f"the {what} of {name}", None) for what in OF_SUMS):
            return a @ b
        total, starts = 0 * (a[..., :1] @ b[..., :1, :]), self.at(f"the tiles of {name}", range(0, a.shape[-1], self.layout.bc))
        for start in starts[:: -1 if self.layout.reverse else 1]:
            here = slice(start, start + self.layout.bc)
            products = self.at(f"the products of {name}", a[..., here] @ b[..., here, :])
            total = self.at(f"the running sum of {name}", total + products)
        return total

    def _of_groups(self, gradient: Tensor) -> Tensor:
        """The sums over the heads that share one of k and v."""
        gradient = self.at("dK and dV of each head", gradient) if self.inputs.group > 1 else gradient
        numbers = torch.arange(len(self._heads)) % self.inputs.group
        gradient = gradient * self.by("heads of a group", torch.ones_like)(numbers)[:, None, None]
        total, group = torch.zeros_like(gradient[:, :: self.inputs.group]), self.inputs.group
        for i in range(group):
            total = self.at("the sum of dK and dV over heads", total.index_add(1, self._heads[i::group], gradient[:, i::group]))
        return total
