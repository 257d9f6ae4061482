"""Rounding FP32 registers to a format given at compile time: `numdev.arithmetic.rounding.Cast` inside a kernel, bit for bit.

A cast becomes a tuple of compile-time numbers, (kind, mantissa bits, emin, emax, max, overflow, toward zero, flush, once).
Formats with the exponents of FP32 are rounded on their bits: nearest-even adds half a unit, less one bit where the last kept
bit is even, and cuts; toward zero only cuts. Narrower exponents are rounded by the adder, with the constant
`1.5 * 2^(E + 23 - m)` as in `numdev.arithmetic.bits.round_magic`; toward zero then steps back where that went away from zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.arithmetic.formats import FP32, Specials
from numdev.arithmetic.rounding import Cast, Overflow, Rounding, Subnormals
from numdev.attention.kernels.runtime import interpreting
from numdev.errors import Unsupported

IDENTITY, NATIVE_BF16, NATIVE_FP16, BITS, ADDER = 0, 1, 2, 3, 4
TO_INFINITY, TO_NAN, TO_MAX = 0, 1, 2

# A GPU's FMA rounds once and gives the rest of a product in FP32; the interpreter's rounds twice, so that FP64 serves there.
FUSED = tl.constexpr(not interpreting())

Spec = tuple[int, int, int, int, float, int, int, int, int]


def spec(cast: Cast, field: str, once: bool = False) -> Spec:
    """A cast as compile-time numbers; `once` where the operations before it could round twice (`numdev.arithmetic.elementary`).

    Raises:
        Unsupported: naming `field`, for what a kernel cannot do in FP32 registers.
    """
    to = cast.to
    if cast.rounding not in (Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO):
        raise Unsupported(field, f"kernels round nearest_even or toward_zero, not {cast.rounding.value}")
    if not FP32.covers(to) or to.is_integer:
        raise Unsupported(field, f"kernels compute in FP32, which does not stand for {to.name}; use attention=tiled")
    zero = int(cast.rounding is Rounding.TOWARD_ZERO)
    flush = int(cast.subnormals is Subnormals.FLUSHED)
    plain = not zero and not flush and cast.overflow is Overflow.INFINITY
    if to == FP32:
        if not plain:
            raise Unsupported(field, f"FP32 registers are rounded as the hardware does, not as {cast}")
        return IDENTITY, 23, to.emin, to.emax, to.max, TO_INFINITY, 0, 0, 0
    overflow = TO_MAX if cast.overflow is Overflow.SATURATE else TO_INFINITY if to.has_infinity else TO_NAN
    if to.emin == FP32.emin and to.specials is not Specials.IEEE:
        raise Unsupported(field, f"{to.name} has numbers beyond FP32's exponents")
    kind = BITS if to.emin == FP32.emin else ADDER
    if plain and not interpreting() and to.name in ("bf16", "fp16"):
        kind = NATIVE_BF16 if to.name == "bf16" else NATIVE_FP16
    if kind == ADDER and to.mantissa_bits > 21:
        raise Unsupported(field, f"{to.name} leaves no bits of FP32 to round with")
    return kind, to.mantissa_bits, to.emin, to.emax, to.max, overflow, zero, flush, int(once)


@triton.jit
def round_bits(x, M: tl.constexpr, TOWARD_ZERO: tl.constexpr):
    """To `m` mantissa bits and the exponents of FP32; what overflows carries into infinity."""
    bits = x.to(tl.int32, bitcast=True)
    shift: tl.constexpr = 23 - M
    if not TOWARD_ZERO:
        bits = bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)
    bits = bits & (-1 << shift)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def round_adder(x, M: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, TOWARD_ZERO: tl.constexpr):
    """To `m` mantissa bits, the quantum of `emin` below it; beyond `emax` still a number of FP32."""
    magnitude = tl.abs(x)
    exponent = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, (EMIN + 127) << 23), (EMAX + 1 + 127) << 23)
    binade = exponent.to(tl.float32, bitcast=True)
    magic = binade * (1.5 * 2.0 ** (23 - M))
    rounded = (magnitude + magic) - magic
    if TOWARD_ZERO:
        rounded = tl.where(rounded > magnitude, rounded - binade * 2.0**-M, rounded)
    return rounded


@triton.jit
def limit(magnitude, x, MAX: tl.constexpr, OVERFLOW: tl.constexpr, TOWARD_ZERO: tl.constexpr):
    """Treat magnitudes beyond the largest number; x is what they were rounded from."""
    infinite = tl.abs(x) == float("inf")
    if OVERFLOW == 2:
        return tl.where(magnitude > MAX, MAX, magnitude)
    if OVERFLOW == 1:
        beyond = float("nan")
    else:
        beyond = float("inf")
    if TOWARD_ZERO:
        return tl.where(infinite, beyond, tl.where(magnitude > MAX, MAX, magnitude))
    return tl.where(magnitude > MAX, beyond, magnitude)


@triton.jit
def cast(x, SPEC: tl.constexpr):
    """`x`, FP32, rounded; SPEC is what `spec` returned."""
    # Named one by one: an item of a tuple is a constant of the compiler only when it is bound to a name as one.
    KIND: tl.constexpr = SPEC[0]
    M: tl.constexpr = SPEC[1]
    EMIN: tl.constexpr = SPEC[2]
    EMAX: tl.constexpr = SPEC[3]
    MAX: tl.constexpr = SPEC[4]
    OVERFLOW: tl.constexpr = SPEC[5]
    TOWARD_ZERO: tl.constexpr = SPEC[6]
    FLUSH: tl.constexpr = SPEC[7]
    if KIND == 1:
        x = x.to(tl.bfloat16).to(tl.float32)
    if KIND == 2:
        x = x.to(tl.float16).to(tl.float32)
    if KIND >= 3:
        if KIND == 3:
            magnitude = tl.abs(round_bits(x, M, TOWARD_ZERO))
        else:
            magnitude = round_adder(x, M, EMIN, EMAX, TOWARD_ZERO)
        magnitude = limit(magnitude, x, MAX, OVERFLOW, TOWARD_ZERO)
        if FLUSH:
            magnitude = tl.where(magnitude < 2.0**EMIN, 0.0, magnitude)
        sign = x.to(tl.int32, bitcast=True) & -2147483648
        x = tl.where(x == x, (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def to_odd(s, rest):
    """`s`, or its neighbour on the side of `rest` where `s` is inexact and even: rounding it again rounds `s + rest`.

    Bits of a number are those of its magnitude behind a sign, so that one step toward zero, where `rest` has the other sign, then
    an odd last bit is that neighbour. Infinity becomes the largest number, since rounding to odd never overflows. A `rest` of NaN
    or 0 moves nothing.
    """
    bits = s.to(tl.int32, bitcast=True)
    opposite = (bits ^ rest.to(tl.float32).to(tl.int32, bitcast=True)) >> 31  # -1 where the signs differ, else 0
    odd = ((bits + opposite) | 1).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rest) > 0, odd, s)


@triton.jit
def lift(x, EMIN: tl.constexpr, M: tl.constexpr):
    """The power of two that keeps what an FMA leaves of `x` from underflow, 1 where no breakpoint of the format is that small."""
    factor = 1.0
    if EMIN - M < -100:
        factor = tl.where(tl.abs(x) < 2.0**-100, 281474976710656.0, 1.0)  # 2^48: a rest is a multiple of 2^-196
    return factor


@triton.jit
def sign(x):
    """-1, 0 or 1, and 0 for NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def add(x, y, SPEC: tl.constexpr):
    """`cast(x + y)`, rounded once (TwoSum, Knuth 1997, section 4.2.2, Theorem B); x and y have one shape."""
    TOWARD_ZERO: tl.constexpr = SPEC[6]
    ONCE: tl.constexpr = SPEC[8]
    s = x + y
    if ONCE:
        part = s - x
        rest = (x - (s - part)) + (y - part)
        if TOWARD_ZERO:  # a sum of numbers that became infinity has a rest of NaN; nearest rounds it to infinity anyhow
            ended = (tl.abs(s) == float("inf")) & (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
            rest = tl.where(ended, -s, rest)
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def times(x, y, SPEC: tl.constexpr):
    """`cast(x y)`, rounded once, with the rest of TwoProductFMA (Ogita, Rump & Oishi 2005); x and y have one shape."""
    M: tl.constexpr = SPEC[1]
    EMIN: tl.constexpr = SPEC[2]
    ONCE: tl.constexpr = SPEC[8]
    s = x * y
    if ONCE:
        if FUSED:
            factor = lift(s, EMIN, M)
            rest = tl.fma(x * factor, y, -(s * factor))
        else:
            rest = sign(x.to(tl.float64) * y.to(tl.float64) - s.to(tl.float64))
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def over(x, y, SPEC: tl.constexpr):
    """`cast(x / y)`, rounded once, y not 0: the remainder `x - s y` is exact.

    No quotient of FP32 numbers is near enough to one for FP64 to land on it.
    """
    M: tl.constexpr = SPEC[1]
    EMIN: tl.constexpr = SPEC[2]
    ONCE: tl.constexpr = SPEC[8]
    s = tl.math.div_rn(x, y)
    if ONCE:
        if FUSED:
            factor = lift(x, EMIN, M)
            remainder = tl.fma(-(s * factor), y, x * factor)
            rest = tl.where(y < 0, -remainder, remainder)
        else:
            rest = sign(x.to(tl.float64) / y.to(tl.float64) - s.to(tl.float64))
        s = to_odd(s, rest)
    return cast(s, SPEC)


@triton.jit
def decay(x, m, BINARY: tl.constexpr, SPEC: tl.constexpr):
    """`exp(x - m)`, 0 where x is minus infinity, which stands for no number and is never rounded; x and m have one shape."""
    OVERFLOW: tl.constexpr = SPEC[5]
    difference = add(x, -m, SPEC)
    if BINARY:
        found = cast(tl.math.exp2(difference), SPEC)
    else:
        found = cast(tl.exp(difference), SPEC)
    if OVERFLOW != 0:  # elsewhere minus infinity stays what it is, and its exponential is 0
        found = tl.where(x == float("-inf"), 0.0, found)
    return found
