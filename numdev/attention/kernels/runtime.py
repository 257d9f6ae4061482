"""Whether a kernel can run here and how, what the backward kernels take and return, and small tables that launches read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.attention.kernels.launch import Device
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


def device_of(device: torch.device) -> Device:
    """The properties by which a launch is chosen."""
    return Device(generation(device), shared_memory(device))


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


class BackwardInputs(NamedTuple):
    """Tensors of the backward pass: `out` and `lse` are those of the forward pass, the LSE contiguous in FP32."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor


class BackwardOutputs(NamedTuple):
    """Gradients before their cast to the output's format, and `delta [batch, heads, queries]` in FP32."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


class _Evicting(LRUCache[tuple[Hashable, torch.device], Tensor]):
    """Waits for every launch on a device before a table on it goes: one of them may read it."""

    def popitem(self) -> tuple[tuple[Hashable, torch.device], Tensor]:
        slot, table = super().popitem()
        if slot[1].type == "cuda":
            torch.cuda.synchronize(slot[1])
        return slot, table


class Tables:
    """Returns the same tensor for the same key, so that neither a launch nor the capture of a CUDA graph copies to the GPU.

    A captured graph reads its tables at every replay, and does not signal its end: tables used by a capture are never evicted. Of
    the others, the least recently used is evicted beyond `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self._kept = _Evicting(capacity)
        self._captured: dict[tuple[Hashable, torch.device], Tensor] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The table of a key on a device; `make` creates it on the CPU.

        Raises:
            Unsupported: for a table that is not on the GPU yet while a CUDA graph is captured.
        """
        slot = key, device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if slot not in self._kept and slot not in self._captured:
                if capturing:
                    why = "a CUDA graph cannot capture the copy of its tables to the GPU"
                    raise Unsupported("attention", f"{why}; call it once with these shapes before the capture")
                self._kept[slot] = make().to(device)
            if capturing and slot in self._kept:
                self._captured[slot] = self._kept[slot]
            return self._captured[slot] if slot in self._captured else self._kept[slot]


TABLES = Tables(256)
