"""The circumstances under which a study repeats its question, as its file states them and its manifest keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class EntryRole(Enum):
    """What an entry of an axis is to the claims that compare the entries."""

    SUBJECT = "subject"  # what the claims speak of
    EXPECTED = "expected"  # what the claims say the subjects are like
    CONTROL = "control"  # what the subjects have to differ from for the comparison to mean anything
    ASIDE = "aside"  # measured beside the others and not judged


class Role(Enum):
    """What a scenario is to the source of a study's claims."""

    PAPER = "paper"  # the source states these circumstances
    ASSUMED = "assumed"  # the source leaves them open, and they are our assumption about it
    BEYOND = "beyond"  # where else we look
    CONTROL = "control"  # what the others are held against


@dataclass(frozen=True)
class Scenario:
    """Circumstances under which a study repeats its question.

    Attributes:
        name: in the study's file.
        title: what they are, for a reader: "uniform inputs, every step in F, FlashAttention-1".
        role: see `Role`.
        stands_for: the row of the source's table that this scenario repeats, where the claim is on a table.
    """

    name: str
    title: str
    role: Role = Role.BEYOND
    stands_for: str = ""

    def stated(self) -> dict[str, str]:
        """As a study's manifest keeps it."""
        return {"name": self.name, "title": self.title, "role": self.role.value, "stands_for": self.stands_for}


def scenarios_of(manifest: Mapping[str, Any]) -> dict[str, Scenario]:
    """The scenarios of a stored study, by name.

    A study whose points the command line changed is not what its source describes: all its scenarios lie beyond that, and
    their titles say what was changed.
    """
    found = {}
    for stated in manifest["scenarios"]:
        name, title, role = stated["name"], stated["title"], Role(stated["role"])
        if manifest["overrides"]:
            title, role = f"{title}, with overrides: {' '.join(manifest['overrides'])}", Role.BEYOND
        found[name] = Scenario(name, title, role, stated.get("stands_for", ""))
    return found


def is_old(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is of a numdev that stated neither scenarios nor a kind, so that its points cannot be read."""
    return not {"scenarios", "overrides", "kind"} <= manifest.keys()
