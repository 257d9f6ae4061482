"""Device code that Gluon lacks: aggregates of fields, arrays of barriers, and the addition to memory by the copy engine."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate

# A barrier of the warps of one partition; triton 3.7 has renamed it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

BUILDER = "create_async_tma_reduce"  # of the operation builder, which has no function before triton 3.8; a test asks for it


@gluon.constexpr_function
def _take(self, *values):
    for name, value in zip(self.names, values, strict=True):
        setattr(self, name, value)


def aggregate(cls):
    """Make a class whose annotations are fields. Its constructor takes their values in order, unless it defines its own."""
    if "__init__" not in vars(cls):
        cls.__init__ = _take
    made = _aggregate(cls)
    made.names = tuple(cls.__annotations__)
    return made


def record(names, field_type=gl.tensor):
    """A decorator: makes a class an aggregate whose fields, all of one type, are names separated by spaces."""

    def decorated(cls):
        cls.__annotations__ = dict.fromkeys(names.split(), field_type)
        return aggregate(cls)

    return decorated


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@builtin
def add_to_global(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to one in global memory, elementwise in FP32, rounded to nearest even; subnormals are kept.

    This is `cp.reduce.async.bulk.tensor` of the PTX manual; `performed` waits for its completion.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    getattr(_semantic.builder, BUILDER)(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def performed():
    """Wait until the stores and additions that this thread gave to the copy engine are in global memory.

    `tma.store_wait` waits only until shared memory has been read.
    """
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernel_before():
    """Wait until the kernel that was launched before has ended, and see all that it wrote."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_kernel_after_start():
    """Allow the next kernel to start on free multiprocessors, once every program of this one has reached this point."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turn(at, rank):
    """Wait until the counter at `at` is `rank`, and see all that was written before it was raised."""
    seen = gl.atomic_add(at, 0, sem="acquire", scope="gpu")
    while seen != rank:
        seen = gl.atomic_add(at, 0, sem="acquire", scope="gpu")


@gluon.jit
def pass_turn_on(at):
    """Increment the counter when all that the copy engine has to write is in memory."""
    performed()
    thread_barrier()
    gl.atomic_add(at, 1, sem="release", scope="gpu")


@gluon.jit
def computing_group():
    """The number of the warp group that asks, of those behind the first one of a program."""
    asm: gl.constexpr = (
        "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; sub.u32 t, t, 1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
    )
    return gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def hidden_zero(i):
    """0 if `i >= 0`, which the compiler cannot know.

    Added to the number of a buffer or of a tile, it makes the compiler compute the addresses that follow in each iteration.
    Otherwise they stay in registers through the loop, two for each step of a product, and where these run out, in local memory.
    """
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 31;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _scale(n):
    """Assembly for the n numbers of a thread, two of one row and two of another in turn, and what its operands are.

    The results begin as the numbers; the factors follow.
    """
    products = " ".join(f"mul.rn.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    asm = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;"
        f" vote.sync.any.pred p, p, -1; @!p bra DONE; {products} DONE: }}"
    )
    return asm, ",".join(["=f"] * n + [f"{i}" for i in range(n)] + ["f"] * n)


@gluon.jit
def scaled(x, factor, SKIPS: gl.constexpr):
    """`x factor`, x `[64, n]` in the layout of a product, factor `[64, 1]`.

    With SKIPS a warp, which has 16 of the rows, skips the multiplications if its factors are all 1; the bits are the same.
    """
    if SKIPS:
        asm: gl.constexpr = _scale(x.shape[1] // 2)
        operands = [x, factor + gl.zeros_like(x)]
        x = gl.inline_asm_elementwise(asm[0], asm[1], operands, dtype=gl.float32, is_pure=False, pack=x.shape[1] // 2)
    else:
        x = x * factor
    return x


@gluon.jit
def below(x, i, limit):
    """x where `i < limit`, else minus infinity: two instructions a number.

    The compiler would pack the comparisons of some blocks into words, and unpack them again.
    """
    asm: gl.constexpr = "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }"
    return gl.inline_asm_elementwise(asm, "=f,f,r,r", [x, i, limit], dtype=gl.float32, is_pure=True, pack=1)


CASTS = {  # of numbers of FP32 into a word
    "bf16": "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "fp16": "cvt.rn.f16x2.f32 $0, $2, $1;",
    "fp8e4nv": "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
}


@gluon.jit
def packed(p, dtype: gl.constexpr, cast: gl.constexpr):
    """p `[rows, n]` rounded, in words of 32 bits: `[rows, n / 2]`; of 8 bits, in the order of an operand, `[rows, n / 4]`.

    Narrow numbers that pass by themselves from one iteration to the next may be unpacked and packed again in each.
    """
    rows: gl.constexpr = p.shape[0]
    n: gl.constexpr = p.shape[1]
    if dtype == gl.float8e4nv:
        even, odd = p.reshape([rows, n // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).split()
        a, c = even.split()
        b, d = odd.split()
        words = gl.inline_asm_elementwise(cast, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)
        words = words.reshape([rows, n // 4])
    else:
        a, b = p.reshape([rows, n // 2, 2]).split()
        words = gl.inline_asm_elementwise(cast, "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)
    return words


@gluon.jit
def unpacked(words, dtype: gl.constexpr):
    """The numbers of `packed`, `[rows, n]`."""
    rows: gl.constexpr = words.shape[0]
    n: gl.constexpr = words.shape[1]
    twice = gl.join(words, words)
    if dtype == gl.float8e4nv:
        words = gl.join(twice, twice).reshape([rows, 4 * n])
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    else:
        words = twice.reshape([rows, 2 * n])
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [words], dtype=gl.int16, is_pure=True, pack=2)
    return x.to(dtype, bitcast=True)
