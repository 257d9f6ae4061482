"""The backward pass for Hopper GPUs in one kernel, with additions to dQ in a fixed order, in Gluon.

A program owns 128 keys of a KV head, 64 for each of two computing warp groups, and visits every tile of queries of every head
that shares them. It accumulates dK and dV in registers and computes its share of dQ, which a storing warp passes to the copy
engine. The programs do so in a fixed order: the first stores its share in an FP32 workspace, the others add theirs one after the
other. `numdev.attention.kernels.hopper_backward_order` has the walk, the order, and the reason why there is no deadlock. Every
launch gives the same bits. Each tile takes five products:

    S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - LSE log2(e)),  dP^T = V dO^T,  dS^T = P^T o (dP^T - delta)
    dV += F(P^T) dO,  dK += F(dS^T) Q,  dQ += F(dS) K;  dK times scale here, dQ where the workspace is converted

The policy is `kernel(F)` of the backward pass: inputs, P, dS and outputs in F, the rest in FP32. The readable counterpart is the
pair `hopper_backward_keys` and `hopper_backward_queries`.

dS^T passes through shared memory, since each group's part of dQ needs all 128 keys: group w computes 64 columns of it at d = 128,
64 rows at d = 64. The loop is rotated: S of the next tile is computed together with the products of the current one.

Barriers, all in shared memory. A phase completes after the listed arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| kv_full (one) | 1 and bytes | the loader, arming it for the copies | both groups, before their first product |
| q_full, do_full (stage) | 1 and bytes | the loader, arming it for a tile and its LSE or delta | both groups, before S^T, dP^T |
| q_empty (stage) | 2 | each group, after dK, which comes after dV | the loader, before the next Q and the next dO there |
| ds_full (buffer) | 2 | each group, its half of dS^T in shared memory | both groups, before dQ |
| dq_full (buffer and group) | 1 | group w, its part of dQ in shared memory | the storer |
| dq_empty (buffer and group) | 1 | the storer, when the copy engine has read it | group w, before the next dQ there |
| k_done (one) | 2 | each group, its last dQ made: that reads the K of both | both groups, before dK leaves through that of K |

Across programs, `turns [batch, heads, tiles of queries]` counts the additions that have reached memory: the storer waits until
the counter equals its rank (acquire), and increments it when its own addition has been performed (release).

Budget: KB of shared memory for K and V 32 (d = 64), 64 (d = 128); Q and dO, 2 stages each, 64; dS, 2 buffers, 64 (tiles of 128
queries), 32 (of 64); dQ, 2 buffers, 64; in all 227 of 227, so one program per multiprocessor. Registers per thread for dK, dV,
S, dP, P and dS: 32 + 32 + 64 + 64 + 32 + 32 (d = 64), 64 + 64 + 32 + 32 + 16 + 16 (d = 128) of 240; dQ's 32 take the place of dP.
"""

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
from numdev.attention.kernels.hopper_backward_keys import as_operand, row_of, scores, value_products
from numdev.attention.kernels.hopper_backward_parts import (
    KEYS,
    Setting,
    Tensors,
    leave,
    load,
    own_keys,
    probabilities,
    rank_at,
    row_at,
    unit_at,
    work_of,
)
from numdev.attention.kernels.hopper_backward_reduce import (
    add_to_global,
    await_kernel_before,
    await_turn,
    let_kernel_after_start,
    pass_turn_on,
    performed,
    thread_barrier,
)
from numdev.attention.kernels.hopper_parts import barriers


@aggregate
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    k_done: gl.shared_memory_descriptor


@gluon.jit
def store_tile(setting, shared, work, d_dq, turns, i, h, t):
    """Store or add dQ of tile t of the walk of head h, tile i of the stream: the first program in the order stores it."""
    at = i % 2
    parity = (i // 2) & 1
    unit = unit_at(t // setting.per, work.tile, work.units, work.walkers, setting.causal)
    tile = unit * setting.per + t % setting.per
    rank = rank_at(unit, work.tile, work.tiles, work.walkers, setting.causal)
    turn = turns + (work.b * work.heads + h) * work.units * setting.per + tile
    mbarrier.wait(shared.dq_full.index(at * 2), parity)
    mbarrier.wait(shared.dq_full.index(at * 2 + 1), parity)
    await_turn(turn, rank, setting.spins)
    thread_barrier()
    for w in gl.static_range(2):
        row = tile * setting.br
        column = w * 64
        if setting.dim == 64:
            row = row + w * 64
            column = 0
        if rank == 0:
            tma.async_copy_shared_to_global(d_dq, [work.b, h, row, column], shared.dq.index(at * 2 + w))
        else:
            add_to_global(d_dq, [work.b, h, row, column], shared.dq.index(at * 2 + w))
    tma.store_wait(0)
    thread_barrier()  # the lane that has waited need not be the lane that arrives
    mbarrier.arrive(shared.dq_empty.index(at * 2), count=1)
    mbarrier.arrive(shared.dq_empty.index(at * 2 + 1), count=1)
    pass_turn_on(turn)


@gluon.jit
def store(setting, shared, work, d_dq, turns):
    """The storing warp: the program's share of dQ of every tile of queries, in the order of the walk."""
    await_kernel_before()  # which sets the counters to 0
    let_kernel_after_start()
    i = 0
    for g in range(work.shared_by):
        for t in range(work.count * setting.per):
            store_tile(setting, shared, work, d_dq, turns, i, work.kv * work.shared_by + g, t)
            i += 1
    performed()


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
def step(w: gl.constexpr, setting, shared, work, i, last, s, dk, dv, k, v, row, scale2, MASK: gl.constexpr):
    """Process one tile of queries, i of the stream, whose S is already computed; dk and dv are `[KEYS, dim]`.

    After the last tile the next S is computed from a buffer that is no longer filled; its result is not used.
    """
    at = i % setting.stages
    parity = (i // setting.stages) & 1
    q = shared.q.index(at).reshape((setting.br, setting.dim))
    do = shared.do.index(at).reshape((setting.br, setting.dim))
    mbarrier.wait(shared.do_full.index(at), parity)
    dp = value_products(setting, shared, v, at)  # [KEYS, br]
    p = probabilities(w, setting, work, s, row_of(setting, shared.lse2, at), row, scale2, MASK)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = row_of(setting, shared.delta, at)
    ds = p * (dp - gl.expand_dims(delta, 0))
    p_operand = as_operand(setting, p)
    ds_rounded = ds.to(setting.dtype)
    dv_next = warpgroup_mma(p_operand, do, dv, is_async=True)  # [KEYS, dim]
    b = i % 2
    b_parity = (i // 2) & 1
    shared.ds.index(b * 2 + w).store(ds_rounded)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(b), count=1)
    dk_next = warpgroup_mma(gl.convert_layout(ds_rounded, setting.p), q, dk, is_async=True)  # [KEYS, dim]
    mbarrier.wait(shared.ds_full.index(b), b_parity)
    dq = query_product(w, setting, shared, b)  # [64, 64]
    dv = warpgroup_mma_wait(3, deps=(dv_next,))
    dk = warpgroup_mma_wait(2, deps=(dk_next,))
    mbarrier.arrive(shared.q_empty.index(at), count=1)  # of dO too
    at_next = (i + 1) % setting.stages
    mbarrier.wait(shared.q_full.index(at_next), ((i + 1) // setting.stages) & 1, pred=i + 1 < last)
    s_next = scores(setting, shared, k, at_next)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    mbarrier.wait(shared.dq_empty.index(b * 2 + w), b_parity ^ 1)
    shared.dq.index(b * 2 + w).reshape((64, 64)).store(dq)
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(b * 2 + w), count=1)
    s = warpgroup_mma_wait(0, deps=(s_next,))  # if a product stayed in flight across iterations, the compiler would wait for each
    return s, dk, dv


@gluon.jit
def walk(w: gl.constexpr, setting, shared, work, i, last, s, dk, dv, k, v, scale2):
    """The tiles of queries of one head: those that need no mask, then those at the edge of the mask."""
    whole = (work.count - work.edge) * setting.per
    for t in range(whole):
        s, dk, dv = step(w, setting, shared, work, i + t, last, s, dk, dv, k, v, 0, scale2, False)
    if setting.causal or setting.masked:
        for t in range(whole, work.count * setting.per):
            s, dk, dv = step(w, setting, shared, work, i + t, last, s, dk, dv, k, v, row_at(setting, work, t), scale2, True)
    return s, dk, dv


@gluon.jit
def compute(w: gl.constexpr, setting, shared, work, tensors, scale2, scale):
    """Computing warp group w: keys `64 w` to `64 w + 63` of the tile."""
    dk = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    dv = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    k, v = own_keys(w, setting, shared, work)
    last = work.count * setting.per * work.shared_by
    mbarrier.wait(shared.q_full.index(0), 0, pred=last > 0)
    s = warpgroup_mma_wait(0, deps=(scores(setting, shared, k, 0),))
    if setting.grouped:
        for g in range(work.shared_by):
            s, dk, dv = walk(w, setting, shared, work, g * work.count * setting.per, last, s, dk, dv, k, v, scale2)
    else:
        s, dk, dv = walk(w, setting, shared, work, 0, last, s, dk, dv, k, v, scale2)
    leave(w, setting, work, tensors.dv, shared.v.index(w), dv)  # the other group does not read this V, but this K
    mbarrier.arrive(shared.k_done.index(0), count=1)
    mbarrier.wait(shared.k_done.index(0), 0)
    leave(w, setting, work, tensors.dk, shared.k.index(w), dk * scale)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "units", "keys", "shift", "heads", "shared_by", "together", "walkers"])
def gradients(
    d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv, d_dq, turns, lengths, scale2, scale,
    tiles, units, keys, shift, heads, shared_by, together, walkers, CODE: gl.constexpr,
):  # fmt: skip
    """One program: a loading warp, a storing one and two computing warp groups, over one tile of keys.

    d_dq describes the workspace `[batch, heads, rows, dim]` in FP32, for dQ without its scale; `turns` is 0 at the start, and
    `scale2` is `scale log2(e)`.
    """
    setting = Setting(CODE)
    work = work_of(setting, lengths, tiles, units, keys, shift, heads, shared_by, together, walkers)
    tensors = Tensors(d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv)
    STAGES: gl.constexpr = CODE.stages
    REGISTERS: gl.constexpr = CODE.registers
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS.value, CODE.br], CODE.dtype)
    tile_empty = barriers(STAGES, 2)
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_q.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_do.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_k.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_v.layout),
        gl.allocate_shared_memory(CODE.dtype, [4, KEYS, CODE.br], DS),
        gl.allocate_shared_memory(gl.float32, [4, 1, 1, 64, 64], d_dq.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_delta.layout),
        barriers(1, 1),
        barriers(STAGES, 1),
        tile_empty,
        barriers(STAGES, 1),
        tile_empty,
        barriers(2, 2),
        barriers(4, 1),
        barriers(4, 1),
        barriers(1, 2),
    )
    gl.warp_specialize(
        [
            (compute, (0, setting, shared, work, tensors, scale2, scale)),
            (compute, (1, setting, shared, work, tensors, scale2, scale)),
            (load, (setting, shared, work, tensors)),
            (store, (setting, shared, work, d_dq, turns)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
