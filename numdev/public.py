"""Every public name; `numdev` offers the same ones, imported when first asked for."""

from __future__ import annotations

from numdev.api import measure
from numdev.attention.base import Attention, Output
from numdev.attention.custom import Custom
from numdev.attention.exact import Exact
from numdev.attention.flex import Flex
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.sdpa import Backend, Sdpa
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Kernel, Products, Triton
from numdev.attention.vanilla import Vanilla
from numdev.bits import Rounding
from numdev.captured import Captured
from numdev.deviation import Deviation, wasserstein
from numdev.distributions import Distribution, Kind
from numdev.errors import BadInput, NumdevError, Unsupported
from numdev.formats import Format, Specials
from numdev.mask import Mask
from numdev.measure import Bench
from numdev.microscale import BlockScale, Microscaled
from numdev.precision import Dot, Precision
from numdev.problem import Problem, Shape
from numdev.quantise import Quantised, Scale, Smoothing
from numdev.record import Record, Status
from numdev.rounding import Cast, Overflow, Subnormals
from numdev.softmax import Exponential, Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.store import Store
from numdev.tiling import Order, Tiling

__all__ = [
    "Attention",
    "Backend",
    "BadInput",
    "Bench",
    "BlockScale",
    "Captured",
    "Cast",
    "Custom",
    "Deviation",
    "Distribution",
    "Dot",
    "Exact",
    "Exponential",
    "Flex",
    "Format",
    "Instrumented",
    "Kernel",
    "Kind",
    "Mask",
    "Maximum",
    "Microscaled",
    "Naive",
    "Normalise",
    "NumdevError",
    "OnlineSoftmax",
    "Order",
    "Output",
    "Overflow",
    "Precision",
    "Problem",
    "Products",
    "Quantised",
    "Record",
    "Rounding",
    "Scale",
    "ScaleOn",
    "Sdpa",
    "Shape",
    "Smoothing",
    "Specials",
    "Status",
    "Store",
    "Subnormals",
    "SumOver",
    "Tiled",
    "Tiling",
    "Triton",
    "Unsupported",
    "Vanilla",
    "measure",
    "wasserstein",
]
