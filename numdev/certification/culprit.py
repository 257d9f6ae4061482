"""The step that errs: the candidate whose predicted error is nearest to the error of the kernel, element by element.

With `e = out - golden` of the kernel and `e_c` of a candidate, `r = |e - e_c| / |e|` is what the candidate leaves unexplained,
and `1 - r^2` the share that it explains. The right candidate leaves nearly nothing in the layout of the kernel, and half or more
in another. Rows that see few keys lie in one tile of any layout, so these come first; what is near on them is tried in every
layout. Candidates are ranked by the mean of log r over cases and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from numdev.attention.softmax import EXP2_MINIMAX
from numdev.certification.accuracy import ABSURD, Known, some_rows
from numdev.certification.candidates import (
    BACKWARD,
    DECLARED,
    FORWARD,
    ONE_TILE,
    UNSPLIT,
    Candidate,
    by_polynomial,
    off,
    saturated,
    scaled,
    unknown_errors,
    variants,
)
from numdev.certification.simulation import OF_SUMS, Cut, Layout, Outputs, Simulation, symbol

_NEAR = 0.1  # in log r: candidates so close to the best cannot be told from it
_LEAST = 0.02  # of r, below which the roundings of FP32 decide
_OTHER = 1.5  # times what is left of a gradient that another kernel would have to compute
_SETTLED = -2.5  # in log r of the outputs that err, the mean over cases: nothing is left to look for
_HOPELESS = -0.5  # likewise of rows in one tile, in which the right candidate leaves nothing
_FEW_KEYS = ONE_TILE[0].bc
_MANY_KEYS = 2000  # cases of more are slow, and only the best candidates are compared on them
_ALIKE, _POOL = 0.3, 1.0  # in log r: what is tried in every layout, and in the best of these
_WIDE, _VARIED = 60, 6  # candidates that are tried in every layout, and layouts whose variants are tried
_COMBINED, _GAIN = 3, 0.5  # candidates to which another is added, if that is nearer by so much in log r
_EXPLAINED, _SURE = 0.75, 0.9  # share of the error of each output that errs, and where a factor was free
_ERRS, _ERRS_LSE = 1.1, 2.0  # times the permitted error: an output that errs more does not compute as permitted
_MOST_SCORES = 1 << 22  # of a case
_TOO_MANY = "was given too many tokens to look for the step that errs"
_SHOWN, _NAMED = 5, 3
_NEAREST = 0.05  # share of the error that a candidate explains to be called the nearest
_LEAST_SCALE, _LEAST_FACTOR = 1e-6, 1e-3  # by which scores, and results, are off
_STEP, _STEPS, _FAR = 1e-4, 16, 0.5  # of a parameter that is fitted; so far a polynomial may be from the usual one
_START = 0.9  # of a factor of results, or a limit of P, which is at most 1
Results = Sequence[tuple[Known, Outputs]]
Hypothesis = tuple[Candidate, Layout]


@dataclass(frozen=True)
class Rank:
    """A candidate in its best layout: `log r`, the share of the error that it explains, and whether that is nearly all."""

    name: str
    title: str
    score: float
    explained: float
    is_explained: bool
    tiles: str
    permitted: bool = False


@dataclass(frozen=True)
class Culprit:
    """The candidates that are nearest to the error of a kernel, of different steps, best first.

    `tiles` are size, order and splits that the error shows, or empty; `alone` says what there is without ranks. Of a kernel that
    computes as declared `excluded` are titles of roundings that its error excludes, `undecided` of those that it does not;
    `equal` is the share of the primary output of the first case that the emulation gives to the bit.
    """

    ranks: tuple[Rank, ...]
    tiles: str = ""
    alone: str = "returns results that are not finite, of which no step can be named"
    excluded: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    equal: float = math.nan

    @property
    def is_explained(self) -> bool:
        return bool(self.ranks) and self.ranks[0].is_explained

    @property
    def named(self) -> tuple[Rank, ...]:
        """The best candidate, and all that cannot be told from it; of these what the policy permits, if that is among them."""
        near = tuple(rank for rank in self.ranks if rank.score <= self.ranks[0].score + _NEAR)
        return tuple(rank for rank in near if rank.permitted) or near

    @property
    def is_permitted(self) -> bool:
        """Whether the kernel may compute as the best candidate does."""
        return any(rank.permitted for rank in self.named)

    def sentence(self, *, fails: bool = True) -> str:
        """`errs as with the row sum in BF16 (explains 97 % of the error; next: the accumulator in BF16, 41 %)`.

        Of a kernel that does not fail it says how it computes.
        """
        if not self.ranks:
            return self.alone
        titles = [rank.title for rank in self.named]
        more = [f"{len(titles) - _NAMED} more"] if len(titles) > _NAMED else []
        named = " or ".join([*titles[:_NAMED], *more])
        others = [rank for rank in self.ranks if rank not in self.named and _NEAREST <= rank.explained <= self.ranks[0].explained]
        beside = f"; next: {others[0].title}, {100 * others[0].explained:.0f} %" if others else ""
        share = f"explains {100 * self.ranks[0].explained:.0f} % of the error{beside}"
        if not self.is_explained or (fails and self.is_permitted):
            start = "errs in a way that no candidate explains" if fails else "errs as permitted, and as no candidate does"
            return f"{start}; nearest: {named} ({share})" if self.ranks[0].explained >= _NEAREST else start
        return f"errs as with {named} ({share})" if fails else f"computes as {named} ({share})"


@dataclass(frozen=True)
class Compared:
    """A replicate on which a kernel is compared with predictions; with `few_keys` only the rows that see few."""

    known: Known
    whole: Outputs
    few_keys: bool = False

    @cached_property
    def outputs(self) -> Outputs:
        """Some rows of the kernel's outputs in their formats, as predictions have them, whatever the kernel returns."""
        return some_rows(
            {name: x if name == "lse" else self.known.predictions.policy.output(x) for name, x in self.whole.items()}
        )

    def rows(self, outputs: Outputs) -> Outputs:
        if not self.few_keys:
            return self.known.rows(outputs)
        return {name: x.double()[self._few].reshape(1, -1) for name, x in outputs.items()}

    @cached_property
    def _few(self) -> Tensor:
        q, (queries, keys), mask = self.known.inputs.tensors["q"], self.known.inputs.sizes, self.known.inputs.mask
        ranges = [mask.key_range(queries, keys, torch.arange(queries), length) for length in mask.lengths(len(q), keys)]
        seen = torch.stack([high - low for low, high in ranges])[:, None].expand(q.shape[:-1])
        return some_rows({"q": (seen > 0) & (seen <= _FEW_KEYS)})["q"]

    @cached_property
    def own(self) -> Outputs:
        return self.rows(self.outputs)

    @cached_property
    def sizes(self) -> dict[str, tuple[float, float, float]]:
        """Of each output the RMS of its error, the permitted one, and what nobody can avoid."""
        golden, sizes = self.rows(some_rows(self.known.golden)), {}
        for name, x in self.own.items():
            floor = float(self.known.floors[name][:, 0].mean())
            sizes[name] = max(_rms(x - golden[name]), floor), _rms(self.known.permitted[name][:, 0]) + floor, floor
        return sizes

    @cached_property
    def excess(self) -> dict[str, float]:
        """Of each output the error over the permitted one."""
        return {name: error / most if most else ABSURD for name, (error, most, _) in self.sizes.items()}

    def left(self, candidate: Candidate, layout: Layout) -> dict[str, float]:
        """r of each output."""
        if (candidate, layout) not in self._left:
            rows, left = self.rows(self.known.predict(candidate, layout, self.whole)), {}
            for name, (error, _, floor) in self.sizes.items():
                rest = max(_rms(self.own[name] - rows[name]) - floor, 0.0) if bool(rows[name].isfinite().all()) else ABSURD
                left[name] = rest / error if error else float(rest > 0)
            self._left[candidate, layout] = left
        return self._left[candidate, layout]

    @cached_property
    def _left(self) -> dict[tuple[Candidate, Layout], dict[str, float]]:
        return {}


class Search:
    """Looks for the hypothesis, a candidate in a layout, that leaves least of the errors of a kernel.

    `errs` are the outputs that err more than permitted.
    """

    def __init__(self, cases: Sequence[Compared], errs: Sequence[str]) -> None:
        self.cases, self.of_pass = cases, cases[0].known.predictions.of_pass
        self.outputs = [name for name in self.of_pass.outputs if all(name in case.outputs for case in cases)]
        self.errs = [name for name in errs if name in self.outputs]
        self.catalogue = [DECLARED, *cases[0].known.predictions.candidates]
        telling = sorted(cases, key=lambda case: -max(case.excess[name] for name in self.errs or self.outputs))
        light = [case for case in telling if case.known.inputs.sizes[1] <= _MANY_KEYS] or telling
        first = int(self.of_pass is FORWARD)  # its sums are over keys alone
        broad = [case for case in light if case.known.inputs.mask.is_none]
        broad = [case for case in broad if max(case.known.inputs.sizes[first:], default=0) > 12 * _FEW_KEYS]
        self.broad = (broad or light)[:2]
        self.few = [*self.broad, *(case for case in light[:1] if case not in self.broad)] if self.errs else self.broad[:1]
        small = [replace(case, few_keys=True) for case in cases if self.of_pass is FORWARD]
        self.in_one_tile = [case for case in small if case._few.sum() >= _FEW_KEYS]

    def score(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> float:
        """The mean of log r over cases and outputs; those that err weigh as much as all others together.

        Gradients that do not err may come from another kernel, which computes as declared.
        """
        others = [name for name in self.outputs if name not in self.errs]

        def mean(names: Sequence[str]) -> float:
            left = [case.left(*hypothesis)[name] for case in cases for name in names]
            if names is others and self.of_pass is BACKWARD:
                declared = (_OTHER * max(case.left(DECLARED, hypothesis[1])[name], _LEAST) for case in cases for name in names)
                left = list(map(min, left, declared))
            return sum(math.log(min(max(r, _LEAST), 1 / _LEAST)) for r in left) / len(left)

        return (mean(self.errs) + mean(others)) / 2 if self.errs and others else mean(self.outputs)

    def best(self, hypotheses: Iterable[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """Best first."""
        return sorted(hypotheses, key=lambda each: self.score(each, cases))

    def left(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> float:
        """The mean of log r of the outputs that err, where they do."""
        pairs = [(case, name) for case in cases for name in self.errs or self.outputs[:1]]
        pairs = [(case, name) for case, name in pairs if case.excess[name] > _limit(name)] or pairs
        left = [case.left(*hypothesis)[name] for case, name in pairs]
        return sum(math.log(max(r, _LEAST)) for r in left) / len(left)

    def is_settled(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> bool:
        is_explained = all(self._share(hypothesis, name, cases) > _EXPLAINED for name in self.errs)
        return is_explained and self.left(hypothesis, cases) < _SETTLED

    def declared(self) -> list[Hypothesis]:
        """The declared policy in all layouts."""
        ranked: list[Hypothesis] = []
        for layouts in self.of_pass.layouts[: 1 if self.errs else 2]:
            ranked = self.with_variants([*ranked, *((DECLARED, layout) for layout in layouts)], self.broad)
            if self.is_settled(ranked[0], self.broad):
                break
        return ranked

    def with_variants(self, hypotheses: Iterable[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """With the variants of the best layouts, best first."""
        ranked = self.best(hypotheses, cases)
        if self.of_pass is BACKWARD:
            return ranked
        more = [(candidate, variant) for candidate, layout in ranked[:_VARIED] for variant in variants(layout)]
        return self.best(dict.fromkeys([*ranked, *more]), cases)

    def run(self) -> list[Hypothesis]:
        """Hypotheses, the best first."""
        views, layouts = self.in_one_tile or self.few, ONE_TILE[: 2 if self.of_pass is FORWARD else 1]
        of_splits, of_padding = ([each for each in self.catalogue if each.step == step] for step in ("splits", "padding"))
        tried = [*product([*self.catalogue, *self.factors(views)], layouts), *product(of_padding, UNSPLIT)]
        tried += product(of_splits, [Layout(_FEW_KEYS, splits=2)])  # of which one alone may hold what a row sees
        ranked = self.with_variants(tried, views)
        if self.errs and not self.is_settled(ranked[0], views):
            ranked = self.combined(self.best([*ranked, *product(self.polynomials(views), layouts)], views), views)
        groups = self.of_pass.layouts[: 2 if self.errs else 1]
        if self.in_one_tile and min(self.left(each, views) for each in self.within(ranked, views, _ALIKE)) > _HOPELESS:
            of_keys = [layout for layouts in groups for layout in layouts if layout.cut is Cut.KEYS]
            return self.in_layouts(ranked, of_splits, of_splits, [of_keys])
        pool, alike = (list(dict.fromkeys(each for each, _ in self.within(ranked, views, margin))) for margin in (_POOL, _ALIKE))
        example = Layout(2 * _FEW_KEYS, splits=3 if self.of_pass is FORWARD else 1)
        idle = self.score((DECLARED, example), self.broad)  # which candidates without effect on these cases have too
        wide = [each for each in alike if each is DECLARED or self.score((each, example), self.broad) != idle]
        if self.of_pass is BACKWARD:  # only sums depend on the layout
            if self.is_settled(ranked[0], views):
                return ranked
            sums = {f"the {what} of {symbol(name)}" for name in self.errs or self.outputs for what in OF_SUMS}
            pool = wide = [each for each in self.catalogue if each.changes.keys() & sums]
        ranked = self.in_layouts(ranked, wide, pool, groups)
        return self.combined(ranked, self.few) if self.errs else ranked

    def in_layouts(
        self, ranked: list[Hypothesis], wide: Sequence[Candidate], pool: Sequence[Candidate], groups: Iterable[Sequence[Layout]]
    ) -> list[Hypothesis]:
        """With some candidates in every layout, and with more in the best of these, until one leaves nothing."""
        if self.of_pass is FORWARD:  # one of each kind, faults of splits first
            kinds = list({each.kind: each for each in reversed(wide)}.values())[::-1]
            wide = sorted(kinds, key=lambda each: each.step != "splits")
        for layouts in groups:
            first = [each for each in wide if any(_is_in(each, layout) for layout in layouts)][:_WIDE]
            every = [(each, layout) for each in first for layout in layouts if _is_tried(each, layout)]
            best = list(dict.fromkeys(layout for _, layout in self.with_variants(every, self.broad)))[:3]
            tried = [(each, layout) for each in pool for layout in best if _is_in(each, layout)]
            ranked = self.best(dict.fromkeys([*tried, *ranked]), self.few)
            if self.is_settled(ranked[0], self.few):
                break
        return ranked

    def unknown(self) -> list[Hypothesis]:
        """Unknown errors of a step, in all layouts."""
        precision = self.cases[0].known.predictions.policy.output.to.precision
        return self.with_variants(product(unknown_errors(precision, has_lse="lse" in self.outputs), UNSPLIT), self.broad)

    def within(self, ranked: Sequence[Hypothesis], cases: Sequence[Compared], margin: float) -> list[Hypothesis]:
        """Those that are nearly as good as the first."""
        return [each for each in ranked if self.score(each, cases) <= self.score(ranked[0], cases) + margin]

    def combined(self, ranked: list[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """With two or three candidates at once, if these are nearer by far, and one alone explains something."""
        for _ in range(2):
            least = self.score(ranked[0], cases)
            if self.is_settled(ranked[0], cases) or least > -_NEAR:
                break
            first = of_steps(ranked)[:_COMBINED]
            both = [(pair, layout) for one, layout in first for other in self.catalogue if (pair := one & other)]
            combined = self.best([*ranked, *both], cases)
            if self.score(combined[0], cases) > least - _GAIN:
                break
            ranked = combined
        return ranked

    def factors(self, cases: Sequence[Compared]) -> Iterator[Candidate]:
        """A result, or scores, times the factor that is nearest, of scores one for each scale; P with the nearest limit."""
        makers: list[Callable[[float], Candidate]] = [partial(off, name) for name in self.errs]
        makers += [saturated] if self.of_pass is FORWARD and self.errs else []
        for make in makers if "lse" not in self.errs else ():  # which none of these changes
            (factor,) = self.fitted(lambda x: make(*x), (_START,), cases)  # noqa: B023
            if abs(factor - 1) > _LEAST_FACTOR:
                yield make(factor)
        factors = dict[float, float]()
        for case in (*cases, *self.cases):
            scale = case.known.inputs.scale
            if scale not in factors:
                (factors[scale],) = self.fitted(lambda x: scaled({scale: x[0]}), (1.0,), [case])  # noqa: B023
        if abs(next(iter(factors.values())) - 1) > _LEAST_SCALE:
            yield scaled(factors)

    def polynomials(self, cases: Sequence[Compared]) -> Iterator[Candidate]:
        """Exponentials by the polynomial that is nearest."""
        for degree, start in product((1, 2, 3), (0.0, 0.5)):
            best = tuple(coefficient / 2**start for coefficient in EXP2_MINIMAX[degree])
            coefficients = self.fitted(lambda x: next(by_polynomial(x, start)), best, cases)  # noqa: B023
            if all(abs(own - usual) < _FAR for own, usual in zip(coefficients, best, strict=True)):
                yield from by_polynomial(coefficients, start, fitted=True)

    def fitted(
        self, make: Callable[[tuple[float, ...]], Candidate], start: tuple[float, ...], cases: Sequence[Compared]
    ) -> tuple[float, ...]:
        """The parameters that leave least, by Gauss-Newton steps along slopes without roundings, halved where they fail.

        The LSE tells most, if it errs, since nothing is rounded to few bits after it.
        """
        outputs = ["lse"] if "lse" in self.errs else self.outputs
        of_pass, own = self.of_pass, cases[0].known.predictions.policy
        golden, x = of_pass.policy("golden"), torch.tensor(start, dtype=torch.float64)

        def left(x: Tensor, policy: Any) -> Tensor:
            parts, changes = [], make(tuple(x.tolist())).changes
            for case in cases:
                rows = case.rows(some_rows(of_pass.simulated(Simulation(case.known.inputs, policy, ONE_TILE[0], changes))))
                parts += [((case.own[name] - rows[name]) / case.sizes[name][0]).flatten() for name in outputs]
            return torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)

        unit = torch.eye(len(x), dtype=x.dtype)
        slopes = torch.stack([(left(x + _STEP * each, golden) - left(x, golden)) / _STEP for each in unit], -1)
        best, step, least = x, torch.zeros_like(x), math.inf
        for _ in range(_STEPS):
            rest = left(x, own)
            if float(rest.norm()) < least:
                best, least = x, float(rest.norm())
                step = torch.linalg.lstsq(slopes, rest[:, None], rcond=1e-4, driver="gelsd").solution.flatten()
            else:
                step = step / 2
            x = best - step
        return tuple(best.tolist())

    def rank(self, hypothesis: Hypothesis) -> Rank:
        """On all cases."""
        candidate, layout = hypothesis
        share = min(self._share(hypothesis, name, self.cases) for name in self.errs or self.outputs)
        score = self.score(hypothesis, self.cases)
        return Rank(
            f"{candidate.step}={candidate.title}",
            candidate.title,
            score,
            share,
            share > _EXPLAINED,
            str(layout),
            candidate.permitted,
        )

    def _share(self, hypothesis: Hypothesis, name: str, every: Sequence[Compared]) -> float:
        """Of the error of an output what is explained: the mean over the cases on which it errs more than permitted."""
        cases = [case for case in every if case.excess[name] > _limit(name)] or every
        return sum(max(0.0, 1 - case.left(*hypothesis)[name] ** 2) for case in cases) / len(cases)

    def formats(self, declared: Hypothesis) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Steps in formats of 16 bits that leave more than the declared policy wherever they round, and the others."""
        titles: dict[bool, list[str]] = {True: [], False: []}
        limit, steps = self.score(declared, self.few) + _NEAR, dict[str, list[Candidate]]()
        for each in self.catalogue:
            if not each.permitted and each.is_plain and _is_in(each, declared[1]):
                steps.setdefault(f"{each.step} in {each.title.rpartition(' in ')[2]}", []).append(each)
        for alike in steps.values():
            titles[all(self.score((each, declared[1]), self.few) > limit for each in alike)].append(alike[0].title)
        return tuple(titles[True]), tuple(titles[False])

    def shows(self, hypothesis: Hypothesis) -> bool:
        """Whether a layout can be told from most others."""
        scores = [self.score((hypothesis[0], each), self.broad) for each in self.of_pass.layouts[0]]
        return 2 * sum(score <= self.score(hypothesis, self.broad) + _NEAR for score in scores) < len(scores)


def _is_in(candidate: Candidate, layout: Layout) -> bool:
    return layout.splits > 1 or candidate.step != "splits"


def _is_tried(candidate: Candidate, layout: Layout) -> bool:
    """In splits of as many keys, for speed, at first what is no fault of splits is not."""
    is_quick = layout.cut is not Cut.KEYS or candidate is DECLARED or candidate.step == "splits"
    return is_quick and _is_in(candidate, layout)


def of_steps(ranked: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best hypothesis of each step, best first."""
    best = dict[str, Hypothesis]()
    for each in ranked:
        best.setdefault(each[0].step, each)
    return list(best.values())


def find(results: Results) -> Culprit:
    """The culprit of the results of a kernel, but for those that are not finite."""
    every = [Compared(known.first, known.of_first(outputs)) for known, outputs in results]
    finite = [case for case in every if all(bool(x.isfinite().all()) for x in case.own.values())]
    cases = [case for case in finite if case.known.inputs.scores <= _MOST_SCORES]
    if not cases:
        return Culprit((), alone=_TOO_MANY) if finite else Culprit(())
    if not any(bool(x.any()) for case in cases for name, x in case.own.items() if name != "lse"):
        return Culprit((), alone="returns zeros")
    ratios = [known.ratios(outputs) for known, outputs in results]
    errs = [name for name in cases[0].outputs if any(each[name][:, 0].mean() > _limit(name) for each in ratios if name in each)]
    search = Search(cases, errs)
    tried = search.declared()
    if errs or not (search.is_settled(tried[0], cases) and search.rank(tried[0]).is_explained):
        tried = search.run() + tried
    if errs and search.of_pass is FORWARD and not search.rank(tried[0]).is_explained:
        unknown = of_steps(search.unknown())
        if search.rank(unknown[0]).explained > _SURE and len(search.within(unknown, search.broad, _NEAR)) == 1:
            tried = unknown
    best = [*search.within(search.best(tried, search.few), search.few, _ALIKE)[:20], *of_steps(tried)[:_SHOWN]]
    ranked = of_steps(search.best(dict.fromkeys(best), cases))
    ranked = [each for each in ranked if not (each[0].permitted and errs)] or ranked
    known, layout, name = cases[0].known, ranked[0][1], search.outputs[0]
    emulated = some_rows(search.of_pass.emulated(known.inputs, known.predictions.policy, layout))
    equal = float((cases[0].outputs[name] == emulated[name]).double().mean())
    tiles = str(layout) if search.shows(ranked[0]) else ""
    culprit = Culprit(tuple(map(search.rank, ranked[:_SHOWN])), tiles, equal=equal)
    if not errs and culprit.is_explained and culprit.is_permitted:
        excluded, undecided = search.formats(ranked[0])
        culprit = replace(culprit, excluded=excluded, undecided=undecided)
    known.predictions.save()
    return culprit


def _limit(name: str) -> float:
    """Times the permitted error, beyond which an output errs."""
    return _ERRS_LSE if name == "lse" else _ERRS


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())
