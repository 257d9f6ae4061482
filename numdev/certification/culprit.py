"""The step that errs: the candidate whose predicted error is nearest to the error of the kernel, element by element.

With `e = out - golden` of the kernel and `e_c` of a candidate, `r = |e - e_c| / |e|` is what the candidate leaves unexplained,
and `1 - r^2` the share that it explains. Candidates are ranked by the mean of log r over the cases and the outputs. The tiles of
the kernel come first, since predictions in other tiles explain little: they are read from the declared policy in many tiles, and
where these show nothing, every candidate is tried in the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations

import torch
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.attention.tiling import Tiling
from numdev.certification.accuracy import ABSURD, Known, Page, some_rows
from numdev.certification.candidates import (
    BACKWARD,
    DECLARED,
    DIVIDED,
    Candidate,
    Layouts,
    Outputs,
    Pass,
    Simulation,
    by_polynomial,
)
from numdev.certification.kernel import Kernel

EXPLAINED = -2.5  # log r of an output below which its error is explained: 99 % of it
_SMALL = 0.35  # times the permitted error: what is left of that of a kernel whose exponential is not that of the emulation
_EXPLAINED_LSE = 2.0  # times the permitted error of an LSE, which what is left of it may be
_NEAR = 0.1  # in log r: candidates so close to the best cannot be told from it
_SHOWS_TILES = -0.02  # log r of the declared policy in its best tiles, but for factors of rows: these may be the kernel's
_READ = 4  # cases by which tiles are read
# Of a kernel that fails: the share of its error that explains it, the least if no more is left than what is permitted times this.
_MOST_SHARE, _SHARE, _REST = 0.85, 0.6, 1.6
_LEAST = 0.02  # of r, below which differences of exponentials decide
_MOST_WEIGHT = 1e4
_SEARCHED = 2  # cases by which tiles are looked for that the declared policy does not show
_REFINED = 4  # candidates that are tried in all tiles
_TILINGS = 2  # best tiles in which every candidate is compared on all cases
_PAIRED = 6  # candidates of which two together are tried
_STEP_OF_SCALE, _LEAST_SCALE = 1e-3, 1e-4
_ERRS = 1.1  # times the permitted error: a kernel that errs more does not compute as permitted
_EXACT = 1e-5  # relative: errors of an exponential in FP32, as an LSE shows them
_SHOWN, _NAMED = 5, 3
_NEAREST = 0.05  # share of the error that a candidate explains to be called the nearest
_WHOLE = 1 << 20  # tokens of a tile that holds every one
SCALED = Candidate("scale", "a wrong scale of the scores")
Results = Sequence[tuple[Known, Outputs]]
Left = dict[str, tuple[float, float]]
"""Of each output what a prediction leaves of the error: `|e - e_c| / |e|`, and over the permitted error."""


@dataclass(frozen=True)
class Rank:
    """A candidate in its best tiles: `log r`, the share of the error that it explains, and whether that is nearly all."""

    name: str
    title: str
    score: float
    explained: float
    is_explained: bool
    tiles: str
    permitted: bool = False

    @property
    def step(self) -> str:
        """What it is about, whatever the format or the place."""
        return self.name.partition("=")[0]


@dataclass(frozen=True)
class Culprit:
    """The candidates that are nearest to the error of a kernel, of different steps, best first.

    `tiles` are size, order and splits that the error shows, or empty; `alone` says what there is without ranks.
    """

    ranks: tuple[Rank, ...]
    tiles: str = ""
    alone: str = "returns nothing finite to compare"

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
        """`errs as the row sum in BF16 does (explains 97 % of the error; next: the accumulator in BF16, 41 %)`.

        Of a kernel that does not fail it says how it computes.
        """
        if not self.ranks:
            return self.alone
        titles = [rank.title for rank in self.named]
        more = [f"{len(titles) - _NAMED} more"] if len(titles) > _NAMED else []
        named = " or ".join([*titles[:_NAMED], *more])
        others = [rank for rank in self.ranks if rank not in self.named and rank.explained <= self.ranks[0].explained]
        beside = f"; next: {others[0].title}, {100 * others[0].explained:.0f} %" if others else ""
        share = f"explains {100 * self.ranks[0].explained:.0f} % of the error{beside}"
        if not self.is_explained:
            start = f"{'errs' if fails else 'computes'} in a way that no candidate explains"
            return f"{start}; nearest: {named} ({share})" if self.ranks[0].explained >= _NEAREST else start
        return f"errs as {named} does ({share})" if fails and not self.is_permitted else f"computes as {named} ({share})"


@dataclass(frozen=True)
class Compared:
    """A case on which a kernel is compared with predictions."""

    known: Known
    outputs: Outputs

    @cached_property
    def own(self) -> Outputs:
        return self.known.rows(self.outputs)

    @cached_property
    def golden(self) -> Outputs:
        return some_rows(self.known.golden)

    @cached_property
    def sizes(self) -> dict[str, tuple[float, float, float]]:
        """Of each output the RMS of its error, the permitted one, and what is added to both and to what is left."""
        sizes, exact = {}, self.known.rows(self.golden)
        for name, x in self.own.items():
            floor = float(self.known.floors[name][:, 0].mean())
            sizes[name] = _rms(x - exact[name]) + floor, _rms(self.known.permitted[name][:, 0]) + floor, floor
        return sizes

    @property
    def weights(self) -> dict[str, float]:
        """Of each output in the share: as many times as its error is larger than permitted, squared, up to a limit.

        An LSE that is as good as permitted has nothing to explain.
        """
        excess = {name: (error / most) ** 2 if most else ABSURD for name, (error, most, _) in self.sizes.items()}
        return {name: min(each - (name == "lse" and min(each, 1.0)), _MOST_WEIGHT) for name, each in excess.items()}

    def pattern(self, predicted: Outputs) -> float:
        """`log r` of the primary output but for a factor of each row, which many faults have: it shows the tiles."""
        name = self.known.predictions.of_pass.outputs[0]
        own, golden, x = (each[name].double() for each in (self.outputs, self.golden, predicted))

        def rest(of: Tensor) -> float:
            return _rms(own - of * (own * of).sum(-1, keepdim=True) / of.pow(2).sum(-1, keepdim=True).clamp(min=1e-300))

        return math.log(max(rest(x) / max(rest(golden), 1e-300), _LEAST))

    def left(self, predicted: Outputs) -> Left:
        left, rows = {}, self.known.rows(predicted)
        for name, (error, most, floor) in self.sizes.items():
            rest = _rms(self.own[name] - rows[name]) + floor if bool(rows[name].isfinite().all()) else ABSURD
            left[name] = rest / error if error else float(rest > 0), rest / most if most else ABSURD * (rest > 0)
        return left


class Comparison:
    """What each candidate leaves of the errors of a kernel on some cases, in each of the tiles in which it was tried."""

    def __init__(self, cases: Sequence[Compared], errs: Sequence[str] = ()) -> None:
        """`errs` are the outputs that err more than permitted."""
        self.cases = cases
        self.of_pass: Pass = cases[0].known.predictions.of_pass
        self.outputs = [name for name in self.of_pass.outputs if all(name in case.outputs for case in cases)]
        self.errs = [name for name in errs if name in self.outputs]
        self._left = dict[str, dict[str, list[Left]]]()  # by candidate and tiles, for each case
        self._candidates: dict[str, Candidate] = {}

    def put(self, candidate: Candidate, tiles: str, predicted: Sequence[Outputs]) -> None:
        """Compare the predictions of a candidate in some tiles, one for each case."""
        self._candidates[candidate.name] = candidate
        left = [case.left(outputs) for case, outputs in zip(self.cases, predicted, strict=True)]
        self._left.setdefault(candidate.name, {})[tiles] = left

    def declared(self, layouts: Layouts) -> Comparison:
        """With the declared policy in many tiles."""
        pages = [case.known.declared(layouts) for case in self.cases]
        for name, (_, candidate) in layouts.items():
            self.put(candidate, name, [page[name] for page in pages])
        return self

    def catalogue(self, tiles: str, more: Sequence[Candidate]) -> Comparison:
        """With every candidate in some tiles; a case on which a fault changes nothing counts as declared."""
        tiling, layouts = self.of_pass.layouts[tiles][0], {tiles: self.of_pass.layouts[tiles]}
        base = [case.known.declared(layouts)[tiles] for case in self.cases]
        pages = [case.known.catalogue(tiling) | _scaled(case, own) for case, own in zip(self.cases, base, strict=True)]
        by_name = {each.name: each for each in (*self.cases[0].known.predictions.candidates, SCALED)}
        for label in dict.fromkeys(label for page in pages for label in page):
            name, _, place = label.partition("#")
            candidate = by_name.get(name) or Candidate(name, self.of_pass.titles[name], fault=label)
            predicted = [page.get(label, own) for page, own in zip(pages, base, strict=True)]
            self.put(candidate, f"{tiles}#{place}", predicted)
        for candidate in more:
            self.tried(candidate, tiles)
        return self.declared(layouts)

    def pairs(self, ranks: Sequence[Rank]) -> None:
        """With two candidates at once: of those that are nearest, those of an LSE alone, and P divided before it is rounded.

        All are tried on a few cases, the best on all.
        """
        first = [rank.name for rank in of_steps([rank for rank in ranks if not rank.permitted])[:_PAIRED]]
        designs = [name for name in self._candidates if name.startswith("lse") or name == DIVIDED.name]
        both = [self._candidates[one] & self._candidates[other] for one, other in combinations(dict.fromkeys(first + designs), 2)]
        few = Comparison(telling(self.cases))
        for tiles in dict.fromkeys(tiles.partition("#")[0] for tiles in self.tiles_of(ranks[0].name)):
            for pair in filter(None, both):
                few.tried(pair, tiles)
        for rank in few.ranks()[:_TILINGS]:
            for tiles in dict.fromkeys(few.tiles_of(rank.name)):
                self.tried(few._candidates[rank.name], tiles)

    def tried(self, candidate: Candidate, tiles: str) -> None:
        """With a candidate in some tiles."""
        tiling = self.of_pass.layouts[tiles][0]
        self.put(candidate, tiles, [case.known.predict(candidate, tiling) for case in self.cases])

    def ranks(self) -> list[Rank]:
        """Every candidate in its best tiles, best first."""
        return sorted(map(self._rank, self._left), key=lambda rank: rank.score)

    def tiles_of(self, name: str) -> list[str]:
        """The tiles in which a candidate is nearest, for each group of outputs that have tiles of their own."""
        variants = self._left[name]

        def score(tiles: str, group: Sequence[str]) -> float:
            return sum(math.log(max(left[each][0], _LEAST)) for left in variants[tiles] for each in group if each in left)

        return [min(variants, key=partial(score, group=group)) for group in self.of_pass.groups]

    def everywhere(self, name: str) -> None:
        """With a candidate in all tiles."""
        for tiles, (_, declared) in self.of_pass.layouts.items():
            if declared is DECLARED:
                self.tried(self._candidates[name], tiles)

    def _share(self, cases: Sequence[Left], outputs: Sequence[str]) -> float:
        """Of the error of some outputs what is explained, where so much is left of each case."""
        weights = [(case.weights[each], left[each][0]) for case, left in zip(self.cases, cases, strict=True) for each in outputs]
        return max(0.0, 1 - sum(weight * r * r for weight, r in weights) / max(sum(weight for weight, _ in weights), 1e-300))

    def _rank(self, name: str) -> Rank:
        best, cases = self.tiles_of(name), [dict[str, tuple[float, float]]() for _ in self.cases]
        for tiles, group in zip(best, self.of_pass.groups, strict=True):
            for own, left in zip(cases, self._left[name][tiles], strict=True):
                own |= {each: left[each] for each in group if each in left}
        total = sum(math.log(max(r, _LEAST)) for own in cases for r, _ in own.values()) / len(cases)
        shares = {each: self._share(cases, [each]) for each in self.outputs}
        share = self._share(cases, self.outputs)
        candidate = self._candidates[name]
        lefts = [(each, r, beside) for own in cases for each, (r, beside) in own.items()]
        if self.errs:
            limits = {each: _EXPLAINED_LSE if each == "lse" else _REST for each, *_ in lefts}
            within = all(beside <= limits[each] or math.log(max(r, _LEAST)) < EXPLAINED for each, r, beside in lefts)
            least = min(shares[each] for each in self.errs)  # two faults must not hide each other
            is_explained = least > (_SHARE if within else _MOST_SHARE) and not candidate.permitted
        else:
            of_lse = [math.log(max(beside, _LEAST)) for each, _, beside in lefts if each == "lse"]
            of_rest = [
                min(math.log(max(r, _LEAST)), EXPLAINED + math.log(max(beside, 1e-9) / _SMALL))
                for each, r, beside in lefts
                if each != "lse"
            ]
            is_explained = sum(of_rest) < EXPLAINED * len(of_rest) and sum(of_lse) <= len(of_lse) * math.log(_EXPLAINED_LSE)
        tiles = best[0].partition("#")[0]
        return Rank(name, candidate.title, total, share, is_explained, tiles, candidate.permitted)


def read_tiles(cases: Sequence[Compared]) -> tuple[list[str], bool]:
    """The tiles in which the declared policy is nearest to a kernel, best first, and whether tiles can be told apart at all."""
    read = [case for case in cases if case.known.inputs.mask.is_none][:_READ] or cases
    pages = [case.known.declared(case.known.predictions.of_pass.layouts) for case in read]
    scores = {name: sum(case.pattern(page[name]) for case, page in zip(read, pages, strict=True)) for name in pages[0]}
    best = sorted(scores, key=lambda name: scores[name])
    near = [name for name in best if scores[name] <= scores[best[0]] + _NEAR * len(read)]
    shown = [name for name in best[:_TILINGS] if scores[name] < _SHOWS_TILES * len(read)] or best[:1]
    return shown, 2 * len(near) < len(best)


def telling(cases: Sequence[Compared]) -> list[Compared]:
    """The cases on which a kernel errs most beyond what is permitted."""
    return sorted(cases, key=lambda case: -max(case.weights.values()))[:_SEARCHED]


def search_tiles(cases: Sequence[Compared], more: Sequence[Candidate]) -> list[str]:
    """The tiles in which candidates are nearest on a few cases: all candidates in some tiles, then the nearest in all tiles."""
    coarse = Comparison(telling(cases))
    for tiles in coarse.of_pass.searched:
        coarse.catalogue(tiles, more)
    for rank in of_steps([rank for rank in coarse.ranks() if not rank.permitted])[:_REFINED]:
        coarse.everywhere(rank.name)
    best = [tiles.partition("#")[0] for rank in coarse.ranks()[:_TILINGS] for tiles in coarse.tiles_of(rank.name)]
    return list(dict.fromkeys(best))


def find(results: Results, more: Sequence[Candidate] = (), *, fails: bool = True) -> Culprit:
    """The culprit of the results of a kernel, but for those that are not finite.

    `more` are candidates of this kernel alone. Of a kernel that does not fail, other candidates are tried only if the declared
    policy does not explain its errors.
    """
    cases = [Compared(known.first, known.of_first(outputs)) for known, outputs in results]
    cases = [case for case in cases if all(bool(x.isfinite().all()) for x in case.own.values())]
    if not cases:
        return Culprit(())
    if not any(bool(x.any()) for case in cases for name, x in case.own.items() if name != "lse"):
        return Culprit((), alone="returns zeros")
    ratios = [known.ratios(outputs) for known, outputs in results]
    limits = {name: _EXPLAINED_LSE if name == "lse" else _ERRS for name in cases[0].outputs}
    errs = [name for name in limits if any(float(each[name][:, 0].mean()) > limits[name] for each in ratios if name in each)]
    has_lse, whole = all("lse" in case.outputs for case in cases), Comparison(cases, errs)
    shown, shows_tiles = read_tiles(cases)
    whole.declared({tiles: whole.of_pass.layouts[tiles] for tiles in shown})

    def ranks() -> list[Rank]:
        """Of a kernel that errs more than permitted those alone that the policy does not permit, if there are any.

        Two candidates at once count only where they explain it. Of gradients that do not fail only what is permitted counts: they
        come from a few roundings, and many a candidate differs from the declared policy by less than the order of a sum does.
        """
        ranks = [rank for rank in whole.ranks() if has_lse or not rank.name.startswith("lse")]
        ranks = [rank for rank in ranks if rank.is_explained or " and " not in rank.name]
        if whole.errs or (whole.of_pass is BACKWARD and not fails):
            return [rank for rank in ranks if rank.permitted != bool(whole.errs)] or ranks
        return ranks

    def is_settled() -> bool:
        best = ranks()[0]
        return best.is_explained and best.score < EXPLAINED

    if fails or not ranks()[0].is_explained:
        for place, tiles in enumerate(dict.fromkeys(tiles.removesuffix(", lazy rescales") for tiles in shown)):
            if place == 0 or not is_settled():
                whole.catalogue(tiles, more)
        if not (ranks()[0].is_explained if whole.errs else is_settled()):
            for tiles in search_tiles(cases, more):
                whole.catalogue(tiles, more)
        if not ranks()[0].is_explained:
            whole.pairs(ranks())
    return Culprit(tuple(of_steps(ranks())[:_SHOWN]), ranks()[0].tiles if shows_tiles else "")


def of_steps(ranks: Sequence[Rank]) -> list[Rank]:
    """The best candidate of each step, best first."""
    best = dict[str, Rank]()
    for rank in ranks:
        best.setdefault(rank.step, rank)
    return list(best.values())


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


def _scaled(case: Compared, base: Outputs) -> Page:
    """The declared prediction with scores times `1 + epsilon`, epsilon fitted to the output; nothing where it is 0."""
    known, of_pass = case.known, case.known.predictions.of_pass

    def off(epsilon: float) -> Outputs:
        inputs = replace(known.inputs, scale=known.inputs.scale * (1 + epsilon))
        scaled = of_pass.simulated(Simulation(inputs, of_pass.policy("golden"), Tiling(br=_WHOLE, bc=_WHOLE)))
        return {name: (x - case.golden[name]).nan_to_num(0.0, 0.0, 0.0) for name, x in some_rows(scaled).items()}

    first = of_pass.outputs[0]
    slope, excess, epsilon = off(_STEP_OF_SCALE)[first] / _STEP_OF_SCALE, case.outputs[first].double() - base[first], 0.0
    for _ in range(3):  # Newton's steps, since a scale off by a per cent is not in the linear range of large scores
        epsilon += float(((excess - off(epsilon)[first]) * slope).nan_to_num(0.0).sum() / slope.pow(2).sum().clamp(min=1e-300))
        if not _LEAST_SCALE < abs(epsilon) < 1:
            return {}
    return {SCALED.name: {name: base[name] + x for name, x in off(epsilon).items()}}


def exponential(kernel: Kernel, head_dim: int) -> Iterator[Candidate]:
    """The polynomial by which a kernel computes 2^f, read out of its LSE of two keys; nothing where it is exact or has no LSE.

    With scores 0 and -x an LSE is `log(1 + e^-x)`, from which `e^-x = 2^n p(f)`, and so p at many f, follow.
    """
    x = torch.linspace(0.01, 3.0, 384, dtype=torch.float64).to(kernel.fmt.dtype)
    q, k = (torch.zeros(1, 1, rows, head_dim, dtype=x.dtype, device=kernel.device) for rows in (len(x), 2))
    q[0, 0, :, 0], k[0, 0, 1, 0] = x.to(kernel.device), -1.0
    lse = kernel({"q": q, "k": k, "v": k.clone()}, Mask(), 1.0).get("lse")
    if lse is None or not bool(lse.isfinite().all()):
        return
    p, y = lse.flatten().double().cpu().expm1(), -x.double() * math.log2(math.e)
    if bool(((p / (-x.double()).exp() - 1).abs() < _EXACT).all()):
        return
    fraction, value = y - y.floor(), (p * 2 ** -y.floor())[:, None]
    for degree in range(1, 6):
        basis = torch.stack([fraction**i for i in range(degree + 1)], -1)
        coefficients = torch.linalg.lstsq(basis, value).solution
        if bool(((basis @ coefficients - value).abs() < _EXACT).all()):
            yield from by_polynomial("read out", tuple(coefficients.flatten().tolist()))
            return
