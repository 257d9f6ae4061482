"""Which requests the Hopper backward kernels can run, in which of two designs, and their pinned launch settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from numdev.attention.accepts import ALL, BINARY, RECOMPUTE, Accepts, of
from numdev.attention.kernels.alignment import misalignment
from numdev.attention.kernels.hopper_backward_order import TILE, group_of
from numdev.attention.mask import Mask
from numdev.attention.softmax import DeltaForm, Exponential
from numdev.errors import Unsupported

ROWS = 64  # of one computing warp group


class Design(Enum):
    """How the additions to dQ get a fixed order."""

    SPLIT = "split"  # two kernels, neither of which adds to global memory
    FUSED = "fused"  # one kernel, whose programs take turns


NAMES = {Design.SPLIT: "numdev hopper backward, two kernels", Design.FUSED: "numdev hopper backward, one kernel"}
"""The names by which `KernelLaunch` states them."""


@dataclass(frozen=True)
class KeysShape:
    """A kernel that owns keys: queries of a tile, buffers for Q and for dO, skewed loop, turns."""

    br: int
    stages: int
    skewed: bool = False
    pingpong: bool = False


@dataclass(frozen=True)
class QueriesShape:
    """The kernel that owns queries: keys of a block, computing warp groups, buffers for K and for V, registers of a thread."""

    bc: int
    groups: int
    stages: int
    registers: int


# By head_dim. Each was the fastest of those tried on an H200 that do not spill S, P or sums to memory.
FUSED = {64: KeysShape(128, 2), 128: KeysShape(64, 2)}
SPLIT = {64: KeysShape(64, 3, skewed=True), 128: KeysShape(64, 2, pingpong=True)}
_QUERIES = {64: QueriesShape(128, 2, 2, 240), 128: QueriesShape(128, 2, 2, 240)}
_LONG_QUERIES = {64: QueriesShape(64, 3, 3, 160), 128: _QUERIES[128]}
_LONG = 4096  # queries: from here on, three warp groups make dQ faster than two at d = 64


def queries_shape(head_dim: int, queries: int) -> QueriesShape:
    """The launch of the kernel that owns queries."""
    return (_LONG_QUERIES if queries >= _LONG else _QUERIES)[head_dim]


def kept_rows(bc: int | None) -> int | None:
    """Queries of a program of the kernel that owns queries; the keys of a block identify the shape."""
    groups = {shape.bc: shape.groups for shape in (*_QUERIES.values(), *_LONG_QUERIES.values())}
    return None if bc is None else ROWS * groups[bc]


def hidden_queries(queries: int, keys: int, mask: Mask) -> int:
    """How many of the first queries see no key, which no program visits."""
    return max(0, queries - keys) if mask.causal else 0


def refusal(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, settings: Any) -> str | None:
    """Why these kernels cannot run a request; None if they can. `settings` is a `TritonBackward`."""
    head_dim = q.shape[-1]
    checks = (
        (q.dtype not in (torch.bfloat16, torch.float16), f"it takes fp16 and bf16, not {settings.fmt.name}"),
        (head_dim not in FUSED, f"it takes head_dim 64 and 128, not {head_dim}"),
        (v.shape[-1] != head_dim, f"it has one head_dim for q, k and v, and v has {v.shape[-1]}, q {head_dim}"),
    )
    for refused, reason in checks:
        if refused:
            return reason
    if (found := _ACCEPTS.refusal(settings) or _MASK.refusal(mask)) is not None:
        return str(found)
    for name, tensor in (("k", k), ("v", v), ("do", do)):
        if tensor.dtype != q.dtype:
            return f"{name} is {tensor.dtype} and q {q.dtype}"
    return misalignment(q=q, k=k, v=v, do=do)


# Of a `TritonBackward`: its tiles and their order are its own, and only products of FP32 can be in TF32.
_ACCEPTS = Accepts(
    object,
    "tiling",
    fmt=BINARY,
    recompute=RECOMPUTE.but(delta=(DeltaForm.OUTPUT,), exponential=Accepts(Exponential, binary=(True,))),
    **of("forward tf32 kernel design", ALL),
)
_MASK = Accepts(Mask, "problem", **of("causal key_lengths", ALL))


def waiting(queries: int, mask: Mask) -> int:
    """How many programs of the one-kernel design may wait for each other, and so must all be running at the same time."""
    return 1 if mask.causal else group_of(math.ceil(queries / TILE))


def choose(queries: int, mask: Mask, processors: int, design: Design | None = None) -> Design:
    """The design of a request: the one kernel, unless more programs wait for each other than the device runs at once.

    Launches that run beside it in other streams take multiprocessors from it: what is safe then is in docs/reference/kernels.md.

    Raises:
        Unsupported: if the one kernel is asked for, and its programs could wait for programs that are not running.
    """
    needed = waiting(queries, mask)
    if needed <= processors:
        return design or Design.FUSED
    if design is Design.FUSED:
        why = f"{needed} programs wait for each other and the GPU runs {processors} at once; give split, or null"
        raise Unsupported("backward.design", why)
    return Design.SPLIT
