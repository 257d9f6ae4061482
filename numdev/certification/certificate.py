"""The certificate of a kernel: probes, accuracy, culprit and verdict, as text, as JSON and as a page.

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

from numdev.attention.precision import Precision
from numdev.certification.accuracy import Judged, Verdict, decides, error_of_zeros, judge, permitted, ratios
from numdev.certification.cases import CASES, Case
from numdev.certification.catalogue import Outputs
from numdev.certification.culprit import Culprit, exponential, find
from numdev.certification.kernel import Kernel, kernel_of
from numdev.certification.predictions import Known, Predictions, default_folder
from numdev.certification.probes import PROBES, Probe, Probing
from numdev.errors import BadInput, Unsupported, one_of
from numdev.results.environment import environment, resolve_device

SCHEMA = 1
EXIT_CODES = {Verdict.PASS: 0, Verdict.LIMITED: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 4}
_PREEMPTS = ("untouched", "same bits")  # probes without which the error of a kernel is no property of its steps


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
class Probed:
    """The outcome of a probe: it holds, fails for a reason, or is skipped because the kernel refuses its inputs."""

    name: str
    states: str
    outcome: str
    reason: str = ""
    is_noted: bool = False


@dataclass(frozen=True)
class CaseReport:
    """A case: what it shows, its figures, and how conditioned it is.

    Attributes:
        permitted: RMSE of out that the policy permits.
        zeros: times the permitted error that zeros would err; below 3 the case decides nothing alone.
        largest_u: the largest error of out, over the unit roundoff of its format and its largest value.
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


@dataclass(frozen=True)
class Certificate:
    """What was found of a kernel."""

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
        if Verdict.FAIL in judged or any(probe.outcome == "fails" and not probe.is_noted for probe in self.probes):
            return Verdict.FAIL
        if Verdict.INCONCLUSIVE in judged or not any(decides(case.zeros) for case in self.cases):
            return Verdict.INCONCLUSIVE
        skipped = any(case.skipped for case in self.cases) or any(probe.outcome == "skipped" for probe in self.probes)
        return Verdict.LIMITED if skipped or not self.has_lse else Verdict.PASS

    @property
    def score(self) -> float:
        """Permitted over measured RMSE of out, the geometric mean over the cases that decide; 1 is what the policy permits."""
        figures = [case.figure("out", "rmse") for case in self.cases if decides(case.zeros)]
        logs = [-math.log(max(each.ratio, 1e-12)) for each in figures if each is not None]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def sentence(self) -> str:
        """The step that errs, or the probe that fails; of a kernel that passes how it computes."""
        failing = [probe for probe in self.probes if probe.outcome == "fails" and not probe.is_noted]
        if failing and (self.culprit is None or self.culprit.is_permitted):
            return f"{failing[0].states} It does not hold: {failing[0].reason}."
        if self.culprit is None:
            return "Nothing was compared."
        tiles = f", in {self.culprit.tiles}" if self.culprit.is_explained else ""
        return f"It {self.culprit.sentence(fails=self.verdict is Verdict.FAIL)}{tiles}."

    def repeats(self) -> Iterator[tuple[str, str]]:
        """What failed or is undecided, and the command that repeats it alone."""
        base = ["numdev", "certify", self.kernel, f"precision={self.precision}", f"device={self.device}"]
        for case in self.cases:
            for each in case.judged:
                if each.verdict is not Verdict.PASS:
                    interval = (
                        f"{each.ratio:.3g} [{each.low:.3g}, {each.high:.3g}] times the permitted error, limit {each.limit:.3g}"
                    )
                    more = f"; {each.seeds_needed} seeds would decide" if each.seeds_needed else ""
                    command = [*base, f"head_dim={case.head_dim}", f"only=[{case.name}]", f"seed={self.seed}"]
                    yield f"{case.name}: {each.figure} of {each.output} is {interval}{more}", shlex.join(command)
        for probe in self.probes:
            if probe.outcome == "fails" and not probe.is_noted:
                yield f"{probe.name}: {probe.reason}", shlex.join([*base, f"only=[{probe.name}]", f"seed={self.seed}"])

    def json(self) -> bytes:
        """The file `certificate.json`: every field, and what follows from them; a number that is not finite is null."""
        culprit: Any = self.culprit and {
            "sentence": self.culprit.sentence(fails=self.verdict is Verdict.FAIL),
            "is_explained": self.culprit.is_explained,
        }
        about: dict[str, Any] = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "score": self.score,
            "sentence": self.sentence(),
            "failures": [{"what": what, "repeat": command} for what, command in self.repeats()],
        }
        whole = about | asdict(self)
        whole["culprit"] = culprit and culprit | whole["culprit"]
        for case, own in zip(whole["cases"], self.cases, strict=True):
            case["verdict"] = own.verdict
        finite = json.loads(json.dumps(whole, default=lambda each: each.value), parse_constant=lambda _: None)
        return json.dumps(finite, indent=1, ensure_ascii=False).encode() + b"\n"

    def text(self) -> str:
        """One screen."""
        lines = [f"{self.verdict.value.upper()}: {self.kernel} under {self.precision} on {self.device}. {self.sentence()}"]
        lines += [
            f"Score {self.score:.3f}: permitted over measured RMSE. A ratio is the error over what {self.precision} permits.",
            "",
        ]
        lines.append(f"{'case':<14}{'RMSE':>18}{'largest':>9}{'LSE':>9}{'u':>8}{'zeros':>9}   makes large")
        for case in self.cases:
            if case.skipped:
                lines.append(f"{case.name:<14}  skipped: {case.skipped}")
                continue
            rmse, largest, lse = (case.figure(*key) for key in (("out", "rmse"), ("out", "largest"), ("lse", "rmse")))
            assert rmse is not None
            assert largest is not None
            interval = f"{rmse.ratio:.2f} [{rmse.low:.2f}, {rmse.high:.2f}]" if rmse.high < 100 else f"{rmse.ratio:.3g}"
            others = f"{largest.ratio:>9.3g}{f'{lse.ratio:.3g}' if lse else '-':>9}{case.largest_u:>8.3g}{case.zeros:>9.3g}"
            cells = f"{interval:>18}{others}"
            mark = {Verdict.FAIL: "FAIL ", Verdict.INCONCLUSIVE: "?    "}.get(case.verdict, "     ")
            lines.append(f"{case.name:<14}{cells}  {mark:>2}{case.shows}")
        holding = sum(probe.outcome == "holds" for probe in self.probes)
        lines += ["", f"{holding} of {len(self.probes)} probes hold."]
        lines += [
            f"  {'noted' if p.is_noted and p.outcome == 'fails' else p.outcome}: {p.name}: {p.reason}"
            for p in self.probes
            if p.outcome != "holds"
        ]
        failures = list(self.repeats())
        lines += [line for what, command in failures[:6] for line in (what, f"  {command}")]
        lines += [f"and {len(failures) - 6} more in certificate.json"] if len(failures) > 6 else []
        return "\n".join(lines)


def certify(
    kernel: object,
    precision: str = "kernel_bf16",
    *,
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
    """
    policy, place = Precision.parse(precision), resolve_device(device)
    subject = kernel_of(kernel, policy, place)
    names = [each.name for each in (*CASES, *PROBES)]
    for name in only:
        if name not in names:
            raise BadInput("only", name, one_of(name, names))
    cases = [case for case in CASES if not only or case.name in only]
    sizes = (head_dim,) if head_dim else depth.head_dims
    work = [(size, case) for size in sizes for case in cases if case.head_dim is None or size == sizes[0]]
    every = {size: Predictions(policy, size, cache or default_folder()) for size in sizes}
    reports, compared = [], list[tuple[Case, Known, Outputs, Verdict]]()
    for done, (size, case) in enumerate(work):
        progress(done, len(work) + 1, case.name)
        report, known, outputs = _judged(subject, every[size], case, depth, margin, seed)
        reports.append(report)
        if outputs is not None and size == sizes[0]:
            compared.append((case, known, outputs, report.verdict))
    progress(len(work), len(work) + 1, "probes and culprit")
    probed = tuple(_probed(probe, Probing(subject, every[sizes[0]], seed)) for probe in PROBES if not only or probe.name in only)
    culprit = None
    if compared and not any(probe.outcome == "fails" and probe.name in _PREEMPTS for probe in probed):
        results = [
            (known, outputs) for case, known, outputs, verdict in compared if case.names or only or verdict is Verdict.FAIL
        ]
        culprit = find(every[sizes[0]], results, exponential(subject, every[sizes[0]])) if results else None
    has_lse = all("lse" in outputs for _, _, outputs, _ in compared)
    about = environment(place)
    return Certificate(subject.name, precision, str(place), margin, seed, has_lse, tuple(reports), probed, culprit, about)


def _judged(
    kernel: Kernel, predictions: Predictions, case: Case, depth: Depth, margin: float, seed: int
) -> tuple[CaseReport, Known, Outputs | None]:
    """A case over its first seeds, and over more where these decide nothing; and what the kernel returned on the first."""
    first, most = depth.seeds
    first_known, table, worst = predictions.of(case, seed), [], 0.0
    about = CaseReport(case.name, case.shows, case.head_dim or predictions.head_dim)
    outputs: Outputs | None = None
    try:
        for place in range(most):
            known = predictions.of(case, seed + place)
            returned = kernel.on(known.inputs)
            outputs = returned if outputs is None else outputs
            row, errors = ratios(known, returned)
            table.append(row)
            worst = max(worst, errors["out"].largest_u)
            judged = judge(case.name, table, margin)
            if place + 1 >= first and all(each.verdict is not Verdict.INCONCLUSIVE for each in judged):
                break
    except Unsupported as error:
        return replace(about, skipped=str(error)), first_known, None
    zeros, most_permitted = error_of_zeros(first_known), permitted(first_known, "out").rmse
    return (
        replace(about, seeds=len(table), permitted=most_permitted, zeros=zeros, largest_u=worst, judged=tuple(judged)),
        first_known,
        outputs,
    )


def _probed(probe: Probe, probing: Probing) -> Probed:
    about = Probed(probe.name, probe.states, "holds", is_noted=probe.is_noted)
    try:
        reason = probe.check(probing)
    except Unsupported as error:
        return replace(about, outcome="skipped", reason=str(error))
    return about if reason is None else replace(about, outcome="fails", reason=reason)
