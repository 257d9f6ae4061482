"""How often `numdev certify` errs, and how small a fault it finds, on the kernels of `tests/certification`.

- `alarms`: right kernels, forward and backward, over seeds; none may fail.
- `planted`: kernels with a fault, over seeds; all must fail, and the step that errs be named, but none where no catalogue has it.
- `power`: the smallest fault that each probe and the accuracy find, by bisection; the largest of the seeds counts.

Run: `python experiments/certify_power.py power --seeds 3 > power.csv` (some minutes; progress on stderr).
`--only PATTERN` chooses by name, `--part 2/8` the third of eight parts; `alarms --device cuda` judges what runs on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the kernels are those of the tests

from numdev.certification.accuracy import Predictions, Verdict
from numdev.certification.accuracy import judge as of_figures
from numdev.certification.cases import CASES
from numdev.certification.certificate import Certificate, certify
from numdev.certification.kernel import kernel_of
from numdev.certification.probes import PROBES
from tests.certification.forward_kernels import Flash, Step, bf16, same
from tests.certification.test_planted import is_named, table
from tests.certification.triton_kernels import TritonBackward, TritonForward

FIRST_SEED = 7001  # on which certify was not developed
REAL = {"cpu": ("sdpa",), "cuda": ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton")}
Row = dict[str, object]
Choice = Callable[[Mapping[str, Any]], list[tuple[str, Any]]]


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


NUMERIC = ("normal", "large logits", "sink", "columns", "ramp", "captured")


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


def _subject(name: str, kernel: object) -> dict[str, object]:
    return {"kernel": "sdpa", "backward": kernel} if name.startswith("gradients") else {"kernel": kernel}


def alarms(judge: Callable[..., Certificate], seeds: range, device: str, choose: Choice) -> Iterator[Row]:
    """A row for each right kernel and seed, with the figures and probes that fail."""
    own: dict[str, Any] = (
        {"Triton": TritonForward(), "gradients: Triton": TritonBackward()} if device == "cuda" else table("CORRECT")
    )
    kernels = {name: name for name in REAL[device]} | own
    for name, kernel in choose(kernels):
        for seed in seeds:
            certificate = judge(**_subject(name, kernel[0] if isinstance(kernel, tuple) else kernel), seed=seed)
            failures = "; ".join(what for what, _ in certificate.repeats())
            verdict, score = certificate.verdict.value, f"{certificate.score:.4f}"
            yield {"kernel": name, "seed": seed, "verdict": verdict, "score": score, "failures": failures}


def planted(judge: Callable[..., Certificate], seeds: range, device: str, choose: Choice) -> Iterator[Row]:
    """A row for each faulty kernel and seed: verdict, whether the step is named, and the sentence; with an LSE and without."""
    for kind in ("PRECISION", "STRUCTURE", "OUTSIDE"):
        for name, (kernel, step) in choose(table(kind)):
            without = {} if name.startswith("gradients") else {"no": lambda *qkv, f=kernel, **more: f(*qkv, **more)[0]}
            for lse, subject in {"yes": kernel, **without}.items():
                for seed in seeds:
                    certificate = judge(**_subject(name, subject), seed=seed)
                    verdict, named = certificate.verdict.value, is_named(certificate, step)
                    about = {"kind": kind.lower(), "kernel": name, "lse": lse, "seed": seed}
                    yield about | {"verdict": verdict, "named": named, "sentence": certificate.sentence()}


def power(judge: Callable[..., Certificate], seeds: range, device: str, choose: Choice) -> Iterator[Row]:
    """A row for each fault: the smallest size that every seed finds, what finds it then; and where the kernel returns no LSE."""
    predictions, probes = Predictions("kernel_bf16"), {probe.name for probe in PROBES}

    def fails(kernel: Step, name: str, seed: int, lse: bool) -> bool:
        """By the case or probe alone, without a culprit."""
        if name in probes:
            return any(probe.outcome == "fails" for probe in judge(kernel, seed=seed, only=[name]).probes)
        known = predictions.of(next(case for case in CASES if case.name == name), range(seed, seed + 3))
        outputs = kernel_of(kernel, predictions.policy, torch.device(device)).on(known.inputs)
        figures = of_figures(known.ratios(outputs if lse else {"out": outputs["out"]}), 1.10)
        return any(figure.verdict is Verdict.FAIL for figure in figures)

    def smallest(fault: Fault, lse: bool) -> tuple[str, str]:
        def finds(seed: int, kernel: Step) -> str:
            return ", ".join(name for name in fault.only if fails(kernel, name, seed, lse))

        sizes = [fault.smallest(partial(finds, seed)) for seed in seeds]
        size, by = min(sizes) if fault.unit == "bits" else max(sizes)
        return f"{size:.2g}", by

    for name, fault in choose({f"{fault.name}, {fault.only[0]}": fault for fault in FAULTS}):
        (size, by), (without, by_out) = smallest(fault, True), smallest(fault, False) if fault.only is NUMERIC else ("", "")
        about = {"fault": name if fault.only is not NUMERIC else fault.name, "unit": fault.unit}
        yield about | {"smallest": size, "found by": by, "without LSE": without, "then found by": by_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alarms", "planted", "power"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    parser.add_argument("--device", default="cpu", choices=list(REAL))
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--part", default="0/1", metavar="I/N")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))

    def judge(kernel: object, **arguments: Any) -> Certificate:
        return certify(kernel, device=options.device, **arguments)

    def choose(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [entry for entry in entries.items() if re.search(options.only, entry[0])][part::parts]

    writer: csv.DictWriter[str] | None = None
    rows = {"alarms": alarms, "planted": planted, "power": power}[options.what]
    for row in rows(judge, range(options.first, options.first + options.seeds), options.device, choose):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow(row)
        sys.stdout.flush()
        print(*row.values(), file=sys.stderr)


if __name__ == "__main__":
    main()
