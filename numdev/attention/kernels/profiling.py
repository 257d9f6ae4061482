"""Which kernel really ran, according to the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from numdev.profiler import profiler

T = TypeVar("T")

# Fragments of kernel names. cuDNN's contain `flash` too, and of the kernels of a backward pass the first fragment names the one
# that does most of the work, so the order counts.
_FAMILIES = (
    ("cudnn", ("cudnn_generated", "cudnn")),
    ("flex", ("flex_attention", "flex_decoding")),
    ("efficient", ("fmha_cutlass", "efficient_attention")),
    ("flash", ("flash_fwd", "flash_bwd_dq_dk_dv", "flash_attention")),
    ("math", ("attention_math", "gemm", "gemv", "softmax", "nvjet", "cutlass")),
)


def kernels(run: Callable[[], T], device: torch.device) -> tuple[T, tuple[str, ...]]:
    """The result of a call and the names of the kernels that it ran on the GPU, or of its attention operators on a CPU."""
    run()  # the first call may compile or set up, which must not be counted
    with profiler(device) as watched:
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = watched.events() or []
    if device.type == "cuda":
        names = [event.name for event in events if event.device_type.name == "CUDA"]
    else:
        names = [event.name for event in events if any(part in event.name for part in _OPERATORS) and event.name != _ENTRY]
    return result, tuple(dict.fromkeys(names))


_OPERATORS = ("scaled_dot_product", "_softmax_backward_data")  # the second is of the gradients of what has no operator of its own
_ENTRY = "aten::scaled_dot_product_attention"  # the operator that chooses


def family(names: tuple[str, ...]) -> tuple[str, str]:
    """The family that the kernels of a call belong to, and the kernel name that shows it; empty strings if none is known."""
    for name, fragments in _FAMILIES:
        for fragment in fragments:
            for kernel in names:
                if fragment in kernel.lower():
                    return name, kernel
    return "", ""
