"""A user's own attention, measured like the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.attention.base import Output, check_shapes
from numdev.attention.honours import PRESET, Honours
from numdev.attention.vendor import IN_TORCH
from numdev.errors import BadInput
from numdev.formats import BF16, Format
from numdev.mask import Mask
from numdev.rounding import Cast

_FIELD = "attention.function"


@dataclass(frozen=True)
class Custom:
    """`function(q, k, v, mask=Mask, scale=float) -> out` or `(out, lse)`, named `package.module:function`.

    The function receives tensors of the torch dtype of `fmt`, already rounded to it, on the device of the measurement. It
    raises `numdev.Unsupported` for a mask or shape that it cannot honour.

    Attributes:
        function: where to import it from.
        fmt: the format of its inputs, and of its output's ulp.
    """

    honours: ClassVar[Honours] = Honours(PRESET | {_FIELD}, "kernel", IN_TORCH)

    function: str
    fmt: Format = BF16

    def __post_init__(self) -> None:
        if self.fmt.dtype is None:
            raise BadInput("precision", self.fmt.name, "torch has no dtype for it; use bf16, fp16, fp32 or fp64")
        self._load()

    @property
    def idle(self) -> dict[str, str]:
        return {}

    @property
    def format(self) -> Format:
        return self.fmt

    @property
    def input_key(self) -> Hashable:
        return Cast(self.fmt), torch.float32

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cast = Cast(self.fmt)
        q, k, v = (cast(t.double()).to(self.fmt.dtype) for t in (q, k, v))  # already in the format: to() is exact
        return q, k, v

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Call the function on copies, since it may write to them, and check what it returns."""
        # Of its dtype, since others of the same `input_key` carry the same numbers in FP32.
        q, k, v = (t.to(self.fmt.dtype, copy=True) for t in (q, k, v))
        return self.bare(q, k, v, mask, scale)

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """The same on the tensors themselves, of the function's dtype: the call that is timed."""
        check_shapes(q, k, v, mask)
        result = self._load()(q, k, v, mask=mask, scale=scale)
        out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        expected = (*q.shape[:-1], v.shape[-1]), tuple(q.shape[:-1])
        if _shape(out) != expected[0] or (lse is not None and _shape(lse) != expected[1]):
            found = _shape(out) if lse is None else f"{_shape(out)} and {_shape(lse)}"
            mend = f"it returned {found}; it must return out of shape {expected[0]}, or that and lse of shape {expected[1]}"
            raise BadInput(_FIELD, self.function, mend)
        return Output(out, lse)

    def _load(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        module, colon, name = self.function.partition(":")
        if not colon or not module or module.startswith("."):
            raise BadInput(_FIELD, self.function, "write it as package.module:function")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise BadInput(_FIELD, self.function, f"its module cannot be imported ({error})") from None
        if not callable(found):
            raise BadInput(_FIELD, self.function, f"module {module} has no function {name}")
        return found  # type: ignore[no-any-return]


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
