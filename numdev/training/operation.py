"""Training as an operation: what measurements, records and reports must know of it."""

from __future__ import annotations

from numdev.attention.operation import environment
from numdev.measurement.operation import Operation, Output
from numdev.results.record import Column

_REFUSED = ("kind", "stated")  # what a study cannot measure has in place of a rung


def settings() -> tuple[Column, ...]:
    """Every setting of a task and of a rung, by the column in which a configuration states it."""
    from numdev.attention.dictionary import BACKWARD_VARIANT, VARIANT  # late: they import every attention and every task
    from numdev.settings import declared
    from numdev.training.data import Text
    from numdev.training.rung import Rung
    from numdev.training.scenes import Scenes
    from numdev.training.tasks import Language, TextToImage

    def of(*kinds: type, prefix: str = "") -> dict[str, tuple[str, str]]:
        return {prefix + one.column: (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}

    problem = {
        "type": ("", "class of numdev that states the task"),
        "data.type": ("", "class of numdev that states what it is trained on"),
        "data.digest": ("", "SHA-256 of the files of which it is made"),
        **of(Scenes, Text, prefix="data."),
        **of(Language, TextToImage),
    }
    attention = VARIANT | BACKWARD_VARIANT
    variant = {
        "type": ("", "class of numdev that states how a run differs"),
        **of(Rung),
        **{f"attention.{name}": text for name, text in attention.items() if name not in _REFUSED},
        **{name: VARIANT[name] for name in _REFUSED},
    }
    parts = {"problem": problem, "variant": variant}
    return tuple(Column(f"{part}.{name}", *text) for part, texts in parts.items() for name, text in texts.items())


TRAINING = Operation(
    name="training",
    golden=None,
    inputs=(),
    outputs=(Output("weights", "the weights after training"),),
    settings=settings,
    environment=environment,
    smaller="a smaller model (task.width, task.depth) or a smaller task.batch",
)
"""The training of a model, whose runs are compared with one another: there is no exact run."""
