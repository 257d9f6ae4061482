"""The Hopper kernels on the CPU: against golden for any request, whatever the order of their threads; and what is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from numdev.arithmetic.formats import E4M3FN, FP16
from numdev.arithmetic.quantise import Quantised, Scale
from numdev.arithmetic.rounding import Cast
from numdev.attention import triton
from numdev.attention.kernels import launch
from numdev.attention.kernels.hopper import host
from numdev.attention.kernels.hopper.primitives import barriers
from numdev.attention.kernels.launch import Device
from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.triton import Kernel, Triton, TritonBackward
from tests.attention.test_triton import check, check_gradients, padded, poison
from tests.cases import Sizes, draw, draw_all, lse_of, on
from tests.oracles.gluon import Machine

FORWARD, BACKWARD = Triton(kernel=Kernel.HOPPER), TritonBackward(Triton(), kernel=Kernel.HOPPER)
FP8 = Triton(E4M3FN, kernel=Kernel.HOPPER, softmax=OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0))
LOW = Cast.parse("e4m3fn:saturate")


class Launcher:
    """Interprets a kernel in place of its launch."""

    seed, processors = 0, 3

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Callable[..., tuple[Any, ...]], **_: Any) -> None:
        self._kernel, self._programs, self._arguments = kernel, grid[0], arguments

    def __call__(self, *tensors: Tensor) -> None:
        machine = Machine(Launcher.seed, Launcher.processors)
        machine.launch(self._kernel, self._programs, self._arguments(*tensors))


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    monkeypatch.setattr(host, "Launcher", Launcher)
    monkeypatch.setattr(launch, "interpreting", lambda: False)  # as on a GPU: tensors of 16 bits
    monkeypatch.setattr(triton, "require", lambda _: None)
    for module in (host, triton):
        monkeypatch.setattr(module, "device_of", lambda _: Device("sm_90", 232448, 3))


requests = settings(
    deadline=None,
    max_examples=40,
    phases=(Phase.explicit, Phase.generate),  # to shrink a request would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


few = settings(requests, max_examples=15)


@st.composite
def problems(
    draw: st.DrawFn, dims: tuple[int, ...], least: int = 1, *, windows: bool = True, lengths: bool = True
) -> tuple[Sizes, Mask]:
    """Any shape with at most 450 tokens, any mask; and how threads alternate."""
    Launcher.seed, Launcher.processors = draw(st.integers(0, 999)), draw(st.integers(1, 4))
    (heads, kv_heads), batch = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])), draw(st.integers(1, 2))
    queries, keys, dim = draw(st.integers(least, 450)), draw(st.integers(1, 450)), draw(st.sampled_from(dims))
    window = draw(st.integers(1, 2 * keys)) if windows and draw(st.booleans()) else None
    ends = draw(st.tuples(*[st.integers(0, keys)] * batch)) if lengths and draw(st.booleans()) else None
    mask = Mask(draw(st.booleans()), window, ends)
    low, high = mask.key_range(queries, keys, torch.arange(queries), min(ends or (keys,)))
    assume(int((high - low > 1).sum()) >= least)  # of other rows dS is 0, and all of it rounding
    return (batch, heads, kv_heads, queries, keys, dim), mask


@requests
@given(problems((64, 128, 256)), st.sampled_from([0.0, 8.0]), st.sampled_from([None, 128]))
def test_forward(problem: tuple[Sizes, Mask], threshold: float, br: int | None) -> None:
    sizes, mask = problem
    check(replace(FORWARD, br=br, softmax=replace(FORWARD.softmax, rescale_threshold=threshold)), *draw(sizes), mask, "cpu")


@few
@given(problems((64, 128), windows=False), st.sampled_from([128, 256]), st.sampled_from([None, 192]))
def test_splits_of_a_fixed_size(problem: tuple[Sizes, Mask], size: int, br: int | None) -> None:
    """Near golden; and a row has the same bits in a batch and alone, among all queries and as the last of fewer keys."""
    (batch, *_, queries, keys, dim), mask = problem
    attend = replace(FORWARD, split_size=size, br=br if dim == 64 else None)
    inputs = on("cpu", attend.round_inputs(*draw(problem[0])))
    check(attend, *inputs, mask, "cpu")
    whole = attend(*inputs, mask)
    for entry, row in ((0, queries - 1), (batch - 1, queries // 2)):
        seen = keys - (queries - 1 - row) if mask.causal else keys
        if seen > 0:
            lengths = mask.key_lengths and (min(mask.key_lengths[entry], seen),)
            q, (k, v) = inputs[0][entry : entry + 1, :, row : row + 1], (x[entry : entry + 1, :, :seen] for x in inputs[1:])
            alone = attend(q, k, v, replace(mask, key_lengths=lengths))
            assert torch.equal(alone.out, whole.out[entry : entry + 1, :, row : row + 1])
            assert torch.equal(lse_of(alone), lse_of(whole)[entry : entry + 1, :, row : row + 1])


@requests
@given(problems((64, 128), 20))
def test_backward(problem: tuple[Sizes, Mask]) -> None:
    sizes, mask = problem
    check_gradients(BACKWARD, draw_all(sizes), mask, "cpu")


@few
@given(problems((256,), 20, lengths=False))
def test_backward_at_256(problem: tuple[Sizes, Mask]) -> None:
    sizes, mask = problem
    check_gradients(BACKWARD, draw_all(sizes), mask, "cpu")


@few
@given(problems((64, 128, 256), windows=False), st.sampled_from([None, Scale.TENSOR, Scale.HEAD, Scale.BLOCK]), st.integers(0, 3))
def test_forward_of_8_bits(problem: tuple[Sizes, Mask], scale: Scale | None, promotion: int) -> None:
    sizes, mask = problem
    quantise = None if scale is None else Quantised(LOW, scale, 64 if sizes[-1] == 256 else 128)
    if quantise is not None:  # golden's scale counts padding, the kernel's does not
        mask = replace(mask, key_lengths=None)
    br = 192 if sizes[-1] == 64 and promotion % 2 else None
    check(replace(FP8, br=br, quantise=quantise, promotion=promotion if sizes[-1] < 256 else 0), *draw(sizes), mask, "cpu")


@pytest.mark.parametrize(("dim", "promotion"), [(64, 1), (128, 0), (128, 1), (256, 0)])
def test_scales_of_blocks_that_differ(dim: int, promotion: int) -> None:
    q, k, v = draw((1, 2, 1, 130, 450, dim))
    k[:, :, 256:] *= 2
    v[:, :, 256:] *= 16
    check(replace(FP8, quantise=Quantised(LOW, Scale.BLOCK, 128), promotion=promotion), q, k, v, Mask(), "cpu")


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["none", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_promotion_changes_rounding_alone(dim: int, mask: Mask) -> None:
    """The interpreter's products have no narrow sums, so O is the same but for FP32, and an ulp of FP16 near a tie.

    At d = 128 sums that are never promoted leave registers for P in FP32, and it is rounded and summed later.
    """
    inputs = FP8.round_inputs(*draw((1, 2, 1, 130, 450, dim), spread=4.0))
    never, *promoted = (replace(FP8, promotion=promotion)(*inputs, mask) for promotion in range(4))
    for each in promoted:
        torch.testing.assert_close(each.out, never.out, rtol=2 * FP16.u, atol=1e-6)
        torch.testing.assert_close(lse_of(each), lse_of(never), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", [FORWARD, replace(FP8, promotion=0)], ids=["bf16", "e4m3fn"])
def test_nan_stays_in_its_tile(kernel: Triton, dim: int) -> None:
    """One program computes all tiles; the second head comes after the first, and the second tile of a head after the first."""
    q, k, v = kernel.round_inputs(*draw((1, 2, 1, 200, 150, dim)))
    clean, broken = kernel(q, k, v, Mask()), q.float()
    broken[:, 0, :50] = float("nan")
    got = kernel(broken.to(q.dtype), k, v, Mask())
    for x, y in ((got.out, clean.out), (lse_of(got), lse_of(clean))):
        assert x[:, 0, :50].isnan().all()
        assert torch.equal(x[:, 0, 50:], y[:, 0, 50:])
        assert torch.equal(x[:, 1], y[:, 1])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_and_keys_that_see_nothing(dim: int) -> None:
    """Whole tiles of them."""
    for sizes, window in (((450, 100), None), ((450, 100), 30), ((100, 450), 30)):
        check_gradients(BACKWARD, draw_all((1, 1, 1, *sizes, dim)), Mask(True, window), "cpu")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_no_query_sees_between_others_of_a_program(dim: int, seed: int) -> None:
    """Its warps are then as far apart as buffers permit; with padding within a tile of keys, and without."""
    Launcher.seed, Launcher.processors = seed, 1
    for whole, part in ((256, 128), (200, 150)):
        lengths = (0, whole, 0, part, 0, 0, part, 0, 0, 0, whole, part, 0, 0, 0, 0)
        check_gradients(BACKWARD, draw_all((len(lengths), 1, 1, 30, whole, dim)), Mask(key_lengths=lengths), "cpu")


def test_padding_of_whole_blocks_touches_no_split() -> None:
    """A split that begins behind an entry's last key has a block that must be masked, although none holds a last key."""
    for dim in (64, 128):
        for sizes, lengths in (((2, 2, 1, 5, 512, dim), (512, 128)), ((2, 1, 1, 1, 640, dim), (256, 640))):
            padded(replace(FORWARD, split_size=256), sizes, lengths, float("nan"), "cpu", causal=False)


@pytest.mark.parametrize("causal", [False, True])
def test_what_padding_holds_touches_nothing(causal: bool) -> None:
    for dim, kernel in ((64, FORWARD), (128, FORWARD), (256, FORWARD), (64, BACKWARD), (128, BACKWARD)):
        padded(kernel, (3, 2, 1, 140, 200, dim), (133, 0, 64), float("nan"), "cpu", causal=causal)


@gluon.jit
def used_before_awaited(out):  # type: ignore[no-untyped-def]
    zeros = gl.zeros([64, 64], gl.float32)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [64, 64], None)
    buffer.store(zeros.to(gl.bfloat16))
    product = warpgroup_mma(zeros.to(gl.bfloat16), buffer, zeros, is_async=True)
    gl.store(out, product)
    warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def changed_before_awaited(out):  # type: ignore[no-untyped-def]
    zeros = gl.zeros([64, 64], gl.float32)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [64, 64], None)
    buffer.store(zeros.to(gl.bfloat16))
    product = warpgroup_mma((zeros + 1).to(gl.bfloat16), buffer, zeros, is_async=True)
    buffer.store((zeros + 1).to(gl.bfloat16))
    warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def waiting(mine, other):  # type: ignore[no-untyped-def]
    mbarrier.wait(mine.index(0), 0)
    mbarrier.arrive(other.index(0), count=1)


@gluon.jit
def both_wait(out):  # type: ignore[no-untyped-def]
    first = barriers(1, 1)
    second = barriers(1, 1)
    gl.warp_specialize([(waiting, (first, second)), (waiting, (second, first))], [4], [24])


@pytest.mark.parametrize(
    ("kernel", "error"),
    [(used_before_awaited, "Product"), (changed_before_awaited, "an operand changed"), (both_wait, "all 4 threads wait")],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_interpreter_notices(kernel: Any, error: str) -> None:
    with pytest.raises((AssertionError, TypeError), match=error):
        Machine(0, 1).launch(kernel, 1, (torch.zeros(4),))
