"""What the Hopper kernel is told to do: every tile once, in balance, with as many blocks of keys as it sees."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention.kernels.hopper_host import SHAPES, Work, pinned_br, refusal, schedule
from numdev.attention.kernels.launch import hopper_bc
from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, Normalise, OnlineSoftmax
from numdev.attention.tiling import Order
from numdev.attention.triton import Triton


@st.composite
def works(draw: st.DrawFn) -> Work:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys, batch = draw(st.integers(1, 700)), draw(st.integers(1, 700)), draw(st.integers(1, 3))
    lengths = tuple(draw(st.integers(0, keys)) for _ in range(batch))
    (br, bc), programs = draw(st.sampled_from([(128, 128), (192, 128), (128, 64)])), draw(st.integers(1, 40))
    return Work(kv_heads * group, group, queries, keys, br, draw(st.booleans()), lengths, programs, bc)


@given(works())
def test_every_tile_once_with_the_blocks_that_it_sees(work: Work) -> None:
    table = schedule(work, 64)
    grid = table.shape[1]
    assert grid == min(work.programs, len(work.lengths) * work.heads * -(-work.queries // work.br))
    assert table.shape[2] == 5
    tiles = [tuple(tile) for tile in table.reshape(-1, 5).tolist() if tile[3] > 0]
    rows = range(0, work.queries, work.br)
    wanted = {(row, b, h) for row in rows for b in range(len(work.lengths)) for h in range(work.heads)}
    assert Counter(tile[:3] for tile in tiles) == Counter(wanted)
    for row, b, _, blocks, length in tiles:
        assert length == work.lengths[b]
        assert blocks == max(1, seen_blocks(work, row, length))


def seen_blocks(work: Work, row: int, length: int) -> int:
    """By the mask: blocks up to the last key that any row of the tile sees, rows beyond the last query counted too."""
    last = length - 1
    if work.causal:
        last = min(last, row + work.br - 1 + work.keys - work.queries)
    return last // work.bc + 1


@given(works())
def test_lists_end_with_two_empty_rounds_and_have_no_gaps(work: Work) -> None:
    table = schedule(work, 64)
    counts = table[:, :, 3]
    for program in range(table.shape[1]):
        used = (counts[:, program] > 0).tolist()
        assert used == sorted(used, reverse=True)
    assert int(counts[-2:].sum()) == 0


@given(works())
def test_no_program_works_much_longer_than_another(work: Work) -> None:
    """Each tile goes to the program that is free first, so the loads differ by at most one tile."""
    table = schedule(work, 64)
    cost = torch.where(table[:, :, 3] > 0, table[:, :, 3] + 1, 0)
    loads = cost.sum(0)
    assert int(loads.max() - loads.min()) <= int(cost.max())


def test_the_longest_tiles_go_first_under_a_causal_limit() -> None:
    table = schedule(Work(4, 1, 1024, 1024, 128, True, (1024,), 132, 128), 128)
    assert table[0, :4, 0].tolist() == [896] * 4
    assert table[0, :32, 3].tolist() == [n for n in range(8, 0, -1) for _ in range(4)]


def tensors(dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.zeros(1, 2, 256, dim, dtype=dtype) for _ in range(3))
    return q, k, v


@given(works())
def test_a_group_of_rows_passes_over_one_block_of_a_tile_at_most(work: Work) -> None:
    """With two buffers a group that passed over a second block would wait for one that it holds: the kernel would never end."""
    for length in work.lengths:
        for row in range(0, work.queries, work.br):
            seen = []
            for top in range(row, row + work.br, 64):
                last = min(length - 1, top + 63 + work.keys - work.queries) if work.causal else length - 1
                seen.append(max(1, last // work.bc + 1))  # a group that sees nothing meets one block, all masked
            assert seen[-1] == work.blocks(row, length)
            assert max(seen) - min(seen) <= 1


def test_every_shape_keeps_to_what_the_kernel_asserts() -> None:
    for (head_dim, br), shape in SHAPES.items():
        assert 64 * (shape.groups - 1) <= shape.bc == hopper_bc(head_dim)
        assert shape.br == br
        assert 128 * (shape.groups * shape.registers + 24) <= 65536, "registers of a multiprocessor"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_what_it_is_made_for(dtype: torch.dtype, dim: int) -> None:
    for mask in (Mask(), Mask(causal=True), Mask(key_lengths=(100,))):
        assert refusal(*tensors(dtype, dim), mask, Triton(BF16 if dtype == torch.bfloat16 else FP16)) is None


@pytest.mark.parametrize(
    ("settings", "mask", "words"),
    [
        *((Triton(order=order), Mask(), "give null or reverse") for order in Order if order is not Order.REVERSE),
        (Triton(splits=2), Mask(), "split"),
        (Triton(bc=64), Mask(), "Bc is 128 at d = 64"),
        (Triton(br=64), Mask(), "Br is 128"),
        (Triton(), Mask(window=5), "window"),
        (Triton(softmax=OnlineSoftmax(exp=Exponential.EXP)), Mask(), "softmax.exp"),
        (
            Triton(softmax=OnlineSoftmax(Normalise.EACH, exp=Exponential.EXP2)),
            Mask(),
            "softmax.normalise: each is not implemented; give end",
        ),
        (Triton(softmax=OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)), Mask(), "softmax.rescale_threshold"),
    ],
)
def test_says_what_it_cannot_run(settings: Triton, mask: Mask, words: str) -> None:
    assert words in str(refusal(*tensors(), mask, settings))


def test_says_which_tensors_it_cannot_run() -> None:
    q, k, v = tensors()
    assert "fp32" in str(refusal(q.float(), k.float(), v.float(), Mask(), Triton(FP32)))
    assert "head_dim 64, 128 and 256" in str(refusal(*tensors(dim=96), Mask(), Triton()))
    assert "needs k and its rows" in str(refusal(q, k.mT.contiguous().mT, v, Mask(), Triton()))
    assert "needs v and its rows" in str(refusal(q, k, torch.zeros(1, 2, 256, 65, dtype=q.dtype)[..., 1:], Mask(), Triton()))
    expanded = torch.zeros(1, 1, 256, 64, dtype=q.dtype).expand(1, 2, 256, 64)
    assert "needs q and its rows" in str(refusal(expanded, k, v, Mask(), Triton()))


def test_every_pinned_tile_has_a_shape() -> None:
    for head_dim in (64, 128, 256):
        for mask in (Mask(), Mask(causal=True)):
            for queries, keys in ((100, 100), (2048, 2048), (4096, 4096), (4000, 4096), (1, 8192)):
                br = pinned_br(head_dim, mask, queries, keys)
                assert SHAPES[head_dim, br].br == br


def test_three_groups_where_they_gain() -> None:
    causal = Mask(causal=True)
    assert pinned_br(64, Mask(), 1024, 1024) == 192
    assert pinned_br(64, causal, 4096, 4096) == pinned_br(64, causal, 64, 4096) == 192
    assert pinned_br(64, causal, 2048, 2048) == 128
    assert pinned_br(64, causal, 4000, 4096) == 128, "the limit crosses two blocks of a warp group"
    assert pinned_br(128, Mask(), 4096, 4096) == 128
