"""Checks that what would be measured reads every explicit setting; refuses a setting that it would ignore.

A class that declares `accepted_settings` states which settings it reads; any other class reads the arguments of its own node, and
what they refer to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from numdev.attention.accepted_settings import AcceptedSettings
from numdev.attention.base import Implementation
from numdev.cli import nodes, schema
from numdev.cli.compose import Flat, Library, Request, Said, config_folder, reference
from numdev.cli.nodes import TARGET
from numdev.errors import NotHonoured


def check(request: Request) -> None:
    """Check a request before anything is built.

    Raises:
        NotHonoured: naming the settings that are stated and not read, the variant, and what would read them.
    """
    if request.foreign:
        raise request.foreign[0]
    said = request.said
    if not said:
        return
    variant = nodes.place(request.config, "variant")
    read = _read(request.raw, variant)
    if ignored := [name for name in said if name not in read]:
        one = _implementation(request.raw, variant)
        raise _refusal(ignored[0], said, _why(ignored, request, one, accepted_by(request.raw, one)))
    for name, rule in _overruled():
        others = [f"{name.partition('.')[0]}.{other}" for other in rule.by]
        if _is_stated(said, name) and all(
            _is_stated(said, other) and rule.value in (None, request.raw[other]) for other in others
        ):
            stronger = " and ".join(str(said[other]) for other in others)
            raise _refusal(name, said, f"{stronger} overrides it completely; leave it out")


def check_built(request: Request, variant: Any, problem: Any) -> None:
    """Check for settings that are read only under another setting; then as `check_effective`.

    Raises:
        NotHonoured: naming the setting, and the setting under which it is read, or the values that have an effect.
    """
    parts = [variant]
    if not isinstance(variant, Implementation) and is_dataclass(variant):  # it holds the one that says what it reads
        parts = [getattr(variant, field.name) for field in fields(variant)]
    for part in parts:
        for name, reader in part.idle.items() if isinstance(part, Implementation) else ():
            if name in request.said:
                reads = f"{kind_of(request)} reads {_called(name, request.said)} only with {reader}"
                raise _refusal(name, request.said, f"{reads}; leave it out, or give {reader} too")
        check_effective(request, part, problem)


def check_effective(request: Request, made: Any, problem: Any) -> None:
    """Check for values that cannot have an effect on the problem.

    Raises:
        NotHonoured: naming the setting, and the values that have one.
    """
    for error in made.ineffective(getattr(problem, "shape", None)) if isinstance(made, Implementation) else ():
        if error.field in request.said:
            raise _refusal(error.field, request.said, error.mend)


def kind_of(request: Request) -> str:
    """The measured option, such as `attention=sdpa`; the name of the class for a variant that is not an option of a group."""
    place = _implementation(request.raw, nodes.place(request.config, "variant"))
    if place in request.options:
        return f"{place}={request.options[place]}"
    return str(request.raw[f"{place}.{TARGET}"]).rpartition(".")[2]


def reads(request: Request) -> frozenset[str]:
    """The settings and nodes that the point of a request reads."""
    return _read(request.raw, nodes.place(request.config, "variant"))


def accepted_by(raw: Flat, path: str) -> AcceptedSettings:
    """The settings that a node reads."""
    kind = nodes.made_by(raw[f"{path}.{TARGET}"]) if f"{path}.{TARGET}" in raw else None
    declared = getattr(kind, "accepted_settings", None)  # which a class of another operation need not have
    return declared if isinstance(declared, AcceptedSettings) else AcceptedSettings(under(raw, path))


def under(raw: Flat, path: str) -> frozenset[str]:
    """The arguments of a node and of those in it, and the settings that they refer to, directly or through another node."""
    names: set[str] = set()
    waiting = [path]
    while waiting:
        prefix = waiting.pop()
        if prefix != path and (own := _declared_by(raw, prefix)) is not None:
            names |= {prefix, *own.names}
            continue
        for name, value in raw.items():
            if name != prefix and not name.startswith(f"{prefix}."):
                continue
            if name in names or "._" in name:
                continue
            names.add(name)
            target = reference(value, name) if isinstance(value, str) else None
            if target is not None:
                waiting.append(target)
    return frozenset(names)


def _declared_by(raw: Flat, path: str) -> AcceptedSettings | None:
    """The declaration of the class of a node's object; None if it is not a node, or its class declares nothing."""
    name = raw.get(f"{path}.{TARGET}")
    declared = getattr(nodes.made_by(name) if name else None, "accepted_settings", None)
    return declared if isinstance(declared, AcceptedSettings) else None


def _implementation(raw: Flat, variant: str) -> str:
    """The node within the variant whose class declares what it accepts; otherwise the node of the variant."""
    for name, value in raw.items():
        target = reference(value, name) if isinstance(value, str) and name.startswith(f"{variant}.") else None
        if target is not None and _declared_by(raw, target) is not None:
            return target
    return variant


def _read(raw: Flat, variant: str) -> frozenset[str]:
    """Everything that a point reads, and the nodes that hold it: an option that names a constructor states only its group."""
    settings = accepted_by(raw, variant).names
    always = {"seeds", variant, "problem", "baseline"} | under(raw, "problem") | under(raw, "baseline")
    read = always | settings
    return frozenset(read | {name.rpartition(".")[0] for name in read})


@lru_cache(maxsize=1)
def _overruled() -> tuple[tuple[str, Any], ...]:
    """The settings that others override completely, and these others."""
    return tuple((name, one.overruled) for name, one in schema.settings().items() if one.overruled is not None)


@lru_cache(maxsize=32)
def _options(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The contents of numdev's own files of a group."""
    library = Library((config_folder(),))
    return {option: library.leaf(group, option) for option in library.options(group)}


def _able(group: str, settings: Iterable[str]) -> Iterator[str]:
    for option, leaf in _options(group).items():
        declared = getattr(nodes.made_by(leaf[TARGET]), "accepted_settings", None) if TARGET in leaf else None
        if isinstance(declared, AcceptedSettings) and declared.names.issuperset(settings):
            yield option


def _is_stated(said: Said, name: str) -> bool:
    """Whether a setting is stated by name, and not by the file of an option, which values override."""
    return name in said and said[name].name == name


def _why(ignored: list[str], request: Request, variant: str, reads: AcceptedSettings) -> str:
    first, *others = ignored
    it, option = _called(first, request.said), kind_of(request)
    if refusal := reads.refusal(first, option):
        return refusal
    also = "".join(f", nor {name}" for name in others)
    able = list(_able(variant, ignored))
    mend = f", or take {variant}={' or '.join([', '.join(able[:-1]), able[-1]] if able[1:] else able)}" if able else ""
    return f"{option} does not read {it}{also}; leave {'them' if others else 'it'} out{mend}"


def _called(name: str, said: Said) -> str:
    """How an error message refers to the setting."""
    return "it" if said[name].name == name else f"{name}, which it states"


def _refusal(name: str, said: Said, why: str) -> NotHonoured:
    return NotHonoured(said[name].name, said[name].value, why)
