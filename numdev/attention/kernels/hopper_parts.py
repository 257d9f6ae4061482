"""What the warp groups of the Hopper kernel share: settings, buffers, barriers, the list of tiles; and the loading warp group."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from numdev.attention.kernels.aggregate import aggregate

ROWS = gl.constexpr(64)  # of a warp group: one wgmma instruction is 64 rows


class Code(NamedTuple):
    """The constants of one compiled kernel.

    Attributes:
        bc: keys of a block.
        dim: head_dim.
        groups: computing warp groups.
        stages: buffers for K, and for V.
        dtype: of q, k, v and out.
        causal: whether a row sees no key after its own position.
        unaligned: whether a causal limit can cross more than one block of a warp group's rows.
        masked: whether the first block of a tile can hold keys that are not seen.
        padded: whether v exists beyond a batch entry's last key, and may hold anything there.
        registers: of a computing thread.
    """

    bc: int
    dim: int
    groups: int
    stages: int
    dtype: Any
    causal: bool
    unaligned: bool
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
    unaligned: gl.constexpr
    masked: gl.constexpr
    padded: gl.constexpr
    sets: gl.constexpr  # of buffers for Q: two where they fit, so that the next tile's Q is loaded early
    parts: gl.constexpr  # in which O leaves: its columns pass through a buffer of dim / parts of them
    s: gl.constexpr
    o: gl.constexpr
    p: gl.constexpr
    row: gl.constexpr
    o_row: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, code):
        self.bc = gl.constexpr(code.bc)
        self.dim = gl.constexpr(code.dim)
        self.groups = gl.constexpr(code.groups)
        self.stages = gl.constexpr(code.stages)
        self.dtype = gl.constexpr(code.dtype)
        self.causal = gl.constexpr(code.causal)
        self.unaligned = gl.constexpr(code.unaligned)
        self.masked = gl.constexpr(code.masked)
        self.padded = gl.constexpr(code.padded)
        self.sets = gl.constexpr(1 if code.dim > 128 else 2)
        self.parts = gl.constexpr(2 if code.dim > 128 else 1)
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.bc, 16])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 16])
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, s))
        self.o_row = gl.constexpr(gl.SliceLayout(1, o))


@aggregate
class Shared:
    """Buffers in shared memory, and the barriers of the table in `numdev.attention.kernels.hopper`."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor


@aggregate
class Work:
    """The list of tiles (see `numdev.attention.kernels.hopper_host.schedule`) and the sizes of the problem."""

    tiles: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    queries: gl.tensor
    shift: gl.tensor


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def tile(work, j):
    """Tile j of this program: first row, batch entry, head, blocks of keys (0 where the list ends), keys that exist."""
    at = work.tiles + (j * gl.num_programs(0) + gl.program_id(0)) * 5
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def own(c: gl.constexpr, setting, work, row0, n):
    """Of n blocks, from the last keys to the first: how many group c does not see, and from which one on it sees every key.

    The rows of a tile span `64 groups` keys of the diagonal, so a group's last key is at most `64 (groups - 1)` before the
    tile's, and `skip <= (64 (groups - 1) + bc - 1) // bc`: 1, since the kernel asserts `64 (groups - 1) <= bc`.
    """
    skip = 0
    whole = 1
    if setting.causal:
        top = row0 + c * ROWS + work.shift
        skip = n - gl.minimum(n, gl.maximum((top + ROWS - 1) // setting.bc + 1, 1))
        whole = gl.maximum(n - gl.maximum(gl.minimum((top + 1) // setting.bc, n), 0), skip + 1)
    return skip, whole


@gluon.jit
def limits(c: gl.constexpr, setting, work, row0, keys):
    """For each row of group c, the first key that it does not see."""
    limit = gl.full([ROWS], 0, gl.int32, setting.row) + keys
    if setting.causal:
        rows = row0 + c * ROWS + gl.arange(0, ROWS, setting.row)
        limit = gl.minimum(limit, rows + work.shift + 1)
    return limit


@gluon.jit
def load_q(setting, shared, d_q, j, b, h, row0):
    """Load Q of tile j into one of the sets of buffers."""
    for c in gl.static_range(setting.groups):
        at = (j % setting.sets) * setting.groups + c
        mbarrier.wait(shared.q_empty.index(at), ((j // setting.sets) & 1) ^ 1)
        mbarrier.expect(shared.q_full.index(at), d_q.block_type.nbytes)
        tma.async_copy_global_to_shared(d_q, [b, h, row0 + c * ROWS, 0], shared.q_full.index(at), shared.q.index(at))


@gluon.jit
def load_block(desc, full, empty, buffer, stages: gl.constexpr, i, b, h, key):
    """Load K or V of block i of the stream, when its buffer is free."""
    at = i % stages
    mbarrier.wait(empty.index(at), ((i // stages) & 1) ^ 1)
    mbarrier.expect(full.index(at), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, key, 0], full.index(at), buffer.index(at))


@gluon.jit
def clear_tail(setting, buffer, tail):
    """Zero the rows of a buffer `[bc, dim]` from `tail` on: their P is 0, but 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, setting.dim // 16], [2, 16], [4, 1], [1, 0])
    for first in gl.static_range(0, setting.bc, 8):
        if first + 8 > tail:
            part = buffer.slice(first, 8, 0)
            rows = first + gl.arange(0, 8, gl.SliceLayout(1, layout))
            part.store(gl.where(gl.expand_dims(rows, 1) < tail, part.load(layout), 0.0))


@gluon.jit
def load_tail(setting, shared, d_v, i, b, h, key, tail, tails):
    """Load V of block i of the stream, of which `tail` keys exist; `tails` such blocks came before it."""
    at = i % setting.stages
    mbarrier.wait(shared.v_empty.index(at), ((i // setting.stages) & 1) ^ 1)
    mbarrier.expect(shared.v_tail.index(0), d_v.block_type.nbytes)
    tma.async_copy_global_to_shared(d_v, [b, h, key, 0], shared.v_tail.index(0), shared.v.index(at))
    mbarrier.wait(shared.v_tail.index(0), tails & 1)
    clear_tail(setting, shared.v.index(at).reshape((setting.bc, setting.dim)), tail)
    fence_async_shared()
    mbarrier.arrive(shared.v_full.index(at), count=1)


@gluon.jit
def load(setting, shared, work, d_q, d_k, d_v):
    """The loading warp group: load every block of every tile in turn, then one Q and K that the last step reads and ignores."""
    i = 0
    j = 0
    tails = 0
    row0, b, h, n, keys = tile(work, 0)
    while n > 0:
        load_q(setting, shared, d_q, j, b, h, row0)
        kv = h // work.group
        for block in range(n):
            key = (n - 1 - block) * setting.bc
            load_block(d_k, shared.k_full, shared.k_empty, shared.k, setting.stages, i, b, kv, key)
            if setting.padded:
                if keys - key < setting.bc:
                    load_tail(setting, shared, d_v, i, b, kv, key, keys - key, tails)
                    tails += 1
                else:
                    load_block(d_v, shared.v_full, shared.v_empty, shared.v, setting.stages, i, b, kv, key)
            else:
                load_block(d_v, shared.v_full, shared.v_empty, shared.v, setting.stages, i, b, kv, key)
            i += 1
        j += 1
        row0, b, h, n, keys = tile(work, j)
    load_q(setting, shared, d_q, j, 0, 0, 0)
    load_block(d_k, shared.k_full, shared.k_empty, shared.k, setting.stages, i, 0, 0, 0)
