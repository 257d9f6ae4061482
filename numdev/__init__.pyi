"""Every public name, and where it is defined; `numdev` imports a name when it is first asked for."""

from .api import Bench as Bench
from .api import measure as measure
from .arithmetic.bits import Rounding as Rounding
from .arithmetic.dot import Dot as Dot
from .arithmetic.formats import Format as Format
from .arithmetic.formats import Specials as Specials
from .arithmetic.microscale import BlockScale as BlockScale
from .arithmetic.microscale import Microscaled as Microscaled
from .arithmetic.quantise import Quantised as Quantised
from .arithmetic.quantise import Scale as Scale
from .arithmetic.quantise import Smoothing as Smoothing
from .arithmetic.rounding import Cast as Cast
from .arithmetic.rounding import Overflow as Overflow
from .arithmetic.rounding import Subnormals as Subnormals
from .attention.base import Attention as Attention
from .attention.base import Output as Output
from .attention.captured import Captured as Captured
from .attention.distributions import Distribution as Distribution
from .attention.distributions import Kind as Kind
from .attention.exact import Exact as Exact
from .attention.instrumented import Instrumented as Instrumented
from .attention.mask import Mask as Mask
from .attention.naive import Naive as Naive
from .attention.precision import Precision as Precision
from .attention.problem import Problem as Problem
from .attention.problem import Shape as Shape
from .attention.softmax import Exponential as Exponential
from .attention.softmax import Maximum as Maximum
from .attention.softmax import Normalise as Normalise
from .attention.softmax import OnlineSoftmax as OnlineSoftmax
from .attention.softmax import ScaleOn as ScaleOn
from .attention.softmax import SumOver as SumOver
from .attention.tiled import Tiled as Tiled
from .attention.tiling import Order as Order
from .attention.tiling import Tiling as Tiling
from .attention.triton import Kernel as Kernel
from .attention.triton import Products as Products
from .attention.triton import Triton as Triton
from .attention.vendor.custom import Custom as Custom
from .attention.vendor.flex import Flex as Flex
from .attention.vendor.sdpa import Backend as Backend
from .attention.vendor.sdpa import Sdpa as Sdpa
from .attention.vendor.vanilla import Vanilla as Vanilla
from .errors import BadInput as BadInput
from .errors import NumdevError as NumdevError
from .errors import Unsupported as Unsupported
from .measurement.deviation.metrics import Deviation as Deviation
from .measurement.deviation.wasserstein import wasserstein as wasserstein
from .results.record import Record as Record
from .results.record import Status as Status
from .results.store import Store as Store

__all__: list[str]
__version__: str
