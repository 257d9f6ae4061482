"""Cases for tests of the backward pass: inputs, policies, error bounds of FP64, and comparisons of kernels with golden."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E5M2, FP16, FP32
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Gradients, Saved
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from numdev.attention.triton import TritonBackward
from tests.attention.kernels.backward_budget import backward_budget, of_output
from tests.cases import U64, Sizes, draw, lse_error, output_error, reach, tiled_error, weight_error

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_all(sizes: Sizes, seed: int = 0, spread: float = 1.0) -> Inputs:
    """Normal q, k, v and do in FP64; `spread` as in `draw`."""
    q, k, v = draw(sizes, seed, spread)
    generator = torch.Generator().manual_seed(seed + 1000)
    return q, k, v, torch.randn(q.shape, dtype=torch.float64, generator=generator)


def mixed() -> BackwardPrecision:
    """A policy in which no two neighbouring steps share a format, with running sums rounded within a tile."""
    return BackwardPrecision(
        inputs=Cast(BF16),
        scores=Dot.parse("e8m13:toward_zero@16"),
        exponential=Cast.parse("fp16"),
        probabilities=Cast.parse("e5m2"),
        dp=Dot.parse("tf32@8"),
        delta=Dot.parse("bf16@8"),
        difference=Cast.parse("e8m9:toward_zero"),
        ds=Cast.parse("e5m3"),
        dq=Dot.parse("bf16@24"),
        dk=Dot.parse("tf32@4"),
        dv=Dot.parse("fp16@8"),
        dq_sum=Cast.parse("e8m9:up"),
        dk_sum=Cast.parse("bf16"),
        dv_sum=Cast.parse("e8m12"),
        output=Cast.parse("fp16"),
    )


POLICIES: dict[str, Callable[[], BackwardPrecision]] = {
    **{
        f"{kind}_{fmt.name}": (lambda preset=preset, fmt=fmt: preset(fmt))  # type: ignore[misc]
        for kind, preset in (
            ("uniform", BackwardPrecision.uniform),
            ("kernel", BackwardPrecision.kernel),
            ("eager", BackwardPrecision.eager),
        )
        for fmt in (BF16, FP16, E5M2)
    },
    "fp32": lambda: BackwardPrecision.uniform(FP32),
    "golden": BackwardPrecision.golden,
    "mixed": mixed,
    "toward_zero": lambda: BackwardPrecision.throughout(Cast.parse("bf16:toward_zero")),
    "wide operands": lambda: BackwardPrecision.kernel(FP16).with_step(dq_sum=FP16, difference=BF16, delta="bf16@4"),
}


def same(a: Gradients, b: dict[str, Tensor]) -> None:
    """All four outputs equal, NaN in the same places."""
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor.isnan(), b[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(7e7), b[name].nan_to_num(7e7)), name


@dataclass(frozen=True)
class Bounds:
    """Errors of FP64 gradients, absolute, in units of u, by the name of the output."""

    dq: float
    dk: float
    dv: float
    delta: float


def bounds(inputs: Inputs, scale: float, tiles: int = 1, query_tiles: int = 1) -> Bounds:
    """Errors of streamed or tiled FP64 gradients at most, to first order: `c N u` of the largest that they could be.

    Let `A` be `reach`, `N` keys, `R` rows of all heads of a group, `T` KV tiles, and `W = max_i sum_t |dO_it| max |V|`, which no
    `|dP_ij|`, no `|delta_i|` and no sum `sum_t |dO_it O_it|` exceeds, O being a mean of V. Errors in units of u:

    P, relative: S is off by `(d + 2) A`, a folded log2(e) by `2 A` more; LSE by its own error, its product with log2(e) by
    `A + log N`; `S - LSE` rounds by at most `2 A + log N`; exp2 is below 1.5 ulp, 3 u. All is absolute in the exponent.
    dP: a sum of d products, `d W`.
    delta: `rowsum(dO * O)` is off by the error of O, relative to `max |V|`, times `sum |dO|`, and by `d + 1` roundings;
    `rowsum(dP * P)` by that of P and of dP, the product's, and `N + T` roundings of sums. Both together bound either.
    dS: `P_ij` times that of P on `|dP - delta| <= 2 W`, those of dP and delta, and two roundings of at most `2 W`.
    dQ: `scale max |K|` times the sum of that over a row, where `sum_j P_ij = 1`, and `N + T + 2` roundings of sums of
    `|dS| <= 2 W P`. dK: `scale max |Q|` times the sum over a column, where `sum_i P_ij <= R`, and `R + H T_q + 2` roundings.
    dV: `max |dO|` times R times the error of P, and as many roundings.
    """
    q, k, v, do = inputs
    (heads, queries, dim), keys = q.shape[1:], k.shape[2]
    a, group = reach(q, k, scale), heads // k.shape[1]
    column, w = group * queries, float(do.abs().sum(-1).max() * v.abs().max())
    lse = max(lse_error(dim, keys, a), tiled_error(dim, keys, a, tiles, 1))
    out = max(output_error(dim, keys, a), tiled_error(dim, keys, a, tiles, 1))
    p = (dim + 4) * a + lse + 3 * a + 2 * math.log(keys) + 3
    delta = w * (out + p + 2 * dim + keys + tiles + 3)
    ds = 2 * w * p + dim * w + delta + 4 * w
    per_row, per_column = keys + tiles + 2, column + group * query_tiles + 2
    dq = scale * float(k.abs().max()) * (ds + 2 * w * per_row)
    dk = scale * float(q.abs().max()) * column * (ds + 2 * w * per_column)
    dv = float(do.abs().max()) * column * (p + per_column)
    return Bounds(dq, dk, dv, delta)


def element_bounds(inputs: Inputs, p: Tensor, scale: float) -> dict[str, Tensor]:
    """Error of each element of the golden gradients at most, to first order, in units of u; `p` is the exact P.

    For a row i let b be the key of its largest score, `R = 1 - P_ib` the sum of the other weights, `W = sum_t |dO_it| max |V|`,
    and `pi u` the relative error of a computed weight (`weight_error`). Errors in units of u:

    e_ij = dP_ij - dP_ib: two sums of d products and a difference, `2 (d + 1) W`; e_ib is exactly 0. No |e| exceeds 2 W.
    mean = sum_j P_ij e_ij, which has no term of b: at most `2 W R`, and off by `2 W R (pi + d + 2 + N)`: weights, e, N roundings.
    dS_ij with j /= b: `P_ij` times `2 W` times `pi`, `d + 1`, R times the mean's, and 2 roundings; there `P_ij <= 1/2`, so
    `P_ij <= 2 P_ij (1 - P_ij)`. `dS_ib = -P_ib mean`: P_ib times `2 W R` times `pi`, the mean's, and 2 more; `R = 1 - P_ib`.
    Both are at most `4 W P_ij (1 - P_ij) C` with `C = 2 pi + N + 2 d + 5`, and |dS_ij| at most `4 W P_ij (1 - P_ij)`.
    dQ, dK: sums of N or M such dS, with as many roundings, and the scale, 1; dV: a sum of M of P dO.
    What underflows is off by at most 2^-1022 each time, also if it is flushed to zero.
    """
    q, k, v, do = inputs
    (heads, queries, dim), keys, kv_heads = q.shape[1:], k.shape[2], k.shape[1]
    group = heads // kv_heads
    pi, rows = weight_error(dim, keys, reach(q, k, scale)), group * queries
    c, w = 2 * pi + keys + 2 * dim + 5, do.abs().sum(-1, keepdim=True) * v.abs().max()
    best = p.argmax(-1, keepdim=True)
    others = (1 - p).scatter(-1, best, p.scatter(-1, best, 0.0).sum(-1, keepdim=True))  # 1 - P, of which nothing cancels
    ds = 4 * scale * w * p * others
    tiny = 2.0**-1022 / U64 * (keys + rows) * (1 + scale) * math.prod(1 + float(x.abs().max()) for x in (q, k, w, do))

    def by_key(weights: Tensor, right: Tensor) -> Tensor:
        return (weights.mT @ right.abs()).unflatten(1, (kv_heads, group)).sum(2)

    return {
        "dq": (c + keys + 2) * (ds @ k.abs().repeat_interleave(group, 1) + tiny),
        "dk": (c + rows + 2) * (by_key(ds, q) + tiny),
        "dv": (pi + rows + 1) * (by_key(p, do) + tiny),
    }


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.empty` return NaN, or a large number, so that an element that no kernel writes shows."""
    empty = torch.empty

    def poisoned(*args: object, **keywords: object) -> Tensor:
        made: Tensor = empty(*args, **keywords)  # type: ignore[call-overload]
        if made.is_floating_point():
            return made.fill_(float("nan")) if made.dtype.itemsize > 1 else made
        return made.fill_(123)

    monkeypatch.setattr(torch, "empty", poisoned)


def rounded(backward: TritonBackward, inputs: Inputs, device: str) -> Inputs:
    q, k, v, do = (x.to(device) for x in backward.round_inputs(*inputs))
    return q, k, v, do


def stored(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    q, k, v, do = (x.to(dtype) for x in inputs)
    return q, k, v, do


def saved_of(backward: TritonBackward, inputs: Inputs, mask: Mask, scale: float) -> Saved:
    """Golden O and LSE, as a kernel would save them."""
    golden = Exact()(*inputs[:3], mask, scale)
    assert golden.lse is not None
    return Saved(backward.precision.output(golden.out), golden.lse.float())


def check(backward: TritonBackward, inputs: Inputs, mask: Mask, device: str, *, product: float = 0.0) -> Gradients:
    """The gradients of a run on rounded inputs, after their comparison with golden ones on the same."""
    on_device, scale = rounded(backward, inputs, device), inputs[0].shape[-1] ** -0.5
    got = backward.backward(*on_device, saved_of(backward, on_device, mask, scale), mask, scale)
    golden = ExactBackward()(*on_device, mask, scale)
    bounds = backward_budget(backward.precision, on_device, mask, scale, product)
    for name in ("dq", "dk", "dv"):
        mine, exact = getattr(got, name), getattr(golden, name).cpu()
        assert mine.dtype == backward.fmt.dtype
        assert not bool(mine.isnan().any()), f"{name}: an element was not written"
        bound = of_output(getattr(bounds, name), exact, backward.precision)
        assert bool(((mine.double().cpu() - exact).abs() <= bound).all()), name
    assert got.delta is not None
    assert golden.delta is not None
    difference = (got.delta.double() - golden.delta).abs().cpu()
    assert bool((difference <= bounds.delta + 2.0**-24 * golden.delta.abs().cpu()).all()), "delta"
    hidden = ~mask.seeing_rows(on_device[0].shape[0], on_device[0].shape[2], on_device[1].shape[2])
    for x in (got.dq, got.delta):
        assert bool((x.cpu().transpose(1, 2)[hidden] == 0).all()), "rows that see nothing"
    return got


def same_bits(run: Callable[[], dict[str, Tensor]], often: int = 10, products: int = 1) -> None:
    """1000 launches alone, and 1000 beside a stream that gets some matrix products at every so many of them."""
    first = run()
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for launch in range(2000):
        if launch >= 1000 and launch % often == 0:
            with torch.cuda.stream(other):
                for _ in range(products):
                    busy @ busy
        again = run()
        different += sum((first[name] != again[name]).sum() for name in first)
    assert int(different) == 0
