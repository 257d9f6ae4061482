"""dQ for Hopper GPUs: the second of the two kernels that compute the backward pass without additions to global memory, in Gluon.

A program owns 64 queries for each of its two or three computing warp groups and walks blocks of keys from the last to the first,
so that the masked ones come first:

    S = Q K^T,  P = 2^(scale log2(e) S - LSE log2(e)),  dP = dO V^T,  dS = P o (dP - delta)
    dQ += F(dS) K;  dQ times scale at the end

It is the forward kernel with one more product and without the running maximum; its groups take turns in the same way.

Barriers, all in shared memory. A phase completes after the listed arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| own_full (one) | 1 and bytes | the loader, arming it for Q and dO of every group | every group, before its first product |
| k_full, v_full (stage) | 1 and bytes | the loader, arming it for the block | every group, before S; before dP |
| k_empty, v_empty (stage) | groups | every group, after dQ; after dP | the loader, before the next block there |
| k_tail, v_tail (one) | 1 and bytes | as k_full, v_full, where padding cuts a block | the loader: it clears, then arrives there |
| turn (group) | 1 | group w - 1, its S and dP issued; for group 0 first the program | group w, before it issues its own |

Budget: KB of shared memory for Q and dO 32 (d = 64, 128 rows), 48 (192 rows), 64 (d = 128); for blocks of K and V 64 (2 stages
of 128), 48 (3 of 64), 128; in all 96, 96 and 192 of 227. Registers of a thread for dQ, S, dP and dS as an operand:
32 + 64 + 64 + 32 = 192 of 240, 32 + 32 + 32 + 16 = 112 of 160, 64 + 64 + 64 + 32 = 224 of 240.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from numdev.attention.kernels.aggregate import aggregate
from numdev.attention.kernels.hopper_backward_parts import place
from numdev.attention.kernels.hopper_parts import ROWS, barriers, clear_tail, load_block


class Code(NamedTuple):
    """The constants of one compiled kernel; see `numdev.attention.kernels.hopper_backward_parts.Code`.

    Attributes:
        bc: keys of a block.
        groups: computing warp groups.
        stages: buffers for K, and for V.
    """

    bc: int
    dim: int
    groups: int
    stages: int
    dtype: Any
    causal: bool
    masked: bool
    padded: bool
    registers: int


@aggregate
class Setting:
    """The constants of `Code` that the warp groups read, with the layouts derived from them."""

    bc: gl.constexpr
    dim: gl.constexpr
    groups: gl.constexpr
    stages: gl.constexpr
    dtype: gl.constexpr
    causal: gl.constexpr
    masked: gl.constexpr
    padded: gl.constexpr
    s: gl.constexpr  # of S and dP [ROWS, bc]
    o: gl.constexpr  # of dQ [ROWS, dim]
    p: gl.constexpr  # of dS as an operand
    row: gl.constexpr
    key: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, code):
        self.bc = gl.constexpr(code.bc)
        self.dim = gl.constexpr(code.dim)
        self.groups = gl.constexpr(code.groups)
        self.stages = gl.constexpr(code.stages)
        self.dtype = gl.constexpr(code.dtype)
        self.causal = gl.constexpr(code.causal)
        self.masked = gl.constexpr(code.masked)
        self.padded = gl.constexpr(code.padded)
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.bc, 16])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 16])
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, s))
        self.key = gl.constexpr(gl.SliceLayout(0, s))


@aggregate
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    own_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor


@aggregate
class Work:
    """A program's rows from `row` on, and the blocks of keys that they visit: `count`, of which the first `edge` need a mask."""

    row: gl.tensor
    b: gl.tensor
    h: gl.tensor
    kv: gl.tensor
    at: gl.tensor  # of the first row in lse2 and delta
    count: gl.tensor
    edge: gl.tensor
    length: gl.tensor
    shift: gl.tensor


@gluon.jit
def work_of(setting, lengths, tiles, queries, keys, shift, heads, shared_by, together):
    """The program's tile: `together` heads start together, under a causal limit the tiles with the most blocks first.

    `tiles` counts tiles of queries, `queries` rows of each head in lse2 and delta, `keys` keys in memory, `shift` how many more
    keys than queries there are, `heads` query heads, and `shared_by` query heads per KV head. `together` divides the number of
    heads of all batch entries.
    """
    tile, head = place(gl.program_id(0), tiles, together)
    if setting.causal:
        tile = tiles - 1 - tile
    b = head // heads
    h = head % heads
    row = tile * (ROWS * setting.groups)
    length = keys
    if setting.masked:
        length = gl.load(lengths + b)
    end = length  # the first key that no row sees
    whole = length // setting.bc  # blocks of which every row sees every key
    if setting.causal:
        end = gl.minimum(length, row + ROWS * setting.groups + shift)
        whole = gl.minimum(whole, (row + shift + 1) // setting.bc)
    count = (end + setting.bc - 1) // setting.bc
    edge = count - gl.minimum(whole, count)
    # 32 bits hold it, since 2^31 rows of q would fill 256 GB. An integer of 64 bits must not go to another warp group: in Triton
    # 3.6 it arrived with an upper half from whatever was in shared memory, on a GPU that several processes share.
    at = head * queries + row
    return Work(row, b, h, h // shared_by, at, count, edge, length, shift)


@gluon.jit
def load_keys(setting, work, desc, buffers, full, empty, tail_full, i, key):
    """Load K or V of block i of the stream, and clear the padding in it."""
    if setting.padded:
        tail = work.length - key
        if tail < setting.bc:  # only the first block can hold padding; its buffer is free
            mbarrier.expect(tail_full.index(0), desc.block_type.nbytes)
            tma.async_copy_global_to_shared(desc, [work.b, work.kv, key, 0], tail_full.index(0), buffers.index(0))
            mbarrier.wait(tail_full.index(0), 0)
            clear_tail(setting, buffers.index(0).reshape((setting.bc, setting.dim)), tail)
            fence_async_shared()
            mbarrier.arrive(full.index(0), count=1)
        else:
            load_block(desc, full, empty, buffers, setting.stages, i, work.b, work.kv, key)
    else:
        load_block(desc, full, empty, buffers, setting.stages, i, work.b, work.kv, key)


@gluon.jit
def load(setting, shared, work, d_q, d_k, d_v, d_do):
    """The loading warp group: the program's own rows, then the blocks of keys."""
    mbarrier.expect(shared.own_full.index(0), setting.groups * (d_q.block_type.nbytes + d_do.block_type.nbytes))
    for w in gl.static_range(setting.groups):
        row = work.row + w * ROWS
        tma.async_copy_global_to_shared(d_q, [work.b, work.h, row, 0], shared.own_full.index(0), shared.q.index(w))
        tma.async_copy_global_to_shared(d_do, [work.b, work.h, row, 0], shared.own_full.index(0), shared.do.index(w))
    for i in range(work.count):
        key = (work.count - 1 - i) * setting.bc
        load_keys(setting, work, d_k, shared.k, shared.k_full, shared.k_empty, shared.k_tail, i, key)
        load_keys(setting, work, d_v, shared.v, shared.v_full, shared.v_empty, shared.v_tail, i, key)


@gluon.jit
def step(w: gl.constexpr, setting, shared, work, i, dq, q, do, lse2, delta, scale2, MASK: gl.constexpr):
    """One block of keys, i of the stream; dq is `[ROWS, dim]`, lse2 and delta are `[ROWS]`."""
    at = i % setting.stages
    parity = (i // setting.stages) & 1
    zeros = gl.zeros([ROWS, setting.bc], gl.float32, setting.s)
    k = shared.k.index(at).reshape((setting.bc, setting.dim))
    v = shared.v.index(at).reshape((setting.bc, setting.dim))
    mbarrier.wait(shared.turn.index(w), i & 1)
    mbarrier.wait(shared.k_full.index(at), parity)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [ROWS, bc]
    mbarrier.wait(shared.v_full.index(at), parity)
    dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [ROWS, bc]
    mbarrier.arrive(shared.turn.index((w + 1) % setting.groups), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * scale2 - gl.expand_dims(lse2, 1))
    if MASK:
        key = (work.count - 1 - i) * setting.bc
        limit = gl.full([ROWS], 0, gl.int32, setting.row) + work.length - key
        if setting.causal:
            rows = work.row + w * ROWS + gl.arange(0, ROWS, setting.row)
            limit = gl.minimum(limit, rows + work.shift + 1 - key)
        keys = gl.arange(0, setting.bc, setting.key)
        p = gl.where(gl.expand_dims(keys, 0) < gl.expand_dims(limit, 1), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(shared.v_empty.index(at), count=1)
    ds = p * (dp - gl.expand_dims(delta, 1))
    operand = gl.convert_layout(ds.to(setting.dtype), setting.p)
    dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(operand, k, dq, is_async=True),))
    mbarrier.arrive(shared.k_empty.index(at), count=1)
    return dq


@gluon.jit
def compute(w: gl.constexpr, setting, shared, work, d_dq, lse2_rows, delta_rows, scale2, scale):
    """Computing warp group w: rows `64 w` to `64 w + 63` of the tile."""
    rows = work.at + w * ROWS + gl.arange(0, ROWS, setting.row)
    # Beyond the last row of a head, a tile of 192 rows reads those of the next head; their results are not stored.
    lse2 = gl.load(lse2_rows + rows)  # [ROWS]
    delta = gl.load(delta_rows + rows)  # [ROWS]
    dq = gl.zeros([ROWS, setting.dim], gl.float32, setting.o)
    q = shared.q.index(w).reshape((ROWS, setting.dim))
    do = shared.do.index(w).reshape((ROWS, setting.dim))
    mbarrier.wait(shared.own_full.index(0), 0)
    edge = gl.to_tensor(0)
    if setting.causal or setting.masked:
        edge = work.edge
        for i in range(edge):
            dq = step(w, setting, shared, work, i, dq, q, do, lse2, delta, scale2, True)
    for i in range(edge, work.count):
        dq = step(w, setting, shared, work, i, dq, q, do, lse2, delta, scale2, False)
    q.store((dq * scale).to(setting.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(d_dq, [work.b, work.h, work.row + w * ROWS, 0], shared.q.index(w))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "queries", "keys", "shift", "heads", "shared_by", "together"])
def gradients_of_queries(
    d_q, d_k, d_v, d_do, d_dq, lse2, delta, lengths, scale2, scale,
    tiles, queries, keys, shift, heads, shared_by, together, CODE: gl.constexpr,
):  # fmt: skip
    """One program: a loading warp group and `CODE.groups` computing ones, over a tile of queries; `scale2` is `scale log2(e)`."""
    GROUPS: gl.constexpr = CODE.groups
    STAGES: gl.constexpr = CODE.stages
    REGISTERS: gl.constexpr = CODE.registers
    setting = Setting(CODE)
    work = work_of(setting, lengths, tiles, queries, keys, shift, heads, shared_by, together)
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [GROUPS, 1, 1, ROWS, CODE.dim], d_q.layout),
        gl.allocate_shared_memory(CODE.dtype, [GROUPS, 1, 1, ROWS, CODE.dim], d_do.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.bc, CODE.dim], d_k.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.bc, CODE.dim], d_v.layout),
        barriers(1, 1),
        barriers(STAGES, 1),
        barriers(STAGES, GROUPS),
        barriers(STAGES, 1),
        barriers(STAGES, GROUPS),
        barriers(1, 1),
        barriers(1, 1),
        barriers(GROUPS, 1),
    )
    mbarrier.arrive(shared.turn.index(0), count=1)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (compute, (0, setting, shared, work, d_dq, lse2, delta, scale2, scale)),
                (compute, (1, setting, shared, work, d_dq, lse2, delta, scale2, scale)),
                (load, (setting, shared, work, d_q, d_k, d_v, d_do)),
            ],
            [4, 4],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (0, setting, shared, work, d_dq, lse2, delta, scale2, scale)),
                (compute, (1, setting, shared, work, d_dq, lse2, delta, scale2, scale)),
                (compute, (2, setting, shared, work, d_dq, lse2, delta, scale2, scale)),
                (load, (setting, shared, work, d_q, d_k, d_v, d_do)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 24],
        )
