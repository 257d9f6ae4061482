"""Unit and meaning of every setting of attention, by the column in which a configuration states it."""

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
"""Of the columns `problem.<setting>`."""

VARIANT: _Texts = {
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
"""Of the columns `variant.<setting>`, and of `baseline.<setting>`."""
