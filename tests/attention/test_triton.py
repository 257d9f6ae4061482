"""Our fast kernels, both passes: against golden within derived budgets over random requests; refusals; repeatability."""

from __future__ import annotations

import math
import pickle
import random
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev import BadInput, Instrumented, Mask, Order, Precision, Tiling, Unsupported
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, TF32, Format
from numdev.attention import triton as fast
from numdev.attention.base import Gradients, Saved
from numdev.attention.emulation import emulation_of
from numdev.attention.exact import Exact
from numdev.attention.kernels import backward as backward_kernels
from numdev.attention.kernels import forward, launch, portable
from numdev.attention.kernels.hopper.launch import refusal
from numdev.attention.kernels.launch import Device, device_of, split_count
from numdev.attention.precision import BackwardPrecision
from numdev.attention.problem import Shape
from numdev.attention.softmax import DeltaForm, Exponential, Normalise, OnlineSoftmax, Recompute
from numdev.attention.steps import Steps
from numdev.attention.tiled import TiledBackward
from numdev.attention.triton import Kernel, Products, Triton, TritonBackward
from tests.attention.bounds import near_golden, output_near_golden
from tests.cases import MASKS, POLICIES, Inputs, Sizes, draw, draw_all, fitted, lse_of, on, same

RAGGED: Sizes = (1, 4, 2, 20, 37, 24)
SMALL = Triton(br=16, bc=16)
BACKWARD_RAGGED: Sizes = (1, 2, 1, 21, 37, 24)
BACKWARD = TritonBackward(SMALL, br=16, bc=16)
FP32_SUMS = 2.0**-16  # what sums of hundreds of terms and exponentials in FP32 add
# One query, one key, more queries than keys, head dims that are no power of two or the largest, grouped heads.
SHAPES: list[Sizes] = [
    *((1, 1, 1, 1, 1, 16), (1, 2, 1, 1, 70, 32), (1, 1, 1, 70, 1, 16), (1, 1, 1, 33, 64, 80)),
    *((1, 1, 1, 20, 20, 256), (1, 6, 2, 17, 40, 96), (1, 2, 2, 50, 20, 16), RAGGED),
]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new memory hold NaN, or a large number, so that an element that no kernel writes shows."""

    def poison_of(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: object, **keywords: object) -> Tensor:
            made = make(*args, **keywords)
            if made.is_floating_point():
                return made.fill_(float("nan"))
            return made.fill_(123)

        return poisoned

    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, poison_of(getattr(home, name)))


def saved_of(backward: TritonBackward, inputs: Inputs, mask: Mask, scale: float) -> Saved:
    """Golden O and LSE, as a kernel would save them."""
    golden = Exact()(*inputs[:3], mask, scale)
    assert golden.lse is not None
    return Saved(backward.precision.output(golden.out), golden.lse.float())


def check_gradients(backward: TritonBackward, inputs: Inputs, mask: Mask, device: str, error: float | None = None) -> Gradients:
    """The gradients of a run on rounded inputs, after their comparison with golden ones on the same."""
    on_device, scale = on(device, backward.round_inputs(*inputs)), inputs[0].shape[-1] ** -0.5
    got = backward.backward(*on_device, saved_of(backward, on_device, mask, scale), mask, scale)
    assert {got.dq.dtype, got.dk.dtype, got.dv.dtype} == {backward.fmt.dtype}
    near_golden(got, on_device, mask, error or 3 * backward.fmt.u + FP32_SUMS, scale)
    return got


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def seeds(count: int) -> pytest.MarkDecorator:
    """So many random requests, and three times as many with `-m exhaustive`."""
    each = [pytest.param(seed, marks=[] if seed < count else [pytest.mark.exhaustive]) for seed in range(3 * count)]
    return pytest.mark.parametrize("seed", each)


def drawn_problem(chance: random.Random, seed: int) -> tuple[Sizes, Mask]:
    """One of `SHAPES` or another, and one of `MASKS`, each in its turn."""
    mask = list(MASKS.values())[seed % len(MASKS)]
    heads, kv_heads = chance.choice([(2, 1), (1, 1), (6, 2)])
    other = (1, heads, kv_heads, chance.randint(1, 40), chance.randint(1, 70), chance.choice((16, 20, 32)))
    sizes = SHAPES[seed // 2 % len(SHAPES)] if seed % 2 else other
    return (2 if mask.key_lengths else sizes[0], *sizes[1:]), fitted(mask, sizes[4])


def check(attend: Triton, q: Tensor, k: Tensor, v: Tensor, mask: Mask, device: str, *, product: float = 0.0) -> Tensor:
    """`out` of a run on rounded inputs, after its comparison with golden on the same."""
    inputs = on(device, attend.round_inputs(q, k, v))
    got, tiles = attend(*inputs, mask), -(-k.shape[-2] // (attend.bc or 16)) + (attend.splits or 1)
    output_near_golden(got, inputs, mask, attend.precision, attend.softmax, tiles=tiles, product=product)
    threshold = attend.softmax.rescale_threshold
    assert got.kernel.startswith("numdev "), got.kernel
    assert (f"rescale_threshold={threshold:g}" in got.kernel) == (threshold > 0), got.kernel
    return got.out


@seeds(24)
def test_random_requests(seed: int, device: str) -> None:
    """Formats, masks, shapes, tiles, orders, splits and recurrences."""
    chance, fmt = random.Random(seed), (FP16, FP32, BF16, E4M3FN, E5M2)[seed % 5]
    sizes, mask = drawn_problem(chance, seed)
    threshold, p_scale = (0.0, 256.0) if fmt.bits == 8 else (chance.choice((0.0, 8.0)), 1.0)  # FP8 does not hold 256 * 2^8
    normalise = chance.choice(list(Normalise)) if fmt.bits == 16 and not threshold else Normalise.END
    exp = (Exponential.EXP, Exponential.EXP2)[seed // 2 % 2]
    softmax = OnlineSoftmax(normalise=normalise, exp=exp, rescale_threshold=threshold, p_scale=p_scale)
    tile, order = (chance.choice((16, 20, 32)), chance.choice((16, 20, 64))), (Order.FORWARD, Order.REVERSE)[seed // 3 % 2]
    attend = Triton(fmt, *tile, order, chance.choice((1, 3)), softmax, kernel=Kernel.PORTABLE)
    spread = 3.0 if threshold and fmt.bits == 16 else 1.0
    assert check(attend, *draw(sizes, seed, spread), mask, device).dtype == (torch.float16 if fmt.bits == 8 else fmt.dtype)


@pytest.mark.parametrize("queries", [1, 4, 21, 22])
@pytest.mark.parametrize("name", MASKS)
def test_few_queries_of_heads_that_share_keys(name: str, queries: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group are rows of one tile, unless a limit sets them apart or they are more than 64; also strided ones."""
    shapes, plan = [], portable.plan

    def spied(request: portable.Request, q: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(q.shape))
        return plan(request, q, *rest)

    monkeypatch.setattr(portable, "plan", spied)
    mask = fitted(MASKS[name], 53)
    splits = 3 if mask.causal else 1
    q, k, v = draw((2, 6, 2, queries, 53, 24))
    packs = mask.window is None and (queries == 1 or (not mask.causal and queries < 22))
    for each in (q, q.transpose(1, 2).contiguous().transpose(1, 2))[: min(queries, 2)]:  # one query is laid out alike in both
        shapes.clear()
        out = check(replace(SMALL, splits=splits, kernel=Kernel.PORTABLE), each, k, v, mask, device)
        assert out.shape == (2, 6, queries, 24)
        assert shapes == [(2, 2, 3 * queries, 24) if packs else (2, 6, queries, 24)]


def test_tf32_products_are_chosen_explicitly(device: str) -> None:
    check(Triton(FP32, br=16, bc=16, products=Products.TF32), *draw(RAGGED), Mask(), device, product=2 * TF32.u)
    backward = replace(BACKWARD, fmt=FP32, tf32=True)
    check_gradients(backward, draw_all(BACKWARD_RAGGED), Mask(causal=True), device, 8 * TF32.u)


def test_large_logits(device: str) -> None:
    """Scores of +-4e4: one key takes all, so that dV is dO there, dS is 0, and nothing overflows."""
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.float64, device=device) for n in (20, 40, 40))
    q[..., 0], k[..., 0] = 100.0, torch.linspace(-400, 400, 40)
    v[..., 0] = torch.arange(40)
    out = SMALL(*SMALL.round_inputs(q, k, v), Mask(), 1.0)
    assert out.out[..., 0].eq(39).all()
    assert torch.allclose(lse_of(out).cpu(), torch.tensor(40000.0), rtol=2.0**-8)
    gradients = BACKWARD(*BACKWARD.round_inputs(q, k, v, torch.ones_like(q)), Mask(), 1.0)
    assert bool((gradients.dv[..., -1, :] == 20).all())
    assert bool((gradients.dv[..., :-1, :] == 0).all())
    assert bool((gradients.dq == 0).all())
    assert bool((gradients.dk == 0).all())


@pytest.mark.parametrize(("value", "splits"), [(float("nan"), 1), (float("inf"), 3), (float("nan"), None), (float("inf"), None)])
def test_what_padding_holds_touches_nothing(value: float, splits: int | None, device: str) -> None:
    """Of the portable kernel, with splits or without, and of the instrumented one."""
    instrumented = Instrumented(Precision.parse("kernel_bf16"), Tiling(16, 16))
    attend = instrumented if splits is None else replace(SMALL, splits=splits, kernel=Kernel.PORTABLE)
    padded(attend, (2, 2, 1, 20, 43, 24), (31, 0), value, device, causal=splits != 3)
    if splits is not None:
        padded(BACKWARD, (2, 2, 1, 30, 27, 16), (21, 0), value, device, causal=splits != 3)


Kernels = Triton | Instrumented | TritonBackward


def padded(runs: Kernels, sizes: Sizes, lengths: tuple[int, ...], value: float, device: str, *, causal: bool) -> None:
    """Hold keys beyond the last of each batch entry to `value`, and results to their bits with zeros there.

    Gradients also with `value` in rows that see nothing.
    """
    mask, scale = Mask(causal=causal, key_lengths=lengths), sizes[-1] ** -0.5
    q, k, v, do = on(device, draw_all(sizes))
    hidden = ~mask.seeing_rows(sizes[0], sizes[3], sizes[4])[:, None, :, None].to(device)
    results = []
    for filling in (0.0, value):
        for entry, length in enumerate(lengths):
            k[entry, :, length:], v[entry, :, length:] = filling, filling
        if isinstance(runs, TritonBackward):
            inputs = runs.round_inputs(q.masked_fill(hidden, filling), k, v, do.masked_fill(hidden, filling))
            golden = Exact()(inputs[0].nan_to_num(0, 0, 0), *inputs[1:3], mask, scale)
            results.append(runs.backward(*inputs, Saved(golden.out, lse_of(golden)), mask, scale).tensors())
        else:
            results.append(runs(*on(device, runs.round_inputs(q, k, v), runs.storage), mask, scale).tensors())
    clean, dirty = results
    for name, expected in clean.items():
        assert torch.equal(dirty[name], expected), name
    if "lse" in dirty:
        assert torch.equal(dirty["lse"].isneginf(), hidden[..., 0].expand_as(dirty["lse"]))
        assert bool((dirty["out"].masked_select(hidden) == 0).all())
        return
    assert all(bool(tensor.isfinite().all()) for tensor in dirty.values())
    for entry, length in enumerate(lengths):
        assert bool((dirty["dk"][entry, :, length:] == 0).all())
        assert bool((dirty["dv"][entry, :, length:] == 0).all())


class Full:
    """A kernel whose tile does not fit."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise OutOfResources(139520, 101376, "shared memory")


def test_a_tile_that_does_not_fit_says_what_it_needs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, inputs = r"tiling: .*16 x 16 .*139520 bytes of shared memory.*has 101376", draw_all((1, 1, 1, 4, 4, 16))
    monkeypatch.setattr(backward_kernels, "dk_dv", Full())
    with pytest.raises(Unsupported, match=words):
        BACKWARD(*on(device, inputs), Mask())
    monkeypatch.setattr(forward, "attention", Full())
    with pytest.raises(Unsupported, match=words):
        SMALL(*on(device, inputs[:3]), Mask(), 0.77)  # which no other test has prepared


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda: replace(SMALL), lambda: Instrumented(Precision.parse("bf16"), Tiling(16, 16))])
def test_a_call_that_was_prepared_serves_other_tensors_and_keeps_none(device: str, made: Callable[[], Any]) -> None:
    """Of the same layout; one of another layout, mask or scale is prepared anew."""
    launch._plans_of.cache_clear()
    attend = made()
    first, second = (on(device, draw(RAGGED, seed))[:3] for seed in (1, 2))
    attend(*first, Mask(causal=True))
    kept = [weakref.ref(x) for x in first]
    del first
    assert [each() for each in kept] == [None] * 3
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in second]
    for inputs, mask, scale in ((second, Mask(causal=True), None), (transposed, Mask(causal=True), None), (second, Mask(), 0.3)):
        again = attend(*inputs, mask, scale)
        launch._plans_of.cache_clear()
        assert torch.equal(again.out, made()(*inputs, mask, scale).out)
    assert len(attend._plans) == 3
    assert pickle.loads(pickle.dumps(attend)) == attend


def test_the_second_launch_goes_to_what_the_first_has_compiled() -> None:
    class Kernel:
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.metadata = types.SimpleNamespace(
                target=types.SimpleNamespace(backend="hip"), num_ctas=1, global_scratch_size=0, profile_scratch_size=0
            )

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*arguments: object, **options: object) -> Kernel:
                self.calls.append((grid, arguments, options))
                return self

            return launch

    kernel = Kernel()
    launcher = portable.Launcher(kernel, (5, 2), lambda *tensors: (*tensors, 1), num_warps=4)
    tensors = [torch.zeros(1) for _ in range(3)]
    for tensor in tensors:
        launcher(tensor)
    first, *others = kernel.calls
    assert first == ((5, 2), (tensors[0], 1), {"num_warps": 4})
    assert others == [((5, 2, 1), (tensor, 1), {}) for tensor in tensors[1:]]


def test_sizes_and_formats_that_are_refused(device: str) -> None:
    with pytest.raises(BadInput, match=r"precision.*use one of bf16, fp16, fp32, e4m3fn, e5m2"):
        Triton(Format(5, 3))
    with pytest.raises(BadInput, match=r"precision.*use one of bf16, fp16, fp32"):
        TritonBackward(Triton(), E4M3FN)
    for made in (lambda: Triton(br=0), lambda: TritonBackward(Triton(), br=0)):
        with pytest.raises(BadInput, match=r"tiling\.br"):
            made()
    with pytest.raises(BadInput, match="products"):
        TritonBackward(Triton(), tf32=True)
    inputs = on(device, draw_all((1, 1, 1, 4, 4, 16)))
    saved = saved_of(BACKWARD, inputs, Mask(), 0.1)
    for scale in (0.0, -0.1, math.inf, math.nan):  # the kernels take the maximum of S before they scale it
        for attend in (SMALL, Instrumented(Precision.parse("bf16"))):
            with pytest.raises(BadInput, match=r"problem\.scale"):
                attend(*inputs[:3], Mask(), scale)
        with pytest.raises(BadInput, match=r"problem\.scale"):
            BACKWARD.backward(*inputs, saved, Mask(), scale)


def test_without_a_gpu_or_the_interpreter_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unsupported, match="need a CUDA device; use device=cuda, or TRITON_INTERPRET=1"):
        SMALL(*draw(RAGGED), Mask())
    monkeypatch.setattr(launch, "triton_version", lambda: "none")
    with pytest.raises(Unsupported, match="triton is not installed"):
        SMALL(*draw(RAGGED), Mask())


@seeds(18)
def test_random_backward_requests(seed: int, device: str) -> None:
    """Formats, masks, shapes, tiles, orders, and ways to recompute."""
    chance, fmt = random.Random(seed), (FP16, FP32, BF16)[seed // 2 % 3]
    sizes, mask = drawn_problem(chance, seed)
    sizes = (*sizes[:3], min(sizes[3], 24), min(sizes[4], 33), sizes[5])
    recompute = Recompute(list(DeltaForm)[seed // 3 % 2], exponential=(Exponential.EXP, Exponential.EXP2)[seed // 2 % 2])
    tile, order = chance.choice([(16, 20), (20, 32), (64, 16), (16, 16)]), (Order.FORWARD, Order.REVERSE)[seed % 2]
    backward = TritonBackward(SMALL, fmt, *tile, order, recompute)
    got = check_gradients(backward, draw_all(sizes, seed), fitted(mask, sizes[4]), device)
    assert got.kernel.startswith("numdev portable backward "), got.kernel


def test_strided_inputs(device: str) -> None:
    """Tokens before heads, heads of a larger tensor, a last dimension of stride 2: the bits are those of contiguous ones."""
    q, k, v, do = inputs = on(device, BACKWARD.round_inputs(*draw_all(BACKWARD_RAGGED)), BACKWARD.storage)
    mask, scale = Mask(causal=True), 24**-0.5
    saved = saved_of(BACKWARD, inputs, mask, scale)
    expected = BACKWARD.backward(*inputs, saved, mask, scale).tensors() | SMALL(q, k, v, mask, scale).tensors()
    k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, do))
    q, k = torch.cat([q, q], -1)[..., :24], torch.stack([k, k], -1)[..., 0]
    got = BACKWARD.backward(q, k, v, do, Saved(saved.out.mT.contiguous().mT, saved.lse), mask, scale).tensors()
    got |= SMALL(q, k, v, mask, scale).tensors()
    assert not [name for name, x in expected.items() if not torch.equal(got[name], x)]


def test_a_nan_stays_with_what_sees_it(device: str) -> None:
    """v of key 5 holds NaN: rows 5 to 7 see it, and have no delta; so have the keys that these rows see, 3 to 7, no gradient."""
    q, k, v, do = on(device, BACKWARD.round_inputs(*draw_all((1, 1, 1, 20, 20, 16))))
    v[:, :, 5] = float("nan")
    inputs, mask = (q, k, v, do), Mask(causal=True, window=3)
    gradients = BACKWARD.backward(*inputs, saved_of(BACKWARD, inputs, mask, 0.25), mask, 0.25)
    assert gradients.delta is not None
    for gradient, first, last in ((gradients.dq, 5, 7), (gradients.delta[..., None], 5, 7), (gradients.dk, 3, 7)):
        without = gradient.isnan().any(-1).flatten().nonzero().flatten().tolist()
        assert without == list(range(first, last + 1))
    assert bool(gradients.dv.isfinite().all())


@pytest.mark.parametrize(
    ("attend", "sizes", "splits"),
    [
        (Triton(E4M3FN), (1, 8, 8, 4, 65536, 128), 33),
        (Triton(E4M3FN), (1, 8, 8, 4, 16384, 128), 16),  # 8 tiles of a program
        (Triton(E4M3FN), (16, 8, 8, 64, 4096, 128), 2),
        (Triton(E4M3FN), (24, 8, 8, 4, 65536, 128), 1),  # some multiprocessors have two programs as it is
        (Triton(E4M3FN), (4, 8, 8, 64, 65536, 256), 4),
        (Triton(E5M2), (1, 8, 8, 4, 65536, 128), 16),
        (Triton(), (1, 8, 8, 4, 65536, 128), 16),
    ],
    ids=str,
)
def test_a_multiprocessor_has_two_programs_of_many_tiles_in_e4m3(attend: Triton, sizes: Sizes, splits: int) -> None:
    assert attend._split(Shape(*sizes), Mask(), Device("sm_90", 232448, 132))[1] == splits


def test_e4m3_on_a_gpu_that_has_no_such_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "device_of", lambda device: Device("sm_86", 101376, 84))
    inputs = Triton(E4M3FN).round_inputs(*draw((1, 1, 1, 20, 20, 16)))
    with pytest.raises(Unsupported, match=r"^precision: e4m3fn on a GPU needs compute capability 8\.9"):
        Triton(E4M3FN)(*inputs, Mask())


SPLITTING = Triton(FP16, br=16, bc=16, kernel=Kernel.PORTABLE)


@pytest.fixture
def eight_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "device_of", lambda device: replace(device_of(device), multiprocessors=8))


@pytest.mark.usefixtures("eight_multiprocessors")
@pytest.mark.parametrize("sizes", [(1, 4, 2, 1, 110, 24), (1, 1, 1, 3, 150, 16), (1, 2, 1, 20, 150, 16)], ids=str)
def test_the_name_states_the_splits_and_the_result_is_that_of_the_same_number(sizes: Sizes, device: str) -> None:
    inputs = on(device, SPLITTING.round_inputs(*draw(sizes)))
    rows = sizes[1] // sizes[2] * sizes[3]
    own, splits = SPLITTING(*inputs, Mask()), split_count(sizes[0] * sizes[2] * math.ceil(rows / 16), sizes[4], 16, 8)
    assert splits > 1
    assert own.kernel.endswith(f" splits={splits} combined=lse")
    same = replace(SPLITTING, splits=splits)(*inputs, Mask())
    assert torch.equal(own.out, same.out)
    assert torch.equal(lse_of(own), lse_of(same))
    assert emulation_of(SPLITTING, Shape(*sizes)).tiling.splits == splits, "on the GPU that is there"


@pytest.mark.usefixtures("eight_multiprocessors")
@pytest.mark.parametrize(
    ("queries", "mask", "splits", "launched"),
    [(1, Mask(), 1, 1), (1, Mask(), 5, 5), (1, Mask(window=9), None, 1), (65, Mask(), None, 1)],
)
def test_a_number_is_taken_and_many_queries_and_windows_are_not_split(
    queries: int, mask: Mask, splits: int | None, launched: int, device: str
) -> None:
    inputs = on(device, draw((1, 1, 1, queries, 100, 16)))
    assert replace(SPLITTING, splits=splits)(*inputs, mask).launch.splits == launched


COMBINING = [*(POLICIES[name] for name in ("kernel_bf16", "uniform_bf16", "uniform_e5m2", "narrow_sum", "fp32"))]
COMBINING += [POLICIES["kernel_bf16"].with_step(rescale=text) for text in ("e4m3fn", "e4m3fn:saturate")]


@pytest.mark.parametrize("policy", COMBINING)
@pytest.mark.parametrize("splits", [2, 7])
def test_the_kernel_combines_as_its_specification_does(policy: Precision, splits: int, device: str) -> None:
    """Casts and order are equal; a split without a sum has no weight, also in formats without an infinity.

    Logarithms that differ by whole numbers of `ln 2` would need exact exponentials, so a weight may be off by an ulp of FP32
    before it is rounded: one rounding of each step more, at most.
    """
    generator = torch.Generator().manual_seed(0)
    parts = policy.accumulator.apply_(torch.randn(splits, 2, 3, 5, 24, generator=generator))
    lse = policy.row_sum.accumulate.apply_(torch.randn(splits, 2, 3, 5, generator=generator))
    lse[0, 0, 0], lse[:, 1, 1] = float("-inf"), float("-inf")
    parts[0, 0, 0], parts[:, 1, 1] = 0.0, 0.0
    expected, total = Steps.of(policy, 5).combine(
        [(o.clone(), part[..., None].clone()) for o, part in zip(parts, lse, strict=True)]
    )
    request = portable.Request(policy, Tiling(16, 16, splits=splits), OnlineSoftmax(), exactly=True)
    out, got = portable.combined(request, parts.shape, parts.to(device).device, torch.float32)(parts.to(device), lse.to(device))
    coarsest = max(policy.rescale.to.u, policy.row_sum.accumulate.to.u, policy.accumulator.to.u)
    assert float((out.cpu() - expected).abs().max()) <= 4 * splits * coarsest * float(parts.abs().max())
    assert torch.equal(got.cpu() == float("-inf"), total[..., 0] == float("-inf"))
    seen = total[..., 0] > float("-inf")
    assert float((got.cpu() - total[..., 0])[seen].abs().max()) <= 4 * splits * coarsest * float(
        lse[lse > float("-inf")].abs().max() + 2
    )
    assert bool((out[1, 1] == 0).all())


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the interpreter, whose BLAS rounds a row otherwise at another place of a tile: a third of them on some processors."""

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        return (a[..., None].astype(float) * b[None]).sum(1).astype(dtype)

    monkeypatch.setattr("numpy.matmul", multiply)


RANGED = Triton(FP16, br=16, bc=16, split_size=32, kernel=Kernel.PORTABLE)
BESIDE = [(slice(0, 2), 1), (slice(1, 2), 1), (slice(0, 1), 17)]  # batch entries, and last queries of each


def differing(attend: Triton, keys: int, mask: Mask, device: str, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Surroundings in which rows have other bits than among all, or with fewer keys in an earlier step of decoding."""
    programs, plan = set(), portable.plan

    def spied(request: portable.Request, *rest: Any) -> Any:
        programs.add(request.parallel)
        return plan(request, *rest)

    monkeypatch.setattr(portable, "plan", spied)
    q, k, v = on(device, attend.round_inputs(*draw((2, 2, 1, keys, keys, 16))))
    whole, found = attend(q, k, v, mask), set[Any]()

    def compare(place: Any, got: Any, batch: slice, rows: slice) -> None:
        if not (torch.equal(got.out, whole.out[batch, :, rows]) and torch.equal(lse_of(got), lse_of(whole)[batch, :, rows])):
            found.add(place)

    for batch, last in BESIDE:
        rows = slice(keys - last, keys)
        compare((batch.start, last), attend(q[batch, :, rows], k[batch], v[batch], mask), batch, rows)
    for step in (1, 32, 43) if mask.causal else ():
        some, one = slice(0, step), slice(step - 1, step)
        compare(step, attend(q[:, :, one], k[:, :, some], v[:, :, some], mask), slice(0, 2), one)
    assert programs == ({False, True} if attend.split_size and mask.window is None else {False})
    return found


@pytest.mark.usefixtures("eight_multiprocessors", "products_row_by_row")
@pytest.mark.parametrize(
    "mask", [Mask(causal=True), *(pytest.param(mask, marks=pytest.mark.slow) for mask in (Mask(), Mask(causal=True, window=40)))]
)
def test_splits_of_a_fixed_size_give_a_row_the_same_bits_in_prefill_and_in_decoding(
    mask: Mask, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program for all splits, which meets a tile with a mask for other rows, and in one for each split."""
    assert differing(RANGED, 71, mask, device, monkeypatch) == set()
    assert mask.window or (0, 1) in differing(replace(RANGED, split_size=None), 71, mask, device, monkeypatch)


@pytest.mark.usefixtures("eight_multiprocessors")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalise", Normalise)
def test_the_emulation_predicts_splits_of_a_fixed_size(causal: bool, normalise: Normalise, device: str) -> None:
    """Bit for bit: scores are whole numbers, so that every exponential and sum is exact; LSE, a logarithm, to its last places."""
    softmax = OnlineSoftmax(exp=Exponential.EXP2, normalise=normalise)
    q, k, v = on(device, tuple((2 * x).round().clamp(-2, 2) for x in draw((1, 2, 1, 17, 75, 4))))
    for queries in (17, 1):
        attend = replace(RANGED, softmax=softmax)
        inputs, mask, scale = (q[:, :, -queries:].half(), k.half(), v.half()), Mask(causal=causal), softmax.log_scale**-1
        emulated = emulation_of(attend, Shape(1, 2, 1, queries, 75, 4), mask)
        assert emulated.tiling.split_size == 32
        got, expected = attend(*inputs, mask, scale), emulated(*inputs, mask, scale)
        assert torch.equal(got.out.double(), expected.out.double())
        assert float((lse_of(got) - lse_of(expected)).abs().max()) <= 2.0**-20


def test_what_joins_no_splits_of_a_fixed_size_refuses_them(device: str) -> None:
    inputs = on(device, draw((1, 1, 1, 40, 64, 64)))
    with pytest.raises(BadInput, match=r"^tiling\.split_size: 40 .* give a multiple of tiling\.bc=16"):
        Triton(bc=16, split_size=40)
    with pytest.raises(Unsupported, match=r"^tiling\.order: "):
        replace(RANGED, order=Order.REVERSE)(*inputs, Mask())
    hopper, x = Triton(kernel=Kernel.HOPPER, split_size=128), inputs[1].bfloat16()
    assert refusal(hopper, Mask(), q=x, k=x, v=x) is None
    for size, mask, each in ((64, Mask(), x), (128, Mask(), x.repeat(1, 1, 1, 4)), (128, Mask(window=9), x)):
        assert refusal(replace(hopper, split_size=size), mask, q=each, k=each, v=each) is not None
    with pytest.raises(BadInput, match=r"^tiling\.split_size: 64 "):
        TiledBackward(Exact(), BackwardPrecision.golden(), Tiling(split_size=64))


@pytest.mark.parametrize("mask", [Mask(causal=True, window=20), pytest.param(Mask(), marks=pytest.mark.slow)])
def test_gradients_have_the_same_bits_in_other_batches_and_among_other_heads(mask: Mask, device: str) -> None:
    """Each sum has one order, that of the tiles: dK and dV of queries, dQ of keys. Fewer queries are another dK and dV."""
    q, k, v, do = on(device, BACKWARD.round_inputs(*draw_all((2, 2, 2, 17, 33, 16))))
    saved = saved_of(BACKWARD, (q, k, v, do), mask, 0.25)
    whole = BACKWARD.backward(q, k, v, do, saved, mask, 0.25)
    for batch, heads in ((slice(1, 2), slice(0, 2)), (slice(0, 2), slice(1, 2))):
        some = Saved(saved.out[batch, heads], saved.lse[batch, heads])
        got = BACKWARD.backward(q[batch, heads], k[batch, heads], v[batch, heads], do[batch, heads], some, mask, 0.25)
        same(got, {name: x[batch, heads] for name, x in whole.tensors().items()})
