"""What the Hopper backward kernels refuse, by name, and which design runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention.backward.triton import TritonBackward
from numdev.attention.kernels.hopper_backward_launch import FUSED, SPLIT, Design, choose, queries_shape, refusal, waiting
from numdev.attention.kernels.hopper_backward_order import RESIDENT
from numdev.attention.mask import Mask
from numdev.attention.softmax import DeltaForm, Exponential, OutputForDelta, Recompute
from numdev.attention.tiling import Order
from numdev.attention.triton import Kernel, Triton
from numdev.errors import BadInput, Unsupported
from tests.attention.backward.cases import Inputs

RUNS = TritonBackward(Triton())


def tensors(dtype: torch.dtype = torch.bfloat16, dim: int = 64, device: str = "cpu") -> Inputs:
    """q, k, v and do."""
    q, k, v, do = (torch.zeros(1, 2, 256, dim, dtype=dtype, device=device) for _ in range(4))
    return q, k, v, do


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_what_it_is_made_for(dtype: torch.dtype, dim: int) -> None:
    settings = replace(RUNS, fmt=BF16 if dtype == torch.bfloat16 else FP16)
    for mask in (Mask(), Mask(causal=True), Mask(key_lengths=(100,)), Mask(causal=True, key_lengths=(0,))):
        assert refusal(*tensors(dtype, dim), mask, settings) is None
    unrounded = replace(settings, recompute=Recompute(output=OutputForDelta.UNROUNDED, exponential=Exponential.EXP2))
    assert refusal(*tensors(dtype, dim), Mask(), unrounded) is None


@pytest.mark.parametrize(
    ("changes", "mask", "words"),
    [
        ({}, Mask(window=5), "window"),
        ({}, Mask(causal=True, window=5), "window"),
        ({"br": 128}, Mask(), "tiling.br"),
        ({"bc": 128}, Mask(), "tiling.bc"),
        ({"order": Order.FORWARD}, Mask(), "tiling.order"),
        (
            {"recompute": Recompute(DeltaForm.PROBABILITIES, exponential=Exponential.EXP2)},
            Mask(),
            "recompute.delta: probabilities",
        ),
        ({"recompute": Recompute()}, Mask(), "recompute.exponential"),
    ],
)
def test_says_what_it_cannot_run(changes: dict[str, Any], mask: Mask, words: str) -> None:
    assert words in str(refusal(*tensors(), mask, replace(RUNS, **changes)))


def test_says_which_tensors_it_cannot_run() -> None:
    q, k, v, do = tensors()
    assert "fp32" in str(refusal(*tensors(torch.float32), Mask(), replace(RUNS, fmt=FP32)))
    assert "head_dim 64 and 128, not 256" in str(refusal(*tensors(dim=256), Mask(), RUNS))
    assert "v has 128, q 64" in str(refusal(q, k, tensors(dim=128)[0], do, Mask(), RUNS))
    assert "do is torch.float32" in str(refusal(q, k, v, do.float(), Mask(), RUNS))
    assert "needs k and its rows" in str(refusal(q, k.mT.contiguous().mT, v, do, Mask(), RUNS))
    assert "needs v and its rows" in str(refusal(q, k, torch.zeros(1, 2, 256, 65, dtype=q.dtype)[..., 1:], do, Mask(), RUNS))
    expanded = torch.zeros(1, 1, 256, 64, dtype=q.dtype).expand(1, 2, 256, 64)
    assert "needs do and its rows" in str(refusal(q, k, v, expanded, Mask(), RUNS))


@given(st.integers(1, 100_000), st.booleans(), st.integers(1, 200))
def test_the_one_kernel_runs_only_where_those_that_wait_for_each_other_run_at_once(
    queries: int, causal: bool, count: int
) -> None:
    mask = Mask(causal=causal)
    needed = waiting(queries, mask)
    assert 1 <= needed <= RESIDENT
    assert needed == 1 or not causal, "under a causal limit a program waits for earlier ones alone"
    assert choose(queries, mask, count, Design.SPLIT) is Design.SPLIT
    assert choose(queries, mask, count) is (Design.FUSED if needed <= count else Design.SPLIT)
    if needed <= count:
        assert choose(queries, mask, count, Design.FUSED) is Design.FUSED
    else:
        with pytest.raises(Unsupported, match=rf"backward\.design: {needed} programs wait .*runs {count} at once; give split"):
            choose(queries, mask, count, Design.FUSED)


@pytest.mark.parametrize(
    ("settings", "field"),
    [(replace(RUNS, kernel=Kernel.HOPPER), "backward.kernel"), (replace(RUNS, design=Design.SPLIT), "backward.design")],
    ids=["kernel", "design"],
)
def test_what_is_asked_for_by_name_is_refused_where_it_cannot_run(settings: TritonBackward, field: str, device: str) -> None:
    """For a window no Hopper kernel is there, on any GPU."""
    mask = Mask(window=5)
    with pytest.raises(Unsupported, match="the Hopper kernels cannot run this") as error:
        settings(*tensors(device=device), mask)
    assert error.value.field == field


def test_the_portable_kernels_have_no_designs() -> None:
    with pytest.raises(BadInput, match=r"backward\.design"):
        replace(RUNS, kernel=Kernel.PORTABLE, design=Design.FUSED)


def test_every_launch_fits_the_registers_and_the_tiles_of_the_walk() -> None:
    for dim in (64, 128):
        assert 128 % FUSED[dim].br == 128 % SPLIT[dim].br == 0, "a unit is a whole number of tiles"
        for queries in (1, 4096):
            shape = queries_shape(dim, queries)
            assert 128 * (shape.groups * shape.registers + 24) <= 65536, "registers of a multiprocessor"


def test_the_addition_of_the_copy_engine_is_still_there() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    from numdev.attention.kernels.hopper_backward_reduce import BUILDER

    assert hasattr(libtriton.gluon_ir.GluonOpBuilder, BUILDER)
