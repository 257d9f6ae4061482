"""By which way tiled attention goes: tensor operations, which are the specification, or compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

import torch
from torch import Tensor

from numdev.attention.mask import Mask


class Path(Enum):
    """By which way tiled attention goes: compiled passes on a CPU and the instrumented kernel on a GPU, or tensor operations."""

    FASTEST = "fastest"  # compiled code where it pays
    TENSORS = "tensors"  # tensor operations, which are the specification
    COMPILED = "compiled"  # compiled code also in a run so short that it does not pay


_path: ContextVar[Path] = ContextVar("path", default=Path.FASTEST)
chosen = _path.get
"""The path of this context."""


@contextmanager
def by(path: Path) -> Iterator[None]:
    """Go by a path within this context, to compare both; what compiled code does not take goes by tensor operations in any."""
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def unsuited(tensors: tuple[Tensor, ...], multiplied: tuple[Tensor, ...], mask: Mask, *, is_short: bool) -> str | None:
    """Why a run goes by tensor operations, whatever its settings are; None where compiled code may take it.

    Args:
        tensors: inputs, through which torch differentiates by its own operations alone.
        multiplied: inputs that are multiplied by the zeros of what a row does not see: 0 times what is not finite is NaN.
        mask: of the run.
        is_short: whether compiling or loading code does not pay.
    """
    if chosen() is Path.TENSORS:
        return "tensor operations were asked for"
    if chosen() is Path.FASTEST and is_short:
        return "it is too short to pay for compiling or loading code"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "torch is to differentiate it"
    if not mask.is_none and not all(bool(x.isfinite().all()) for x in multiplied):
        return "a row or key that is not seen may hold a value that is not finite"
    return None
