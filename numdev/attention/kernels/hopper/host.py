"""Launching the Hopper kernels of both passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from numdev.arithmetic.quantise import Quantised
from numdev.attention.kernels import quantiser
from numdev.attention.kernels.hopper import backward, wide
from numdev.attention.kernels.hopper import forward as forward_kernel
from numdev.attention.kernels.hopper.launch import (
    BACKWARD,
    NARROW,
    QUERIES,
    REGISTERS,
    RESIDENT,
    ROWS,
    SHAPES,
    STAGES,
    WIDE,
    Limits,
    Work,
    hidden_queries,
    pinned_br,
    schedule,
)
from numdev.attention.kernels.hopper.order import TILE
from numdev.attention.kernels.launch import TABLES, Plan, device_of, split_count
from numdev.attention.kernels.portable import Gradients, Inputs, Launcher, view
from numdev.attention.mask import Mask
from numdev.attention.tiling import KernelLaunch

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
_Descriptor = Callable[[Tensor], TensorDescriptor]


def _described(shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any) -> _Descriptor:
    """How to describe each tensor of a shape to the copy engine, in blocks; `refusal` has checked what Triton would."""
    # A dimension of size 1 may have any stride in torch; the copy engine still requires a multiple of 16 bytes.
    strides = (*(s if n > 1 else math.ceil(shape[-1] / 16) * 16 for n, s in zip(shape[:-1], strides, strict=False)), 1)
    same = {"shape": list(shape), "strides": list(strides), "block_shape": list(block), "layout": layout}

    def descriptor(tensor: Tensor) -> TensorDescriptor:
        made: TensorDescriptor = object.__new__(TensorDescriptor)
        vars(made).update(same, base=tensor)
        return made

    return descriptor


def _blocks(like: Tensor, rows: int, columns: int) -> _Descriptor:
    """Of tensors `[batch, heads, tokens, dim]`, in blocks of `rows` tokens and `columns` of dim."""
    block = 1, 1, rows, columns
    return _described(like.shape, like.stride(), block, gl.NVMMASharedLayout.get_default_for([*block], _DTYPES[like.dtype]))


def _rows(like: Tensor, rows: int) -> _Descriptor:
    """Of one number per row, `[batch, heads, queries]` in FP32."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return _described(like.shape, like.stride(), (1, 1, rows), layout)


class Narrow(NamedTuple):
    """What the forward kernel needs to know of 8 bits: see `forward.Code`; how inputs are quantised, and the dtype of `out`."""

    promotion: int
    p_bits: int
    inputs: Quantised | None = None
    out: torch.dtype = torch.float16

    @property
    def own(self) -> tuple[Any, ...]:
        """The last constants of the kernel."""
        if self.inputs is None:
            return self.promotion, self.p_bits
        rows = (part.rows if part.shared == quantiser.BLOCK.value else 0 for part in quantiser.parts(self.inputs))
        return self.promotion, self.p_bits, True, *rows


def _groups(count: int, keys: int, dim: int) -> _Descriptor:
    """Of K of 8 bits in groups of 16 tokens, in blocks of so many keys, as the words of `primitives.packed` need them."""
    block = keys // 16, 2, 4, 2, dim
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, dim), element_bitwidth=8, rank=5)
    return _described((count, *block[1:]), (16 * dim, 2 * dim, 4 * dim, dim, 1), block, layout)


def _narrow_blocks(k: Tensor, bc: int, dtype: torch.dtype) -> tuple[_Descriptor, _Descriptor]:
    """Of K and V as `quantiser.layout` makes them of tensors like k."""
    batch, heads, keys, dim = k.shape
    groups = math.ceil(keys / 16)
    transposed = torch.empty(batch, heads, dim, 16 * groups, dtype=dtype, device="meta")[..., :keys]
    return _groups(batch * heads * groups, bc, dim), _blocks(transposed, dim, bc)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    br: int | None,
    threshold: float = 0.0,
    narrow: Narrow | None = None,
    split_size: int | None = None,
) -> Plan:
    """The call for tensors like these, which `launch.refusal` accepts: `out` in the dtype of q, or `narrow.out`; LSE in FP32.

    Inputs that are to be quantised are so before the kernel: `Plan.stages` has both calls. Splits of a fixed size have a program
    each where the tiles alone would leave multiprocessors idle; a second kernel then joins them.
    """
    (batch, heads, queries, head_dim), (kv_heads, keys), device = q.shape, k.shape[1:3], q.device
    lengths = mask.lengths(batch, keys)
    prepare: Callable[..., tuple[Tensor, ...]] | None = None
    if narrow is not None:
        if narrow.inputs is None:
            prepare = quantiser.layout(k, v, lengths)
        else:
            prepare = quantiser.plan(q, k, v, narrow.inputs, lengths)
            q = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device="meta")
    br = br or pinned_br(head_dim, mask, queries, keys)
    block = (SHAPES if narrow is None else NARROW)[head_dim, br]
    bc, group, shape, dtype = block.bc, heads // kv_heads, q.shape, q.dtype
    limits, split, processors = Limits.of(mask, queries, keys), (split_size or 0) // bc, device_of(device).multiprocessors
    splits = math.ceil(keys / split_size) if split_size else 1
    parts = splits > 1 and split_count(batch * heads * math.ceil(queries / br), keys, bc, processors) > 1
    work = Work(heads, group, queries, keys, br, limits, lengths, processors, bc, split, parts)
    name, make = f"{work} {head_dim}", partial(schedule, work, head_dim)  # a text knows its hash
    ragged = [length for length in lengths if length % bc or not length]
    masked = limits.limited or bool(ragged) or (parts and min(lengths) < keys)  # a split may begin behind the last key
    padded = any(length < keys for length in ragged) and narrow is None  # `quantiser.layout` clears what is beyond
    sizes = (bc, head_dim, block.groups, block.stages, _DTYPES[dtype])
    limited = limits.limited, limits.span > 0, limits.is_unaligned, masked, padded
    own = narrow.own if narrow else ()
    code = forward_kernel.Code(*sizes, *limited, block.registers, threshold, *own)._replace(split=split, parts=parts)
    out_dtype = dtype if narrow is None else narrow.out
    numbers = scale * math.log2(math.e), heads, group, queries, limits.shift, limits.span, splits, code
    columns = head_dim // 2 if head_dim > 128 else head_dim  # `Setting.halves` of O
    of_q, of_out = _blocks(q, ROWS, head_dim), _blocks(torch.empty(shape, dtype=out_dtype, device="meta"), ROWS, columns)
    of_k, of_v = (_blocks(k, bc, head_dim), _blocks(v, bc, head_dim)) if narrow is None else _narrow_blocks(k, bc, dtype)
    programs = TABLES.of(name, device, make).shape[1]  # [rounds, programs, 6]

    def arguments(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        """With scales, or what splits write."""
        others = (None, *rest) if parts else (*(rest or (None,)), None, None)
        return of_q(q), of_k(k), of_v(v), of_out(out), lse, tiles, *others, *numbers

    # What the compiler contracts may differ between the two launches of splits.
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": not split}
    launch = Launcher(forward_kernel.attention, (programs,), arguments, **options)
    rows, joining = batch * heads * queries, forward_kernel.joined
    join = Launcher(joining, (math.ceil(rows / 4),), lambda *own: (*own, splits, rows, head_dim), **options)

    def attend(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
        lse = q.new_empty(shape[:-1], dtype=torch.float32)
        states = tuple(q.new_empty(rows * splits, n, dtype=torch.float32) for n in (head_dim, 2)) if parts else ()
        launch(q, k, v, out, lse, TABLES.of(name, device, make), *scales, *states)
        if parts:
            join(*states, out, lse)
        return out, lse

    about = KernelLaunch("numdev hopper", br, bc, stages=block.stages, split_size=split_size, rescale_threshold=threshold)
    if prepare is None:
        return Plan(attend, about)
    return Plan(lambda *own: attend(*prepare(*own)), about, (prepare, attend))


def gradients(inputs: Inputs, mask: Mask, scale: float) -> Plan:
    """The call for inputs like these, which `launch.refusal` accepts: dQ, dK and dV in the dtype of q, delta in FP32.

    The second and the third kernel may start before their predecessor ends, and wait for what they read. They visit the queries
    that see a key; only in batch entries without keys do these see none.
    """
    if inputs.q.shape[-1] == 256:
        return _wide_gradients(inputs, mask, scale)
    q, k, v, do, out, lse = inputs
    hidden, device, dtype = hidden_queries(q.shape[2], k.shape[2], mask), q.device, q.dtype
    q, do, out, lse = (x[:, :, hidden:] for x in (q, do, out, lse))
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    group, limits, br = heads // kv_heads, Limits.of(mask, queries, keys), QUERIES[dim]
    tiles, units = math.ceil(keys / TILE), math.ceil(queries / TILE)
    rows, lengths = units * TILE, mask.lengths(batch, keys)
    masked = any(length % TILE for length in lengths) or min(lengths) < keys
    padded = any(length % TILE and length < keys for length in lengths)
    code = backward.Code(br, dim, STAGES, _DTYPES[dtype], limits.limited, limits.span > 0, masked, padded, REGISTERS)
    count = batch * kv_heads
    together = _together(count, queries * group, dim) if limits.limited else _divisor(count, RESIDENT // tiles)
    sizes = tiles, tiles * count, units, keys, limits.shift, limits.span, heads, group, together
    numbers = scale * math.log2(math.e), scale, *sizes, code
    totals = batch, heads, rows, dim
    of_inputs = _blocks(q, br, dim), _blocks(k, ROWS, dim), _blocks(v, ROWS, dim), _blocks(do, br, dim)
    meta = partial(torch.empty, device="meta")
    parts = batch, heads, rows * dim // backward.NUMBERS.value, backward.NUMBERS.value  # of dQ, as `leave_query` has them
    of_row, of_total = _rows(meta(totals[:-1]), br), _blocks(meta(parts), backward.THREADS.value, backward.NUMBERS.value)
    of_dk, of_dv = (_blocks(meta(x.shape, dtype=dtype), ROWS, dim) for x in (k, v))
    described = *of_inputs, of_row, of_row, of_dk, of_dv, of_total

    def attended(*tensors: Tensor) -> tuple[Any, ...]:
        return *(of(x) for of, x in zip(described, tensors, strict=False)), *tensors[len(described) :], *numbers

    def converted(total: Tensor, seeing: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        constants = dim, ROWS, br, limits.limited, limits.span > 0
        return total, view(seeing), *rest, scale, queries, rows, heads, limits.shift, limits.span, *constants

    preprocess, counted = _preprocess(q)
    programs = min(tiles * count, device_of(device).multiprocessors)
    main = Launcher(backward.gradients, (programs,), attended, num_warps=4, launch_pdl=True)
    convert = Launcher(backward.convert, (counted - 1,), converted, num_warps=4, launch_pdl=True)
    make = partial(torch.tensor, lengths, dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        seeing = dq
        if hidden:
            q, do, out, lse, seeing = (x[:, :, hidden:] for x in (q, do, out, lse, dq))
            dq[:, :, :hidden].zero_()
        on_device = TABLES.of(lengths, device, make)
        lse2, delta, total = (q.new_empty(shape, dtype=torch.float32) for shape in (totals[:-1], totals[:-1], totals))
        counters = q.new_empty(counted, dtype=torch.int32)
        preprocess(out, do, lse, lse2, delta, counters)
        main(q, k, v, do, lse2, delta, dk, dv, total, counters, on_device)
        convert(total, seeing, on_device, counters)
        delta = delta[..., :queries]
        return dq, dk, dv, torch.nn.functional.pad(delta, (hidden, 0)) if hidden else delta

    return Plan(run, KernelLaunch(BACKWARD, QUERIES[dim], TILE, stages=STAGES))


def _preprocess(q: Tensor) -> tuple[Launcher, int]:
    """The kernel that makes LSE log2(e) and delta of queries like these, and how many counters it clears: its programs + 1."""
    batch, heads, queries, dim = q.shape
    rows = math.ceil(queries / TILE) * TILE

    def arguments(out: Tensor, do: Tensor, lse: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        return view(out), view(do), view(lse[..., None]), *rest, queries, rows, heads, dim, ROWS, ROWS

    programs = batch * heads * rows // ROWS
    return Launcher(backward.preprocess, (programs,), arguments, num_warps=4), programs + 1


def _wide_gradients(inputs: Inputs, mask: Mask, scale: float) -> Plan:
    """`gradients` at d = 256: each kernel but the first may start before its predecessor ends, and reads nothing of it."""
    q, k, v, do = inputs[:4]
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    group, rows, limits = heads // kv_heads, math.ceil(queries / TILE) * TILE, Limits.of(mask, queries, keys)
    numbers = scale * math.log2(math.e), scale
    meta = partial(torch.empty, device="meta")
    of_row = _rows(meta((batch, heads, rows)), ROWS)
    blocks = {name: _blocks(x, ROWS, dim) for name, x in zip(("q", "k", "v", "do"), (q, k, v, do), strict=True)}
    made = {name: _blocks(meta(x.shape, dtype=q.dtype), ROWS, dim) for name, x in (("dq", q), ("dk", k), ("dv", v))}

    def launcher(sums: str, *names: str) -> Launcher:
        tokens, count = (queries, heads) if sums == "dq" else (keys, kv_heads)
        tiles, visited = math.ceil(tokens / TILE), keys if sums == "dq" else queries * group
        together = _together(batch * count, visited, dim) if limits.limited else 1
        halves = sums == "dk" or (
            sums == "dq" and limits.limited
        )  # the faster, see "What was tried" in docs/reference/kernels.md
        flags = sums == "dv", halves, limits.limited, limits.span > 0, bool(keys % ROWS)
        code = wide.Code(dim, _DTYPES[q.dtype], sums, *flags, REGISTERS)
        described = [*(blocks[name] for name in names), of_row, of_row, made[sums]]
        if halves:
            described[3] = _blocks(do if sums == "dk" else v, ROWS, dim // 2)
        sizes = *numbers, tiles, queries, keys, limits.shift, limits.span, heads, group, together, code

        def arguments(*tensors: Tensor) -> tuple[Any, ...]:
            return *(of(x) for of, x in zip(described, tensors, strict=True)), *sizes

        return Launcher(wide.gradient, (tiles * batch * count,), arguments, num_warps=4, launch_pdl=True)

    preprocess, counted = _preprocess(q)
    values, of_keys = launcher("dv", "k", "k", "q", "do"), launcher("dk", "k", "v", "q", "do")
    of_queries = launcher("dq", "q", "do", "k", "v")

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        lse2, delta = (q.new_empty((batch, heads, rows), dtype=torch.float32) for _ in range(2))
        preprocess(out, do, lse, lse2, delta, q.new_empty(counted, dtype=torch.int32))
        values(k, k, q, do, lse2, delta, dv)
        of_keys(k, v, q, do, lse2, delta, dk)
        of_queries(q, do, k, v, lse2, delta, dq)
        return dq, dk, dv, delta[..., :queries]

    return Plan(run, KernelLaunch(WIDE, ROWS, ROWS, stages=STAGES))


def _together(heads: int, tokens: int, head_dim: int) -> int:
    """How many of all heads of a batch start together under a causal limit: a divisor of them.

    `tokens` are those that each visits, of all heads that share it. Up to d = 128 all walks of a head begin at its last unit and
    wait for their turns there: with more heads at a time, fewer walks wait. Since they advance in step, the cache holds only a
    part of each head. The bounds, 48 MiB of Q in 16 bits and 4096 / d heads, are within 2 % of the fastest on an H200 at d = 64
    and 128 (`reports/reference/h200/benchmarks/backward_variants.txt`), and change nothing at d = 256.
    """
    return _divisor(heads, min(4096 // head_dim, math.ceil(1.5 * 2**24 / (tokens * head_dim))))


def _divisor(heads: int, most: int) -> int:
    """The largest divisor of `heads` up to `most`; at least 1."""
    return next((n for n in range(min(heads, most), 1, -1) if heads % n == 0), 1)
