"""The columns of a speed measurement: unit and meaning of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MEASURED = {
    "latency": (
        "s",
        "median time of one call; on a GPU by CUDA events, with inputs in memory and in no cache, without the host's share",
    ),
    "latency_low": ("s", "lower quartile of the time of one call"),
    "latency_high": ("s", "upper quartile of the time of one call"),
    "host": ("s", "median time until a call returned to the caller"),
    "host_hidden": (
        "relative",
        "share of the calls that had returned before the GPU started on them; below 1, latency includes time of the host; "
        "0 on a CPU",
    ),
    "calls": ("count", "calls timed after warm-up"),
    "operations": (
        "count",
        "floating-point operations that any implementation must do; of attention 4 d for each pair of a query and a key that it "
        "sees, over heads and batch, and 10 d of its backward pass",
    ),
    "matmul_flops": ("1/s", "operations per second of a square matrix product of such inputs, measured beside it"),
    "peak_bytes": (
        "B",
        "most memory that a call takes of torch's allocator beyond its inputs, to which a dense mask counts; results included",
    ),
    "input_bytes": ("B", "size of the inputs, without a dense mask"),
    "output_bytes": ("B", "size of what is returned"),
    "algorithm": ("", "the algorithm whose traffic the cost model counts, such as vanilla or tiled; empty without a model"),
    "model_bytes": ("B", "traffic with the processor's memory by the cost model"),
    "model_br": ("rows", "rows of a tile in the cost model; 0 without tiles"),
}

COUNTED = {
    "dram_read_bytes": ("B", "bytes that a call read from the GPU's memory, by its counters; no cache held its inputs"),
    "dram_write_bytes": (
        "B",
        "bytes that a call wrote to the GPU's memory, by its counters, without what was still in the second-level cache when the "
        "call ended",
    ),
    "l2_bytes": ("B", "bytes between second-level cache and multiprocessors, by the GPU's counters"),
    "not_counted": ("", "why the GPU's counters gave no figure; empty where they did"),
}
"""Only where the counters were asked for."""

BESIDE = ("latency", "latency_low", "latency_high", "operations", "model_bytes")


def of_beside(names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The columns of calls that are timed beside the measured one, by the names that say what they are."""
    return {
        f"{name}_{column}": (MEASURED[column][0], f"of {what}: {MEASURED[column][1]}")
        for name, what in names.items()
        for column in BESIDE
    }


DERIVED = {
    "tflops": ("1e12/s", "operations / latency"),
    "share": ("relative", "operations / latency over matmul_flops"),
    "bandwidth": ("1e9 B/s", "bytes that any algorithm must move, input_bytes + output_bytes, over latency"),
    "intensity": ("1/B", "arithmetic intensity: operations / model_bytes"),
    "temporary_bytes": ("B", "peak_bytes without the results"),
}

OF_COUNTED = {
    "measured_intensity": (
        "1/B",
        "arithmetic intensity with the GPU's memory as counted: operations / (dram_read_bytes + dram_write_bytes)",
    ),
    "l2_over_model": (
        "relative",
        "l2_bytes / model_bytes: the model counts traffic with the multiprocessors, part of which the second-level cache serves "
        "without the GPU's memory",
    ),
}
"""Figures that follow from counted ones."""

FOLLOWING = DERIVED | OF_COUNTED
"""Figures that are computed from those of a record, and not stored: see `derived`."""


def derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of measured figures with those that follow from them."""
    rate = row["operations"] / row["latency"]
    figures = {
        **row,
        "tflops": rate / 1e12,
        "share": rate / row["matmul_flops"],
        "bandwidth": (row["input_bytes"] + row["output_bytes"]) / row["latency"] / 1e9,
        "intensity": row["operations"] / row.get("model_bytes", math.nan),
        "temporary_bytes": row["peak_bytes"] - row["output_bytes"],
    }
    if "l2_bytes" not in row:
        return figures
    moved = row["dram_read_bytes"] + row["dram_write_bytes"]
    figures["measured_intensity"] = row["operations"] / moved if moved else math.nan
    return figures | {"l2_over_model": row["l2_bytes"] / row.get("model_bytes", math.nan)}
