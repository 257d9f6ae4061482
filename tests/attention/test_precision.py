"""Dots against running sums kept in rational arithmetic, rows against their neighbours, and the policies."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, INT8, TF32, Format
from numdev.arithmetic.products import Dot, product, visible_product
from numdev.arithmetic.quantise import MICROSCALED, Quantised
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.errors import BadInput
from tests.cases import draw
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


@settings(max_examples=12)
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
@pytest.mark.parametrize("inner", [17, 300])
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


@settings(max_examples=60)
@given(
    st.tuples(st.sampled_from([1, 2, 3, 24]), st.integers(1, 3)),
    st.one_of(st.integers(1, 70), st.integers(17, 96)),
    st.one_of(st.sampled_from([65, 129, 193]), st.integers(1, 130), st.integers(190, 300), st.integers(500, 1600)),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    batch: tuple[int, int], rows: int, inner: int, columns: int, transposed: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Bit for bit: any slice of rows, one batch entry alone of few or many, and a plain matrix, from either layout of b.

    Of one product more than whole sums MKL on an Intel Xeon adds the last with one rounding or with two, by their strides.
    """
    a = torch.randn(*batch, rows, inner, dtype=dtype)
    b = torch.randn(batch[0], 1, columns, inner, dtype=dtype).mT
    b = b if transposed else b.contiguous()
    whole = product(a, b)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(product(a[..., first:last, :], b), whole[..., first:last, :])
    assert torch.equal(product(a[-1:], b[-1:]), whole[-1:])
    assert torch.equal(product(a[0, -1], b[0, 0]), whole[0, -1])


def test_dots_as_text() -> None:
    """1 + 1 + ... one at a time stops at 2^8 in BF16, where the next integer is no longer a number of the format."""
    for text in ("fp32", "bf16@8", "e8m13:toward_zero@16", "fp16:stochastic:seed=4@999"):
        assert str(Dot.parse(text)) == text
    ones = torch.ones(1, 1000)
    assert (Dot.parse("bf16@1").sum(ones).item(), Dot.parse("bf16").sum(ones).item()) == (256, 1000)
    assert torch.equal(ones, torch.ones(1, 1000)), "operands are left alone"
    for text, field in (
        ("bf16@", "dot"),
        ("bf16@x", "dot"),
        ("bf16@-1", "dot"),
        ("bf16@0", "precision.every"),
        ("bf17@4", "format"),
    ):
        with pytest.raises(BadInput, match=f"^{field}: "):
            Dot.parse(text)


BOTH = pytest.mark.parametrize("policy", [Precision, BackwardPrecision])


@BOTH
def test_presets_say_what_their_names_say(policy: type[Policy]) -> None:
    """Kernels of eight bits and fewer saturate in what they store; tensor operations and wider kernels overflow."""
    steps = policy.golden().steps()
    stored = ("inputs", "probabilities", "output", "ds")
    wide = ("exponential", "rescale", "row_sum") if policy is Precision else ("exponential", "delta", "difference")
    assert policy.golden() == policy.uniform(FP64) == policy.kernel(FP64) == policy.eager(FP64)
    for fmt in (BF16, FP16, E4M3FN, E5M2, Format(3, 4), INT8):
        kept = f"{fmt}:saturate" if fmt.bits <= 8 and not fmt.is_integer else str(Cast(fmt, overflow=Overflow.SATURATE))
        kept = kept if fmt.bits <= 8 else str(fmt)
        assert set(policy.uniform(fmt).steps().values()) == {str(fmt)}
        assert policy.kernel(fmt).steps() == {step: kept if step in stored else "fp32" for step in steps}
        assert policy.eager(fmt).steps() == {step: "fp32" if step in wide else str(fmt) for step in steps}
    assert policy.kernel(BF16).format == BF16
    assert repr(policy.kernel(BF16)).startswith(f"{policy.__name__}(inputs=bf16, scores=fp32, ")
    for name in ("", "bf17", "kernel", "kernel_", "flash_bf16", "kernel_golden", "fp8_e4m3fn", "int8_"):
        with pytest.raises(BadInput, match="^precision: "):
            policy.parse(name)
    for text in ("fp64:toward_zero", "e11m51", "fp64:stochastic"):
        with pytest.raises(BadInput, match="^precision: "):
            policy.golden().with_step(output=Cast.parse(text))


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


STEPS: list[tuple[type[Policy], str, Any, object]] = [
    (Precision, "row_sum", "bf16@64", Dot(Cast(BF16), 64)),
    (Precision, "row_sum", BF16, Dot(Cast(BF16))),
    (Precision, "values", Cast(FP16, Rounding.TOWARD_ZERO), Dot(Cast(FP16, Rounding.TOWARD_ZERO))),
    (Precision, "output", "fp16:toward_zero", Cast(FP16, Rounding.TOWARD_ZERO)),
    (Precision, "inputs", "mxfp4", Quantised(MICROSCALED["mxfp4"])),
    (Precision, "probabilities", "mxfp4", MICROSCALED["mxfp4"]),
    (Precision, "probabilities", MICROSCALED["nvfp4"], "'nvfp4'"),  # its scale needs the largest P of all rows
    (Precision, "row_sums", "bf16", "there is no such step; give one of inputs, scores, "),
    (Precision, "output", Dot(Cast(BF16)), "give a Cast, a format"),
    (Precision, "accumulator", MICROSCALED["mxfp4"], "give a Cast"),
    (Precision, "scores", MICROSCALED["mxfp4"], "give a Dot"),
    (Precision, "values", "bf16@x", "after @ comes"),
    *((BackwardPrecision, step, text, "") for step, text in (("values", "bf16"), ("inputs", "mxfp4"), ("ds", "bf16@8"))),
]


@pytest.mark.parametrize(("policy", "step", "value", "becomes"), STEPS)
def test_a_step_from_what_says_it(policy: type[Policy], step: str, value: Any, becomes: object) -> None:
    """Or why not, by name."""
    if isinstance(becomes, str):
        with pytest.raises(BadInput, match=rf"^precision\.{step}: .*{becomes}"):
            policy.kernel(BF16).with_step(**{step: value})
    else:
        assert getattr(policy.kernel(BF16).with_step(**{step: value}), step) == becomes


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
    """Of a format of 12 bits FP32 would round sums twice; numbers of the inputs' format are rounded to themselves."""
    assert precision.carrier is carrier
    rounded = precision.round_inputs(*draw((1, 1, 1, 2, 3, 4)))
    assert all(t.dtype is carrier for t in rounded)
    if isinstance(precision.inputs, Cast):
        assert all(torch.equal(again, t) for again, t in zip(precision.round_inputs(*rounded), rounded, strict=True))


def test_both_passes_round_inputs_alike() -> None:
    """Before they are narrowed to the carrier; each input is a rounding event of its own."""
    backward, forward = BackwardPrecision.kernel(BF16), Precision.kernel(BF16)
    x = torch.full((1, 1, 16, 16), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    for rounded in (*forward.round_inputs(x, x, x), *backward.round_inputs(x, x, x, x)):
        assert rounded.dtype is torch.float32
        assert bool((rounded == 1 + 2.0**-7).all())
    assert (
        len(set(BackwardPrecision.throughout(Cast.parse("bf16:stochastic")).round_inputs(*[draw((1, 1, 1, 5, 5, 4))[0]] * 4)))
        == 4
    )


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 1 / math.sqrt(128)])
@pytest.mark.parametrize("cast", ["bf16", "bf16:toward_zero", "e4m3fn:saturate", "int8", "fp32"])
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
