"""The matrix product: sums in exact rationals by split, tile and order; tensor cores in integers; kernels within their bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.operations.base import Entries
from numdev.operations.matmul import MATMUL, Call, Order, Policy, Problem, SplitK, Torch, Triton
from tests.oracles.table import round_exactly


def once(value: Fraction, fmt: Format) -> Fraction:
    return Fraction(round_exactly(value, fmt, Rounding.NEAREST_EVEN, Overflow.INFINITY))


@given(
    st.sampled_from(["bf16", "fp16", "e5m10"]),
    st.sampled_from([1, 2, 5]),
    st.integers(1, 5),
    st.sampled_from([Order.FORWARD, Order.PAIRS]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_splits_and_tiles_are_those_of_exact_rationals(fmt: str, every: int, splits: int, order: Order, seed: int) -> None:
    policy = Policy.kernel(BF16).with_step(product=f"{fmt}@{every}", partial="bf16", combine=fmt)
    variant = SplitK(policy, splits, order if splits > 2 else Order.FORWARD)
    a, b = variant.round_inputs(*Problem(2, 2, 11).inputs(seed).values())
    c = variant(a, b).tensors()["c"]
    to, size = Format.parse(fmt), math.ceil(11 / splits)
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.T.tolist()):
            products = [Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)]
            sums = []
            for start in range(0, 11, size):
                own = products[start : min(start + size, 11)]
                total = once(sum(own[:every], Fraction(0)), to)  # of at most 5 products: exact in FP32 but for rare bits, below
                for tile in range(every, len(own), every):
                    total = once(total + sum(own[tile : tile + every], Fraction(0)), to)
                sums.append(once(total, BF16))
            if len(sums) == 1:
                sums = [total]
            while len(sums) > 1:
                if order is Order.PAIRS:
                    pairs = [once(sums[p] + sums[p + 1], to) for p in range(0, len(sums) - 1, 2)]
                    sums = pairs + sums[2 * len(pairs) :]
                else:
                    sums = [once(sums[0] + sums[1], to), *sums[2:]]
            expected, u = float(once(sums[0], BF16)), 2.0**-8
            if every == 1:  # each tile is one product, exact in FP32
                assert float(c[i, j]) == expected
            else:  # a tile's sum in FP32 may lie on the other side of a tie
                bound = 4 * max(u, to.u) * sum(map(abs, products))
                assert abs(float(c[i, j]) - expected) <= bound


def test_fp64_is_exact_to_roundoff_and_its_order_is_of_no_matter() -> None:
    a, b = Problem(3, 4, 500).inputs(0).values()
    exact = [[sum(Fraction(x) * Fraction(y) for x, y in zip(r, q, strict=True)) for q in b.T.tolist()] for r in a.tolist()]
    reference = torch.tensor([[float(each) for each in row] for row in exact], dtype=torch.float64)
    bound = 501 * 2.0**-53 * (a.abs() @ b.abs())
    for variant in (MATMUL.golden, SplitK(Policy.golden(), 7), SplitK(Policy.golden(), 7, Order.ARRIVAL, seed=3)):
        assert variant is not None
        assert bool(((variant(a, b).tensors()["c"] - reference).abs() <= bound).all())


def test_tensor_cores_add_as_they_cut() -> None:
    """Hopper's FP8 unit keeps 13 bits below the largest of 32 products: 2^-5 beside 256 is kept, and 2^-6 is not."""
    a, b = torch.zeros(1, 64), torch.ones(64, 1)
    a[0, 0], a[0, 1] = 256.0, 2.0**-5
    policy = Policy.kernel(E4M3FN).with_step(product="hopper", output=FP32)
    run = SplitK(policy)
    assert float(run(a, b).tensors()["c"]) == 256.0 + 2.0**-5
    a[0, 1] = 2.0**-6
    assert float(run(a, b).tensors()["c"]) == 256.0
    a[0, 1], a[0, 32] = 0.0, 2.0**-6  # in the next instruction, beside the sum; promoted, in FP32
    assert float(run(a, b).tensors()["c"]) == 256.0
    promoted = SplitK(policy.with_step(product="hopper@32"))
    assert float(promoted(a, b).tensors()["c"]) == 256.0 + 2.0**-6


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32])
@pytest.mark.parametrize("make", [
    *(lambda fmt, call=call: Torch(fmt, call) for call in (Call.MM, Call.BMM, Call.EINSUM, Call.VECTORS)),
    *(lambda fmt, splits=splits: Triton(fmt, 16, 16, 32, splits) for splits in (1, 3)),
])  # fmt: skip
def test_kernels_keep_the_bound_of_fp32_accumulators(make: object, fmt: Format, device: str) -> None:
    assert callable(make)
    variant = make(fmt)
    a, b = variant.round_inputs(*Problem(20, 17, 130).inputs(0, device).values())
    c, exact = variant(a, b).tensors()["c"].double(), a.double() @ b.double()
    # torch's FP16 vectors may add in blocks; 130 additions in FP32 and a rounding to the format, which a row product may do twice
    bound = 131 * 2.0**-24 * (a.double().abs() @ b.double().abs()) + 2 * fmt.u * exact.abs()
    assert bool(((c - exact).abs() <= bound).all())


def test_an_order_of_arrival_changes_bits_between_replicates_alone() -> None:
    runner, problem = Runner(Deviations(MATMUL), "cpu"), Problem(8, 8, 512, Entries.UNIFORM)
    variant = SplitK(Policy.kernel(BF16).with_step(partial="bf16", combine="bf16"), 8, Order.ARRIVAL)
    assert variant.replicate(0) == variant != variant.replicate(1)
    assert variant.replicate(5) == variant.replicate(5)
    first, again = (runner.measure(problem, variant, None, 3).rows for _ in range(2))
    assert first == again
    a, b = variant.round_inputs(*problem.inputs(0).values())
    bits = [variant.replicate(seed)(a, b).tensors()["c"] for seed in range(6)]
    assert any(not torch.equal(bits[0], each) for each in bits[1:])


@pytest.mark.parametrize(("make", "error"), [
    (lambda: SplitK(Policy.golden(), 0), "variant.splits"),
    (lambda: SplitK(Policy.golden(), 2, Order.PAIRS), "variant.order: 'pairs' cannot be used; two sums have one order"),
    (lambda: Torch(BF16, Call.SCALED), "variant.call: 'scaled'"),
    (lambda: Torch(E4M3FN), "variant.call: 'mm'"),
    (lambda: Triton(FP32, 24), "variant.br: 24"),
    (lambda: Policy.kernel(FP64).with_step(product="hopper"), "its tensor cores do not multiply"),
])  # fmt: skip
def test_mistakes(make: object, error: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=error):
        make()


def test_fp8_products_are_refused_on_a_cpu() -> None:
    variant = Torch(E4M3FN, Call.SCALED)
    with pytest.raises(Unsupported, match="measured on a GPU; use device=cuda"):
        variant(*variant.round_inputs(*Problem(16, 16, 32).inputs(0).values()))
