"""What a row of a speed measurement holds: unit and meaning of each figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MEASURED = {
    "latency": ("s", "median time of one call; on a GPU by CUDA events, inputs in memory, without the host's share"),
    "latency_low": ("s", "lower quartile of the time of one call"),
    "latency_high": ("s", "upper quartile of the time of one call"),
    "host": ("s", "median time until a call returned to the caller"),
    "host_hidden": (
        "relative",
        "share of the calls that returned before the GPU came to them: below 1 latency shows the host; 0 on a CPU",
    ),
    "calls": ("count", "calls timed after warm-up"),
    "operations": ("count", "4 d for each pair of a query and a key that it sees, over heads and batch"),
    "matmul_flops": ("1/s", "operations per second of a square matrix product of such inputs, measured beside it"),
    "peak_bytes": ("B", "most memory that a call takes of torch's allocator beyond q, k, v and a dense mask, results among it"),
    "input_bytes": ("B", "size of q, k and v"),
    "output_bytes": ("B", "size of what is returned"),
    "algorithm": ("", "whose traffic the cost model counts: vanilla, tiled, or empty for neither"),
    "model_bytes": ("B", "traffic with the processor's memory by the cost model"),
    "model_br": ("rows", "Br of the cost model"),
}

DERIVED = {
    "tflops": ("1e12/s", "operations / latency"),
    "share": ("relative", "operations / latency over matmul_flops"),
    "bandwidth": ("1e9 B/s", "bytes that any algorithm must move, input_bytes + output_bytes, over latency"),
    "intensity": ("1/B", "arithmetic intensity: operations / model_bytes"),
    "temporary_bytes": ("B", "peak_bytes without the results"),
}

COLUMNS = MEASURED | DERIVED


def derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of measured figures with those that follow from them."""
    rate = row["operations"] / row["latency"]
    return {
        **row,
        "tflops": rate / 1e12,
        "share": rate / row["matmul_flops"],
        "bandwidth": (row["input_bytes"] + row["output_bytes"]) / row["latency"] / 1e9,
        "intensity": row["operations"] / row["model_bytes"],
        "temporary_bytes": row["peak_bytes"] - row["output_bytes"],
    }


SHAPE = (
    *("setting", "phase", "format", "problem.shape.head_dim", "problem.shape.heads", "problem.shape.kv_heads"),
    *("problem.mask.causal", "problem.mask.window"),
)
"""What measurements have in common that lie on one line over N, but for what is measured."""


def shape_text(shape: Mapping[Any, Any]) -> str:
    """The values of `SHAPE`, in few words: `d = 64, causal, bf16, 32 heads`."""
    window = shape["problem.mask.window"]
    windowed = "" if window is None or math.isnan(window) else f"window {window:g}"  # NaN where a table has none
    causal = "causal" if shape["problem.mask.causal"] else ""
    mask = " ".join(part for part in (causal, windowed) if part) or "no mask"
    heads, kv_heads = shape["problem.shape.heads"], shape["problem.shape.kv_heads"]
    counted = "1 head" if heads == 1 else f"{heads} heads"
    grouped = counted if heads == kv_heads else f"{counted} on {kv_heads}"
    return f"d = {shape['problem.shape.head_dim']}, {mask}, {shape['format']}, {grouped}"
