"""What the reference says of the members of an Enum, with their values, and of fields: the comments behind or above them."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, Extension


class Members(Extension):
    """Lists the members of every Enum in its docstring, as attributes, and the fields of other classes that have a comment."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Called for each class when its members are known."""
        if cls.docstring is None or "Attributes:" in cls.docstring.value:
            return
        members = [each for each in cls.members.values() if isinstance(each, Attribute) and "property" not in each.labels]
        if any(str(base).endswith("Enum") for base in cls.bases):
            texts = {
                each.name: (f"`{str(each.value).strip(chr(39))}`", _comment(each)) for each in members if each.name.isupper()
            }
        else:
            texts = {each.name: ("", _comment(each)) for each in members if not each.name.startswith("_")}
        lines = [f"    {name}: {', '.join(filter(None, text))}" for name, text in texts.items() if any(text)]
        if lines:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])


def _comment(member: Attribute) -> str:
    """The comment behind a member, or the lines of one above it."""
    behind = member.source.splitlines()[0].partition("  # ")[2].strip()
    if behind or member.lineno is None:
        return behind
    lines, above = member.lines_collection[member.filepath], list[str]()  # type: ignore[index]
    for line in reversed(lines[: member.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return " ".join(above)
