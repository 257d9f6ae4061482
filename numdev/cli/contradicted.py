"""Which scenarios of a study the command line leaves what they are.

The command line leaves out a scenario that it would make into another: one that states another value of a setting, itself or by
the file of an option, and one without the value of an axis that other scenarios have, or, where none has it, that states the axis
itself. It is refused where no scenario is left. `seeds` changes no scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numdev.cli.layers import Layers
from numdev.cli.requests import written
from numdev.cli.statements import Statements, mapping
from numdev.errors import BadInput

_ABOUT = ("axes", "title", "role", "stands_for")


def settings_of(scenario: Statements) -> Statements:
    """What a scenario states of its points."""
    return {key: value for key, value in scenario.items() if key not in _ABOUT}


def left(
    name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any], layers: Layers, stated: Statements
) -> dict[str, Statements]:
    """The scenarios of the study `name` that what the command line states does not make into others.

    Raises:
        BadInput: if there are none.
    """
    task = {key: value for key, value in stated.items() if key != "seeds"}
    axes = {one: fields["axes"] | mapping("axes", own.get("axes")) for one, own in scenarios.items()}
    holding = {key: [one for one in axes if _holds(layers, key, value, axes[one].get(key))] for key, value in task.items()}

    def stays(one: str, own: Statements) -> bool:
        swept = [key for key in task if key in axes[one]]
        of_its_own = mapping("axes", own.get("axes"))
        has = all(one in holding[key] if holding[key] else key not in of_its_own for key in swept)
        others = {key: value for key, value in task.items() if key not in swept}
        return has and _keeps(layers, others, settings_of(own), fields["base"])

    found = {one: own for one, own in scenarios.items() if stays(one, own)}
    if not found:
        overrides = " ".join(f"{key}={written(value)}" for key, value in task.items())
        mend = "leave that out, or change a copy of the study's file"
        raise BadInput("study", name, f"each of its scenarios is about other settings than {overrides}; {mend}")
    return found


def _holds(layers: Layers, key: str, value: Any, entries: Any) -> bool:
    """Whether an axis has a value."""
    return isinstance(entries, list) and layers.typed(key, value) in [layers.typed(key, entry) for entry in entries]


def _keeps(layers: Layers, task: Statements, own: Statements, base: Statements) -> bool:
    """Whether everything that a scenario states is as stated under these overrides."""
    plain, after = layers.ground(base, own).settings, layers.ground(base, own, task).settings
    stated = (key for key, value in layers.stands_for(own).items() if value is not None and key in plain)
    return all(key in after and after[key] == plain[key] for key in stated)
