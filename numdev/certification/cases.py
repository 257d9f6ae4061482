"""The inputs on which a kernel is judged: small problems, each of which makes some faults large.

A case draws q, k, v and dO in FP64 from each of its seeds, rounds them once to the format of the kernel, and says what is masked.
Replicates are batch entries. Its last tile is ragged for every size of a tile, since neither 1000 nor 150 is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.captured import Captured
from numdev.attention.mask import Mask
from numdev.attention.problem import (
    Normal,
    NormalLogits,
    Outliers,
    Problem,
    Shape,
    Sink,
    Source,
    StudentT,
    Tied,
    Uniform,
    draw_do,
)

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, float, Cast, torch.Generator], None]
_RISE = 12.0  # of the scores from the first key to the last, or back
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inputs:
    """Rounded inputs of a case in the dtype of the kernel, on the CPU, whose replicates are batch entries.

    Attributes:
        whole: those of all replicates that the kernel is given, where these are of the first one.
    """

    tensors: Tensors
    mask: Mask
    scale: float
    replicates: int = 1
    whole: Tensors | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self["q"], self["k"], self["v"]

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys."""
        return self["q"].shape[-2], self["k"].shape[-2]

    @property
    def scores(self) -> int:
        return self["q"].shape[:-1].numel() * self["k"].shape[-2]

    @property
    def first(self) -> Inputs:
        """The first replicate."""
        batch = len(self["q"]) // self.replicates
        mask = replace(self.mask, key_lengths=self.mask.key_lengths and self.mask.key_lengths[:batch])
        return Inputs({name: x[:batch] for name, x in self.tensors.items()}, mask, self.scale, whole=self.tensors)

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self["q"].shape[1] // self["k"].shape[1]


def _columns(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """Nearly constant columns of v: `O = c sum(P~) / l` shows what the row sum and the division lose, far below an ulp of c."""
    base = torch.linspace(1.0, 1.9, x["v"].shape[-1], dtype=torch.float64)
    x["v"] = base + torch.rand(x["v"].shape, generator=generator, dtype=torch.float64) / 8


def _null(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """V with `softmax(S) V = 0` but for its own rounding: what is left of O are errors, of which the output keeps all bits."""
    weights = torch.softmax(cast(x["q"]) @ cast(x["k"]).mT * scale, -1)
    x["v"] = x["v"] - weights.mT @ torch.linalg.solve(weights @ weights.mT, weights @ x["v"])


def _ramp(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """`_null`, with scores that rise with the key in even heads and fall in odd ones, so that either order meets rescales."""
    keys, falls = x["k"].shape[-2], torch.arange(x["k"].shape[1]) % 2 == 1
    rise = torch.linspace(0.0, _RISE, keys, dtype=torch.float64) / scale
    x["q"][..., 0] = 1.0
    x["k"][..., 0] = torch.where(falls[:, None], rise.flip(0), rise)
    _null(x, scale, cast, generator)


def _tiny(x: Tensors, scale: float, cast: Cast, generator: torch.Generator) -> None:
    """V below the normal numbers of FP16, and exact in BF16 and FP32 by its scale of a power of two."""
    x["v"] = x["v"] * 2.0**-20


@dataclass(frozen=True)
class Case:
    """A kind of inputs.

    Attributes:
        name: by which a report and a command name it.
        shows: the errors that it makes large, in words.
        names: whether the culprit of a failure is looked for on it too.
    """

    name: str
    shows: str
    source: Source = field(default_factory=Normal)
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    queries: int = 32
    keys: int = 1000
    mask: Mask = Mask()
    change: Change | None = None
    names: bool = False
    head_dim: int | None = None

    def draw(self, seeds: range, fmt: Format, head_dim: int) -> Inputs:
        """The inputs of some seeds, and dO for the backward pass; the same on every machine."""
        shape = Shape(self.batch, self.heads, self.kv_heads, self.queries, self.keys, self.head_dim or head_dim)
        problem, cast = Problem(self.source, shape, self.mask), Cast(fmt)

        def drawn(seed: int) -> Tensors:
            seed %= self.source.replicates(shape) or seed + 1  # captured tensors have so many
            tensors = {name: x.clone() for name, x in problem.inputs(seed).items()}
            if self.change is not None:
                self.change(tensors, problem.softmax_scale, cast, torch.Generator().manual_seed(seed + 7919))
            return tensors | draw_do(problem, seed, _CPU)

        replicates = [drawn(seed) for seed in seeds]
        tensors = {name: cast(torch.cat([each[name] for each in replicates])).to(fmt.dtype) for name in replicates[0]}
        lengths = self.mask.key_lengths and self.mask.key_lengths * len(seeds)
        return Inputs(tensors, replace(self.mask, key_lengths=lengths), problem.softmax_scale, len(seeds))


_SMALL = Case("small", "", batch=2, heads=4, kv_heads=4, queries=70, keys=150)
CASES = (
    Case("normal", "the usual error", names=True),
    Case("uniform", "sums of one sign, which grow with the keys", Uniform()),
    Case("student t", "a few large entries", StudentT()),
    Case("large logits", "saturated rows, and errors of the scores", NormalLogits(4.0), names=True),
    Case("outliers", "errors of the scale and of the scores", Outliers()),
    Case("ties", "rows with equal largest scores", Tied(copies=4)),
    Case("sink", "a row sum of one large and many small terms", Sink(), names=True),
    Case("columns", "errors of the row sum and of the division", change=_columns),
    Case("null", "errors of the scores and of P", change=_null),
    Case("ramp", "rescales in either order of the tiles", change=_ramp, names=True),
    Case("long", "sums over many tiles", queries=16, keys=6000, change=_ramp, names=True),
    Case("many queries", "sums over many tiles of queries", queries=1000, keys=72, names=True),
    Case("tiny values", "flushed or saturated values", change=_tiny),
    replace(_SMALL, name="causal", shows="the causal limit", mask=Mask(causal=True), names=True),
    replace(_SMALL, name="tall causal", shows="more queries than keys", queries=150, keys=70, mask=Mask(causal=True), names=True),
    replace(_SMALL, name="window", shows="the limits of a window", mask=Mask(causal=True, window=40), names=True),
    replace(_SMALL, name="key lengths", shows="padded keys", mask=Mask(key_lengths=(90, 150)), names=True),
    replace(_SMALL, name="grouped heads", shows="which head of k and v a query reads", kv_heads=2, names=True),
    replace(_SMALL, name="one key", shows="a softmax of one score", keys=1),
    Case("few keys", "roundings within one tile of any size", heads=4, kv_heads=4, queries=96, keys=16, names=True),
    replace(_SMALL, name="one query", shows="decoding", queries=1, keys=1000),
    Case("captured", "tensors of a trained model", Captured("minilm"), heads=2, queries=256, keys=256, head_dim=32, names=True),
)
"""Every case, in the order in which they are judged."""
