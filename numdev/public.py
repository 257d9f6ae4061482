"""Every public name; `numdev` offers the same ones, imported when first asked for."""

from __future__ import annotations

from numdev.api import measure
from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import Format, Specials
from numdev.arithmetic.microscale import BlockScale, Microscaled
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast, Overflow, Subnormals
from numdev.attention.base import Attention, Output
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import Exponential, Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Products, Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput, NumdevError, Unsupported
from numdev.measurement.bench import Bench
from numdev.measurement.deviation import Deviation, wasserstein
from numdev.results.record import Record, Status
from numdev.results.store import Store

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
