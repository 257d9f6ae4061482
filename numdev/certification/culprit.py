"""The step that errs: the candidate whose predicted error is nearest to the error of the kernel, element by element.

With `e = out - golden` of the kernel and `e_c` of a candidate, `r = |e - e_c| / |e|` is what the candidate leaves unexplained,
and `1 - r^2` the share that it explains. Candidates are ranked by the mean of log r over the cases, of out and of LSE. The tiles
of the kernel come first, since predictions in other tiles explain little: they are read from the declared policy in many tiles,
and where these explain nothing, every candidate is tried in all usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Tiling
from numdev.certification.accuracy import ABSURD, LSE_FLOOR, over, permitted
from numdev.certification.catalogue import DECLARED, ORDERS, Candidate, Outputs
from numdev.certification.faults import TITLES, exact, seen_keys
from numdev.certification.kernel import Kernel
from numdev.certification.predictions import LAYOUTS, Known, Page, Predictions, layout

EXPLAINED = -2.5  # log r of out below which its error is explained: 99 % of it
_SMALL = 0.35  # times the permitted error: what is left of that of a kernel whose exponential is not that of the emulation
_EXPLAINED_LSE = 2.0  # times the permitted error of an LSE, which what is left of it may be
_NEAR = 0.1  # in log r: candidates so close to the best cannot be told from it
_SHOWS_TILES = -0.05  # log r of the declared policy in its best tiles, from which on these may be the kernel's
_LEAST = 0.02  # of r, below which differences of exponentials decide
_MOST_WEIGHT = 1e4
_PAIRS = 6  # candidates of which two together are tried
_STEP_OF_SCALE, _LEAST_SCALE = 1e-3, 1e-4
_EXACT = 1e-5  # relative: errors of an exponential in FP32, as an LSE shows them
_SHOWN = 5
_SEARCHED = tuple(Tiling(bc=bc, order=order) for bc in (32, 64, 96, 128) for order in ORDERS)
Results = Sequence[tuple[Known, Outputs]]


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
    """What is nearest to the error of a kernel.

    Attributes:
        ranks: the best candidates, of different steps, best first.
        tiles: size, order and splits that the error shows.
    """

    ranks: tuple[Rank, ...]
    tiles: str

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
            return "returns nothing finite to compare"
        named = " or ".join(rank.title for rank in self.named)
        others = [rank for rank in self.ranks if rank not in self.named]
        beside = f"; next: {others[0].title}, {100 * others[0].explained:.0f} %" if others else ""
        share = f"explains {100 * self.ranks[0].explained:.1f} % of the error{beside}"
        if not self.is_explained:
            start = "errs in a way" if fails else "computes in a way"
            return f"{start} that no candidate explains; nearest: {named} ({share})"
        return f"errs as {named} does ({share})" if fails and not self.is_permitted else f"computes as {named} ({share})"


def find(predictions: Predictions, results: Results, more: Sequence[Candidate] = ()) -> Culprit:
    """The culprit of the results of a kernel, but for those that are not finite. `more` are candidates of this kernel alone."""
    has_lse = all("lse" in outputs for _, outputs in results)
    usable = [
        (known, outputs) for known, outputs in results if all(bool(x.isfinite().all()) for x in known.rows(outputs).values())
    ]
    if not usable:
        return Culprit((), "")
    layouts = _scores([(known, outputs, known.declared) for known, outputs in usable])
    tiles = min(layouts, key=lambda name: layouts[name][0])
    first = [LAYOUTS[tiles.partition(", lazy")[0]]] if layouts[tiles][0] < _SHOWS_TILES else []
    permitted_names = {each.name for each in predictions.candidates if each.permitted}
    ranks: dict[str, Rank] = {}
    for tiling in (*first, *(each for each in _SEARCHED if each not in first)):
        best_rank = min(ranks.values(), key=lambda rank: rank.score, default=None)
        if best_rank is not None and best_rank.is_explained and best_rank.score < EXPLAINED:
            break
        pages = []
        for known, outputs in usable:
            own = {each.name: each.predict(known.inputs, tiling) for each in more} | _scaled(known, outputs, tiling)
            pages.append((known, outputs, known.catalogue(tiling) | own))
        for label, (score, share, is_explained) in _scores(pages).items():
            name = label.partition("#")[0]  # of a fault that may be in several tiles the nearest counts
            if name.startswith("lse") and not has_lse:
                continue
            if name not in ranks or score < ranks[name].score:
                title = _title((*predictions.candidates, *more), name)
                ranks[name] = Rank(name, title, score, share, is_explained, layout(tiling), name in permitted_names)
    ordered = sorted(ranks.values(), key=lambda rank: rank.score)
    if not ordered[0].is_explained:
        ordered = sorted([*_pairs(predictions, usable, ordered), *ordered], key=lambda rank: rank.score)
    best: dict[str, Rank] = {}
    for rank in ordered:
        best.setdefault(rank.step, rank)
    shown = tiles if tiles.startswith(ordered[0].tiles) else ordered[0].tiles
    return Culprit(tuple(list(best.values())[:_SHOWN]), shown)


def _title(candidates: Sequence[Candidate], name: str) -> str:
    titles = {each.name: each.title for each in candidates} | TITLES | {"scale": "a wrong scale of the scores"}
    return titles[name]


def _scores(pages: Sequence[tuple[Known, Outputs, Page]]) -> dict[str, tuple[float, float, bool]]:
    """By candidate the mean of log r over the cases, the share of the error that it explains, and whether that is nearly all.

    A case on which a fault changes nothing counts as declared. In the share an error weighs as many times as it is larger than
    permitted, squared, up to `_MOST_WEIGHT`; an LSE that is as good as permitted has nothing to explain.
    """
    tables, weights = list[dict[str, tuple[tuple[float, float], ...]]](), []
    for known, outputs, page in pages:
        own, golden = known.rows(outputs), known.rows(known.golden)
        floors = {name: LSE_FLOOR * (1 + float(golden[name].abs().mean())) * (name == "lse") for name in own}
        most = {name: permitted(known, name).rmse + floors[name] for name in own}
        errors = {name: _rms(own[name] - golden[name]) + floors[name] for name in own}
        tables.append({label: tuple(_left(own, known.rows(outputs), errors, most, floors)) for label, outputs in page.items()})
        excess = {name: over(errors[name], most[name]) ** 2 for name in own}
        weights.append(tuple(min(each - (name == "lse" and min(each, 1.0)), _MOST_WEIGHT) for name, each in excess.items()))
    result = {}
    for label in dict.fromkeys(label for table in tables for label in table):
        rows = [table.get(label) or table.get(DECLARED) or ((1.0, 1.0),) * len(weights[0]) for table in tables]
        score = sum(math.log(max(r, _LEAST)) for row in rows for r, _ in row) / len(rows)
        left = sum(w * r * r for row, own in zip(rows, weights, strict=True) for (r, _), w in zip(row, own, strict=True))
        of_out = sum(min(math.log(max(r, _LEAST)), EXPLAINED + math.log(max(beside, 1e-9) / _SMALL)) for (r, beside), *_ in rows)
        of_lse = [math.log(max(beside, _LEAST)) for row in rows for _, beside in row[1:]]
        is_explained = of_out < EXPLAINED * len(rows) and sum(of_lse) <= len(of_lse) * math.log(_EXPLAINED_LSE)
        result[label] = score, max(0.0, 1 - left / max(sum(map(sum, weights)), 1e-300)), is_explained
    return result


def _left(
    own: Outputs, predicted: Outputs, errors: Mapping[str, float], most: Mapping[str, float], floors: Mapping[str, float]
) -> Iterator[tuple[float, float]]:
    """Of each output what a prediction leaves of the error: `|e - e_c| / |e|`, and over the permitted error."""
    for name, x in own.items():
        finite = bool(predicted[name].isfinite().all())
        rest = _rms(x - predicted[name]) + floors[name] if finite else ABSURD
        yield (rest / errors[name] if errors[name] > 0 else float(rest > 0)), over(rest, most[name])


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


def _scaled(known: Known, outputs: Outputs, tiling: Tiling) -> Page:
    """The declared prediction with scores times `1 + epsilon`, epsilon fitted to the output; nothing where it is 0."""
    inputs, seen, base = known.inputs, seen_keys(known.inputs), known.catalogue(tiling)[DECLARED]

    def off(epsilon: float) -> Outputs:
        scaled = exact(replace(inputs, scale=inputs.scale * (1 + epsilon)), seen)
        return {name: (scaled[name] - known.golden[name]).nan_to_num(0.0, 0.0, 0.0) for name in scaled}

    slope, excess, epsilon = off(_STEP_OF_SCALE)["out"] / _STEP_OF_SCALE, outputs["out"].double() - base["out"], 0.0
    for _ in range(3):  # Newton's steps, since a scale off by a per cent is not in the linear range of large scores
        epsilon += float(((excess - off(epsilon)["out"]) * slope).nan_to_num(0.0).sum() / slope.pow(2).sum().clamp(min=1e-300))
        if not _LEAST_SCALE < abs(epsilon) < 1:
            return {}
    return {"scale": {name: base[name] + x for name, x in off(epsilon).items()}}


def _pairs(predictions: Predictions, usable: Results, ordered: Sequence[Rank]) -> Iterator[Rank]:
    """Two faults at once: two steps of the policy, or a step and a way in which an LSE is stored."""
    by_name, tiling = {each.name: each for each in predictions.candidates}, LAYOUTS[ordered[0].tiles]
    first = [by_name[rank.name] for rank in ordered if rank.name in by_name and not by_name[rank.name].permitted][:_PAIRS]
    stored = [by_name[rank.name] for rank in ordered if rank.name.startswith("lse")]
    for one, other in (*combinations(first, 2), *((one, other) for one in first for other in stored)):
        both = _both(predictions.candidates[0], one, other)
        if both is not None:
            pages = [(known, outputs, {both.name: both.predict(known.inputs, tiling)}) for known, outputs in usable]
            yield Rank(both.name, both.title, *_scores(pages)[both.name], ordered[0].tiles)


def _both(declared: Candidate, one: Candidate, other: Candidate) -> Candidate | None:
    """Both changes in one candidate; None where they are of one step, or cannot be had together."""
    name, title = f"{one.name} and {other.name}", f"{one.title} and {other.title}"
    if other.name.startswith("lse") and one.after is None:
        return replace(one, name=name, title=title, after=other.after)
    if any(each.place or each.after for each in (one, other)) or one.name.partition("=")[0] == other.name.partition("=")[0]:
        return None
    usual = declared.policy.steps()
    changed = {step: text for each in (one, other) for step, text in each.policy.steps().items() if text != usual[step]}
    softmax = one.softmax if one.softmax != declared.softmax else other.softmax
    return Candidate(name, title, declared.policy.with_step(**changed), softmax)


def exponential(kernel: Kernel, predictions: Predictions) -> list[Candidate]:
    """The polynomial by which a kernel computes 2^f, read out of its LSE of two keys; nothing where it is exact or has no LSE.

    With scores 0 and -x an LSE is `log(1 + e^-x)`, from which `e^-x = 2^n p(f)`, and so p at many f, follow.
    """
    x = torch.linspace(0.01, 3.0, 384, dtype=torch.float64).to(kernel.fmt.dtype)
    q, k = (torch.zeros(1, 1, rows, predictions.head_dim, dtype=x.dtype, device=kernel.device) for rows in (len(x), 2))
    q[0, 0, :, 0], k[0, 0, 1, 0] = x.to(kernel.device), -1.0
    lse = kernel(q, k, k.clone(), Mask(), 1.0).get("lse")
    if lse is None or not bool(lse.isfinite().all()):
        return []
    p, y = lse.flatten().double().cpu().expm1(), -x.double() * math.log2(math.e)
    if bool(((p / (-x.double()).exp() - 1).abs() < _EXACT).all()):
        return []
    fraction, value = y - y.floor(), (p * 2 ** -y.floor())[:, None]
    for degree in range(1, 6):
        basis = torch.stack([fraction**i for i in range(degree + 1)], -1)
        coefficients = torch.linalg.lstsq(basis, value).solution
        if bool(((basis @ coefficients - value).abs() < _EXACT).all()):
            softmax = OnlineSoftmax(exp=Exponential.polynomial(tuple(coefficients.flatten().tolist())))
            title = f"an exponential by a polynomial of degree {degree}"
            return [Candidate("exp=read out", title, predictions.policy, softmax)]
    return []
