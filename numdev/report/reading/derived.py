"""Columns of a point that follow from its configuration, each only where its operation has the settings that it follows from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

NEEDS: dict[str, tuple[str, ...]] = {
    "attention": ("variant.type", "problem.shape.keys"),
    "policy": ("variant.precision.name",),
    "tiling.area": ("variant.tiling.br", "variant.tiling.bc"),
    "problem.shape.keys": ("problem.shape.keys",),
}
"""The settings without which an operation has no such column."""


def absent(settings: Collection[str] | None) -> frozenset[str]:
    """The columns that an operation of these settings does not have; None where a study does not state any, and may have all."""
    if settings is None:
        return frozenset()
    return frozenset(name for name, needed in NEEDS.items() if not set(needed) <= set(settings))


def derived(config: Mapping[str, Any], flat: Mapping[str, Any], kernel: str, absent: Collection[str] = ()) -> dict[str, Any]:
    """The columns by name, without those that are `absent`.

    Args:
        config: of a record.
        flat: the same with dotted names.
        kernel: that really ran.
        absent: see `absent`.
    """
    facts: dict[str, Any] = {"attention": _attention(flat), "kernel": kernel, "format": _format(flat), "policy": _policy(flat)}
    facts |= {"tiling.area": _area(flat), "pairing": _digest({name: config.get(name) for name in ("problem", "baseline")})}
    return {name: value for name, value in facts.items() if name not in absent}


def _format(config: Mapping[str, Any]) -> str:
    """The format of the output, `bf16` for `bf16:toward_zero`; that of the baseline where the variant does not say."""
    kernels = config.get("variant.fmt")
    output = config.get("variant.precision.output") or kernels or config.get("baseline.precision.output") or ""
    return str(output).partition(":")[0]


def _policy(config: Mapping[str, Any]) -> str:
    """`uniform` or `kernel` where the precision is such a preset, else its own name; compiled kernels are what they are."""
    if _attention(config) == "vanilla":
        return "eager"
    if config.get("variant.type") in ("Triton", "Sdpa", "Flex"):
        return "kernel"
    name = str(config.get("variant.precision.name") or "")
    if (name and name == _format(config)) or name.startswith("uniform_"):
        return "uniform"
    return "kernel" if name.startswith("kernel_") else name


def _attention(config: Mapping[str, Any]) -> str:
    """The implementation: `tiled`, `triton`, `sdpa flash`, or the kernel of ours that a setting names, `triton hopper`."""
    which = config.get("variant.backend") or config.get("variant.kernel")
    name = str(config.get("variant.kind") or config.get("variant.type", "")).lower()
    return f"{name} {which}" if which and which != "auto" else name


def _area(config: Mapping[str, Any]) -> int | None:
    """`Br * Bc`."""
    if "variant.tiling.br" not in config:
        return None
    return int(config["variant.tiling.br"]) * int(config["variant.tiling.bc"])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def configured(name: str, points: pd.DataFrame) -> pd.Series[Any] | None:
    """The values of a setting, named as on the command line, in the records of some points; None where they do not have it.

    `problem.n` is the number of keys where there are as many queries.
    """
    if name == "problem.n" and {_KEYS, _QUERIES} <= set(points):
        return points[_KEYS].where(points[_KEYS] == points[_QUERIES])
    group, _, own = name.partition(".")
    places = [f"problem.{part}{own}" for part in ("", "shape.", "mask.", "source.")] if group == "problem" else []
    group = group.replace("forward_precision", "forward.precision")
    known = _GROUPS.get(name, (f"variant.{group}.{own}", *places))
    columns = [points[column] for column in known if column in points]
    if not columns:
        return None
    return columns[0] if own else columns[0].fillna(columns[-1]).astype("string").str.lower()


_KEYS, _QUERIES = "problem.shape.keys", "problem.shape.queries"
_GROUPS = {
    "operation": ("operation",),
    "precision": ("variant.precision.name",),
    "forward_precision": ("variant.forward.precision.name",),
    "problem": ("problem.source.kind", "problem.source.type"),
    "attention": ("variant.kind", "variant.type"),
    "backward": ("variant.kind", "variant.type"),
}
"""The columns that name the option of a group: the second, a class, where the first is missing."""
