"""Dots against running sums kept in rational arithmetic, rows against their neighbours, and the policies."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, INT8, TF32, Format
from numdev.arithmetic.products import Dot, product
from numdev.arithmetic.quantise import MICROSCALED, Quantised
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.errors import BadInput
from tests.cases import draw
from tests.oracles.table import round_exactly

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
    for text in ("fp32", "bf16@8", "e8m13:toward_zero@16", "fp16:stochastic:seed=4@999", "hopper", "blackwell@64"):
        assert str(Dot.parse(text)) == text
    ones = torch.ones(1, 1000)
    assert (Dot.parse("bf16@1").sum(ones).item(), Dot.parse("bf16").sum(ones).item()) == (256, 1000)
    assert torch.equal(ones, torch.ones(1, 1000)), "operands are left alone"
    refused = {
        "bf16@": "dot",
        "bf16@x": "dot",
        "bf16@-1": "dot",
        "bf16@0": "precision.every",
        "bf17@4": "format",
        "hopper:up": "format",
    }
    for text, field in refused.items():
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


NARROW = [Precision.uniform(FP32), Precision.uniform(TF32), Precision.kernel(FP16), Precision.fp8(), Precision.int8()]
WIDE = [Precision.golden(), Precision.uniform(Format(8, 11)), Precision.uniform(Format(11, 7))]
WIDE += [Precision.kernel(BF16).with_step(scores=Dot.parse("e8m13:toward_zero@16"))]


@pytest.mark.parametrize("precision", [*NARROW, *WIDE])
def test_the_carrier_leaves_roundings_innocuous(precision: Precision) -> None:
    """Of a format of 12 bits FP32 would round sums twice; numbers of the inputs' format are rounded to themselves."""
    assert precision.carrier is (torch.float32 if precision in NARROW else torch.float64)
    rounded = precision.round_inputs(*draw((1, 1, 1, 2, 3, 4)))
    assert all(t.dtype is precision.carrier for t in rounded)
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


@pytest.mark.parametrize(
    ("preset", "step", "text"),
    [
        ("kernel_fp32", "scores", "hopper"),  # no such operands
        ("kernel_bf16", "row_sum", "hopper"),  # no product of two matrices
        ("kernel_bf16", "scores", "hopper@24"),  # an instruction and a half
        ("kernel_e4m3fn", "values", "ampere"),  # no FP8 before Ada
        ("sage3", "values", "blackwell"),  # microscaled
        ("sage2", "values", "hopper"),  # a scale for a channel is no factor of a product
        ("sage1", "scores", "hopper"),  # integers
    ],
)
def test_tensor_cores_that_cannot_do_a_product_are_refused(preset: str, step: str, text: str) -> None:
    with pytest.raises(BadInput, match=rf"^precision\.{step}: "):
        Precision.parse(preset).with_step(**{step: text})


def test_tensor_cores_get_the_formats_of_both_factors() -> None:
    """P may be in another FP8 format than V."""
    mixed = Precision.kernel(E4M3FN).with_step(probabilities="e5m2", values="hopper", scores="hopper@32")
    assert {step: unit.smallest for step, unit in mixed.units.items()} == {"scores": (-6, -6), "values": (-14, -6)}
    backward = BackwardPrecision.kernel(BF16).with_step(ds="fp16", inputs="fp16", dq="volta", dv="fp32")
    assert backward.units["dq"].products == 4
