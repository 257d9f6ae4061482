"""Forward attention for Hopper GPUs: one loading and two or three computing warp groups, in Gluon.

A computing warp group owns 64 rows of Q. Its loop is skewed by one block of keys, so that the tensor cores compute `P V` of one
block and `Q K^T` of the next while the group computes softmax. Three groups take turns (ping-pong), so that the products of one
overlap the exponentials of another (FlashAttention-3, Shah et al. 2024, sections 3.1 and 3.2); two are faster without turns,
and take them only where sums of `P V` are promoted. A program processes a list of tiles, and issues the first product of the
next tile together with the last product of the current one. Blocks of keys are visited from the last to the first, within a
split, so that the masked ones come before the main loop; splits from the first to the last.

Of 16 bits the policy is `kernel(F)`: inputs, P and output in F; S, m, l, alpha and O in FP32; exponentials are `ex2.approx`.
The readable specification is `numdev.attention.kernels.forward`; the tests compare the two.

In E4M3 both products are sums of `numdev.arithmetic.tensor_cores`; `P V` is promoted, its sum added to O in FP32 and begun
anew, after every `promotion` blocks. P is `p_scale exp(S - m)`, rounded and saturated; O leaves in 16 bits. At d = 128 without
promotion P is rounded once the next `Q K^T` is in flight. V comes transposed, since the unit reads both operands of 8 bits
along the sum. Numbers may be codes with scales, of a head or of a block of rows: that of q and that of a block of K are part of
the factor of S. O is in units of the scale of the block of V that was met last: a change of unit is a factor of a row, as a
rescale is. Of the four threads of a row, thread t holds columns 8 j + 2 t + e of S (e of 0 and 1), and needs 16 g + 4 t + b of
P (b of 0 to 3): so a description of K in five dimensions permutes the keys of each 16.

Splits of a fixed size begin with m, l and O of their own. A program joins those of a tile in order, as tiles of its list that
share Q; m and l stay in registers meanwhile, and O of the splits before in shared memory, where O leaves at the end. Where few
tiles would leave multiprocessors idle each split is a tile by itself, and the kernel `joined` does the same with what they leave.

Barriers, all in shared memory. A phase completes after the listed arrivals and, where the copy engine writes, the expected bytes:

| barrier (one for each) | arrivals | who arrives | who waits |
|---|---|---|---|
| q_full (set and group) | 1 and bytes | the loader, arming it for the copy | group c, before a tile's first `Q K^T` |
| q_empty (set and group) | 1 | group c, after a tile's last `Q K^T` | the loader, before the next Q there |
| k_full, v_full (stage) | 1 and bytes | the loader, arming it for the copy | every group, before it reads the block |
| k_empty, v_empty (stage) | GROUPS | every group, having used or skipped the block | the loader, before the next block there |
| v_tail (one) | 1 and bytes | as v_full, if a block is partly padding | the loader: it clears that, then arrives at v_full |
| turn (group) | 1 | the group before, its products issued; for group 0 first the program | group c, before it issues its own |

Budget of 16 bits, for d = 64 (two groups; three), 128 and 256; Bc is 128, at d = 256 it is 64. In brackets, with joined splits:

| | 64 | 64, three | 128 | 256 |
|---|---|---|---|---|
| KB of Q (2 sets, at d = 256 one) | 32 | 48 | 64 | 64 |
| KB of K and V, 2 stages each | 64 | 64 | 128 | 128 |
| KB of O before it is stored (at d = 256 half of its columns) | 16 | 24 | 32 | 32 |
| with joined splits KB of Q (one set at d = 128), and of O in FP32 | 32, 32 | 48, 48 | 32, 64 | |
| KB in all, of 227, plus a few words for barriers | 112 (128) | 136 (160) | 224 | 224 |
| registers per thread for S, P, O: Bc/2 + Bc/4 + d/2 | 128 | 128 | 160 | 176 |
| the same where Q is held in registers: d/4 more | | | 192 | |
| registers allotted per thread | 240 | 160 | 240 | 240 |

All threads together have `128 (groups * registers + own)` of the 65,536 registers of a multiprocessor; `own`, of a loading
thread, is what the computing ones leave: 24 beside two groups, 32 beside three.
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

from numdev.attention.kernels.hopper import order
from numdev.attention.kernels.hopper.primitives import (
    CASTS,
    aggregate,
    barriers,
    below,
    computing_group,
    packed,
    record,
    scaled,
    thread_barrier,
    unpacked,
)

own_blocks = gluon.jit(order.own)

LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warp group: one wgmma instruction is 64 rows


class Code(NamedTuple):
    """Constants of one compiled kernel.

    Attributes:
        bc: keys of a block.
        dim: head_dim.
        groups: computing warp groups.
        stages: buffers for K, and for V.
        dtype: of q, k, v and out.
        causal: whether a row sees no key after its own position, or a fixed number of keys further.
        windowed: whether it sees, in addition, no key `span` or more before the last one that it sees.
        unaligned: whether a causal limit can cross more than one block of a warp group's rows.
        masked: whether the first block of a tile can hold keys that are not seen.
        padded: whether v exists beyond a batch entry's last key, and may hold anything there.
        registers: of a computing thread.
        threshold: by how much, in units of log 2, the largest score of a row must rise before m does and O is rescaled.
        promotion: of 8 bits, blocks of keys after which the sum of `P V` is promoted; 0 for never.
        p_bits: of 8 bits, log2 of the factor of P.
        scaled: whether q, k and v are codes with scales.
        q_rows, k_keys, v_keys: rows of q, a multiple of 64, and keys of k and of v, multiples of `bc`, that share a scale; 0 for
            all of a head.
        split: blocks of keys of a split of a fixed size; 0 for one split.
        parts: whether each split leaves its m, l and O, for `joined`; otherwise a program joins those of a tile in order.
    """

    bc: int
    dim: int
    groups: int
    stages: int
    dtype: Any
    causal: bool
    windowed: bool
    unaligned: bool
    masked: bool
    padded: bool
    registers: int
    threshold: float = 0.0
    promotion: int = 0
    p_bits: int = 0
    scaled: bool = False
    q_rows: int = 0
    k_keys: int = 0
    v_keys: int = 0
    split: int = 0
    parts: bool = False


@aggregate
class Setting:
    """The constants of `Code`, and what follows from them.

    Attributes:
        narrow: whether inputs have 8 bits.
        sets: of buffers for Q: two where they fit, so that the next tile's Q is loaded early.
        halves: in which O leaves, 1 or 2: its columns pass through a buffer of dim / halves of them.
        turns: whether the groups take turns.
        skips: whether a warp skips the rescale of O where none of its rows needs one.
        joins: whether a program joins the splits of a tile.
        holds: whether a group holds Q of its tile in registers, of which masks and splits leave too few.
        defers: whether P stays in FP32 until the next `Q K^T` has been issued, beside which it is rounded, and summed beside
            `P V`: 1 to 3 % faster (`benchmarks.kernels --precision e4m3fn --dims 128`), slower at d = 256. Promoted sums leave no
            registers for it.
        cast: the instructions by which numbers of P become a word.
        s, o, p, q: layouts of S, of O, and of P and Q as operands.
        row, o_row, o_column: layouts of a number for each row of S, for each row of O, and for each column of O.
        o_before: layout in shared memory of O between two splits.
    """

    _derived = (
        *("narrow", "sets", "halves", "turns", "skips", "joins", "holds", "defers", "cast"),
        *("s", "o", "p", "q", "row", "o_row", "o_column", "o_before"),
    )
    __annotations__ = dict.fromkeys((*Code._fields, *_derived), gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, code):
        for name in code._fields:
            setattr(self, name, gl.constexpr(getattr(code, name)))
        bits = code.dtype.primitive_bitwidth
        s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.bc, 256 // bits])
        o = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, code.dim, 256 // bits])
        self.narrow = gl.constexpr(bits == 8)
        joins = code.split > 0 and not code.parts
        self.sets = gl.constexpr(1 if code.dim > 128 or (code.dim == 128 and joins) else 2)
        self.halves = gl.constexpr(2 if code.dim > 128 else 1)
        self.turns = gl.constexpr(code.groups == 3 or code.promotion > 0)
        self.skips = gl.constexpr(code.threshold > 0 or (bits == 8 and code.dim > 128))
        self.joins = gl.constexpr(joins)
        self.holds = gl.constexpr(bits == 16 and code.dim == 128 and not (code.masked or code.split))
        self.defers = gl.constexpr(bits == 8 and code.dim == 128 and code.promotion == 0)
        self.cast = gl.constexpr(CASTS[code.dtype.name])
        self.s = gl.constexpr(s)
        self.o = gl.constexpr(o)
        self.p = gl.constexpr(gl.DotOperandLayout(0, o, 32 // bits))
        self.q = gl.constexpr(gl.DotOperandLayout(0, s, 32 // bits))
        self.row = gl.constexpr(gl.SliceLayout(1, s))
        self.o_row = gl.constexpr(gl.SliceLayout(1, o))
        self.o_column = gl.constexpr(gl.SliceLayout(0, o))
        self.o_before = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, code.dim], gl.float32))


@record("q k v o q_full q_empty k_full k_empty v_full v_empty v_tail turn", gl.shared_memory_descriptor)
class Shared:
    """Buffers in shared memory, and the barriers of the table above."""


@record("tiles scales states sums splits heads group queries shift span")
class Work:
    """The list of tiles (see `numdev.attention.kernels.hopper.launch.schedule`) and the sizes of the problem.

    Under a limit, query i sees keys up to `i + shift`, in a window the last `span` of them. For each batch entry, `scales` has
    those of the blocks of each head of q, then of k, then of v. Of `parts`, `states` holds O of each split of a query, one of
    `splits`, and `sums` its m and l.
    """


@record("n skip floor limit scale k_at v_at")
class Visit:
    """A tile for one group: `n` is its first block plus 1, `skip` how many it passes over; `floor` and `limit` are the keys that
    each row sees, `scale` the factor of S, `k_at` and `v_at` the addresses of scales.
    """


@record("p alpha acc total m row_sum v_scale")
class State:
    """A group's rows between two blocks: P as `carried` has it, alpha of its block, O, the promoted sum, m, l and V's scale.

    If `setting.defers`, l does not contain P yet.
    """


@gluon.jit
def tile(setting, work, j):
    """Tile j of this program, or a split of it: first row, batch entry, head, the block behind its last (0 where the list ends),
    keys that exist, and how many blocks it visits.
    """
    at = work.tiles + (j * gl.num_programs(0) + gl.program_id(0)) * 6
    n = gl.load(at + 3)
    end = n
    if setting.windowed or setting.split:
        end = n - gl.load(at + 5)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), n, gl.load(at + 4), end


@gluon.jit
def own(c, setting, work, row0, n, end):
    """What group c skips of a tile, and what needs no mask: see `numdev.attention.kernels.hopper.order`."""
    return own_blocks(row0 + c * ROWS, n, end, work.shift, work.span, setting.bc, setting.causal, setting.windowed)


@gluon.jit
def limits(c, setting, work, row0, keys):
    """For each row of group c, the first key that it sees, in a window, and the first one behind all that it sees."""
    limit = gl.full([ROWS], 0, gl.int32, setting.row) + keys
    floor = limit
    if setting.causal:
        last = row0 + c * ROWS + gl.arange(0, ROWS, setting.row) + work.shift
        limit = gl.minimum(limit, last + 1)
        floor = last + 1 - work.span
    return floor, limit


@gluon.jit
def scale_in(at, token, size: gl.constexpr):
    """The scale of a token, of those of its head, which begin at `at`."""
    if size:
        at = at + token // size
    return gl.load(at)


@gluon.jit
def count(tokens, size: gl.constexpr):
    """How many scales a head has; of the type of `tokens`."""
    if size:
        n = (tokens + size - 1) // size
    else:
        n = tokens * 0 + 1
    return n


@gluon.jit
def scales_of(c, setting, work, row0, b, h, scale):
    """The factor of S of group c, without that of a block of keys, and where the scales of K and of V of its head begin."""
    k_at = work.scales
    v_at = work.scales
    if setting.scaled:
        keys, kv_heads = work.queries + work.shift, work.heads // work.group
        of_q, of_k, of_v = count(work.queries, setting.q_rows), count(keys, setting.k_keys), count(keys, setting.v_keys)
        q_at = work.scales + b * (work.heads * of_q + kv_heads * (of_k + of_v))
        k_at = q_at + work.heads * of_q + h // work.group * of_k
        v_at = q_at + work.heads * of_q + kv_heads * of_k + h // work.group * of_v
        scale = scale * scale_in(q_at + h * of_q, gl.minimum(row0 + c * ROWS, work.queries - 1), setting.q_rows)
        if not setting.k_keys:
            scale = scale * gl.load(k_at)
    return scale, k_at, v_at


@gluon.jit
def load_q(setting, shared, d_q, j, b, h, row0):
    """Load Q of tile j into one of the sets of buffers."""
    for c in gl.static_range(setting.groups):
        at = (j % setting.sets) * setting.groups + c
        mbarrier.wait(shared.q_empty.index(at), ((j // setting.sets) & 1) ^ 1)
        mbarrier.expect(shared.q_full.index(at), d_q.block_type.nbytes)
        tma.async_copy_global_to_shared(d_q, [b, h, row0 + c * ROWS, 0], shared.q_full.index(at), shared.q.index(at))


@gluon.jit
def load_block(desc, full, empty, buffer, stages: gl.constexpr, i, at):
    """Load K or V of block i of the stream from a place of its tensor, when its buffer is free."""
    stage = i % stages
    mbarrier.wait(empty.index(stage), ((i // stages) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, at, full.index(stage), buffer.index(stage))


@gluon.jit
def load_k(setting, shared, work, d_k, i, b, h, key):
    """Load K of block i; of 8 bits, tokens are described in groups of 16, those of all heads one after the other."""
    if setting.narrow:
        groups = (work.queries + work.shift + 15) // 16
        at = (b * (work.heads // work.group) + h) * groups + key // 16
        load_block(d_k, shared.k_full, shared.k_empty, shared.k, setting.stages, i, [at, 0, 0, 0, 0])
    else:
        load_block(d_k, shared.k_full, shared.k_empty, shared.k, setting.stages, i, [b, h, key, 0])


@gluon.jit
def load_v(setting, shared, d_v, i, b, h, key):
    """Load V of block i."""
    if setting.narrow:
        load_block(d_v, shared.v_full, shared.v_empty, shared.v, setting.stages, i, [b, h, 0, key])
    else:
        load_block(d_v, shared.v_full, shared.v_empty, shared.v, setting.stages, i, [b, h, key, 0])


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
    t = 0  # of Q, which the splits of a tile share
    tails = 0
    row0, b, h, n, keys, end = tile(setting, work, 0)
    while n > 0:
        if setting.joins:
            if n == end:
                load_q(setting, shared, d_q, t, b, h, row0)
                t += 1
        else:
            load_q(setting, shared, d_q, t, b, h, row0)
            t += 1
        kv = h // work.group
        for block in range(end):
            key = (n - 1 - block) * setting.bc
            load_k(setting, shared, work, d_k, i, b, kv, key)
            if setting.padded:
                if keys - key < setting.bc:
                    load_tail(setting, shared, d_v, i, b, kv, key, keys - key, tails)
                    tails += 1
                else:
                    load_v(setting, shared, d_v, i, b, kv, key)
            else:
                load_v(setting, shared, d_v, i, b, kv, key)
            i += 1
        j += 1
        row0, b, h, n, keys, end = tile(setting, work, j)
    load_q(setting, shared, d_q, t, 0, 0, 0)
    load_k(setting, shared, work, d_k, i, 0, 0, 0)


@gluon.jit
def take_turn(c, setting, shared, i):
    """Wait for the turn of group c. Every group takes one at every block but the stream's first, even with nothing to issue."""
    if setting.turns:
        mbarrier.wait(shared.turn.index(c), (i - 1) & 1, pred=i > 0)


@gluon.jit
def pass_turn(c, setting, shared, i):
    if setting.turns:
        mbarrier.arrive(shared.turn.index((c + 1) % setting.groups), count=1, pred=i > 0)


@gluon.jit
def pass_over(c, setting, shared, i, count):
    """Release the buffers of blocks in which group c sees no key."""
    for _ in range(count):
        at = i % setting.stages
        parity = (i // setting.stages) & 1
        mbarrier.wait(shared.k_full.index(at), parity)
        mbarrier.arrive(shared.k_empty.index(at), count=1)
        mbarrier.wait(shared.v_full.index(at), parity)
        mbarrier.arrive(shared.v_empty.index(at), count=1)
        take_turn(c, setting, shared, i)
        pass_turn(c, setting, shared, i)
        i += 1
    return i


@gluon.jit
def query(setting, shared, i):
    """What `scores` takes: Q `[ROWS, dim]` of buffer i in registers if `setting.holds`, otherwise the number i."""
    q = i
    if setting.holds:
        q = shared.q.index(i).reshape((ROWS, setting.dim)).load(setting.q)
    return q


@gluon.jit
def scores(setting, shared, q, i):
    """`S = Q K^T [ROWS, bc]` of block i of the stream, in flight; q is a `query`."""
    k = shared.k.index(i % setting.stages).reshape((setting.bc, setting.dim)).permute((1, 0))  # [dim, bc]
    zeros = gl.zeros([ROWS, setting.bc], gl.float32, setting.s)
    if not setting.holds:
        q = shared.q.index(q).reshape((ROWS, setting.dim))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def softmax(setting, s, m, scale, key, floor, limit, MASK: gl.constexpr):
    """`P [ROWS, bc]`, `alpha, m' [ROWS]` of a block, in units of log 2; `scale` is positive and holds log2(e)."""
    if MASK:
        # Two groups have registers to spare: they compare the block's columns, the same for every block and so kept in
        # registers, with a limit shifted to the block. Three groups have none to spare, and compute the columns each time.
        keys = gl.arange(0, setting.bc, gl.SliceLayout(0, setting.s))
        if setting.narrow:  # 16 g + 8 h + 2 t + e is the column of key 16 g + 4 t + 2 h + e
            keys = keys - keys % 16 + (keys // 2) % 4 * 4 + (keys // 8) % 2 * 2 + keys % 2
        if setting.groups == 2:
            limit = limit - key
            floor = floor - key
        else:
            keys = keys + key
        s = below(s, gl.expand_dims(keys, 0), gl.expand_dims(limit, 1))
        if setting.windowed:
            s = below(s, gl.expand_dims(floor - 1, 1), gl.expand_dims(keys, 0))
    if setting.dim == 128 and not setting.narrow:  # of two halves, since a row's comparisons wait for each other
        left, right = s.reshape([ROWS, 2, setting.bc // 2]).permute([0, 2, 1]).split()  # [ROWS, bc / 2] each
        largest = gl.convert_layout(gl.max(gl.maximum(left, right), 1), setting.row, assert_trivial=True) * scale
    else:
        largest = gl.max(s, 1) * scale
    if setting.threshold > 0:
        m_next = gl.where(largest - m > setting.threshold, largest, m)
    else:
        m_next = gl.maximum(m, largest)
    shift = m_next
    if MASK:
        shift = gl.where(m_next == float("-inf"), 0.0, m_next)
    alpha = gl.exp2(m - shift)
    minus = gl.expand_dims(shift - setting.p_bits, 1)
    if setting.split:  # with splits the compiler contracts nothing, so that the FMA is explicit
        p = gl.exp2(gl.fma(s, scale, -minus))
    else:  # contracted to the same FMA; it takes two instructions less, and the wait for P V may come later
        p = gl.exp2(s * scale - minus)
    return p, alpha, m_next


@gluon.jit
def next_row_sum(row_sum, alpha, p):
    """`l' [ROWS]` after a block with P `[ROWS, bc]`."""
    return row_sum * alpha + gl.sum(p, 1)


@gluon.jit
def carried(setting, p):
    """P `[ROWS, bc]` as it passes to the next block: in words of 32 bits, or in FP32 if `setting.defers`."""
    if not setting.defers:
        p = packed(p, setting.dtype, setting.cast)
    return p


@gluon.jit
def step(c, setting, shared, q, i, i_v, met, state, m, row_sum, visit, key, MASK: gl.constexpr):
    """`P V` of block i_v, whose P is at hand after `met` blocks of its tile, with `Q K^T` and softmax of block i, from `key` on.

    m and row_sum `[ROWS]` are those before block i, which may begin the next tile, and so not always those of the state. If
    `setting.defers` row_sum is that before block i_v, and P of i_v is added to it. Returned are P of block i, its alpha, the
    factor of O (alpha times the ratio of V's scales), O, m, row_sum and V's scale.
    """
    scale = visit.scale
    k_scale = scale
    v_next = state.v_scale
    p = state.p
    if setting.k_keys:  # loaded before anything is awaited
        k_scale = scale_in(visit.k_at, key, setting.k_keys)
    if setting.v_keys:
        v_next = scale_in(visit.v_at, key, setting.v_keys)
    at = i % setting.stages
    at_v = i_v % setting.stages
    mbarrier.wait(shared.k_full.index(at), (i // setting.stages) & 1)
    take_turn(c, setting, shared, i)
    s = scores(setting, shared, q, i)  # [ROWS, bc]
    words = packed(p, setting.dtype, setting.cast) if setting.defers else p
    mbarrier.wait(shared.v_full.index(at_v), (i_v // setting.stages) & 1)
    if setting.narrow:
        v = shared.v.index(at_v).reshape((setting.dim, setting.bc)).permute((1, 0))  # [bc, dim]
    else:
        v = shared.v.index(at_v).reshape((setting.bc, setting.dim))
    operand = gl.convert_layout(unpacked(words, setting.dtype), setting.p, assert_trivial=True)
    if setting.promotion:
        product = warpgroup_mma(operand, v, state.acc, use_acc=met % setting.promotion != 0, is_async=True)  # [ROWS, dim]
    else:
        product = warpgroup_mma(operand, v, state.acc, is_async=True)
    pass_turn(c, setting, shared, i)
    if setting.defers:
        row_sum = next_row_sum(row_sum, state.alpha, p)
    s = warpgroup_mma_wait(1, deps=(s,))
    if setting.defers or not setting.narrow:  # otherwise both buffers at one place, which is faster in 8 bits
        mbarrier.arrive(shared.k_empty.index(at), count=1)
    if setting.k_keys:
        scale = scale * k_scale
    p_next, alpha, m = softmax(setting, s, m, scale, key, visit.floor, visit.limit, MASK)
    if not setting.defers:
        row_sum = next_row_sum(row_sum, alpha, p_next)
    factor = alpha
    if setting.v_keys:
        factor = factor * (state.v_scale / v_next)
    acc = warpgroup_mma_wait(0, deps=(product,))
    if setting.narrow and not setting.defers:
        mbarrier.arrive(shared.k_empty.index(at), count=1)
    mbarrier.arrive(shared.v_empty.index(at_v), count=1)
    return p_next, alpha, factor, acc, m, row_sum, v_next


@gluon.jit
def rescale(setting, acc, total, factor, met):
    """O times its factor after `met` blocks of a tile: `acc`, the sum that the tensor cores add to, and what was promoted."""
    factor = gl.expand_dims(gl.convert_layout(factor, setting.o_row), 1)
    if setting.promotion:
        total = scaled(total + gl.where(met % setting.promotion == 0, acc, 0.0), factor, setting.skips)
    return scaled(acc, factor, setting.skips), total


@gluon.jit
def blocks(c, setting, shared, q, i, state, visit, first, last, MASK: gl.constexpr):
    """Blocks `first` to `last - 1` of a tile, of those after the first one that group c sees."""
    tile_q = query(setting, shared, q)
    for block in range(first, last):
        key = (visit.n - 1 - block) * setting.bc
        met = block - visit.skip
        p, alpha, factor, acc, m, row_sum, v_scale = step(
            c, setting, shared, tile_q, i, i - 1, met - 1, state, state.m, state.row_sum, visit, key, MASK
        )
        p = carried(setting, p)
        acc, total = rescale(setting, acc, state.total, factor, met)
        state = State(p, alpha, acc, total, m, row_sum, v_scale)
        i += 1
    return i, state


@gluon.jit
def store(c, setting, shared, d_o, row0, b, h, out, column: gl.constexpr):
    """Columns of O from `column` on, out `[ROWS, dim / halves]`, through the group's buffer."""
    buffer = shared.o.index(c)
    if setting.joins:
        buffer = buffer._reinterpret(d_o.dtype, d_o.block_shape, d_o.layout)
    tma.store_wait(0)
    buffer.reshape((ROWS, setting.dim // setting.halves)).store(out.to(d_o.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(d_o, [b, h, row0 + c * ROWS, column], buffer)


@gluon.jit
def finished(m, row_sum, p_bits: gl.constexpr):
    """LSE `(m + log2 l) ln 2` and 1 / l, of P with a factor of 2^p_bits; minus infinity and 0 for a row that sees no key."""
    empty = row_sum == 0.0  # otherwise the largest score would add 1
    value = gl.where(empty, float("-inf"), (m + gl.log2(row_sum * 2.0**-p_bits)) * LN2)
    return value, gl.where(empty, 0.0, 1.0 / row_sum)


@gluon.jit
def finish(c, setting, shared, work, d_o, lse, row0, b, h, acc, m, row_sum, v_scale):
    """Store `O / l` through shared memory and the copy engine, which omits rows beyond the last; store the LSE.

    acc is `[ROWS, dim]`; m and row_sum are `[ROWS]`.
    """
    rows = row0 + c * ROWS + gl.arange(0, ROWS, setting.row)
    value, inverse = finished(m, row_sum, setting.p_bits)
    gl.store(lse + (b * work.heads + h).to(gl.int64) * work.queries + rows, value, mask=rows < work.queries)
    if setting.scaled:
        inverse = inverse * v_scale
    factor = gl.expand_dims(gl.convert_layout(inverse, setting.o_row), 1)
    out = acc * factor
    if setting.masked:
        out = gl.where(factor == 0.0, 0.0, out)  # such a row has met keys of other rows, whose v may hold NaN
    if setting.halves == 1:
        store(c, setting, shared, d_o, row0, b, h, out, 0)
    else:
        left, right = out.reshape([ROWS, 2, setting.dim // 2]).permute([0, 2, 1]).split()  # [ROWS, dim / 2] each
        store(c, setting, shared, d_o, row0, b, h, left, 0)
        store(c, setting, shared, d_o, row0, b, h, right, setting.dim // 2)


@gluon.jit
def keep(c, setting, work, row0, b, h, first, acc, m, row_sum):
    """Write the state of rows after the split that begins with block `first`: acc `[ROWS, dim]`, m and row_sum `[ROWS]`."""
    row = row0 + c * ROWS + gl.arange(0, ROWS, setting.row)
    at = ((b * work.heads + h).to(gl.int64) * work.queries + row) * work.splits + first // setting.split
    exists = row < work.queries
    gl.store(work.sums + 2 * at, m, mask=exists)
    gl.store(work.sums + 2 * at + 1, row_sum, mask=exists)
    columns = gl.expand_dims(gl.arange(0, setting.dim, setting.o_column), 0)
    states = work.states + gl.expand_dims(gl.convert_layout(at, setting.o_row), 1) * setting.dim + columns
    gl.store(states, acc, mask=gl.expand_dims(gl.convert_layout(exists, setting.o_row), 1))


@gluon.jit
def weights(m_0, sum_0, m, row_sum):
    """m and l after a split, of those before it and its own, and the factors of both O: see `numdev.attention.recurrence`."""
    m_next = gl.maximum(m_0, m)
    base = gl.where(m_next == float("-inf"), 0.0, m_next)
    alpha = gl.exp2(m_0 - base)
    beta = gl.exp2(m - base)
    return m_next, alpha, beta, sum_0 * alpha + row_sum * beta


@gluon.jit
def join(c, setting, shared, acc, m, row_sum, m_0, sum_0):
    """The state of rows after a split, whose own is given, and that before it; a row that sees no key of it keeps its state."""
    m_next, alpha, beta, sum_next = weights(m_0, sum_0, m, row_sum)
    alpha = gl.expand_dims(gl.convert_layout(alpha, setting.o_row), 1)
    beta = gl.expand_dims(gl.convert_layout(beta, setting.o_row), 1)
    sees = gl.expand_dims(gl.convert_layout(m, setting.o_row), 1) != float("-inf")
    acc_0 = shared.o.index(c).load(setting.o)
    return gl.where(sees, acc_0 * alpha + acc * beta, acc_0), m_next, sum_next


@gluon.jit
def joined(states, sums, out, lse, splits, rows, DIM: gl.constexpr):
    """O and LSE `[rows]` of `splits` parts of each row, in order: states `[rows, splits, DIM]`, sums `[rows, splits, 2]`."""
    layout: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [4, 1], [1, 0])
    row = gl.program_id(0) * 4 + gl.arange(0, 4, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, layout)), 0)
    m = gl.full([4], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.full([4], 0.0, gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([4, DIM], gl.float32, layout)
    for first in range(0, splits, 8):
        for i in gl.static_range(8):  # whose loads do not wait for each other
            exists = (row < rows) & (first + i < splits)
            at = row.to(gl.int64) * splits + first + i
            m_own = gl.load(sums + 2 * at, mask=exists, other=float("-inf"))
            sum_own = gl.load(sums + 2 * at + 1, mask=exists, other=0.0)
            own_acc = gl.load(states + gl.expand_dims(at, 1) * DIM + column, mask=gl.expand_dims(exists, 1), other=0.0)
            m, alpha, beta, row_sum = weights(m, row_sum, m_own, sum_own)
            sees = gl.expand_dims(m_own, 1) != float("-inf")
            acc = gl.where(sees, acc * gl.expand_dims(alpha, 1) + own_acc * gl.expand_dims(beta, 1), acc)
    value, inverse = finished(m, row_sum, 0)
    gl.store(lse + row, value, mask=row < rows)
    at = gl.expand_dims(row.to(gl.int64), 1) * DIM + column
    gl.store(out + at, (acc * gl.expand_dims(inverse, 1)).to(out.dtype.element_ty), mask=gl.expand_dims(row < rows, 1))


@gluon.jit
def compute(setting, shared, work, d_o, lse, scale):
    """A computing warp group c: rows `64 c` to `64 c + 63` of every tile of the program."""
    c = computing_group()
    row0, b, h, n, keys, end = tile(setting, work, 0)
    row0_next, b_next, h_next, n_next, keys_next, end_next = tile(setting, work, 1)
    skip, whole, edge = own(c, setting, work, row0, n, end)
    floor, limit = limits(c, setting, work, row0, keys)  # [ROWS]
    m_0 = gl.full([ROWS], float("-inf"), gl.float32, setting.row)  # [ROWS]
    row_sum_0 = gl.full([ROWS], 0.0, gl.float32, setting.row)  # [ROWS]
    acc = gl.zeros([ROWS, setting.dim], gl.float32, setting.o)  # [ROWS, dim]
    total = acc if setting.promotion else row_sum_0  # [ROWS, dim], what was promoted; otherwise nothing reads it
    factor, k_at, v_at = scales_of(c, setting, work, row0, b, h, scale)
    v_scale = scale  # of the block of V that was met last; without scales nothing reads it
    i = 0  # blocks of the stream so far
    if setting.causal:
        i = pass_over(c, setting, shared, i, skip)
        take_turn(c, setting, shared, i)
        pass_turn(c, setting, shared, i)
    at = i % setting.stages
    mbarrier.wait(shared.q_full.index(c), 0)
    mbarrier.wait(shared.k_full.index(at), (i // setting.stages) & 1)
    s = warpgroup_mma_wait(0, deps=(scores(setting, shared, query(setting, shared, c), i),))  # [ROWS, bc]
    mbarrier.arrive(shared.k_empty.index(at), count=1)
    key = (n - 1 - skip) * setting.bc
    of_block = factor
    if setting.k_keys:
        of_block = factor * scale_in(k_at, key, setting.k_keys)
    if setting.scaled:
        v_scale = scale_in(v_at, key, setting.v_keys)
    p_next, alpha, m = softmax(setting, s, m_0, of_block, key, floor, limit, setting.masked)
    row_sum = row_sum_0 if setting.defers else next_row_sum(row_sum_0, alpha, p_next)
    p = carried(setting, p_next)
    i += 1
    j = 0  # tiles so far, splits counted
    t = 0  # and Q
    m_before = m_0  # of the splits before
    sum_before = row_sum_0
    while n > 0:
        q = (t % setting.sets) * setting.groups + c
        state = State(p, alpha, acc, total, m, row_sum, v_scale)
        visit = Visit(n, skip, floor, limit, factor, k_at, v_at)
        if setting.unaligned:
            i, state = blocks(c, setting, shared, q, i, state, visit, skip + 1, whole, True)
        i, state = blocks(c, setting, shared, q, i, state, visit, whole, edge, False)
        if setting.windowed:
            i, state = blocks(c, setting, shared, q, i, state, visit, edge, end, True)
        if setting.joins:
            if n_next == end_next:
                mbarrier.arrive(shared.q_empty.index(q), count=1)
                t += 1
        else:
            mbarrier.arrive(shared.q_empty.index(q), count=1)
            t += 1
        j += 1
        q_next = (t % setting.sets) * setting.groups + c
        met = end - skip - 1
        first = n - end
        n = n_next
        end = end_next
        skip, whole, edge = own(c, setting, work, row0_next, n, end)
        floor, limit = limits(c, setting, work, row0_next, keys_next)
        i_v = i - 1
        if setting.causal:
            i = pass_over(c, setting, shared, i, skip)
        mbarrier.wait(shared.q_full.index(q_next), (t // setting.sets) & 1)
        key = (n - 1 - skip) * setting.bc
        factor, k_at, v_at = scales_of(c, setting, work, row0_next, b_next, h_next, scale)
        m = state.m
        row_sum = state.row_sum
        total = state.total
        v_scale = state.v_scale
        visit = Visit(n, skip, floor, limit, factor, k_at, v_at)
        p, alpha, _, acc, m_next, row_sum_next, v_next = step(
            c, setting, shared, query(setting, shared, q_next), i, i_v, met,
            state, m_0, row_sum if setting.defers else row_sum_0, visit, key, setting.masked,
        )  # fmt: skip
        i += 1
        p = carried(setting, p)
        if setting.defers:
            row_sum = row_sum_next
            row_sum_next = row_sum_0
        if setting.promotion:
            acc = total + acc
            total = gl.zeros([ROWS, setting.dim], gl.float32, setting.o)
        if setting.parts:
            keep(c, setting, work, row0, b, h, first, acc, m, row_sum)
        elif setting.joins:
            if first > 0:
                acc, m, row_sum = join(c, setting, shared, acc, m, row_sum, m_before, sum_before)
            if n > end:
                m_before = m
                sum_before = row_sum
                tma.store_wait(0)
                thread_barrier()  # threads hold other elements of O than the buffer of the output that lies there
                shared.o.index(c).store(acc)
            else:
                thread_barrier()
                finish(c, setting, shared, work, d_o, lse, row0, b, h, acc, m, row_sum, v_scale)
        else:
            finish(c, setting, shared, work, d_o, lse, row0, b, h, acc, m, row_sum, v_scale)
        v_scale = v_next
        if setting.scaled and not setting.v_keys:
            v_scale = gl.load(v_at)
        m = m_next
        row_sum = row_sum_next
        row0 = row0_next
        b = b_next
        h = h_next
        row0_next, b_next, h_next, n_next, keys_next, end_next = tile(setting, work, j + 1)
        acc = gl.zeros([ROWS, setting.dim], gl.float32, setting.o)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "shift", "span", "splits"])
def attention(
    d_q, d_k, d_v, d_o, lse, tiles, scales, states, sums, scale, heads, group, queries, shift, span, splits, CODE: gl.constexpr
):  # fmt: skip
    """One program: a loading warp group and `CODE.groups` computing ones, over the program's list of tiles.

    d_q, d_k, d_v and d_o describe `[batch, heads, tokens, dim]` to the copy engine; lse is `[batch, heads, queries]`, tiles
    `[round, program, 6]`, scales, states and sums as in `Work`, or None.
    """
    # A group skips at most one block of a tile (see `own`): a second would wait for a buffer of V that the group itself holds.
    gl.static_assert((CODE.groups - 1) * ROWS <= CODE.bc)
    GROUPS: gl.constexpr = CODE.groups
    STAGES: gl.constexpr = CODE.stages
    REGISTERS: gl.constexpr = CODE.registers
    setting = Setting(CODE)
    if not CODE.scaled:
        scales = lse  # which nothing reads, as the next two
    if not CODE.parts:
        states = lse
        sums = lse
    work = Work(tiles, scales, states, sums, splits, heads, group, queries, shift, span)
    if setting.joins:
        of_out = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, CODE.dim], setting.o_before)
    else:
        of_out = gl.allocate_shared_memory(d_o.dtype, [GROUPS] + d_o.block_shape, d_o.layout)  # noqa: RUF005
    shared = Shared(
        gl.allocate_shared_memory(CODE.dtype, [setting.sets * GROUPS, 1, 1, ROWS, CODE.dim], d_q.layout),
        gl.allocate_shared_memory(CODE.dtype, [STAGES] + d_k.block_shape, d_k.layout),  # noqa: RUF005 (Gluon unpacks no list)
        gl.allocate_shared_memory(CODE.dtype, [STAGES] + d_v.block_shape, d_v.layout),  # noqa: RUF005 (Gluon unpacks no list)
        of_out,
        barriers(setting.sets * GROUPS, 1),
        barriers(setting.sets * GROUPS, 1),
        barriers(STAGES, 1),
        barriers(STAGES, GROUPS),
        barriers(STAGES, 1),
        barriers(STAGES, GROUPS),
        barriers(1, 1),
        barriers(GROUPS, 1),
    )
    mbarrier.arrive(shared.turn.index(0), count=1)
    loading = (setting, shared, work, d_q, d_k, d_v)
    computing = (setting, shared, work, d_o, lse, scale)
    if GROUPS == 2:
        gl.warp_specialize([(load, loading), (compute, computing), (compute, computing)], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize(
            [(load, loading), (compute, computing), (compute, computing), (compute, computing)],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )
