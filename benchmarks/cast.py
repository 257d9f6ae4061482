"""Casts against pychop, and against a plain copy of the tensor."""

from __future__ import annotations

import torch

from benchmarks.timing import Result, paired
from numdev import Cast

_VALUES = 4_000_000


def results() -> list[Result]:
    """4 million FP32 values, nearest-even; bit-equal results are the business of the tests."""
    import pychop

    pychop.backend("torch")
    x = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    pairs = []
    for name, exponent, mantissa in (("fp16", 5, 10), ("bf16", 8, 7), ("e4m3fn", 4, 3)):
        cast, chop = Cast.parse(name), pychop.Chop(exp_bits=exponent, sig_bits=mantissa, rmode=1)
        pairs.append(paired(f"cast to {name} against pychop", lambda c=cast: c(x), lambda c=chop: c(x), at_least=5.0))
    cast, scratch = Cast.parse("bf16"), x.clone()
    copy = "cast to bf16 in place against a copy of the tensor"
    return [*pairs, paired(copy, lambda: cast.apply_(scratch), lambda: target.copy_(x), at_most=2.0, runs=25)]
