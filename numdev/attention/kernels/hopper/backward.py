"""The backward pass for Hopper GPUs in one kernel, with additions to dQ in a fixed order, in Gluon.

A program takes one tile of 128 keys after the other, 64 for each of two computing warp groups, and visits every tile of queries
of every head that shares them. It accumulates dK and dV in registers and computes its share of dQ, which two storing warps, one
for every second tile, pass to the copy engine. The tiles of keys do so in a fixed order: the first stores its share in an FP32
workspace, the others add theirs one after the other. `numdev.attention.kernels.hopper.order` has the walk, the order, and the
reason why there is no deadlock. Every launch gives the same bits. Each tile takes five products:

    S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - LSE log2(e)),  dP^T = V dO^T,  dS^T = P^T o (dP^T - delta)
    dV += F(P^T) dO,  dK += F(dS^T) Q,  dQ += F(dS) K;  dK times scale here, dQ where the workspace is converted

The policy is `kernel(F)` of the backward pass: inputs, P, dS and outputs in F, the rest in FP32. The readable counterpart is
`numdev.attention.kernels.backward`.

Everything is transposed, keys down and queries across, since P^T and dS^T then leave the accumulator in the layout in which the
next product reads them from registers. dS^T passes through shared memory too, since each group's part of dQ needs all 128 keys:
group w computes 64 columns of it at d = 128, 64 rows at d = 64.

An iteration finishes a tile and begins the next: dQ of the tile before, dV and dK; then S and dP of the next one, P during dP,
and dS. So the groups, which take turns with these products, but for dQ, can be half a tile apart, and one computes exponentials
while the tensor cores work for the other. P and dS stay in registers from one iteration to the next. No product is in flight
then: the compiler would put a wait behind each product that crosses an iteration.

There is at most one program for each multiprocessor. From one tile of keys to the next, tiles of queries are one stream, whose
numbers go on, and additions to dQ lag behind. A tile that no query sees passes through number, k and v alike.

Barriers, all in shared memory. A phase completes after the listed arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| number_full (n modulo 2) | 1 | the loader, with the number of the n-th tile of keys | both groups, both storers |
| number_empty (n modulo 2) | 4 | each of these, which has read it | the loader, before the next number there |
| k_full, v_full (one) | 1 and bytes | the loader, arming it for the copies | both groups, before they use it or clear rows |
| k_empty (one) | 2 | each group, its last dQ, if any, made | the loader, before the next K |
| v_empty (one) | 2 | each group, when the copy engine has read its dV and dK there | the loader, before the next V |
| q_full, do_full (stage) | 1 and bytes | the loader, arming it for a tile and its LSE or delta | both groups, before S^T, dP^T |
| q_empty (stage) | 2 | each group, after dV and dK | the loader, before the next Q and the next dO there |
| ds_full (buffer) | 2 | each group, its half of dS^T in shared memory | both groups, before dQ |
| dq_full (buffer and group) | 1 | group w, its part of dQ in shared memory | the buffer's storer; the other group (see below) |
| dq_empty (buffer and group) | 1 | its storer, when the copy engine has read it | group w, before the next dQ there |
| turn (group) | 1 | the other group, S and dP issued (for group 0 first the program) | group w, before dV or a walk's first S^T |

Before it leaves dS^T in a buffer, a group waits until the other one has left dQ of the tile whose dS^T lies there.

Across programs, `counters` begins with the number of tiles of keys taken. Then `[batch, heads, tiles of queries]` count the
additions that have reached memory: a storer waits until the counter equals the number of tiles of keys that add before its own
(acquire), and increments it when its own addition has been performed (release).

Budget: KB of shared memory for K and V 32 (d = 64), 64 (d = 128); Q and dO, 2 stages each, 64; dS, 2 buffers, 64 (tiles of 128
queries), 32 (of 64); dQ, 2 buffers, 64; with LSE, delta and barriers 227 of 227, so one program per multiprocessor. Registers
per thread for dK, dV, S and dP: 192 of 240. Words of P and dS, 32 each (d = 64) or 16, take the place of S and dP, and then dQ
takes 32 more.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from numdev.attention.kernels.hopper import order
from numdev.attention.kernels.hopper.primitives import (
    CASTS,
    add_to_global,
    aggregate,
    await_kernel_before,
    await_turn,
    barriers,
    hidden_zero,
    let_kernel_after_start,
    packed,
    pass_turn_on,
    record,
    thread_barrier,
    unpacked,
)

place = gluon.jit(order.place)
unit_at = gluon.jit(order.unit_at)
walk = gluon.jit(order.walk)
first_tile = gluon.jit(order.first_tile)

KEYS = gl.constexpr(64)  # of a computing warp group: one wgmma instruction is 64 rows
TILE = gl.constexpr(order.TILE)
NEVER = gl.constexpr(2**31 - 1)
THREADS = gl.constexpr(128)  # of a warp group, each of which holds so many numbers of the group's part of dQ:
NUMBERS = gl.constexpr(32)
LOG2E = gl.constexpr(1.4426950408889634)


class Code(NamedTuple):
    """Constants of one compiled kernel.

    Attributes:
        br: queries of a tile: 64 or 128.
        dim: head_dim.
        stages: buffers for Q, and for dO.
        dtype: of inputs and outputs.
        causal: whether a query sees no key after its own position, or a fixed number of keys further.
        windowed: whether it sees, in addition, no key `span` or more before the last one that it sees.
        masked: whether a tile of keys can hold keys that do not exist.
        padded: whether k and v exist beyond a batch entry's last key, and may hold anything there.
        registers: of a computing thread.
    """

    br: int
    dim: int
    stages: int
    dtype: Any
    causal: bool
    windowed: bool
    masked: bool
    padded: bool
    registers: int


@aggregate
class Setting:
    """The constants of `Code`, and what follows from them.

    Attributes:
        per: tiles of queries in a unit.
        apart: whether the first step of a walk, which has no dQ, has machine code of its own. At d = 64 it has not: with 147 KB
            of code in place of 130, a causal limit at N = 1,024 took an eighth more time (H200).
        cast: the instructions by which numbers of P and dS become a word.
        s, o, p: layouts of S^T and dP^T [KEYS, br], of dK and dV [KEYS, dim], and of P^T and dS^T as operands.
        dq: layout of a warp group's part of dQ [64, 64].
        query, key: layouts of a number for each query, and for each key of S^T.
        rows: layout of a buffer [KEYS, dim] that is cleared.
    """

    __annotations__ = dict.fromkeys(
        (*Code._fields, "per", "apart", "cast", "s", "o", "p", "dq", "query", "key", "rows"), gl.constexpr
    )

    @gluon.constexpr_function
    def __init__(self, code):
        for name in code._fields:
            setattr(self, name, gl.constexpr(getattr(code, name)))
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.br, 16])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 16])
        self.per = gl.constexpr(128 // code.br)
        self.apart = gl.constexpr(code.dim == 128)
        self.cast = gl.constexpr(CASTS[code.dtype.name])
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 2))
        self.dq = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
        self.query = gl.constexpr(gl.SliceLayout(0, s))
        self.key = gl.constexpr(gl.SliceLayout(1, s))
        self.rows = gl.constexpr(gl.BlockedLayout([1, 8], [256 // code.dim, code.dim // 8], [4, 1], [1, 0]))


@record("tiles total units keys shift span heads shared_by together lengths")
class Problem:
    """Sizes: tiles of keys of a head and of all together, units of queries, keys in memory, and how queries see them.

    `shift` is how much further than its own number a query sees, `span` how many keys up to there. `heads` are query heads,
    `shared_by` those per KV head; `together` KV heads start together. `lengths` are the keys that exist.
    """


@record("tile b kv end count top edge length")
class Work:
    """A tile of keys, and its walk: `count` units up to before `end`, each of every query head.

    Of these the first `top` and the last `edge` need a mask. `length` is the number of keys that exist.
    """


@record("q k v do lse2 delta dk dv", tma.tensor_descriptor)
class Tensors:
    """Descriptors for the copy engine: `[batch, heads, tokens, dim]`; lse2 and delta are `[batch, heads, queries]` in FP32."""


@record(
    "q do k v ds dq lse2 delta number number_full number_empty k_full k_empty v_full v_empty "
    "q_empty q_full do_full ds_full dq_full dq_empty turn",
    gl.shared_memory_descriptor,
)
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""


@gluon.jit
def work_of(setting, problem, number):
    """The tile with this number: `together` KV heads start together, the tile with the longest walk of each first.

    `together` divides the number of KV heads of all batch entries.
    """
    tile, head = place(number, problem.tiles, problem.together)
    kv_heads = problem.heads // problem.shared_by
    b = head // kv_heads
    length = problem.keys
    if setting.masked:
        length = gl.load(problem.lengths + b)
    first, end, whole, whole_end = walk(tile, problem.shift, problem.span, problem.units, setting.causal, setting.windowed)
    count = end - first
    edge = tile * 0
    top = tile * 0
    if setting.causal:
        edge = whole - first
    if setting.windowed:
        count = gl.maximum(count, 0)
    if setting.masked:
        edge = gl.where((tile + 1) * TILE > length, count, edge)
        count = gl.where(tile * TILE < length, count, 0)
        edge = gl.minimum(edge, count)
    if setting.windowed:
        top = gl.minimum(end - whole_end, count)
        edge = gl.minimum(edge, count)
    return Work(tile, b, head % kv_heads, end, count, top, edge, length)


@gluon.jit
def publish(shared, n, number):
    """Leave the number of the program's n-th tile to the other warps."""
    mbarrier.wait(shared.number_empty.index(n % 2), ((n // 2) & 1) ^ 1)
    shared.number.index(n % 2).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(shared.number_full.index(n % 2), count=1)


@gluon.jit
def next_number(warps: gl.constexpr, shared, n):
    """The number of the program's n-th tile, for a partition of so many warps; after the last one, that of no tile."""
    mbarrier.wait(shared.number_full.index(n % 2), (n // 2) & 1)
    number = gl.max(shared.number.index(n % 2).load(gl.BlockedLayout([1], [32], [warps], [0])), 0)
    thread_barrier()
    mbarrier.arrive(shared.number_empty.index(n % 2), count=1)
    return number


@gluon.jit
def load_keys(desc, buffer, full, empty, n, work):
    """Load K or V of the program's n-th tile, when the one before is not needed: a buffer for each computing warp group."""
    mbarrier.wait(empty.index(0), (n & 1) ^ 1)
    mbarrier.expect(full.index(0), 2 * desc.block_type.nbytes)
    for w in gl.static_range(2):
        at = [work.b, work.kv, work.tile * TILE + KEYS * w, 0]
        tma.async_copy_global_to_shared(desc, at, full.index(0), buffer.index(w))


@gluon.jit
def load_tile(setting, shared, descs, i, b, h, row):
    """Load Q with its LSE, then dO with its delta, of one tile of queries, when their buffers are free."""
    at = i % setting.stages
    mbarrier.wait(shared.q_empty.index(at), ((i // setting.stages) & 1) ^ 1)
    mbarrier.expect(shared.q_full.index(at), descs.q.block_type.nbytes + descs.lse2.block_type.nbytes)
    tma.async_copy_global_to_shared(descs.lse2, [b, h, row], shared.q_full.index(at), shared.lse2.index(at))
    tma.async_copy_global_to_shared(descs.q, [b, h, row, 0], shared.q_full.index(at), shared.q.index(at))
    mbarrier.expect(shared.do_full.index(at), descs.do.block_type.nbytes + descs.delta.block_type.nbytes)
    tma.async_copy_global_to_shared(descs.delta, [b, h, row], shared.do_full.index(at), shared.delta.index(at))
    tma.async_copy_global_to_shared(descs.do, [b, h, row, 0], shared.do_full.index(at), shared.do.index(at))


@gluon.jit
def load(setting, shared, problem, descs, counters):
    """The loading warp: take a tile of keys after the other, and load K, V and the tiles of queries in the order of the walk."""
    await_kernel_before()  # which computes lse2 and delta, and sets the counters to 0
    let_kernel_after_start()
    i = 0  # tiles of queries up to here
    n = 0  # tiles of keys
    number = gl.atomic_add(counters, 1)
    while number < problem.total:
        publish(shared, n, number)
        work = work_of(setting, problem, number)
        load_keys(descs.k, shared.k, shared.k_full, shared.k_empty, n, work)
        load_keys(descs.v, shared.v, shared.v_full, shared.v_empty, n, work)
        for at in range(work.count):
            row = unit_at(at, work.end) * TILE
            for g in range(problem.shared_by):
                for part in gl.static_range(setting.per):
                    load_tile(setting, shared, descs, i, work.b, work.kv * problem.shared_by + g, row + part * setting.br)
                    i += 1
        n += 1
        number = gl.atomic_add(counters, 1)
    publish(shared, n, number)


@gluon.jit
def clear(setting, buffer, tail):
    """Zero the rows of a buffer `[KEYS, dim]` from `tail` on: their P is 0, but 0 times NaN would be NaN."""
    buffer = buffer.reshape((KEYS, setting.dim))
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, setting.rows))
    buffer.store(gl.where(gl.expand_dims(rows, 1) < tail, buffer.load(setting.rows), 0.0))


@gluon.jit
def own_keys(w: gl.constexpr, setting, shared, n, work):
    """Wait for K of the program's n-th tile. Where rows may not exist, wait for V too, and clear them in the part of group w."""
    mbarrier.wait(shared.k_full.index(0), n & 1)
    if setting.padded:
        mbarrier.wait(shared.v_full.index(0), n & 1)
        tail = work.length - work.tile * TILE - KEYS * w
        if tail < KEYS:
            clear(setting, shared.k.index(w), tail)
            clear(setting, shared.v.index(w), tail)
            fence_async_shared()
            thread_barrier()


@gluon.jit
def probabilities(w: gl.constexpr, setting, problem, work, s, lse2, row, scale2, MASK: gl.constexpr):
    """`P^T = 2^(scale2 S^T - lse2) [KEYS, br]`, normalised by the forward pass; 0 where a key is not seen."""
    p = gl.exp2(s * scale2 - gl.expand_dims(lse2, 0))
    if MASK:
        keys = work.tile * TILE + KEYS * w + gl.arange(0, KEYS, setting.key)
        rows = row + gl.arange(0, setting.br, setting.query)
        sees = gl.full([KEYS], 0, gl.int32, setting.key)
        if setting.causal:
            sees = keys - problem.shift
        if setting.masked:
            sees = gl.where(keys < work.length, sees, NEVER)
        p = gl.where(gl.expand_dims(rows, 0) >= gl.expand_dims(sees, 1), p, 0.0)
        if setting.windowed:
            p = gl.where(gl.expand_dims(rows, 0) < gl.expand_dims(keys - problem.shift + problem.span, 1), p, 0.0)
    return p


@gluon.jit
def leave(w: gl.constexpr, setting, shared, work, desc, x):
    """Store dK or dV `[KEYS, dim]` of group w through its buffer of V; 0 for keys that do not exist."""
    if setting.masked:
        keys = work.tile * TILE + KEYS * w + gl.arange(0, KEYS, gl.SliceLayout(1, setting.o))
        x = gl.where(gl.expand_dims(keys, 1) < work.length, x, 0.0)
    buffer = shared.v.index(w + hidden_zero(work.tile))  # else its addresses are kept from one tile of keys to the next
    buffer.reshape((KEYS, setting.dim)).store(x.to(setting.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [work.b, work.kv, work.tile * TILE + KEYS * w, 0], buffer)


@gluon.jit
def store_tile(setting, shared, problem, work, d_dq, counters, i, h, unit, part):
    """Store or add dQ of a tile of a unit of head h, tile i of the stream: the first tile of keys in the order stores it."""
    at = i % 2
    parity = (i // 2) & 1
    tile = unit * setting.per + part
    counter = counters + 1 + (work.b * problem.heads + h) * problem.units * setting.per + tile
    mbarrier.wait(shared.dq_full.index(at * 2), parity)
    mbarrier.wait(shared.dq_full.index(at * 2 + 1), parity)
    first = first_tile(unit, problem.shift, problem.span, setting.windowed)
    await_turn(counter, work.tile - first)
    thread_barrier()
    for w in gl.static_range(2):
        row = (tile * 2 + w) * THREADS
        if work.tile == first:
            tma.async_copy_shared_to_global(d_dq, [work.b, h, row, 0], shared.dq.index(at * 2 + w))
        else:
            add_to_global(d_dq, [work.b, h, row, 0], shared.dq.index(at * 2 + w))
    tma.store_wait(0)
    thread_barrier()  # the lane that has waited need not be the lane that arrives
    mbarrier.arrive(shared.dq_empty.index(at * 2), count=1)
    mbarrier.arrive(shared.dq_empty.index(at * 2 + 1), count=1)
    pass_turn_on(counter)


@gluon.jit
def store(first: gl.constexpr, setting, shared, problem, d_dq, counters):
    """A storing warp: the program's share of dQ of the even or of the odd tiles of the stream, in its order."""
    await_kernel_before()  # which sets the counters to 0
    heads = setting.per * problem.shared_by
    base = 0  # tiles of queries of the walks before
    n = 0
    number = next_number(1, shared, n)
    while number < problem.total:
        work = work_of(setting, problem, number)
        for i in range((base + first) % 2, work.count * heads, 2):
            h = work.kv * problem.shared_by + i // setting.per % problem.shared_by
            unit = unit_at(i // heads, work.end)
            store_tile(setting, shared, problem, work, d_dq, counters, base + i, h, unit, i % setting.per)
        base += work.count * heads
        n += 1
        number = next_number(1, shared, n)


@gluon.jit
def against(setting, keys, queries):
    """`S^T = K Q^T` or `dP^T = V dO^T [KEYS, br]` of two buffers, in flight."""
    zeros = gl.zeros([KEYS, setting.br], gl.float32, setting.s)
    columns = queries.reshape((setting.br, setting.dim)).permute((1, 0))  # [dim, br]
    return warpgroup_mma(keys.reshape((KEYS, setting.dim)), columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(setting, words):
    return gl.convert_layout(unpacked(words, setting.dtype), setting.p, assert_trivial=True)


@gluon.jit
def row_of(setting, buffer, at):
    """LSE or delta `[br]` of the tile of queries in buffer `at`."""
    return buffer.index(at).reshape((setting.br,)).load(setting.query)


@gluon.jit
def query_product(w: gl.constexpr, setting, shared, b):
    """Group w's `[64, 64]` of `dQ = dS K`, from both groups' dS^T in buffer b, in flight."""
    zeros = gl.zeros([64, 64], gl.float32, setting.dq)
    first = shared.ds.index(b * 2)  # [KEYS, br]
    second = shared.ds.index(b * 2 + 1)
    k_first = shared.k.index(0).reshape((KEYS, setting.dim))
    k_second = shared.k.index(1).reshape((KEYS, setting.dim))
    if setting.dim == 128:
        k_first = k_first.slice(w * 64, 64, dim=1)
        k_second = k_second.slice(w * 64, 64, dim=1)
    else:
        first = first.slice(w * 64, 64, dim=1)
        second = second.slice(w * 64, 64, dim=1)
    dq = warpgroup_mma(first.permute((1, 0)), k_first, zeros, use_acc=False, is_async=True)
    return warpgroup_mma(second.permute((1, 0)), k_second, dq, is_async=True)


@gluon.jit
def leave_query(w: gl.constexpr, setting, shared, i, dq):
    """Pass the group's part of dQ of tile i to the storer: for each thread the 32 numbers that it holds.

    These are rows `16 warp + 8 x + lane // 4` and columns `8 y + 2 (lane % 4) + z` of the part, x and z of 0 and 1.
    """
    b = i % 2
    mbarrier.wait(shared.dq_empty.index(b * 2 + w), ((i // 2) & 1) ^ 1)
    of_threads = dq.reshape([4, 2, 8, 8, 4, 2]).permute([0, 2, 4, 3, 1, 5]).reshape([THREADS, NUMBERS])
    shared.dq.index(b * 2 + w).reshape((THREADS, NUMBERS)).store(of_threads)
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(b * 2 + w), count=1)


@gluon.jit
def begin(w: gl.constexpr, setting, shared, problem, work, n, i, row, scale2, FIRST: gl.constexpr, MASK: gl.constexpr):
    """P^T and dS^T of tile i of the stream as words, dS^T in shared memory too, and pass the turn on."""
    at = i % setting.stages
    parity = (i // setting.stages) & 1
    own = w + hidden_zero(i)
    mbarrier.wait(shared.q_full.index(at), parity)
    s = against(setting, shared.k.index(own), shared.q.index(at))  # [KEYS, br]
    if FIRST:
        mbarrier.wait(shared.v_full.index(0), n & 1)
    mbarrier.wait(shared.do_full.index(at), parity)
    dp = against(setting, shared.v.index(own), shared.do.index(at))  # [KEYS, br]
    mbarrier.arrive(shared.turn.index(1 - w), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = probabilities(w, setting, problem, work, s, row_of(setting, shared.lse2, at), row, scale2, MASK)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = packed(p * (dp - gl.expand_dims(row_of(setting, shared.delta, at), 0)), setting.dtype, setting.cast)
    b = i % 2
    mbarrier.wait(shared.dq_full.index(b * 2 + 1 - w), ((i // 2) & 1) ^ 1)  # the other group has read what lies there
    shared.ds.index(b * 2 + w).store(unpacked(ds, setting.dtype))
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(b), count=1)
    return packed(p, setting.dtype, setting.cast), ds


@gluon.jit
def finish(w: gl.constexpr, setting, shared, i, has_dq, p, ds, dk, dv, TURN: gl.constexpr, APART: gl.constexpr):
    """Add tile i of the stream to dK and dV `[KEYS, dim]`, with TURN in turns, and compute dQ of the tile before, if `has_dq`.

    Of that tile the other group has left its dS^T already, while that of tile i it may still compute. If tile i is the first of
    a walk, there is no such dQ. APART leaves the product out; else one of whatever is in the buffers runs, dS^T that the other
    group may be writing, and nothing uses its result.
    """
    at = i % setting.stages
    b = (i + 1) % 2
    if TURN:
        mbarrier.wait(shared.turn.index(w), (i + 1) & 1, pred=True if APART else has_dq == 0)
    if not APART:
        mbarrier.wait(shared.ds_full.index(b), ((i - 1) // 2) & 1, pred=has_dq)
        dq = query_product(w, setting, shared, b)  # [64, 64]
        if TURN:
            mbarrier.wait(shared.turn.index(w), (i + 1) & 1, pred=has_dq)
    do = shared.do.index(at).reshape((setting.br, setting.dim))
    dv = warpgroup_mma(as_operand(setting, p), do, dv, is_async=True)
    q = shared.q.index(at).reshape((setting.br, setting.dim))
    dk = warpgroup_mma(as_operand(setting, ds), q, dk, is_async=True)
    if not APART:
        dq = warpgroup_mma_wait(2, deps=(dq,))
        if has_dq:
            leave_query(w, setting, shared, i - 1, dq)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(shared.q_empty.index(at), count=1)  # of dO too
    return dk, dv


@gluon.jit
def step(
    w: gl.constexpr, setting, shared, problem, work, base, i, p, ds, dk, dv, scale2, APART: gl.constexpr, MASK: gl.constexpr
):
    """Finish tile i - 1 of the walk, then begin tile i: nothing is in flight from one iteration to the next."""
    has_dq = True if setting.apart else i > 1
    dk, dv = finish(w, setting, shared, base + i - 1, has_dq, p, ds, dk, dv, True, APART)
    row = row_at(setting, problem, work, i) if MASK else 0
    p, ds = begin(w, setting, shared, problem, work, 0, base + i, row, scale2, False, MASK)
    return p, ds, dk, dv


@gluon.jit
def row_at(setting, problem, work, i):
    """The first query of tile i of the walk; the tiles of a unit are visited upwards."""
    return unit_at(i // (setting.per * problem.shared_by), work.end) * TILE + (i % setting.per) * setting.br


@gluon.jit
def visit(w: gl.constexpr, setting, shared, problem, work, n, base, scale2):
    """dK, without its scale, and dV `[KEYS, dim]` of group w's keys in the program's n-th tile; and dQ but for the last tile.

    The walk has at least one tile of queries; `base` is the first one's number in the stream.
    """
    dk = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    dv = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    heads = setting.per * problem.shared_by
    last = work.count * heads
    whole = (work.count - work.edge) * heads
    MASKED: gl.constexpr = setting.causal or setting.masked or setting.windowed
    START: gl.constexpr = 2 if setting.apart else 1
    mbarrier.wait(shared.turn.index(w), base & 1)
    p, ds = begin(w, setting, shared, problem, work, n, base, row_at(setting, problem, work, 0), scale2, True, MASKED)
    if setting.apart and last > 1:
        p, ds, dk, dv = step(w, setting, shared, problem, work, base, 1, p, ds, dk, dv, scale2, True, MASKED)
    top = START
    rest = gl.maximum(whole, START)
    if setting.windowed:
        top = gl.maximum(work.top * heads, START)
        rest = gl.maximum(top, rest)
        for i in range(START, top):
            p, ds, dk, dv = step(w, setting, shared, problem, work, base, i, p, ds, dk, dv, scale2, False, True)
    for i in range(top, whole):
        p, ds, dk, dv = step(w, setting, shared, problem, work, base, i, p, ds, dk, dv, scale2, False, False)
    if setting.causal or setting.masked:
        for i in range(rest, last):
            p, ds, dk, dv = step(w, setting, shared, problem, work, base, i, p, ds, dk, dv, scale2, False, True)
    return finish(w, setting, shared, base + last - 1, last > 1, p, ds, dk, dv, False, False)


@gluon.jit
def compute(w: gl.constexpr, setting, shared, problem, tensors, scale2, scale):
    """Computing warp group w: keys `64 w` to `64 w + 63` of each tile of the program."""
    base = 0  # tiles of queries of the walks before
    n = 0
    number = next_number(4, shared, n)
    while number < problem.total:
        work = work_of(setting, problem, number)
        own_keys(w, setting, shared, n, work)
        last = work.count * setting.per * problem.shared_by
        dk = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
        if last > 0:
            # Where addresses of the first tile and of the loop are one computation, they take registers through the loop.
            dk, dv = visit(w, setting, shared, problem, work, n, base + hidden_zero(n), scale2)
            i = base + last - 1
            mbarrier.wait(shared.ds_full.index(i % 2), (i // 2) & 1)
            dq = warpgroup_mma_wait(0, deps=(query_product(w, setting, shared, i % 2),))
            leave_query(w, setting, shared, i, dq)
            leave(w, setting, shared, work, tensors.dv, dv)
        else:
            mbarrier.wait(shared.v_full.index(0), n & 1)
            leave(w, setting, shared, work, tensors.dv, dk)
        mbarrier.arrive(shared.k_empty.index(0), count=1)
        tma.store_wait(0)
        thread_barrier()
        leave(w, setting, shared, work, tensors.dk, dk * scale)
        tma.store_wait(0)
        thread_barrier()  # the lane that has waited need not be the lane that arrives
        mbarrier.arrive(shared.v_empty.index(0), count=1)
        base += last
        n += 1
        number = next_number(4, shared, n)


@gluon.jit(do_not_specialize=["tiles", "total", "units", "keys", "shift", "span", "heads", "shared_by", "together"])
def gradients(
    d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv, d_dq, counters, lengths, scale2, scale,
    tiles, total, units, keys, shift, span, heads, shared_by, together, CODE: gl.constexpr,
):  # fmt: skip
    """One program: a loading warp, two storing ones and two computing warp groups, which take `total` tiles of keys.

    d_dq describes the workspace, dQ without its scale in FP32 in the order of `leave_query`; `counters` is 0 at the start, and
    `scale2` is `scale log2(e)`.
    """
    setting = Setting(CODE)
    problem = Problem(tiles, total, units, keys, shift, span, heads, shared_by, together, lengths)
    tensors = Tensors(d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv)
    STAGES: gl.constexpr = CODE.stages
    REGISTERS: gl.constexpr = CODE.registers
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS.value, CODE.br], CODE.dtype)
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_q.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_do.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_k.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_v.layout),
        gl.allocate_shared_memory(CODE.dtype, [4, KEYS, CODE.br], DS),
        gl.allocate_shared_memory(gl.float32, [4, 1, 1, THREADS.value, NUMBERS.value], d_dq.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_delta.layout),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1),
        barriers(2, 4),
        barriers(1, 1),
        barriers(1, 2),
        barriers(1, 1),
        barriers(1, 2),
        barriers(STAGES, 2),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(2, 2),
        barriers(4, 1),
        barriers(4, 1),
        barriers(2, 1),
    )
    mbarrier.arrive(shared.turn.index(0), count=1)
    gl.warp_specialize(
        [
            (compute, (0, setting, shared, problem, tensors, scale2, scale)),
            (compute, (1, setting, shared, problem, tensors, scale2, scale)),
            (load, (setting, shared, problem, tensors, counters)),
            (store, (0, setting, shared, problem, d_dq, counters)),
            (store, (1, setting, shared, problem, d_dq, counters)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads"])
def preprocess(
    out, do, lse, lse2, delta, counters, queries, rows_of_head, heads, DIM: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr
):
    """`delta_i = sum_d dO_id O_id` in FP32, `lse2 = LSE log2(e)`, and 0 in the counters: of tiles taken, then for each PART rows.

    out, do and lse are views; lse2 and delta are `[batch, heads, rows_of_head]`, a multiple of ROWS. Rows that see no key and
    rows beyond the last have lse2 of infinity, so that their P is 0, and a delta of 0.
    """
    tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * ROWS
    tl.store(counters + 1 + first // PART, 0)
    if first == 0:
        tl.store(counters, 0)
    head = first // rows_of_head
    b = head // heads
    h = head % heads
    row = (first % rows_of_head) + tl.arange(0, ROWS)  # [ROWS]
    is_row = row < queries
    inner = tl.arange(0, DIM)[None, :]
    o_out = b * out.batch + h * out.head + row[:, None] * out.row + inner * out.dim
    o_do = b * do.batch + h * do.head + row[:, None] * do.row + inner * do.dim
    product = tl.load(out.at + o_out, mask=is_row[:, None], other=0.0).to(tl.float32)
    product *= tl.load(do.at + o_do, mask=is_row[:, None], other=0.0).to(tl.float32)  # [ROWS, DIM]
    value = tl.load(lse.at + b * lse.batch + h * lse.head + row * lse.row, mask=is_row, other=float("-inf"))  # [ROWS]
    empty = value == float("-inf")
    at = first + tl.arange(0, ROWS)
    tl.store(delta + at, tl.where(empty, 0.0, tl.sum(product, 1)))
    tl.store(lse2 + at, tl.where(empty, float("inf"), value * LOG2E))


@triton.jit
def additions(unit, keys, shift, span, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """How many tiles of `keys` keys hold a key that a unit of queries sees."""
    seen = keys
    if CAUSAL:
        seen = tl.minimum(keys, (unit + 1) * TILE + shift)
    count = (seen + TILE - 1) // TILE
    if WINDOWED:
        count -= tl.maximum(unit * TILE + shift - span + 1, 0) // TILE
    return count


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads", "shift", "span"])
def convert(
    total, dq, lengths, counters, scale, queries, rows_of_head, heads, shift, span,
    DIM: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """`dQ = F(scale * total)`, total `[batch, heads, rows_of_head, DIM]`; 0 for units that see no key, where total is unset.

    It may start while the kernel that computes `total` still runs, and waits for the counter of its tile of BR queries.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    head = first // rows_of_head
    b = head // heads
    at = first % rows_of_head
    row = at + tl.arange(0, ROWS)  # [ROWS]
    inner = tl.arange(0, DIM)[None, :]
    is_row = (row < queries)[:, None] & (inner < DIM)
    keys = tl.load(lengths + b)
    needed = additions(at // TILE, keys, shift, span, CAUSAL, WINDOWED)
    while tl.atomic_add(counters + 1 + first // BR, 0, sem="acquire", scope="gpu") < needed:
        tl.inline_asm_elementwise("nanosleep.u32 256; mov.u32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    each = tl.arange(0, ROWS * DIM)
    x = tl.load(total + first * DIM + each, mask=(each >= 0) & (needed > 0), other=0.0)
    # As `leave_query` has left them: part, warp, lane // 4, lane % 4, y, x, z.
    x = x.reshape([DIM // 64, 4, 8, 4, 8, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([ROWS, DIM])
    o_dq = b * dq.batch + (head % heads) * dq.head + row[:, None] * dq.row + inner * dq.dim
    tl.store(dq.at + o_dq, (x * scale).to(dq.at.dtype.element_ty), mask=is_row)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()  # so that this kernel ends after its predecessor, whose dK and dV it does not read
