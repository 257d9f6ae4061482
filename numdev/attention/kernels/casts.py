"""Rounding FP32 registers to a format given at compile time: `numdev.arithmetic.rounding.Cast` inside a kernel, bit for bit.

A cast becomes a `Spec`, a named tuple of compile-time numbers.
Formats with the exponent range of FP32 are rounded on their bits: nearest-even adds half a unit, less one bit where the last kept
bit is even, and truncates; toward zero only truncates. Formats with a narrower exponent range are rounded by an addition of the
constant `1.5 * 2^(E + 23 - m)`, as in `numdev.arithmetic.rounding.round_magic`; toward zero then steps back where that
rounded away from zero.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from numdev.arithmetic.formats import FP32, Specials
from numdev.arithmetic.rounding import Cast, Overflow, Rounding, Subnormals
from numdev.attention.accepts import BINARY, Accepts
from numdev.attention.kernels.launch import interpreting
from numdev.errors import Unsupported

INSTEAD = "the kernel", "the tiled emulation"
CAST = Accepts(
    Cast,
    to=BINARY,
    rounding=(Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO),
    overflow=(Overflow.INFINITY, Overflow.SATURATE),
    subnormals=(Subnormals.KEPT, Subnormals.FLUSHED),
)
"""The casts of kernels."""

# How a cast is done: not at all, by one instruction, on the bits, or by an addition.
IDENTITY, NATIVE_BF16, NATIVE_FP16, BITS, ADDER = (tl.constexpr(kind) for kind in range(5))
# What becomes of a number beyond the largest.
TO_INFINITY, TO_NAN, TO_MAX = (tl.constexpr(end) for end in range(3))
# The types in which a tensor core multiplies: the narrowest that holds both operands, so that only FP32's products are not exact.
FP16_OPERANDS, BF16_OPERANDS, TF32_OPERANDS, FP32_OPERANDS = (tl.constexpr(kind) for kind in range(4))

# A GPU's FMA rounds once and gives the remainder of a product in FP32; the interpreter's rounds twice and needs FP64 instead.
FUSED = tl.constexpr(not interpreting())


class Spec(NamedTuple):
    """A step as compile-time numbers: its cast, and of a `Dot` how its products are formed and added.

    Attributes:
        kind: one of IDENTITY, NATIVE_BF16, NATIVE_FP16, BITS and ADDER.
        mantissa_bits, emin, emax, max: of the format.
        overflow: one of TO_INFINITY, TO_NAN and TO_MAX.
        toward_zero: whether it rounds toward zero; otherwise to nearest even.
        flush: whether subnormal results become 0.
        once: whether the operation before it must be corrected, so that operation and cast together round once.
        every: products between roundings of the running sum of a `Dot`; 0 for one rounding of the whole sum.
        product: one of FP16_OPERANDS, BF16_OPERANDS, TF32_OPERANDS and FP32_OPERANDS.
    """

    kind: int
    mantissa_bits: int
    emin: int
    emax: int
    max: float
    overflow: int
    toward_zero: bool
    flush: bool
    once: bool
    every: int = 0
    product: int = FP32_OPERANDS.value


def spec(cast: Cast, field: str, once: bool = False) -> Spec:
    """A cast as compile-time numbers; `once` where the operations before it could round twice (`numdev.arithmetic.elementary`).

    Raises:
        Unsupported: naming `field`, if a kernel cannot do this cast in FP32 registers.
    """
    to = cast.to
    CAST.check(cast, *INSTEAD, field)
    if not FP32.covers(to) or to.is_integer:
        raise Unsupported(field, f"kernels compute in FP32, which cannot emulate {to.name}; use the tiled emulation")
    toward_zero, flush = cast.rounding is Rounding.TOWARD_ZERO, cast.subnormals is Subnormals.FLUSHED
    plain = not toward_zero and not flush and cast.overflow is Overflow.INFINITY
    if to == FP32:
        if not plain:
            raise Unsupported(field, f"the hardware rounds FP32 results, and not as {cast}; use the tiled emulation")
        return Spec(IDENTITY.value, 23, to.emin, to.emax, to.max, TO_INFINITY.value, False, False, False)
    overflow = TO_MAX if cast.overflow is Overflow.SATURATE else TO_INFINITY if to.has_infinity else TO_NAN
    if to.emin == FP32.emin and to.specials is not Specials.IEEE:
        raise Unsupported(field, f"{to.name} has numbers beyond the exponent range of FP32; use the tiled emulation")
    kind = BITS if to.emin == FP32.emin else ADDER
    if plain and not interpreting() and to.name in ("bf16", "fp16"):
        kind = NATIVE_BF16 if to.name == "bf16" else NATIVE_FP16
    if kind == ADDER and to.mantissa_bits > 21:
        raise Unsupported(field, f"{to.name} has too many mantissa bits to be rounded in FP32; use the tiled emulation")
    return Spec(kind.value, to.mantissa_bits, to.emin, to.emax, to.max, overflow.value, toward_zero, flush, once)


@triton.jit
def round_bits(x, SPEC: tl.constexpr):
    """Round to `m` mantissa bits with the exponent range of FP32; the carry of an overflow gives infinity."""
    bits = x.to(tl.int32, bitcast=True)
    shift: tl.constexpr = 23 - SPEC.mantissa_bits
    if not SPEC.toward_zero:
        bits = bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)
    bits = bits & (-1 << shift)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def round_adder(x, SPEC: tl.constexpr):
    """Round to `m` mantissa bits, below `emin` to multiples of its quantum; a result beyond `emax` stays a number of FP32."""
    magnitude = tl.abs(x)
    exponent = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, (SPEC.emin + 127) << 23), (SPEC.emax + 1 + 127) << 23)
    binade = exponent.to(tl.float32, bitcast=True)
    magic = binade * (1.5 * 2.0 ** (23 - SPEC.mantissa_bits))
    rounded = (magnitude + magic) - magic
    if SPEC.toward_zero:
        rounded = tl.where(rounded > magnitude, rounded - binade * 2.0**-SPEC.mantissa_bits, rounded)
    return rounded


@triton.jit
def limit(magnitude, x, SPEC: tl.constexpr):
    """Handle magnitudes beyond the largest number; x is what they were rounded from."""
    infinite = tl.abs(x) == float("inf")
    if SPEC.overflow == TO_MAX:
        return tl.where(magnitude > SPEC.max, SPEC.max, magnitude)
    if SPEC.overflow == TO_NAN:
        beyond = float("nan")
    else:
        beyond = float("inf")
    if SPEC.toward_zero:
        return tl.where(infinite, beyond, tl.where(magnitude > SPEC.max, SPEC.max, magnitude))
    return tl.where(magnitude > SPEC.max, beyond, magnitude)


@triton.jit
def cast(x, SPEC: tl.constexpr):
    """`x`, FP32 of any shape, rounded; SPEC is what `spec` returned."""
    if SPEC.kind == NATIVE_BF16:
        x = x.to(tl.bfloat16).to(tl.float32)
    if SPEC.kind == NATIVE_FP16:
        x = x.to(tl.float16).to(tl.float32)
    if SPEC.kind >= BITS:
        if SPEC.kind == BITS:
            magnitude = tl.abs(round_bits(x, SPEC))
        else:
            magnitude = round_adder(x, SPEC)
        magnitude = limit(magnitude, x, SPEC)
        if SPEC.flush:
            magnitude = tl.where(magnitude < 2.0**SPEC.emin, 0.0, magnitude)
        sign = x.to(tl.int32, bitcast=True) & -2147483648
        x = tl.where(x == x, (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def to_odd(s, rest):
    """Round to odd: `s`, or where `s` is inexact and even its neighbour towards `rest`. A cast of that rounds `s + rest` once.

    The bits of a number are a sign and its magnitude: a step toward zero, if `rest` has the opposite sign, and then setting the
    last bit gives that neighbour. Infinity becomes the largest number, since rounding to odd never overflows. A `rest` of NaN or
    0 changes nothing.
    """
    bits = s.to(tl.int32, bitcast=True)
    opposite = (bits ^ rest.to(tl.float32).to(tl.int32, bitcast=True)) >> 31  # -1 where the signs differ, else 0
    odd = ((bits + opposite) | 1).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rest) > 0, odd, s)


@triton.jit
def lift(x, SPEC: tl.constexpr):
    """The power of two by which `x` is scaled so that the remainder of an FMA does not underflow; 1 where that cannot matter."""
    factor = 1.0
    if SPEC.emin - SPEC.mantissa_bits < -100:
        factor = tl.where(tl.abs(x) < 2.0**-100, 281474976710656.0, 1.0)  # 2^48: a rest is a multiple of 2^-196
    return factor


@triton.jit
def sign(x):
    """-1, 0 or 1, and 0 for NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def add(x, y, SPEC: tl.constexpr):
    """`cast(x + y)`, rounded once (TwoSum, Knuth 1997, section 4.2.2, Theorem B); x and y have one shape."""
    s = x + y
    if SPEC.once:
        part = s - x
        rest = (x - (s - part)) + (y - part)
        if SPEC.toward_zero:  # a sum that overflowed has a remainder of NaN; nearest gives infinity in any case
            ended = (tl.abs(s) == float("inf")) & (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
            rest = tl.where(ended, -s, rest)
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def times(x, y, SPEC: tl.constexpr):
    """`cast(x y)`, rounded once, with the rest of TwoProductFMA (Ogita, Rump & Oishi 2005); x and y have one shape."""
    s = x * y
    if SPEC.once:
        if FUSED:
            factor = lift(s, SPEC)
            rest = tl.fma(x * factor, y, -(s * factor))
        else:
            rest = sign(x.to(tl.float64) * y.to(tl.float64) - s.to(tl.float64))
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def over(x, y, SPEC: tl.constexpr):
    """`cast(x / y)`, rounded once, y not 0: the remainder `x - s y` is exact.

    No inexact quotient of FP32 numbers is so near to an FP32 number that FP64 would round it to that number.
    """
    s = tl.math.div_rn(x, y)
    if SPEC.once:
        if FUSED:
            factor = lift(x, SPEC)
            remainder = tl.fma(-(s * factor), y, x * factor)
            rest = tl.where(y < 0, -remainder, remainder)
        else:
            rest = sign(x.to(tl.float64) / y.to(tl.float64) - s.to(tl.float64))
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def decay(x, m, BINARY: tl.constexpr, SPEC: tl.constexpr):
    """`exp(x - m)`, 0 where x is minus infinity, which marks a masked score and is never rounded; x and m have one shape."""
    difference = add(x, -m, SPEC)
    if BINARY:
        value = cast(tl.math.exp2(difference), SPEC)
    else:
        value = cast(tl.exp(difference), SPEC)
    if SPEC.overflow != TO_INFINITY:  # elsewhere minus infinity stays what it is, and its exponential is 0
        value = tl.where(x == float("-inf"), 0.0, value)
    return value
