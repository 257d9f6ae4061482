"""The parts of a study's file: statements, entries of axes, scenarios, each checked and named in its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numdev.errors import BadInput
from numdev.nearest import choice
from numdev.results.manifest import EntryRole, Role, Scenario

Statements = Mapping[str, Any]  # a group and its option, or a dotted setting and its value


class Entry(NamedTuple):
    """One value of an axis: its label, what it states, and what it is to the claims."""

    label: Any
    statements: Statements
    role: EntryRole = EntryRole.SUBJECT


def scenario_of(name: str, own: Statements) -> Scenario:
    title = own.get("title", name)
    if not isinstance(title, str) or not title.strip():
        raise BadInput(f"study.scenarios.{name}.title", title, "give it in words, as a reader is to see it")
    role = choice(f"study.scenarios.{name}.role", Role, own.get("role", Role.BEYOND.value))
    return Scenario(name, title, role, str(own.get("stands_for", "")))


def entry_of(where: str, name: str, own: Statements) -> Entry:
    role = choice(f"{where}.role", EntryRole, own.get("role", EntryRole.SUBJECT.value))
    return Entry(name, {key: value for key, value in own.items() if key != "role"}, role)


def mapping(where: str, value: Any) -> Statements:
    """Settings with their values; nothing at all states nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(where, value, "give settings with their values, {setting: value}")
    return value
