"""The certificate of a kernel: probes, accuracy, culprit and verdict, as text and as JSON.

The `schema` of the JSON is 1; a field that changes its meaning raises that.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from numdev.attention.precision import Precision
from numdev.certification.accuracy import DECIDES, Judged, Known, Predictions, Verdict, default_folder, judge
from numdev.certification.candidates import BACKWARD, FORWARD, Outputs
from numdev.certification.cases import CASES, Case
from numdev.certification.culprit import Culprit, exponential, find
from numdev.certification.kernel import Kernel, kernel_of
from numdev.certification.probes import PROBES, Probed, Probing, probed
from numdev.errors import BadInput, Unsupported, one_of
from numdev.results.environment import environment, resolve_device

SCHEMA = 1
EXIT_CODES = {Verdict.PASS: 0, Verdict.LIMITED: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 4}
_PREEMPTS = ("untouched", "same bits")  # probes without which the error of a kernel is no property of its steps
_RANDOM = ("noted", "same bits")
_FAILURES_SHOWN = 6
_COLUMNS = ("case", "RMSE", "largest", "beside", "u", "zeros", "", "makes large")
_WIDTHS = ("<13", ">17", ">8", ">17", ">7", ">8", ">4", "<")


class Depth(Enum):
    """How much is computed."""

    QUICK = "quick"
    FULL = "full"

    @property
    def seeds(self) -> tuple[int, int]:
        """At first, and at most for what these do not decide."""
        return (3, 8) if self is Depth.QUICK else (5, 20)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (64,) if self is Depth.QUICK else (64, 128)


@dataclass(frozen=True)
class CaseReport:
    """A case: what it shows, its figures, and how conditioned it is.

    Attributes:
        permitted: RMSE of the primary output that the policy permits.
        zeros: times the permitted error that zeros would err; below 3 the case can fail a kernel, and pass none alone.
        largest_u: the largest error of the primary output, over the unit roundoff of its format and its largest value.
        skipped: why the kernel refuses it, or empty.
    """

    name: str
    shows: str
    head_dim: int
    seeds: int = 0
    permitted: float = math.nan
    zeros: float = math.nan
    largest_u: float = math.nan
    judged: tuple[Judged, ...] = ()
    skipped: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of its figures."""
        verdicts = [each.verdict for each in self.judged]
        return next((each for each in (Verdict.FAIL, Verdict.INCONCLUSIVE) if each in verdicts), Verdict.PASS)

    def figure(self, output: str, name: str) -> Judged | None:
        """One of its figures, such as `rmse` of `out`."""
        return next((each for each in self.judged if (each.output, each.figure) == (output, name)), None)

    def row(self) -> tuple[str, ...]:
        """Its cells in a table with `_COLUMNS`."""
        if self.skipped:
            return self.name, "skipped", *[""] * (len(_COLUMNS) - 3), self.skipped
        rmse, *others = [each for each in self.judged if each.figure == "rmse"]
        largest = max(each.ratio for each in self.judged if each.figure == "largest")
        interval = f"{rmse.ratio:.2f} [{rmse.low:.2f}, {rmse.high:.2f}]" if rmse.high < 100 else f"{rmse.ratio:.3g}"
        mark = {Verdict.FAIL: "FAIL", Verdict.INCONCLUSIVE: "?"}.get(self.verdict, "")
        beside = " ".join(f"{each.output} {each.ratio:.3g}" for each in others)
        return self.name, interval, f"{largest:.3g}", beside, f"{self.largest_u:.3g}", f"{self.zeros:.3g}", mark, self.shows


@dataclass(frozen=True)
class Certificate:
    """A kernel as it was judged."""

    kernel: str
    precision: str
    device: str
    margin: float
    seed: int
    has_lse: bool
    cases: tuple[CaseReport, ...]
    probes: tuple[Probed, ...]
    culprit: Culprit | None
    environment: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """FAIL for a figure or a probe that fails; else whether seeds, requests or the LSE are missing."""
        judged = [case.verdict for case in self.cases if not case.skipped]
        if Verdict.FAIL in judged or any(probe.fails for probe in self.probes):
            return Verdict.FAIL
        if Verdict.INCONCLUSIVE in judged or (judged and not any(case.zeros >= DECIDES for case in self.cases)):
            return Verdict.INCONCLUSIVE
        limits = [probe for probe in self.probes if probe.outcome == "skipped" or (probe.outcome, probe.name) == _RANDOM]
        skipped = limits or any(case.skipped for case in self.cases)
        return Verdict.LIMITED if skipped or not self.has_lse else Verdict.PASS

    @property
    def score(self) -> float:
        """Permitted over measured RMSE of out, or of gradients, the geometric mean over the cases that decide; 1 is permitted."""
        deciding = [each for case in self.cases if case.zeros >= DECIDES for each in case.judged]
        logs = [-math.log(max(each.ratio, 1e-12)) for each in deciding if each.figure == "rmse" and each.output != "lse"]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def sentence(self) -> str:
        """The step that errs, or the probe that fails; of a kernel that passes how it computes."""
        failing = [probe for probe in self.probes if probe.fails]
        errs = any(case.verdict is Verdict.FAIL for case in self.cases)
        if failing and (self.culprit is None or self.culprit.is_permitted or not (errs or self.culprit.is_explained)):
            return f"{failing[0].states} It does not hold: {failing[0].reason}."
        if self.culprit is None:
            return "Every probe holds." if all(probe.outcome == "holds" for probe in self.probes) else "No probe fails."
        tiles = f", in {self.culprit.tiles}" if self.culprit.is_explained and self.culprit.tiles else ""
        return f"It {self.culprit.sentence(fails=self.verdict is Verdict.FAIL)}{tiles}."

    def limits(self) -> Iterator[str]:
        """What a kernel refuses, and that it returns no LSE."""
        if refused := [case.name for case in self.cases if case.skipped]:
            yield f"It refuses: {', '.join(refused)}."
        if not self.has_lse:
            yield "It returns no LSE, in which some errors alone are seen."

    def repeats(self) -> Iterator[tuple[str, str]]:
        """What failed or is undecided, and the command that repeats it alone."""
        about = (f"precision={self.precision}", f"device={self.device}", f"margin={self.margin:g}")
        base = ["numdev", "certify", *self.kernel.split(), *about]
        for case in self.cases:
            command = shlex.join([*base, f"head_dim={case.head_dim}", f"only=[{case.name}]", f"seed={self.seed}"])
            for each in case.judged:
                if each.verdict is not Verdict.PASS:
                    interval = f"{each.ratio:.3g} [{each.low:.3g}, {each.high:.3g}]"
                    more = f"; {each.seeds_needed} seeds would decide" if each.seeds_needed else ""
                    ratio = f"{interval} times the permitted error, limit {each.limit:.3g}{more}"
                    yield f"{case.name}: {each.figure} of {each.output} is {ratio}", command
        for probe in self.probes:
            if probe.fails:
                yield f"{probe.name}: {probe.reason}", shlex.join([*base, f"only=[{probe.name}]", f"seed={self.seed}"])

    def summary(self) -> dict[str, Any]:
        """Every field, and what follows from them, as JSON has it; a number that is not finite is null."""
        follows: dict[str, Any] = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "score": self.score,
            "sentence": self.sentence(),
            "failures": [{"what": what, "repeat": command} for what, command in self.repeats()],
        }
        whole = follows | asdict(self)
        if self.culprit is not None:
            sentence = self.culprit.sentence(fails=self.verdict is Verdict.FAIL)
            more = {"sentence": sentence, "is_explained": self.culprit.is_explained, "tiles": self.culprit.tiles}
            whole["culprit"] |= more
        for case, own in zip(whole["cases"], self.cases, strict=True):
            case["verdict"] = own.verdict
        text = json.dumps(whole, default=lambda each: each.value)
        finite: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return finite

    def json(self) -> bytes:
        """The file `certificate.json`."""
        return json.dumps(self.summary(), indent=1, ensure_ascii=False).encode() + b"\n"

    def table(self) -> list[tuple[str, ...]]:
        """A head, and a row for each case."""
        return [_COLUMNS, *(case.row() for case in self.cases)]

    def text(self) -> str:
        """One screen."""
        about = f"{self.verdict.value.upper()}: {self.kernel} under {self.precision} on {self.device}. {self.sentence()}"
        score = f"Score {self.score:.3f}: permitted over measured RMSE. A ratio is the error over what {self.precision} permits."
        lines = [" ".join(f"{cell:{width}}" for cell, width in zip(row, _WIDTHS, strict=True)).rstrip() for row in self.table()]
        holding = sum(probe.outcome == "holds" for probe in self.probes)
        others = [f"  {probe.outcome}: {probe.name}: {probe.reason}" for probe in self.probes if probe.outcome != "holds"]
        failures = [line for what, command in self.repeats() for line in (what, f"  {command}")]
        more = len(failures) // 2 - _FAILURES_SHOWN
        last = [f"and {more} more in certificate.json"] if more > 0 else []
        probes = [f"{holding} of {len(self.probes)} probes hold."] if self.probes else []
        return "\n".join(
            [about, score, *self.limits(), "", *lines, "", *probes, *others, *failures[: 2 * _FAILURES_SHOWN], *last]
        )


def certify(
    kernel: object,
    precision: str = "kernel_bf16",
    *,
    backward: object = None,
    device: str = "auto",
    depth: Depth = Depth.QUICK,
    margin: float = 1.10,
    seed: int = 0,
    head_dim: int | None = None,
    only: Sequence[str] = (),
    cache: Path | None = None,
    progress: Callable[[int, int, str], object] = lambda done, total, text: None,
) -> Certificate:
    """Judge a kernel by what its declared policy permits, and name the step that errs.

    Args:
        kernel: `function(q, k, v, mask=, scale=)`, its name as `package.module:function`, an implementation of attention, or a
            name such as `sdpa`; it returns out, or out and LSE.
        precision: preset of the policy that the kernel claims to have.
        backward: judges gradients in place of the forward pass: those of `function(q, k, v, out, lse, do, mask=, scale=)`, which
            returns dq, dk and dv, and reads the out and the lse of the declared policy; of an implementation or its name; or
            with `autograd` those of the kernel.
        device: `auto`, `cpu` or `cuda`.
        depth: seeds and sizes.
        margin: how many times the permitted RMSE the kernel may err.
        seed: the first seed.
        head_dim: in place of those of the depth.
        only: cases and probes by name; all unless given.
        cache: folder of predictions, which do not depend on the kernel.
        progress: is called with the number of cases done, of all, and the next.

    Raises:
        BadInput: for a kernel, policy, device or name that cannot be used.
        Unsupported: for a kernel that refuses every one of the inputs.
    """
    if seed < 0:
        raise BadInput("seed", seed, "give 0 or more")
    if not margin > 0:
        raise BadInput("margin", margin, "give a positive number: times the permitted RMSE")
    only = [only] if isinstance(only, str) else only
    place = resolve_device(device)
    subject, of_pass = kernel_of(kernel, Precision.parse(precision), place, backward), FORWARD if backward is None else BACKWARD
    probes = [probe for probe in PROBES if probe.only in (None, of_pass)]
    names = [*(case.name for case in CASES), *(probe.name for probe in probes)]
    for name in only:
        if name not in names:
            raise BadInput("only", name, one_of(name, names))
    cases = [case for case in CASES if not only or case.name in only]
    sizes = (head_dim,) if head_dim else depth.head_dims
    work = [(size, case) for size in sizes for case in cases if case.head_dim is None or size == sizes[0]]
    every = {size: Predictions(precision, size, cache or default_folder(), of_pass) for size in sizes}
    reports, compared = [], list[tuple[Case, Known, Outputs, Verdict]]()
    for done, (size, case) in enumerate(work):
        progress(done, len(work) + 1, case.name)
        report, known, outputs = _judged(subject, every[size], case, depth, margin, seed)
        reports.append(report)
        if outputs is not None and size == sizes[0]:
            compared.append((case, known, outputs, report.verdict))
    if reports and not compared:
        raise Unsupported("kernel", f"it refuses all of these inputs: {reports[0].skipped}")
    progress(len(work), len(work) + 1, "probes and culprit")
    probing = Probing(subject, every[sizes[0]], range(seed, seed + depth.seeds[0]))
    outcomes = tuple(probed(probe, probing) for probe in probes if not only or probe.name in only)
    culprit = None
    if compared and not any(probe.fails and probe.name in _PREEMPTS for probe in outcomes):
        results = [
            (known, outputs) for case, known, outputs, verdict in compared if case.names or only or verdict is Verdict.FAIL
        ]
        fails = any(verdict is Verdict.FAIL for *_, verdict in compared) or any(probe.fails for probe in outcomes)
        more = list(exponential(subject, sizes[0])) if of_pass is FORWARD else ()
        culprit = find(results, more, fails=fails) if results else None
    has_lse = of_pass is BACKWARD or all("lse" in outputs for _, _, outputs, _ in compared)
    about = environment(place)
    return Certificate(subject.name, precision, str(place), margin, seed, has_lse, tuple(reports), outcomes, culprit, about)


def _judged(
    kernel: Kernel, predictions: Predictions, case: Case, depth: Depth, margin: float, seed: int
) -> tuple[CaseReport, Known, Outputs | None]:
    """A case over its first seeds, and over more where these decide nothing; and what the kernel returned on the first."""
    first, most = depth.seeds
    known, primary = predictions.of(case, range(seed, seed + first)), predictions.of_pass.outputs[0]
    about = CaseReport(case.name, case.shows, case.head_dim or predictions.head_dim)
    try:
        outputs = kernel.on(known.inputs)
        ratios = known.ratios(outputs)
        judged = judge(ratios, margin)
        if any(each.verdict is Verdict.INCONCLUSIVE for each in judged):
            more = predictions.of(case, range(seed + first, seed + most))
            further = more.ratios(kernel.on(more.inputs))
            ratios = {name: torch.cat([own, further[name]]) for name, own in ratios.items()}
            judged = judge(ratios, margin)
    except Unsupported as error:
        return replace(about, skipped=str(error)), known, None
    exact, fmt = known.exact[primary], predictions.policy.output.to
    largest = float((known.rows(outputs)[primary] - exact).abs().max())
    report = replace(
        about,
        seeds=len(ratios[primary]),
        permitted=float(known.permitted[primary][0, 0]),
        zeros=known.zeros,
        largest_u=largest / (fmt.u * float(exact.abs().max())) if bool(exact.any()) else math.nan,
        judged=tuple(judged),
    )
    return report, known, outputs
