"""How often `numdev certify` errs, and how small a fault it finds, on the kernels of `tests/certification`.

- `alarms`: right kernels, forward and backward, over seeds; none may fail.
- `planted`: kernels with a fault, over seeds; all must fail, and the step that errs be named, but none where no catalogue has it.
- `power`: the smallest fault that each probe and the accuracy find, by bisection; the largest of the seeds counts.

Run: `python experiments/certify_power.py power --seeds 3 > power.csv` (a quarter of an hour on two cores; progress on stderr).
`--only PATTERN` chooses kernels or faults by name, `--device cuda` judges on a GPU, the real kernels of `REAL` too.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the kernels are those of the tests

from numdev.certification.accuracy import Verdict
from numdev.certification.certificate import Certificate, certify
from tests.certification import backward_kernels, forward_kernels
from tests.certification.forward_kernels import Flash, Step, bf16, same
from tests.certification.test_planted import is_named

FIRST_SEED = 7001  # on which certify was not developed
REAL = {"cpu": ("sdpa", "flex"), "cuda": ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton")}
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


def alarms(judge: Callable[..., Certificate], seeds: range, device: str, pattern: str) -> Iterator[Row]:
    """A row for each right kernel and seed, with the figures and probes that fail."""
    kernels: dict[str, dict[str, object]] = {
        **{name: {"kernel": name} for name in REAL[device]},
        **{name: {"kernel": kernel} for name, kernel in forward_kernels.CORRECT.items()},
        **{f"backward, {name}": {"kernel": Flash(64), "backward": kernel} for name, kernel in backward_kernels.CORRECT.items()},
    }
    for name, arguments in kernels.items():
        for seed in seeds if re.search(pattern, name) else ():
            certificate = judge(**arguments, seed=seed)
            failures = "; ".join(what for what, _ in certificate.repeats())
            yield {
                "kernel": name,
                "seed": seed,
                "verdict": certificate.verdict.value,
                "score": certificate.score,
                "failures": failures,
            }


def planted(judge: Callable[..., Certificate], seeds: range, device: str, pattern: str) -> Iterator[Row]:
    """A row for each faulty kernel and seed: the verdict, whether the step is named, and the sentence; with LSE and without."""
    for module, argument in ((forward_kernels, "kernel"), (backward_kernels, "backward")):
        tables: dict[str, dict[str, Any]] = {name: getattr(module, name) for name in ("PRECISION", "STRUCTURE", "OUTSIDE")}
        for table, kernels in tables.items():
            for name, entry in kernels.items():
                faulty, step = entry if isinstance(entry, tuple) else (entry, "")
                without = [faulty] if argument == "backward" else [faulty, lambda *qkv, f=faulty, **more: f(*qkv, **more)[0]]
                for kernel in without if re.search(pattern, name) else ():
                    for seed in seeds:
                        certificate = judge(**({"kernel": Flash(64)} | {argument: kernel}), seed=seed)
                        yield {
                            "table": f"{module.__name__.rpartition('.')[2]}.{table}",
                            "kernel": name,
                            "lse": kernel is faulty,
                            "seed": seed,
                            "verdict": certificate.verdict.value,
                            "named": is_named(certificate, step),
                            "sentence": certificate.sentence(),
                        }


def power(judge: Callable[..., Certificate], seeds: range, device: str, pattern: str) -> Iterator[Row]:
    """A row for each fault: the smallest size that every seed finds, and which cases or probes find it then."""

    def finds(only: tuple[str, ...], seed: int, kernel: Step) -> str:
        certificate = judge(kernel, seed=seed, only=only)
        cases = [case.name for case in certificate.cases if case.verdict is Verdict.FAIL]
        return ", ".join(cases + [probe.name for probe in certificate.probes if probe.outcome == "fails"])

    for fault in FAULTS:
        if re.search(pattern, fault.name):
            sizes = [fault.smallest(partial(finds, fault.only, seed)) for seed in seeds]
            worst = min(sizes) if fault.unit == "bits" else max(sizes)
            yield {"fault": fault.name, "unit": fault.unit, "smallest": f"{worst[0]:.2g}", "found by": worst[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alarms", "planted", "power"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    parser.add_argument("--device", default="cpu", choices=list(REAL))
    parser.add_argument("--only", default="", metavar="PATTERN")
    options = parser.parse_args()

    def judge(kernel: object, **arguments: Any) -> Certificate:
        return certify(kernel, device=options.device, **arguments)

    writer: csv.DictWriter[str] | None = None
    rows = {"alarms": alarms, "planted": planted, "power": power}[options.what]
    for row in rows(judge, range(options.first, options.first + options.seeds), options.device, options.only):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow(row)
        sys.stdout.flush()
        print(*row.values(), file=sys.stderr)


if __name__ == "__main__":
    main()
