"""Attention as an operation: what measurements, records and reports must know of it."""

from __future__ import annotations

from dataclasses import fields

import torch

from numdev.attention.events import COUNTERS
from numdev.attention.exact import Exact
from numdev.attention.kernels.launch import digest as launch_digest
from numdev.attention.kernels.runtime import interpreting, triton_version
from numdev.attention.precision import Precision
from numdev.attention.workload import AttentionWorkload
from numdev.measurement.operation import Inputs, Operation, Output
from numdev.results.record import Column


def environment(device: torch.device) -> dict[str, str]:
    """Version of Triton and digest of the table of launches, where kernels can run."""
    if device.type == "cuda":
        return {"triton": triton_version(), "launch_table": launch_digest()}
    return {"triton": f"{triton_version()} interpreted", "launch_table": launch_digest()} if interpreting() else {}


def settings() -> tuple[Column, ...]:
    """Every setting of a problem and of a variant."""
    from numdev.attention import dictionary  # late: it imports every implementation

    parts = {"problem": dictionary.PROBLEM, "variant": dictionary.VARIANT}
    return tuple(Column(f"{part}.{name}", *said) for part, texts in parts.items() for name, said in texts.items())


ATTENTION = Operation(
    name="attention",
    golden=Exact(),
    inputs=(Inputs(("q", "k", "v")),),
    outputs=(
        Output("out", "O, the softmax of the scaled scores times V"),
        Output("lse", "m + log l, the logarithm of the sum of exponentials of the scaled scores"),
    ),
    steps=tuple(field.name for field in fields(Precision)),
    counters=tuple(Column(name, unit, text) for name, (unit, text) in COUNTERS.items()),
    settings=settings,
    environment=environment,
    workload=AttentionWorkload(),
    smaller="fewer queries, keys, heads or batch entries, or a smaller tiling.bc",
)
"""Forward attention."""
