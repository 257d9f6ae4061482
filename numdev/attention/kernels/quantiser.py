"""From q, k and v to codes in E4M3 with FP32 scales, as the Hopper kernel reads them: k and v in whole groups of 16 tokens, and v
transposed.

A scale is `fp32(max |x| / 448)` over a block of rows, a head or a tensor, 1 where all is 0, and a code `e4m3(fp32(x / s))`, to
nearest even: `Quantised.codes`. Where every scale is one of a block, one launch reads each number once; the largest number of a
head or a tensor takes a launch before it. The rotation is `Quantised`'s: products of 16-bit numbers with signs are exact, and
added up in FP32. Keys beyond a batch entry's last are not read, and their codes are 0.

Numbers that are codes already are laid out alike, by `layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from numdev.arithmetic.formats import E4M3FN
from numdev.arithmetic.quantise import Quantised, Scale, random_hadamard
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.kernels.casts import FUSED, Spec, cast, spec
from numdev.attention.kernels.forward import head, load
from numdev.attention.kernels.launch import TABLES
from numdev.attention.kernels.portable import Launcher

BLOCK, HEAD, TENSOR = (tl.constexpr(kind) for kind in range(3))
SHARED = {Scale.BLOCK: BLOCK.value, Scale.HEAD: HEAD.value, Scale.TENSOR: TENSOR.value}
CHUNK = tl.constexpr(32)  # columns of a rotation at a time
_ROWS = 128  # of a program, where they are not those of a block


class Part(NamedTuple):
    """Constants of q, k or v: rows of a program, what shares a scale, and whether it is rotated, and transposed."""

    rows: int
    shared: int
    turned: bool
    transposed: bool


class Code(NamedTuple):
    """Constants of one compiled kernel; with `looks` it finds the largest numbers of heads and tensors, and no codes."""

    q: Part
    k: Part
    v: Part
    dim: int
    looks: bool
    rounds: Spec = spec(Cast(E4M3FN, overflow=Overflow.SATURATE), "precision.quantise.to")


class Side(NamedTuple):
    """q, k or v in memory with its strides, its codes, of which `stored` tokens are in memory, and its place in other tensors.

    `before` scales of a batch entry come before its own; its largest number stands at `largest`, its lengths at `lengths`.
    """

    at: Any
    batch: Any
    head: Any
    row: Any
    dim: Any
    codes: Any
    heads: Any
    tokens: Any
    stored: Any
    before: Any
    largest: Any
    lengths: Any


@triton.jit
def quantise_rows(x, scales, per_entry, lengths, rotation, largest, CODE: tl.constexpr, PART: tl.constexpr):
    """The rows of one program."""
    block, pair = tl.program_id(0), tl.program_id(1)
    b, h = pair // x.heads, pair % x.heads
    ROWS: tl.constexpr = PART.rows
    DIM: tl.constexpr = CODE.dim
    ROUNDS: tl.constexpr = CODE.rounds
    own = head(x, b, h)
    length = tl.load(lengths + x.lengths + b)
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    if PART.turned:
        y = tl.zeros([ROWS, DIM], tl.float32)
        for first in range(0, DIM, CHUNK):
            some = first + tl.arange(0, CHUNK)
            signs = tl.load(rotation + some[:, None] * DIM + columns[None, :])
            y = tl.dot(load(own, rows, some, length, DIM, True), signs, y, input_precision="ieee")
        y = y * DIM**-0.5
    else:
        y = load(own, rows, columns, length, DIM, True).to(tl.float32)
    most = tl.max(tl.max(tl.abs(y), 1), 0)
    place = b * per_entry + x.before + h
    if PART.shared == BLOCK:
        place = b * per_entry + x.before + h * tl.cdiv(x.tokens, ROWS) + block
    held = place
    if PART.shared == TENSOR:
        held = x.largest
    if CODE.looks:
        if PART.shared != BLOCK:  # bits of numbers from 0 on have their order
            tl.atomic_max(largest + held, most.to(tl.int32, bitcast=True))
    else:
        if PART.shared != BLOCK:
            most = tl.load(largest + held).to(tl.float32, bitcast=True)
        scale = tl.where(most > 0, tl.math.div_rn(most, 448.0), 1.0)
        tl.store(scales + place, scale)
        code = tl.math.div_rn(y, scale)
        if not FUSED:  # the interpreter's own cast does not round to nearest
            code = cast(code, ROUNDS)
        store_codes(x, pair, rows, columns, code.to(tl.float8e4nv), DIM, PART.transposed)


@triton.jit
def store_codes(x, pair, rows, columns, code, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Codes `[rows, DIM]` of a head, to their place."""
    at = x.codes + pair.to(tl.int64) * x.stored * DIM
    if TRANSPOSED:
        at = at + columns.to(tl.int64)[:, None] * x.stored + rows[None, :]
        tl.store(at, tl.trans(code), mask=(rows < x.stored)[None, :])
    else:
        tl.store(at + rows[:, None] * DIM + columns[None, :], code, mask=(rows < x.stored)[:, None])


@triton.jit
def lay_out(x, lengths, ROWS: tl.constexpr, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A program for some rows of a head of k or v, whose numbers are codes already; 0 beyond a batch entry's last key."""
    pair = tl.program_id(1)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    b, h = pair // x.heads, pair % x.heads
    store_codes(x, pair, rows, columns, load(head(x, b, h), rows, columns, tl.load(lengths + b), DIM, True), DIM, TRANSPOSED)


@triton.jit
def quantise(q, k, v, scales, lengths, rotation, largest, batch, per_entry, CODE: tl.constexpr):
    """A program for some rows of a head of q, k or v; `rotation` and `largest` are None where nothing reads them."""
    Q: tl.constexpr = CODE.q
    K: tl.constexpr = CODE.k
    V: tl.constexpr = CODE.v
    side, block, pair = tl.program_id(2), tl.program_id(0), tl.program_id(1)
    if side == 0:
        if block * Q.rows < q.stored and pair < batch * q.heads:
            quantise_rows(q, scales, per_entry, lengths, rotation, largest, CODE, Q)
    elif side == 1:
        if block * K.rows < k.stored and pair < batch * k.heads:
            quantise_rows(k, scales, per_entry, lengths, rotation, largest, CODE, K)
    elif block * V.rows < v.stored and pair < batch * v.heads:
        quantise_rows(v, scales, per_entry, lengths, rotation, largest, CODE, V)


def parts(inputs: Quantised) -> tuple[Part, Part, Part]:
    """The constants of q, k and v."""

    def part(name: str) -> Part:
        scale = inputs.shared_by(of_v=name == "v")
        rows = inputs.rows(name) if scale is Scale.BLOCK else _ROWS
        return Part(rows, SHARED[scale], inputs.hadamard and name != "v", name == "v")

    return part("q"), part("k"), part("v")


def plan(q: Tensor, k: Tensor, v: Tensor, inputs: Quantised, lengths: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The call that quantises tensors like these, of BF16, FP16 or FP32; of each batch entry so many keys exist.

    It returns codes of q `[batch, heads, queries, dim]`, of k `[batch, kv_heads, whole, dim]` and of v `[batch, kv_heads, dim,
    whole]`, and the scales `[batch, scales of an entry]`: those of each head of q, then of k, then of v.
    """
    (batch, heads, queries, dim), (kv_heads, keys), device, dtype = q.shape, k.shape[1:3], q.device, q.dtype
    whole, own = -keys % 16 + keys, parts(inputs)
    code, looks = Code(*own, dim, False), any(part.shared != BLOCK.value for part in own)
    sizes = [(heads, queries, queries), (kv_heads, keys, whole), (kv_heads, keys, whole)]
    blocks = [math.ceil(size[1] / part.rows) for size, part in zip(sizes, own, strict=True)]
    counts = [size[0] * (n if part.shared == BLOCK.value else 1) for size, n, part in zip(sizes, blocks, own, strict=True)]
    total = batch * sum(counts)
    places = [(sum(counts[:side]), total + side, batch * min(side, 1)) for side in range(3)]
    ends = [queries] * batch + [*lengths]

    def launcher(code: Code) -> Launcher:
        def arguments(*tensors: Tensor) -> tuple[Any, ...]:
            pairs, (scales, ends, *more) = zip(tensors[:6:2], tensors[1:6:2], sizes, places, strict=True), tensors[6:]
            sides = [Side(x, *x.stride(), codes, *size, *place) for x, codes, size, place in pairs]
            rotation = more.pop(0) if inputs.hadamard else None
            return *sides, scales, ends, rotation, more.pop() if more else None, batch, sum(counts), code

        return Launcher(quantise, (max(blocks), batch * heads, 3), arguments, num_warps=8 if dim > 128 else 4)

    look, write = launcher(code._replace(looks=True)), launcher(code)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        shapes = (batch, heads, queries, dim), (batch, kv_heads, whole, dim), (batch, kv_heads, dim, whole)
        codes = [torch.empty(shape, device=device, dtype=torch.float8_e4m3fn) for shape in shapes]
        scales = torch.empty(batch, sum(counts), device=device)
        more = [TABLES.of(("ends", *ends), device, partial(torch.tensor, ends, dtype=torch.int32))]
        if inputs.hadamard:
            signs = partial(random_hadamard, dim, inputs.seed)
            more.append(TABLES.of(("signs", dim, inputs.seed, dtype), device, lambda: signs().sign().to(dtype)))
        pairs = [x for pair in zip(tensors, codes, strict=True) for x in pair]
        if looks:
            more.append(torch.zeros(total + 3, dtype=torch.int32, device=device))
            look(*pairs, scales, *more)
        write(*pairs, scales, *more)
        return *codes, scales

    return run


def layout(k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The call that returns q, k `[batch, kv_heads, whole, dim]` and v `[batch, kv_heads, dim, keys]`, in rows of `whole` tokens.

    That is the next multiple of 16. A tensor that lies so already is returned as it is.
    """
    (batch, heads, keys, dim), device = k.shape, k.device
    whole = -keys % 16 + keys
    is_whole = whole == keys, min(lengths) == whole
    is_kept = [yes and x.is_contiguous() and not x.data_ptr() % 16 for yes, x in zip(is_whole, (k, v.mT), strict=True)]

    def launcher(transposed: bool) -> Launcher:
        def arguments(x: Tensor, codes: Tensor, ends: Tensor) -> tuple[Any, ...]:
            return Side(x, *x.stride(), codes, heads, keys, whole, 0, 0, 0), ends, _ROWS, dim, transposed

        return Launcher(lay_out, (math.ceil(whole / _ROWS), batch * heads), arguments, num_warps=4)

    launchers = launcher(False), launcher(True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        made = [k, v.mT]
        for i, (x, shape) in enumerate(((k, (whole, dim)), (v, (dim, whole)))):
            if not is_kept[i]:
                ends = TABLES.of(("ends", *lengths), device, partial(torch.tensor, lengths, dtype=torch.int32))
                made[i] = x.new_empty(batch, heads, *shape)
                launchers[i](x.view(torch.uint8), made[i].view(torch.uint8), ends)
        return q, made[0], made[1][..., :keys]

    return run
