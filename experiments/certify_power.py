"""How often `numdev certify` errs, and how small a fault it finds, on the kernels of `tests/certification`.

- `alarms`: right kernels, forward and backward, over seeds; none may fail.
- `planted`: kernels with a fault, over seeds; all must fail, and the step that errs be named, but none where no catalogue has it.
- `power`: the smallest fault that each probe and the accuracy find, by bisection; the largest of the seeds counts.

Run: `python experiments/certify_power.py alarms --seeds 20 --jobs 32 --out alarms.csv`; the last line counts what the file holds.
Rows that it holds are not computed again: the same command goes on where one ended, by Ctrl-C or after `--minutes 8`.
`--only PATTERN` chooses by name, and `--every N` every Nth of these; `alarms --device cuda` judges what runs on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the kernels are those of the tests

from numdev.arithmetic.formats import BF16
from numdev.certification.accuracy import CASES, Predictions, Verdict
from numdev.certification.accuracy import judge as of_figures
from numdev.certification.certificate import Certificate, certify
from numdev.certification.kernel import kernel_of
from numdev.certification.probes import PROBES
from numdev.errors import BadInput
from tests.certification.forward_kernels import Flash, Step, bf16, same
from tests.certification.test_planted import is_named, table
from tests.certification.triton_kernels import TritonBackward, TritonForward

FIRST_SEED = 7001  # on which certify was not developed
REAL = {
    "cpu": ("sdpa",),
    "cuda": ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton", "flash_attn_3", "flash_attn_4"),
}
GRADIENTS = ("triton", "flex", "flash_attn_4")
Row = dict[str, object]


def noise(x: Tensor, size: float, seed: int = 11) -> Tensor:
    """x with independent errors of `size`, relative."""
    return x * (1 + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x))


def bits(count: float) -> Step:
    """Rounds to so many bits, the leading one included, with the exponents of FP32."""

    def rounded(x: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(x)
        return torch.where(x.isfinite(), torch.ldexp((fraction * 2.0**count).round() / 2.0**count, exponent), x)

    return rounded


def _one_element(x: Tensor, size: float) -> Tensor:
    x = x.clone()
    x.view(-1)[500_001::1_000_003] += size * x.pow(2).mean().sqrt()
    return x.bfloat16()


def _around(change: Callable[..., None] = lambda q, v, mask: None, then: Callable[..., Tensor] = lambda out, **_: out) -> Step:
    """A right kernel, before which the inputs are changed, or after which the output is."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        change(q=q, v=v, mask=mask)
        out, lse = Flash(out=same)(q, k, v, mask=mask, scale=scale)
        return then(out, lse=lse, q=q, v=v, mask=mask).bfloat16(), lse

    return kernel


def _where(condition: Callable[[Tensor], bool]) -> Callable[[float], Step]:
    return lambda x: _around(then=lambda out, q, **_: noise(out, x) if condition(q) else out)


def _changing(size: float) -> Step:
    def change(q: Tensor, **_: object) -> None:
        q.view(-1)[-1] *= 1 + size

    return _around(change)


def _unsteady(size: float) -> Step:
    """One element errs in every other call."""
    calls = iter(range(10**9))

    def then(out: Tensor, **_: object) -> Tensor:
        out = out.clone()
        out.view(-1)[0] *= 1 + size * (next(calls) % 2)
        return out

    return _around(then=then)


def _leaking(out: Tensor, v: Tensor, mask: Any, **_: object) -> Tensor:
    """One padded key is read, and weighs nothing."""
    return out if mask.key_lengths is None else out + 0 * v[:1, :1, mask.key_lengths[0], :1].float()


def _flushed(size: float) -> Step:
    return _around(then=lambda out, **_: out.masked_fill(out.abs() < size, 0.0))


def _empty(size: float) -> Step:
    return _around(then=lambda out, lse, **_: out.masked_fill(lse.isneginf()[..., None], size))


def _dropped(p: Tensor, share: float) -> Tensor:
    return bf16(p * (torch.rand(p.shape, generator=torch.Generator().manual_seed(p.shape[-1])).to(p) >= share))


def _lagging(size: float) -> Step:
    return lambda m, s: torch.maximum(m, s.amax(-1, keepdim=True) - size)


def _last_key(size: float) -> Step:
    def product(p: Tensor, v: Tensor, tile: tuple[int, int]) -> Tensor:
        v = v[:, :, tile[0] : tile[1]].clone()
        if tile[1] % Flash().bc:
            v[:, :, -1] *= 1 + size
        return p @ v

    return product


NUMERIC = ("normal", "large logits", "sink", "silent sink", "columns", "ramp", "captured")


@dataclass(frozen=True)
class Fault:
    """A fault of any size between one that nothing finds and one that is surely found.

    `only` are the cases or probes that judge it. Sizes are real numbers, or of bits whole ones.
    """

    name: str
    unit: str
    make: Callable[[float], Step]
    missed: float = 1e-9
    caught: float = 1.0
    only: tuple[str, ...] = NUMERIC

    def smallest(self, finds: Callable[[Step], str]) -> tuple[float, str]:
        """The smallest size that is found, within 5 % or one bit, and what finds it; NaN where nothing does."""
        missed, caught = self.missed, self.caught
        by = finds(self.make(caught))
        if not by:
            return math.nan, ""
        while abs(missed - caught) > 1 if self.unit == "bits" else caught / missed > 1.05:
            middle = (missed + caught) // 2 if self.unit == "bits" else math.sqrt(missed * caught)
            if found := finds(self.make(middle)):
                caught, by = middle, found
            else:
                missed = middle
        return caught, by


def _rounding(title: str, make: Callable[[Step], Step]) -> Fault:
    return Fault(f"{title} of few bits", "bits", lambda count: make(bits(count)), 24, 1)


FAULTS = (
    Fault("S times 1 + x", "relative", lambda x: Flash(scale=lambda scale: scale * (1 + x))),
    Fault("O times 1 + x", "relative", lambda x: _around(then=lambda out, **_: out * (1 + x))),
    Fault("random error of P", "relative", lambda x: Flash(p=lambda p: bf16(noise(p, x)))),
    Fault("random error of K", "relative", lambda x: Flash(load=lambda q, k, v: (q, noise(k, x), v))),
    Fault("random error of O", "relative", lambda x: _around(then=lambda out, **_: noise(out, x))),
    Fault("bias of O", "of its RMS", lambda x: _around(then=lambda out, **_: out + x * out.pow(2).mean().sqrt())),
    Fault("weights left out", "share", lambda x: Flash(p=lambda p: _dropped(p, x))),
    Fault("LSE plus x", "absolute", lambda x: Flash(lse=lambda m, total, base: m / base + total.log() + x)),
    Fault("LSE times 1 + x", "relative", lambda x: Flash(lse=lambda m, total, base: (m / base + total.log()) * (1 + x))),
    _rounding("S", lambda to: Flash(product=to)),
    _rounding("exponentials", lambda to: Flash(exp=lambda x: to(torch.exp(x)))),
    _rounding("P", lambda to: Flash(p=to)),
    _rounding("alpha", lambda to: Flash(alpha=lambda f: to(f[-1]), sum_alpha=lambda f: to(f[-1]))),
    _rounding("l", lambda to: Flash(total=to)),
    _rounding("O", lambda to: Flash(o=to)),
    _rounding("1 / l", lambda to: Flash(divide=lambda o, total: o * to(1 / total))),
    _rounding("LSE", lambda to: Flash(lse=lambda m, total, base: to(m / base + total.log()))),
    Fault("one element of q changed", "relative", _changing, only=("untouched",)),
    Fault("one element errs in every other call", "relative", _unsteady, only=("same bits",)),
    Fault("random error for strided inputs", "relative", _where(lambda q: not q.is_contiguous()), only=("layouts",)),
    Fault("random error for one batch entry of two", "relative", _where(lambda q: q.shape[0] == 1), only=("slices",)),
    Fault("O times 1 + x", "relative", lambda x: _around(then=lambda out, **_: out * (1 + x)), only=("values of one",)),
    Fault(
        "weight of the last key times 1 + x", "relative", lambda x: Flash(pv=_last_key(x)), caught=1e4, only=("permuted keys",)
    ),
    Fault("small numbers of O flushed", "absolute", _flushed, missed=1e-30, only=("range of values",)),
    Fault("maximum too small by x", "absolute", lambda x: Flash(top=_lagging(x)), 1e-2, 500.0, ("far scores",)),
    Fault(
        "one of 1,000,003 elements", "of the RMS", lambda x: Flash(out=lambda out: _one_element(out, x)), only=("every element",)
    ),
    Fault("rows that see nothing are x", "absolute", _empty, 1e-30, only=("empty rows",)),
    Fault("padded keys read", "keys", lambda _: _around(then=_leaking), 0.99, only=("padding",)),
)


@dataclass(frozen=True)
class Task:
    """One row: what is judged, as the first columns of the file say, on a device."""

    what: str
    device: str
    seeds: int
    key: dict[str, str]

    def run(self) -> Row:
        """The whole row, by one thread."""
        torch.set_num_threads(1)
        return {**self.key, **EXPERIMENTS[self.what].row(self)}

    def judge(self, kernel: Any, **arguments: Any) -> Certificate:
        """The certificate of a kernel, or, if the name says so, of gradients."""
        name = self.key.get("kernel", "")
        subject = {"kernel": "sdpa", "backward": kernel} if name.startswith("gradients") else {"kernel": kernel}
        return certify(**subject, device=self.device, **arguments)


def right(device: str) -> dict[str, Any]:
    """The kernels that may not fail, those of packages where they are installed."""

    def is_installed(name: str) -> bool:
        with suppress(BadInput):
            return bool(kernel_of(name, BF16, torch.device(device)))
        return False

    real = {name: name for name in REAL[device] if is_installed(name)}
    if device == "cpu":
        return real | {name: kernel for name, (kernel, _) in table("CORRECT").items()}
    gradients = {f"gradients: {name}": name for name in GRADIENTS if name in real}
    return {**real, **gradients, "Triton": TritonForward(), "gradients: Triton": TritonBackward()}


def alarm(task: Task) -> Row:
    """Verdict and score, and the figures and probes that fail."""
    certificate = task.judge(right(task.device)[task.key["kernel"]], seed=int(task.key["seed"]))
    failures = "; ".join(certificate.failures().values())
    return {"verdict": certificate.verdict.value, "score": f"{certificate.score:.4f}", "failures": failures}


def planted(task: Task) -> Row:
    """Verdict, whether the step is named, and the sentence; with an LSE or without."""
    kernel, step = table(task.key["kind"].upper())[task.key["kernel"]]
    subject = kernel if task.key["lse"] == "yes" else lambda *qkv, **more: kernel(*qkv, **more)[0]
    certificate = task.judge(subject, seed=int(task.key["seed"]))
    verdict, named = certificate.verdict.value, is_named(certificate, step)
    return {"verdict": verdict, "named": named, "sentence": certificate.sentence()}


def power(task: Task) -> Row:
    """The smallest size that every seed finds, what finds it then; and where the kernel returns no LSE."""
    predictions, probes = Predictions("kernel_bf16"), {probe.name for probe in PROBES}
    fault = _FAULTS[task.key["fault"]]

    def fails(kernel: Step, name: str, seed: int, lse: bool) -> bool:
        """By the case or probe alone, without a culprit."""
        if name in probes:
            return any(probe.outcome == "fails" for probe in task.judge(kernel, seed=seed, only=[name]).probes)
        known = predictions.of(next(case for case in CASES if case.name == name), range(seed, seed + 3))
        outputs = kernel_of(kernel, predictions.policy.format, torch.device(task.device)).on(known.inputs)
        figures = of_figures(known.ratios(outputs if lse else {"out": outputs["out"]}), 1.10)
        return any(figure.verdict is Verdict.FAIL for figure in figures)

    def smallest(lse: bool) -> tuple[str, str]:
        def finds(seed: int, kernel: Step) -> str:
            return ", ".join(name for name in fault.only if fails(kernel, name, seed, lse))

        sizes = [fault.smallest(partial(finds, seed)) for seed in range(FIRST_SEED, FIRST_SEED + task.seeds)]
        size, by = min(sizes) if fault.unit == "bits" else max(sizes)
        return f"{size:.2g}", by

    (size, by), (without, by_out) = smallest(True), smallest(False) if fault.only is NUMERIC else ("", "")
    return {"unit": fault.unit, "smallest": size, "found by": by, "without LSE": without, "then found by": by_out}


class Experiment(NamedTuple):
    """What is judged on a device, but for the seed, and the rest of its row."""

    keys: Callable[[str], list[dict[str, str]]]
    row: Callable[[Task], Row]
    has_seeds: bool = True


_FAULTS = {fault.name if fault.only is NUMERIC else f"{fault.name}, {fault.only[0]}": fault for fault in FAULTS}
EXPERIMENTS = {
    "alarms": Experiment(lambda device: [{"kernel": name} for name in right(device)], alarm),
    "planted": Experiment(
        lambda device: [
            {"kind": kind, "kernel": name, "lse": lse}
            for kind in ("precision", "structure", "outside")
            for name in table(kind.upper())
            for lse in (("yes",) if name.startswith("gradients") else ("yes", "no"))
        ],
        planted,
    ),
    "power": Experiment(lambda device: [{"fault": name} for name in _FAULTS], power, has_seeds=False),
}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file that are whole."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def append(path: Path, row: Mapping[str, object]) -> None:
    is_new = not path.is_file() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def counted(rows: list[dict[str, str]]) -> str:
    """How many rows have which verdict, how many steps are named, and which right kernels do not pass."""
    counts = Counter(row.get("verdict", "found") for row in rows)
    counts |= Counter(f"named ({row['kind']}, LSE {row['lse']})" for row in rows if row.get("named") == "True")
    wrong = sorted({row["kernel"] for row in rows if "failures" in row and row["verdict"] in ("fail", "inconclusive")})
    return f"{len(rows)} rows: {', '.join(f'{count} {what}' for what, count in counts.items())}" + (
        f"; not passed: {', '.join(wrong)}" if wrong else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    parser.add_argument("--device", default="cpu", choices=list(REAL))
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="judge every Nth row alone, from the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after these")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: WHAT.csv")
    options = parser.parse_args()
    path, experiment = options.out or Path(f"{options.what}.csv"), EXPERIMENTS[options.what]
    # Seeds of one kernel side by side: with the first kernel the predictions of every seed are made, which serve all others.
    seeds = [{"seed": str(options.first + i)} for i in range(options.seeds)] if experiment.has_seeds else [{}]
    keys = [key | seed for key in experiment.keys(options.device) for seed in seeds]
    keys = [key for key in keys if re.search(options.only, " ".join(key.values()))][:: options.every]
    rows = read(path)
    path.unlink(missing_ok=True)
    for row in rows:  # without one that was cut off
        append(path, row)
    waiting = [key for key in keys if not any(key.items() <= row.items() for row in rows)][::-1]
    end, running = time.monotonic() + 60 * options.minutes, set[Future[Row]]()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        while running or waiting:
            while waiting and len(running) < options.jobs:
                running.add(pool.submit(Task(options.what, options.device, options.seeds, waiting.pop()).run))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                append(path, future.result())
                print(*future.result().values(), file=sys.stderr)
            if time.monotonic() > end:
                print(f"{options.what}: {len(waiting)} rows to do; the same command goes on", file=sys.stderr)
                waiting = []
    print(f"{options.what}: {counted(read(path))}")


if __name__ == "__main__":
    main()
