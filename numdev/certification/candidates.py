"""What a kernel may do, and what faulty kernels do: candidates, each of which predicts outputs element by element.

A candidate is a step, a title, and what happens in which places of a simulation; where a problem does not have its places it is
the declared policy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT8, TF32, Format
from numdev.arithmetic.rounding import Rounding
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXP2_MINIMAX, exp2_polynomial
from numdev.attention.steps import LOG2_E
from numdev.certification.simulation import NEVER, OF_POLICY, WHOLE, Change, Stored, Tensors, symbol

_MOST_KEYS = 512  # of a tile
_POWERS = (*range(6, 17), 20, 24)  # of 2, below which P is flushed
_LATE = 4  # tiles that a fault can be in, the first ones


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way in which a kernel may compute."""

    step: str  # what it is about, whatever the format, such as `row_sum`
    title: str  # for people, to follow "errs as with": `the row sum in BF16`; no other has it
    changes: Mapping[str, Change] = field(default_factory=dict)  # what happens in which places of `Simulation`
    permitted: bool = False  # to a kernel of the declared policy
    fitted: bool = False  # to one kernel, or two at once, so that its predictions hardly serve another and are not kept

    def __and__(self, other: Candidate) -> Candidate | None:
        """Both at once; None where they meet in a place."""
        if self.changes.keys() & other.changes.keys():
            return None
        if not self.changes:
            return other
        step, title = " and ".join(sorted((self.step, other.step))), f"{self.title} and {other.title}"
        return Candidate(step, title, {**self.changes, **other.changes}, self.permitted and other.permitted, fitted=True)


DECLARED = Candidate("declared", "the declared policy", permitted=True)

_SCALED_INPUTS = "Q in base 2, scaled Q*, scaled K*"
_FORWARD_STEPS = {
    "scores": "scores, scaled scores*, scaled scores + exponentials + the row sum",
    "maximum": "the running maximum*, the maximum that is kept*, the m of P*, the maximum that is kept* + the m of the LSE*",
    "exponential": "exponentials, exponentials + alpha, S - m*, S - m* + exponentials, S - m* + the fall of m*, "
    "S - m* + the fall of m* + exponentials + alpha",
    "probabilities": "P",
    "rescale": "alpha, alpha of O, alpha of l",
    "row_sum": "the row sum, the row sum of each tile",
    "values": "the product P V",
    "accumulator": "the accumulator, the rescaled accumulator, the rescaled accumulator + the accumulator, "
    "the accumulator divided in every tile",
    "division": "the dividend O, the divisor l, 1 / l, the dividend O + 1 / l",
    "splits": "the O of splits, the LSE of splits*, weights of splits",
    "lse": "the LSE*, the l of the LSE",
    "scale": _SCALED_INPUTS,
}
"""Of each step the places in which it may be rounded, those with a * in base 2 too, and those joined by + alike."""
_BACKWARD_STEPS = {
    "scores": "scores, scaled scores*",
    "lse": "the LSE that is read*",
    "exponential": "exponentials, S - m*",
    "delta": "delta, the O that is read, the terms of delta",
    "dp": "dP, the dO of dP",
    "difference": "dP - delta, P dP + P delta",
    **{
        each.lower().replace("+", "and"): ", ".join(each.replace("d", f"the {what} of d") for what in ("running sum", "products"))
        for each in ("dQ", "dK", "dV", "dK + dV", "dQ + dK + dV")
    },
    "probabilities": "P",
    "ds": "dS",
    "heads": "dK and dV of each head, the sum of dK and dV over heads",
    "scale": f"{_SCALED_INPUTS}, scaled K* + scaled K that dQ reads*, scaled Q* + scaled Q that dK reads*",
}
_OF_8_BITS = (E4M3FN, E5M2, INT8)
_TRUNCATED = Stored(TF32, rounding=Rounding.TOWARD_ZERO)
"""As tensor cores add up."""
_8_BITS = (Stored(E4M3FN), Stored(E5M2))
_SCALED = tuple(Stored(fmt, 2.0**power) for fmt in (E4M3FN, E5M2) for power in (2, 4, 6, 8, 10))
_MICROSCALED = (Stored(E4M3FN, each="block"), Stored(E5M2, each="block"))
_SHARED = {each: tuple(Stored(fmt, each=each) for fmt in _OF_8_BITS) for each in ("token", "column", "tile", "head", "tensor")}
_BY_TOKENS = (*_SHARED["token"], *_SHARED["head"])
_BY_TILES = tuple(Stored(fmt, each="tile", size=size) for fmt in _OF_8_BITS for size in product((64, 128), (64, 128)))
_BY_KEYS = tuple(Stored(fmt, each="tile", size=(1, keys)) for fmt in (E4M3FN, INT8) for keys in (16, 32, 48, 64, 96, 128))
_IN_8_BITS: Mapping[str, tuple[Stored, ...]] = {
    **dict.fromkeys(("scores", "the product P V", "the O that is read", "the dO of dP"), _8_BITS),
    "P": (*_8_BITS, *_SCALED, Stored(E4M3FN, 448.0), Stored(INT8, 127.0), *_BY_TOKENS, *_BY_KEYS, *_MICROSCALED),
    "dP": (*_8_BITS, *_SCALED, *_BY_TOKENS),
    "dS": (*_8_BITS, *_SCALED, *_BY_TOKENS, *_BY_TILES),
    **dict.fromkeys(("Q", "K", "V", "dO", "Q + K", "Q + K + V"), (*sum(_SHARED.values(), ()), *_MICROSCALED, *_8_BITS)),
}
"""Places of what may be stored in 8 bits, and how, factors included; inputs that are quantised together."""


def _rounded(step: str, places: str, formats: Iterable[Stored], own: Format = FP32) -> Iterator[Candidate]:
    """Places in each of some formats; of what the policy rounds to `own` a wider one is permitted."""
    for base in ("", " in base 2") if "*" in places else ("",):
        alike = places.replace("*", base)
        for fmt in formats:
            title, permitted = f"{alike.replace(' + ', ' and ')} in {fmt}", fmt.fmt.precision > own.precision
            yield Candidate(step, title, dict.fromkeys(alike.split(" + "), fmt), permitted)


def _roundings(steps: Mapping[str, str], inputs: Sequence[str], declared: Any) -> Iterator[Candidate]:
    """Every place in every format that is not that of the policy; the output in those through which a kernel may take it."""
    output = declared.output.to
    truncated = Stored(output, rounding=Rounding.TOWARD_ZERO)
    for step, places in ((step, each) for step, every in steps.items() for each in every.split(", ")):
        own = getattr(declared, step).to if step in OF_POLICY else FP32
        formats = [Stored(fmt) for fmt in dict.fromkeys((output, BF16, FP16, FP32)) if fmt != own]
        formats += [_TRUNCATED] if any(word in places for word in ("sum", "accumulator", "scores")) else []
        yield from _rounded(step, places, (*formats, truncated, *_IN_8_BITS.get(places, ())), own)
    powers = [Stored(FP16, 2.0**power) for power in (0, -6, -8, -10, -12)]
    through = (Stored(BF16), *powers, truncated, Stored(E4M3FN), *_BY_TOKENS)
    yield from _rounded("output", "the output", [each for each in through if each != Stored(output)])
    for places in inputs:
        yield from _rounded(places.lower().replace(" + ", "+"), places, _IN_8_BITS[places])


def _exponential(title: str, exp: Change, of_alpha: bool = False, fitted: bool = False, **more: Change) -> Candidate:
    """Of P alone, or of alpha too."""
    changes = {"exp": exp, **({"exp of alpha": exp} if of_alpha else {}), **more}
    return Candidate("exponential", f"{title}{', of alpha too' if of_alpha else ''}", changes, fitted=fitted)


def _by_polynomial(degree: int, of_alpha: bool) -> Candidate:
    """Exponentials `2^n p(x - n)`, `n = floor(x)`, with the best polynomial p of a degree."""
    title = f"an exponential by a polynomial of degree {degree}"
    return _exponential(title, lambda x: exp2_polynomial(x * LOG2_E, EXP2_MINIMAX[degree]), of_alpha)


CURVES: Mapping[str, Change] = {
    "an exponential, by the fraction of its argument in base 2": lambda x: 2.0 * ((x * LOG2_E) % 1.0) - 1.0,
    "an exponential, by the whole part of its argument in base 2": lambda x: 1.0 + (x * LOG2_E).floor() / 12.0,
    "an exponential, by its argument": lambda x: 1.0 + x / 8.0,
}
"""Of what an error of an exponential is an unknown function, and how that lies between -1 and 1."""
TERMS, KEYS = 12, 16
"""Of a curve; and of a pattern of keys, of which some may have another exponential: it divides every size of a tile."""


def curved(title: str, of_alpha: bool, keys: Sequence[int], terms: int, *factors: float) -> Candidate:
    """With an error of the argument of an exponential that is a sum of so many Chebyshev polynomials.

    In some of every `KEYS` keys, with factors in common or, where there are more, of each its own.
    """

    def exp(x: Tensor) -> Tensor:
        place, of_keys = CURVES[title](x.clamp(-1e4, 1e4)).clamp(-1.0, 1.0), torch.zeros(terms, KEYS, dtype=x.dtype)
        of_keys[:, keys] = torch.tensor(factors, dtype=x.dtype).view(terms, -1)
        result, last, term = x.clone(), place, torch.ones_like(x)
        for factor in of_keys[:, torch.arange(x.shape[-1]) % KEYS]:
            result.addcmul_(factor, term)
            last, term = term, (2 * place).mul_(term).sub_(last)
        return result.exp_()

    some = f", in keys {', '.join(map(str, keys))} of every {KEYS}" if len(keys) < KEYS else ""
    return _exponential(f"an unknown error of {title}{some}", exp, of_alpha, fitted=True)


def reduced(whole: Change, error: float) -> Candidate:
    """`exp(x - n c) 2^n`, where n is x / log 2, made whole, and the constant c is log 2 but for a relative error."""
    title = f"an exponential whose log 2 is off by {100 * error:+.2g} %"
    return _exponential(title, lambda x: (x - error * math.log(2) * whole(x.clamp(-1e4) * LOG2_E)).exp(), True, fitted=True)


def clamped(masked: bool, least: float) -> Candidate:
    """The argument of an exponential is no less than a number, that of keys that are not seen either."""
    title = f"an exponential whose argument is at least {least:.3g}{', of masked keys too' if masked else ''}"
    hidden: dict[str, Change] = {"hidden": lambda _: -1e30} if masked else {}
    return _exponential(title, lambda x: x.clamp(least).exp().masked_fill(x == NEVER, 0.0), True, fitted=True, **hidden)


def scaled(scales: Iterable[float], *errors: float) -> Candidate:
    """Scores with an error of each of some scales, relative; of the least scale, that of the largest heads, in the title."""
    of_scales = dict(zip(scales, errors, strict=True))
    title = f"a scale of the scores off by {100 * of_scales[min(of_scales)]:+.2g} %"
    return Candidate("scale", title, {"scale": lambda scale: scale * (1 + of_scales.get(scale, 0.0))}, fitted=True)


def capped(place: str, inverse_square: float) -> Candidate:
    """Scores, before or after their scale, with a soft cap; their error is about linear in the parameter."""
    most = max(abs(inverse_square), 1e-12) ** -0.5  # a fit may step below 0
    return Candidate("scores", f"{place} with a soft cap of {most:.3g}", {place: lambda s: most * (s / most).tanh()}, fitted=True)


def limited(place: str, most: float) -> Candidate:
    """P no larger than a number, as in a format that a factor takes to its end; or scores."""
    step, title = {"P": ("probabilities", "P that saturates at"), "scaled scores": ("scores", "scores of at most")}[place]
    return Candidate(step, f"{title} {most:.3g}", {place: partial(torch.clamp, max=most)}, fitted=True)


def overflowing(most: float) -> Candidate:
    """P in E4M3 times a factor that takes what is larger beyond the end of the format."""
    stored = Stored(E4M3FN, E4M3FN.max / most)
    return Candidate("probabilities", f"P in {stored}", {"P": stored}, fitted=True)


def off(name: str, error: float) -> Candidate:
    """A result, but for the LSE, with a relative error."""
    place = {"out": "1 / l", "dq": "scale of dQ", "dk": "scale of dK", "dv": "dV"}[name]
    title = f"{'O' if name == 'out' else symbol(name)} times {1 + error:.4g}"
    return Candidate("output", title, {place: partial(operator.mul, 1 + error)}, fitted=True)


def unknown_errors(precision: int, outputs: Sequence[str]) -> Iterator[Candidate]:
    """Of a step that has one number for each row, or of the LSE: whatever error the results show.

    The factor of a row is in the middle of those with which it is rounded to the results, whose format has `precision` bits;
    of gradients it is that which is nearest to dQ.
    """

    def of_division(out: Tensor, lse: Tensor, own: Tensors) -> tuple[Tensor, Tensor]:
        size, (_, exponent) = own["out"].double().abs(), torch.frexp(own["out"])
        half = torch.ldexp(torch.full_like(size, 0.5), exponent - precision)
        least, most = ((size - half) / out.abs()).amax(-1, keepdim=True), ((size + half) / out.abs()).amin(-1, keepdim=True)
        return out * ((least + most) / 2).nan_to_num(1.0, 1.0, 1.0), lse

    def nearest(x: Tensor, of: Tensor) -> Tensor:
        return ((x * of).sum(-1, keepdim=True) / of.square().sum(-1, keepdim=True)).nan_to_num(0.0)

    def of_sum(out: Tensor, lse: Tensor, own: Tensors) -> tuple[Tensor, Tensor]:
        return out * (lse - own["lse"][..., None]).exp().nan_to_num(1.0), own["lse"][..., None]

    unknown: tuple[tuple[str, str, str, Change], ...] = (
        ("division", f"{'' if 'lse' in outputs else 'l, or of '}1 / l", "results", of_division),
        ("row_sum", "the row sum", "results", of_sum),
        ("lse", "the LSE alone", "results", lambda out, lse, own: (out, own["lse"][..., None])),
    )
    if "dq" in outputs:
        unknown = (
            ("delta", "delta", "of rows", lambda p, x, dp, k, own: (p, x - nearest(own["dq"] - p * (dp - x) @ k, p @ k))),
            ("lse", "the LSE that is read", "of rows", lambda p, x, dp, k, own: (p * nearest(own["dq"], p * (dp - x) @ k), x)),
        )
    for step, title, place, change in unknown if {"dq", "lse"} & {*outputs} else unknown[:1]:
        yield Candidate(step, f"an unknown error of {title}", {place: change}, fitted=True)


_ZERO = torch.zeros(())


def _accumulated(start: Tensor, a: Tensor, b: Tensor, stored: Stored, terms: int) -> Tensor:
    """`start + a b`, stored after so many terms each."""
    for i in range(0, a.shape[-1], terms):
        start = stored(start + a[..., i : i + terms] @ b[..., i : i + terms, :])
    return start


def _by_pairs(p: Tensor, _: Tensor, stored: Stored) -> Tensor:
    """The sum as a tree of neighbours, each sum stored."""
    p = stored(p)
    while p.shape[-1] > 1:
        p = stored(pad(p, (0, p.shape[-1] % 2)).unflatten(-1, (-1, 2)).sum(-1))
    return p


def filled(x: Tensor, dim: int, place: int, value: float) -> Tensor:
    """A tensor with a number in one place of a dimension, if that is so long."""
    return x if place >= x.shape[dim] else x.index_fill(dim, torch.tensor(place % x.shape[dim]), value)


def _shares(weights: Tensor, stored: Stored) -> Tensor:
    """Weights of splits, the largest of them 1 before they are stored, over their sum."""
    most = weights.amax(0)
    x = stored(weights / most.masked_fill(most == 0, 1.0))
    return x / x.sum(0).masked_fill(most == 0, 1.0)


def _sum_in_another_base(lses: Tensor, power: float, of_sum: float) -> Tensor:
    """The LSE of all splits, by a power of the exponentials of theirs, and a logarithm times a factor."""
    most = lses.amax(0, keepdim=True).clamp(min=-1e30)
    return most + of_sum * torch.logsumexp((lses - most) * power, 0, keepdim=True)


def _in_4_bits(x: Tensor, columns: int, **_: object) -> Tensor:
    """16 numbers from the least to the largest of so many columns of a token, or of all."""
    groups = x.unflatten(-1, (-1, x.shape[-1] if x.shape[-1] % columns else columns))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    step = (most - least).clamp(min=1e-30) / 15
    return ((groups - least).div_(step).round_().mul_(step) + least).flatten(-2)


def _merged(outs: Tensor, lses: Tensor, stored: Mapping[str, Stored], order: int, by_pairs: bool) -> tuple[Tensor, Tensor]:
    """O and LSE of splits, or sums of O alone, stored and merged by two: one after the other, as in a ring, or by pairs."""
    of_o, of_sum, of_lse = (stored.get(name, lambda x: x) for name in ("the O", "the sums", "the LSE"))
    parts = [(of_o(x), of_lse(lse)) for x, lse in zip(outs, lses, strict=True)][::order]
    while len(parts) > 1:
        (x, first), (y, second), *others = parts
        o = x + torch.sigmoid(second - first).nan_to_num(0.0) * (y - x)
        merged = of_sum(of_o(o)), of_lse(torch.logaddexp(first, second))
        parts = [*others, merged] if by_pairs else [merged, *others]
    return parts[0][0][None], parts[0][1][None]


def _flushed(power: int, then: Change = lambda p: p) -> Change:
    return lambda p: then(p.masked_fill(p < 2.0**-power, 0.0))


def _misread(v: Tensor, by: int, tiles: slice) -> Tensor:
    """Some tiles of V in the buffer of those so many before, which is not filled again, or with 0 each row of the one before."""
    moved = v.flatten(-3, -2).roll(by * v.shape[-2] or 1, -2).unflatten(-2, v.shape[-3:-1])
    return v.index_copy(-3, torch.arange(v.shape[-3])[tiles], moved[..., tiles, :, :])


def _without_partial(tiles: Tensor, least: int) -> Tensor:
    """Without a last tile of fewer keys than it has room for, and than `least`."""
    keys = int((~tiles[..., -1, :].isneginf().flatten(0, -2).all(0)).sum())
    return filled(tiles, -2, -1, NEVER) if tiles.shape[-2] > 1 and keys < min(least, tiles.shape[-1]) else tiles


def _without_rows(p: Tensor, delta: Tensor, *_: object, rows: int) -> tuple[Tensor, Tensor]:
    """P of 0 for the queries beyond the last whole tile of so many."""
    first = p.shape[-2] // rows * rows or p.shape[-2]
    return p.masked_fill((torch.arange(p.shape[-2]) >= first)[:, None], 0.0), delta


def _mask_faults() -> Iterator[Candidate]:
    """Faults of limits, lengths and heads, which both passes have."""
    zeros: dict[str, Change] = {"lengths": lambda x: x + WHOLE}
    read: dict[str, Change] = {"padding": lambda x: x}
    of_limits, ignored = {"limit": "a causal limit", "window": "a window"}, dict.fromkeys(("limit", "window"), lambda _: WHOLE)
    for (off_by, word), (what, title) in product({1: "many", -1: "few"}.items(), of_limits.items()):
        yield Candidate(what, f"{title} of one key too {word}", {what: partial(operator.add, off_by)})
    yield Candidate("limit", "limits aligned at the first key, not at the last", {"position": lambda x: x - x[0]})
    yield from (Candidate(what, f"{title} that is ignored", {what: ignored[what]}) for what, title in of_limits.items())
    for n, title in {8: "8, 16 or 32", 64: "64 or 128"}.items():  # which no case tells apart
        up: dict[str, Change] = {"lengths": lambda x, n=n: -(-x // n) * n}
        for word, more in (("", {}), (", of padding that is read", read)):
            yield Candidate("lengths", f"key lengths rounded up to a multiple of {title}{word}", up | more)
    yield Candidate("lengths", "the key length of the first batch entry for all", {"lengths": lambda x: x[:1].expand_as(x)})
    yield Candidate("lengths", "padded keys that are read", zeros | read)
    yield Candidate("lengths", "padded keys that count as zeros", zeros)
    yield Candidate("mask", "every mask ignored", ignored | zeros | read)
    yield Candidate("heads", "heads of Q mapped to heads of K and V in turn", {"heads": lambda x: torch.arange(len(x))})
    early: dict[str, Change] = {"heads": lambda x: torch.cat([x[1:], x[-1:]])}
    yield Candidate("heads", "heads of Q mapped to heads of K and V one too early", early)


def _faults_of_tiles() -> Iterator[Candidate]:
    """Keys, their padding and rows of V, in all tiles or some."""
    counted: dict[str, Change] = {"padding of tiles": lambda _: 0.0, "the most keys of a tile": partial(max, _MOST_KEYS)}
    yield Candidate("padding", "padding of the last tile counted in the row sum", counted)
    yield Candidate("tile", "a last tile left out", {"tiles of scores": lambda x: filled(x, -2, -1, NEVER)})
    for n in (_MOST_KEYS, 8, 16, 32):
        title = "a last partial tile" if n == _MOST_KEYS else f"a last tile of fewer than {n} keys, or of some more,"
        yield Candidate("tile", f"{title} left out", {"tiles of scores": partial(_without_partial, least=n)})
    misread = {"the tile before": (1, slice(1, None)), "the tile after": (-1, slice(None, -1))}
    misread |= {"the tile before in the last one": (1, slice(-1, None))}
    misread |= {f"tile {tile} read a key too early": (0, slice(tile, tile + 1)) for tile in range(1, _LATE)}
    for title, (by, tiles) in misread.items():
        yield Candidate("tile", f"V of {title}", {"tiles of V": partial(_misread, by=by, tiles=tiles)})


def _faults_of_splits() -> Iterator[Candidate]:
    """What weighs splits, and the format in which they are merged, which may have another base than their LSE."""
    for power, what in ((math.log(2), "2 to the power of their LSE"), (LOG2_E, "e to the power of their LSE in base 2")):
        weights: dict[str, Change] = {"what weighs splits": lambda lses, m, power=power: power * lses}
        yield Candidate("splits", f"splits weighed by {what}", weights)
        for word, of_sum in (("", 1 / power), (" and the logarithm in another base", 1.0)):
            of_all: dict[str, Change] = {"the LSE of all splits": partial(_sum_in_another_base, power=power, of_sum=of_sum)}
            yield Candidate("splits", f"splits merged by {what}{word}, their LSE too", weights | of_all)
    ways = ("by pairs", 1, True), ("one after the other", 1, False), ("from the last to the first", -1, False)
    for stored in (Stored(BF16), Stored(FP16), Stored(BF16, rounding=Rounding.TOWARD_ZERO)):
        places, shares = f"of splits in {stored}", partial(_shares, stored=stored)
        yield Candidate("splits", f"weights {places}, divided by their sum", {"weights of splits": shares})
        for what, (word, order, by_pairs) in product(("the O", "the sums", "the LSE", "the O and the LSE"), ways):
            of = dict.fromkeys(what.split(" and "), stored)
            merge = partial(_merged, stored=of, order=order, by_pairs=by_pairs)
            yield Candidate("splits", f"{what} {places}, merged {word}", {"merge": merge})


def _accumulations() -> Iterator[Candidate]:
    """Sums that are stored within a tile, after each term or after so many as one instruction adds."""
    for stored in (Stored(BF16), Stored(FP16), _TRUNCATED):
        for terms in (1, 4, 8, 16, 32, 64):
            every = f"{stored} after every {f'{terms} keys' if terms > 1 else 'key'}"
            change = partial(_accumulated, stored=stored, terms=terms)
            yield Candidate("accumulator", f"the accumulator in {every}", {"the sum of P V": change})
            yield Candidate("values", f"the product P V in {every}", {"product of P and V": partial(change, _ZERO)})
        for terms in (8, 16, 32):
            change = partial(_accumulated, _ZERO, stored=stored, terms=terms)
            yield Candidate("scores", f"scores in {stored} after every {terms} columns", {"product": change})
        of_sum, title = partial(_accumulated, _ZERO, stored=stored, terms=1), f"the row sum in {stored}"
        yield Candidate("row_sum", f"{title} after every key", {"sum": of_sum})
        yield Candidate("row_sum", f"{title}, added by pairs", {"sum": partial(_by_pairs, stored=stored)})


_FORWARD_FAULTS = (
    Candidate("k", "K less its mean in BF16", {"K": lambda x, **_: (mean := x.mean(-2, keepdim=True)) + Stored(BF16)(x - mean)}),
    Candidate("maximum", "a maximum that stays that of the first tile", {"threshold": lambda _: math.inf}),
    Candidate("maximum", "P with the maximum of the tile before", {"the m of P": lambda x: x[..., [0, *range(x.shape[-1] - 1)]]}),
    Candidate(
        "row_sum", "one more key, of score 0 and value 0", {"results": lambda out, lse, _: (out * lse.sigmoid(), softplus(lse))}
    ),
    Candidate("rescale", "every rescale missed", {"alpha": torch.ones_like}),
    Candidate("lse", "an LSE in base 2", {"the LSE": lambda x: x * LOG2_E}),
    Candidate("lse", "an LSE times log 2", {"the LSE": lambda x: x / LOG2_E}),
    Candidate("lse", "an LSE of m and log2 l", {"the l of the LSE": lambda x: x**LOG2_E}),
    Candidate("heads", "a last head that is not computed", {"results": lambda out, lse, _: (filled(out, 1, -1, 0.0), lse)}),
    Candidate("probabilities", "P in 8 bits without a sign, times 255", {"P": lambda p: (p * 255).round() / 255}),
    *_faults_of_tiles(),
    Candidate("splits", "splits averaged without their LSE", {"weights of splits": lambda x: torch.full_like(x, 1 / len(x))}),
    Candidate("splits", "splits weighed by l without m", {"what weighs splits": lambda lses, m: lses - m}),
    Candidate("splits", "splits weighed by m without l", {"what weighs splits": lambda lses, m: m}),
    *_faults_of_splits(),
    *_accumulations(),
)
_BACKWARD_FAULTS = (
    Candidate("tile", "a last tile of keys left out", {"the tiles of dQ": lambda starts: starts[:-1] or starts}),
    Candidate("tile", "a last tile of queries left out", {f"the tiles of {x}": lambda at: at[:-1] or at for x in ("dK", "dV")}),
    Candidate("delta", "dS without delta", {"delta": lambda x: 0 * x}),
    Candidate("delta", "delta added to dP", {"delta": lambda x: -x}),
    Candidate("lse", "an LSE that is taken for one in base 2", {"the LSE that is read": lambda x: x / LOG2_E}),
    Candidate("lse", "an LSE times log2 e", {"the LSE that is read": lambda x: x * LOG2_E}),
    Candidate("heads", "dK and dV of the first head of a group alone", {"heads of a group": lambda x: (x == 0).double()}),
    Candidate("heads", "dK and dV of the last head of a group alone", {"heads of a group": lambda x: (x == x.max()).double()}),
    Candidate("dk and dv", "dK and dV exchanged", {"dK and dV": lambda pair: pair[::-1]}),
    Candidate("dq", "dQ without the scale", {"scale of dQ": lambda _: 1.0}),
    Candidate("dk", "dK without the scale", {"scale of dK": lambda _: 1.0}),
    Candidate("dq", "dQ with the scale twice", {"scale of dQ": lambda c: c**2}),
    Candidate("dk", "dK with the scale twice", {"scale of dK": lambda c: c**2}),
)


def forward_catalogue(declared: Precision) -> Iterator[Candidate]:
    roundings = list(_roundings(_FORWARD_STEPS, ("Q", "K", "V", "Q + K", "Q + K + V"), declared))
    yield from roundings
    for each in (Candidate("probabilities", "the rounded P"), *roundings):
        if each.step == "probabilities" and not each.permitted:
            changes = {**each.changes, "terms of l": lambda pair: (pair[1], pair[1])}
            yield Candidate("probabilities", f"{each.title}, of which l is the sum", changes)
    yield from (_by_polynomial(degree, of_alpha) for degree in (1, 2, 3, 4) for of_alpha in (False, True))
    for bits, (word, index), of_alpha in product(range(4, 9), (("", torch.round), (", truncated", torch.floor)), (False, True)):
        title = f"an exponential from a table of {2**bits} entries{word}"
        yield _exponential(title, lambda x, n=2**bits, index=index: torch.exp2(index(x * (LOG2_E * n)) / n), of_alpha)
    yield from (*_mask_faults(), *_FORWARD_FAULTS)
    for places, (columns, of) in product(("K", "V", "K + V"), ((32, "32 columns of a "), (WHOLE, ""))):
        title = f"{places.replace('+', 'and')} in 4 bits between the least and the largest number of each {of}token"
        in_4_bits = dict.fromkeys(places.split(" + "), partial(_in_4_bits, columns=columns))
        yield Candidate(places.lower().replace(" ", ""), title, in_4_bits)
    flushes = [(Stored(declared.output.to), power, "P") for power in _POWERS]
    for stored, power, title in ((Stored(FP16), 14, "P in FP16,"), (Stored(E4M3FN), 6, "P in E4M3,"), *flushes):
        yield Candidate("probabilities", f"{title} below 2^-{power} flushed", {"P": _flushed(power, stored)})
        if title == "P":
            yield Candidate("exponential", f"exponentials below 2^-{power} flushed", {"exponentials": _flushed(power)})
    for what, place in {"the accumulator": "alpha of O", "the row sum": "alpha of l"}.items():
        missed: dict[str, Change] = {f"every rescale of {what} missed": torch.ones_like}
        for power in (0.5, 1, 2, 4, 8):
            missed[f"rescales of {what} by more than 2^-{power:g} missed"] = lambda x, n=power: x.masked_fill(x > 2.0**-n, 1.0)
        for tile in (*range(1, _LATE), -1):
            where = f"tile {tile}" if tile > 0 else "the last tile"
            missed[f"a rescale of {what} missed, at {where}"] = partial(filled, dim=-1, place=tile, value=1.0)
        yield from (Candidate("rescale", title, {place: change}) for title, change in missed.items())


def backward_catalogue(declared: BackwardPrecision) -> Iterator[Candidate]:
    yield from _roundings(_BACKWARD_STEPS, ("Q", "K", "V", "dO", "Q + K"), declared)
    yield from _rounded("probabilities", "P", _BY_TILES)
    yield from (_by_polynomial(degree, False) for degree in (1, 2, 3, 4))
    yield from (*_mask_faults(), *_BACKWARD_FAULTS)
    for rows in (16, 32, 64, 128):
        title = f"a last partial tile of {rows} queries left out"
        yield Candidate("tile", title, {"of rows": partial(_without_rows, rows=rows)})
    for power in _POWERS:
        yield Candidate("exponential", f"P below 2^-{power} flushed", {"exponentials": _flushed(power)})
    for stored in (Stored(BF16), Stored(FP16)):
        for terms in (1, 8, 16):
            delta = partial(_accumulated, _ZERO, stored=stored, terms=terms)
            yield Candidate("delta", f"delta in {stored} after every {terms} columns", {"sum": delta})
        yield Candidate("delta", f"delta in {stored}, added by pairs", {"sum": partial(_by_pairs, stored=stored)})
