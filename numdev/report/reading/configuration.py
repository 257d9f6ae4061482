"""The data dictionary of a point's configuration: unit and meaning of every setting, by its name within its part."""

from __future__ import annotations

from numdev.attention.captured import Captured
from numdev.attention.distributions import DISTRIBUTIONS
from numdev.attention.naive import Naive
from numdev.attention.settings import GROUPS
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.sdpa import Sdpa
from numdev.settings import declared

PARTS = {
    "problem": "",
    "variant": "",
    "baseline": "of the baseline: ",
    "timing": "",
}
"""What a configuration consists of; a column is `<part>.<setting>`, and its meaning starts with these words."""

_Texts = dict[str, tuple[str, str]]  # unit and meaning, by the name of a column


def _of(*kinds: type) -> _Texts:
    """What dataclasses declare of their settings, by the columns in which these stand."""
    return {one.column: (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}


def _group(name: str) -> _Texts:
    return {f"{name}.{column}": said for column, said in _of(GROUPS[name]).items()}


_SOURCES = (*DISTRIBUTIONS, Captured)
PROBLEM: _Texts = {
    "type": ("", "class of numdev that states the problem"),
    "source.type": ("", "where q, k and v are from: the class of a distribution, drawn, or `Captured`, from a file"),
    "source.kind": (
        "",
        "distribution of the entries of q, k and v: uniform in [0, 1), normal, outliers, ...; empty where captured",
    ),
    **{f"source.{column}": said for column, said in _of(*_SOURCES).items()},
    "source.digest": ("", "SHA-256 of the file of captured tensors"),
    "shape.type": ("", "class of numdev that states the sizes of q, k and v"),
    "mask.type": ("", "class of numdev that states which keys a query sees"),
    **_of(GROUPS["problem"]),
}

ATTENTION: _Texts = {
    "type": ("", "class of numdev that computes the attention: Tiled, Naive, Exact, Triton, ..."),
    "tiling.type": ("", "class of numdev that states the tiles"),
    "softmax.type": ("", "class of numdev that states the online recurrence"),
    **{name: said for group in ("precision", "tiling", "softmax") for name, said in _group(group).items()},
    **_of(Naive, Tiled, Triton, Sdpa, Custom),
    "fmt": ("format", "q, k, v and what is returned, of an implementation that has no policy for each step"),
    "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
    "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
    "order": ("", "in which order a kernel is asked to meet the tiles of keys; empty for its own"),
    "splits": ("count", "contiguous ranges of keys of a kernel, combined by their log-sum-exp; none: the kernel's own rule"),
    "kind": ("", "of a point that cannot be measured as it is stated: which implementation it asks for"),
    "stated": ("", "of such a point: every setting that is stated, as on the command line"),
    "digest": ("", "SHA-256 of the sources of a function of one's own"),
}

TIMING = {
    "type": ("", "class of numdev that states how long something is timed"),
    "seconds": ("s", "time for all timed calls together, within the least and the most of them"),
    "least": ("count", "calls that are timed at least"),
    "most": ("count", "calls that are timed at most"),
}

_SETTINGS = {"problem": PROBLEM, "variant": ATTENTION, "baseline": ATTENTION, "timing": TIMING}


def setting(column: str) -> tuple[str, str] | None:
    """Unit and meaning of a column `<part>.<setting>`, or None for what is no known setting."""
    part, _, name = column.partition(".")
    known = _SETTINGS.get(part, {}).get(name)
    return known and (known[0], f"{PARTS[part]}{known[1]}")
