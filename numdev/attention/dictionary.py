"""Unit and meaning of every setting of attention, of either pass, by the column in which a configuration has it."""

from __future__ import annotations

from numdev.attention.captured import Captured
from numdev.attention.groups import BACKWARD_GROUPS, GROUPS
from numdev.attention.naive import Naive
from numdev.attention.problem import DISTRIBUTIONS
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.sdpa import Sdpa
from numdev.settings import declared

_Texts = dict[str, tuple[str, str]]  # unit and meaning, by the name of a column


def _of(*kinds: type, prefix: str = "") -> _Texts:
    """The settings that dataclasses declare, by their columns."""
    return {f"{prefix}{one.column}": (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}


def _in(groups: dict[str, type], *names: str) -> _Texts:
    """Of groups whose objects an implementation holds."""
    return {column: text for name in names for column, text in _of(groups[name], prefix=f"{name}.").items()}


def _types(*places: str) -> _Texts:
    return {
        f"{place}type": ("", f"class of numdev that {place[:-1] or 'it'} is, such as Tiled, Normal or Mask") for place in places
    }


PROBLEM: _Texts = {
    **_types("", "source.", "shape.", "mask."),
    "source.kind": (
        "",
        "distribution of the entries of q, k and v: uniform in [0, 1), normal, ...; empty where captured",
    ),
    **_of(*DISTRIBUTIONS, Captured, prefix="source."),
    "source.digest": ("", "SHA-256 of the file of captured tensors"),
    **_of(GROUPS["problem"]),
}
"""Of the columns `problem.<setting>`."""

BACKWARD_PROBLEM = PROBLEM | _of(BACKWARD_GROUPS["problem"])

_POINT: _Texts = {
    "kind": ("", "of a point that cannot be measured as it is stated: which implementation it asks for"),
    "stated": ("", "of such a point: every setting that is stated, as on the command line"),
    "digest": ("", "SHA-256 of the sources of a function of one's own"),
}
_KERNEL: _Texts = {
    "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
    "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
    "order": ("", "in which order a kernel is asked to meet the tiles; empty for its own"),
    "splits": ("count", "contiguous ranges of keys of a kernel, combined by their log-sum-exp; none: the kernel's own rule"),
    "fmt": ("format", "q, k, v and what is returned, of an implementation that has no policy for each step"),
}
_FORWARD: _Texts = {
    **_types("", "tiling.", "softmax."),
    **_in(GROUPS, "precision", "tiling", "softmax"),
    **_of(Naive, Tiled, Triton, Sdpa, Custom),
    **_KERNEL,
}
VARIANT = _FORWARD | _POINT
"""Of the columns `variant.<setting>`, and of `baseline.<setting>`."""

BACKWARD_VARIANT: _Texts = {
    **_types("", "tiling.", "recompute.", "turns."),
    **_in(BACKWARD_GROUPS, "precision", "tiling", "recompute"),
    "turns.together": ("count", "tiles of keys that walk in a shifted order together; empty where all walk backward"),
    "turns.tile": ("rows", "keys that one program owns"),
    "turns.unit": ("rows", "queries that it visits at a step"),
    **_of(TiledBackward),
    **{name: said for name, said in _KERNEL.items() if name != "splits"},
    **_POINT,
    "tf32": ("", "whether a kernel multiplies FP32 with operands of 10 fraction bits"),
    **_of(BACKWARD_GROUPS["forward_precision"], prefix="forward."),  # of untiled attention, whose forward pass is a policy
    **{f"forward.{name}": said for name, said in _FORWARD.items()},
}
"""Those of the backward pass; the settings of the forward pass lie in `forward`."""
