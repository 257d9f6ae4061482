"""Launching a compiled kernel again through the CUDA driver: a call of the Hopper kernel then takes 24 us in place of 52.

At each launch Triton describes tensors to the copy engine, asks the driver about pointers and reads some forty numbers. Where
only the addresses of tensors differ, the rest is laid out in memory once, as the driver wants it: `cuTensorMapReplaceAddress`
moves a description to another tensor, and `cuLaunchKernelEx` launches.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_NUMBERS: dict[str, Any] = {"i1": ctypes.c_int8, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType; one byte is 0
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_L2_128B, _WARP = 2, 32
_MAP_BYTES = 128  # of a CUtensorMap; it begins at a multiple of 64


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _cuda() -> Any:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return cuda


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"the CUDA driver refused a launch: {(text.value or b'').decode() or status}")


class Bound:
    """A compiled kernel on a grid, whose arguments are those of its first launch but for the addresses of its tensors."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], device: torch.device) -> None:
        about = compiled.metadata
        self._held: list[Any] = []  # what the driver reads
        self._values: list[Any] = []
        self._moved: list[Any] = []  # in the order of the tensors: a pointer, or the address of a description
        metas = iter(about.tensordesc_meta or ())
        for kind, value in _flat(tuple(compiled.src.signature.values()), arguments):
            if kind.startswith("tensordesc"):
                self._describe(value, next(metas))
            elif kind.startswith("*"):
                self._moved.append(self._value(ctypes.c_uint64(value.data_ptr())))
            else:
                self._value(_NUMBERS[kind](value))
        for _ in range(2):  # scratch memory, of which `binds` has found none
            self._value(ctypes.c_uint64(0))
        self._parameters = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        overlap = _Attribute(_OVERLAP, 0, 1)
        threads = about.num_warps * _WARP
        self._config = _Config(*grid, threads, 1, 1, about.shared, None, ctypes.pointer(overlap), int(about.launch_pdl))
        self._function, self._device, self._lock = ctypes.c_void_p(compiled.function), device.index, threading.Lock()
        self._compiled = compiled  # which unloads the function at its end
        self._stream = triton.runtime.driver.active.get_current_stream

    def _value(self, value: Any) -> Any:
        self._values.append(value)
        return value

    def _describe(self, descriptor: Any, meta: dict[str, Any]) -> None:
        base, rank, size = descriptor.base, len(descriptor.shape), descriptor.base.element_size()
        memory = ctypes.create_string_buffer(_MAP_BYTES + 63)
        self._held.append(memory)
        address = (ctypes.addressof(memory) + 63) // 64 * 64
        longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        strides = longs(*(size * stride for stride in reversed(descriptor.strides[:-1])))
        _check(
            _cuda().cuTensorMapEncodeTiled(
                ctypes.c_void_p(address), _ELEMENTS.get(base.dtype, 0), rank, ctypes.c_void_p(base.data_ptr()),
                longs(*reversed(descriptor.shape)), strides, ints(*reversed(meta["block_size"])), ints(*[1] * rank),
                0, meta["swizzle"], _L2_128B, 0,
            )
        )  # fmt: skip
        self._moved.append(address)
        self._value((ctypes.c_char * _MAP_BYTES).from_address(address))
        for length in descriptor.shape:
            self._value(ctypes.c_int32(length))
        for stride in descriptor.strides:
            self._value(ctypes.c_int64(stride))

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the device, which is the current one."""
        cuda = _cuda()
        with self._lock:
            for moved, tensor in zip(self._moved, tensors, strict=True):
                if type(moved) is int:
                    _check(cuda.cuTensorMapReplaceAddress(moved, tensor.data_ptr()))
                else:
                    moved.value = tensor.data_ptr()
            self._config.stream = self._stream(self._device)
            _check(cuda.cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._parameters, None))


def binds(compiled: Any) -> bool:
    """Whether `Bound` can launch a kernel: one of an NVIDIA GPU without clusters and scratch memory."""
    about = compiled.metadata
    scratch = about.global_scratch_size or about.profile_scratch_size
    return about.target.backend == "cuda" and about.num_ctas == 1 and not (scratch or about.launch_cooperative_grid)


def _flat(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Types and values of what the kernel takes when it runs."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value
