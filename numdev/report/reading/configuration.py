"""The data dictionary of a point's configuration: unit and meaning of every setting, by its name within its part."""

from __future__ import annotations

from numdev.attention.distributions import DISTRIBUTIONS
from numdev.settings import declared

PARTS = {
    "problem": "",
    "variant": "",
    "baseline": "of the baseline: ",
    "timing": "",
}
"""What a configuration consists of; a column is `<part>.<setting>`, and its meaning starts with these words."""

_SUM = "; behind `@`, after how many products the running sum is rounded to it; without, after each tile"

PROBLEM = {
    "type": ("", "class of numdev that states the problem"),
    "source.type": ("", "where q, k and v are from: the class of a distribution, drawn, or `Captured`, from a file"),
    "source.kind": (
        "",
        "distribution of the entries of q, k and v: uniform in [0, 1), normal, outliers, ...; empty where captured",
    ),
    **{f"source.{each.name}": (each.unit, each.text) for kind in DISTRIBUTIONS for each in declared(kind)},
    "source.path": ("", "file of captured tensors; `minilm` ships with numdev"),
    "source.layer": ("", "layer of a captured model; empty for all of them in turn"),
    "source.digest": ("", "SHA-256 of the file of captured tensors"),
    "shape.type": ("", "class of numdev that states the sizes of q, k and v"),
    "shape.batch": ("count", "sequences in a batch"),
    "shape.heads": ("count", "attention heads, each with a q of its own"),
    "shape.kv_heads": ("count", "heads of k and v; fewer than heads of q in grouped-query attention, 1 in multi-query attention"),
    "shape.queries": ("tokens", "length of q, and rows of the output in each head"),
    "shape.keys": ("tokens", "length of k and v, which is N where there are as many queries"),
    "shape.head_dim": ("entries", "d, the length of one row of q, k or v"),
    "mask.type": ("", "class of numdev that states which keys a query sees"),
    "mask.causal": ("", "whether a query sees no key behind its own position; the last query stands at the last key"),
    "mask.window": ("tokens", "a query sees only keys less far from its position than this; empty without a window"),
    "mask.key_lengths": ("tokens", "keys that exist in each batch entry, the rest is padding; empty where all do"),
    "scale": ("", "factor of Q K^T; empty for 1/sqrt(d)"),
}

_PRECISION = {
    "name": ("", "preset that the precision policy is, as precision= takes it; `custom` for any other"),
    "inputs": ("format", "q, k and v as the algorithm receives them"),
    "scores": ("format", "S, the product Q K^T and its scaling" + _SUM),
    "exponential": ("format", "the difference S - m, and its exponential"),
    "rescale": ("format", "the old maximum minus the new one, and its exponential alpha"),
    "row_sum": ("format", "l, alpha times the old sum, plus the sum of P" + _SUM),
    "probabilities": ("format", "P as it enters the product with V"),
    "values": ("format", "the product P V" + _SUM),
    "accumulator": ("format", "O between tiles, alpha times the old O plus P V, and its division by l"),
    "output": ("format", "O as it is returned"),
    "quantise.to": ("format", "grid that q, k and v are rounded to after division by their scale"),
    "quantise.scale": (
        "",
        "numbers of q, k and v that share one scale: of a tensor, block of rows, row, channel or thread; empty if microscaled",
    ),
    "quantise.block": ("rows", "rows of a head that share one scale, with a scale per block"),
    "quantise.block_q": ("rows", "the same for q alone; empty where it is that of k"),
    "quantise.hadamard": ("", "whether q and k are turned by a random Hadamard matrix before rounding, and back after it"),
    "quantise.smoothing": ("", "whose mean over tokens is taken out before rounding: none, k's, q's, or both"),
    "quantise.smoothing_block": ("tokens", "how many tokens of q share the mean that is taken out; empty for all"),
    "quantise.values": ("format", "v, where it is not quantised like q and k; empty where it is"),
    "quantise.values_scale": ("", "numbers of v that share one scale where v has a grid of its own; empty without a scale"),
    "quantise.seed": ("", "what the signs of the Hadamard matrix are drawn with"),
}

_TILING = {
    "type": ("", "class of numdev that states the tiles"),
    "br": ("rows", "Br, queries in one tile"),
    "bc": ("rows", "Bc, keys in one tile"),
    "order": ("", "in which order a row of queries meets the tiles of keys: forward, reverse, outside_in, strided or random"),
    "splits": ("count", "contiguous ranges of keys, each with a result of its own, combined by their log-sum-exp"),
    "stride": ("tiles", "from one tile to the next in the order `strided`"),
    "seed": ("", "what the order `random` is drawn with"),
}

_SOFTMAX = {
    "type": ("", "class of numdev that states the online recurrence"),
    "normalise": ("", "when O is divided by l: `each`, after every tile (FlashAttention-1), or `end`, once (FlashAttention-2)"),
    "maximum": (
        "",
        "maximum that exponentials are taken from: `running` (FlashAttention-2), or the tile's own, `local` (FlashAttention-1)",
    ),
    "exp": ("", "how the exponential of S - m is computed: exp, exp2, or exp2 by a named or written polynomial in some columns"),
    "scale_on": ("", "what 1/sqrt(d) is multiplied with: the scores, or the queries, which are rounded again"),
    "rescale_threshold": (
        "log 2",
        "how far a row's maximum must rise for O and l to be rescaled (FlashAttention-4); 0 rescales always",
    ),
    "p_scale": ("", "factor of P before it is rounded, taken out after the product with V"),
    "sum_over": ("", "what l adds up: `exponentials`, P before it is rounded, or `probabilities`, P as it meets V"),
    "tie_shift": ("", "factor of m in S - m where a row's largest score is tied (Qiu & Yao 2025); empty leaves ties alone"),
}

ATTENTION = {
    "type": ("", "class of numdev that computes the attention: Tiled, Naive, Exact, Triton, ..."),
    **{f"precision.{name}": said for name, said in _PRECISION.items()},
    **{f"tiling.{name}": said for name, said in _TILING.items()},
    **{f"softmax.{name}": said for name, said in _SOFTMAX.items()},
    "normalise": ("", "when untiled attention divides by l: `each`, P before the product with V, or `end`, O after it"),
    "count": ("", "whether the run counts its events, which are the columns `counter.*`; it changes no result"),
    "fmt": ("format", "q, k, v and what is returned, of an implementation that has no policy for each step"),
    "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
    "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
    "order": ("", "in which order a kernel is asked to meet the tiles of keys; empty for its own"),
    "splits": ("count", "contiguous ranges of keys of a kernel, combined by their log-sum-exp; none: the kernel's own rule"),
    "products": ("", "how a kernel multiplies FP32: `ieee`, or `tf32` with operands of 10 fraction bits"),
    "kernel": ("", "which kernel of numdev is asked for: auto, portable or hopper; the column `kernel` names what ran"),
    "backend": ("", "which implementation of PyTorch is asked for: flash, cudnn, efficient or math"),
    "function": ("", "where a function of one's own is imported from: `package.module:function`"),
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
