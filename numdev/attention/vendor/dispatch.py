"""What kernels of other makers have in common: a dtype, rounded inputs, and proof of which kernel ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Primary, kernel_formats
from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported

T = TypeVar("T")
Result = tuple[Tensor, Tensor | None]
IN_TORCH = (BF16, FP16, FP32, FP64, E4M3FN, E5M2)  # formats that are a dtype of torch


class InDtype(Primary):
    """An implementation that computes in a dtype of torch."""

    fmt: Format

    @property
    def idle(self) -> dict[str, str]:
        """See `numdev.attention.honours.Honouring`."""
        return {}

    @property
    def formats(self) -> dict[str, Format]:
        return kernel_formats(self.fmt)

    @property
    def input_key(self) -> Hashable:
        return Cast(self.fmt), torch.float32

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs in the dtype of the format, each rounded once."""
        cast, dtype = Cast(self.fmt), self.dtype
        return cast(q.double()).to(dtype), cast(k.double()).to(dtype), cast(v.double()).to(dtype)

    @property
    def family(self) -> str:
        """Of the kernels that may run, as `proven` knows them; empty where any operations of torch may."""
        return ""

    @property
    def dtype(self) -> torch.dtype:
        """Raises BadInput for a format without one."""
        if self.fmt.dtype is None:
            raise BadInput("precision", self.fmt.name, "torch has no dtype for it; use bf16, fp16, fp32 or fp64")
        return self.fmt.dtype

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the inputs, so that a call converts nothing."""
        return self.dtype


@lru_cache(maxsize=1)
def dense(mask: Mask, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "batch_or_1 1 queries keys"] | None:
    """The mask as a tensor, or None where every key is seen; an input, and so made once for a request and not timed."""
    return mask.visible(queries, keys, (0, queries), (0, keys), device)


@lru_cache(maxsize=64)
def hides_rows(mask: Mask, batch: int, queries: int, keys: int) -> bool:
    """`Mask.hides_rows`, computed once for a request."""
    return mask.hides_rows(batch, queries, keys)


def forget_masks() -> None:
    """Release the mask that `dense` keeps."""
    dense.cache_clear()


def is_refusal(error: Exception) -> bool:
    """Whether an error refuses a request, rather than reporting that memory or the device has failed."""
    failed = ("can't allocate memory", "out of memory", "CUDA error")
    return not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in failed)


@contextmanager
def refusals(field: str, who: str) -> Iterator[None]:
    """Raises what PyTorch refuses within it as `Unsupported`, naming `field`, with the reasons that it warns of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            said = " ".join(dict.fromkeys(str(warning.message).split(" (Triggered")[0] for warning in heard))
            raise Unsupported(field, f"{who}: {str(error).splitlines()[0]} {said}".strip()) from None


_RAN: dict[Hashable, str] = {}  # the kernel of each request; the profiler runs once for each in a process
_PROVING = ContextVar("proving", default=True)


@contextmanager
def unproven() -> Iterator[None]:
    """Skips the proof of which kernel runs while another profiler owns the GPU; the parent process has proven it."""
    token = _PROVING.set(False)
    try:
        yield
    finally:
        _PROVING.reset(token)


def proven(run: Callable[[], T], wanted: str, field: str, key: Hashable, device: torch.device) -> tuple[T, str]:
    """Runs, and returns the result and the name of the kernel, which must be of the family `wanted`; no name within `unproven`.

    Raises:
        Unsupported: naming `field`, if another ran.
    """
    if key in _RAN:
        return run(), _RAN[key]
    if not _PROVING.get():
        return run(), ""
    from numdev.attention.kernels import profiling

    result, names = profiling.kernels(run, device)
    if not names:
        raise Unsupported(field, f"asked for {wanted}, and the profiler names no kernel, so which one ran cannot be verified")
    found, kernel = profiling.family(names)
    if found != wanted:
        raise Unsupported(field, f"asked for {wanted}, but {found or 'another kernel'} ran ({kernel or ', '.join(names)[:200]})")
    _RAN[key] = kernel
    return result, kernel
