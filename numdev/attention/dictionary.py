"""Unit and meaning of every setting of attention, of either pass, by the column in which a configuration has it."""

from __future__ import annotations

from numdev.attention.captured import Captured
from numdev.attention.distributions import DISTRIBUTIONS
from numdev.attention.groups import BACKWARD_GROUPS, GROUPS
from numdev.attention.naive import Naive
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.sdpa import Sdpa
from numdev.settings import declared

_Texts = dict[str, tuple[str, str]]  # unit and meaning, by the name of a column


def _of(*kinds: type, prefix: str = "") -> _Texts:
    """The settings that dataclasses declare, by their columns."""
    return {f"{prefix}{one.column}": (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}


PROBLEM: _Texts = {
    "type": ("", "class of numdev that states the problem"),
    "source.type": ("", "where q, k and v are from: the class of a distribution, drawn, or `Captured`, from a file"),
    "source.kind": (
        "",
        "distribution of the entries of q, k and v: uniform in [0, 1), normal, outliers, ...; empty where captured",
    ),
    **_of(*DISTRIBUTIONS, Captured, prefix="source."),
    "source.digest": ("", "SHA-256 of the file of captured tensors"),
    "shape.type": ("", "class of numdev that states the sizes of q, k and v"),
    "mask.type": ("", "class of numdev that states which keys a query sees"),
    **_of(GROUPS["problem"]),
}
"""Of the columns `problem.<setting>`."""

BACKWARD_PROBLEM = PROBLEM | _of(BACKWARD_GROUPS["problem"])

_KERNEL: _Texts = {
    "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
    "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
}
_ANY: _Texts = {
    "fmt": ("format", "q, k, v and what is returned, of an implementation that has no policy for each step"),
    "kind": ("", "of a point that cannot be measured as it is stated: which implementation it asks for"),
    "stated": ("", "of such a point: every setting that is stated, as on the command line"),
    "digest": ("", "SHA-256 of the sources of a function of one's own"),
}

VARIANT: _Texts = {
    "type": ("", "class of numdev that computes the attention: Tiled, Naive, Exact, Triton, ..."),
    "tiling.type": ("", "class of numdev that states the tiles"),
    "softmax.type": ("", "class of numdev that states the online recurrence"),
    **_of(GROUPS["precision"], prefix="precision."),
    **_of(GROUPS["tiling"], prefix="tiling."),
    **_of(GROUPS["softmax"], prefix="softmax."),
    **_of(Naive, Tiled, Triton, Sdpa, Custom),
    **_KERNEL,
    **_ANY,
    "order": ("", "in which order a kernel is asked to meet the tiles of keys; empty for its own"),
    "splits": ("count", "contiguous ranges of keys of a kernel, combined by their log-sum-exp; none: the kernel's own rule"),
}
"""Of the columns `variant.<setting>`, and of `baseline.<setting>`."""

BACKWARD_VARIANT: _Texts = {
    "type": ("", "class of numdev that computes the gradients: TiledBackward, NaiveBackward, ExactBackward, TritonBackward, ..."),
    "tiling.type": ("", "class of numdev that states the tiles"),
    "recompute.type": ("", "class of numdev that states how the backward pass recomputes"),
    **_of(BACKWARD_GROUPS["precision"], prefix="precision."),
    **_of(BACKWARD_GROUPS["tiling"], prefix="tiling."),
    **_of(BACKWARD_GROUPS["recompute"], prefix="recompute."),
    "turns.type": ("", "class of numdev that states a walk in which each tile of keys has an order of query tiles of its own"),
    "turns.together": ("count", "tiles of keys that walk in a shifted order together; empty where all walk backward"),
    "turns.tile": ("rows", "keys that one program owns"),
    "turns.unit": ("rows", "queries that it visits at a step"),
    **_of(TiledBackward),
    **_ANY,
    **_KERNEL,
    "order": ("", "in which order a kernel adds the tiles"),
    "tf32": ("", "whether a kernel multiplies FP32 with operands of 10 fraction bits"),
    **_of(BACKWARD_GROUPS["forward_precision"], prefix="forward."),  # of untiled attention, whose forward pass is a policy
    **{f"forward.{name}": said for name, said in VARIANT.items() if name not in ("kind", "stated", "digest")},
    "forward.type": ("", "class of numdev that makes O and LSE"),
}
"""Those of the backward pass; the settings of the forward pass lie in `forward`."""
