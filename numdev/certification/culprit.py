"""The step that errs: the candidate whose predicted error is nearest to the error of the kernel, element by element.

With `e = out - golden` of the kernel and `e_c` of a candidate, `r = |e - e_c| / |e|` is what the candidate leaves unexplained,
and `1 - r^2` the share that it explains. The right candidate leaves nearly nothing in the layout of the kernel, and half or more
in another. Rows that see few keys lie in one tile of any layout, so these come first; what is near on them is tried in every
layout. Candidates are ranked by the mean of log r over cases and outputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16
from numdev.certification import candidates
from numdev.certification.accuracy import ABSURD, BACKWARD, FORWARD, Known
from numdev.certification.candidates import CURVES, DECLARED, KEYS, TERMS, Candidate
from numdev.certification.simulation import OF_SUMS, WHOLE, Cut, Layout, Scheme, Simulation, Stored, Tensors, some_rows, symbol

ONE_TILE = (Layout(16), Layout())
"""In which rows of few keys are as in any other layout, but for what has a factor of each tile."""
_SIZES = (*range(16, 257, 16), 512)
UNSPLIT = (
    *(Layout(bc, reverse) for bc in (*_SIZES, *range(24, 128, 16)) for reverse in (False, True)),
    *(Layout(scheme=Scheme.DIVIDED), Layout()),
)
SPLIT = tuple(
    Layout(bc, splits=splits, cut=cut) for bc in _SIZES for splits in (*range(2, 9), 12, 16) for cut in (Cut.TILES, Cut.KEYS)
)
"""Layouts by which that of a kernel is looked for, and then their variants."""
_OF_STEP = {"splits": (Layout(16, splits=2),), "padding": UNSPLIT, "probabilities": (Layout(scheme=Scheme.DIVIDED),)}
"""Layouts in which rows of few keys show faults of a step that they do not show in `ONE_TILE`."""
_CLEAR = 0.4  # in log r: tiles are stated if all others leave so much more
_NEAR = 0.1  # in log r: candidates so close to the best cannot be told from it
_LEAST = 0.02  # of r, below which the roundings of FP32 decide
_OTHER = 1.5  # times what is left of a gradient that another kernel would have to compute
_SETTLED = 0.99  # of the error explained: nothing is left to look for
_HOPELESS, _EXPLAINS = 0.63, 0.45  # of rows in one tile, in which the right candidate explains all; for a fit to be repeated
_FEW_KEYS = ONE_TILE[0].bc
_MANY_KEYS = 2000  # cases of more are slow, and only the best candidates are compared on them
_ALIKE, _POOL = 0.3, 1.0  # in log r: what is tried in every layout, and in the best of these
_TELLING = 8  # cases on which an error of any shape is fitted
_WIDE, _VARIED = 90, 6  # candidates that are tried in every layout, and layouts whose variants are tried
_SCREENED = 64  # hypotheses that are all compared on every case
_COMBINED, _GAIN = 3, 0.5  # candidates to which another is added, if that is nearer by so much in log r
_EXPLAINED, _SURE = 0.75, 0.9  # share of the error of each output that errs, and where a factor was free
_ERRS = {"lse": 2.0, **dict.fromkeys(("out", "dq", "dk", "dv"), 1.1)}  # times the permitted error: who errs more, errs
_MOST_SCORES = 1 << 22  # of a case
_SHOWN, _NAMED = 5, 3
_NEAREST = 0.05  # share of the error that a candidate explains to be called the nearest
_LEAST_FIT, _LEAST_FACTOR = 1e-6, 1e-3  # by which a parameter that is fitted, and a factor of results, is off
_REFINED = 6  # candidates that are fitted again in their layout
_STEP, _STEPS, _RIDGE = 1e-4, 16, 0.3  # of a parameter that is fitted
_CAP = 1 / 30**2  # of a soft cap the inverse square, at first
_START = -0.1  # of a factor of results, or a limit of P, less 1
_CLAMPS, _LIMITS = range(-20, -1, 2), (1, 2, 4, 8, 16)  # of an exponential's argument, of scores
_FEW_TERMS, _PATTERN = 3, 12  # of a curve of each key; keys that have an exponential of their own
Hypothesis = tuple[Candidate, Layout]
Make = Callable[..., Candidate]


@dataclass(frozen=True)
class Rank:
    """A candidate in its best layout: `log r`, the share of the error that it explains, and whether that is nearly all.

    `only_in` are the gradients that err as the candidate does, if it makes others err that do not.
    """

    name: str
    title: str
    score: float
    explained: float
    is_explained: bool
    tiles: str
    permitted: bool = False
    only_in: tuple[str, ...] = ()


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
        """The best candidate, and all that cannot be told from it; of these what the policy permits, if that is among them.

        Else those that make no other gradient err, if there are any.
        """
        near = tuple(rank for rank in self.ranks if rank.score <= self.ranks[0].score + _NEAR)
        near = tuple(rank for rank in near if not rank.only_in) or near
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
        titles[_NAMED:] = [f"{len(titles) - _NAMED} more"] if len(titles) > _NAMED else []
        only_in = " and ".join(map(symbol, self.named[0].only_in))
        named = " or ".join(titles) + (f", in {only_in} alone" if only_in else "")
        others = [rank for rank in self.ranks if rank not in self.named and _NEAREST <= rank.explained <= self.ranks[0].explained]
        others = [rank for rank in others if only_in or not rank.only_in]
        beside = f"; next: {others[0].title}, {100 * others[0].explained:.0f} %" if others else ""
        share = f"explains {100 * self.ranks[0].explained:.0f} % of the error{beside}"
        if not self.is_explained or (fails and self.is_permitted):
            start = "errs in a way that no candidate explains" if fails else "errs as permitted, and as no candidate does"
            return f"{start}; nearest: {named} ({share})" if self.ranks[0].explained >= _NEAREST else start
        return f"errs as with {named} ({share})" if fails else f"computes as {named} ({share})"


class Compared:
    """The first replicate of a case, on which a kernel is compared with predictions; on rows that see at most so many keys.

    Attributes:
        whole, outputs: of the kernel, and some rows of these in their formats, as predictions have them.
        own: those that are compared, `[1, numbers]`.
        floors, errors: of each output what nobody can avoid, and the RMS of the error.
        excess: of each output the error over the permitted one.
    """

    def __init__(self, known: Known, outputs: Tensors, most_keys: int = WHOLE) -> None:
        self.known, self.of_kernel, self.most_keys, self.inputs = known, outputs, most_keys, known.inputs.first
        self._left, batch, cast = dict[Hypothesis, dict[str, float]](), len(self.inputs["q"]), known.predictions.policy.output
        self.whole = {name: x[:batch].float() for name, x in outputs.items()}
        self.outputs = some_rows({name: x if name == "lse" else cast(x) for name, x in self.whole.items()})
        self.own, golden = self.rows(self.outputs), self.rows(some_rows({name: x[:batch] for name, x in known.golden.items()}))
        self.floors = {name: float(known.floors[name][0, 0]) for name in self.own}
        self.errors = {name: max(_rms(x - golden[name]), self.floors[name]) for name, x in self.own.items()}
        most = {name: float(known.permitted[name][0, 0]) + floor for name, floor in self.floors.items()}
        self.excess = {name: error / most[name] if most[name] else ABSURD for name, error in self.errors.items()}

    def rows(self, outputs: Tensors) -> Tensors:
        return self.inputs.rows(outputs, self.most_keys)

    @cached_property
    def ratios(self) -> dict[str, float]:
        """The RMSE of each output over the permitted one, of all rows and replicates."""
        return {name: float(x[:, 0].mean()) for name, x in self.known.ratios(self.of_kernel).items()}

    def left(self, hypothesis: Hypothesis) -> dict[str, float]:
        """r of each output, within the limits that logarithms need."""
        if hypothesis not in self._left:
            (candidate, layout), left, known = hypothesis, self._left.setdefault(hypothesis, {}), self.known.predictions
            page = {} if candidate.fitted else known.page(f"{self.known.name} {layout!r}")  # fitted ones may share a title
            if candidate.title not in page:
                simulation = Simulation(self.inputs, known.policy, layout, candidate.changes, self.whole)
                some, dtype = some_rows(known.of_pass.simulated(simulation)), self.inputs["q"].dtype
                page[candidate.title] = {name: x.float() if name == "lse" else x.to(dtype) for name, x in some.items()}
            rows = self.rows(page[candidate.title])
            for name, error in self.errors.items():
                rest = max(_rms(self.own[name] - rows[name]) - self.floors[name], 0.0) if rows[name].isfinite().all() else ABSURD
                left[name] = min(max(rest / error if error else float(rest > 0), _LEAST), 1 / _LEAST)
        return self._left[hypothesis]


class Search:
    """Looks for the hypothesis, a candidate in a layout, that leaves least of the errors of a kernel.

    `every` result, those that cannot be compared too, says which outputs err more than permitted.
    """

    def __init__(self, cases: Sequence[Compared], every: Sequence[Compared]) -> None:
        self.of_pass = cases[0].known.predictions.of_pass
        self.outputs = [name for name in self.of_pass.outputs if all(name in each.ratios for each in every)]
        self.errs = errs = [name for name in self.outputs if max(each.ratios[name] for each in every) > _ERRS[name]]
        sizes = Counter(name in errs for name in self.outputs)  # how many err, and how many do not
        self.weights = {name: 1 / (len(sizes) * sizes[name in errs]) for name in self.outputs}
        is_shown = self.of_pass is BACKWARD or "lse" in self.outputs  # else an LSE is computed for nobody
        self.catalogue = [DECLARED, *(each for each in cases[0].known.predictions.candidates if is_shown or each.step != "lse")]
        self.parameters = dict[Candidate, tuple[Make, tuple[float, ...]]]()
        # Those on which the kernel errs most, relative to what is permitted, first; some rows, as of a sink, may err more
        self.cases = cases = sorted(cases, key=lambda case: -max(case.ratios[name] for name in errs or self.outputs))
        self.light = light = [case for case in cases if case.inputs.sizes[1] <= _MANY_KEYS] or cases
        self.telling = light[:_TELLING]
        is_forward = self.of_pass is FORWARD  # its sums are over keys alone
        unmasked = [case for case in light if case.inputs.mask.is_none]
        broad = [case for case in unmasked if max(case.inputs.sizes[int(is_forward) :]) > 12 * _FEW_KEYS]
        self.few = list(dict.fromkeys((*(light[:1] if errs else ()), *broad, *light)))[:2]
        different = {tuple(each.parts(case.inputs.sizes[1]) for case in self.few): each for each in reversed(SPLIT)}
        self.layouts = (UNSPLIT, tuple(different.values())) if is_forward else (UNSPLIT[:-2], ())
        small = [Compared(case.known, case.of_kernel, _FEW_KEYS) for case in cases if is_forward]
        self.in_one_tile = [case for case in small if case.own["out"].numel() >= _FEW_KEYS * case.outputs["out"].shape[-1]]

    def score(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> float:
        """The mean of log r over cases and outputs; those that err weigh as much as all others together.

        Gradients that do not err may come from another kernel, which computes as declared.
        """
        total = 0.0
        for case, (name, weight) in product(cases, self.weights.items()):
            left = case.left(hypothesis)[name]
            total += weight * math.log(min(left, self.most_left(case, hypothesis, name)))
        return total / len(cases)

    def most_left(self, case: Compared, hypothesis: Hypothesis, name: str) -> float:
        """Of a gradient that does not err, and that another kernel would have to compute if a candidate leaves more."""
        of_another = self.of_pass is BACKWARD and self.errs and name not in self.errs
        return _OTHER * case.left((DECLARED, hypothesis[1]))[name] if of_another else math.inf

    def best(self, hypotheses: Iterable[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """Best first; of many those that are best on a third of the cases, where what has no effect is equal.

        Where none explains the error it takes 0.7 of the time: for the tests' `K in INT4` 84 s of one core in place of 115.
        """
        every = list(dict.fromkeys(hypotheses))
        if len(every) > _SCREENED and len(cases) > 1:
            some = cases[: math.ceil(len(cases) / 3)]
            limit = sorted(self.score(each, some) for each in every)[max(_SCREENED, len(every) // 4) - 1]
            every = [each for each in every if self.score(each, some) <= limit]
        return sorted(every, key=lambda each: self.score(each, cases))

    def share(self, hypothesis: Hypothesis, every: Sequence[Compared], names: Sequence[str] = ()) -> float:
        """Of the error of an output what is explained, the least of those that err, or of the primary one.

        The mean over the cases on which it errs more than permitted.
        """
        shares = []
        for name in names or self.errs or self.outputs[:1]:
            cases = [case for case in every if case.excess[name] > _ERRS[name]] or every
            shares.append(sum(max(0.0, 1 - case.left(hypothesis)[name] ** 2) for case in cases) / len(cases))
        return min(shares)

    def is_settled(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> bool:
        """What explains a few cases, on which P may be 0, has to explain all."""
        return all(self.share(hypothesis, each) > _SETTLED for each in (cases, self.light)[: 2 if cases is self.few else 1])

    def within(self, ranked: Sequence[Hypothesis], cases: Sequence[Compared], margin: float) -> list[Hypothesis]:
        """Those that are nearly as good as the first."""
        return [each for each in ranked if self.score(each, cases) <= self.score(ranked[0], cases) + margin]

    def with_variants(self, hypotheses: Iterable[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """With layouts that are like the best but for order, cut and scheme, best first."""
        ranked = self.best(hypotheses, cases)
        more = [
            (candidate, replace(layout, reverse=reverse, cut=cut, scheme=scheme))
            for candidate, layout in ranked[: _VARIED if self.of_pass is FORWARD else 0]
            for reverse, cut, scheme in product((False, True), Cut if layout.splits > 1 else (Cut.TILES,), Scheme)
            if scheme is not Scheme.DIVIDED or layout.bc == WHOLE
        ]
        return self.best([*ranked, *more], cases)

    def run(self) -> list[Hypothesis]:
        """Hypotheses, the best first: at first on rows that lie in one tile, then those that are near in every layout."""
        views, layouts = self.in_one_tile or self.few, ONE_TILE[: 2 if self.of_pass is FORWARD else 1]
        tried = [*product(self.catalogue, layouts)]
        if self.of_pass is FORWARD:
            tried += [(each, layout) for each in self.catalogue for layout in _OF_STEP.get(each.step, ())]
        ranked = self.with_variants(tried, views)
        is_hidden = bool(self.errs) and ranked[0][0].permitted  # rows of few keys do not show the fault
        for fits, is_needed in ((self.factors, is_hidden), (self.curves, False))[: 2 if self.errs else 1]:
            if is_needed or not self.is_settled(ranked[0], views):
                ranked = self.with_variants([*ranked, *product(fits(views), layouts)], views)
        ranked = self.combined(ranked, views)
        groups = self.layouts[: 2 if self.errs else 1]
        if self.in_one_tile and max(self.share(each, views) for each in self.within(ranked, views, _ALIKE)) < _HOPELESS:
            of_keys = [layout for layouts in groups for layout in layouts if layout.cut is Cut.KEYS]
            of_splits = [each for each in self.catalogue if each.step == "splits"]
            return self.in_layouts(ranked, of_splits, of_splits, [of_keys])
        if self.of_pass is BACKWARD:  # only sums depend on the layout
            sums = {f"the {what} of {symbol(name)}" for name in self.errs or self.outputs for what in OF_SUMS}
            pool = wide = [each for each in self.catalogue if each.changes.keys() & sums]
        else:
            pool, alike = (list(dict.fromkeys(each for each, _ in self.within(ranked, views, far))) for far in (_POOL, _ALIKE))
            example = Layout(2 * _FEW_KEYS, splits=3)
            idle = self.score((DECLARED, example), self.few)  # which candidates without effect on these cases have too
            wide = [each for each in alike if each is DECLARED or self.score((each, example), self.few) != idle]
        return self.combined(self.refined(self.in_layouts(ranked, wide, pool, groups)), self.few)

    def in_layouts(
        self, ranked: list[Hypothesis], wide: Sequence[Candidate], pool: Sequence[Candidate], groups: Iterable[Sequence[Layout]]
    ) -> list[Hypothesis]:
        """With one candidate of each title but for its format in every layout, and with more in the best of these.

        In splits of as many keys, for speed, at first what is no fault of splits is not tried.
        """
        kinds = list({re.sub(r"[A-Z]\w*\d\w*|-\d+|, truncated", "", each.title): each for each in reversed(wide)}.values())[::-1]
        first = sorted(kinds, key=lambda each: each.step != "splits")[:_WIDE]
        fitted = [each for each in first if each.fitted]  # which are few, and of which one is likely the best
        for some, more, layouts in ((fitted, fitted, UNSPLIT), *((first, pool, layouts) for layouts in groups)):
            if ranked and self.is_settled(ranked[0], self.few):
                break
            every = [(each, layout) for each in some for layout in layouts if _is_in(each, layout)]
            quick = [each for each in every if each[1].cut is not Cut.KEYS or each[0] is DECLARED or each[0].step == "splits"]
            best = list(dict.fromkeys(layout for _, layout in self.with_variants(quick, self.few)))[:3]
            tried = [(each, layout) for each in more for layout in best if _is_in(each, layout)]
            ranked = self.best([*tried, *ranked], self.few)
        return ranked

    def combined(self, ranked: list[Hypothesis], cases: Sequence[Compared]) -> list[Hypothesis]:
        """With two or three candidates at once, if nearer by far; one alone explains something, and no fit nearly all."""
        for _ in range(2 if self.errs else 0):
            least, is_sure = self.score(ranked[0], cases), ranked[0][0].fitted and self.share(ranked[0], cases) > _SURE
            if is_sure or self.is_settled(ranked[0], cases) or least > -_NEAR:
                break
            first = of_steps(ranked)[:_COMBINED]
            both = [(pair, layout) for one, layout in first for other in self.catalogue[1:] if (pair := one & other)]
            combined = self.best([*ranked, *both], cases)
            if self.score(combined[0], cases) > least - _GAIN:
                break
            ranked = combined
        return ranked

    def unknown(self) -> list[Hypothesis]:
        """Unknown errors of a step, in all layouts, the best of each step; none unless one explains nearly all and no other."""
        precision = self.cases[0].known.predictions.policy.output.to.precision
        layouts = UNSPLIT if self.of_pass is FORWARD else ONE_TILE[:1]
        ranked = of_steps(self.with_variants(product(candidates.unknown_errors(precision, self.outputs), layouts), self.few))
        is_sure = self.rank(ranked[0]).explained > _SURE and self.share(ranked[0], self.cases, self.outputs) > _EXPLAINED
        return ranked if is_sure and len(self.within(ranked, self.few, _NEAR)) == 1 else []

    def factors(self, cases: Sequence[Compared]) -> Iterator[Candidate]:
        """What has parameters, with the nearest: factors of results and of scores, of these one for each scale; limits."""
        telling, of_scales = self.telling, {case.inputs.scale: case for case in reversed((*cases, *self.cases))}
        of_results: list[Make] = [partial(candidates.off, name) for name in self.errs if "lse" not in self.errs]  # it has none
        of_results += [lambda x: candidates.limited("P", 1 + x)] if of_results and self.of_pass is FORWARD else []
        fits: list[tuple[Make, tuple[float, ...], Sequence[Compared]]] = [(make, (_START,), cases) for make in of_results]
        fits += [(partial(candidates.scaled, of_scales), (0.0,) * len(of_scales), tuple(of_scales.values()))]
        fits += [(partial(candidates.capped, place), (_CAP,), telling) for place in ("scaled scores", "scores")]
        fits += [(partial(candidates.reduced, whole), (0.0,), telling) for whole in (torch.floor, torch.round)]
        limits: list[tuple[Make, Sequence[int]]] = [(partial(candidates.clamped, masked), _CLAMPS) for masked in (False, True)]
        limits.append((partial(candidates.limited, "scaled scores"), _LIMITS))
        for make, starts in limits if self.errs else ():
            fits.append((make, (min(starts, key=lambda start: self.score((make(start), ONE_TILE[0]), telling)),), telling))
        for make, start, views in fits:
            values = self.fitted(make, start, views)
            if max(map(abs, values)) > (_LEAST_FACTOR if views is cases else _LEAST_FIT):
                yield (made := self.made(make, values))
                if made.step == "probabilities" and "lse" not in self.errs and -1 < values[0] < 0:
                    yield candidates.overflowing(1 + values[0])

    def curves(self, cases: Sequence[Compared]) -> Iterator[Candidate]:
        """Exponentials with the nearest error, of any shape; that of alpha is known on rows alone that need no alpha.

        Last, an error of some keys alone: those in which it is largest where each has one of its own.
        """
        for title, views in product(CURVES, (self.telling, cases)):
            factors = self.fitted(partial(candidates.curved, title, False, range(KEYS), TERMS), (0.0,) * TERMS, views)
            yield self.made(partial(candidates.curved, title, views is cases, range(KEYS), TERMS), factors)
        make = partial(candidates.curved, next(iter(CURVES)), False)
        of_keys = self.fitted(partial(make, range(KEYS), _FEW_TERMS), (0.0,) * _FEW_TERMS * KEYS, self.few)
        terms = torch.tensor(of_keys).view(_FEW_TERMS, KEYS)
        if "lse" not in self.outputs:
            terms[0] -= terms[0].mean()  # of a factor of all keys, which only an LSE shows
        sizes = terms.norm(dim=0)
        keys = (sizes > sizes.max() / 2).nonzero().flatten().tolist()
        if 0 < len(keys) <= _PATTERN:
            make = partial(make, keys, TERMS)
            yield self.made(make, self.fitted(make, (0.0,) * TERMS, self.telling))

    def made(self, make: Make, values: tuple[float, ...]) -> Candidate:
        candidate = make(*values)
        self.parameters[candidate] = make, values
        return candidate

    def refined(self, ranked: list[Hypothesis]) -> list[Hypothesis]:
        """With what was fitted in one tile fitted again in its best layout, in which the roundings are those of the kernel."""
        layouts = dict[Candidate, Layout]()
        for candidate, layout in ranked:
            if candidate in self.parameters and self.share((candidate, layout), self.few) > _EXPLAINS:
                layouts.setdefault(candidate, layout)
        for candidate, layout in [*layouts.items()][:_REFINED] if not self.is_settled(ranked[0], self.few) else ():
            make, values = self.parameters[candidate]
            ranked = [*ranked, (self.made(make, self.fitted(make, values, self.telling, layout)), layout)]
        return self.best(ranked, self.few)

    def fitted(
        self, make: Make, start: Sequence[float], cases: Sequence[Compared], layout: Layout = ONE_TILE[0]
    ) -> tuple[float, ...]:
        """The parameters that leave least, by least squares with the slopes that there are without roundings.

        The LSE tells most, if it errs, since nothing is rounded to few bits after it. Of a curve of each key it tells too little,
        and that needs no second step.
        """
        from scipy.optimize import least_squares  # late: it costs more than the rest of numdev's import

        steps, keys = (_STEPS, 1) if len(start) <= TERMS else (2, KEYS)
        outputs = ["lse"] if "lse" in self.errs and keys == 1 else self.outputs
        of_pass, own = self.of_pass, cases[0].known.predictions.policy
        golden, begin = of_pass.policy("golden"), torch.tensor(start, dtype=torch.float64)

        def left(x: Tensor, policy: Any) -> Tensor:
            parts, changes = [], make(*x.tolist()).changes
            for case in cases:
                rows = case.rows(some_rows(of_pass.simulated(Simulation(case.inputs, policy, layout, changes))))
                parts += [((case.own[name] - rows[name]) / case.errors[name]).flatten() for name in outputs]
            return torch.cat([*parts, ridge * (x - begin)]).nan_to_num(0.0, 0.0, 0.0)

        ridge = _RIDGE * (1.0 + torch.arange(len(begin)) // keys) ** 3  # of smooth curves that go on where no number shows them
        at_start, unit = left(begin, golden), torch.eye(len(begin), dtype=begin.dtype)
        slopes = torch.stack([(left(begin + _STEP * each, golden) - at_start) / _STEP for each in unit], -1)
        solve: Callable[..., Any] = least_squares
        fit = solve(lambda x: left(torch.from_numpy(x), own), start, lambda _: slopes.numpy(), max_nfev=steps)
        return tuple(fit.x.tolist())

    def rank(self, hypothesis: Hypothesis) -> Rank:
        """On all cases; explained is the share of the output that errs and has least of it explained."""
        candidate, layout = hypothesis
        least = self.share(hypothesis, self.cases, self.errs or self.outputs)
        about = f"{candidate.step}={candidate.title}", candidate.title, self.score(hypothesis, self.cases), least
        others = product(self.cases, self.outputs)
        is_more = any(case.left(hypothesis)[name] > self.most_left(case, hypothesis, name) for case, name in others)
        is_explained, only_in = least > (_SURE if candidate.fitted else _EXPLAINED), tuple(self.errs) if is_more else ()
        # Gradients are sums over tiles of queries or of keys, which have one size here
        tiles = str(layout) if self.of_pass is FORWARD else str(layout).replace(" keys", "")
        return Rank(*about, is_explained, tiles, candidate.permitted, only_in)

    def formats(self, declared: Hypothesis) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Steps in formats of 16 bits that leave more than the declared policy wherever they round, and the others."""
        limit, steps = self.score(declared, self.few[:1]) + _NEAR, dict[str, list[Candidate]]()
        for each in self.catalogue:
            if not each.permitted and _is_in(each, declared[1]) and [*each.changes.values()] in ([Stored(BF16)], [Stored(FP16)]):
                steps.setdefault(f"{each.step} in {each.title.rpartition(' in ')[2]}", []).append(each)
        far = {alike[0].title: min(self.score((each, declared[1]), self.few[:1]) for each in alike) for alike in steps.values()}
        return tuple(title for title in far if far[title] > limit), tuple(title for title in far if far[title] <= limit)


def _is_in(candidate: Candidate, layout: Layout) -> bool:
    return layout.splits > 1 or candidate.step != "splits"


def of_steps(ranked: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best hypothesis of each step, best first."""
    best = dict[str, Hypothesis]()
    for each in ranked:
        best.setdefault(each[0].step, each)
    return list(best.values())


def find(results: Sequence[tuple[Known, Tensors]]) -> Culprit:
    """The culprit of the results of a kernel, but for those that are not finite."""
    every = [Compared(known, outputs) for known, outputs in results]
    finite = [case for case in every if all(bool(x.isfinite().all()) for x in case.own.values())]
    cases = [case for case in finite if case.inputs["q"].shape[:-1].numel() * case.inputs.sizes[1] <= _MOST_SCORES]
    if not cases:
        return Culprit((), alone="was given too many tokens to look for the step that errs") if finite else Culprit(())
    if not any(bool(x.any()) for case in cases for name, x in case.own.items() if name != "lse"):
        return Culprit((), alone="returns zeros")
    search = Search(cases, every)
    tried = search.in_layouts([], [DECLARED], [DECLARED], search.layouts[: 1 if search.errs else 2])
    if search.errs or not (search.is_settled(tried[0], cases) and search.rank(tried[0]).is_explained):
        tried = search.run() + tried
    if search.errs and not search.rank(tried[0]).is_explained:
        tried = search.unknown() or tried
    best = [*search.within(search.best(tried, search.few), search.few, _ALIKE)[:20], *of_steps(tried)[:_SHOWN]]
    ranked = of_steps(search.best(best, cases))
    ranked = [each for each in ranked if not (each[0].permitted and search.errs)] or ranked
    candidate, own = ranked[0]
    tiles = [own, *(replace(each, scheme=own.scheme) for each in search.layouts[0] if each.bc != WHOLE)]
    near = search.within(search.best(product([candidate], tiles), search.few), search.few, _CLEAR)
    if len(near) > 1:  # a few cases need not tell tiles: a sink hides them
        near = search.within(search.best(near[:20], search.telling), search.telling, _CLEAR)
    ranked[0] = near[0]
    predictions, name, ranks = cases[0].known.predictions, search.outputs[0], tuple(map(search.rank, ranked[:_SHOWN]))
    emulated = some_rows(search.of_pass.emulated(cases[0].inputs, predictions.policy, ranked[0][1]))
    equal = float((cases[0].outputs[name] == emulated[name]).double().mean())
    culprit = Culprit(ranks, ranks[0].tiles if len(near) == 1 else "", equal=equal)
    if not search.errs and culprit.is_explained and culprit.is_permitted:
        excluded, undecided = search.formats(ranked[0])
        culprit = replace(culprit, excluded=excluded, undecided=undecided)
    predictions.save()
    return culprit


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())
