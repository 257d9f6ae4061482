"""What the reference says of an Enum: its members with their values, and the comments behind them."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, Extension


class Members(Extension):
    """Lists the members of every Enum in its docstring, as attributes."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Called for each class when its members are known."""
        if cls.docstring is None or "Enum" not in map(str, cls.bases):
            return
        members = [each for each in cls.members.values() if isinstance(each, Attribute) and each.name.isupper()]
        lines = [f"    {each.name}: `{str(each.value).strip(chr(39))}`{_comment(each)}" for each in members]
        cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])


def _comment(member: Attribute) -> str:
    comment = member.source.partition("  # ")[2].strip()
    return f", {comment}" if comment else ""
