"""What a kernel may do, and what faulty kernels do: candidates, each of which predicts outputs element by element.

A kernel works in FP32 and rounds what it stores. `Simulation` is that in FP64: whatever a kernel may store, or get wrong, passes
through a place that has a name, where a candidate rounds or changes it. So a candidate is a name, a title, and what happens in
which places; where a problem does not have its places it is the declared policy.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT8, TF32, Format
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.base import Saved
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXP2_MINIMAX, Exponential, OnlineSoftmax, Recompute, exp2_polynomial
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.certification.cases import Inputs

Outputs = dict[str, Tensor]
Change = Callable[..., Any]
OF_KEYS = ("k", "v", "dk", "dv")
"""Tensors that have the heads and the tokens of k; others have those of q."""
OF_SUMS = ("running sum", "products", "tiles")
"""Of a gradient, what depends on the layout."""
NEVER = float("-inf")
WHOLE = 1 << 20  # the side of a tile that holds every token
LAZY = 8.0 * math.log(2)
_NAMES = {E4M3FN: "E4M3", E5M2: "E5M2", INT8: "INT8"}
_LATE = 4  # tiles that a fault can be in, the first ones


@dataclass(frozen=True)
class Stored:
    """A number times a factor, rounded to a format, which saturates if it has but 8 bits; -inf stays."""

    fmt: Format
    factor: float = 1.0
    rounding: Rounding = Rounding.NEAREST_EVEN

    def __call__(self, x: Tensor) -> Tensor:
        never = x.isneginf()
        return self._cast(x.masked_fill(never, 0.0) * self.factor).div_(self.factor).masked_fill(never, NEVER)

    @cached_property
    def _cast(self) -> Cast:
        return Cast(self.fmt, self.rounding, Overflow.SATURATE if self.fmt.bits == 8 else None)

    def __str__(self) -> str:
        times = "" if self.factor == 1 else f" times {self.factor:.4g}"
        truncated = "" if self.rounding is Rounding.NEAREST_EVEN else ", truncated"
        return f"{_NAMES.get(self.fmt, str(self.fmt).upper())}{times}{truncated}"


@dataclass(frozen=True)
class Layout:
    """How a kernel cuts the keys: tiles, their order, and splits, with as many tiles in each or as even as can be.

    A maximum has to rise by more than `lazy` for anything to be rescaled; a `whole` one is rounded up to a multiple of log 2,
    which makes rescales exact. With `divided` P is divided by l before it is rounded.
    """

    bc: int = WHOLE
    reverse: bool = False
    splits: int = 1
    even: bool = False
    lazy: float = 0.0
    whole: bool = False
    divided: bool = False

    def __str__(self) -> str:
        if self.bc == WHOLE:
            return f"whole rows{', P divided before it is rounded' if self.divided else ''}"
        order = [f"{self.splits} splits"] * (self.splits > 1) + ["reverse"] * self.reverse or ["forward"]
        return ", ".join(
            [f"tiles of {self.bc} keys", *order, *["lazy rescales"] * bool(self.lazy), *["whole maxima"] * self.whole]
        )

    @property
    def tiling(self) -> Tiling:
        """For the emulation, whose splits are even."""
        return Tiling(self.bc, self.bc, Order.REVERSE if self.reverse else Order.FORWARD, self.splits)

    def ranges(self, tiles: int) -> list[tuple[int, int]]:
        """The tiles of each split that has any."""
        each = math.ceil(tiles / self.splits)
        bounds = [round(i * tiles / self.splits) if self.even else min(i * each, tiles) for i in range(self.splits + 1)]
        return [(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way in which a kernel may compute.

    Attributes:
        name: for programs, such as `row_sum=BF16`; before = stands the step.
        title: for people, to follow "errs as with": `the row sum in BF16`.
        changes: what happens in which places of `Simulation`.
        permitted: whether a kernel of the declared policy may compute so.
        fitted: to one kernel, or two at once, so that its predictions hardly serve another and are not kept.
    """

    name: str
    title: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    permitted: bool = False
    fitted: bool = False

    @property
    def step(self) -> str:
        """What it is about, whatever the format."""
        return self.name.partition("=")[0]

    @property
    def has_factor(self) -> bool:
        """Whether it stores in 8 bits what may be multiplied before."""
        changes = [self.changes.get(place) for place in _WITH_FACTORS]
        return any(isinstance(change, Stored) and change.fmt.bits == 8 for change in changes)

    @property
    def is_plain(self) -> bool:
        """Whether it rounds to a format of 16 bits, to nearest, in one place and does nothing else."""
        changes = list(self.changes.values())
        return (
            all(isinstance(each, Stored) and each == Stored(each.fmt) and each.fmt.bits == 16 for each in changes)
            and len(changes) == 1
        )

    def __and__(self, other: Candidate) -> Candidate | None:
        """Both at once; None where they meet in a place."""
        if self.changes.keys() & other.changes.keys():
            return None
        names, changes = (f"{self.name} and {other.name}", f"{self.title} and {other.title}"), {**self.changes, **other.changes}
        return Candidate(*names, changes, self.permitted and other.permitted, fitted=True)


DECLARED = Candidate("declared", "the declared policy", permitted=True)


@dataclass(frozen=True)
class Simulation:
    """A pass in FP64, which a candidate changes in some places."""

    inputs: Inputs
    policy: Any
    layout: Layout
    changes: Mapping[str, Change]

    def at(self, place: str, x: Any) -> Any:
        """A result as the candidate has it; in base 2 too, where scores are multiples of log 2."""
        x = self.changes[place](x) if place in self.changes else x
        binary = self.changes.get(f"{place} in base 2")
        return x if binary is None else binary(x * LOG2_E) / LOG2_E

    def by(self, name: str, usual: Change) -> Change:
        """A function, or that which the candidate has in its place."""
        return self.changes.get(name, usual)

    def _stored(self, step: str, x: Tensor) -> Tensor:
        """A result that the policy rounds, unless the candidate has another format for it."""
        place = _OF_POLICY[step]
        return self.at(place, x if place in self.changes else Stored(getattr(self.policy, step).to)(x))

    @property
    def _heads(self) -> Tensor:
        """The head of k and v that each head of q reads."""
        return self.at("heads", torch.arange(self.inputs["q"].shape[1]) // self.inputs.group) % self.inputs["k"].shape[1]

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, and k and v of each head of q."""
        q, k, v = (x.double() for x in self.inputs.qkv)
        clean = self.by("padding", self.inputs.mask.without_padding)
        return self._read("q", q), self._read("k", clean(k))[:, self._heads], self._read("v", clean(v))[:, self._heads]

    def _read(self, name: str, x: Tensor) -> Tensor:
        """An input, which a kernel may store in another format, with a scale of each tile too."""
        read: Tensor = self.by(f"the {name} that is read", lambda x, bc: x)(x, self.layout.bc)
        return read

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """`scale Q K^T`, and -inf where a query does not see a key."""
        mask, (queries, keys), scale = self.inputs.mask, self.inputs.sizes, self.at("scale", self.inputs.scale)
        q, k = self.at("scaled q", self.at("q", q) * scale), self.at("scaled k", k * scale) / scale
        s = self.by("product", torch.matmul)(q, k.mT) / scale
        s = self.at("scaled scores", self.at("scores", s) * scale)
        position, key = self.at("position", torch.arange(queries)[:, None] + (keys - queries)), torch.arange(keys)
        hidden = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
        if mask.causal:
            hidden = hidden | (key > self.at("limit", position))
        if mask.window is not None:
            hidden = hidden | ((position - key).abs() >= self.at("window", mask.window))
        if mask.key_lengths is not None:
            hidden = hidden | (key >= self.at("lengths", torch.tensor(mask.key_lengths))[:, None, None, None])
        return s.masked_fill(hidden, NEVER)

    def forward(self) -> Outputs:
        """Out and LSE; splits are merged in FP64."""
        (q, k, v), keys = self._qkv(), self.inputs.sizes[1]
        bc = min(self.layout.bc, keys)
        tiles, rest = math.ceil(keys / bc), -keys % bc
        unseen = self.at("padding of tiles", NEVER) if self.inputs.mask.is_none else NEVER
        s = self.at("tiles of scores", pad(self._scores(q, k), (0, rest), value=unseen).unflatten(-1, (tiles, bc)))
        v = self.at("tiles of v", pad(v, (0, 0, 0, rest)).unflatten(-2, (tiles, bc)))
        parts = [self._split(s[..., start:stop, :], v[..., start:stop, :, :]) for start, stop in self.layout.ranges(tiles)]
        out, lse = (
            self.at(f"the {name} of splits", torch.stack(each))
            for name, each in zip(("O", "LSE"), zip(*parts, strict=True), strict=True)
        )
        if len(parts) > 1:
            lses, lse = lse, torch.logsumexp(lse, 0, keepdim=True)
            weights = self.at("weights of splits", torch.exp(lses - lse.masked_fill(lse == NEVER, 0.0)))
            out = (weights * out).sum(0, keepdim=True)
        return {"out": self._stored("output", self.at("all results", out[0])), "lse": self.at("the LSE", lse[0]).squeeze(-1)}

    def _split(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """O / l and LSE over some tiles, of scores `[batch, heads, queries, tiles, keys]`."""
        if self.layout.reverse:
            s, v = s.flip(-2), v.flip(-3)
        m = self._maximum(
            self.at("the running maximum", (s.amax(-1) * LOG2_E).ceil() / LOG2_E if self.layout.whole else s.amax(-1))
        )
        shift = m.masked_fill(m == NEVER, 0.0)
        falls = self.at("the fall of m", pad(self.at("the maximum that is kept", m[..., :-1]), (1, 0), value=NEVER) - shift)
        alpha = self.at("alpha", self.by("exp of alpha", torch.exp)(falls))
        of_o, of_l = self.at("alpha of O", alpha), self.at("alpha of l", alpha)
        p = self.at("exponentials", self.by("exp", torch.exp)(self.at("S - m", s - self.at("the m of P", shift)[..., None])))
        divisor = self.at("the row sum", p.sum(-1, keepdim=True)).clamp(min=1e-300) if self.layout.divided else torch.ones(())
        p, stored = self.at("terms of l", (p, self._stored("probabilities", p / divisor) * divisor))
        sums, products = (
            self.at("the row sum of each tile", self.by("sum", _sum)(p)),
            self.at("the product P V", stored.transpose(2, 3) @ v),
        )
        total, o = torch.zeros_like(sums[..., 0, :]), torch.zeros_like(products[:, :, 0])
        for tile in range(s.shape[-2]):
            total = self.at("the row sum", of_l[..., tile, None] * total + sums[..., tile, :])
            rescaled = self.at("the rescaled accumulator", of_o[..., tile, None] * o)
            if "the sum of P V" in self.changes:
                o = self.changes["the sum of P V"](rescaled, stored[..., tile, :], v[..., tile, :, :])
            else:
                o = self.at("the accumulator", rescaled + products[:, :, tile])
            if "the accumulator divided in every tile" in self.changes:
                o = self.at("the accumulator divided in every tile", o / total.clamp(min=1e-300)) * total
        lse, total = m[..., -1:].masked_fill(m[..., -1:] == NEVER, 0.0) + total.log(), total.masked_fill(total == 0, 1.0)
        return self.at("the dividend O", o) * self.at("1 / l", 1 / self.at("the divisor l", total)), lse

    def _maximum(self, top: Tensor) -> Tensor:
        """The running maximum of those of the tiles; a lazy one stays until it is too low by more than a threshold."""
        threshold, place = self.at("threshold", self.layout.lazy), "the maximum that is kept"
        if not threshold and place not in self.changes:
            return top.cummax(-1).values

        def risen(m: Tensor, each: Tensor) -> Tensor:
            kept = self.at(place, m)
            return torch.where(each - kept > threshold, each, kept)

        return torch.stack(list(itertools.accumulate(top.unbind(-1), risen)), -1)

    def backward(self) -> Outputs:
        """The gradients, from the O and the LSE that were saved."""
        (q, k, v), do, lse = self._qkv(), self._read("do", self.inputs["do"].double()), self.inputs["lse"].double()[..., None]
        below = (self._scores(q, k) - self.at("the LSE that is read", lse)).masked_fill(lse == NEVER, NEVER)
        p = self.at("exponentials", self.by("exp", torch.exp)(self.at("S - m", below)))
        dp = self.at("dP", do @ v.mT)
        terms = self.at("the terms of delta", self.inputs["do"] * self.at("the O that is read", self.inputs["out"].double()))
        delta = self.at("delta", self.by("sum", _sum)(terms))
        ds = p * self.at("dP - delta", dp - delta)
        if "P dP" in self.changes:
            ds = self.at("P dP", p * dp) - self.at("P delta", p * delta)
        ds = self._stored("ds", ds)
        dq = self._summed("dq", ds, k) * self.at("scale of dq", self.inputs.scale)
        dk = self._summed("dk", ds.mT, q) * self.at("scale of dk", self.inputs.scale)
        dv = self._summed("dv", self._stored("probabilities", p).mT, do)
        dk, dv = self.at("dk and dv", (self._of_groups(dk), self._of_groups(dv)))
        return {name: self._stored("output", x) for name, x in {"dq": dq, "dk": dk, "dv": dv}.items()}

    def _summed(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """`a b`, of which the products of tiles, and their running sum, may be stored."""
        if not self.changes.keys() & {f"the {what} of {name}" for what in OF_SUMS}:
            return a @ b
        total, starts = 0 * (a[..., :1] @ b[..., :1, :]), self.at(f"the tiles of {name}", range(0, a.shape[-1], self.layout.bc))
        for start in starts[:: -1 if self.layout.reverse else 1]:
            here = slice(start, start + self.layout.bc)
            total = self.at(
                f"the running sum of {name}", total + self.at(f"the products of {name}", a[..., here] @ b[..., here, :])
            )
        return total

    def _of_groups(self, gradient: Tensor) -> Tensor:
        """The sums over the heads that share one of k and v."""
        gradient = self.at("dk and dv of each head", gradient) if self.inputs.group > 1 else gradient
        numbers = torch.arange(len(self._heads)) % self.inputs.group
        gradient = gradient * self.by("heads of a group", torch.ones_like)(numbers)[:, None, None]
        return torch.zeros_like(gradient[:, :: self.inputs.group]).index_add(1, self._heads, gradient)


_FORWARD_STEPS = {
    "scores": ("scores", "scaled scores", "scaled scores in base 2", "scaled scores + exponentials + the row sum"),
    "maximum": ("the running maximum", "the maximum that is kept"),
    "exponential": (
        *("exponentials", "exponentials + alpha"),
        *(f"S - m{base}{p}" for base in ("", " in base 2") for p in ("", " + exponentials")),
        *(f"S - m{base} + the fall of m{base}{p}" for base in ("", " in base 2") for p in ("", " + exponentials + alpha")),
    ),
    "rescale": ("alpha", "alpha of O", "alpha of l"),
    "row_sum": ("the row sum", "the row sum of each tile"),
    "values": ("the product P V",),
    "accumulator": ("the accumulator", "the rescaled accumulator", "the accumulator divided in every tile"),
    "division": ("the dividend O", "the divisor l", "1 / l", "the dividend O + 1 / l"),
    "splits": ("the O of splits", "the LSE of splits", "weights of splits"),
    "lse": ("the LSE",),
}
"""Of each step the places in which it may be rounded, in those joined by + alike; of the results of `Simulation.forward`."""
_BACKWARD_STEPS = {
    "scores": ("scores", "scaled scores", "scaled scores in base 2"),
    "lse": ("the LSE that is read", "the LSE that is read in base 2"),
    "exponential": ("exponentials", "S - m", "S - m in base 2"),
    "delta": ("delta", "the O that is read", "the terms of delta"),
    "dp": ("dP",),
    "difference": ("dP - delta", "P dP + P delta"),
    **{
        " and ".join(names): tuple(" + ".join(f"the {what} of {name}" for name in names) for what in ("running sum", "products"))
        for names in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk", "dv"))
    },
    "heads": ("dk and dv of each head",),
}
_OF_POLICY = {"probabilities": "P", "ds": "dS", "output": "the output"}
"""Places of what a policy rounds."""
_OF_8_BITS = ("scores", "the product P V", "dP", "the O that is read", "P", "dS")
_WITH_FACTORS = ("dP", "P", "dS")


def _stored(step: str, places: str, stored: Stored, *, permitted: bool = False) -> Candidate:
    each = places.split(" + ")
    return Candidate(f"{step}={stored} of {places}", f"{' and '.join(each)} in {stored}", dict.fromkeys(each, stored), permitted)


def _roundings(steps: Mapping[str, tuple[str, ...]], declared: Any) -> Iterator[Candidate]:
    """Every place in every format that is not that of the policy; of what the policy rounds itself a wider one is permitted."""
    output = declared.output.to
    for step, places in ((step, each) for step, every in steps.items() for each in every):
        own = getattr(declared, step).to if step in _OF_POLICY else FP32
        formats = [Stored(fmt) for fmt in dict.fromkeys((output, BF16, FP16, FP32)) if fmt != own]
        formats += [Stored(fmt) for fmt in (E4M3FN, E5M2) if places in _OF_8_BITS]
        for stored in (*formats, Stored(output, rounding=Rounding.TOWARD_ZERO)):
            yield _stored(step, places, stored, permitted=stored.fmt.precision > own.precision)


def _results(declared: Any) -> Iterator[Candidate]:
    """An output that goes through another format, or is truncated; q or k that is scaled before it is stored."""
    for place in ("q in base 2", *(f"scaled {name}{base}" for name in "qk" for base in ("", " in base 2"))):
        yield _stored("scale_on", place, Stored(declared.output.to))
    through = [Stored(FP16, 2.0**power) for power in (0, -6, -8, -10, -12)]
    for stored in (*through, Stored(BF16), Stored(declared.output.to, rounding=Rounding.TOWARD_ZERO), Stored(E4M3FN)):
        if stored != Stored(declared.output.to):
            yield _stored("output", "the output", stored)
    for fmt, scale in itertools.product((E4M3FN, E5M2, INT8), ("token", "head")):
        change = partial(_quantised, bc=WHOLE, fmt=fmt, dims=_SCALES[scale])
        title = f"the output in {_NAMES[fmt]} with a scale of each {scale}"
        yield Candidate(f"output={_NAMES[fmt]} by {scale}", title, {"the output": change})


def _by_table(entries: int, index: Change, name: str) -> Candidate:
    """2^f, of f to one of so many in 1."""

    def exp(x: Tensor) -> Tensor:
        return torch.exp2(index(x * (LOG2_E * entries)) / entries)

    return Candidate(f"exp=table of {entries}{name}", f"an exponential from a table of {entries} entries{name}", {"exp": exp})


def by_polynomial(coefficients: tuple[float, ...], *, fitted: bool = False) -> Iterator[Candidate]:
    """Exponentials by a polynomial of 2^f, of P alone or of alpha too."""
    name, title = f"exp=polynomial {coefficients}", f"an exponential by a polynomial of degree {len(coefficients) - 1}"

    def exp(x: Tensor) -> Tensor:
        return exp2_polynomial(x * LOG2_E, coefficients)

    yield Candidate(name, title, {"exp": exp}, fitted=fitted)
    yield Candidate(f"{name} of alpha too", f"{title}, of alpha too", {"exp": exp, "exp of alpha": exp}, fitted=fitted)


def scaled(factors: Mapping[float, float]) -> Candidate:
    """Scores times a factor, by their scale."""
    off = next(iter(factors.values())) - 1
    change = {"scale": lambda scale: scale * factors.get(scale, 1.0)}
    return Candidate(f"scale={off:+.4g}", f"a scale of the scores off by {100 * off:+.2g} %", change, fitted=True)


def with_factor(candidate: Candidate, factor: float) -> Candidate:
    """P, dP or dS that is stored in 8 bits, times a further factor before."""
    place = next(place for place in _WITH_FACTORS if place in candidate.changes)
    change = candidate.changes[place]
    assert isinstance(change, Stored)
    stored = replace(change, factor=change.factor * factor)
    name, title = (text.replace(str(change), str(stored)) for text in (candidate.name, candidate.title))
    return Candidate(name, title, {**candidate.changes, place: stored}, fitted=True)


def _mask_faults() -> Iterator[Candidate]:
    """Faults of limits, lengths and heads, which both passes have."""
    for off, word in ((1, "many"), (-1, "few")):
        for what, title in {"limit": "a causal limit", "window": "a window"}.items():
            yield Candidate(f"{what}={off:+d}", f"{title} of one key too {word}", {what: partial(operator.add, off)})
    yield Candidate("limit=top left", "limits aligned at the first key, not at the last", {"position": lambda x: x - x[0]})
    ignored: dict[str, Change] = {name: lambda _: WHOLE for name in ("limit", "window")}
    lengths: dict[str, Change] = {"lengths": lambda x: x + WHOLE}
    read: dict[str, Change] = {"padding": lambda x: x}
    yield Candidate("limit=none", "a causal limit that is ignored", {"limit": ignored["limit"]})
    yield Candidate("window=none", "a window that is ignored", {"window": ignored["window"]})
    yield Candidate("lengths=none", "padded keys that are read", lengths | read)
    yield Candidate("lengths=zeros", "padded keys that count as zeros", lengths)
    yield Candidate("mask=none", "every mask ignored", ignored | lengths | read)
    yield Candidate("heads=in turn", "heads of q mapped to heads of k and v in turn", {"heads": lambda x: torch.arange(len(x))})


def _sum(p: Tensor) -> Tensor:
    return p.sum(-1, keepdim=True)


def _accumulated(start: Tensor, a: Tensor, b: Tensor, stored: Stored, terms: int) -> Tensor:
    """`start + a b`, stored after so many terms each."""
    for i in range(0, a.shape[-1], terms):
        start = stored(start + a[..., i : i + terms] @ b[..., i : i + terms, :])
    return start


def _one_of_group(numbers: Tensor, number: int) -> Tensor:
    return (numbers == number % (numbers.max() + 1)).double()


def _in_turn(p: Tensor, stored: Stored, terms: int = 1) -> Tensor:
    return _accumulated(torch.zeros(()), p, torch.ones(p.shape[-1], 1, dtype=p.dtype), stored, terms)


def _by_pairs(p: Tensor, stored: Stored) -> Tensor:
    """The sum as a tree of neighbours, each sum stored."""
    p = stored(p)
    while p.shape[-1] > 1:
        p = stored(pad(p, (0, p.shape[-1] % 2)).unflatten(-1, (-1, 2)).sum(-1))
    return p


def _accumulations() -> Iterator[Candidate]:
    """Sums that are stored within a tile, after each term or after so many as one instruction adds."""
    for stored in (Stored(BF16), Stored(FP16), Stored(TF32, rounding=Rounding.TOWARD_ZERO)):
        for terms, every in {1: "every key", 16: "every 16 keys", 32: "every 32 keys"}.items():
            name, title = f"accumulator={stored} after {every}", f"the accumulator in {stored} after {every}"
            yield Candidate(name, title, {"the sum of P V": partial(_accumulated, stored=stored, terms=terms)})
        for terms in (8, 16):
            product = partial(_accumulated, torch.zeros(()), stored=stored, terms=terms)
            name, title = f"scores={stored} by {terms}", f"scores in {stored} after every {terms} columns"
            yield Candidate(name, title, {"product": product})
        for name, title, function in (("keys", " after every key", _in_turn), ("pairs", ", added by pairs", _by_pairs)):
            change = partial(function, stored=stored)
            yield Candidate(f"row_sum={stored} by {name}", f"the row sum in {stored}{title}", {"sum": change})


_SCALES = {"token": (-1,), "tile": (-2, -1), "column": (-3, -2), "head": (-3, -2, -1)}
"""Of what a quantised input has a scale each, and the dimensions of tiles over which the largest number gives it."""


def _quantised(x: Tensor, bc: int, fmt: Format, dims: tuple[int, ...]) -> Tensor:
    """Tokens, in tiles of `bc`, in a format of 8 bits, whose largest number is the largest of all that have one scale."""
    tokens, cast = x.shape[-2], Cast(fmt, overflow=Overflow.SATURATE)
    tiles = pad(x, (0, 0, 0, -tokens % min(bc, tokens))).unflatten(-2, (-1, min(bc, tokens)))
    scale = (tiles.abs().amax(dims, keepdim=True) / fmt.max).clamp(min=1e-30)
    return (cast(tiles / scale) * scale).flatten(-3, -2)[..., :tokens, :]


def _inputs(*tensors: tuple[str, ...]) -> Iterator[Candidate]:
    """Inputs in 8 bits."""
    for names, fmt, scale in itertools.product(tensors, (E4M3FN, E5M2, INT8), _SCALES):
        sides = dict.fromkeys(names, _SCALES[scale])
        if scale == "tile" and len(names) > 1:
            sides["q"] = _SCALES["head"]  # the tiles of queries are large, and the problems are not
        places: dict[str, Change] = {
            f"the {name} that is read": partial(_quantised, fmt=fmt, dims=dims) for name, dims in sides.items()
        }
        title = f"{' and '.join(names)} in {_NAMES[fmt]} with a scale of each {scale}"
        yield Candidate(f"{'+'.join(names)}={_NAMES[fmt]} by {scale}", title, places)
    for names, stored in itertools.product(tensors, (Stored(E4M3FN), Stored(E5M2))):
        places = {f"the {name} that is read": lambda x, bc, stored=stored: stored(x) for name in names}
        yield Candidate(f"{'+'.join(names)}={stored}", f"{' and '.join(names)} in {stored}", places)


def _centred(x: Tensor, bc: int) -> Tensor:
    mean = x.mean(-2, keepdim=True)
    return mean + Stored(BF16)(x - mean)


def _with(x: Tensor, dim: int, place: int, value: float) -> Tensor:
    """A tensor with a number in one place of a dimension, if that is so long."""
    return x if place >= x.shape[dim] else x.index_fill(dim, torch.tensor(place % x.shape[dim]), value)


def _shares(weights: Tensor, stored: Change = lambda x: x) -> Tensor:
    """Weights of splits, the largest of them 1 before they are stored, over their sum."""
    most = weights.amax(0)
    x = stored(weights / most.masked_fill(most == 0, 1.0))
    return x / x.sum(0).masked_fill(most == 0, 1.0)


def _late(v: Tensor, tile: int) -> Tensor:
    """The keys of a tile, each of which is that before."""
    moved = v.flatten(-3, -2).roll(1, -2).unflatten(-2, v.shape[-3:-1])
    return torch.where((torch.arange(v.shape[-3]) == tile)[:, None, None], moved, v)


def _forward_catalogue(declared: Precision) -> Iterator[Candidate]:
    yield from _roundings(_FORWARD_STEPS, declared)
    of_p = list(_roundings({"probabilities": ("P",)}, declared))
    over: dict[str, Change] = {"terms of l": lambda pair: (pair[1], pair[1])}
    yield from of_p
    for each in (Candidate("sum_over=probabilities", "the rounded P"), *(each for each in of_p if not each.permitted)):
        yield Candidate(f"{each.name} of the sum too", f"{each.title}, of which l is the sum", {**each.changes, **over})
    yield from _results(declared)
    yield from (each for degree in (2, 3, 4) for each in by_polynomial(EXP2_MINIMAX[degree]))
    for bits in range(4, 9):
        yield _by_table(2**bits, torch.round, "")
        yield _by_table(2**bits, torch.floor, ", truncated")
    yield from _mask_faults()
    yield from _accumulations()
    yield from _inputs(("q",), ("k",), ("v",), ("q", "k"), ("q", "k", "v"))
    for stored in (Stored(BF16), Stored(FP16), Stored(BF16, rounding=Rounding.TOWARD_ZERO)):
        title = f"weights of splits in {stored}, divided by their sum"
        yield Candidate(f"splits={stored} of shares", title, {"weights of splits": partial(_shares, stored=stored)})
    yield Candidate("k=less its mean", "k less its mean in BF16", {"the k that is read": _centred})
    for name, title, place, change in (
        ("maximum stale", "a maximum that stays that of the first tile", "threshold", lambda _: math.inf),
        ("maximum late", "P with the maximum of the tile before", "the m of P", lambda x: x[..., [0, *range(x.shape[-1] - 1)]]),
        ("rescales of l missed", "every rescale of the row sum missed", "alpha of l", torch.ones_like),
        ("rescales missed", "every rescale of the accumulator missed", "alpha of O", torch.ones_like),
        ("rescales of both missed", "every rescale missed", "alpha", torch.ones_like),
        ("lse base 2", "an LSE in base 2", "the LSE", lambda x: x * LOG2_E),
        ("lse scaled", "an LSE times log 2", "the LSE", lambda x: x / LOG2_E),
        ("last head zero", "a last head that is not computed", "all results", lambda x: _with(x, 1, -1, 0.0)),
        ("padding counted", "padding of the last tile counted in the row sum", "padding of tiles", lambda _: 0.0),
        ("tile dropped", "a last tile left out", "tiles of scores", lambda x: _with(x, -2, -1, NEVER)),
        (
            "splits in base 2",
            "splits weighed by 2 to the power of their LSE",
            "weights of splits",
            lambda x: _shares(x ** math.log(2)),
        ),
        ("splits unweighed", "splits averaged without their LSE", "weights of splits", lambda x: torch.full_like(x, 1 / len(x))),
    ):
        yield Candidate(name, title, {place: change})
    for tile in range(1, _LATE):
        yield Candidate(f"v late={tile}", "v of one tile read a key too early", {"tiles of v": partial(_late, tile=tile)})
        missed = partial(_with, dim=-1, place=tile, value=1.0)
        yield Candidate(f"rescale missed={tile}", "one rescale of the accumulator missed", {"alpha of O": missed})
        yield Candidate(f"rescale of l missed={tile}", "one rescale of the row sum missed", {"alpha of l": missed})


def _backward_catalogue(declared: BackwardPrecision) -> Iterator[Candidate]:
    yield from _roundings({"probabilities": ("P",), "ds": ("dS",)} | _BACKWARD_STEPS, declared)
    yield from _results(declared)
    yield from (next(by_polynomial(EXP2_MINIMAX[degree])) for degree in (2, 3, 4))
    yield from _mask_faults()
    yield from _inputs(("q",), ("k",), ("v",), ("do",), ("q", "k"))
    for stored, terms in itertools.product((Stored(BF16), Stored(FP16)), (1, 16)):
        name, delta = f"{stored} after every {terms} columns", partial(_in_turn, stored=stored, terms=terms)
        yield Candidate(f"delta={name}", f"delta in {name}", {"sum": delta})
    dropped: Change = lambda starts: starts[:-1] or starts  # noqa: E731
    for names, tokens in ((("dq",), "keys"), (("dk", "dv"), "queries")):
        yield Candidate(
            f"last {tokens}", f"a last tile of {tokens} left out", {f"the tiles of {name}": dropped for name in names}
        )
    for number, word in {0: "first", -1: "last"}.items():
        of_one = partial(_one_of_group, number=number)
        yield Candidate(f"group={word}", f"dk and dv of the {word} head of a group alone", {"heads of a group": of_one})
    for name, title, place, change in (
        ("delta omitted", "dS without delta", "delta", lambda x: 0 * x),
        ("delta added", "delta added to dP", "delta", lambda x: -x),
        ("lse in base 2", "an LSE that is taken for one in base 2", "the LSE that is read", lambda x: x / LOG2_E),
        ("lse scaled", "an LSE times log2 e", "the LSE that is read", lambda x: x * LOG2_E),
        ("dk and dv exchanged", "dk and dv exchanged", "dk and dv", lambda pair: pair[::-1]),
    ):
        yield Candidate(name, title, {place: change})
    for each in ("dq", "dk"):
        yield Candidate(f"{each} unscaled", f"{each} without the scale", {f"scale of {each}": lambda _: 1.0})
        yield Candidate(f"{each} scaled twice", f"{each} with the scale twice", {f"scale of {each}": lambda scale: scale**2})


def _forward_emulated(inputs: Inputs, policy: Precision, layout: Layout) -> Outputs:
    """What tiled attention returns, in FP32 as kernels work; of whole rows a simulation."""
    if layout.divided or layout.whole:
        return Simulation(inputs, policy, layout, {}).forward()
    softmax = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=layout.lazy / math.log(2))
    q, k, v = (x.to(policy.carrier) for x in inputs.qkv)
    return Tiled(policy, layout.tiling, softmax, count=False)(q, k, v, inputs.mask, inputs.scale).tensors()


def _backward_emulated(inputs: Inputs, policy: BackwardPrecision, layout: Layout) -> Outputs:
    q, k, v, do, out, lse = (inputs[name].to(policy.carrier) for name in ("q", "k", "v", "do", "out", "lse"))
    run = TiledBackward(Exact(), policy, layout.tiling, Recompute(exponential=Exponential.EXP2), count=False)
    return run.backward(q, k, v, do, Saved(out, lse), inputs.mask, inputs.scale).tensors()


def _with_saved(inputs: Inputs, precision: str) -> Inputs:
    """With the O and the LSE that a forward pass of the declared policy saves."""
    saved = _forward_emulated(inputs, Precision.parse(precision), Layout(64))
    return replace(inputs, tensors=inputs.tensors | {"out": saved["out"].to(inputs["q"].dtype), "lse": saved["lse"].float()})


_USUAL = tuple(Layout(bc, reverse) for bc in (32, 64, 128) for reverse in (False, True))  # of the kernels that ship
ONE_TILE = (Layout(16), Layout(16, divided=True), Layout(16, whole=True))
"""In which rows of few keys are as in any other layout."""
_SIZES = (*range(16, 257, 16), 512)
UNSPLIT = (*(Layout(bc, reverse) for bc in _SIZES for reverse in (False, True)), Layout(divided=True), Layout())
SPLIT = tuple(Layout(bc, splits=splits) for bc in _SIZES[:8] for splits in range(2, 9))
"""Layouts by which that of a kernel is looked for, and then their variants."""


def variants(layout: Layout) -> Iterator[Layout]:
    """Layouts that are like one but for the order, the evenness of splits, and lazy rescales or whole maxima."""
    maxima: tuple[dict[str, Any], ...] = ({}, {"lazy": LAZY}, {"whole": True})
    for reverse, even, maximum in itertools.product((False, True), (False, True) if layout.splits > 1 else (False,), maxima):
        yield replace(layout, reverse=reverse, even=even, **{"lazy": 0.0, "whole": False} | maximum)


@dataclass(frozen=True)
class Pass:
    """The forward or the backward pass.

    Attributes:
        outputs: by name, the first of them primary.
        policy: by the name of a preset.
        prepare: adds to the inputs of a case what the pass reads beside them.
        golden: exact outputs.
        usual: layouts of the kernels that ship; their largest error is what a policy permits.
        emulated: what such a kernel returns.
        simulated, catalogue: what candidates return, and the candidates.
        layouts: without splits, and with.
    """

    outputs: tuple[str, ...]
    policy: Callable[[str], Any]
    prepare: Callable[[Inputs, str], Inputs]
    golden: Callable[[Inputs], Outputs]
    usual: tuple[Layout, ...]
    emulated: Callable[[Inputs, Any, Layout], Outputs]
    simulated: Callable[[Simulation], Outputs]
    catalogue: Callable[[Any], Iterator[Candidate]]
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]]


FORWARD = Pass(
    outputs=("out", "lse"),
    policy=Precision.parse,
    prepare=lambda inputs, precision: inputs,
    golden=lambda inputs: Exact()(*inputs.qkv, inputs.mask, inputs.scale).tensors(),
    usual=(
        *(*_USUAL, *(replace(each, lazy=LAZY) for each in _USUAL), Layout(64, splits=4, even=True)),
        *(Layout(divided=True), Layout(64, whole=True)),
    ),
    emulated=_forward_emulated,
    simulated=Simulation.forward,
    catalogue=_forward_catalogue,
    layouts=(UNSPLIT, SPLIT),
)
BACKWARD = Pass(
    outputs=("dq", "dk", "dv"),
    policy=BackwardPrecision.parse,
    prepare=_with_saved,
    golden=lambda inputs: ExactBackward()(*inputs.qkv, inputs.tensors["do"], inputs.mask, inputs.scale).tensors(),
    usual=_USUAL,
    emulated=_backward_emulated,
    simulated=Simulation.backward,
    catalogue=_backward_catalogue,
    layouts=(UNSPLIT[:-2], ()),
)
