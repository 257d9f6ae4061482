"""Requests of the Hopper kernels: which are refused and why, and lists of tiles: every tile once, in balance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.kernels import portable, quantiser
from numdev.attention.kernels.hopper import forward, host
from numdev.attention.kernels.hopper.launch import (
    NARROW,
    QUERIES,
    SHAPES,
    Limits,
    Work,
    keys_of_block,
    pinned_br,
    refusal,
    schedule,
)
from numdev.attention.mask import Mask
from numdev.attention.softmax import DeltaForm, Exponential, Normalise, OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tiling import Order
from numdev.attention.triton import Kernel, Triton, TritonBackward
from numdev.errors import BadInput, Unsupported

BACKWARD = TritonBackward(Triton())


@st.composite
def works(draw: st.DrawFn) -> Work:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys, batch = draw(st.integers(1, 700)), draw(st.integers(1, 700)), draw(st.integers(1, 3))
    lengths = tuple(draw(st.integers(0, keys)) for _ in range(batch))
    (br, bc), programs = draw(st.sampled_from([(128, 128), (192, 128), (128, 64)])), draw(st.integers(1, 40))
    split, parts = draw(st.sampled_from([(0, False), (1, False), (2, False), (1, True), (2, True)]))
    limits = Limits.of(Mask(draw(st.booleans()), None if split else draw(st.none() | st.integers(1, 700))), queries, keys)
    return Work(kv_heads * group, group, queries, keys, br, limits, lengths, programs, bc, split, parts)


def seen_blocks(work: Work, rows: int, length: int) -> int:
    """By the mask: blocks up to the last key that any row up to `rows` sees, rows beyond the last query counted too."""
    last = min(length - 1, rows + work.limits.shift) if work.limits.limited else length - 1
    return max(1, last // work.bc + 1)


@given(works())
def test_lists_have_every_tile_once_without_gaps_and_in_balance(work: Work) -> None:
    """Each tile goes to the program that is free first, so that loads differ by at most one tile; two empty rounds end a list.

    The splits of a tile follow one another, from the first key on, and cover it; or each is a tile by itself.
    """
    table = schedule(work, 64)
    rows, counts = range(0, work.queries, work.br), table[:, :, 3]
    every = [(row, b, h) for row in rows for b in range(len(work.lengths)) for h in range(work.heads)]
    splits = math.ceil(work.keys / (work.bc * work.split)) if work.parts else 1
    assert table.shape[1:] == (min(work.programs, len(every) * splits), 6)
    lists = [[entry for entry in table[:, program].tolist() if entry[3]] for program in range(table.shape[1])]
    of_tile: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, b, h, stop, length, first in itertools.chain(*lists):
        assert length == work.lengths[b]
        of_tile.setdefault((row, b, h), []).append((first, stop))
    assert set(of_tile) == set(every)
    for (row, b, h), ranges in of_tile.items():
        seen = seen_blocks(work, row + work.br - 1, work.lengths[b])
        if work.parts:
            assert sorted(first for first, _ in ranges) == [work.split * i for i in range(splits)]
            ranges[:] = sorted(ranges)[: math.ceil(seen / work.split)]
        else:
            assert sum((row, b, h) in {tuple(entry[:3]) for entry in each} for each in lists) == 1
        assert ranges[-1][1] == seen
        assert all(first < stop <= first + (work.split or seen) for first, stop in ranges)
        if not work.limits.span:
            assert [first for first, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert bool(((counts > 0).int().diff(dim=0) <= 0).all())
    assert int(counts[-2:].sum()) == 0
    cost = [work.cost([(entry[5], entry[3]) for entry in each]) for each in lists]
    whole = max(work.cost([each] if work.parts else ranges) for ranges in of_tile.values() for each in ranges)
    assert max(cost) - min(cost) <= whole


@pytest.mark.parametrize(("head_dim", "br", "bc"), [(64, 192, 128), (128, 128, 128), (256, 128, 64)])
@pytest.mark.parametrize("queries", [2048, 4096, 8192, 16384])
def test_the_programs_of_a_gpu_end_at_about_the_same_time_under_a_causal_limit(
    head_dim: int, br: int, bc: int, queries: int
) -> None:
    """16,384 tokens of 2048 / d heads on 132 multiprocessors: a small last part of heads took up to 13 % more."""
    work = Work(2048 // head_dim, 1, queries, queries, br, Limits(True, 0), (queries,) * (16384 // queries), 132, bc)
    blocks = schedule(work, head_dim)[:, :, 3].sum(0)
    assert float(blocks.float().mean() / blocks.max()) > 0.95


@given(works())
def test_a_group_of_rows_passes_over_one_block_of_a_tile_at_most(work: Work) -> None:
    """With two buffers a group that passed over a second block would wait for one that it holds: the kernel would never end."""
    for length in work.lengths:
        for row in range(0, work.queries, work.br):
            blocks = [seen_blocks(work, top + 63, length) for top in range(row, row + work.br, 64)]
            assert work.parts or blocks[-1] == work.ranges(row, length)[-1][1]
            assert max(blocks) - min(blocks) <= 1


def test_every_shape_keeps_to_what_the_kernels_assert() -> None:
    for (head_dim, br), shape in [*SHAPES.items(), *NARROW.items()]:
        assert 64 * (shape.groups - 1) <= shape.bc == keys_of_block(head_dim)
        assert shape.br == br
        assert 128 * (shape.groups * shape.registers + 24) <= 65536, "registers of a multiprocessor"
    assert all(128 % br == 0 for br in QUERIES.values()), "a unit is a whole number of tiles"


def test_three_groups_where_they_gain() -> None:
    causal = Mask(causal=True)
    assert pinned_br(64, Mask(), 1024, 1024) == 192
    assert pinned_br(64, causal, 4096, 4096) == pinned_br(64, causal, 64, 4096) == 192
    assert pinned_br(64, causal, 2048, 2048) == 128
    assert pinned_br(64, causal, 4000, 4096) == 128, "the limit crosses two blocks of a warp group"
    for head_dim in (64, 128, 256):
        for mask in (Mask(), causal):
            assert all((head_dim, pinned_br(head_dim, mask, n, 4096)) in SHAPES for n in (1, 100, 4000, 4096))


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(dtype: torch.dtype | None = torch.bfloat16, dim: int = 64, device: str = "cpu") -> Tensors:
    """q, k, v and do."""
    q, k, v, do = (torch.zeros(1, 2, 256, dim, dtype=dtype, device=device) for _ in range(4))
    return q, k, v, do


def reasons(inputs: Tensors, mask: Mask, changes: dict[str, Any]) -> tuple[str | None, str | None]:
    """Why either pass is refused; a setting that one pass alone has is not tried on the other."""
    settings: list[Any] = [Triton(), BACKWARD]
    forward, backward = (
        replace(each, **{name: value for name, value in changes.items() if hasattr(each, name)}) for each in settings
    )
    q, k, v, do = inputs
    return refusal(forward, mask, q=q, k=k, v=v), refusal(backward, mask, q=q, k=k, v=v, do=do)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_runs_what_it_is_made_for(fmt: Format) -> None:
    unrounded = Recompute(output=OutputForDelta.UNROUNDED, exponential=Exponential.EXP2)
    for mask in (Mask(), Mask(causal=True), Mask(key_lengths=(100,)), Mask(causal=True, window=5, key_lengths=(0,))):
        for dim in (64, 128):
            assert reasons(tensors(fmt.dtype, dim), mask, {"fmt": fmt, "recompute": unrounded}) == (None, None)
        wide = None if mask.key_lengths is None else "at d = 256 it takes no key lengths"
        assert reasons(tensors(fmt.dtype, 256), mask, {"fmt": fmt, "recompute": unrounded}) == (None, wide)


Q, K, V, DO = tensors()
FLAT, WIDE = torch.zeros(1, 1, 256, 64, dtype=Q.dtype).expand(1, 2, 256, 64), tensors(dim=128)[0]
SHIFTED = torch.zeros(1, 2, 256, 65, dtype=Q.dtype)[..., 1:]
BY_PROBABILITIES = Recompute(DeltaForm.PROBABILITIES, exponential=Exponential.EXP2)
LAZY = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
# Inputs, mask, settings, and the words with which each pass is refused; None where it runs.
REFUSED: list[tuple[Tensors, Mask, dict[str, Any], str | None, str | None]] = [
    ((Q, K, V, DO), Mask(), {"order": Order.REVERSE}, None, "tiling.order"),
    ((Q, K, V, DO), Mask(), {"order": Order.FORWARD}, "give null or reverse", "tiling.order"),
    ((Q, K, V, DO), Mask(), {"bc": 64}, "Bc is 128 at d = 64", "tiling.bc"),
    ((Q, K, V, DO), Mask(), {"softmax": OnlineSoftmax(exp=Exponential.EXP)}, "softmax.exp", None),
    ((Q, K, V, DO), Mask(), {"softmax": OnlineSoftmax(Normalise.EACH, Exponential.EXP2)}, "softmax.normalise: each is not", None),
    ((Q, K, V, DO), Mask(), {"softmax": LAZY}, None, None),
    ((Q, K, V, DO), Mask(), {"softmax": OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0)}, "softmax.p_scale", None),
    ((Q, K, V, DO), Mask(), {"recompute": Recompute()}, None, "recompute.exponential"),
    ((Q, K, V, DO), Mask(), {"recompute": BY_PROBABILITIES}, None, "recompute.delta: probabilities"),
    (tensors(torch.float32), Mask(), {"fmt": FP32}, "it takes fp16, bf16 and e4m3fn, not fp32", "not fp32"),
    (tensors(dim=96), Mask(), {}, "head_dim 64, 128 and 256, not 96", "head_dim 64, 128 and 256, not 96"),
    (tensors(dim=256), Mask(key_lengths=(100,)), {}, None, "at d = 256 it takes no key lengths"),
    ((Q, K, WIDE, DO), Mask(), {}, "v has 128, q 64", "v has 128, q 64"),
    ((Q, K, V, DO.float()), Mask(), {}, None, "do is torch.float32"),
    ((Q, K.mT.contiguous().mT, V, DO), Mask(), {}, "needs k and its rows", "needs k and its rows"),
    ((Q, K, SHIFTED, DO), Mask(), {}, "needs v and its rows", "needs v and its rows"),
    ((FLAT, K, V, DO), Mask(), {}, "needs q and its rows", "needs q and its rows"),
    ((Q, K, V, FLAT), Mask(), {}, None, "needs do and its rows"),
]


@pytest.mark.parametrize(("inputs", "mask", "changes", "forward", "backward"), REFUSED)
def test_says_what_it_cannot_run(
    inputs: Tensors, mask: Mask, changes: dict[str, Any], forward: str | None, backward: str | None
) -> None:
    for words, reason in zip((forward, backward), reasons(inputs, mask, changes), strict=True):
        assert reason is None if words is None else words in str(reason)


def scaled(p_scale: float) -> OnlineSoftmax:
    return OnlineSoftmax(exp=Exponential.EXP2, p_scale=p_scale)


@pytest.mark.parametrize(
    ("fmt", "dim", "changes", "words"),
    [
        (E4M3FN, 64, {}, None),
        (E4M3FN, 128, {"softmax": scaled(256.0), "promotion": 4}, None),
        (E4M3FN, 256, {"softmax": scaled(0.5), "promotion": 0}, None),
        (E4M3FN, 256, {}, "give attention.promotion=0, not 1"),
        (E4M3FN, 64, {"softmax": scaled(3.0)}, "softmax.p_scale: 3.0"),
        (E4M3FN, 64, {"br": 192}, None),
        (E4M3FN, 128, {"br": 192}, "its Br is 128"),
        (E5M2, 64, {}, "it takes fp16, bf16 and e4m3fn, not e5m2"),
    ],
)
def test_eight_bits(fmt: Format, dim: int, changes: dict[str, Any], words: str | None) -> None:
    """K and V may have any strides: they are laid out anew."""
    q, k, v, _ = tensors(fmt.dtype, dim)
    reason = refusal(Triton(fmt, kernel=Kernel.HOPPER, **changes), Mask(), q=q, k=k.mT.contiguous().mT, v=v)
    assert reason is None if words is None else words in str(reason)


LOW = Cast.parse("e4m3fn:saturate")


@pytest.mark.parametrize(
    ("dim", "changes", "words"),
    [
        (128, {"scale": Scale.TENSOR}, None),
        (128, {"scale": Scale.HEAD, "hadamard": True, "seed": 7}, None),
        (64, {"scale": Scale.BLOCK, "block_q": 64, "values": LOW, "values_scale": Scale.HEAD}, None),
        (256, {"scale": Scale.BLOCK, "block": 64}, None),
        (64, {"scale": Scale.BLOCK, "block": 64}, "give precision.quantise.block=128, not 64"),
        (64, {"values": LOW}, "give precision.quantise.values_scale"),
    ],
)
def test_inputs_that_are_quantised(dim: int, changes: dict[str, Any], words: str | None) -> None:
    """Of any strides, since the quantiser reads them."""
    settings = Triton(E4M3FN, kernel=Kernel.HOPPER, promotion=0, quantise=Quantised(LOW, **changes), output=BF16)
    q, k, v, _ = tensors(dim=dim)
    reason = refusal(settings, Mask(), q=q.mT.contiguous().mT, k=k, v=v)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": Kernel.PORTABLE}, "only the Hopper kernel in e4m3fn"),
        ({"fmt": BF16}, "only the Hopper kernel in e4m3fn"),
        ({"output": FP32}, "precision.output: 'fp32' .*fp16 or bf16"),
        ({"quantise": Quantised(LOW, Scale.ROW)}, "precision.quantise.scale: 'row' .*tensor or head or block"),
        ({"quantise": Quantised(LOW, smoothing=Smoothing.K)}, "precision.quantise.smoothing: 'k'"),
        ({"quantise": Quantised(LOW, Scale.BLOCK, 48)}, "precision.quantise.block: '48' .*64 or 128"),
        ({"quantise": Quantised(Cast.parse("e5m2"))}, "precision.quantise.to: 'e5m2"),
        ({"quantise": Quantised(LOW, queries=Cast.parse("bf16"))}, "precision.quantise.queries: 'bf16'"),
    ],
)
def test_quantised_inputs_that_no_kernel_has(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        replace(Triton(E4M3FN, kernel=Kernel.HOPPER, quantise=Quantised(LOW)), **changes)


@pytest.mark.parametrize("lengths", [None, (300, 130)], ids=str)
@pytest.mark.parametrize(
    "inputs",
    [Quantised(LOW), Quantised(LOW, Scale.HEAD, values=LOW, values_scale=Scale.BLOCK), Quantised(LOW, Scale.BLOCK, 128, 64)],
    ids=str,
)
def test_scales_are_where_the_kernel_looks_for_them(
    inputs: Quantised, lengths: tuple[int, ...] | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel gets, read by the rule of its `scales_of`: a number is its code times its scale, and V is transposed."""
    got: list[Any] = []
    launch = portable.Launcher

    def instead(kernel: Any, grid: Any, arguments: Any, **options: Any) -> Any:
        if kernel is not forward.attention:
            return launch(kernel, grid, arguments, **options)
        return lambda *tensors: got.extend([dict(zip(kernel.arg_names, arguments(*tensors), strict=True)), *tensors])

    monkeypatch.setattr(host, "Launcher", instead)
    generator = torch.Generator().manual_seed(1)
    sizes = {"q": (2, 4, 200, 64), "k": (2, 2, 300, 64), "v": (2, 2, 300, 64)}
    tensors = {name: torch.randn(size, generator=generator).to(device) for name, size in sizes.items()}
    narrow = host.Narrow(1, 8, inputs, torch.bfloat16)
    q, k, v, mask = tensors["q"], tensors["k"], tensors["v"], Mask(key_lengths=lengths)
    host.forward(q, k, v, mask, 0.125, None, narrow=narrow).run(q, k, v)
    named, *codes, out, lse, tiles, scales = got
    assert (named["scales"] is scales, named["tiles"] is tiles, named["lse"] is lse, named["heads"]) == (True, True, True, 4)
    assert [list(named[f"d_{name}"].shape) for name in "qkvo"] == [[*q.shape], [76, 2, 4, 2, 64], [2, 2, 64, 300], [*q.shape]]
    assert named["d_v"].strides == [2 * 64 * 304, 64 * 304, 304, 1]
    assert (out.shape, out.dtype, lse.shape) == (sizes["q"], torch.bfloat16, sizes["q"][:-1])
    _, _, of_blocks, *rows = narrow.own
    assert of_blocks
    counts = [-(-sizes[name][2] // size) if size else 1 for name, size in zip("qkv", rows, strict=True)]
    before = {"q": 0, "k": 4 * counts[0], "v": 4 * counts[0] + 2 * counts[1]}
    assert scales.shape == (2, before["v"] + 2 * counts[2])
    by_token = codes[0], codes[1], codes[2].mT
    for name, code, size, count in zip("qkv", by_token, rows, counts, strict=True):
        x = tensors["q"] if name == "q" else mask.without_padding(tensors[name])
        for b, h, token in itertools.product(range(2), range(x.shape[1]), (0, 63, 64, 127, 128, 199, 299)):
            if token < x.shape[2]:
                scale = scales[b, before[name] + h * count + (token // size if size else 0)]
                torch.testing.assert_close(code[b, h, token].float() * scale, x[b, h, token], rtol=0.07, atol=float(scale) / 500)


def test_a_kernel_that_is_named_is_refused_where_it_cannot_run(device: str) -> None:
    """For a window no Hopper kernel is there, on any GPU."""
    with pytest.raises(Unsupported, match="the Hopper kernel cannot run this") as error:
        replace(BACKWARD, kernel=Kernel.HOPPER)(*tensors(device=device), Mask(window=5))
    assert error.value.field == "backward.kernel"


@pytest.mark.parametrize("lengths", [(40, 37), (21, 0)], ids=str)
def test_v_of_eight_bits_is_transposed_and_0_where_no_key_is(lengths: tuple[int, ...], device: str) -> None:
    """K is in memory of whole groups of 16 tokens; what is beyond the last key of a batch entry may be NaN."""
    k, v = (torch.randn(2, 3, 40, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    for entry, length in enumerate(lengths):
        k[entry, :, length:], v[entry, :, length:] = float("nan"), float("nan")
    apart = k.transpose(1, 2).contiguous().transpose(1, 2)
    _, laid_k, laid_v = quantiser.layout(apart, v, lengths)(k, apart, v)
    assert laid_k.shape == (2, 3, 48, 64)
    assert laid_k.is_contiguous()
    assert laid_v.shape == (2, 3, 64, 40)
    assert laid_v.stride()[-2:] == (48, 1)
    for entry, length in enumerate(lengths):
        assert torch.equal(laid_k[entry, :, :length].float(), k[entry, :, :length].float())
        assert torch.equal(laid_v[entry, ..., :length].float(), v[entry, :, :length].mT.float())
        assert not laid_k[entry, :, length:].float().any()
        assert not laid_v[entry, ..., length:].float().any()


def test_codes_are_copied_where_the_copy_engine_cannot_read_them(device: str) -> None:
    memory = torch.randn(2 * 3 * 48 * 64 + 16, device=device).to(torch.float8_e4m3fn)
    for offset in (0, 8):
        k = memory[offset : offset - 16].view(2, 3, 48, 64)
        v = memory[offset : offset - 16].view(2, 3, 64, 48).mT
        laid = quantiser.layout(k, v, (48, 48))(k, k, v)
        for x, y in zip(laid[1:], (k, v.mT), strict=True):
            assert (x.data_ptr() == y.data_ptr()) == (not y.data_ptr() % 16)
            assert torch.equal(x.float(), y.float())


@given(st.integers(1, 512), st.integers(1, 1 << 20), st.sampled_from([64, 128, 256]))
def test_heads_start_together_in_equal_parts(heads: int, tokens: int, head_dim: int) -> None:
    """Numbers of tiles count whole parts; the cache holds 48 MiB of Q, or one head."""
    together = host._together(heads, tokens, head_dim)
    assert heads % together == 0
    assert together * head_dim <= 4096
    assert together == 1 or (together - 1) * 2 * tokens * head_dim < 48 << 20


def test_the_addition_of_the_copy_engine_is_still_there() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    from numdev.attention.kernels.hopper.primitives import BUILDER

    assert hasattr(libtriton.gluon_ir.GluonOpBuilder, BUILDER)
