"""What a user can set of a training run beside its task, and the constructors that the nodes name.

The declarations import no torch, since `--help` and completion read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.attention.groups import BACKWARD_DEFAULTS, BACKWARD_GROUPS
from numdev.errors import BadInput
from numdev.nearest import choice
from numdev.settings import setting

if TYPE_CHECKING:
    from numdev.attention.base import Differentiable
    from numdev.training.rung import Numerics, Rung
    from numdev.training.task import Task

_NUMERICS = "fp32, autocast_bf16, autocast_fp16 (with a scaled loss) or bf16_weights"


@dataclass
class RungSettings:
    """`Rung`: how a run differs from the others of its task. Its attention is the option of `backward`."""

    _target_: str = "numdev.training.settings.rung"
    attention: Any = "${backward}"
    numerics: str | None = setting(
        None, f"formats of weights and products: {_NUMERICS}; null is that under which attention computes in its format"
    )
    init: int = setting(0, "which initialisation: replicate r starts from the weights of seed r + 1000 init")
    order: int = setting(
        0, "which order of the data: another number shows the same examples over the run in another order, by a seed of its own"
    )
    ulp: int = setting(0, "by how many last places of FP32 one weight is moved before training", "ulp")
    ranks: int = setting(1, "data-parallel processes that share each batch", "count")
    restart: str = setting(
        "none",
        "what happens after half of the steps: none; exact, a stop and a resume from the checkpoint; lossy, from one in BF16; or "
        "weights_only, without the moments of the optimizer",
    )
    repeat: int = setting(0, "changes nothing: another number is another run of the same, which must come out the same")
    watch: bool = setting(
        False,
        "keep for each step the largest logit, ties, and how far attention deviates from exact attention; changes no weight",
    )


GROUPS: dict[str, type] = {"rung": RungSettings, **{name: kind for name, kind in BACKWARD_GROUPS.items() if name != "problem"}}
"""The groups and nodes of training whose settings are declared here or with attention; an option of `task` has its own."""

DEFAULTS: dict[str, Any] = BACKWARD_DEFAULTS | {"tiling.head_dim": None}  # which follows from the task
"""Defaults that differ from those of the fields."""


def rung(attention: Differentiable, numerics: str | None, restart: str, *, watch: bool = False, **settings: int) -> Rung:
    """The rung; its attention computes in the format of the run.

    Raises:
        BadInput: naming the setting.
    """
    from numdev.training.rung import Numerics, Restart, Rung

    own = str(attention.format)
    if numerics is None:
        if own not in _WITH_FORMAT:
            raise BadInput("precision", own, f"no run computes in it; give a precision of {', '.join(_WITH_FORMAT)}")
        numerics = _WITH_FORMAT[own]
    chosen = choice("rung.numerics", Numerics, numerics)
    if own != format_of(chosen):
        fmt = format_of(chosen)
        mend = (
            f"rung.numerics={numerics} hands {fmt} to attention; give precision=eager_{fmt} too, or a policy that returns {fmt}"
        )
        raise BadInput("precision", own, mend)
    return Rung(attention, chosen, restart=choice("rung.restart", Restart, restart), watch=watch, **settings)


_WITH_FORMAT = {"fp32": "fp32", "bf16": "autocast_bf16", "fp16": "autocast_fp16"}


def format_of(numerics: Numerics) -> str:
    """The format in which a model under these numerics calls attention."""
    given = {value: fmt for fmt, value in _WITH_FORMAT.items()}
    return given.get(numerics.value, "bf16")


@dataclass(frozen=True)
class Reference:
    """The run that a rung is compared with: plain attention, and nothing else changed. It is watched where the rung is."""

    numerics: str | None = setting(None, f"those of the run that a rung is compared with: {_NUMERICS}; null is the rung's own")

    def of(self, variant: Rung, problem: Task) -> Rung:
        """The reference of a rung.

        Raises:
            BadInput: naming `baseline.numerics`.
        """
        from numdev.arithmetic.formats import Format
        from numdev.attention.vendor.vanilla import VanillaBackward
        from numdev.training.rung import Numerics, Rung

        numerics = variant.numerics if self.numerics is None else choice("baseline.numerics", Numerics, self.numerics)
        return Rung(VanillaBackward(Format.parse(format_of(numerics))), numerics, watch=variant.watch)
