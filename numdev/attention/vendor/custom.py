"""A user's own attention, measured like the others, and its gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import Output, check_shapes
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.vendor.dispatch import IN_TORCH, ByAutograd, InDtype, dtype_of
from numdev.errors import BadInput, BadOutput
from numdev.settings import setting
from numdev.sources import Loaded, loaded


@dataclass(frozen=True)
class Custom(InDtype):
    """`function(q, k, v, mask=Mask, scale=float) -> out` or `(out, lse)`, named `package.module:function`.

    The function receives tensors of the torch dtype of `fmt`, already rounded to it, on the device of the measurement. It
    raises `numdev.Unsupported` for a mask or shape that it cannot honour. What it returns is refused unless it has the shapes
    above, lies on the device of the inputs, and `out` has the torch dtype of `fmt`, `lse` FP32 (FP64 where `fmt` is FP64).

    `digest` is the SHA-256 of its sources, so that results of an edited function have another key; see `numdev.sources`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | {"attention.function"}, "kernel", IN_TORCH)

    function: str = setting(MISSING, "where a function of one's own is imported from: `package.module:function`")
    fmt: Format = BF16
    digest: str = field(init=False, repr=False)
    field: ClassVar[str] = "attention.function"  # what a refusal names

    def __post_init__(self) -> None:
        dtype_of(self.fmt)  # refuses a format without one
        source = loaded(self.function, self.field)
        object.__setattr__(self, "_loaded", source)  # no field: it is no part of the configuration
        object.__setattr__(self, "digest", source.digest)

    def __reduce__(self) -> tuple[type[Custom], tuple[str, Format]]:
        return type(self), (self.function, self.fmt)  # another process imports the function, and hashes its sources, itself

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Calls the function on copies, since it may write to its arguments, and checks what it returns."""
        # To its dtype: implementations of the same `input_key` may hold the same numbers in FP32.
        q, k, v = (t.to(self.fmt.dtype, copy=True) for t in (q, k, v))
        return self.bare(q, k, v, mask, scale)

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """The call that is timed: without copies, on tensors of the function's dtype."""
        check_shapes(q, k, v, mask, adds=True)
        source: Loaded = vars(self)["_loaded"]
        if not source.is_current:
            raise BadInput(self.field, self.function, "a module of it was reloaded since it was named; make the Custom again")
        result = called(source.function, {"q": q, "k": k, "v": v}, mask, scale, self.field, self.function)
        out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        expected = (*q.shape[:-1], v.shape[-1]), self.fmt.dtype, q.device
        expected_lse = tuple(q.shape[:-1]), self.formats["lse"].dtype, q.device
        if layout(out) != expected or (lse is not None and layout(lse) != expected_lse):
            returned = " and ".join(described(layout(value)) for value in ([out] if lse is None else [out, lse]))
            hint = f"it must return out {described(expected)}, or that and lse {described(expected_lse)}"
            raise BadOutput(self.field, self.function, f"it returned {returned}; {hint}")
        return Output(out, lse)


class _Differentiated(Custom):
    """`Custom` whose result must have a gradient."""

    field: ClassVar[str] = "backward.function"

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        output = super().bare(q, k, v, mask, scale)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) and not output.out.requires_grad:
            hint = "autograd recorded nothing of it; use operations of torch, or a torch.autograd.Function"
            raise BadOutput(self.field, self.function, hint)
        return output


@dataclass(frozen=True)
class CustomBackward(ByAutograd):
    """The gradients that torch's autograd has of a function of one's own; see `Custom` for what it takes and returns.

    It is made of operations of torch, a `torch.nn.Module`, or a `torch.autograd.Function`, of which `apply(q, k, v, mask,
    scale)` is called. Weights of a module are no part of the digest, and are not trained.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | {"backward.function"}, "kernel", IN_TORCH)

    function: str = setting(MISSING, "where a differentiable function of one's own is imported from: `package.module:function`")
    fmt: Format = BF16
    digest: str = field(init=False, repr=False)
    field: ClassVar[str] = "backward.function"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_forward", _Differentiated(self.function, self.fmt))
        object.__setattr__(self, "digest", self.forward.digest)

    def __reduce__(self) -> tuple[type[CustomBackward], tuple[str, Format]]:
        return CustomBackward, (self.function, self.fmt)

    @property
    def forward(self) -> Custom:
        forward: Custom = vars(self)["_forward"]
        return forward


def called(
    function: Callable[..., Any], inputs: Mapping[str, Tensor], mask: Mask, scale: float | None, field: str, name: str
) -> Any:
    """The result of a user's function; raises BadInput, naming `field`, where it does not take its arguments."""
    try:
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            return function.apply(*inputs.values(), mask, scale)  # type: ignore[no-untyped-call]
        call: Callable[..., Any] = function
        return call(*inputs.values(), mask=mask, scale=scale)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it was raised within the function
            raise
        hint = f"it is called as function({', '.join(inputs)}, mask=mask, scale=scale), and does not take that ({error})"
        raise BadInput(field, name, hint) from error


Layout = tuple[tuple[int, ...], torch.dtype | None, torch.device]


def layout(value: object) -> Layout | str:
    """Shape, dtype and device of a tensor; of anything else its type."""
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else type(value).__name__


def described(layout: Layout | str) -> str:
    """A layout in words."""
    return layout if isinstance(layout, str) else f"{layout[0]} in {str(layout[1])[6:]} on {layout[2]}"
