"""Unit and meaning of every setting of a backward variant, by the column in which a configuration states it."""

from __future__ import annotations

from numdev.attention import dictionary as forward
from numdev.attention.settings import BACKWARD_GROUPS
from numdev.attention.tiled import TiledBackward
from numdev.settings import declared


def _group(name: str, column: str) -> dict[str, tuple[str, str]]:
    return {f"{column}.{one.column}": (one.unit, one.text) for one in declared(BACKWARD_GROUPS[name]) if one.column}


PROBLEM = forward.PROBLEM | {one.column: (one.unit, one.text) for one in declared(BACKWARD_GROUPS["problem"]) if one.column}
"""Of the columns `problem.<setting>`."""

VARIANT: dict[str, tuple[str, str]] = {
    "type": ("", "class of numdev that computes the gradients: TiledBackward, NaiveBackward, ExactBackward, TritonBackward, ..."),
    "tiling.type": ("", "class of numdev that states the tiles"),
    "recompute.type": ("", "class of numdev that states how the backward pass recomputes"),
    **_group("precision", "precision"),
    **_group("tiling", "tiling"),
    **_group("recompute", "recompute"),
    "turns.type": ("", "class of numdev that states a walk in which each tile of keys has an order of query tiles of its own"),
    "turns.together": ("count", "tiles of keys that walk in a shifted order together; empty where all walk backward"),
    "turns.shared": ("", "whether dQ takes up the tiles of keys in the order in which the walk brings them"),
    "turns.tile": ("rows", "keys that one program owns"),
    "turns.unit": ("rows", "queries that it visits at a step"),
    **{one.column: (one.unit, one.text) for one in declared(TiledBackward) if one.column},
    **{name: forward.VARIANT[name] for name in ("fmt", "kind", "stated", "digest")},
    "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
    "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
    "order": ("", "in which order a kernel adds the tiles"),
    "tf32": ("", "whether a kernel multiplies FP32 with operands of 10 fraction bits"),
    **_group("forward_precision", "forward"),  # of untiled attention, whose forward pass is a policy
    **{f"forward.{name}": said for name, said in forward.VARIANT.items() if name not in ("kind", "stated", "digest")},
    "forward.type": ("", "class of numdev that makes O and LSE"),
}
"""Of the columns `variant.<setting>`, and of `baseline.<setting>`; those of the forward pass lie in `forward`."""
