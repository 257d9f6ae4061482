"""Whether a kernel can run here, and how."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import lru_cache

import torch

from numdev.errors import Unsupported


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, in NumPy on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Of the installed package, or `none`."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"


def generation(device: torch.device) -> str:
    """Compute capability as the key of launch settings: `sm_90`; `interpreter` where there is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def require(device: torch.device, field: str = "attention") -> None:
    """Raise Unsupported, naming `field` and the mend, unless Triton kernels can run on `device`."""
    if triton_version() == "none":
        raise Unsupported(field, "the package triton is not installed; pip install 'numdev[kernels]'")
    if device.type != "cuda" and not interpreting():
        raise Unsupported(field, "Triton kernels need a CUDA device; use device=cuda, or TRITON_INTERPRET=1 to interpret them")
