"""The kernel that is certified: a function, an implementation of attention, or the name of one, as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from operator import attrgetter
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, FP32, Format
from numdev.attention.base import Attention, Backward, Saved
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor import custom, flash_attn, flex, sage, sdpa, vanilla
from numdev.attention.vendor.dispatch import ByAutograd, Packaged, proven_once
from numdev.certification.simulation import Inputs, Tensors
from numdev.errors import BadInput, BadOutput, NotAChoice, NumdevError, one_of
from numdev.sources import loaded

Call = Callable[[Tensors, Mask, float], Any]
_FORMATS = {f"kernel_{fmt}": fmt for fmt in (BF16, FP16, FP32)}
KERNELS: dict[str, Callable[..., Attention | Backward]] = {
    "triton": lambda fmt: TritonBackward(Triton(fmt), fmt),
    "flex": flex.FlexBackward,
    "vanilla": vanilla.VanillaBackward,
    "sageattention": sage.SageAttention,
    "flash_attn": flash_attn.FlashAttnBackward,
    **{f"flash_attn_{each.value[2:]}": partial(flash_attn.FlashAttnBackward, each) for each in flash_attn.FlashVersion},
    "sdpa": sdpa.SdpaBackward,
    **{f"sdpa_{each.value}": partial(sdpa.SdpaBackward, each) for each in sdpa.Backend},
}
"""Kernels that have names, by their gradients, which know the forward pass, or by the forward pass of those without."""


def format_of(precision: str) -> Format:
    """The format of inputs, P and outputs under a policy that a kernel may claim; raises BadInput for every other one."""
    if precision not in _FORMATS:
        raise NotAChoice("precision", precision, _FORMATS, "inputs, P and outputs in that format, all else in FP32")
    return _FORMATS[precision]


@dataclass(frozen=True)
class Kernel:
    """A kernel as certify calls it: tensors in its dtype and on its device, mask and scale.

    `Unsupported` says that it does not take a request.
    """

    name: str
    call: Call
    fmt: Format
    device: torch.device
    takes: tuple[str, ...] = ("q", "k", "v")
    returns: tuple[str, ...] = ("out", "lse")  # of which it may leave out the LSE

    def __call__(self, tensors: Tensors, mask: Mask, scale: float) -> Tensors:
        """The outputs on the device, checked for shape, dtype and device.

        Raises:
            BadOutput: for a result of another layout, and for what the kernel raises but `Unsupported`.
        """
        try:
            with proven_once():
                result = self.call(tensors, mask, scale)
        except NumdevError:
            raise
        except Exception as error:
            place, shapes = extract_tb(error.__traceback__)[-1], {name: tuple(x.shape) for name, x in tensors.items()}
            raised = f"it raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}) on {shapes}, {mask}"
            raise BadOutput("kernel", self.name, f"{raised}; raise numdev.Unsupported for what it does not take") from error
        results = result if isinstance(result, tuple) else (result,)
        outputs = {name: x for name, x in zip(self.returns, results, strict=False) if name != "lse" or x is not None}
        if len(results) > len(self.returns) or set(self.returns) - set(outputs) - {"lse"}:
            raise BadOutput("kernel", self.name, f"it returned {len(results)} results; return {', '.join(self.returns)}")
        q, k, v = (tensors[name].shape for name in ("q", "k", "v"))
        shapes = {"out": (*q[:-1], v[-1]), "lse": q[:-1], "dq": q, "dk": k, "dv": v}
        for name, x in outputs.items():
            dtypes = {torch.float32} if name == "lse" else {torch.float32, self.fmt.dtype}
            allowed = [(tuple(shapes[name]), dtype, tensors["q"].device) for dtype in dtypes]
            if custom.layout(x) not in allowed:
                expected = " or ".join(sorted(map(custom.described, allowed)))
                raise BadOutput("kernel", self.name, f"{name} is {custom.described(custom.layout(x))}; return {expected}")
        return outputs

    def on(self, inputs: Inputs, place: Callable[[Tensor], Tensor] = Tensor.clone) -> Tensors:
        """The outputs on the CPU; `place` gives each tensor memory of its own, since a kernel may overwrite its inputs."""
        outputs = self({name: place(inputs[name].to(self.device)) for name in self.takes}, inputs.mask, inputs.scale)
        return {name: x.detach().cpu() for name, x in outputs.items()}


def kernel_of(kernel: object, fmt: Format, device: torch.device, backward: object = None) -> Kernel:
    """The kernel of a function, an implementation, `package.module:function`, or one of the names of `KERNELS`.

    With `backward` it is that of the gradients: one of these again, or `autograd` through the kernel.

    Raises:
        BadInput: for anything else.
    """
    forward = Kernel(_name(kernel), _call(kernel, "kernel", fmt), fmt, device)
    if backward is None:
        return forward
    own = kernel if backward == "autograd" else backward
    is_function = backward == "autograd" and not isinstance(kernel, sdpa.Sdpa) and kernel not in tuple(KERNELS)
    call = partial(_by_autograd, forward) if is_function else _call(own, "backward", fmt)
    name, takes = f"{forward.name} backward={_name(backward)}", ("q", "k", "v", "out", "lse", "do")
    return Kernel(name, call, fmt, device, takes, ("dq", "dk", "dv"))


def _name(kernel: object) -> str:
    """Of a function of a module, that by which the command finds it."""
    if isinstance(kernel, str):
        return kernel
    name, module = getattr(kernel, "__qualname__", type(kernel).__name__), getattr(kernel, "__module__", "__main__")
    return f"{module}:{name}" if isfunction(kernel) and module != "__main__" and "<" not in name else name


def _call(kernel: object, field: str, fmt: Format) -> Call:
    """A forward pass, or as the field `backward` gradients."""
    part: Any = loaded(kernel, field).function if isinstance(kernel, str) and ":" in kernel else kernel
    if isinstance(part, str):
        if part not in KERNELS:
            raise BadInput(field, part, f"give package.module:function; or {one_of(part, KERNELS)}")
        part = KERNELS[part](fmt=fmt)
        packaged = part.forward if isinstance(part, Backward) else part
        if isinstance(packaged, Packaged) and not packaged.digest:
            raise BadInput(field, kernel, packaged.missing)
    if isinstance(part, sdpa.Sdpa):  # whose own forward pass returns no LSE
        part = sdpa.SdpaBackward(part.backend, part.fmt)
    part = part.forward_pass if isinstance(part, Backward) and field == "kernel" else part
    if isinstance(part, Attention):
        if field == "backward":
            raise BadInput(field, _name(kernel), "it has no gradients; give a function")
        return lambda x, mask, scale: attrgetter("out", "lse")(part.bare(x["q"], x["k"], x["v"], mask, scale))
    if isinstance(part, Backward):
        return partial(_by_implementation, part)
    if not callable(part):
        raise BadInput(field, str(kernel), "give a function, an implementation of attention, or its name")
    return lambda x, mask, scale: custom.called(part, x, mask, scale, field, _name(kernel))


def _by_implementation(backward: Backward, x: Tensors, mask: Mask, scale: float) -> Any:
    q, k, v, out, lse, do = x.values()
    by_torch = isinstance(backward, ByAutograd)  # which keeps what its forward pass saves
    made = backward(q, k, v, do, mask, scale) if by_torch else backward.backward(q, k, v, do, Saved(out, lse), mask, scale)
    return made.dq, made.dk, made.dv


def _by_autograd(forward: Kernel, x: Tensors, mask: Mask, scale: float) -> Any:
    with torch.enable_grad():
        leaves = {name: x[name].detach().requires_grad_() for name in forward.takes}
        out = forward(leaves, mask, scale)["out"]
        if not out.requires_grad:
            raise BadInput("backward", "autograd", f"autograd records nothing of {forward.name}; give a function")
        return torch.autograd.grad(out, list(leaves.values()), x["do"].to(out.dtype))
