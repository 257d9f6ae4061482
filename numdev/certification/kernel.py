"""The kernel that is certified: a function, an implementation of numdev's, or its name, as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention, Backward, Saved
from numdev.attention.mask import Mask
from numdev.attention.precision import Policy
from numdev.attention.vendor.dispatch import ByAutograd, Packaged, proven_once
from numdev.certification.candidates import Outputs
from numdev.certification.cases import Inputs, Tensors
from numdev.errors import BadInput, BadOutput, NumdevError, one_of
from numdev.sources import loaded

KNOWN: dict[str, tuple[str, str, dict[str, str]]] = {
    "triton": ("triton", "Triton", {}),
    "flex": ("vendor.flex", "Flex", {}),
    "vanilla": ("vendor.vanilla", "Vanilla", {}),
    "sageattention": ("vendor.sage", "SageAttention", {}),
    "flash_attn": ("vendor.flash_attn", "FlashAttn", {}),
    **{f"flash_attn_{number}": ("vendor.flash_attn", "FlashAttn", {"FlashVersion": f"fa{number}"}) for number in "234"},
    "sdpa": ("vendor.sdpa", "SavingSdpa", {}),
    **{f"sdpa_{each}": ("vendor.sdpa", "SavingSdpa", {"Backend": each}) for each in ("flash", "cudnn", "efficient")},
    "sdpa_math": ("vendor.sdpa", "Sdpa", {"Backend": "math"}),
}
"""Kernels that have names: module, forward pass, and its choice, by the enumeration of the module that has it."""
_LIKE = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "v"}
"""Of each output the input whose heads and tokens it has."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as certify calls it: tensors in its dtype and on its device, mask and scale.

    `Unsupported` says that it does not take a request.

    Attributes:
        takes, returns: names of its inputs, and of its outputs, of which it may leave out the LSE.
    """

    name: str
    call: Callable[[Tensors, Mask, float], Any]
    fmt: Format
    device: torch.device
    takes: tuple[str, ...] = ("q", "k", "v")
    returns: tuple[str, ...] = ("out", "lse")

    def __call__(self, tensors: Tensors, mask: Mask, scale: float) -> Outputs:
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
            place, shapes = (
                extract_tb(error.__traceback__)[-1],
                ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items()),
            )
            raised = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise BadOutput("kernel", self.name, f"it raised {raised}; given {shapes} and {mask}") from error
        results = result if isinstance(result, tuple) else (result,)
        outputs = dict(zip(self.returns, results, strict=False))
        if outputs.get("lse", 0) is None:
            del outputs["lse"]
        if len(results) > len(self.returns) or set(self.returns) - set(outputs) - {"lse"}:
            raise BadOutput("kernel", self.name, f"it returned {len(results)} results; return {', '.join(self.returns)}")
        for name, x in outputs.items():
            like, values = tensors[_LIKE[name]], tensors["v" if name == "out" else _LIKE[name]].shape[-1:]
            shape = (*like.shape[:-1], *(() if name == "lse" else values))
            dtypes = {torch.float32} if name == "lse" else {self.fmt.dtype, torch.float32}
            if not (isinstance(x, Tensor) and tuple(x.shape) == shape and x.dtype in dtypes and x.device == like.device):
                layout = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
                expected = " or ".join(sorted(str(dtype)[6:] for dtype in dtypes))
                raise BadOutput("kernel", self.name, f"{name} is {layout}; return {shape} in {expected} on {like.device}")
        return outputs

    def on(self, inputs: Inputs, **changed: Tensor) -> Outputs:
        """The outputs of rounded inputs, some replaced, on the CPU; of copies, since a kernel may overwrite its inputs."""
        tensors = inputs.tensors | changed
        outputs = self({name: tensors[name].to(self.device, copy=True) for name in self.takes}, inputs.mask, inputs.scale)
        return {name: x.detach().cpu() for name, x in outputs.items()}


def kernel_of(kernel: object, policy: Policy, device: torch.device, backward: object = None) -> Kernel:
    """The kernel of a function, an implementation, `package.module:function`, or one of the names of `KNOWN`.

    With `backward` it is that of the gradients: one of these again, or `autograd` through the kernel.

    Raises:
        BadInput: for anything else, and for a policy whose inputs and outputs are not of one dtype of torch.
    """
    inputs, fmt = vars(policy)["inputs"], policy.format
    if not isinstance(inputs, Cast) or inputs.to != fmt or fmt.dtype is None:
        hint = "give kernel_bf16, kernel_fp16, kernel_fp32, or another with inputs and outputs in one of these"
        raise BadInput("precision", str(inputs), hint)
    forward = Kernel(_name(kernel), _call(kernel, "kernel", fmt), fmt, device)
    if backward is None:
        return forward
    whole = replace(forward, takes=("q", "k", "v", "out", "lse", "do"), returns=("dq", "dk", "dv"))
    call = _by_autograd(forward) if backward == "autograd" else _call(backward, "backward", fmt)
    return replace(whole, name=f"{forward.name} backward={_name(backward)}", call=call)


def _name(kernel: object) -> str:
    return kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)


def _call(kernel: object, field: str, fmt: Format) -> Callable[[Tensors, Mask, float], Any]:
    """A forward pass, or gradients, as a call."""
    if isinstance(kernel, str):
        if ":" not in kernel and kernel not in KNOWN:
            raise BadInput(field, kernel, f"give package.module:function; or {one_of(kernel, KNOWN)}")
        kernel = loaded(kernel, field).function if ":" in kernel else _implementation(kernel, fmt, field)
    if isinstance(kernel, Attention):
        forward = kernel
        return lambda x, mask, scale: attrgetter("out", "lse")(forward.bare(x["q"], x["k"], x["v"], mask, scale))
    if isinstance(kernel, Backward):
        backward = kernel

        def gradients(x: Tensors, mask: Mask, scale: float) -> Any:
            q, k, v, out, lse, do = x.values()
            if isinstance(backward, ByAutograd):  # torch keeps what its forward pass saves
                return attrgetter("dq", "dk", "dv")(backward(q, k, v, do, mask, scale))
            return attrgetter("dq", "dk", "dv")(backward.backward(q, k, v, do, Saved(out, lse), mask, scale))

        return gradients
    if not callable(kernel):
        raise BadInput(field, str(kernel), "give a function, an implementation of attention, or its name")
    function = kernel

    def call(x: Tensors, mask: Mask, scale: float) -> Any:
        try:
            return function(*x.values(), mask=mask, scale=scale)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it was raised within the function
                raise
            hint = f"it is called as function({', '.join(x)}, mask=mask, scale=scale), and does not take that ({error})"
            raise BadInput(field, _name(function), hint) from error

    return call


def _by_autograd(forward: Kernel) -> Callable[[Tensors, Mask, float], Any]:
    def gradients(x: Tensors, mask: Mask, scale: float) -> Any:
        with torch.enable_grad():
            leaves = {name: x[name].detach().requires_grad_() for name in forward.takes}
            out = forward(leaves, mask, scale)["out"]
            if not out.requires_grad:
                raise BadInput("backward", "autograd", f"autograd records nothing of {forward.name}; give a function")
            return torch.autograd.grad(out, list(leaves.values()), x["do"].to(out.dtype))

    return gradients


def _implementation(name: str, fmt: Format, field: str) -> Any:
    """The implementation of one of the names of `KNOWN` in a format: its forward pass, or its gradients."""
    path, kind, choice = KNOWN[name]
    module = import_module(f"numdev.attention.{path}")
    if field == "backward":
        kind = f"{kind.removeprefix('Saving')}Backward"
    if not hasattr(module, kind):
        raise BadInput(field, name, "it has no gradients; give a function, or autograd")
    choices = [getattr(module, each)(value) for each, value in choice.items()]
    if kind == "TritonBackward":  # it is given what saves O and LSE
        choices = [module.Triton(fmt)]
    made = getattr(module, kind)(*choices, fmt=fmt)
    forward = made.forward if field == "backward" else made
    if isinstance(forward, Packaged) and not forward.digest:
        raise BadInput(field, name, forward.missing)
    return made
