"""Cases for several test files: inputs, precision policies, and the error bounds of FP64 arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Gradients, Output
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Policy, Precision

U64 = 2.0**-53

Sizes = tuple[int, int, int, int, int, int]  # batch, heads, kv_heads, queries, keys, head_dim
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Several = TypeVar("Several", bound=tuple[Tensor, ...])

EXP2_ERRORS = {1: 2.9822e-02, 2: 1.7249e-03, 3: 7.4782e-05, 4: 2.5935e-06, 5: 7.4937e-08}
"""Largest relative error of each polynomial of `EXP2_MINIMAX` on [0, 1), by its degree."""


def draw(sizes: Sizes, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v in FP64; `spread` is the standard deviation of q, and so of the scores."""
    batch, heads, kv_heads, queries, keys, dim = sizes
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, dim, dtype=torch.float64, generator=generator) * spread
    k = torch.randn(batch, kv_heads, keys, dim, dtype=torch.float64, generator=generator)
    v = torch.randn(batch, kv_heads, keys, dim, dtype=torch.float64, generator=generator)
    return q, k, v


def draw_all(sizes: Sizes, seed: int = 0, spread: float = 1.0) -> Inputs:
    """Normal q, k, v and do in FP64; `spread` as in `draw`."""
    q, k, v = draw(sizes, seed, spread)
    generator = torch.Generator().manual_seed(seed + 1000)
    return q, k, v, torch.randn(q.shape, dtype=torch.float64, generator=generator)


def on(device: str, tensors: Several, dtype: torch.dtype | None = None) -> Several:
    """The tensors on a device, in a dtype if one is named."""
    moved: Any = tuple(tensor.to(device, dtype or tensor.dtype) for tensor in tensors)
    return moved  # type: ignore[no-any-return]


def lse_of(output: Output) -> Tensor:
    """The LSE of an implementation that always gives one."""
    assert output.lse is not None
    return output.lse


Kind = TypeVar("Kind", bound=Policy)


def usual(kind: type[Kind]) -> dict[str, Kind]:
    """Policies that both passes have."""
    formats = {name: getattr(kind, name) for name in ("uniform", "kernel", "eager")}
    presets = {f"{name}_{fmt}": preset(fmt) for name, preset in formats.items() for fmt in (BF16, FP16, E5M2)}
    toward_zero = kind.throughout(Cast.parse("bf16:toward_zero"))
    return presets | {"fp32": kind.uniform(FP32), "golden": kind.golden(), "toward_zero": toward_zero}


# In the mixed ones no two neighbouring steps share a format, and running sums are rounded within a tile.
POLICIES: dict[str, Precision] = usual(Precision) | {
    "mixed": Precision.golden().with_step(
        inputs="bf16",
        scores="e8m13:toward_zero@16",
        exponential="fp16",
        rescale="tf32",
        row_sum="bf16@8",
        probabilities="e5m2",
        values="bf16@24",
        accumulator="e8m9:toward_zero",
        output="fp16",
    ),
    "narrow_sum": Precision.kernel(BF16).with_step(row_sum="bf16"),
    "tensor_core": Precision.kernel(FP16).with_step(scores="e8m13:toward_zero@16"),
    "wide operands": Precision.kernel(FP16).with_step(accumulator="fp16", exponential="bf16:odd"),
    "hopper": Precision.kernel(E4M3FN).with_step(scores="hopper", values="hopper"),
    "fp8": Precision.fp8(),
    "int8": Precision.int8(),
}
BACKWARD_POLICIES: dict[str, BackwardPrecision] = usual(BackwardPrecision) | {
    "mixed": BackwardPrecision.golden().with_step(
        inputs="bf16",
        scores="e8m13:toward_zero@16",
        exponential="fp16",
        probabilities="e5m2",
        dp="tf32@8",
        delta="bf16@8",
        difference="e8m9:toward_zero",
        ds="e5m3",
        dq="bf16@24",
        dk="tf32@4",
        dv="fp16@8",
        dq_sum="e8m9:up",
        dk_sum="bf16",
        dv_sum="e8m12",
        output="fp16",
    ),
    "ampere": BackwardPrecision.kernel(BF16).with_step(**dict.fromkeys(("scores", "dp", "dq", "dk", "dv"), "ampere")),
    "wide operands": BackwardPrecision.kernel(FP16).with_step(dq_sum="fp16", difference="bf16", delta="bf16@4"),
}


def same(a: Gradients, b: dict[str, Tensor]) -> None:
    """All four outputs equal, NaN in the same places."""
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor.isnan(), b[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(7e7), b[name].nan_to_num(7e7)), name


def reach(q: Tensor, k: Tensor, scale: float) -> float:
    """`A = scale max_ij sum_t |q_it| |k_jt|`: no score, and no intermediate sum of one, is larger."""
    group = q.shape[1] // k.shape[1]
    return scale * float((q.abs() @ k.abs().repeat_interleave(group, 1).mT).max())


def weight_error(dim: int, keys: int, a: float) -> float:
    """Relative error of `P / l` computed over whole rows in FP64, in units of u; `a` is `reach`.

    A score is a sum of d products, then scaled: off by at most `(d + 2) u A` absolutely (Higham 2002, section 3.1; the
    scale is the same FP64 number on both sides). `S - m` rounds once more, by `u |S - m| <= 2 u A`. What is absolute in
    the exponent is relative in P; exp adds 2 u, its error being below one ulp. So P is off by `(d + 4) A + 2`. The sum
    of N of them keeps that and adds `N - 1`; the division adds 1. Numerator and denominator: twice the first, plus N.
    """
    return 2 * ((dim + 4) * a + 2) + keys


def output_error(dim: int, keys: int, a: float) -> float:
    """Error of Exact's `out` relative to `max |v|`, in units of u: `weight_error`, and the product's N more."""
    return weight_error(dim, keys, a) + keys


def lse_error(dim: int, keys: int, a: float) -> float:
    """Absolute error of Exact's LSE, in units of u.

    That of `log l` is the relative one of l, `(d + 4) A + 2 + N`, plus a log below one ulp, `2 log N`; adding m rounds
    by `|LSE| <= A + log N`, and m itself is one of the scores, so that its error is counted in P already.
    """
    return (dim + 4) * a + 2 + keys + 2 * math.log(keys) + a + math.log(keys)


def tiled_error(dim: int, keys: int, a: float, tiles: int, splits: int, beta: float = 1.0) -> float:
    """Error of tiled FP64 attention, of `out` relative to `max |v|` and of LSE absolute, in units of u.

    To Exact's: a folded log2(e) or scaled queries round the factor, `2 A`; a shift by `beta m` lets `|S - m|` reach
    `(1 + beta) A`; exp2 is below 1.5 ulp, 3 u. Each tile rounds alpha (its argument `(1 + beta) A`, its exp 3, its
    product 1) and both sums (1 each); with `Normalise.EACH` also a product and a division. p_scale rounds twice. The
    combine step weighs each split by exp of a difference of two LSEs, each off by its own error and a rounding of at
    most `3 (A + log N)`, and adds S terms. All of it enters numerator and denominator: twice. A row of constant v
    would show none of it, so this is a bound and no estimate; the errors seen are 100 times smaller.
    """
    row = (dim + 6 + 1 + beta) * a + 5 + keys + tiles * ((1 + beta) * a + 8)
    combined = row + 6 * (a + math.log(keys)) + splits + 8 if splits > 1 else 0.0
    return 2 * (row + combined) + 3 * (a + math.log(keys))


MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=13),
    "causal window": Mask(causal=True, window=9),
    "lengths": Mask(key_lengths=(31, 0)),
    "all": Mask(causal=True, window=17, key_lengths=(50, 20)),
}


def fitted(mask: Mask, keys: int) -> Mask:
    """One of `MASKS` with no batch entry longer than there are keys."""
    return mask if mask.key_lengths is None else replace(mask, key_lengths=tuple(min(n, keys) for n in mask.key_lengths))
