"""Dots against running sums kept in rational arithmetic, rows against their neighbours, and the policies."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E2M1, E4M3FN, E5M2, FP16, FP32, FP64, INT4, INT8, TF32, Format
from numdev.arithmetic.microscale import MICROSCALED
from numdev.arithmetic.products import product, row_sums, visible_product
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.operations import BACKWARD_OPERATIONS, CONSTANT, OPERATIONS, SAVED, is_harmless, operation
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.errors import BadInput
from tests.attention.backward.cases import draw_all
from tests.cases import POLICIES, draw
from tests.oracles.table import exactly_scaled, round_exactly

DTYPES = [torch.float32, torch.float64]


def running_sum(terms: list[Fraction], dot: Dot) -> float:
    """The terms added in groups of `every`, the sum rounded to the format after each group."""
    every = dot.every or len(terms)
    cast, total = dot.accumulate, Fraction(0)
    assert cast.overflow is not None
    for start in range(0, len(terms), every):
        exact = float(total + sum(terms[start : start + every]))  # exact: 53 bits hold every sum of these small terms
        total = Fraction(round_exactly(exact, cast.to, cast.rounding, cast.overflow))
    return float(total)


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from(["bf16", "fp16:toward_zero", "e5m2:up", "e8m13:toward_zero", "e4m3fn:saturate", "fp32", "e5m2:odd"]),
    st.sampled_from([None, 1, 2, 7, 16, 64]),
    st.sampled_from(DTYPES),
    st.integers(0, 999),
)
def test_running_sum_is_rounded_after_every_so_many_products(
    rows: int, inner: int, columns: int, cast: str, every: int | None, dtype: torch.dtype, seed: int
) -> None:
    """With factors of at most 4 bits every sum of 70 products is exact in either carrier, so only the casts round."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 10, (rows, inner), generator=generator).to(dtype) / 8
    b = torch.randint(-9, 10, (inner, columns), generator=generator).to(dtype) / 4
    dot = Dot(Cast.parse(cast), every)
    for i in range(rows):
        for j in range(columns):
            terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i].tolist(), b[:, j].tolist(), strict=True)]
            assert dot(a, b)[i, j].item() == running_sum(terms, dot)
    ones = torch.ones(inner, 1, dtype=dtype)
    assert torch.equal(dot.sum(a), dot(a, ones))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 17, 300, 1100])
def test_native_product_is_within_its_bound(inner: int, dtype: torch.dtype) -> None:
    """A sum of K products in any order is off by at most `K u sum |a| |b|` to first order (Higham 2002, section 3.1)."""
    a, b = torch.randn(3, 20, inner, dtype=dtype), torch.randn(3, inner, 9, dtype=dtype)
    u = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}[dtype]
    bound = (inner + 1) * u * (a.double().abs() @ b.double().abs())
    exact = torch.tensor(
        [
            [float(sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))) for column in b[0].T.tolist()]
            for row in a[0, :2].tolist()
        ],
        dtype=torch.float64,
    )
    assert bool(((product(a, b)[0, :2].double() - exact).abs() <= bound[0, :2]).all())
    assert bool(((Dot(Cast(FP32)).sum(a)[..., 0] - a.double().sum(-1)).abs() <= (inner + 1) * 2.0**-24 * a.abs().sum(-1)).all())


@settings(max_examples=100)
@given(
    st.tuples(st.sampled_from([1, 2, 3, 24]), st.integers(1, 3)),
    st.integers(1, 70),
    st.one_of(st.integers(1, 130), st.integers(190, 300), st.integers(500, 1600)),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    batch: tuple[int, int], rows: int, inner: int, columns: int, transposed: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Bit for bit: any slice of rows, one batch entry alone of few or many, and a plain matrix, from either layout of b."""
    a = torch.randn(*batch, rows, inner, dtype=dtype)
    b = torch.randn(batch[0], 1, columns, inner, dtype=dtype).mT
    b = b if transposed else b.contiguous()
    whole = product(a, b)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(product(a[..., first:last, :], b), whole[..., first:last, :])
    assert torch.equal(product(a[-1:], b[-1:]), whole[-1:])
    assert torch.equal(product(a[0, -1], b[0, 0]), whole[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["AVX2", "COMPATIBLE"])
def test_nor_by_other_kernels_of_mkl(kernels: str) -> None:
    """In a process of its own with two threads: MKL chooses when it is loaded.

    By AVX2 the last two of 32 rows have other bits than the same rows elsewhere.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--threads", "2"]
    command += [str(Path(__file__)), "-k", "rows_beside"]
    environment = {**os.environ, "MKL_CBWR": kernels, "OMP_WAIT_POLICY": "passive"}
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=root)
    assert ran.returncode == 0, ran.stdout[-2000:]


@pytest.mark.parametrize("every", [None, 3])
def test_a_dot_leaves_its_operands_alone(every: int | None) -> None:
    a, b = torch.randn(17, 20), torch.randn(20, 18)
    kept = a.clone(), b.clone()
    dot = Dot(Cast(BF16), every)
    dot(a, b)
    dot.sum(a)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


def test_a_sum_in_bf16_stagnates() -> None:
    """1 + 1 + ... one at a time stops at 2^8, where the next integer is no longer a number of the format."""
    ones = torch.ones(1, 1000)
    assert Dot.parse("bf16@1").sum(ones).item() == 256
    assert Dot.parse("bf16").sum(ones).item() == 1000


@given(
    st.sampled_from(["fp32", "bf16", "e8m13:toward_zero", "e4m3fn:saturate", "fp16:stochastic:seed=4"]),
    st.one_of(st.none(), st.integers(1, 999)),
)
def test_dot_text_reads_back(cast: str, every: int | None) -> None:
    dot = Dot(Cast.parse(cast), every)
    assert Dot.parse(str(dot)) == dot
    assert str(dot) == (cast if every is None else f"{cast}@{every}")


@pytest.mark.parametrize(
    ("text", "field"),
    [("bf16@", "dot"), ("bf16@x", "dot"), ("bf16@-1", "dot"), ("bf16@0", "precision.every"), ("bf17@4", "format")],
)
def test_impossible_dots_are_refused(text: str, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: "):
        Dot.parse(text)


BOTH = pytest.mark.parametrize("policy", [Precision, BackwardPrecision])


@BOTH
def test_presets_say_what_their_names_say(policy: type[Policy]) -> None:
    steps = policy.golden().steps()
    assert set(policy.uniform(BF16).steps().values()) == {"bf16"}
    assert policy.golden() == policy.uniform(FP64) == policy.kernel(FP64) == policy.eager(FP64)
    stored = ("inputs", "probabilities", "output", "ds")
    assert policy.kernel(BF16).steps() == {step: "bf16" if step in stored else "fp32" for step in steps}
    wide = ("exponential", "rescale", "row_sum") if policy is Precision else ("exponential", "delta", "difference")
    assert policy.eager(FP16).steps() == {step: "fp32" if step in wide else "fp16" for step in steps}
    assert policy.kernel(BF16).format == BF16
    assert isinstance(Precision.fp8().inputs, Quantised)
    assert Precision.fp8().probabilities == Cast(E4M3FN, overflow=Overflow.SATURATE) == BackwardPrecision.kernel(E4M3FN).ds
    assert Precision.fp8().format == Precision.int8().format == FP16


EIGHT_BITS = [E4M3FN, E5M2, Format(3, 4), E2M1, INT8, INT4]


@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=str)
def test_kernels_of_eight_bits_saturate_and_tensor_operations_do_not(fmt: Format) -> None:
    """Inputs, P and output beyond the largest number are the largest number, in `kernel`; torch's own casts differ by format."""
    kernel = Precision.kernel(fmt)
    for step in (kernel.inputs, kernel.probabilities, kernel.output):
        assert isinstance(step, Cast)
        assert step(torch.tensor([1e30, -math.inf])).tolist() == [fmt.max, -fmt.max]
    for policy in (Precision.uniform(fmt), Precision.eager(fmt)):
        assert policy.probabilities == policy.inputs == Cast(fmt)


@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, FP32, FP64, Format(4, 4), Format(5, 3)], ids=str)
def test_wider_kernels_overflow_as_ieee_does(fmt: Format) -> None:
    assert Precision.kernel(fmt).probabilities == Cast(fmt)


@pytest.mark.parametrize("name", Precision.SHIPPED)
def test_quantised_kernels_never_overflow_in_inputs_or_p(name: str) -> None:
    precision = Precision.parse(name)
    assert isinstance(precision.inputs, Quantised)
    large = precision.probabilities(torch.full((1, 64), 1e6))
    # P in FP16 cannot overflow: nothing scales it
    assert bool(large.isfinite().all()) or precision.probabilities == Cast(FP16)
    q, k, v = draw((1, 2, 1, 40, 70, 16))
    for tensor in precision.round_inputs(1e9 * q, 1e9 * k, v):
        assert bool(tensor.isfinite().all())


@BOTH
def test_every_preset_has_a_name_that_is_it(policy: type[Policy]) -> None:
    formats = [f"{kind}{fmt}" for kind in ("", "eager_", "kernel_") for fmt in (E4M3FN, E5M2, FP16, BF16, TF32, FP32, FP64)]
    for name in (*policy.SHIPPED, *formats):
        made = policy.parse(name)
        assert made.name != "custom"
        assert policy.parse(made.name) == made
    assert policy.parse("golden") == policy.golden()
    assert policy.parse("uniform_e5m3") == policy.parse("e5m3") == policy.uniform(Format(5, 3))
    assert policy.kernel(BF16).with_step(scores="bf16@24").describe() == {
        **policy.kernel(BF16).steps(),
        "scores": "bf16@24",
        "name": "custom",
    }


def test_a_microscaled_p_needs_no_more_than_its_row() -> None:
    assert str(Precision.kernel(BF16).with_step(probabilities=MICROSCALED["mxfp4"]).probabilities) == "mxfp4"
    with pytest.raises(BadInput, match=r"^precision\.probabilities: 'nvfp4'"):
        Precision.kernel(BF16).with_step(probabilities=MICROSCALED["nvfp4"])


@BOTH
@pytest.mark.parametrize("name", ["", "bf17", "kernel", "kernel_", "flash_bf16", "kernel_golden", "fp8_e4m3fn", "int8_"])
def test_unknown_presets_are_refused(policy: type[Policy], name: str) -> None:
    with pytest.raises(BadInput, match="^precision: "):
        policy.parse(name)


@BOTH
def test_one_step_at_a_time(policy: type[Policy]) -> None:
    base = policy.kernel(BF16)
    dots = ("scores", "row_sum", "values", "dp", "delta", "dq", "dk", "dv")
    for step in base.steps():
        ablated = base.with_step(**{step: TF32})
        assert [f.name for f in fields(base) if getattr(base, f.name) != getattr(ablated, f.name)] == [step]
        assert isinstance(getattr(ablated, step), Dot) == (step in dots)
    assert [str(cast) for cast in base.casts()] == list(base.steps().values())


@pytest.mark.parametrize(
    ("step", "given", "becomes"),
    [
        ("row_sum", "bf16@64", Dot(Cast(BF16), 64)),
        ("row_sum", BF16, Dot(Cast(BF16))),
        ("values", Cast(FP16, Rounding.TOWARD_ZERO), Dot(Cast(FP16, Rounding.TOWARD_ZERO))),
        ("scores", Dot(Cast(BF16), 4), Dot(Cast(BF16), 4)),
        ("output", "fp16:toward_zero", Cast(FP16, Rounding.TOWARD_ZERO)),
        ("inputs", "mxfp4", Quantised(MICROSCALED["mxfp4"])),
        ("probabilities", "mxfp4", MICROSCALED["mxfp4"]),
    ],
)
def test_a_step_from_what_says_it(step: str, given: Any, becomes: object) -> None:
    base = Precision.kernel(BF16)
    assert getattr(base.with_step(**{step: given}), step) == becomes
    assert base.with_step() == base


@pytest.mark.parametrize(
    ("step", "given", "mend"),
    [
        ("row_sums", "bf16", "there is no such step; give one of inputs, scores, "),
        ("output", Dot(Cast(BF16)), "give a Cast, a format"),
        ("output", "mxfp4", ""),
        ("accumulator", MICROSCALED["mxfp4"], "give a Cast"),
        ("scores", MICROSCALED["mxfp4"], "give a Dot"),
        ("values", "bf16@x", "after @ comes"),
    ],
)
def test_what_is_no_step_is_refused_by_name(step: str, given: Any, mend: str) -> None:
    with pytest.raises(BadInput, match=rf"^precision\.{step}: .*{mend}"):
        Precision.kernel(BF16).with_step(**{step: given})


@pytest.mark.parametrize(("step", "given"), [("values", "bf16"), ("inputs", "mxfp4"), ("ds", "bf16@8"), ("dq", "bf16@x")])
def test_steps_of_the_backward_pass_are_refused_by_name(step: str, given: str) -> None:
    with pytest.raises(BadInput, match=rf"^precision\.{step}: "):
        BackwardPrecision.kernel(BF16).with_step(**{step: given})


@pytest.mark.parametrize(
    ("precision", "carrier"),
    [
        (Precision.uniform(FP32), torch.float32),
        (Precision.uniform(TF32), torch.float32),
        (Precision.kernel(FP16), torch.float32),
        (Precision.fp8(), torch.float32),
        (Precision.int8(), torch.float32),
        (Precision.golden(), torch.float64),
        (Precision.uniform(Format(8, 11)), torch.float64),
        (Precision.uniform(Format(11, 7)), torch.float64),
        (Precision.kernel(BF16).with_step(scores=Dot.parse("e8m13:toward_zero@16")), torch.float64),
    ],
)
def test_the_carrier_leaves_roundings_innocuous(precision: Precision, carrier: torch.dtype) -> None:
    assert precision.carrier is carrier
    assert all(t.dtype is carrier for t in precision.round_inputs(*draw((1, 1, 1, 2, 3, 4))))


def test_every_sum_product_and_quotient_of_fp8_is_rounded_once_by_single_precision() -> None:
    """All pairs. FP64 holds sums and products exactly; its quotient of 4-bit numbers is no nearer to a tie than 2^-10."""
    values = E4M3FN.values()
    a, b = values[:, None], values[None, :]
    narrow_a, narrow_b = a.float(), b.float()
    for mode in (Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO, Rounding.ODD):
        cast = Cast(E4M3FN, mode)
        for narrow, wide in (
            (narrow_a + narrow_b, a + b),
            (narrow_a - narrow_b, a - b),
            (narrow_a * narrow_b, a * b),
            (narrow_a / narrow_b, a / b),
        ):
            assert torch.equal(cast(narrow).double().nan_to_num(7e9), cast(wide).nan_to_num(7e9))


@pytest.mark.parametrize("fmt", [FP16, TF32, BF16, E5M2], ids=str)
def test_eleven_bits_are_rounded_once_by_single_precision(fmt: Format) -> None:
    """24 >= 2 * 11 + 2 (Figueroa 1995): FP32 then the format is FP64 then the format, for numbers of the format."""
    cast = Cast(fmt)
    a, b = cast(torch.randn(2, 1 << 17)) * 2.0 ** torch.randint(-3, 4, (2, 1))
    for narrow, wide in (
        (a + b, a.double() + b.double()),
        (a * b, a.double() * b.double()),
        (a / b, a.double() / b.double()),
    ):
        assert torch.equal(cast(narrow).double(), cast(wide))


def test_equal_columns_have_equal_products_in_single_precision() -> None:
    """What ties between scores rest on: the place of a key changes nothing."""
    for inner, columns in ((8, 7), (24, 40), (64, 64), (80, 23), (128, 17), (200, 100), (600, 33)):
        a, column = torch.randn(37, inner), torch.randn(inner, 1)
        result = product(a, column.expand(inner, columns))
        assert torch.equal(result, result[:, :1].expand(37, columns))
        b = torch.randn(inner, columns)
        order = torch.randperm(columns)
        assert torch.equal(product(a, b[:, order]), product(a, b)[:, order])


def test_what_a_row_does_not_see_has_no_part_in_its_product() -> None:
    p, v = torch.rand(2, 1, 3, 5, 7), torch.randn(2, 1, 1, 7, 4)
    seen = torch.rand(2, 1, 1, 5, 7) < 0.5
    p = p * seen
    clean = visible_product(p, v, seen)
    wild = v.clone()
    wild[0, 0, 0, 2], wild[1, 0, 0, 5, 1] = math.nan, math.inf
    got = visible_product(p, wild, seen)
    touched = torch.zeros(2, 1, 1, 5, 4, dtype=torch.bool)
    touched[0, 0, 0, :, :] = seen[0, 0, 0, :, 2, None]
    touched[1, 0, 0, :, 1] = seen[1, 0, 0, :, 5]
    touched = touched.expand(got.shape)
    assert bool((~got[touched].isfinite()).all())
    assert torch.allclose(got[~touched], clean[~touched], rtol=1e-6, atol=1e-6)  # the order of a sum may change with its terms
    assert bool(got[~touched].isfinite().all())


def test_a_long_row_is_summed_alike_alone_and_among_others() -> None:
    rows = torch.rand(3, 300_000)
    assert torch.equal(row_sums(rows[1:2]), row_sums(rows)[1:2])


@BOTH
@pytest.mark.parametrize("text", ["fp64:toward_zero", "fp64:saturate", "e11m51", "fp64:stochastic"])
def test_what_fp64_cannot_round_is_refused(policy: type[Policy], text: str) -> None:
    with pytest.raises(BadInput, match="^precision: "):
        policy.golden().with_step(output=Cast.parse(text))


def test_twelve_bits_would_be_rounded_twice() -> None:
    """The bound is sharp enough to matter: at 12 bits FP32 products (24 bits) are exact, but quotients and sums err."""
    fmt = Format(8, 12)
    a, b = Cast(fmt)(torch.randn(2, 1 << 17))
    assert not torch.equal(Cast(fmt)(a + b * 2.0**-12).double(), Cast(fmt)(a.double() + b.double() * 2.0**-12))
    assert Precision.uniform(fmt).carrier is torch.float64


def test_inputs_are_rounded_before_they_are_narrowed() -> None:
    x = torch.full((1, 1, 16, 16), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    for rounded in Precision.kernel(BF16).round_inputs(x, x, x):
        assert rounded.dtype is torch.float32
        assert bool((rounded == 1 + 2.0**-7).all())


@pytest.mark.parametrize("name", POLICIES)
def test_rounded_inputs_are_rounded(name: str) -> None:
    precision = POLICIES[name]()
    if isinstance(precision.inputs, Cast):
        q, k, v = precision.round_inputs(*draw((1, 2, 1, 5, 7, 4)))
        assert all(torch.equal(again, t) for again, t in zip(precision.round_inputs(q, k, v), (q, k, v), strict=True))


def test_a_policy_prints_its_steps() -> None:
    assert "probabilities=bf16" in repr(Precision.kernel(BF16))
    assert repr(BackwardPrecision.kernel(BF16)).startswith("BackwardPrecision(inputs=bf16, scores=fp32, ")
    assert repr(Dot.parse("bf16@4")) == "Dot(bf16@4)"


def test_both_passes_round_inputs_alike() -> None:
    inputs = draw_all((1, 2, 1, 5, 7, 4))
    backward, forward = BackwardPrecision.kernel(BF16), Precision.kernel(BF16)
    rounded = backward.round_inputs(*inputs)
    assert backward.carrier is torch.float32
    for mine, other in zip(rounded, forward.round_inputs(*inputs[:3]), strict=False):
        assert torch.equal(mine, other)
    assert all(torch.equal(again, x) for again, x in zip(backward.round_inputs(*rounded), rounded, strict=True))
    assert len(set(BackwardPrecision.throughout(Cast.parse("bf16:stochastic")).round_inputs(*[inputs[0]] * 4))) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 0.1, 0.3, 1 / math.sqrt(128), math.log2(math.e) / 8, 0.125])
@pytest.mark.parametrize("cast", ["bf16", "bf16:toward_zero", "fp16", "e4m3fn:saturate", "int8", "int8:toward_zero", "fp32"])
def test_scaled_queries_are_the_exact_product_rounded_once(cast: str, scale: float, dtype: torch.dtype) -> None:
    """Against rational arithmetic: every significand of the format, or 2048 of them, over 8 binades; 0.1 and 0.7 make ties."""
    to = Cast.parse(cast)
    significand = torch.arange(2 ** min(to.to.precision, 11), dtype=dtype)
    q = significand if to.to.is_integer else torch.ldexp(significand, torch.arange(len(significand)) % 8 - 8)
    q = torch.cat([q, -q])[None, :]
    assert torch.equal(to(q), q), "the queries are numbers of the format"
    expected = exactly_scaled(q, scale, to)
    assert torch.equal(Precision.kernel(BF16).with_step(inputs=to).scale_queries(q, scale), expected)


def test_scaled_queries_draw_other_random_numbers_than_the_queries() -> None:
    """At 128.5 and at 128.5 or 129.504 half go up, independently: six deviations of a correlation of 4096 pairs."""
    policy = Precision.kernel(BF16).with_step(inputs="bf16:stochastic")
    x = torch.full((1, 1, 64, 64), 128.5, dtype=torch.float64)
    q = policy.round_inputs(x, x, x)[0]
    scaled = policy.scale_queries(q, 1 + 2**-8)
    first, second = (q > 128).double(), (scaled > q).double()
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(float(correlation)) < 6 / math.sqrt(x.numel())


def test_every_operation_is_of_steps_that_there_are() -> None:
    for table, kind in ((OPERATIONS, Precision), (BACKWARD_OPERATIONS, BackwardPrecision)):
        names = {field.name for field in fields(kind)}
        for step, _, left, right in table.values():
            assert step in names
            assert {left, right} <= names | {CONSTANT, SAVED}


def test_what_a_pass_saved_may_be_any_number() -> None:
    """So a product with it takes the careful way, whatever the formats of the policy are."""
    policy = BackwardPrecision.uniform(BF16)
    names = [name for name, (_, _, _, right) in BACKWARD_OPERATIONS.items() if right == SAVED]
    assert len(names) == 4
    for name in names:
        assert not operation(policy, torch.float32, name, 1.0, BACKWARD_OPERATIONS).is_harmless
    assert is_harmless(policy, torch.float32, "dq_sum", (), BACKWARD_OPERATIONS)
    assert not is_harmless(policy, torch.float32, "delta", (), BACKWARD_OPERATIONS)
    assert is_harmless(BackwardPrecision.kernel(BF16), torch.float32, "delta", (0.3,), BACKWARD_OPERATIONS)
