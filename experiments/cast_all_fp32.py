"""Cast every FP32 number, all 2^32 of them, to bf16, fp16, e4m3fn and e5m2, and compare with rounding in whole numbers.

The oracle shares nothing with numdev. A chunk holds FP32 numbers of one sign and exponent, so the bits to drop are the
same for all of it: with the significand `s`, of which `d` bits go, nearest-even is `(s + 2^(d-1) - 1 + (bit d of s)) >> d`.

Run: `python experiments/cast_all_fp32.py > reports/cast_all_fp32.txt` (a few minutes on two cores; progress on stderr).
Exits with 1 if anything differs; two NaN are the same, whatever their bits.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, Format
from numdev.arithmetic.rounding import Cast

_PIECE = 1 << 20  # significands at once; a piece and its scratch stay in the cache
_HIDDEN = 1 << 23


@dataclass(frozen=True)
class Target:
    """A narrow format in whole numbers: the exponent of its smallest normal number, its stored bits, its largest number."""

    format: Format
    least_exponent: int
    stored: int
    largest: float
    beyond: float


TARGETS = (
    Target(BF16, -126, 7, (2 - 2.0**-7) * 2.0**127, float("inf")),
    Target(FP16, -14, 10, 65504.0, float("inf")),
    Target(E4M3FN, -6, 3, 448.0, float("nan")),
    Target(E5M2, -14, 2, 57344.0, float("inf")),
)


def expected(exponent_field: int, fractions: Tensor, to: Target) -> Tensor:
    """The magnitudes `exponent_field`, `fractions` (as stored in FP32) rounded to the nearest number, ties to even."""
    if exponent_field == 255:
        return torch.where(fractions == 0, to.beyond, float("nan")).float()
    significands = fractions + _HIDDEN if exponent_field else fractions
    exponent = max(exponent_field, 1) - 127
    dropped = min(23 - to.stored + max(0, to.least_exponent - exponent), 25)  # 25 leave nothing of 24 bits
    odd = (significands >> dropped) & 1
    rounded = (significands + ((1 << (dropped - 1)) - 1) + odd) >> dropped
    values = rounded.float() * 2.0 ** (max(exponent, to.least_exponent) - to.stored)  # exact
    return values.masked_fill_(values > to.largest, to.beyond)


def mismatches(got: Tensor, want: Tensor) -> int:
    different = got.view(torch.int32) != want.view(torch.int32)
    if not bool(different.any()):
        return 0
    return int((different & ~(got.isnan() & want.isnan())).sum())


def check(to: Target) -> tuple[int, int]:
    """How many numbers were cast, and how many came out wrong. One format is one process's work, on one thread."""
    cast, tested, wrong = Cast(to.format), 0, 0
    start = time.monotonic()
    for exponent_field in range(256):
        for first in range(0, _HIDDEN, _PIECE):
            fractions = torch.arange(first, first + _PIECE, dtype=torch.int32)
            bits = fractions + (exponent_field << 23)
            want = expected(exponent_field, fractions, to)
            for sign in (0, -(1 << 31)):
                x = (bits + sign).view(torch.float32)
                wrong += mismatches(cast(x), want if sign == 0 else -want)
                tested += x.numel()
        if exponent_field % 16 == 15:
            seconds = time.monotonic() - start
            print(f"{to.format}: {(exponent_field + 1) / 256:4.0%}, {wrong} wrong, {seconds:.0f} s", file=sys.stderr, flush=True)
    return tested, wrong


def main() -> int:
    workers = ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,))
    print("$ python experiments/cast_all_fp32.py")
    print("Cast from FP32, nearest even, against rounding in whole numbers")
    print(f"{'format':8}{'inputs tested':>16}{'mismatches':>12}")
    total = 0
    for to, (tested, wrong) in zip(TARGETS, workers.map(check, TARGETS), strict=True):
        total += wrong
        print(f"{to.format.name:8}{tested:>16,}{wrong:>12,}", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
