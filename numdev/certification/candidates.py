"""What a kernel may do, and what faulty kernels do: candidates, each of which predicts outputs element by element.

A candidate is a step, a title, and what happens in which places of a simulation; where a problem does not have its places it is
the declared policy.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT8, TF32, Format
from numdev.arithmetic.quantise import MICROSCALED, Scale, round_shared
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.base import Saved
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXP2_MINIMAX, Exponential, OnlineSoftmax, Recompute, exp2_polynomial
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.certification.cases import Inputs
from numdev.certification.simulation import (
    LAZY,
    NAMES,
    NEVER,
    OF_POLICY,
    READ,
    WHOLE,
    Change,
    Cut,
    Layout,
    Outputs,
    Scheme,
    Simulation,
    Stored,
    symbol,
)

_QUERIES = 128  # in a tile
_LATE = 4  # tiles that a fault can be in, the first ones


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way in which a kernel may compute.

    Attributes:
        step: what it is about, whatever the format, such as `row_sum`.
        title: for people, to follow "errs as with": `the row sum in BF16`; no other has it.
        changes: what happens in which places of `Simulation`.
        permitted: whether a kernel of the declared policy may compute so.
        fitted: to one kernel, or two at once, so that its predictions hardly serve another and are not kept.
    """

    step: str
    title: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    permitted: bool = False
    fitted: bool = False

    @property
    def kind(self) -> str:
        """Its title without a format."""
        return re.sub(r"[A-Z]\w*\d\w*", "", self.title)

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
        step, title = " and ".join(sorted((self.step, other.step))), f"{self.title} and {other.title}"
        return Candidate(step, title, {**self.changes, **other.changes}, self.permitted and other.permitted, fitted=True)


DECLARED = Candidate("declared", "the declared policy", permitted=True)


_FORWARD_STEPS = {
    "scores": ("scores", "scaled scores", "scaled scores in base 2", "scaled scores + exponentials + the row sum"),
    "maximum": tuple(
        f"{m}{base}" for m in ("the running maximum", "the maximum that is kept", "the m of P") for base in ("", " in base 2")
    ),
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
    "splits": ("the O of splits", "the LSE of splits", "the LSE of splits in base 2", "weights of splits"),
    "lse": ("the LSE", "the LSE in base 2", "the l of the LSE"),
}
"""Of each step the places in which it may be rounded, in those joined by + alike; of the results of `Simulation.forward`."""
_BACKWARD_STEPS = {
    "scores": ("scores", "scaled scores", "scaled scores in base 2"),
    "lse": ("the LSE that is read", "the LSE that is read in base 2"),
    "exponential": ("exponentials", "S - m", "S - m in base 2"),
    "delta": ("delta", "the O that is read", "the terms of delta"),
    "dp": ("dP", "the dO of dP"),
    "difference": ("dP - delta", "P dP + P delta"),
    **{
        " and ".join(names): tuple(
            " + ".join(f"the {what} of {symbol(name)}" for name in names) for what in ("running sum", "products")
        )
        for names in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk", "dv"))
    },
    "heads": ("dK and dV of each head", "the sum of dK and dV over heads"),
}
_8_BITS, _SCALED = (Stored(E4M3FN), Stored(E5M2)), (Stored(E4M3FN, 2.0**8), Stored(E5M2, 2.0**8))
_IN_8_BITS = dict.fromkeys(("scores", "the product P V", "the O that is read", "the dO of dP"), _8_BITS) | {
    **{"P": (*_8_BITS, *_SCALED, Stored(E4M3FN, 448.0), Stored(INT8, 127.0))},
    **dict.fromkeys(("dP", "dS"), (*_8_BITS, *_SCALED)),
}
"""Places of what may be stored in 8 bits, and how, factors included."""
_MICROSCALED = ("mxfp8_e4m3", "mxfp8_e5m2")
_TRUNCATED = Stored(TF32, rounding=Rounding.TOWARD_ZERO)
"""As tensor cores add up."""


def _rounded(step: str, places: str, stored: Stored, *, permitted: bool = False) -> Candidate:
    each = places.split(" + ")
    return Candidate(step, f"{' and '.join(each)} in {stored}", dict.fromkeys(each, stored), permitted)


def _roundings(steps: Mapping[str, tuple[str, ...]], declared: Any) -> Iterator[Candidate]:
    """Every place in every format that is not that of the policy; of what the policy rounds itself a wider one is permitted."""
    output = declared.output.to
    for step, places in ((step, each) for step, every in steps.items() for each in every):
        own = getattr(declared, step).to if step in OF_POLICY else FP32
        formats = [Stored(fmt) for fmt in dict.fromkeys((output, BF16, FP16, FP32)) if fmt != own]
        formats += [*_IN_8_BITS.get(places, ()), *([_TRUNCATED] if "sum" in places or "accumulator" in places else ())]
        for stored in (*formats, Stored(output, rounding=Rounding.TOWARD_ZERO)):
            yield _rounded(step, places, stored, permitted=stored.fmt.precision > own.precision)


def _results(declared: Any) -> Iterator[Candidate]:
    """An output that goes through another format, or is truncated; q or k that is scaled before it is stored."""
    output = Stored(declared.output.to)
    for place in ("Q in base 2", *(f"scaled {name}{base}" for name in "QK" for base in ("", " in base 2"))):
        yield _rounded("scale", place, output)
    through = [Stored(FP16, 2.0**power) for power in (0, -6, -8, -10, -12)]
    for stored in (*through, Stored(BF16), replace(output, rounding=Rounding.TOWARD_ZERO), Stored(E4M3FN)):
        if stored != output:
            yield _rounded("output", "the output", stored)
    yield from _with_scales("output", "the output")


def by_polynomial(coefficients: tuple[float, ...], start: float = 0.0, *, fitted: bool = False) -> Iterator[Candidate]:
    """Exponentials `2^n p(x + start - n)`, `n = floor(x + start)`, with a polynomial p; of P alone or of alpha too."""

    def exp(x: Tensor) -> Tensor:
        return exp2_polynomial(x * LOG2_E + start, coefficients)

    title = f"an exponential by a polynomial of degree {len(coefficients) - 1}{' about 0' if start else ''}"
    yield Candidate("exponential", title, {"exp": exp}, fitted=fitted)
    yield Candidate("exponential", f"{title}, of alpha too", {"exp": exp, "exp of alpha": exp}, fitted=fitted)


def _by_table(entries: int, index: Change, word: str) -> Candidate:
    """2^f, of f to one of so many in 1."""

    def exp(x: Tensor) -> Tensor:
        return torch.exp2(index(x * (LOG2_E * entries)) / entries)

    return Candidate("exponential", f"an exponential from a table of {entries} entries{word}", {"exp": exp})


def scaled(factors: Mapping[float, float]) -> Candidate:
    """Scores times a factor, by their scale."""
    percent = 100 * (next(iter(factors.values())) - 1)
    change = {"scale": lambda scale: scale * factors.get(scale, 1.0)}
    return Candidate("scale", f"a scale of the scores off by {percent:+.2g} %", change, fitted=True)


def saturated(most: float) -> Candidate:
    """P no larger than a number, as in a format that a factor takes to its end."""
    return Candidate("probabilities", f"P that saturates at {most:.3g}", {"P": partial(torch.clamp, max=most)}, fitted=True)


def off(name: str, factor: float) -> Candidate:
    """A result, but for the LSE, times a factor."""
    place, change = {"out": "1 / l", "dq": "scale of dQ", "dk": "scale of dK"}.get(name, ""), partial(operator.mul, factor)
    changes: dict[str, Change] = {place: change} if place else {"dK and dV": lambda pair: (pair[0], change(pair[1]))}
    return Candidate("output", f"{'O' if name == 'out' else symbol(name)} times {factor:.4g}", changes, fitted=True)


def unknown_errors(precision: int, *, has_lse: bool) -> Iterator[Candidate]:
    """Of a step that acts on whole rows of the output alike, or on the LSE: whatever error the results show.

    The factor of a row is in the middle of those with which it is rounded to the results, whose format has `precision` bits.
    """

    def of_division(out: Tensor, lse: Tensor, own: Outputs) -> tuple[Tensor, Tensor]:
        size, (_, exponent) = own["out"].double().abs(), torch.frexp(own["out"])
        half = torch.ldexp(torch.full_like(size, 0.5), exponent - precision)
        least, most = ((size - half) / out.abs()).amax(-1, keepdim=True), ((size + half) / out.abs()).amin(-1, keepdim=True)
        return out * ((least + most) / 2).nan_to_num(1.0, 1.0, 1.0), lse

    def of_sum(out: Tensor, lse: Tensor, own: Outputs) -> tuple[Tensor, Tensor]:
        return out * (lse - own["lse"][..., None]).exp().nan_to_num(1.0), own["lse"][..., None]

    def of_lse(out: Tensor, lse: Tensor, own: Outputs) -> tuple[Tensor, Tensor]:
        return out, own["lse"][..., None]

    yield Candidate(
        "division", f"an unknown error of {'' if has_lse else 'l, or of '}1 / l", {"results": of_division}, fitted=True
    )
    if has_lse:
        yield Candidate("row_sum", "an unknown error of the row sum", {"results": of_sum}, fitted=True)
        yield Candidate("lse", "an unknown error of the LSE alone", {"results": of_lse}, fitted=True)


def _mask_faults() -> Iterator[Candidate]:
    """Faults of limits, lengths and heads, which both passes have."""
    for off, word in ((1, "many"), (-1, "few")):
        for what, title in {"limit": "a causal limit", "window": "a window"}.items():
            yield Candidate(what, f"{title} of one key too {word}", {what: partial(operator.add, off)})
    ignored: dict[str, Change] = {name: lambda _: WHOLE for name in ("limit", "window")}
    lengths: dict[str, Change] = {"lengths": lambda x: x + WHOLE}
    read: dict[str, Change] = {"padding": lambda x: x}
    yield Candidate("limit", "limits aligned at the first key, not at the last", {"position": lambda x: x - x[0]})
    yield Candidate("limit", "a causal limit that is ignored", {"limit": ignored["limit"]})
    yield Candidate("window", "a window that is ignored", {"window": ignored["window"]})
    yield Candidate("lengths", "padded keys that are read", lengths | read)
    yield Candidate("lengths", "padded keys that count as zeros", lengths)
    yield Candidate("mask", "every mask ignored", ignored | lengths | read)
    yield Candidate("heads", "heads of Q mapped to heads of K and V in turn", {"heads": lambda x: torch.arange(len(x))})


def _accumulated(start: Tensor, a: Tensor, b: Tensor, stored: Stored, terms: int) -> Tensor:
    """`start + a b`, stored after so many terms each."""
    for i in range(0, a.shape[-1], terms):
        start = stored(start + a[..., i : i + terms] @ b[..., i : i + terms, :])
    return start


def _in_turn(p: Tensor, stored: Stored, terms: int = 1) -> Tensor:
    return _accumulated(torch.zeros(()), p, torch.ones(p.shape[-1], 1, dtype=p.dtype), stored, terms)


def _by_pairs(p: Tensor, stored: Stored) -> Tensor:
    """The sum as a tree of neighbours, each sum stored."""
    p = stored(p)
    while p.shape[-1] > 1:
        p = stored(pad(p, (0, p.shape[-1] % 2)).unflatten(-1, (-1, 2)).sum(-1))
    return p


def _in_tile(start: Tensor, a: Tensor, b: Tensor, stored: Stored, terms: int) -> Tensor:
    return start + _accumulated(torch.zeros(()), a, b, stored, terms)


def _accumulations() -> Iterator[Candidate]:
    """Sums that are stored within a tile, after each term or after so many as one instruction adds."""
    for stored in (Stored(BF16), Stored(FP16), _TRUNCATED):
        for terms in (1, 4, 8, 16, 32, 64):
            every = f"{stored} after every {f'{terms} keys' if terms > 1 else 'key'}"
            of_all, of_tile = (partial(function, stored=stored, terms=terms) for function in (_accumulated, _in_tile))
            yield Candidate("accumulator", f"the accumulator in {every}", {"the sum of P V": of_all})
            yield Candidate("values", f"the product P V in {every}", {"the sum of P V": of_tile})
        for terms in (8, 16, 32):
            change = partial(_accumulated, torch.zeros(()), stored=stored, terms=terms)
            yield Candidate("scores", f"scores in {stored} after every {terms} columns", {"product": change})
        yield Candidate("row_sum", f"the row sum in {stored} after every key", {"sum": partial(_in_turn, stored=stored)})
        yield Candidate("row_sum", f"the row sum in {stored}, added by pairs", {"sum": partial(_by_pairs, stored=stored)})


_SCALES = {
    "token": (Scale.ROW, None),
    "column": (Scale.CHANNEL, None),
    "tile": (Scale.BLOCK, None),
    "head": (Scale.BLOCK, WHOLE),
    "tensor": (Scale.TENSOR, None),
}
"""Of what something in 8 bits has a scale each, and how many rows have one, those of a tile unless there is a number."""


def _quantised(
    x: Tensor, bc: int = WHOLE, whole: Tensor | None = None, *, fmt: Format, scale: Scale, rows: int | None = None
) -> Tensor:
    """Tokens, in tiles of `rows` or else `bc`, in a format of 8 bits, whose largest number is that of all that have one scale."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return round_shared(flat, Cast(fmt, overflow=Overflow.SATURATE), scale, rows or bc, whole=whole).view_as(x)


def _with_scales(step: str, place: str) -> Iterator[Candidate]:
    """A result in 8 bits."""
    for fmt, name in itertools.product((E4M3FN, E5M2, INT8), ("token", "head")):
        scale, rows = _SCALES[name]
        change = partial(_quantised, fmt=fmt, scale=scale, rows=rows)
        yield Candidate(step, f"{place} in {NAMES[fmt]} with a scale of each {name}", {place: change})


def _by_tiles(x: Tensor, fmt: Format, queries: int, keys: int) -> Tensor:
    """What has a number for each query and key, with a scale of each tile of these."""
    rows, columns = x.shape[-2:]
    tiles = pad(x, (0, -columns % keys, 0, -rows % queries)).unflatten(-1, (-1, keys)).unflatten(-3, (-1, queries))
    scale = (tiles.abs().amax((-3, -1), keepdim=True) / fmt.max).clamp(min=1e-30)
    stored = Cast(fmt, overflow=Overflow.SATURATE)(tiles / scale) * scale
    return stored.flatten(-2, -1).flatten(-3, -2)[..., :rows, :columns]


def _microscaled(x: Tensor, *_: object, fmt: str, dim: int) -> Tensor:
    """By blocks of the dimension that is summed over."""
    return MICROSCALED[fmt].along(x, dim)


def _inputs(*tensors: str) -> Iterator[Candidate]:
    """Inputs in 8 bits, of which some may be quantised together."""
    for names in (each.split() for each in tensors):
        step, title = "+".join(names), " and ".join(map(symbol, names))
        for fmt, (of_each, (scale, rows)) in itertools.product((E4M3FN, E5M2, INT8), _SCALES.items()):
            change, of_q = (partial(_quantised, fmt=fmt, scale=scale, rows=each) for each in (rows, rows or _QUERIES))
            places: dict[str, Change] = {READ[name]: of_q if name == "q" else change for name in names}
            yield Candidate(step, f"{title} in {NAMES[fmt]} with a scale of each {of_each}", places)
        for micro in _MICROSCALED:
            along = {name: partial(_microscaled, fmt=micro, dim=-2 if name in ("v", "do") else -1) for name in names}
            yield Candidate(step, f"{title} in {micro.upper()}", {READ[name]: change for name, change in along.items()})
        for stored in _8_BITS:
            places = {READ[name]: lambda x, *_, stored=stored: stored(x) for name in names}
            yield Candidate(step, f"{title} in {stored}", places)


def _centred(x: Tensor, *_: object) -> Tensor:
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


def _merged(weights: Tensor, out: Tensor, stored: Stored, *, by_pairs: bool, sums_alone: bool = False) -> Tensor:
    """The sum of splits, of which each and every sum of two is stored; one after the other, or by pairs."""
    parts = [(weight, x if sums_alone else stored(x)) for weight, x in zip(weights, out, strict=True)]
    while len(parts) > 1:
        (first, x), (second, y), *others = parts
        both = first + second
        merged = both, stored((first * x + second * y) / both.clamp(min=1e-300))
        parts = [*others, merged] if by_pairs else [merged, *others]
    return parts[0][1][None]


def _late(v: Tensor, tile: int) -> Tensor:
    """The keys of a tile, each of which is that before."""
    moved = v.flatten(-3, -2).roll(1, -2).unflatten(-2, v.shape[-3:-1])
    return torch.where((torch.arange(v.shape[-3]) == tile)[:, None, None], moved, v)


def _flushed(p: Tensor, least: float, then: Change = lambda p: p) -> Tensor:
    flushed: Tensor = then(p.masked_fill(p < least, 0.0))
    return flushed


def _stale(v: Tensor, step: int, tiles: slice) -> Tensor:
    """Some tiles, of which each finds that before or after it, in a buffer that is not filled again."""
    return v.index_copy(-3, torch.arange(v.shape[-3])[tiles], v.roll(step, -3)[..., tiles, :, :])


def _without_partial(tiles: Tensor) -> Tensor:
    return _with(tiles, -2, -1, NEVER) if bool(tiles[..., -1, -1].isneginf().all()) else tiles


def _one_of_group(numbers: Tensor, number: int) -> Tensor:
    return (numbers == number % (numbers.max() + 1)).double()


_FORWARD_FAULTS: tuple[tuple[str, str, str, Change], ...] = (
    ("k", "K less its mean in BF16", READ["k"], _centred),
    ("maximum", "a maximum that stays that of the first tile", "threshold", lambda _: math.inf),
    ("maximum", "P with the maximum of the tile before", "the m of P", lambda x: x[..., [0, *range(x.shape[-1] - 1)]]),
    ("rescale", "every rescale of the row sum missed", "alpha of l", torch.ones_like),
    ("rescale", "every rescale of the accumulator missed", "alpha of O", torch.ones_like),
    ("rescale", "every rescale missed", "alpha", torch.ones_like),
    ("lse", "an LSE in base 2", "the LSE", lambda x: x * LOG2_E),
    ("lse", "an LSE times log 2", "the LSE", lambda x: x / LOG2_E),
    ("heads", "a last head that is not computed", "results", lambda out, lse, _: (_with(out, 1, -1, 0.0), lse)),
    ("tile", "a last tile left out", "tiles of scores", lambda x: _with(x, -2, -1, NEVER)),
    ("tile", "a last partial tile left out", "tiles of scores", _without_partial),
    ("splits", "splits weighed by 2 to the power of their LSE", "weights of splits", lambda x: _shares(x ** math.log(2))),
    ("splits", "splits averaged without their LSE", "weights of splits", lambda x: torch.full_like(x, 1 / len(x))),
    ("splits", "splits weighed by l without m", "what weighs splits", lambda lses, m: lses - m),
    ("splits", "splits weighed by m without l", "what weighs splits", lambda lses, m: m),
    ("tile", "V of the tile before", "tiles of V", partial(_stale, step=1, tiles=slice(1, None))),
    ("tile", "V of the tile after", "tiles of V", partial(_stale, step=-1, tiles=slice(None, -1))),
    ("tile", "V of the tile before in the last one", "tiles of V", lambda v: _stale(v, 1, slice(max(1, v.shape[-3] - 1), None))),
)
_BACKWARD_FAULTS: tuple[tuple[str, str, str, Change], ...] = (
    ("delta", "dS without delta", "delta", lambda x: 0 * x),
    ("delta", "delta added to dP", "delta", lambda x: -x),
    ("lse", "an LSE that is taken for one in base 2", "the LSE that is read", lambda x: x / LOG2_E),
    ("lse", "an LSE times log2 e", "the LSE that is read", lambda x: x * LOG2_E),
    ("heads", "dK and dV of the first head of a group alone", "heads of a group", partial(_one_of_group, number=0)),
    ("heads", "dK and dV of the last head of a group alone", "heads of a group", partial(_one_of_group, number=-1)),
    ("dk and dv", "dK and dV exchanged", "dK and dV", lambda pair: pair[::-1]),
    *((each, f"{symbol(each)} without the scale", f"scale of {symbol(each)}", lambda _: 1.0) for each in ("dq", "dk")),
    *(
        (each, f"{symbol(each)} with the scale twice", f"scale of {symbol(each)}", lambda scale: scale**2)
        for each in ("dq", "dk")
    ),
)
"""Steps, titles, and what happens in which place."""


def _forward_catalogue(declared: Precision) -> Iterator[Candidate]:
    yield from _roundings(_FORWARD_STEPS, declared)
    of_p = list(_roundings({"probabilities": ("P",)}, declared))
    over: dict[str, Change] = {"terms of l": lambda pair: (pair[1], pair[1])}
    yield from of_p
    for each in (Candidate("probabilities", "the rounded P"), *(each for each in of_p if not each.permitted)):
        yield Candidate("probabilities", f"{each.title}, of which l is the sum", {**each.changes, **over})
    yield from _results(declared)
    yield from (each for degree in (2, 3, 4) for each in by_polynomial(EXP2_MINIMAX[degree]))
    for bits in range(4, 9):
        yield _by_table(2**bits, torch.round, "")
        yield _by_table(2**bits, torch.floor, ", truncated")
    yield from _mask_faults()
    yield from _accumulations()
    yield from _inputs("q", "k", "v", "q k", "q k v")
    yield from _with_scales("probabilities", "P")
    yield from (Candidate("probabilities", f"P in {fmt.upper()}", {"P": MICROSCALED[fmt]}) for fmt in _MICROSCALED)
    for power in (*range(6, 17), 20, 24):
        title, flushed = f"below 2^-{power} flushed", partial(_flushed, least=2.0**-power)
        yield Candidate("probabilities", f"P {title}", {"P": partial(flushed, then=Stored(declared.output.to))})
        yield Candidate("exponential", f"exponentials {title}", {"exponentials": flushed})
    for stored in (Stored(BF16), Stored(FP16), Stored(BF16, rounding=Rounding.TOWARD_ZERO)):
        shares = partial(_shares, stored=stored)
        yield Candidate("splits", f"weights of splits in {stored}, divided by their sum", {"weights of splits": shares})
        for title, by_pairs, sums_alone in (
            (f"the O of splits in {stored}, merged by pairs", True, False),
            (f"the O of splits in {stored}, merged one after the other", False, False),
            (f"the sums of splits in {stored}, one after the other", False, True),
        ):
            merge = partial(_merged, stored=stored, by_pairs=by_pairs, sums_alone=sums_alone)
            yield Candidate("splits", title, {"merge": merge})
    yield from (Candidate(step, title, {place: change}) for step, title, place, change in _FORWARD_FAULTS)
    filled: dict[str, Change] = {"padding of tiles": lambda _: 0.0, "the most keys of a tile": lambda keys: max(keys, _SIZES[-1])}
    yield Candidate("padding", "padding of the last tile counted in the row sum", filled)
    for tile in range(1, _LATE):
        late, missed = partial(_late, tile=tile), partial(_with, dim=-1, place=tile, value=1.0)
        yield Candidate("tile", f"V of tile {tile} read a key too early", {"tiles of V": late})
        yield Candidate("rescale", f"a rescale of the accumulator missed, at tile {tile}", {"alpha of O": missed})
        yield Candidate("rescale", f"a rescale of the row sum missed, at tile {tile}", {"alpha of l": missed})


def _backward_catalogue(declared: BackwardPrecision) -> Iterator[Candidate]:
    yield from _roundings({"probabilities": ("P",), "ds": ("dS",)} | _BACKWARD_STEPS, declared)
    yield from _results(declared)
    yield from (next(by_polynomial(EXP2_MINIMAX[degree])) for degree in (2, 3, 4))
    yield from _mask_faults()
    yield from (*_with_scales("dp", "dP"), *_with_scales("ds", "dS"))
    yield from _inputs("q", "k", "v", "do", "q k")
    for fmt, (rows, keys) in itertools.product((E4M3FN, E5M2, INT8), itertools.product((64, 128), repeat=2)):
        for step, place in {"probabilities": "P", "ds": "dS"}.items():
            title = f"{place} in {NAMES[fmt]} with a scale of each tile of {rows} queries by {keys} keys"
            yield Candidate(step, title, {place: partial(_by_tiles, fmt=fmt, queries=rows, keys=keys)})
    for stored in (Stored(BF16), Stored(FP16)):
        for terms in (1, 8, 16):
            delta = partial(_in_turn, stored=stored, terms=terms)
            yield Candidate("delta", f"delta in {stored} after every {terms} columns", {"sum": delta})
        yield Candidate("delta", f"delta in {stored}, added by pairs", {"sum": partial(_by_pairs, stored=stored)})
    dropped: Change = lambda starts: starts[:-1] or starts  # noqa: E731
    yield Candidate("tile", "a last tile of keys left out", {"the tiles of dQ": dropped})
    yield Candidate("tile", "a last tile of queries left out", dict.fromkeys(("the tiles of dK", "the tiles of dV"), dropped))
    yield from (Candidate(step, title, {place: change}) for step, title, place, change in _BACKWARD_FAULTS)


def _forward_emulated(inputs: Inputs, policy: Precision, layout: Layout) -> Outputs:
    """What tiled attention returns, in FP32 as kernels work; of schemes that it does not have a simulation."""
    if layout.scheme not in (Scheme.RUNNING, Scheme.LAZY) or layout.cut is Cut.KEYS:
        return Simulation(inputs, policy, layout, {}).forward()
    softmax = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=LAZY / math.log(2) * (layout.scheme is Scheme.LAZY))
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
ONE_TILE = (Layout(16), Layout())
"""In which rows of few keys are as in any other layout, but for what has a factor of each tile."""
_SIZES = (*range(16, 257, 16), 512)
UNSPLIT = (*(Layout(bc, reverse) for bc in _SIZES for reverse in (False, True)), Layout(scheme=Scheme.DIVIDED), Layout())
SPLIT = tuple(Layout(bc, splits=splits, cut=cut) for bc in _SIZES[:8] for splits in range(2, 9) for cut in (Cut.TILES, Cut.KEYS))
"""Layouts by which that of a kernel is looked for, and then their variants."""


def variants(layout: Layout) -> Iterator[Layout]:
    """Layouts that are like one but for order, cut and scheme."""
    schemes = [scheme for scheme in Scheme if scheme is not Scheme.DIVIDED or layout.bc == WHOLE]
    for reverse, cut, scheme in itertools.product((False, True), Cut if layout.splits > 1 else (Cut.TILES,), schemes):
        yield replace(layout, reverse=reverse, cut=cut, scheme=scheme)


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
        *(*_USUAL, *(replace(each, scheme=Scheme.LAZY) for each in _USUAL), Layout(64, splits=4, cut=Cut.EVEN)),
        *(Layout(scheme=Scheme.DIVIDED), Layout(64, scheme=Scheme.WHOLE)),
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
