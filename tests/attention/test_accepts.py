"""Fast paths: each has the bits of tensor operations for all that it lists, refuses the rest, and takes the runs that it should.

The lists themselves say what is tried: a listed field without a sample here fails.
"""

# mypy: disable-error-code="call-arg,arg-type,func-returns-value"
# Inputs are unpacked, whose number mypy does not know.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import numdev as nd
from numdev import Cast, Exact, Mask, Maximum, Microscaled, Normalise, Quantised, Scale, ScaleOn, Smoothing, SumOver
from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention import instrumented, tiled
from numdev.attention.accepts import ALL, MASK, Accepts
from numdev.attention.base import Backward, Gradients, Saved
from numdev.attention.instrumented import Instrumented, InstrumentedBackward, kernel_refusal
from numdev.attention.kernels import portable
from numdev.attention.kernels.hopper.launch import refusal
from numdev.attention.kernels.launch import Kernel
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.attention.softmax import EXPONENTIALS, DeltaForm, Exponential, OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Products, Triton, TritonBackward
from numdev.errors import Unsupported
from tests.cases import POLICIES, Inputs, Sizes, draw, draw_all, lse_of, on, same

CLOSE: Sizes = (1, 2, 1, 20, 37, 24)
Inputs3 = tuple[Tensor, Tensor, Tensor]

LOOPS = [
    (Tiling(20, 13, Order.REVERSE, splits=2), OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)),
    (Tiling(16, 32), OnlineSoftmax(exp=Exponential.EXP2, scale_on=ScaleOn.QUERIES, p_scale=256.0)),
    (Tiling(16, 16), OnlineSoftmax(normalise=Normalise.EACH, maximum=Maximum.LOCAL)),  # FlashAttention-1
    (Tiling(16, 16, splits=2), OnlineSoftmax(exp=Exponential.EXP2, maximum=Maximum.LOCAL, p_scale=127.0)),
]


def whole(sizes: Sizes) -> Inputs3:
    """Inputs whose every product and sum is exact in FP32, in whatever order: scores are whole numbers of at most 4.

    So P are powers of two from 2^-8 to 1, v whole numbers of at most 4, and a sum of 64 of their products needs 8 + 2 + 6 bits.
    """
    q, k, v = draw(sizes)
    q[..., 4:] = 0
    return (3 * q).round().clamp(-1, 1), (3 * k).round().clamp(-1, 1), (2 * v).round().clamp(-4, 4)


STEPS = {"scores": "tf32:toward_zero@8", "row_sum": "fp16@8", "values": "bf16@16", "exponential": "bf16:toward_zero"}
STEPS |= {"rescale": "e5m10:flush", "accumulator": "tf32", "inputs": "fp16", "probabilities": "e4m3fn", "output": "bf16"}
EITHER = [*(POLICIES[name] for name in ("uniform_e5m2", "uniform_fp16", "eager_bf16", "narrow_sum", "fp8", "int8"))]
EITHER += [Precision.parse("fp32").with_step(**STEPS)]


@pytest.mark.parametrize("policy", EITHER)
def test_close_to_the_emulation_elsewhere(policy: Precision, device: str) -> None:
    """A last bit of FP32 can tip a rounding to the step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is further off than 4 ulp of the coarsest step at the size of the
    largest v: a tipped score moves P by u times |S|, at most 4 here, and with it the output.
    """
    tiling, softmax = LOOPS[EITHER.index(policy) % len(LOOPS)]
    inputs, mask = on(device, policy.round_inputs(*draw(CLOSE))), Mask(causal=True)
    got = Instrumented(policy, tiling, softmax)(*inputs, mask).out
    difference = (got - Tiled(policy, tiling, softmax, count=False)(*inputs, mask).out).abs()
    coarsest = max(cast.to.u for cast in policy.casts())
    assert float(difference.max()) <= 4 * 2 * coarsest * float(inputs[2].abs().max())
    assert float((difference == 0).float().mean()) > 0.9


BACKWARD_SIZES: Sizes = (1, 2, 1, 20, 24, 8)
ATTEND = Tiled(Precision.parse("kernel_fp16"), count=False)
BINARY_RECOMPUTE = Recompute(exponential=Exponential.EXP2)


def saved_whole(sizes: Sizes, mask: Mask, seed: int) -> tuple[Inputs, Saved]:
    """Inputs, O and LSE whose every product and sum is exact in FP32, in whatever order, with a factor of the scores of 1.

    The first four numbers of a row of q and k are -1, 0 or 1, two of v -2 to 2, two of do and O -3 to 3; the rest are 0. So S is
    a whole number of at most 4, and P = 2^(S - LSE) a power of two from 2^-8 to 1, LSE being 4 in binary units; dP and delta are
    whole, at most 12 and 18. A sum over 80 rows of P (dP - delta) q needs 8 + 5 + 7 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, queries, keys, dim = sizes

    def numbers(shape: tuple[int, ...], largest: int, filled: int) -> Tensor:
        drawn = torch.randint(-largest, largest + 1, shape, generator=generator).float()
        drawn[..., filled:] = 0
        return drawn

    of_queries, of_keys = (batch, heads, queries, dim), (batch, kv_heads, keys, dim)
    out = numbers(of_queries, 3, 2)
    lse = torch.full(out.shape[:3], binary_lse(4))
    seeing = mask.seeing_rows(batch, queries, keys)[:, None]
    saved = Saved(out.masked_fill(~seeing[..., None], 0.0), lse.masked_fill(~seeing, float("-inf")))
    return (numbers(of_queries, 1, 4), numbers(of_keys, 1, 4), numbers(of_keys, 2, 2), numbers(of_queries, 3, 2)), saved


def binary_lse(whole: int) -> float:
    """An FP32 number that is `whole` when it is multiplied by log2(e) in FP32."""
    near = torch.tensor(whole / LOG2_E)
    for _ in range(4):
        if float(near * LOG2_E) == whole:
            return float(near)
        near = torch.nextafter(near, torch.tensor(float("inf")))
    raise AssertionError("there is one for every power of two")


def both(
    precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, problem: tuple[Inputs, Saved], mask: Mask, device: str
) -> tuple[Gradients, Gradients]:
    """Of the kernels and of the emulation, with a scale that log2(e) takes out again."""
    inputs, (out, lse) = on(device, problem[0]), on(device, (problem[1].out, problem[1].lse))
    scale, kernel = 1.0 / LOG2_E, InstrumentedBackward(ATTEND, precision, tiling, recompute)
    emulation = TiledBackward(ATTEND, precision, tiling, recompute, count=False)
    return kernel.backward(*inputs, Saved(out, lse), mask, scale), emulation.backward(*inputs, Saved(out, lse), mask, scale)


@pytest.mark.parametrize("text", ["bf16:toward_zero", "fp16:toward_zero"])
def test_a_running_sum_is_rounded_once(text: str, device: str) -> None:
    """P of the second tile of queries are 2^-28 of the first's: FP32 has no room for both, and would round twice."""
    (inputs, saved), policy = saved_whole((1, 2, 1, 32, 20, 8), Mask(), 1), BackwardPrecision.parse("fp32")
    saved.lse[..., 16:] = binary_lse(32)
    policy = policy.with_step(dk_sum=text, dv_sum=text)
    got, expected = both(policy, Tiling(16, 16), BINARY_RECOMPUTE, (inputs, saved), Mask(), device)
    same(got, expected.tensors())


@pytest.mark.parametrize(("name", "form"), [("bf16", DeltaForm.OUTPUT), ("eager_fp16", DeltaForm.PROBABILITIES)])
def test_close_to_the_backward_emulation_elsewhere(name: str, form: DeltaForm, device: str) -> None:
    """After the instrumented forward pass. None is off by more than the tipping of every term of its sum in each step.

    There are eight steps between inputs and output: `8 * 2 u` of the sum of magnitudes, of which there are at most 40.
    """
    policy, recompute, mask = BackwardPrecision.parse(name), Recompute(form), Mask(causal=True)
    forward, inputs = Instrumented(ATTEND.precision, Tiling(16, 16)), on(device, policy.round_inputs(*draw_all(BACKWARD_SIZES)))
    got = InstrumentedBackward(forward, policy, Tiling(16, 32), recompute)(*inputs, mask)
    expected = TiledBackward(forward, policy, Tiling(16, 32), recompute, count=False)(*inputs, mask)
    assert got.kernel.startswith("numdev instrumented backward br=16 bc=32 ")
    coarsest = max(cast.to.u for cast in policy.casts())
    for key, value in expected.tensors().items():
        difference = (got.tensors()[key] - value).abs()
        assert float(difference.max()) <= 8 * 2 * coarsest * 40 * float(value.abs().max()), key
        assert float((difference == 0).float().mean()) > 0.85 or key == "delta", key


SIZES = (1, 2, 1, 5, 11, 8)

# Samples of fields for which every value is accepted, and of value objects that are one setting as a whole.
OF_FIELDS: dict[str, tuple[Any, ...]] = {
    "rescale_threshold": (0.0, 8.0),
    "p_scale": (1.0, 256.0),
    "tie_shift": (None, 2.0),
    "br": (3, 16),
    "bc": (6, 16),
    "order": tuple(Order),
    "splits": (1, 2),
    "split_size": (None,),  # which excludes splits and an order of the kernel: see test_triton.py
    "stride": (2, 3),
    "seed": (0, 9),
    "causal": (False, True),
    "window": (None, 5),
    "key_lengths": (None, (11,)),
    "every": (None, 5),
}
OF_KINDS: dict[type, tuple[Any, ...]] = {
    Cast: tuple(
        map(
            Cast.parse,
            [
                *("bf16", "fp16", "fp32", "tf32", "e5m2", "e4m3fn", "e4m3fn:saturate", "e2m1finite", "e5m7finite"),
                *("bf16:toward_zero", "fp16:up", "e5m2:down", "bf16:odd", "fp16:nearest_away", "bf16:flush", "posit8"),
                *("bf16:stochastic:seed=3", "e4m3fn:toward_zero:flush"),
            ],
        )
    ),
    Microscaled: (Microscaled.parse("mxfp8_e4m3"), Microscaled.parse("e2m1finite/16/e4m3")),
    Quantised: (
        Quantised(Cast.parse("int8"), Scale.BLOCK, 8, 4, hadamard=True, smoothing=Smoothing.K, values=Cast.parse("fp16"), seed=2),
        Quantised(Microscaled.parse("mxfp8_e4m3")),
        Quantised(Cast.parse("e4m3fn:saturate"), smoothing=Smoothing.QK, smoothing_block=4),
    ),
    Exponential: tuple(EXPONENTIALS[name] for name in ("exp", "exp2", "exp2_poly3", "exp2_fa4")),
}


def values(accepts: Accepts) -> st.SearchStrategy[Any]:
    """Value objects that are accepted."""
    if accepts.kind in OF_KINDS:
        return st.sampled_from([value for value in OF_KINDS[accepts.kind] if accepts.refusal(value) is None])
    return st.builds(accepts.kind, **{name: options(name, listed) for name, listed in accepts.listed.items()})


def options(name: str, listed: Any) -> st.SearchStrategy[Any]:
    """The values of a field that are listed."""
    if listed is ALL or isinstance(listed, range):
        return st.sampled_from([value for value in OF_FIELDS[name] if value in listed])
    each = (listed,) if isinstance(listed, Accepts) else listed
    return st.one_of([values(x) if isinstance(x, Accepts) else st.just(x) for x in each])


FORWARD, BACKWARD = portable._FORWARD.listed, portable._BACKWARD.listed
several = settings(max_examples=16)


@pytest.mark.slow
@several
@given(values(FORWARD["precision"]), values(FORWARD["tiling"]), values(FORWARD["softmax"]), values(MASK))
def test_instrumented(device: str, precision: Precision, tiling: Tiling, softmax: OnlineSoftmax, mask: Mask) -> None:
    """Inputs of which every product, sum and exponential is exact, those of `whole`; LSE, a logarithm, is left out.

    With `exp` the queries are 0, so that P = exp(0) is exact too. Of two splits one is empty, since their weights are no powers
    of two otherwise.
    """
    tiling = replace(tiling, bc=16) if tiling.splits > 1 else tiling
    precision = precision.with_step(output="fp16") if precision.is_random else precision
    q, k, v = on(device, whole(SIZES))
    q = q if softmax.exp.binary else torch.zeros_like(q)
    scale = 1.0 / softmax.log_scale
    got, expected = (each(precision, tiling, softmax)(q, k, v, mask, scale) for each in (Instrumented, Tiled))
    assert torch.equal(got.out.nan_to_num(7e7), expected.out.nan_to_num(7e7))
    assert torch.equal(lse_of(got).isinf(), lse_of(expected).isinf())


@pytest.mark.slow
@several
@given(
    values(BACKWARD["precision"]),
    values(BACKWARD["recompute"]),
    st.builds(Tiling, st.sampled_from([3, 16]), st.sampled_from([6, 16]), st.sampled_from([Order.FORWARD, Order.REVERSE])),
    values(MASK),
    st.integers(0, 99),
)
def test_instrumented_backward(
    device: str, precision: BackwardPrecision, recompute: Recompute, tiling: Tiling, mask: Mask, seed: int
) -> None:
    """As `test_instrumented`, with what `whole` saves; with `exp` the queries and LSE are 0."""
    inputs, saved = saved_whole(SIZES, mask, seed)
    if not recompute.exponential.binary:
        inputs = (torch.zeros_like(inputs[0]), *inputs[1:])
        saved = replace(saved, lse=torch.where(saved.lse.isinf(), saved.lse, 0.0))
    precision = precision.with_step(output="fp16") if precision.is_random else precision
    got, expected = both(precision, tiling, recompute, (inputs, saved), mask, device)
    same(got, expected.tensors())


def grown(value: Any, place: tuple[str, ...], novelty: int) -> Any:
    """`value` whose part at `place` is of a class with one more field: 0 by default, or the cast of one more step."""
    if place:
        return replace(value, **{place[0]: grown(getattr(value, place[0]), place[1:], novelty)})
    kind = type(value)
    default, held = (Cast(BF16), Cast(FP16 if novelty else BF16)) if isinstance(value, Policy) else (0, novelty)
    more = make_dataclass(kind.__name__, [("novelty", Any, field(default=default))], bases=(kind,), frozen=True, repr=False)
    return more(**{each.name: getattr(value, each.name) for each in fields(value)}, novelty=held)


def places(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every value object within `value`, itself included."""
    yield place
    for each in fields(value):
        if is_dataclass(inner := getattr(value, each.name)):
            yield from places(inner, (*place, each.name))


PLAIN, SOFTMAX = Precision.uniform(BF16), OnlineSoftmax(exp=Exponential.EXP2)
QUANTISED = PLAIN.with_step(inputs=Quantised(Cast.parse("e4m3fn:saturate"), values=Microscaled.parse("mxfp8_e4m3")))
LISTED = PLAIN.with_step(inputs="posit8")
OF_BACKWARD = BackwardPrecision.uniform(BF16), Tiling(16, 16), Recompute(exponential=Exponential.EXP2)
KERNEL = Instrumented(PLAIN, Tiling(16, 16), SOFTMAX)
KERNEL_BACKWARD = InstrumentedBackward(Exact(), *OF_BACKWARD)
TRITON = Triton(br=16, bc=16, kernel=Kernel.PORTABLE)
TRITON_BACKWARD = TritonBackward(Triton(), br=16, bc=16, kernel=Kernel.PORTABLE)


def automatic(kernel: Instrumented, mask: Mask) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instrumented, "_FEWEST_TILES", 1)
        return kernel_refusal(kernel, *draw(SIZES), mask, 0.3)


def by_name(variant: Any, mask: Mask) -> str | None:
    try:
        variant(*inputs_of(variant), mask, 0.3)
    except Unsupported as error:
        return str(error)
    return None


def inputs_of(variant: Any) -> tuple[Tensor, ...]:
    return draw_all(SIZES) if isinstance(variant, Backward) else draw(SIZES)


def hopper(settings: Any, mask: Mask) -> str | None:
    names = ("q", "k", "v", "do") if isinstance(settings, Backward) else ("q", "k", "v")
    return refusal(settings, mask, **dict.fromkeys(names, torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)))


PATHS: list[tuple[Callable[[Any, Mask], str | None], Any]] = [
    *((automatic, replace(KERNEL, precision=policy)) for policy in (PLAIN, QUANTISED, LISTED)),
    *((by_name, variant) for variant in (KERNEL, KERNEL_BACKWARD, TRITON, TRITON_BACKWARD)),
    (hopper, Triton()),
    (hopper, TritonBackward(Triton())),
]


@pytest.mark.parametrize(("path", "variant"), PATHS)
def test_a_field_that_is_added_is_refused_unless_it_has_its_default(
    path: Callable[[Any, Mask], str | None], variant: Any, device: str
) -> None:
    """But for formats and forward passes."""
    for place in places(variant):
        if place and place[0] not in ("fmt", "output", "forward"):
            assert "novelty" in str(path(grown(variant, place, 1), Mask())), place
            assert path is by_name or path(grown(variant, place, 0), Mask()) is None, place
    assert "novelty" in str(path(variant, grown(Mask(), (), 1)))
    assert path is by_name or path(variant, grown(Mask(), (), 0)) is None


POLYNOMIAL = EXPONENTIALS["exp2_fa4"]
# A variant, a setting of it by its place, and a value that its kernel does not implement.
REFUSED: list[tuple[Any, str, Any]] = [
    (KERNEL, "precision", Precision.parse("fp64")),
    (KERNEL, "precision", PLAIN.with_step(row_sum="e8m13")),
    *((KERNEL, "precision.probabilities", text) for text in ("mxfp8_e4m3", "posit8", "bf16:stochastic")),
    (KERNEL, "precision.accumulator", "bf16:up"),
    (KERNEL, "precision.quantise.smoothing", Precision.parse("sage3")),
    (KERNEL_BACKWARD, "precision", BackwardPrecision.golden()),
    (KERNEL_BACKWARD, "precision.ds", "bf16:stochastic"),
    *((each, "tiling.order", Order.RANDOM) for each in (KERNEL, KERNEL_BACKWARD, TRITON, TRITON_BACKWARD)),
    *((each, side, 512) for each in (KERNEL, KERNEL_BACKWARD, TRITON, TRITON_BACKWARD) for side in ("tiling.br", "tiling.bc")),
    *((each, "softmax.exp", POLYNOMIAL) for each in (KERNEL, TRITON)),
    *((each, "recompute.exponential", POLYNOMIAL) for each in (KERNEL_BACKWARD, TRITON_BACKWARD)),
    *((each, "softmax.tie_shift", 2.0) for each in (KERNEL, TRITON)),
    *((each, "softmax.sum_over", SumOver.PROBABILITIES) for each in (KERNEL, TRITON)),
    (TRITON, "softmax.scale_on", ScaleOn.QUERIES),
    (TRITON, "attention.products", Products.TF32),
    (TRITON_BACKWARD, "recompute.output", OutputForDelta.UNROUNDED),
    (Triton(kernel=Kernel.HOPPER), "attention.kernel", FP32),
    *((each, "problem.head_dim", 300) for each in (KERNEL, TRITON, TRITON_BACKWARD)),
]


@pytest.mark.parametrize(("variant", "setting", "value"), REFUSED)
def test_what_a_kernel_does_not_implement_is_refused_by_name(variant: Any, setting: str, value: Any, device: str) -> None:
    """And `Tiled`, which would take the instrumented kernel for its speed, goes without it."""
    group, _, name = setting.partition(".")
    dim = value if setting == "problem.head_dim" else 16
    if isinstance(value, Policy):
        variant = replace(variant, precision=value)
    elif group == "precision":
        variant = replace(variant, precision=variant.precision.with_step(**{name: value}))
    elif setting == "attention.kernel":
        variant = replace(variant, fmt=value)
    elif hasattr(variant, group):
        variant = replace(variant, **{group: replace(getattr(variant, group), **{name: value})})
    elif group != "problem":
        variant = replace(variant, **{name: value})
    inputs = variant.round_inputs(*(draw_all if isinstance(variant, Backward) else draw)((1, 1, 1, 4, 4, dim)))
    with pytest.raises(Unsupported) as error:
        variant(*on(device, inputs), Mask())
    assert error.value.field == setting
    if isinstance(variant, Instrumented):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(instrumented, "_FEWEST_TILES", 1)
            reason = str(kernel_refusal(variant, *inputs, Mask(), None))
        assert any(word in reason for word in (setting, "stochastically", "problem.head_dim"))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in for a GPU, and no run is too short."""
    monkeypatch.setattr(tiled, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(instrumented, "_FEWEST_TILES", 1)


CAUSAL = Mask(causal=True)
INPUTS: Inputs3 = PLAIN.round_inputs(*draw((1, 1, 1, 20, 40, 8)))


def by_kernel(tensors: Inputs3, mask: Mask, scale: float | None = None) -> str:
    """Why a run goes without the instrumented kernel; empty where it does not."""
    return kernel_refusal(KERNEL, *tensors, mask, scale) or ""


@pytest.mark.usefixtures("always")
def test_what_a_run_decides() -> None:
    q, k, v = INPUTS
    wild, trained = v.clone(), k.clone().requires_grad_()
    wild[..., 3, 2] = math.inf
    assert by_kernel((q, k, v), CAUSAL) == by_kernel((q, k, wild), Mask()) == ""
    assert "finite" in by_kernel((q, k, wild), CAUSAL)
    assert "differentiate" in by_kernel((q, trained, v), Mask())
    with torch.no_grad():
        assert by_kernel((q, trained, v), Mask()) == ""
    assert "problem.scale" in by_kernel(INPUTS, Mask(), -1.0)
    assert not [count for count in (True, False) if Tiled(PLAIN, count=count)(*INPUTS, Mask()).kernel]


def test_what_decides_for_tensor_operations_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, least in (("_MOST_SCORES", 20 * 40), ("_FEWEST_TILES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(instrumented, name, least + 1)
            assert "short" in by_kernel(INPUTS, Mask())
            patch.setattr(instrumented, name, least)
            assert by_kernel(INPUTS, Mask()) == ""
    monkeypatch.setattr(instrumented, "triton_version", lambda: "none")
    assert "not installed" in by_kernel(INPUTS, Mask())


@pytest.mark.usefixtures("always")
def test_it_is_the_instrumented_kernel_whatever_the_rows_of_a_tile(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Precision.parse("fp16")
    q, k, v = on(device, policy.round_inputs(*draw((1, 2, 1, 20, 20, 8))))
    expected = Instrumented(policy, Tiling(64, 16))(q, k, v, CAUSAL, 0.3)
    for br in (1, 500):
        got = Tiled(policy, Tiling(br, 16))(q, k, v, CAUSAL, 0.3)
        assert torch.equal(got.out, expected.out)
        assert torch.equal(lse_of(got), lse_of(expected))
        assert (got.launch, got.counters) == (expected.launch, {})

    def too_large(*arguments: object) -> None:
        raise Unsupported("tiling", "it needs more shared memory than the GPU has")

    monkeypatch.setattr(portable, "plan", too_large)
    got = Tiled(policy)(q, k, v, CAUSAL)
    assert got.kernel == ""
    assert got.counters


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_record_names_what_computed_it(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrumented kernel counts nothing."""
    monkeypatch.setattr(tiled, "is_on_gpu", lambda x: on_gpu)
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=16, keys=16, head_dim=8))
    record = nd.measure(problem, Tiled(PLAIN, Tiling(16, 16)), seeds=2, device="cpu")
    assert record.kernel.startswith("numdev instrumented br=64 bc=16" if on_gpu else "")
    assert bool(record.kernel) == on_gpu
    assert (record.table("counters") == [{"seed": 0}, {"seed": 1}]) == on_gpu
