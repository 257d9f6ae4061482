"""What the weights of training runs say of the claims on Figures 7 and 8, and on restarts.

Every difference is that of a run from its reference, of all weights together, by replicate. What claims compare is the difference
at the last step, by the Wasserstein distance as in the source, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd

from numdev.report.claims.finding import (
    GROWS,
    LARGER,
    MARGIN,
    NO_LARGER,
    NO_SMALLER,
    Evidence,
    NotMeasured,
    Question,
    Region,
    Undecidable,
    Verdict,
    left_out,
)
from numdev.report.reading.frames import Results
from numdev.report.reading.scenarios import of, ordered
from numdev.report.statistics.estimates import Interval, mean, significant
from numdev.report.studies.groups import Group
from numdev.report.studies.rungs import ACTS, LARGEST, METRICS, SIZE, WASSERSTEIN, Rung, of_group, over, over_each, rungs

TIMES = Region(2.0, 5.0)  # of low-precision training over flash attention: Golden et al. 2024, abstract
ULP = "One unit in the last place of one weight moves the weights as much as flash attention does"
RANKS = "Another number of processes moves the weights as much as flash attention does"
_LESS = {
    ULP: "One unit in the last place of one weight moves the weights less than flash attention does.",
    RANKS: "Another number of processes moves the weights less than flash attention does.",
}
_BESIDE = (LARGEST, SIZE)  # what is told beside the Wasserstein distance, and decides nothing
_FIRST = f"The {METRICS[WASSERSTEIN]}"


def weigh_fig7(rows: pd.DataFrame) -> Evidence:
    """The difference between flash and baseline attention grows over training, by both metrics."""
    found = _sound(rows)
    flash = of_group(found, Group.FLASH)
    powers = {rung.name: (rung.exponent(LARGEST), rung.exponent(WASSERSTEIN)) for rung in flash}
    questions = [Question(power, GROWS) for pair in powers.values() for power in pair]
    least = [min((pair[i] for pair in powers.values()), key=lambda power: power.estimate) for i in (0, 1)]
    which = "" if len(flash) == 1 else f" (the slowest of {len(flash)} kernels)"
    figure = f"max difference step^{least[0].text()}, Wasserstein step^{least[1].text()}{which}"
    told = "; ".join(_grown(rung, powers[rung.name]) for rung in flash)
    zeros = left_out(*(power for pair in powers.values() for power in pair))
    return Evidence(figure, f"The difference from baseline attention: {told}.{zeros}{_stopped(flash)}", tuple(questions))


def _grown(rung: Rung, powers: tuple[Interval, Interval]) -> str:
    """How the difference of one rung grows: the exponents of the step, and by which factor it is larger at the end."""
    steps = rung.steps()
    if not steps:
        return f"{rung.name}: none"
    grown = (rung.growth(LARGEST), rung.growth(WASSERSTEIN))
    parts = [
        f"{METRICS[metric]} scales as step^{power.text()} and grows {times.text()}-fold"
        for metric, power, times in zip((LARGEST, WASSERSTEIN), powers, grown, strict=True)
    ]
    return f"{rung.name}, from step {steps[0]} to {rung.end}: {' and '.join(parts)}"


def weigh_fig8(rows: pd.DataFrame) -> Evidence:
    """Flash attention moves the weights no more than other initial weights do."""
    return _no_more(rows, Group.INIT)


def weigh_fig8_order(rows: pd.DataFrame) -> Evidence:
    """Flash attention moves the weights no more than another order of the data does."""
    return _no_more(rows, Group.ORDER)


def _no_more(rows: pd.DataFrame, group: Group) -> Evidence:
    found = _sound(rows)
    others, flash = of_group(found, group), of_group(found, Group.FLASH)

    times = {rung.name: over_each(rung, others, WASSERSTEIN) for rung in flash}
    rest = [f"{_span([over_each(rung, others, metric) for rung in flash])} by {METRICS[metric]}" for metric in _BESIDE]
    sentence = f"{_FIRST} with flash attention over that with {group.words}: {_listed(times)}; {', '.join(rest)}."
    questions = tuple(Question(each, NO_LARGER) for each in times.values())
    return Evidence(_most(times), sentence + _stopped([*flash, *others]), questions)


def weigh_fig8_precision(rows: pd.DataFrame) -> Evidence:
    """Low-precision training moves the weights 2 to 5 times as much as flash attention; by FP16 where it was trained."""
    found = _sound(rows)
    low, flash = of_group(found, Group.PRECISION), of_group(found, Group.FLASH)
    halves = [rung for rung in low if rung.name.startswith("FP16")] or low
    judged = [over(other.last(WASSERSTEIN), rung.last(WASSERSTEIN)) for other in halves for rung in flash]
    sentence = f"{_FIRST} with lower precision over that with flash attention: {_nested(low, flash, WASSERSTEIN)}."
    return Evidence(_span(judged), sentence + _stopped([*flash, *low]), tuple(Question(each, TIMES) for each in judged))


def weigh_fig8_rate(rows: pd.DataFrame) -> Evidence:
    """Per step, flash attention moves weights no faster than other initial weights, and slower than lower precision."""
    found = _sound(rows)
    flash = of_group(found, Group.FLASH)
    others = {Group.INIT: of_group(found, Group.INIT), Group.PRECISION: of_group(found, Group.PRECISION)}
    margins = {Group.INIT: MARGIN, Group.PRECISION: 1 / MARGIN}
    questions = [
        Question(mean((rung.rates() - margins[group] * _rates(own)).dropna().tolist()), Region(high=0.0))
        for rung in flash
        for group, own in others.items()
    ]
    own = {rung.name: rung.rate() for rung in flash}
    rest = {group.words: mean(_rates(each).tolist()) for group, each in others.items()}
    fastest = max(own.values(), key=lambda rate: rate.estimate)
    short = [f"{words} {significant(each.estimate)}" for words, each in ({Group.FLASH.words: fastest} | rest).items()]
    sentence = f"Growth of the {METRICS[WASSERSTEIN]} per step, the slope of a straight line: {_listed(own | rest)}."
    return Evidence(f"{'; '.join(short)} per step", sentence, tuple(questions))


def _rates(found: Sequence[Rung]) -> pd.Series[float]:
    """The mean rate of some rungs by replicate."""
    return pd.concat([rung.rates() for rung in found], axis=1).mean(axis=1)


def weigh_fig8_ulp(rows: pd.DataFrame) -> Evidence:
    """One unit in the last place of one weight moves the weights as much as flash attention does."""
    return _as_much(rows, Group.ULP, ULP)


def weigh_fig8_ranks(rows: pd.DataFrame) -> Evidence:
    """Another number of processes, and with it another order of sums, moves the weights as much as flash attention does."""
    return _as_much(rows, Group.RANKS, RANKS)


def _as_much(rows: pd.DataFrame, group: Group, words: str) -> Evidence:
    found = _sound(rows)
    (controls, idle), flash = _acting(of_group(found, group)), of_group(found, Group.FLASH)

    times = [over(control.last(WASSERSTEIN), rung.last(WASSERSTEIN)) for control in controls for rung in flash]
    rest = [
        f"{_span([over(control.last(metric), rung.last(metric)) for control in controls for rung in flash])} by {METRICS[metric]}"
        for metric in _BESIDE
    ]
    each = _nested(controls, flash, WASSERSTEIN)
    control = controls[0].name if len(controls) == 1 else group.words
    sentence = f"{_FIRST} with {control} over that with flash attention: {each}; {', '.join(rest)}.{left_out(*times)}{idle}"
    says = {Verdict.HOLDS: f"{words}.", Verdict.FAILS: _LESS[words]}
    return Evidence(
        _span(times), sentence + _stopped([*flash, *controls]), tuple(Question(one, NO_SMALLER) for one in times), says=says
    )


def weigh_training_sham(rows: pd.DataFrame) -> Evidence:
    """The reference, trained again, has the same bits at every step."""
    shams = of_group(rungs(rows), Group.SHAM)
    return _same_bits(rows, shams, "Nothing else in this figure counts: a run of the same configuration gives other weights.")


def weigh_restart_exact(rows: pd.DataFrame) -> Evidence:
    """A run that is stopped and resumed from its checkpoint has the bits of one that is not."""
    found = [rung for rung in of_group(_sound(rows), Group.RESTART) if rung.is_exact]
    if not found:
        raise NotMeasured("no run was resumed from its checkpoint as it is")
    return _same_bits(rows, found, "A stop and a resume themselves move the weights.")


def weigh_restart_lossy(rows: pd.DataFrame) -> Evidence:
    """A resume from less than the whole checkpoint moves the weights more than one ulp in one weight does."""
    found = _sound(rows)
    lossy, moved = [rung for rung in of_group(found, Group.RESTART) if not rung.is_exact], of_group(found, Group.ULP)
    if not lossy:
        raise NotMeasured("no run was resumed from less than its checkpoint")
    controls, idle = _acting(moved)
    times = [over(rung.last(WASSERSTEIN), control.last(WASSERSTEIN)) for rung in lossy for control in controls]
    other = controls[0].name if len(controls) == 1 else Group.ULP.words
    sentence = f"{_FIRST} with a resume over that with {other}: {_nested(lossy, controls, WASSERSTEIN)}.{idle}"
    return Evidence(_span(times), sentence + _stopped([*lossy, *controls]), tuple(Question(each, LARGER) for each in times))


def _acting(controls: list[Rung]) -> tuple[list[Rung], str]:
    """The controls that act, and a sentence on those that do not: what has no effect is no measure of an effect.

    Raises:
        Undecidable: if none acts.
    """
    idle = {rung.name: rung.idle() for rung in controls}
    acting = [rung for rung in controls if not idle[rung.name]]
    told = ", ".join(
        f"{rung.name} (in {idle[rung.name]} of {len(rung.last(WASSERSTEIN))} replicates the {METRICS[WASSERSTEIN]} at the last "
        f"step is not above {ACTS:g} times that before the first)"
        for rung in controls
        if idle[rung.name]
    )
    if not acting:
        raise Undecidable(f"the control did not act: {told}")
    return acting, f" Left out, because the control did not act: {told}." if told else ""


def _same_bits(rows: pd.DataFrame, found: list[Rung], fails: str) -> Evidence:
    """Whether no weight of some rungs ever differs from the reference's; `fails` is what it means if one does."""
    most = max(_largest(rows, rung) for rung in found)
    count = len({(rung.name, seed) for rung in found for seed in rung.rows["seed"]})
    seen = Verdict.FAILS if most else Verdict.HOLDS
    text = "exactly 0" if most == 0 else significant(most)
    sentence = f"The largest difference of any weight at any step is {text}, over {count} {'run' if count == 1 else 'runs'}."
    return Evidence(f"max difference {text}", sentence, says={Verdict.FAILS: fails}, seen=seen)


def _largest(rows: pd.DataFrame, sham: Rung) -> float:
    """The largest difference of any tensor of a sham, at any step; infinite where one is not finite."""
    own = rows[rows["key"].isin(sham.rows["key"].unique())][LARGEST].astype(float)
    return float(own.fillna(float("inf")).max())


def _sound(rows: pd.DataFrame) -> list[Rung]:
    """The rungs, where every sham is its reference to the bit.

    Raises:
        Undecidable: if a sham differs, which makes every other difference void.
    """
    found = rungs(rows)
    for sham in found:
        if sham.group is Group.SHAM and (most := _largest(rows, sham)) != 0:
            raise Undecidable(
                f"void: the sham, which repeats the reference, differs from it by up to {significant(most)}, so that no "
                "difference can be put down to its cause"
            )
    return found


def _stopped(found: Iterable[Rung]) -> str:
    """A sentence on runs that ended before the last step, or nothing."""
    counts = [f"{rung.name} ({rung.stopped()})" for rung in found if rung.stopped()]
    return f" Runs that ended before the last step, and are left out: {', '.join(counts)}." if counts else ""


def _nested(above: list[Rung], below: list[Rung], metric: str) -> str:
    """The ratio of each rung to each of the others at the last step."""
    found = {one.name: {rung.name: over(one.last(metric), rung.last(metric)) for rung in below} for one in above}
    return "; ".join(f"{name}: {_listed(each)}" if len(found) > 1 else _listed(each) for name, each in found.items())


def _listed(found: dict[str, Interval]) -> str:
    """The one value, or each behind its name."""
    if len(found) == 1:
        return next(iter(found.values())).text()
    return ", ".join(f"{name} {each.text()}" for name, each in found.items())


def _most(found: dict[str, Interval]) -> str:
    """The largest of some ratios, and whose it is."""
    name, most = max(found.items(), key=lambda item: item[1].estimate)
    return most.text() if len(found) == 1 else f"at most {most.text()} ({name})"


def _span(found: list[Interval]) -> str:
    """The one ratio, or the least and the greatest."""
    low, high = (pick(found, key=lambda one: one.estimate) for pick in (min, max))
    return low.text() if len(found) == 1 else f"{low.text()} to {high.text()}"


def findings(results: Results) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A heading, a sentence and its claims for each finding, of the study with the most kinds of runs."""
    measured = [rows for rows in map(results.study, results.manifests) if len(rows)]
    found = max((_by_group(rungs(of(rows, ordered(rows)[0]))) for rows in measured), key=len, default={})
    flash = found.get(Group.FLASH)
    if flash is None:
        return
    for heading, (tell, claims) in _FINDINGS.items():
        try:
            yield heading, tell(flash, found), claims
        except Undecidable:
            continue


def _by_group(found: Sequence[Rung]) -> dict[Group, Rung]:
    """The first rung of each group; of those that move one weight by one ulp, the one after which the weights differ most."""
    groups = {rung.group: rung for rung in reversed(found)}
    ulps = [rung for rung in found if rung.group is Group.ULP]
    return groups | ({Group.ULP: max(ulps, key=lambda rung: float(rung.rows[WASSERSTEIN].max()))} if ulps else {})


def _growth(flash: Rung, found: Mapping[Group, Rung]) -> str:
    largest, distance = flash.exponent(LARGEST), flash.exponent(WASSERSTEIN)
    return (
        f"Between a model trained with flash attention ({flash.name}) and the same model trained with baseline attention, the "
        f"largest difference of a weight scales with the training step as t^{largest.text()}, the Wasserstein distance as "
        f"t^{distance.text()}."
    )


def _size(flash: Rung, found: Mapping[Group, Rung]) -> str:
    known = [found[group] for group in (Group.INIT, Group.PRECISION) if group in found]
    if not known:
        raise Undecidable("nothing else was trained")
    told = " and ".join(f"{over(flash.last(WASSERSTEIN), rung.last(WASSERSTEIN)).text()} ({rung.name})" for rung in known)
    return (
        f"At step {flash.end}, the Wasserstein distance with flash attention ({flash.name}) over that of other changes: {told}."
    )


def _chaos(flash: Rung, found: Mapping[Group, Rung]) -> str:
    if Group.ULP not in found or found[Group.ULP].idle():
        raise Undecidable("no weight was moved by one ulp, or the forward pass saw nothing of it")
    times = over(found[Group.ULP].last(WASSERSTEIN), flash.last(WASSERSTEIN))
    return (
        f"With {found[Group.ULP].name} before training, and baseline attention throughout, the Wasserstein distance at step "
        f"{flash.end} is {times.text()} times that of flash attention."
    )


_FINDINGS = {
    "Growth over training": (_growth, ("fig7",)),
    "Size compared with other changes": (_size, ("fig8", "fig8_precision")),
    "Sensitivity of training": (_chaos, ("fig8_ulp",)),
}
