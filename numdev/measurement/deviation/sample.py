"""The values of one tensor, and what every comparison with it needs again."""

from __future__ import annotations

import math
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.measurement.deviation.scaled import Scaled, exponent_of, shifted
from numdev.measurement.deviation.wasserstein import ascending, is_narrow


class Sample:
    """The values of a tensor in FP64, and what every comparison with it needs again: whether finite, sorted, norms, ulp."""

    def __init__(self, tensor: Float[Tensor, "*shape"]) -> None:
        self.shape = tensor.shape
        self._narrow = is_narrow(tensor)
        self.values = tensor.detach().double().reshape(-1)
        self._ulp: dict[Format, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the values and of what is computed from them at their length: the same sorted, their signs, their ulp."""
        return 4 * self.values.nbytes

    @cached_property
    def is_finite(self) -> bool:
        """Known by `largest`, which is needed anyway: a maximum of NaN and numbers is NaN."""
        return math.isfinite(self.largest)

    @cached_property
    def ordered(self) -> Tensor:
        """The values in ascending order; those that were given in FP32 or narrower are sorted in FP32, which holds them all."""
        return ascending(self.values.float() if self._narrow else self.values)

    @cached_property
    def largest(self) -> float:
        return float(self.values.abs().amax())

    @cached_property
    def exponent(self) -> int:
        """Of the power of two that `scaled` leaves out; 0 where every sum of squares is safe."""
        return exponent_of(self.largest)

    @cached_property
    def scaled(self) -> Tensor:
        """`values / 2^exponent`."""
        return shifted(self.values, -self.exponent)

    @cached_property
    def norm(self) -> Scaled:
        return Scaled(float(self.scaled.norm()), self.exponent)

    @cached_property
    def l1(self) -> Scaled:
        return Scaled(float(self.scaled.abs().sum()), self.exponent)

    @cached_property
    def sign(self) -> Tensor:
        return self.values.sign()

    def ulp(self, fmt: Format) -> Tensor:
        """The spacing of a format at each value."""
        if fmt not in self._ulp:
            self._ulp[fmt] = fmt.ulp(self.values)
        return self._ulp[fmt]

    def at(self, places: Tensor) -> Sample:
        return Sample(self.values[places].float() if self._narrow else self.values[places])
