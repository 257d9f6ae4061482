"""dK and dV for Hopper GPUs: one of the two kernels of the backward pass without additions to global memory, in Gluon.

A program owns 128 keys of a KV head, 64 for each of two computing warp groups, and walks every tile of queries of every head that
shares them (`numdev.attention.kernels.hopper_backward_order`). Everything is transposed, keys down and queries across, since P^T
and dS^T then leave the accumulator in the layout in which the next product reads them from registers:

    S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - LSE log2(e)),  dP^T = V dO^T,  dS^T = P^T o (dP^T - delta)
    dV += F(P^T) dO,  dK += F(dS^T) Q;  dK times scale at the end

The policy is `kernel(F)` of the backward pass: inputs, P, dS and outputs in F, the rest in FP32.

At d = 128 the groups take turns, as in the forward kernel. At d = 64 the loop is skewed instead: S of the next tile is computed
together with the products of the current one; there are registers for it, and turns would cost 7 to 16 % (measured on an H200).

Barriers, all in shared memory. A phase completes after the listed arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| kv_full (one) | 1 and bytes | the loader, arming it for the copies | both groups, before their first product |
| q_full, do_full (stage) | 1 and bytes | the loader, arming it for a tile and its LSE or delta | both groups, before S^T, dP^T |
| q_empty, do_empty (stage) | 2 | each group, after dK; after dV | the loader, before the next tile there |
| turn (group) | 1 | the other group, its products issued; for group 0 first the program | group w, before it issues its own |

Budget: KB of shared memory for K and V 32 (d = 64), 64 (d = 128); for Q and dO 48 (3 stages), 64 (2); in all 81, 129 of 227.
Registers of a thread for dK, dV, S, dP and both operands: 32 + 32 + 64 + 32 + 32 = 192 (d = 64, with the next S), 64 + 64 + 32 +
32 + 32 = 224 (d = 128), of 240.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from numdev.attention.kernels.aggregate import aggregate
from numdev.attention.kernels.hopper_backward_parts import (
    KEYS,
    Setting,
    Tensors,
    leave,
    load,
    own_keys,
    probabilities,
    row_at,
    work_of,
)
from numdev.attention.kernels.hopper_parts import barriers


@aggregate
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor


@gluon.jit
def scores(setting, shared, k, at):
    """`S^T = K Q^T [KEYS, br]` of the tile of queries in buffer `at`, in flight."""
    zeros = gl.zeros([KEYS, setting.br], gl.float32, setting.s)
    q = shared.q.index(at).reshape((setting.br, setting.dim)).permute((1, 0))  # [dim, br]
    return warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)


@gluon.jit
def value_products(setting, shared, v, at):
    """`dP^T = V dO^T [KEYS, br]`, in flight."""
    zeros = gl.zeros([KEYS, setting.br], gl.float32, setting.s)
    do = shared.do.index(at).reshape((setting.br, setting.dim)).permute((1, 0))  # [dim, br]
    return warpgroup_mma(v, do, zeros, use_acc=False, is_async=True)


@gluon.jit
def row_of(setting, buffer, at):
    """LSE or delta `[br]` of the tile of queries in buffer `at`."""
    return buffer.index(at).reshape((setting.br,)).load(setting.query)


@gluon.jit
def as_operand(setting, x):
    return gl.convert_layout(x.to(setting.dtype), setting.p)


@gluon.jit
def step(w: gl.constexpr, setting, shared, work, i, dk, dv, k, v, row, scale2, MASK: gl.constexpr):
    """One tile of queries, i of the stream; dk and dv are `[KEYS, dim]`."""
    at = i % setting.stages
    parity = (i // setting.stages) & 1
    if setting.pingpong:
        mbarrier.wait(shared.turn.index(w), i & 1)
    mbarrier.wait(shared.q_full.index(at), parity)
    s = scores(setting, shared, k, at)  # [KEYS, br]
    mbarrier.wait(shared.do_full.index(at), parity)
    dp = value_products(setting, shared, v, at)  # [KEYS, br]
    if setting.pingpong:
        mbarrier.arrive(shared.turn.index(1 - w), count=1)
    lse2 = row_of(setting, shared.lse2, at)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = probabilities(w, setting, work, s, lse2, row, scale2, MASK)
    delta = row_of(setting, shared.delta, at)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv_next = warpgroup_mma(
        as_operand(setting, p), shared.do.index(at).reshape((setting.br, setting.dim)), dv, is_async=True
    )  # [KEYS, dim]
    ds = p * (dp - gl.expand_dims(delta, 0))
    dk_next = warpgroup_mma(as_operand(setting, ds), shared.q.index(at).reshape((setting.br, setting.dim)), dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv_next,))
    mbarrier.arrive(shared.do_empty.index(at), count=1)
    dk = warpgroup_mma_wait(0, deps=(dk_next,))
    mbarrier.arrive(shared.q_empty.index(at), count=1)
    return dk, dv


@gluon.jit
def skewed_step(w: gl.constexpr, setting, shared, work, i, last, s, dk, dv, k, v, row, scale2, MASK: gl.constexpr):
    """As `step`, for a tile whose S is already computed; S of the next tile is computed together with its products.

    After the last tile the next S is computed from a buffer that is no longer filled; its result is not used.
    """
    at = i % setting.stages
    at_next = (i + 1) % setting.stages
    mbarrier.wait(shared.do_full.index(at), (i // setting.stages) & 1)
    dp = value_products(setting, shared, v, at)  # [KEYS, br]
    p = probabilities(w, setting, work, s, row_of(setting, shared.lse2, at), row, scale2, MASK)
    p_operand = as_operand(setting, p)
    delta = row_of(setting, shared.delta, at)
    dv_next = warpgroup_mma(p_operand, shared.do.index(at).reshape((setting.br, setting.dim)), dv, is_async=True)  # [KEYS, dim]
    mbarrier.wait(shared.q_full.index(at_next), ((i + 1) // setting.stages) & 1, pred=i + 1 < last)
    s_next = scores(setting, shared, k, at_next)
    dp = warpgroup_mma_wait(2, deps=(dp,))
    ds = p * (dp - gl.expand_dims(delta, 0))
    dk_next = warpgroup_mma(as_operand(setting, ds), shared.q.index(at).reshape((setting.br, setting.dim)), dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_next,))
    mbarrier.arrive(shared.do_empty.index(at), count=1)
    s = warpgroup_mma_wait(1, deps=(s_next,))
    dk = warpgroup_mma_wait(0, deps=(dk_next,))
    mbarrier.arrive(shared.q_empty.index(at), count=1)
    return s, dk, dv


@gluon.jit
def walk(w: gl.constexpr, setting, shared, work, i, last, s, dk, dv, k, v, scale2):
    """The tiles of queries of one head: those that need no mask, then those at the edge of the mask."""
    whole = (work.count - work.edge) * setting.per
    for _ in range(whole):
        if setting.skewed:
            s, dk, dv = skewed_step(w, setting, shared, work, i, last, s, dk, dv, k, v, 0, scale2, False)
        else:
            dk, dv = step(w, setting, shared, work, i, dk, dv, k, v, 0, scale2, False)
        i += 1
    if setting.causal or setting.masked:
        for t in range(whole, work.count * setting.per):
            row = row_at(setting, work, t)
            if setting.skewed:
                s, dk, dv = skewed_step(w, setting, shared, work, i, last, s, dk, dv, k, v, row, scale2, True)
            else:
                dk, dv = step(w, setting, shared, work, i, dk, dv, k, v, row, scale2, True)
            i += 1
    return i, s, dk, dv


@gluon.jit
def compute(w: gl.constexpr, setting, shared, work, tensors, scale2, scale):
    """Computing warp group w: keys `64 w` to `64 w + 63` of the tile."""
    dk = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    dv = gl.zeros([KEYS, setting.dim], gl.float32, setting.o)
    k, v = own_keys(w, setting, shared, work)
    last = work.count * setting.per * work.shared_by
    i = 0
    s = 0.0
    if setting.skewed:
        mbarrier.wait(shared.q_full.index(0), 0, pred=last > 0)
        s = warpgroup_mma_wait(0, deps=(scores(setting, shared, k, 0),))
    if setting.grouped:
        for _ in range(work.shared_by):
            i, s, dk, dv = walk(w, setting, shared, work, i, last, s, dk, dv, k, v, scale2)
    else:
        i, s, dk, dv = walk(w, setting, shared, work, i, last, s, dk, dv, k, v, scale2)
    leave(w, setting, work, tensors.dk, shared.k.index(w), dk * scale)
    leave(w, setting, work, tensors.dv, shared.v.index(w), dv)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "units", "keys", "shift", "heads", "shared_by", "together", "walkers"])
def gradients_of_keys(
    d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv, lengths, scale2, scale,
    tiles, units, keys, shift, heads, shared_by, together, walkers, CODE: gl.constexpr,
):  # fmt: skip
    """One program: a loading warp and two computing warp groups, over one tile of keys; `scale2` is `scale log2(e)`."""
    setting = Setting(CODE)
    work = work_of(setting, lengths, tiles, units, keys, shift, heads, shared_by, together, walkers)
    tensors = Tensors(d_q, d_k, d_v, d_do, d_lse2, d_delta, d_dk, d_dv)
    STAGES: gl.constexpr = CODE.stages
    REGISTERS: gl.constexpr = CODE.registers
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_q.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES, 1, 1, CODE.br, CODE.dim], d_do.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_k.layout),
        gl.allocate_shared_memory(CODE.dtype, [2, 1, 1, KEYS, CODE.dim], d_v.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, CODE.br], d_delta.layout),
        barriers(1, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(2, 1),
    )
    mbarrier.arrive(shared.turn.index(0), count=1)
    gl.warp_specialize(
        [
            (compute, (0, setting, shared, work, tensors, scale2, scale)),
            (compute, (1, setting, shared, work, tensors, scale2, scale)),
            (load, (setting, shared, work, tensors)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
