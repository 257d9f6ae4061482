"""Whether a kernel can run here, and how."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput, Unsupported


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, in NumPy on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def held_dtype(fmt: Format) -> torch.dtype:
    """The dtype in which the fast kernels take and return tensors in a format of torch; FP32 where they are interpreted."""
    dtype = torch.float32 if interpreting() else fmt.dtype
    assert dtype is not None, "each of the formats has a dtype"
    return dtype


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The version of the installed package triton, or `none`."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"


def generation(device: torch.device) -> str:
    """The compute capability, as the key of launch settings: `sm_90`; `interpreter` if the interpreter runs the kernels.

    torch presents a GPU of AMD as a CUDA device, with capabilities like (9, 0): it is named by its architecture instead.
    """
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def require(device: torch.device, field: str = "attention") -> None:
    """Raise Unsupported, naming `field` and the mend, unless Triton kernels can run on `device`."""
    if triton_version() == "none":
        raise Unsupported(field, "the package triton is not installed; pip install 'numdev[kernels]'")
    if device.type != "cuda" and not interpreting():
        raise Unsupported(field, "Triton kernels need a CUDA device; use device=cuda, or TRITON_INTERPRET=1 to interpret them")


def check_scale(scale: float) -> float:
    """Return the scale of the scores if kernels can apply it after the row maximum: `max(scale S) = scale max(S)` if positive.

    Raises:
        BadInput: unless it is positive and finite.
    """
    if not 0 < scale < float("inf"):
        raise BadInput("problem.scale", scale, "give a positive finite factor, or null for 1/sqrt(head_dim)")
    return scale


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 1 for the interpreter, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that a program may have; None where there is no limit."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
