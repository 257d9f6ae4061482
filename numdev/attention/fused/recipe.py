"""A run as the arrays that compiled code takes: its casts and operations, its settings, and tables of its exponentials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from numdev.arithmetic.bits import Rounding, magic_is_exact
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.rounding import Cast, Subnormals
from numdev.attention.counters import can_saturate
from numdev.attention.fused import layout as at
from numdev.attention.operations import operation
from numdev.attention.precision import Precision
from numdev.attention.reach import maximum_lags
from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, SumOver

_MODES = {
    Rounding.NEAREST_EVEN: at.EVEN,
    Rounding.NEAREST_AWAY: at.AWAY,
    Rounding.TOWARD_ZERO: at.ZERO,
    Rounding.UP: at.UP,
    Rounding.DOWN: at.DOWN,
    Rounding.ODD: at.ODD,
}
_NAMED = {
    at.SCALE_S: "scale scores",
    at.SHIFT_TIES: "shift ties",
    at.SHIFT_S: "shift scores",
    at.FALL: "fall of the maximum",
    at.WEIGH_SUM: "weigh sum",
    at.ADD_SUMS: "add sums",
    at.UNSCALE_SUM: "unscale sum",
    at.SCALE_P: "scale probabilities",
    at.UNSCALE_V: "unscale values",
    at.RESCALE_O: "rescale output",
    at.WEIGH_O: "weigh output",
    at.WEIGH_V: "weigh values",
    at.ACCUMULATE: "accumulate",
    at.ACCUMULATE_WEIGHED: "accumulate weighed",
    at.NORMALISE: "normalise",
}


def encode(cast: Cast, *, careful: bool = False) -> np.ndarray:
    """A cast as a row of int32, from its format and from what it makes of numbers beyond its largest.

    `careful` where the operation before it must be corrected, so that both round once.
    """
    row = np.zeros(at.FIELDS, np.int32)
    row[at.CAREFUL] = careful
    to = cast.to
    if cast.is_identity_on(torch.float32):
        return row
    row[at.KIND] = _kind(cast)
    row[at.SHIFT], row[at.MODE] = FP32.mantissa_bits - to.mantissa_bits, _MODES[cast.rounding]
    row[at.LOW], row[at.HIGH] = (_bits(2.0 ** min(exponent, FP32.emax)) for exponent in (to.emin, to.emax + 1))
    row[at.TOP] = _bits(to.max)
    beyond = cast(torch.tensor([FP32.max, -FP32.max, float("inf")])).abs()
    row[at.ABOVE], row[at.BELOW], row[at.INFINITE] = (_bits(x) for x in beyond.tolist())
    row[at.FLUSH] = _bits(to.min_normal) if cast.subnormals is Subnormals.FLUSHED else 0
    return row


def _kind(cast: Cast) -> int:
    """The fastest way that rounds as the cast does."""
    to = cast.to
    if cast.rounding is not Rounding.NEAREST_EVEN or cast.subnormals is Subnormals.FLUSHED:
        return at.SCALED
    if to.emin == FP32.emin:
        return at.BY_CARRY if cast.keeps_minus_infinity else at.ON_BITS
    return at.BY_ADDER if magic_is_exact(to, FP32) else at.SCALED


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


@dataclass(frozen=True)
class Table:
    """A function of every number of a format, by the bits of the number in FP32 without those that are always 0.

    The first half is of positive arguments, from 0 to infinity, the second of negative ones; the last is that of NaN.

    Attributes:
        values: of the function, already rounded.
        shift: bits that are always 0.
        base: what the place of 0 is behind.
    """

    values: np.ndarray
    shift: int = 0
    base: int = 0

    @staticmethod
    def of(cast: Cast, function: Callable[[Tensor], Tensor]) -> Table:
        """`cast(function(x))` of every number `x` of the format of the cast, as tensor operations give it."""
        to = cast.to
        shift = FP32.mantissa_bits - (to.precision - 1)
        base = (_bits(to.min_subnormal) >> shift) - 1
        last = (_bits(2.0 ** (to.emax + 1) if to.emax < FP32.emax else float("inf")) >> shift) - base
        magnitudes = ((torch.arange(last + 1, dtype=torch.int32) + base) << shift).view(torch.float32)
        magnitudes[0], magnitudes[-1] = 0.0, float("inf")
        x = torch.cat([magnitudes, -magnitudes, torch.tensor([float("nan")])])
        return Table(cast.apply_(function(x)).numpy(), shift, base)


NO_TABLE = Table(np.empty(0, np.float32))


@dataclass(frozen=True)
class Recipe:
    """What the compiled passes of a run read.

    Attributes:
        operations: a cast for each of `layout`'s operations.
        settings: `layout`'s settings.
        exponential: of P, and `rescale`, of alpha and beta: tables, empty where torch computes the exponential.
    """

    operations: np.ndarray
    settings: np.ndarray
    exponential: Table
    rescale: Table


@lru_cache(maxsize=16)
def recipe(precision: Precision, softmax: OnlineSoftmax, factor: float, *, count: bool) -> Recipe:
    """The arrays of a run in an FP32 carrier whose P is rounded number by number."""
    exponential, rescale = NO_TABLE, NO_TABLE
    if precision.exponential.to != FP32 and softmax.exp.share in (0, 1):
        exponential = Table.of(precision.exponential, softmax.exp)
    if precision.rescale.to != FP32:
        rescale = Table.of(precision.rescale, softmax.exp.exact)
    settings = _settings(precision, softmax, factor, count=count)
    settings[at.E_SHIFT], settings[at.E_BASE] = exponential.shift, exponential.base
    settings[at.A_SHIFT], settings[at.A_BASE] = rescale.shift, rescale.base
    return Recipe(_operations(precision, softmax, factor, has_table=exponential is not NO_TABLE), settings, exponential, rescale)


def _operations(precision: Precision, softmax: OnlineSoftmax, factor: float, *, has_table: bool) -> np.ndarray:
    rows = np.zeros((at.OPERATIONS, at.FIELDS), np.int32)
    scale = softmax.p_scale
    constants = {at.SCALE_S: factor, at.SHIFT_TIES: softmax.tie_shift or 1.0}
    constants |= dict.fromkeys((at.SCALE_P, at.UNSCALE_SUM, at.UNSCALE_V), scale)
    for place, name in _NAMED.items():
        found = operation(precision, torch.float32, name, constants.get(place, 1.0))
        rows[place] = encode(found.cast, careful=not found.is_harmless)
    assert isinstance(precision.probabilities, Cast), "a microscaled P is left to tensor operations"
    if scale == 1.0:
        same = precision.probabilities == precision.exponential
        rows[at.SCALE_P] = 0 if same else encode(precision.probabilities)
    scores, row_sum, values = precision.scores, precision.row_sum, precision.values
    rows[at.ROUND_S], rows[at.ROUND_V] = of_product(scores), of_product(values)
    rows[at.ROUND_E] = 0 if has_table else encode(precision.exponential)
    rows[at.ROUND_A], rows[at.ROUND_L] = encode(precision.rescale), encode(row_sum.accumulate)
    piece = RoundedOnce(Operation.ADD, row_sum.accumulate, FP32, row_sum.accumulate.to, torch.float32)
    rows[at.ADD_PIECE] = encode(row_sum.accumulate, careful=not piece.is_harmless)
    return rows


def of_product(dot: Dot) -> np.ndarray:
    """The cast of a product; none where it is rounded within a tile, and so comes rounded."""
    return encode(dot.accumulate) if dot.every is None else np.zeros(at.FIELDS, np.int32)


def _settings(precision: Precision, softmax: OnlineSoftmax, factor: float, *, count: bool) -> np.ndarray:
    found = np.zeros(at.SETTINGS)
    found[at.FACTOR], found[at.THRESHOLD], found[at.TIE_SHIFT] = factor, softmax.threshold, softmax.tie_shift or 0.0
    found[at.P_SCALE], found[at.LIMIT] = softmax.p_scale, precision.probabilities.largest
    found[at.LOCAL] = softmax.maximum is Maximum.LOCAL
    found[at.EACH] = softmax.normalise is Normalise.EACH
    found[at.SUM_ROUNDED] = softmax.sum_over is SumOver.PROBABILITIES
    found[at.KEEPS] = precision.exponential.keeps_minus_infinity
    found[at.LAGS], found[at.SATURATES] = maximum_lags(softmax), can_saturate(precision, softmax)
    found[at.COUNT], found[at.EVERY] = count, precision.row_sum.every or 0
    return found
