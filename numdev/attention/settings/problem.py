"""What attention is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.settings import Overruled, setting

if TYPE_CHECKING:
    from numdev.attention.problem import Problem, Source


@dataclass
class ProblemSettings:
    """`Problem`, with its `Shape` and `Mask`; `n` is short for queries and keys."""

    _target_: str = "numdev.attention.settings.problem.problem"
    n: int = setting(
        1024,
        "queries and keys",
        "tokens",
        column="",
        overruled=Overruled(("problem.queries", "problem.keys")),
        word="sequence length N",
    )  # `source` is of the option: each has parameters of its own
    batch: int = setting(1, "sequences in a batch", "count", column="shape.batch", word="batch size")
    heads: int = setting(1, "attention heads, each with a q of its own", "count", column="shape.heads", word="heads")
    kv_heads: int = setting(
        "${.heads}",
        "heads of k and v; fewer than heads of q in grouped-query attention, 1 in multi-query attention",
        "count",
        column="shape.kv_heads",
        word="heads of k and v",
    )
    queries: int = setting(
        "${.n}", "length of q, and rows of the output in each head", "tokens", column="shape.queries", word="queries"
    )
    keys: int = setting(
        "${.n}", "length of k and v, which is N where there are as many queries", "tokens", column="shape.keys", word="keys"
    )
    head_dim: int = setting(
        64, "d, the length of one row of q, k or v", "entries", column="shape.head_dim", word="head dimension d"
    )
    causal: bool | None = setting(
        None,
        "whether a query sees no key behind its own position; the last query stands at the last key; "
        "empty for the mask of captured tensors, else false",
        column="mask.causal",
        word="causal mask",
    )
    window: int | None = setting(
        None,
        "a query sees only keys less far from its position than this; empty for that of captured tensors, else none",
        "tokens",
        column="mask.window",
        word="window",
    )
    key_lengths: list[int] | None = setting(
        None,
        "keys that exist in each batch entry, the rest is padding; empty for those of captured tensors, else all",
        "tokens",
        column="mask.key_lengths",
    )
    scale: float | None = setting(None, "factor of Q K^T; empty for that of captured tensors, else 1/sqrt(d)")
    source: Any = None


def problem(source: Source, **settings: Any) -> Problem:
    """Shapes, mask, scale and source."""
    from numdev.attention.problem import Problem, Shape

    sizes = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
    shape = Shape(**{name: settings[name] for name in sizes})
    stated = {name: settings[name] for name in ("causal", "window", "key_lengths") if settings[name] is not None}
    mask = source.mask(shape, **{name: tuple(value) if name == "key_lengths" else value for name, value in stated.items()})
    return Problem(source, shape, mask, settings["scale"])
