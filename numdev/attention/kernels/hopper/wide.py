"""The backward pass for Hopper GPUs at d = 256, as three kernels of one form without additions in memory, in Gluon.

At d = 256 dK and dV of 64 keys take all registers of a warp group, and the one kernel of `backward` does not fit. So dQ, dK and
dV are each the sum of a kernel of its own, which recomputes S, and dP where it needs it: eight products of a tile instead of
five. A program owns 128 rows X_1 (and X_2), 64 for each of two computing warp groups, and visits blocks of 64 rows Y_1, Y_2:

| sum | X_1, X_2 | Y_1, Y_2 | of each block |
|---|---|---|---|
| dQ | Q, dO | K, V | S = Q K^T, dP = dO V^T, dQ += F(dS) K |
| dK | K, V | Q, dO | S^T = K Q^T, dP^T = V dO^T, dK += F(dS^T) Q |
| dV | K | Q, dO | S^T = K Q^T, dV += F(P^T) dO |

with `P = 2^(scale log2(e) S - LSE log2(e))`, `dS = P o (dP - delta)`, and dQ and dK times scale at the end. Blocks are visited
from the first to the last, those of the heads that share a KV head one after the other, and no program waits for another:
every launch gives the same bits. The policy is `kernel(F)` of the backward pass.

The loop is rotated: S, and dP, of the next block are computed together with the sum of the current one; dP runs during the
exponentials.

Barriers, all in shared memory; a phase completes after the arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| x_full (one) | 1 and bytes | the loader, arming it for the copies | both groups, before their first product |
| y1_full, y2_full (stage) | 1 and bytes | the loader, arming it for a block (and its LSE and delta) | both groups, reading it |
| y1_empty, y2_empty (stage) | 2 | each group, after the last product of the block | the loader, before the next block |
| turn (group) | 1 | for dV the other group, its products issued; for group 0 first the program | group w, before its products |

KB of shared memory: 128 for X_1 and X_2, 64 for Y_1 in two stages and 32 for Y_2 in one; of dV 64, 64 and 64: 224 of 227 or 192.
Registers per thread: 128 for the sum, 32 each for S and dP, 16 for an operand, of 240.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from numdev.attention.kernels.hopper import order
from numdev.attention.kernels.hopper.primitives import (
    aggregate,
    await_kernel_before,
    barriers,
    hidden_zero,
    let_kernel_after_start,
    record,
)

place = gluon.jit(order.place)

ROWS = gl.constexpr(64)  # of a warp group, and of a block
TILE = gl.constexpr(order.TILE)


class Code(NamedTuple):
    """Constants of one compiled kernel.

    Attributes:
        dim: head_dim.
        dtype: of inputs and outputs.
        sums: `dq`, `dk` or `dv`.
        first: whether the launch before is the one that makes LSE log2(e) and delta, and not another of these.
        halves: whether the columns of Y_2 are loaded in halves, and each buffer is free as soon as its half is read.
        causal: whether a query sees no key after its own position, or a fixed number of keys further.
        windowed: whether it sees, in addition, no key `span` or more before the last one that it sees.
        ragged: whether the last block of keys holds keys that do not exist.
        registers: of a computing thread.
    """

    dim: int
    dtype: Any
    sums: str
    first: bool
    halves: bool
    causal: bool
    windowed: bool
    ragged: bool
    registers: int


@aggregate
class Setting:
    """The constants of `Code`, and what follows from them.

    Attributes:
        of_rows: whether the program owns queries; otherwise it owns keys.
        of_values: whether dP is not needed.
        stages: buffers for Y_2, of its halves or of blocks.
        s, o, p: layouts of S and dP [ROWS, ROWS], of the sum [ROWS, dim], and of P and dS as operands.
        row, column: layouts of a number for each row, and for each column of S.
    """

    __annotations__ = dict.fromkeys(
        (*Code._fields, "of_rows", "of_values", "stages", "s", "o", "p", "row", "column"), gl.constexpr
    )

    @gluon.constexpr_function
    def __init__(self, code):
        for name in code._fields:
            setattr(self, name, gl.constexpr(getattr(code, name)))
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 16])
        self.of_rows = gl.constexpr(code.sums == "dq")
        self.of_values = gl.constexpr(code.sums == "dv")
        self.stages = gl.constexpr(2 if code.sums == "dv" or code.halves else 1)
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, s))
        self.column = gl.constexpr(gl.SliceLayout(0, s))


@record("row b h other heads first whole_first whole_last last keys shift span")
class Work:
    """The tile of a program, whose first row is `row`, of head h: of Q for dQ, otherwise of K.

    It visits the blocks `first` to `last` of each of `heads` heads from `other` on. Those before `whole_first` and from
    `whole_last` on need a mask.
    """


@record("x1 x2 y1 y2 lse2 delta x_full y1_full y1_empty y2_full y2_empty turn", gl.shared_memory_descriptor)
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""


@gluon.jit
def work_of(setting, tiles, queries, keys, shift, span, heads, shared_by, together):
    """The program's tile: `together` heads start together, under a causal limit the tile with the longest walk of each first.

    It visits one block at least, whose keys may all be masked.
    """
    tile, head = place(gl.program_id(0), tiles, together)
    own_heads = heads if setting.of_rows else heads // shared_by
    b = head // own_heads
    h = head % own_heads
    first = tile * 0
    whole_first = first
    if setting.of_rows:
        if setting.causal:
            tile = tiles - 1 - tile
        row = tile * TILE
        last = (keys + ROWS - 1) // ROWS
        whole_last = keys // ROWS
        if setting.causal:
            last = gl.minimum(last, gl.maximum(row + TILE - 1 + shift, 0) // ROWS + 1)
            whole_last = gl.minimum(whole_last, gl.maximum(row + shift + 1, 0) // ROWS)
        if setting.windowed:
            first = gl.minimum(gl.maximum(row + shift - span + 1, 0) // ROWS, last - 1)
            whole_first = gl.minimum((gl.maximum(row + TILE + shift - span, 0) + ROWS - 1) // ROWS, last)
        other = h // shared_by
        visited_heads = first * 0 + 1
    else:
        row = tile * TILE
        last = (queries + ROWS - 1) // ROWS
        whole_last = last
        if setting.causal:
            first = gl.minimum(gl.maximum(row - shift, 0) // ROWS, last)
            whole_first = gl.minimum((gl.maximum(row + TILE - 1 - shift, 0) + ROWS - 1) // ROWS, last)
        if setting.windowed:
            last = gl.minimum(last, (gl.maximum(row + TILE - 1 + span - shift, 0) + ROWS - 1) // ROWS)
            last = gl.maximum(last, first + 1)
            whole_first = gl.minimum(whole_first, last)
            whole_last = gl.minimum(gl.maximum(row + span - shift, 0) // ROWS, last)
        other = h * shared_by
        visited_heads = first * 0 + shared_by
    if setting.windowed:
        whole_last = gl.maximum(whole_last, whole_first)
    return Work(row, b, h, other, visited_heads, first, whole_first, whole_last, last, keys, shift, span)


@gluon.jit
def load_tile(setting, shared, work, d_x1, d_x2, d_lse2, d_delta):
    """X_1 and X_2 of both groups, of queries with LSE and delta."""
    full = shared.x_full.index(0)
    nbytes: gl.constexpr = 2 * d_x1.block_type.nbytes
    rows: gl.constexpr = 4 * d_lse2.block_type.nbytes
    if setting.of_rows:
        mbarrier.expect(full, 2 * nbytes + rows)
    elif setting.of_values:
        mbarrier.expect(full, nbytes)
    else:
        mbarrier.expect(full, 2 * nbytes)
    for w in gl.static_range(2):
        row = work.row + ROWS * w
        tma.async_copy_global_to_shared(d_x1, [work.b, work.h, row, 0], full, shared.x1.index(w))
        if not setting.of_values:
            tma.async_copy_global_to_shared(d_x2, [work.b, work.h, row, 0], full, shared.x2.index(w))
        if setting.of_rows:
            tma.async_copy_global_to_shared(d_lse2, [work.b, work.h, row], full, shared.lse2.index(w))
            tma.async_copy_global_to_shared(d_delta, [work.b, work.h, row], full, shared.delta.index(w))


@gluon.jit
def load(setting, shared, work, d_x1, d_x2, d_y1, d_y2, d_lse2, d_delta):
    """The loading warp: the tile, then every block of every head in turn."""
    if setting.first:
        await_kernel_before()  # which computes LSE log2(e) and delta; all other kernels start after this one has
    let_kernel_after_start()
    load_tile(setting, shared, work, d_x1, d_x2, d_lse2, d_delta)
    i = 0
    for h in range(work.other, work.other + work.heads):
        for block in range(work.first, work.last):
            row = block * ROWS
            at = i % 2
            full = shared.y1_full.index(at)
            mbarrier.wait(shared.y1_empty.index(at), ((i // 2) & 1) ^ 1)
            if setting.of_rows:
                mbarrier.expect(full, d_y1.block_type.nbytes)
            else:
                mbarrier.expect(full, d_y1.block_type.nbytes + 2 * d_lse2.block_type.nbytes)
                tma.async_copy_global_to_shared(d_lse2, [work.b, h, row], full, shared.lse2.index(at))
                tma.async_copy_global_to_shared(d_delta, [work.b, h, row], full, shared.delta.index(at))
            tma.async_copy_global_to_shared(d_y1, [work.b, h, row, 0], full, shared.y1.index(at))
            if setting.halves:
                for half in gl.static_range(2):
                    full = shared.y2_full.index(half)
                    mbarrier.wait(shared.y2_empty.index(half), (i & 1) ^ 1)
                    mbarrier.expect(full, d_y2.block_type.nbytes)
                    place_2 = [work.b, h, row, half * (setting.dim // 2)]
                    tma.async_copy_global_to_shared(d_y2, place_2, full, shared.y2.index(half))
            else:
                at = i % setting.stages
                mbarrier.wait(shared.y2_empty.index(at), ((i // setting.stages) & 1) ^ 1)
                mbarrier.expect(shared.y2_full.index(at), d_y2.block_type.nbytes)
                tma.async_copy_global_to_shared(d_y2, [work.b, h, row, 0], shared.y2_full.index(at), shared.y2.index(at))
            i += 1
    if not setting.first:
        await_kernel_before()  # so that it ends after its predecessor


@gluon.jit
def against(setting, x, buffer):
    """`X Y^T [ROWS, ROWS]` of a block, in flight."""
    zeros = gl.zeros([ROWS, ROWS], gl.float32, setting.s)
    y = buffer.reshape((ROWS, setting.dim)).permute((1, 0))
    return warpgroup_mma(x.reshape((ROWS, setting.dim)), y, zeros, use_acc=False, is_async=True)


@gluon.jit
def value_products(setting, shared, own, i):
    """dP or `dP^T [ROWS, ROWS]` of block i of the stream, in flight, as the sum of two products if Y_2 comes in halves."""
    mbarrier.wait(shared.y2_full.index(0), i & 1)
    if setting.halves:
        zeros = gl.zeros([ROWS, ROWS], gl.float32, setting.s)
        x2 = shared.x2.index(own).reshape((ROWS, setting.dim))
        columns: gl.constexpr = setting.dim // 2
        left = shared.y2.index(0).reshape((ROWS, columns)).permute((1, 0))
        half = warpgroup_mma(x2.slice(0, columns, dim=1), left, zeros, use_acc=False, is_async=True)
        mbarrier.wait(shared.y2_full.index(1), i & 1)
        right = shared.y2.index(1).reshape((ROWS, columns)).permute((1, 0))
        dp = warpgroup_mma(x2.slice(columns, columns, dim=1), right, half, is_async=True)
    else:
        dp = against(setting, shared.x2.index(own), shared.y2.index(0))
    return dp


@gluon.jit
def beside(setting, own, buffer, at):
    """LSE or delta beside S: the program's own `[ROWS, 1]`, or `[1, ROWS]` of the block of queries in a buffer."""
    if setting.of_rows:
        value = gl.expand_dims(own, 1)
    else:
        value = gl.expand_dims(buffer.index(at).reshape((ROWS,)).load(setting.column), 0)
    return value


@gluon.jit
def probabilities(w: gl.constexpr, setting, work, s, lse2, block, scale2, MASK: gl.constexpr):
    """`P` or `P^T = 2^(scale2 S - lse2) [ROWS, ROWS]`, normalised by the forward pass; 0 where a key is not seen."""
    p = gl.exp2(s * scale2 - lse2)
    if MASK:
        own = gl.expand_dims(work.row + ROWS * w + gl.arange(0, ROWS, setting.row), 1)
        visited = gl.expand_dims(block * ROWS + gl.arange(0, ROWS, setting.column), 0)
        if setting.of_rows:
            limit = gl.full([ROWS, 1], 0, gl.int32, setting.s) + work.keys
            if setting.causal:
                limit = gl.minimum(limit, own + work.shift + 1)
            p = gl.where(visited < limit, p, 0.0)
            if setting.windowed:
                p = gl.where(visited > own + work.shift - work.span, p, 0.0)
        else:
            p = gl.where(own <= visited + work.shift, p, 0.0)
            if setting.windowed:
                p = gl.where(own > visited + work.shift - work.span, p, 0.0)
    return p


@gluon.jit
def as_operand(setting, x):
    """P or dS in the format of the inputs, in the registers that the sum reads."""
    return gl.convert_layout(x.to(setting.dtype), setting.p)


@gluon.jit
def scores(setting, shared, own, i):
    """S or `S^T [ROWS, ROWS]` of block i of the stream, in flight."""
    at = i % 2
    mbarrier.wait(shared.y1_full.index(at), (i // 2) & 1)
    return against(setting, shared.x1.index(own), shared.y1.index(at))


@gluon.jit
def factors(w: gl.constexpr, setting, shared, work, s, dp, i, block, lse2, scale2, MASK: gl.constexpr):
    """P of block i of the stream, whose S is at hand; and dP, which is awaited after the exponentials."""
    if setting.halves:
        dp = warpgroup_mma_wait(1, deps=(dp,))
        mbarrier.arrive(shared.y2_empty.index(0), count=1)
    p = probabilities(w, setting, work, s, beside(setting, lse2, shared.lse2, i % 2), block, scale2, MASK)
    if setting.of_values:
        mbarrier.arrive(shared.y1_empty.index(i % 2), count=1)
    else:
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(shared.y2_empty.index(setting.stages - 1), count=1)
    return p, dp


@gluon.jit
def addition(setting, shared, p, dp, acc, i, delta):
    """The sum with the product of block i of the stream `[ROWS, dim]`, in flight."""
    at = i % 2
    if setting.of_values:
        mbarrier.wait(shared.y2_full.index(at), (i // 2) & 1)
        y = shared.y2.index(at)
    else:
        p = p * (dp - beside(setting, delta, shared.delta, at))
        y = shared.y1.index(at)
    return warpgroup_mma(as_operand(setting, p), y.reshape((ROWS, setting.dim)), acc, is_async=True)


@gluon.jit
def step(w: gl.constexpr, setting, shared, work, i, block, p, dp, acc, lse2, delta, scale2, MASK: gl.constexpr):
    """Add block i of the stream, whose P and dP are at hand, and begin the next one, which is `block` of its head.

    For dV the groups take turns, so that the products of one overlap the exponentials of the other. For dQ and dK turns would
    make a group wait for Y_2, of which there is room for one block alone.
    """
    own = w + hidden_zero(i)
    at = i % 2
    if setting.of_values:
        mbarrier.wait(shared.turn.index(w), i & 1)
    total = addition(setting, shared, p, dp, acc, i, delta)
    s = scores(setting, shared, own, i + 1)
    if setting.of_values:
        mbarrier.arrive(shared.turn.index(1 - w), count=1)
        acc = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(shared.y2_empty.index(at), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        dp = value_products(setting, shared, own, i + 1)
        acc = warpgroup_mma_wait(setting.stages + 1, deps=(total,))
        mbarrier.arrive(shared.y1_empty.index(at), count=1)
        s = warpgroup_mma_wait(setting.stages, deps=(s,))
    p, dp = factors(w, setting, shared, work, s, dp, i + 1, block, lse2, scale2, MASK)
    return p, dp, acc


@gluon.jit
def walk(w: gl.constexpr, setting, shared, work, i, start, stop, p, dp, acc, lse2, delta, scale2, MASK: gl.constexpr):
    """Begin the blocks `start` to `stop` of one head; i blocks of the stream came before them."""
    for block in range(start, stop):
        p, dp, acc = step(w, setting, shared, work, i - 1, block, p, dp, acc, lse2, delta, scale2, MASK)
        i += 1
    return i, p, dp, acc


@gluon.jit
def compute(w: gl.constexpr, setting, shared, work, d_out, scale2, scale):
    """Computing warp group w: rows `64 w` to `64 w + 63` of the tile."""
    mbarrier.wait(shared.x_full.index(0), 0)
    lse2 = gl.zeros([ROWS], gl.float32, setting.row)
    delta = lse2
    if setting.of_rows:
        lse2 = shared.lse2.index(w).reshape((ROWS,)).load(setting.row)
        delta = shared.delta.index(w).reshape((ROWS,)).load(setting.row)
    acc = gl.zeros([ROWS, setting.dim], gl.float32, setting.o)
    s = scores(setting, shared, w, 0)
    dp = s
    if not setting.of_values:
        dp = value_products(setting, shared, w, 0)
    s = warpgroup_mma_wait(0 if setting.of_values else setting.stages, deps=(s,))
    MASKED: gl.constexpr = setting.causal or (setting.of_rows and setting.ragged)
    p, dp = factors(w, setting, shared, work, s, dp, 0, work.first, lse2, scale2, MASKED)
    i = 1
    start = work.first + 1
    for _ in range(work.heads):
        if setting.windowed or (setting.causal and not setting.of_rows):
            i, p, dp, acc = walk(w, setting, shared, work, i, start, work.whole_first, p, dp, acc, lse2, delta, scale2, True)
        i, p, dp, acc = walk(
            w, setting, shared, work, i, gl.maximum(start, work.whole_first), work.whole_last,
            p, dp, acc, lse2, delta, scale2, False,
        )  # fmt: skip
        if setting.windowed or (setting.of_rows and MASKED):
            i, p, dp, acc = walk(
                w, setting, shared, work, i, gl.maximum(start, work.whole_last), work.last,
                p, dp, acc, lse2, delta, scale2, True,
            )  # fmt: skip
        start = work.first
    acc = warpgroup_mma_wait(0, deps=(addition(setting, shared, p, dp, acc, i - 1, delta),))
    if not setting.of_values:
        acc = acc * scale
    shared.x1.index(w).reshape((ROWS, setting.dim)).store(acc.to(setting.dtype))  # the other group does not read it
    fence_async_shared()
    tma.async_copy_shared_to_global(d_out, [work.b, work.h, work.row + ROWS * w, 0], shared.x1.index(w))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "queries", "keys", "shift", "span", "heads", "shared_by", "together"])
def gradient(
    d_x1, d_x2, d_y1, d_y2, d_lse2, d_delta, d_out, scale2, scale,
    tiles, queries, keys, shift, span, heads, shared_by, together, CODE: gl.constexpr,
):  # fmt: skip
    """One program: a loading warp and two computing warp groups, over one tile; `scale2` is `scale log2(e)`."""
    setting = Setting(CODE)
    work = work_of(setting, tiles, queries, keys, shift, span, heads, shared_by, together)
    DIM: gl.constexpr = CODE.dim
    REGISTERS: gl.constexpr = CODE.registers
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, ROWS.value, DIM], d_x1.layout),
        gl.allocate_shared_memory(CODE.dtype, [1 if setting.of_values else 2, 1, 1, ROWS.value, DIM], d_x2.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, ROWS.value, DIM], d_y1.layout),
        gl.allocate_shared_memory(CODE.dtype, [setting.stages] + d_y2.block_shape, d_y2.layout),  # noqa: RUF005 (Gluon unpacks no list)
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS.value], d_lse2.layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS.value], d_delta.layout),
        barriers(1, 1),
        barriers(2, 1),
        barriers(2, 2),
        barriers(setting.stages, 1),
        barriers(setting.stages, 2),
        barriers(2, 1),
    )
    mbarrier.arrive(shared.turn.index(0), count=1)
    gl.warp_specialize(
        [
            (compute, (0, setting, shared, work, d_out, scale2, scale)),
            (compute, (1, setting, shared, work, d_out, scale2, scale)),
            (load, (setting, shared, work, d_x1, d_x2, d_y1, d_y2, d_lse2, d_delta)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
