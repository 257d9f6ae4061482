"""How a run differs from the others of its task; each field of a `Rung` is a setting. Imports no torch: `--help` reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from numdev.attention.groups import BACKWARD_DEFAULTS, BACKWARD_GROUPS
from numdev.errors import BadInput
from numdev.settings import held, setting

if TYPE_CHECKING:
    from numdev.training.tasks import Task

APART = 1000  # seeds between one initialisation, or order of the data, and the next
_NUMERICS = "fp32, autocast_bf16, autocast_fp16 (with a scaled loss) or bf16_weights"


class Numerics(Enum):
    """Formats of weights and of products.

    `fp32`: everything in FP32, no TF32. `autocast_bf16` and `autocast_fp16`: FP32 weights under `torch.autocast`, FP16 with a
    scaled loss (Micikevicius et al. 2018). `bf16_weights`: weights, gradients and moments of the optimizer in BF16, the rest as
    under autocast.
    """

    FP32 = "fp32"
    BF16 = "autocast_bf16"
    FP16 = "autocast_fp16"
    BF16_WEIGHTS = "bf16_weights"

    @property
    def format(self) -> str:
        """The format in which a model calls attention."""
        return {Numerics.FP32: "fp32", Numerics.FP16: "fp16"}.get(self, "bf16")


class Restart(Enum):
    """A restart after half of the steps: `lossy` from a checkpoint whose weights and moments were rounded to BF16."""

    NONE = "none"
    EXACT = "exact"
    LOSSY = "lossy"
    WEIGHTS_ONLY = "weights_only"


@dataclass(frozen=True)
class Rung:
    """How a run differs: its attention, its formats, its seeds, or one of the controls.

    `attention` computes attention, forward and backward (`numdev.attention.base.Backward`). `ulp` moves the weight that
    `numdev.training.run.moved` names. A later rounding may take the move back: of the weight to BF16 under autocast, or of its
    first updates. Then the weights of the run are those of the reference again, which says nothing of chaos; 65,536 is one last
    place of BF16. `order` is explained in `Run.batches`, `watch` and `noise` in `numdev.training.watch`.
    Raises BadInput, also for an attention that does not compute in the format of the run.
    """

    attention: Any = held(follows="backward")
    numerics: Numerics | None = setting(
        None, f"formats of weights and products: {_NUMERICS}; null is that under which attention computes in its format"
    )
    init: int = setting(0, "which initialisation: replicate r starts from the weights of seed r + 1000 init")
    order: int = setting(
        0, "which order of the data: another number shows the same examples over the run in another order, by a seed of its own"
    )
    ulp: int = setting(0, "by how many last places of FP32 one weight is moved before training", "ulp")
    ranks: int = setting(1, "parts of each batch whose gradients are averaged, as those of data-parallel processes", "count")
    restart: Restart = setting(
        Restart.NONE,
        "what happens after half of the steps: none; exact, a stop and a resume from the checkpoint; lossy, from one in BF16; or "
        "weights_only, without the moments of the optimizer",
    )
    repeat: int = setting(0, "changes nothing: another number is another run of the same, which must come out the same")
    noise: float | None = setting(
        None,
        "plain attention with random errors of the size that the difference of `backward` from it has, times this: 0 is plain "
        "attention by the same code; null is `backward` itself",
    )
    rate: float = setting(1.0, "times the learning rate of the task: a fault that is planted, to see whether it is noticed")
    watch: bool = setting(
        False,
        "keep for each step the largest logit, ties, and how far attention deviates from exact attention; changes no weight",
    )
    seed: int = setting(0, "the replicate: the seed of the initial weights and of the data; a study has a point for each")

    def __post_init__(self) -> None:
        own = str(self.attention.format)
        if self.numerics is None:
            known = {each.format: each for each in (Numerics.FP32, Numerics.BF16, Numerics.FP16)}
            if own not in known:
                raise BadInput("precision", own, f"no run computes in it; give a precision of {', '.join(known)}")
            object.__setattr__(self, "numerics", known[own])
        elif own != (fmt := self.numerics.format):
            hint = f"rung.numerics={self.numerics.value} hands {fmt} to attention; "
            raise BadInput("precision", own, f"{hint}give precision=eager_{fmt} too, or a policy that returns {fmt}")
        for name, least in (("init", 0), ("order", 0), ("ranks", 1), ("repeat", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"rung.{name}", getattr(self, name), f"give an integer of at least {least}")
        if self.seed >= APART:
            raise BadInput("rung.seed", self.seed, f"give an integer from 0 to {APART - 1}")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise BadInput("rung.noise", self.noise, "give a dose of at least 0, or null")
        if self.noise is not None and self.watch:
            raise BadInput("rung.watch", True, "random errors are of no pass that can be watched; give rung.noise=null")
        if not 0 < self.rate < math.inf:
            raise BadInput("rung.rate", self.rate, "give a number above 0; 1 changes nothing")
        if self.ulp and self.numerics is Numerics.BF16_WEIGHTS:
            hint = "weights in BF16 do not hold a last place of FP32; give 0, or numerics with FP32 weights"
            raise BadInput("rung.ulp", self.ulp, hint)


@dataclass(frozen=True)
class Reference:
    """The run that a rung is compared with: plain attention, or exact, and nothing else changed; watched where the rung is."""

    numerics: Numerics | None = setting(
        None, f"those of the run that a rung is compared with: {_NUMERICS}; null is the rung's own"
    )
    exact: bool = setting(False, "whether that run has exact attention, in FP64 and rounded once, in place of plain attention")

    def of(self, variant: Rung, problem: Task) -> Rung:
        """The reference of a rung."""
        from numdev.arithmetic.formats import Format
        from numdev.attention.exact import RoundedBackward
        from numdev.attention.vendor.vanilla import VanillaBackward

        if not isinstance(variant, Rung):  # options of every operation lie in one group
            raise BadInput("baseline", "reference", "it is a run of numdev train; choose a baseline of the operation")
        numerics: Any = self.numerics or variant.numerics
        attention = (RoundedBackward if self.exact else VanillaBackward)(Format.parse(numerics.format))
        return Rung(attention, numerics, watch=variant.watch, seed=variant.seed)


GROUPS: dict[str, type] = {"rung": Rung, **{name: kind for name, kind in BACKWARD_GROUPS.items() if name != "problem"}}
"""The groups and nodes of training whose settings are declared here or with attention; an option of `task` has its own."""
DEFAULTS: dict[str, Any] = BACKWARD_DEFAULTS | {"tiling.head_dim": None}  # which follows from the task
"""Defaults that differ from those of the fields."""
