"""A backward run as the arrays that compiled code takes: casts, operations, settings, and a table of its exponential."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from numdev.arithmetic.formats import FP32
from numdev.attention.fused import backward_layout as at
from numdev.attention.fused import layout
from numdev.attention.fused.recipe import NO_TABLE, Table, encode, of_product
from numdev.attention.operations import BACKWARD_OPERATIONS, operation
from numdev.attention.precision import BackwardPrecision
from numdev.attention.softmax import Exponential

_NAMED = {
    at.SCALE_S: "scale scores",
    at.SHIFT_S: "shift scores",
    at.SHIFT_DP: "shift dp",
    at.WEIGH_DIFFERENCE: "weigh difference",
    at.ADD_DQ: "add dq",
    at.ADD_DK: "add dk",
    at.ADD_DV: "add dv",
}


@dataclass(frozen=True)
class BackwardRecipe:
    """What the compiled passes of a backward run read.

    Attributes:
        operations: a cast for each of the operations of `backward_layout`.
        settings: those of `backward_layout`.
        exponential: of P; empty where torch computes it.
    """

    operations: np.ndarray
    settings: np.ndarray
    exponential: Table


@lru_cache(maxsize=16)
def backward_recipe(precision: BackwardPrecision, exponential: Exponential, factor: float, *, count: bool) -> BackwardRecipe:
    """The arrays of a run in an FP32 carrier; `factor` is that of the scores in the units of the exponential."""
    has_table = precision.exponential.to != FP32 and exponential.share in (0, 1)
    table = Table.of(precision.exponential, exponential) if has_table else NO_TABLE
    rows = np.zeros((at.OPERATIONS, layout.FIELDS), np.int32)
    for place, name in _NAMED.items():
        constant = factor if place == at.SCALE_S else 1.0
        found = operation(precision, torch.float32, name, constant, BACKWARD_OPERATIONS)
        rows[place] = encode(found.cast, careful=not found.is_harmless)
    products = {at.ROUND_S: "scores", at.ROUND_DP: "dp", at.ROUND_DQ: "dq", at.ROUND_DK: "dk", at.ROUND_DV: "dv"}
    for place, step in products.items():
        rows[place] = of_product(getattr(precision, step))
    if not has_table:
        rows[at.ROUND_E] = encode(precision.exponential)
    if precision.probabilities != precision.exponential:
        rows[at.ROUND_P] = encode(precision.probabilities)
    if precision.ds != precision.difference:
        rows[at.ROUND_DS] = encode(precision.ds)
    settings = np.zeros(at.SETTINGS)
    settings[at.FACTOR], settings[at.COUNT], settings[at.KEEPS] = factor, count, precision.exponential.keeps_minus_infinity
    settings[at.E_SHIFT], settings[at.E_BASE] = table.shift, table.base
    return BackwardRecipe(rows, settings, table)
