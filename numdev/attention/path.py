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


def differentiates(*tensors: Tensor) -> bool:
    """Whether torch is to differentiate the result of these tensors, which it can through its own operations alone."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def multiplies_unseen(v: Tensor, mask: Mask) -> bool:
    """Whether a key that a row does not see may hold a value that is not finite, and 0 times it is NaN."""
    return not mask.is_none and not bool(v.isfinite().all())
