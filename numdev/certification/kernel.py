"""The kernel that is certified: a function, an implementation of numdev's, or its name, as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flash_attn import FlashAttn, FlashVersion
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sage import SageAttention
from numdev.attention.vendor.sdpa import Backend, SavingSdpa, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.certification.cases import Inputs
from numdev.certification.catalogue import Outputs
from numdev.errors import BadInput, BadOutput, one_of

Call = Callable[[Tensor, Tensor, Tensor, Mask, float], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel as certify calls it: q, k, v in its dtype and on its device, mask and scale; out, or out and LSE.

    `Unsupported` says that it does not take a request.
    """

    name: str
    call: Call
    fmt: Format
    device: torch.device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Outputs:
        """The outputs on the device, checked for shape, dtype and device; an LSE of None is left out.

        Raises:
            BadOutput: for a result of another layout.
        """
        result = self.call(q, k, v, mask, scale)
        out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        rows, low = tuple(q.shape[:-1]), self.fmt.dtype
        for name, x, shape, dtypes in (
            ("out", out, (*rows, v.shape[-1]), (low, torch.float32)),
            ("lse", lse, rows, (torch.float32,)),
        ):
            if (x is not None or name == "out") and not (
                isinstance(x, Tensor) and tuple(x.shape) == shape and x.dtype in dtypes and x.device == q.device
            ):
                layout = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
                expected = " or ".join(str(dtype)[6:] for dtype in dict.fromkeys(dtypes))
                raise BadOutput("kernel", self.name, f"{name} is {layout}; return {shape} in {expected} on {q.device}")
        return {"out": out} if lse is None else {"out": out, "lse": lse}

    def on(self, inputs: Inputs, **changed: Tensor) -> Outputs:
        """The outputs of rounded inputs, some replaced, on the CPU; of copies, since a kernel may overwrite its inputs."""
        tensors = inputs.tensors | changed
        q, k, v = (tensors[name].to(self.device, copy=True) for name in ("q", "k", "v"))
        return {name: x.cpu() for name, x in self(q, k, v, inputs.mask, inputs.scale).items()}


def kernel_of(kernel: object, policy: Precision, device: torch.device) -> Kernel:
    """The kernel of a function, an implementation, `package.module:function`, or one of the names of `KNOWN`.

    Raises:
        BadInput: for anything else, and for a policy whose inputs and outputs are not of one dtype of torch.
    """
    inputs, fmt = policy.inputs, policy.output.to
    if not isinstance(inputs, Cast) or inputs.to != fmt or fmt.dtype is None:
        raise BadInput(
            "precision",
            str(inputs),
            "give kernel_bf16, kernel_fp16, kernel_fp32, or another with inputs and outputs in one of these",
        )
    name, function = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__), kernel
    if isinstance(kernel, str):
        if ":" not in kernel and kernel not in KNOWN:
            raise BadInput("kernel", kernel, f"give package.module:function; or {one_of(kernel, KNOWN)}")
        kernel = Custom(kernel, fmt) if ":" in kernel else KNOWN[kernel](fmt)
    if isinstance(kernel, Attention):
        bare = kernel.bare
        return Kernel(name, lambda *call: attrgetter("out", "lse")(bare(*call)), fmt, device)
    if not callable(function):
        raise BadInput("kernel", name, "give a function, an implementation of attention, or its name")
    return Kernel(name, lambda q, k, v, mask, scale: function(q, k, v, mask=mask, scale=scale), fmt, device)


def _triton(fmt: Format) -> Attention:
    from numdev.attention.triton import Triton  # late: it may import triton

    return Triton(fmt)


KNOWN: dict[str, Callable[[Format], Attention]] = {
    "triton": _triton,
    "flex": lambda fmt: Flex(fmt=fmt),
    "vanilla": Vanilla,
    "sageattention": SageAttention,
    "flash_attn": lambda fmt: FlashAttn(fmt=fmt),
    **{f"flash_attn_{each.value[-1]}": partial(FlashAttn, each) for each in FlashVersion},
    "sdpa": lambda fmt: SavingSdpa(fmt=fmt),
    **{f"sdpa_{each.value}": partial(Sdpa if each is Backend.MATH else SavingSdpa, each) for each in Backend},
}
"""Kernels that have names, by what makes them in a format."""
