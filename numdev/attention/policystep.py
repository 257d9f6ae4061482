"""One step of a precision policy: what it may hold, its casts, and its form in each replicate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import Format
from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput

Step = Cast | Dot | Microscaled | Quantised


def as_step(name: str, allowed: tuple[type, ...], value: Step | Format | str) -> Step:
    """The step `name`, which may be one of `allowed`, from a value object, a format or a text.

    A cast becomes a `Dot` where the step is a product or a sum; a microscaled format becomes `Quantised` inputs.

    Raises:
        BadInput: naming the step, for a text that says none, and for a value of another kind.
    """
    found = _parsed(name, allowed, value) if isinstance(value, str) else Cast(value) if isinstance(value, Format) else value
    if isinstance(found, Cast) and Dot in allowed:
        return Dot(found)
    if isinstance(found, Microscaled) and Quantised in allowed:
        return Quantised(found)
    if not isinstance(found, allowed):
        kinds = " or ".join(kind.__name__ for kind in allowed)
        raise BadInput(f"precision.{name}", value, f"give a {kinds}, a format, or a text such as bf16")
    return found


def _parsed(name: str, allowed: tuple[type, ...], text: str) -> Step:
    try:
        if Dot in allowed:
            return Dot.parse(text)
        takes_blocks = Microscaled in allowed or Quantised in allowed
        return Microscaled.parse(text) if takes_blocks and Microscaled.is_named_by(text) else Cast.parse(text)
    except BadInput as error:
        raise BadInput(f"precision.{name}", text, error.mend) from None


def casts_of(step: Step) -> Iterator[Cast]:
    """The casts of a step: one, but two of quantised inputs, whose values may have a grid of their own."""
    for part in (step.to, step.values or step.to) if isinstance(step, Quantised) else (step,):
        yield part.accumulate if isinstance(part, Dot) else part.element if isinstance(part, Microscaled) else part


def reseeded(step: Step, seed: int) -> Step:
    """A step whose stochastic casts have a seed of the replicate; the casts of a Dot and of quantised inputs too."""
    if isinstance(step, Dot):
        return replace(step, accumulate=_reseeded(step.accumulate, seed))
    if isinstance(step, Quantised):
        values = None if step.values is None else _grid(step.values, seed)
        return replace(step, to=_grid(step.to, seed), values=values)
    return _grid(step, seed)


def _grid(grid: Cast | Microscaled, seed: int) -> Cast | Microscaled:
    if isinstance(grid, Microscaled):
        return replace(grid, element=_reseeded(grid.element, seed))
    return _reseeded(grid, seed)


def _reseeded(cast: Cast, seed: int) -> Cast:
    return replace(cast, seed=cast.seed + (seed << 32)) if cast.rounding is Rounding.STOCHASTIC else cast
