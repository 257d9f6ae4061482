"""What the Hopper kernels that own a tile of keys share: constants, sizes, the walk over the queries, loading, the last store."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from numdev.attention.kernels import hopper_backward_order as order
from numdev.attention.kernels.aggregate import aggregate
from numdev.attention.kernels.hopper_backward_reduce import await_kernel_before, thread_barrier

place = gluon.jit(order.place)
unit_at = gluon.jit(order.unit_at)
rank_at = gluon.jit(order.rank_at)
first_unit = gluon.jit(order.first_unit)
first_whole = gluon.jit(order.first_whole)

KEYS = gl.constexpr(64)  # of a computing warp group: one wgmma instruction is 64 rows
TILE = gl.constexpr(order.TILE)
NEVER = gl.constexpr(2**31 - 1)


class Code(NamedTuple):
    """The constants of one compiled kernel.

    Attributes:
        br: queries of a tile: 64 or 128.
        dim: head_dim.
        stages: buffers for Q, and for dO.
        dtype: of inputs and outputs.
        causal: whether a query sees no key after its own position.
        masked: whether a tile of keys can hold keys that do not exist.
        padded: whether k and v exist beyond a batch entry's last key, and may hold anything there.
        grouped: whether query heads share a KV head.
        skewed: whether the next tile's S is in flight beside this tile's products (the kernel of dK and dV alone).
        pingpong: whether the computing warp groups take turns (the kernel of dK and dV alone).
        registers: of a computing thread.
        spins: reads of a counter after which the kernel gives up; 0 for no limit (the one-kernel design alone).
    """

    br: int
    dim: int
    stages: int
    dtype: Any
    causal: bool
    masked: bool
    padded: bool
    grouped: bool
    skewed: bool
    pingpong: bool
    registers: int
    spins: int


@aggregate
class Setting:
    """The constants of `Code` that the warp groups read, with the layouts derived from them."""

    br: gl.constexpr
    dim: gl.constexpr
    stages: gl.constexpr
    dtype: gl.constexpr
    causal: gl.constexpr
    masked: gl.constexpr
    padded: gl.constexpr
    grouped: gl.constexpr
    skewed: gl.constexpr
    pingpong: gl.constexpr
    spins: gl.constexpr
    per: gl.constexpr  # tiles of queries in a unit
    s: gl.constexpr  # of S^T and dP^T [KEYS, br]
    o: gl.constexpr  # of dK and dV [KEYS, dim]
    p: gl.constexpr  # of P^T and dS^T as operands
    dq: gl.constexpr  # of a warp group's part of dQ [64, 64]
    query: gl.constexpr
    key: gl.constexpr
    rows: gl.constexpr  # of a buffer [KEYS, dim] that is cleared

    @gluon.constexpr_function
    def __init__(self, code):
        self.br = gl.constexpr(code.br)
        self.dim = gl.constexpr(code.dim)
        self.stages = gl.constexpr(code.stages)
        self.dtype = gl.constexpr(code.dtype)
        self.causal = gl.constexpr(code.causal)
        self.masked = gl.constexpr(code.masked)
        self.padded = gl.constexpr(code.padded)
        self.grouped = gl.constexpr(code.grouped)
        self.skewed = gl.constexpr(code.skewed)
        self.pingpong = gl.constexpr(code.pingpong)
        self.spins = gl.constexpr(code.spins)
        self.per = gl.constexpr(128 // code.br)
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.br, 16])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 16])
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 2))
        self.dq = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
        self.query = gl.constexpr(gl.SliceLayout(0, s))
        self.key = gl.constexpr(gl.SliceLayout(1, s))
        self.rows = gl.constexpr(gl.BlockedLayout([1, 8], [256 // code.dim, code.dim // 8], [4, 1], [1, 0]))


@aggregate
class Work:
    """A program's tile of keys, and its walk: `count` units for each query head, of which the last `edge` need a mask.

    `length` is the number of keys that exist, `shift` how much further than its own number a query sees.
    """

    tile: gl.tensor
    tiles: gl.tensor
    b: gl.tensor
    kv: gl.tensor
    heads: gl.tensor
    shared_by: gl.tensor
    units: gl.tensor
    walkers: gl.tensor
    count: gl.tensor
    edge: gl.tensor
    length: gl.tensor
    shift: gl.tensor


@aggregate
class Tensors:
    """Descriptors for the copy engine: `[batch, heads, tokens, dim]`; lse2 and delta are `[batch, heads, queries]` in FP32."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    lse2: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


@gluon.jit
def work_of(setting, lengths, tiles, units, keys, shift, heads, shared_by, together, walkers):
    """The program's tile: `together` KV heads start together, the tile with the longest walk of each first.

    `tiles` counts tiles of keys, `units` units of queries, `keys` keys in memory, `shift` how many more keys than queries there
    are, `heads` query heads, and `shared_by` query heads per KV head. `together` divides the number of KV heads of all batch
    entries; `walkers` tiles form a group with shifted walks.
    """
    tile, head = place(gl.program_id(0), tiles, together)
    kv_heads = heads // shared_by
    b = head // kv_heads
    length = keys
    if setting.masked:
        length = gl.load(lengths + b)
    first = first_unit(tile, shift, setting.causal)
    count = units - first
    edge = tile * 0
    if setting.causal:
        edge = first_whole(tile, shift, units, setting.causal) - first
    if setting.masked:
        edge = gl.where((tile + 1) * TILE > length, count, edge)
        count = gl.where(tile * TILE < length, count, 0)
        edge = gl.minimum(edge, count)
    full = (length + TILE - 1) // TILE
    return Work(tile, full, b, head % kv_heads, heads, shared_by, units, walkers, count, edge, length, shift)


@gluon.jit
def row_at(setting, work, t):
    """The first query of tile t of the walk; the tiles of a unit are visited upwards."""
    unit = unit_at(t // setting.per, work.tile, work.units, work.walkers, setting.causal)
    return unit * TILE + (t % setting.per) * setting.br


@gluon.jit
def load_keys(setting, d_k, d_v, k, v, full, work):
    """The tile's K and V: a buffer of each for each computing warp group."""
    mbarrier.expect(full.index(0), 2 * (d_k.block_type.nbytes + d_v.block_type.nbytes))
    for w in gl.static_range(2):
        key = work.tile * TILE + KEYS * w
        tma.async_copy_global_to_shared(d_k, [work.b, work.kv, key, 0], full.index(0), k.index(w))
        tma.async_copy_global_to_shared(d_v, [work.b, work.kv, key, 0], full.index(0), v.index(w))


@gluon.jit
def load_tile(setting, shared, descs, i, b, h, row):
    """Load Q with its LSE, then dO with its delta, of one tile of queries, each when its buffer is free."""
    at = i % setting.stages
    parity = ((i // setting.stages) & 1) ^ 1
    mbarrier.wait(shared.q_empty.index(at), parity)
    mbarrier.expect(shared.q_full.index(at), descs.q.block_type.nbytes + descs.lse2.block_type.nbytes)
    tma.async_copy_global_to_shared(descs.lse2, [b, h, row], shared.q_full.index(at), shared.lse2.index(at))
    tma.async_copy_global_to_shared(descs.q, [b, h, row, 0], shared.q_full.index(at), shared.q.index(at))
    mbarrier.wait(shared.do_empty.index(at), parity)
    mbarrier.expect(shared.do_full.index(at), descs.do.block_type.nbytes + descs.delta.block_type.nbytes)
    tma.async_copy_global_to_shared(descs.delta, [b, h, row], shared.do_full.index(at), shared.delta.index(at))
    tma.async_copy_global_to_shared(descs.do, [b, h, row, 0], shared.do_full.index(at), shared.do.index(at))


@gluon.jit
def load(setting, shared, work, descs):
    """The loading warp: K and V, then every tile of queries in the order of the walk, head after head."""
    load_keys(setting, descs.k, descs.v, shared.k, shared.v, shared.kv_full, work)
    await_kernel_before()  # which computes lse2 and delta
    i = 0
    for g in range(work.shared_by):
        for t in range(work.count * setting.per):
            load_tile(setting, shared, descs, i, work.b, work.kv * work.shared_by + g, row_at(setting, work, t))
            i += 1


@gluon.jit
def clear(setting, buffer, tail):
    """Zero the rows of a buffer `[KEYS, dim]` from `tail` on: their P is 0, but 0 times NaN would be NaN."""
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, setting.rows))
    buffer.store(gl.where(gl.expand_dims(rows, 1) < tail, buffer.load(setting.rows), 0.0))


@gluon.jit
def own_keys(w: gl.constexpr, setting, shared, work):
    """K and V `[KEYS, dim]` of group w in shared memory, rows that do not exist cleared."""
    k = shared.k.index(w).reshape((KEYS, setting.dim))
    v = shared.v.index(w).reshape((KEYS, setting.dim))
    mbarrier.wait(shared.kv_full.index(0), 0)
    if setting.padded:
        tail = work.length - work.tile * TILE - KEYS * w
        if tail < KEYS:
            clear(setting, k, tail)
            clear(setting, v, tail)
            fence_async_shared()
            thread_barrier()
    return k, v


@gluon.jit
def probabilities(w: gl.constexpr, setting, work, s, lse2, row, scale2, MASK: gl.constexpr):
    """`P^T = 2^(scale2 S^T - lse2) [KEYS, br]`, normalised by the forward pass; 0 where a key is not seen."""
    p = gl.exp2(s * scale2 - gl.expand_dims(lse2, 0))
    if MASK:
        keys = work.tile * TILE + KEYS * w + gl.arange(0, KEYS, setting.key)
        rows = row + gl.arange(0, setting.br, setting.query)
        sees = gl.full([KEYS], 0, gl.int32, setting.key)
        if setting.causal:
            sees = keys - work.shift
        if setting.masked:
            sees = gl.where(keys < work.length, sees, NEVER)
        p = gl.where(gl.expand_dims(rows, 0) >= gl.expand_dims(sees, 1), p, 0.0)
    return p


@gluon.jit
def leave(w: gl.constexpr, setting, work, desc, buffer, x):
    """Store dK or dV `[KEYS, dim]` of group w through a buffer of its own; 0 for keys that do not exist."""
    if setting.masked:
        keys = work.tile * TILE + KEYS * w + gl.arange(0, KEYS, gl.SliceLayout(1, setting.o))
        x = gl.where(gl.expand_dims(keys, 1) < work.length, x, 0.0)
    buffer.reshape((KEYS, setting.dim)).store(x.to(setting.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [work.b, work.kv, work.tile * TILE + KEYS * w, 0], buffer)
