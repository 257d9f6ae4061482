"""The certificate of a kernel: cases, probes, culprit and verdict, as text, as JSON, and as a row of a study.

The `schema` of the JSON is 1; a field that changes its meaning raises that.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from numdev.attention.base import Backward
from numdev.certification.accuracy import BACKWARD, CASES, DECIDES, FORWARD, Case, Judged, Predictions, Verdict, judge, times
from numdev.certification.culprit import Culprit, find
from numdev.certification.kernel import Kernel, format_of, kernel_of
from numdev.certification.probes import PROBES, Probed
from numdev.certification.simulation import Tensors
from numdev.errors import BadInput, NotAChoice, Unsupported
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.environment import environment, resolve_device
from numdev.results.record import Column, Use

SCHEMA = 1
_PREEMPTS = ("untouched", "same bits")  # probes without which the error of a kernel is no property of its steps
_FAILURES_SHOWN = 6
_LEGEND = (
    "(times the permitted error; beside: other outputs; u: unit roundoffs; zeros: of a kernel that returns zeros; ?: undecided)"
)
COLUMNS = {"case": "<13", "RMSE": ">17", "largest": ">8", "beside": ">17", "u": ">7", "zeros": ">8", "": ">4", "makes large": "<"}
"""Of the table of cases, each with how text aligns it."""
DEPTHS = {"quick": (3, 20, (64,)), "full": (5, 40, (64, 128))}
"""Seeds at first, and at most for what these do not decide; sizes of heads."""
_FEW = 3  # cases that fail, which are named where no candidate explains the error


@dataclass(frozen=True)
class CaseReport:
    """A case: what it shows, its figures, and how conditioned it is."""

    name: str
    shows: str
    head_dim: int
    seeds: int = 0
    permitted: float = math.nan  # RMSE of the primary output that the policy permits
    zeros: float = math.nan  # times that, zeros would err; below 3 the case can fail a kernel, and pass none alone
    largest_u: float = math.nan  # largest error of the primary output, over the unit roundoff of its format and its largest value
    judged: tuple[Judged, ...] = ()
    skipped: str = ""  # why the kernel refuses it

    @property
    def verdict(self) -> Verdict:
        """The worst of its figures."""
        return max((each.verdict for each in self.judged), key=[*Verdict].index, default=Verdict.PASS)

    def cells(self) -> tuple[str, ...]:
        """Its row in a table with `COLUMNS`."""
        if self.skipped:
            return self.name, "skipped", *[""] * (len(COLUMNS) - 3), self.skipped
        rmse, *others = [each for each in self.judged if each.figure == "rmse"]
        largest = max(each.ratio for each in self.judged if each.figure == "largest")
        interval = f"{rmse.ratio:.2f} [{rmse.low:.2f}, {rmse.high:.2f}]" if rmse.high < 100 else times(rmse.ratio)
        mark = {Verdict.FAIL: "FAIL", Verdict.INCONCLUSIVE: "?"}.get(self.verdict, "weak" if self.zeros < DECIDES else "")
        beside = " ".join(f"{each.output} {times(each.ratio)}" for each in others)
        return self.name, interval, times(largest), beside, f"{self.largest_u:.3g}", times(self.zeros), mark, self.shows


@dataclass(frozen=True)
class Certificate:
    """A kernel as it was judged; `only` names the inputs and probes that were chosen, and is empty where all were."""

    kernel: str
    precision: str
    device: str
    margin: float
    seed: int
    only: tuple[str, ...]
    has_lse: bool
    cases: tuple[CaseReport, ...]
    probes: tuple[Probed, ...]
    culprit: Culprit | None
    environment: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """FAIL for a figure or a probe that fails; else whether seeds, requests or the LSE are missing."""
        judged = [case.verdict for case in self.cases if not case.skipped]
        if self.failing:
            return Verdict.FAIL
        if Verdict.INCONCLUSIVE in judged or (judged and not any(case.zeros >= DECIDES for case in self.cases)):
            return Verdict.INCONCLUSIVE
        is_limited = any(each.outcome == "skipped" or (each.outcome, each.name) == ("noted", "same bits") for each in self.probes)
        return Verdict.LIMITED if is_limited or len(judged) < len(self.cases) or not self.has_lse else Verdict.PASS

    @property
    def errs(self) -> list[CaseReport]:
        """The cases on which the kernel fails."""
        return [case for case in self.cases if case.verdict is Verdict.FAIL]

    @property
    def failing(self) -> list[str]:
        """The names of the cases and the probes on which the kernel fails."""
        return [*(case.name for case in self.errs), *(probe.name for probe in self.probes if probe.fails)]

    @property
    def score(self) -> float:
        """Permitted over measured RMSE of out, or of gradients, the geometric mean over the cases that decide; 1 is permitted.

        A case on which the kernel has no error, such as that of one key, does not count.
        """
        judged = [each for case in self.cases if case.zeros >= DECIDES for each in case.judged if each.is_error]
        logs = [-math.log(each.ratio) for each in judged if each.figure == "rmse" and each.output != "lse"]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    @property
    def exit_code(self) -> int:
        return {Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 4}.get(self.verdict, 0)

    def sentence(self) -> str:
        """The step that errs, or the probe that fails; of a kernel that passes how it computes."""
        failing = [probe for probe in self.probes if probe.fails]
        unchanged = {probe.name for probe in PROBES if probe.case in self.failing}
        beside = [probe for probe in failing if probe.name not in unchanged]  # its inputs fail only as it changes them
        is_permitted = self.culprit is None or self.culprit.is_permitted
        first = next(iter(beside or (failing if is_permitted or not self.errs else [])), None)
        if first and (is_permitted or not (self.culprit and self.culprit.is_explained)):
            more = f" It {self.culprit.sentence()}." if self.errs and self.culprit and not is_permitted else ""
            return f"{first.states} It does not hold: {first.reason}.{more}"
        if self.culprit is None:
            return "Every probe holds." if all(probe.outcome == "holds" for probe in self.probes) else "No probe fails."
        tiles = f", in {self.culprit.tiles}" if self.culprit.is_explained and self.culprit.tiles else ""
        is_local = self._errs and not self.culprit.is_explained and 0 < len(self.errs) <= _FEW
        where = f", on {' and '.join(f'{case.name} ({case.shows})' for case in self.errs)} alone" if is_local else ""
        return f"It {self.culprit.sentence(fails=self._errs)}{tiles}{where}."

    @property
    def about(self) -> str:
        """Under which policy and where the kernel was judged, and whether by some inputs and probes alone."""
        return f"{self.precision} on {self.device}" + (", by some inputs and probes alone (only=)" if self.only else "")

    @property
    def _errs(self) -> bool:
        """Whether a failure is an error: with a margin below 1 also what the policy permits fails."""
        permitted = self.margin < 1 and self.culprit is not None and self.culprit.is_permitted
        return self.verdict is Verdict.FAIL and not permitted

    @property
    def _described(self) -> str:
        """How the kernel errs; where it fails by probes alone, or not, how it computes."""
        return self.culprit.sentence(fails=self._errs and bool(self.errs)) if self.culprit else ""

    def notes(self) -> Iterator[str]:
        """How a kernel that passes is built, as far as its error tells; what it refuses, and that it returns no LSE."""
        if self.margin < 1:
            yield "The margin is below 1: a kernel that computes as declared can fail."
        if self.cases and math.isnan(self.score):
            yield "None of these inputs can tell a right kernel from zeros."
        failing = {each.output for case in self.cases for each in case.judged if each.verdict is Verdict.FAIL}
        if failing == {"lse"}:
            yield "Only its LSE errs too much."
        if self.culprit is not None and self.verdict is not Verdict.FAIL:
            if not self.culprit.tiles:
                yield "Size and order of its tiles cannot be told."
            for words, titles in {"Its error excludes": self.culprit.excluded, "Undecided": self.culprit.undecided}.items():
                formats = dict[str, list[str]]()
                for step, _, fmt in (title.rpartition(" in ") for title in titles):
                    formats.setdefault(step, []).append(fmt)
                if formats:
                    yield f"{words}: {', '.join(f'{step} in ' + ' or '.join(each) for step, each in formats.items())}."
        if refused := [case.name for case in self.cases if case.skipped]:
            yield f"It refuses: {', '.join(refused)}."
        if not self.has_lse:
            yield "It returns no LSE; some errors show in it alone."

    def failures(self) -> dict[str, str]:
        """What failed, or else is undecided, of each case and probe, by the command that repeats it alone, in its own folder."""
        about = (f"precision={self.precision}", f"device={self.device}", f"margin={self.margin:g}", f"seed={self.seed}")
        base, failures = shlex.join(["numdev", "certify", *self.kernel.split(), *about]), list[tuple[str, str, str]]()
        for case in self.cases:
            wrong = "; ".join(str(each) for each in case.judged if each.verdict is case.verdict is not Verdict.PASS)
            failures += [(case.name, f" head_dim={case.head_dim}", f", times the permitted error: {wrong}")] * bool(wrong)
        failures += [(probe.name, "", f": {probe.reason}") for probe in self.probes if probe.fails]
        repeat = "{0}{1} only={2} out=reports/certify/{2}"
        return {repeat.format(base, more, name.replace(" ", "_")): f"{name}{what}" for name, more, what in failures}

    def summary(self) -> dict[str, Any]:
        """Every field, and what follows from them, as JSON has it; a number that is not finite is null."""
        whole: dict[str, Any] = {"schema": SCHEMA, "verdict": self.verdict, "score": self.score, "about": self.about}
        whole |= {"sentence": self.sentence(), "notes": list(self.notes()), "columns": list(COLUMNS)}
        whole |= {"failures": [{"what": what, "repeat": command} for command, what in self.failures().items()]}
        whole |= asdict(self)
        if self.culprit is not None:
            whole["culprit"] |= {"sentence": self._described, "is_explained": self.culprit.is_explained}
            whole["culprit"]["tiles"] = self.culprit.tiles
        for case, own in zip(whole["cases"], self.cases, strict=True):
            case |= {"verdict": own.verdict, "cells": own.cells()}
        text = json.dumps(whole, default=lambda each: each.value)
        finite: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return finite

    def json(self) -> bytes:
        """The file `certificate.json`."""
        return json.dumps(self.summary(), indent=1, ensure_ascii=False).encode() + b"\n"

    def text(self) -> str:
        """One screen."""
        lines = [f"{self.verdict.value.upper()}: {self.kernel} under {self.about}. {self.sentence()}"]
        if not math.isnan(self.score):
            lines += [f"Score {self.score:.3f}: permitted over measured RMSE, a mean of cases, each of which can fail."]
        lines += [*self.notes(), ""]
        if self.cases:
            rows = (tuple(COLUMNS), *(case.cells() for case in self.cases))
            lines += [*(" ".join(map(format, row, COLUMNS.values())).rstrip() for row in rows), _LEGEND, ""]
        if self.probes:
            lines += [f"Probes that hold: {sum(each.outcome == 'holds' for each in self.probes)} of {len(self.probes)}."]
            lines += [f"  {each.outcome}: {each.name}: {each.reason}" for each in self.probes if each.outcome != "holds"]
        failures = [f"{what}\n  {command}" for command, what in self.failures().items()]
        more = len(failures) - _FAILURES_SHOWN
        return "\n".join([*lines, *failures[:_FAILURES_SHOWN], *([f"and {more} more in certificate.json"] if more > 0 else [])])


def certify(
    kernel: object,
    precision: str = "kernel_bf16",
    *,
    backward: object = None,
    device: str = "auto",
    depth: str = "quick",
    margin: float = 1.1,
    seed: int = 0,
    head_dim: int | None = None,
    only: Sequence[str] = (),
    cache: Path | str | None = None,
    progress: Callable[[int, int, str], object] = lambda done, total, text: None,
) -> Certificate:
    """Judge an attention kernel by what its number formats permit, and name the step that errs.

    No tolerance is needed: permitted is the error of tiled attention in the same formats, which is computed element by element.

    Args:
        kernel: package.module:function, called as function(q, k, v, mask=, scale=) and returning out, or out and LSE; or a name,
            such as sdpa; in Python also a function, or an implementation of attention
        precision: policy that the kernel claims: kernel_bf16, kernel_fp16 or kernel_fp32
        backward: judges gradients in place of the forward pass: package.module:function, called as function(q, k, v, out, lse,
            do, mask=, scale=) and returning dq, dk and dv; autograd through the kernel; or triton, flex, vanilla, sdpa, ...
        device: auto, cpu or cuda
        depth: quick, 3 to 20 seeds and heads of 64; or full, 5 to 40 seeds and heads of 64 and 128
        margin: how many times the permitted RMSE the kernel may err
        seed: the first seed
        head_dim: size of the heads, in place of those of depth
        only: some inputs and probes by name, as [normal,same_bits]; else all
        cache: folder of predictions, which serve every kernel; else numdev's in the user's caches
        progress: called with the number of cases done, of all, and the next

    Raises:
        BadInput: for a kernel, policy, device or name that cannot be used.
        Unsupported: for a kernel that refuses every one of the inputs.
    """
    if depth not in DEPTHS:
        raise NotAChoice("depth", depth, DEPTHS)
    if seed < 0:
        raise BadInput("seed", seed, "give 0 or more")
    if not margin > 0:
        raise BadInput("margin", margin, "give a positive number: times the permitted RMSE")
    place, of_pass = resolve_device(device), FORWARD if backward is None else BACKWARD
    few, many, sizes = DEPTHS[depth]
    seeds = range(seed, seed + few), range(seed + few, seed + many)
    subject = kernel_of(kernel, format_of(precision), place, backward)
    probes = [probe for probe in PROBES if probe.only in (None, of_pass)]
    only = only.strip("[]").split(",") if isinstance(only, str) else only
    only = tuple(str(name).replace("_", " ").strip(" '\"") for name in only)
    names = [*(case.name for case in CASES), *(probe.name for probe in probes)]
    for name in only:
        if name not in names:
            raise NotAChoice("only", name, [each.replace(" ", "_") for each in names])
    sizes = (head_dim,) if head_dim else sizes
    folder = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "numdev", "predictions"))
    every = {size: Predictions(precision, size, folder, of_pass) for size in sizes}
    cases = [case for case in CASES if not only or case.name in only]
    work = [(size, case) for size in sizes for case in cases if case.head_dim is None or size == sizes[0]]
    reports, compared = list[CaseReport](), dict[str, Tensors]()
    for done, (size, case) in enumerate(work):
        progress(done, len(work) + 1, case.name)
        report, outputs = _judged(subject, every[size], case, seeds, margin)
        reports.append(report)
        if not report.skipped and size == sizes[0]:
            compared[case.name] = outputs
    progress(len(work), len(work) + 1, "probes and culprit")
    outcomes = tuple(probe.run(subject, every[sizes[0]], seeds[0]) for probe in probes if not only or probe.name in only)
    if not compared and all(each.outcome == "skipped" for each in outcomes):
        reason = (*(report.skipped for report in reports), *(each.reason for each in outcomes))[0]
        raise Unsupported("kernel", f"{subject.name} refuses all of these inputs: {reason}")
    failing = {report.name for report in reports if report.verdict is Verdict.FAIL}
    shown = [case for case in cases if case.name in compared and not (case.alone and failing - {case.name})]
    telling = [case for case in shown if case.names or only or case.name in failing]
    results = [(every[sizes[0]].of(case, seeds[0]), compared[case.name]) for case in telling]
    is_sound = not any(probe.fails and probe.name in _PREEMPTS for probe in outcomes)
    culprit = find(results) if results and is_sound else None
    has_lse = of_pass is BACKWARD or all("lse" in outputs for outputs in compared.values())
    about = subject.name, precision, str(place), margin, seed, only, has_lse
    return Certificate(*about, tuple(reports), outcomes, culprit, environment(place))


def _judged(
    kernel: Kernel, predictions: Predictions, case: Case, seeds: tuple[range, range], margin: float
) -> tuple[CaseReport, Tensors]:
    """A case over its first seeds, and over more where these decide nothing; and what the kernel returned on the first."""
    known, primary = predictions.of(case, seeds[0]), predictions.of_pass.outputs[0]
    report = CaseReport(case.name, case.shows, case.head_dim or predictions.head_dim)
    try:
        outputs = kernel.on(known.inputs)
        ratios = known.ratios(outputs)
        judged = judge(ratios, margin)
        if any(each.verdict is Verdict.INCONCLUSIVE for each in judged):
            more = predictions.of(case, seeds[1])
            further = more.ratios(kernel.on(more.inputs))
            ratios = {name: torch.cat([own, further[name]]) for name, own in ratios.items()}
            judged = judge(ratios, margin)
    except Unsupported as error:
        return replace(report, skipped=str(error)), {}
    exact, permitted = known.exact[primary], float(known.permitted[primary][0, 0])
    zeros = float(known.ratios({primary: torch.zeros_like(known.golden[primary])})[primary][:, 0].mean())
    u = predictions.policy.output.to.u * float(exact.abs().max())
    largest = float((known.inputs.rows(outputs)[primary] - exact).abs().max()) / u if u else math.nan
    report = replace(report, seeds=len(ratios[primary]), permitted=permitted, zeros=zeros, largest_u=largest)
    return replace(report, judged=tuple(judged)), outputs


_COLUMNS = (
    Column("seed", "", "the first seed", Use.PLACE),
    Column("verdict", "", "pass, limited, inconclusive or fail", Use.PLACE),
    Column("score", "relative", "permitted over measured RMSE, as the certificate has it", Use.CHIEF),
    Column("tiles", "", "size, order and splits of the tiles of keys, as the error of the kernel shows them", Use.PLACE),
    Column("equal", "relative", "share of out or dQ equal to the declared policy in these tiles, on the first inputs"),
    Column("computes", "", "what is nearest to the error of the kernel, and how much of it that explains", Use.PLACE),
    Column("fails", "", "inputs and probes on which the kernel fails", Use.PLACE),
)


@dataclass(frozen=True)
class Certificates(Kind):
    """A kind of measurement: certifies kernels under the policy `kernel(F)` of their format, at the head_dim of the problem."""

    operation: Operation
    name: ClassVar[str] = "certificate"
    seeds: ClassVar[int] = 1
    columns: ClassVar[dict[str, tuple[Column, ...]]] = {"certificate": _COLUMNS}

    def config(self, point: Point) -> dict[str, Any]:
        """Raises BadInput for a baseline: a kernel is judged by what its policy permits."""
        if point.baseline is not None:
            raise BadInput("baseline", type(point.baseline).__name__, "a kernel is judged by its policy; give baseline=none")
        return super().config(point)

    def run(self, point: Point, context: Context) -> Findings:
        """One row for each first seed."""
        variant, problem, place, rows, kernel = point.variant, point.problem, context.device, list[dict[str, Any]](), ""
        backward = variant if isinstance(variant, Backward) else None
        forward, precision = variant if backward is None else backward.forward, f"kernel_{variant.format}"
        for seed in context.replicates():
            inputs = variant.round_inputs(*self.operation.draw(problem, seed, place))
            kernel = variant(*inputs, **problem.arguments()).kernel  # first: what cannot run at all is refused with its reason
            size = problem.shape.head_dim
            certificate = certify(forward, precision, backward=backward, device=place.type, seed=seed, head_dim=size)
            culprit, values = certificate.culprit, [seed, certificate.verdict.value, certificate.score]
            # The nearest tiles, also where they cannot be told.
            values += [culprit.ranks[0].tiles, culprit.equal] if culprit and culprit.ranks else ["", math.nan]
            values += [certificate._described, ", ".join(certificate.failing)]
            rows.append({column.name: value for column, value in zip(_COLUMNS, values, strict=True)})
        return Findings({self.name: rows}, kernel)
