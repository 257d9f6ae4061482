"""How a run differs from the others of its task."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from numdev.attention.base import Differentiable
from numdev.errors import BadInput

APART = 1000  # seeds between one initialisation, or order of the data, and the next


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


class Restart(Enum):
    """What happens after half of the steps.

    `none`; `exact`: the run is stopped and resumed from its checkpoint; `lossy`: from a checkpoint whose weights and moments were
    rounded to BF16; `weights_only`: from a checkpoint without the moments of the optimizer, which start from zero again.
    """

    NONE = "none"
    EXACT = "exact"
    LOSSY = "lossy"
    WEIGHTS_ONLY = "weights_only"


@dataclass(frozen=True)
class Rung:
    """How a run differs: its attention, its formats, its seeds, or one of the controls.

    Attributes:
        attention: what computes attention, forward and backward.
        numerics: see `Numerics`.
        init: replicate r starts from the weights of seed `r + 1000 init`.
        order: 0 is the order of the task; another number is another order of the same examples (`Run.batches`).
        ulp: by how many last places of FP32 one weight is moved before training (`numdev.training.state.moved`). A later rounding
            may take the move back: of the weight to BF16 under autocast, or of its first updates. Then the weights of the run are
            those of the reference again, which says nothing of chaos; 65,536 is one last place of BF16.
        ranks: processes that share each batch.
        restart: see `Restart`.
        repeat: changes nothing; another number is another run of the same, for the sham.
        watch: whether each step keeps the figures of attention (`numdev.training.watch`); it changes no bit of the weights.
    """

    attention: Differentiable
    numerics: Numerics = Numerics.BF16
    init: int = 0
    order: int = 0
    ulp: int = 0
    ranks: int = 1
    restart: Restart = Restart.NONE
    repeat: int = 0
    watch: bool = False

    def __post_init__(self) -> None:
        for name, least in (("init", 0), ("order", 0), ("ranks", 1), ("repeat", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"rung.{name}", getattr(self, name), f"give an integer of at least {least}")
        if self.watch and self.ranks > 1:
            hint = f"each of {self.ranks} processes sees its share of a batch alone; give rung.ranks=1"
            raise BadInput("rung.watch", True, hint)
        if self.ulp and self.numerics is Numerics.BF16_WEIGHTS:
            hint = "weights in BF16 do not hold a last place of FP32; give 0, or numerics with FP32 weights"
            raise BadInput("rung.ulp", self.ulp, hint)
