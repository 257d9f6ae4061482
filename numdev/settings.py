"""A setting is a field of the object that it becomes; help, schema, dictionary and objects are made from the fields.

A field declares its sentence and unit in its metadata. `make` makes an object of values as YAML has them, from the types of the
fields; it knows no class.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, InitVar, dataclass, field, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from numdev.errors import BadInput, NotAChoice, one_of

E = TypeVar("E", bound=Enum)
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = "setting"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One thing that a user can set, as the metadata of a field declare it, and how it is called where it is read.

    A field without `text` is the object of another node; one with `nested` is an object whose settings lie in this node.

    Attributes:
        text: its meaning, for `--help`, the data dictionary and the reference.
        unit: of its value; empty where it has none.
        column: of tables, behind `problem.` or what the group is part of, where it is not the name; empty where there is none.
        overruled: settings of the same group that together replace this one, each with the value that does so, None for any.
        word: its name on the axis of a figure; empty where that is the name.
        follows: the setting or node that the command line takes it from, unless it is set.
        none: the word for None, of a setting that null leaves as it is.
        nested: the class of an object whose settings lie beside this field's, or under its name if `changes`.
        name: in its group; a dot leads into a nested node.
        default: of the command line, where it may refer to another setting.
        kind: the type of its value.
    """

    text: str = ""
    unit: str = ""
    column: str | None = None
    overruled: Mapping[str, Any] | None = None
    word: str = ""
    follows: str = ""
    none: str = ""
    nested: type | None = None
    changes: bool = False
    name: str = ""
    default: Any = None
    kind: Any = Any


def setting(default: Any, text: str, unit: str = "", **more: Any) -> Any:  # as `dataclasses.field`: the annotation is the type
    """A field of a dataclass that a user can set; see `Setting`. With the default None the object chooses its value."""
    return field(default=default, metadata={_KEY: Setting(text, unit, **more)})


def held(default: Any = MISSING, follows: str = "") -> Any:
    """A field for the object of another node, or for a value of one, that a user sets there: `${problem.head_dim}`."""
    return field(default=default, metadata={_KEY: Setting(follows=follows)})


def inline(kind: type) -> Any:
    """A field for an object whose settings lie in the node of the object that holds it."""
    return field(default_factory=kind, metadata={_KEY: Setting(nested=kind)})


def changes(kind: type) -> Any:
    """A field for changes to an object, `{field: value}`: each of its settings is null where it is unchanged."""
    return field(default=None, metadata={_KEY: Setting(nested=kind, changes=True)})


def _fields(kind: Callable[..., Any]) -> Mapping[str, tuple[Field[Any], Setting | None]]:
    """The fields of a dataclass, those of its initialisation alone included, and what they declare."""
    known: Mapping[str, Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    return {name: (each, each.metadata.get(_KEY)) for name, each in known.items()}


def declared(kind: type, prefix: str = "") -> Iterator[Setting]:
    """The settings that the fields of a dataclass declare, those of a nested one with its name in front."""
    hints = types_of(kind)
    for name, (each, said) in _fields(kind).items():
        if said is None:
            if isinstance(each.default_factory, type) and is_dataclass(each.default_factory):
                yield from declared(each.default_factory, f"{prefix}{name}.")
        elif said.changes and said.nested is not None:
            yield from (replace(one, default=None) for one in declared(said.nested, f"{prefix}{name}."))
        elif said.nested is not None:
            for one in declared(said.nested):
                yield replace(one, name=prefix + one.name, column=one.column and f"{prefix}{name}.{one.column}")
        elif said.text:
            default = each.default.value if isinstance(each.default, Enum) else each.default
            default = f"${{{said.follows}}}" if said.follows else default
            column = prefix + (said.column or name) if said.column != "" else ""
            yield replace(said, name=prefix + name, default=default, column=column, kind=hints.get(name, Any))


def node_of(kind: type) -> dict[str, Any]:
    """The entries of an object's node for other nodes: null, or the reference to what an entry follows."""
    held_ones = {name: said for name, (_, said) in _fields(kind).items() if said and not said.text and said.nested is None}
    return {name: f"${{{said.follows}}}" if said.follows else None for name, said in held_ones.items()}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a nested configuration with its dotted name: of `{"a": {"b": 1}}` it is `a.b`; a mapping is no value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def memoised(function: Function) -> Function:
    """`lru_cache` for functions of classes: mypy takes the hash of an object for that of its class."""
    return lru_cache(maxsize=256)(function)  # type: ignore[return-value]


@memoised
def types_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """Types of the arguments and of the result of a class or function; none if they exist only for a type checker."""
    try:
        hints = get_type_hints(kind)
    except NameError:
        return {}
    return {name: hint.type if isinstance(hint, InitVar) else hint for name, hint in hints.items()}


@memoised
def _parameters(kind: Callable[..., Any]) -> Mapping[str, Any]:
    """The default of each parameter, MISSING without one; of a function that takes any, a mapping that has all."""
    known = inspect.signature(kind).parameters.values()
    taken = defaultdict[str, Any](lambda: MISSING) if any(each.kind is each.VAR_KEYWORD for each in known) else dict[str, Any]()
    return taken | {each.name: MISSING if each.default is each.empty else each.default for each in known}


def make(kind: Callable[..., T], values: Mapping[str, Any], where: str) -> T:
    """The object of a class, or what a function returns, from values as YAML has them; None leaves out what has that default.

    Text becomes the member of an Enum, or what `parse` of its class makes of it; other values keep their types.

    Args:
        kind: a dataclass whose fields declare settings, or any annotated class or function.
        values: by argument. The settings of an object that lies in this node stand beside the others.
        where: the node, which errors name.

    Raises:
        BadInput: naming the setting.
    """
    values, arguments = dict(values), dict[str, Any]()
    for name, (_, said) in _fields(kind).items():
        if said is None or said.nested is None or (name in values and not isinstance(values[name], Mapping)):
            continue
        if said.changes:
            own = {one: value for one, value in (values.pop(name, None) or {}).items() if value is not None}
            arguments[name] = _converted_all(said.nested, own, f"{where}.{name}")
        elif name not in values:
            own = {one: values.pop(one) for one in [*_fields(said.nested)] if one in values}
            arguments[name] = make(said.nested, own, where)
    arguments |= _converted_all(kind, values, where)
    try:
        return kind(**arguments)
    except BadInput as error:
        name = error.field.partition(".")[2] or error.field
        group = error.field.removesuffix(name)
        if type(error) is not BadInput or error.field == f"{where}.{name}" or name.partition(".")[0] not in _fields(kind):
            raise
        hint = error.hint.replace(group, f"{where}.") if group else error.hint  # it names the group that objects are mostly in
        raise BadInput(f"{where}.{name}", error.value, hint) from None


def _converted_all(kind: Callable[..., Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments that are set, converted to their types."""
    known, hints, said = _parameters(kind), types_of(kind), _fields(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known and not isinstance(known, defaultdict):
            raise BadInput(
                f"{where}.{name}", value, f"{getattr(kind, '__name__', kind)} takes no such argument; {one_of(name, known)}"
            )
        one = said[name][1] if name in said else None
        if one and one.none and value == one.none:
            arguments[name] = None
        elif value is not None or known[name] is not None:
            arguments[name] = converted(f"{where}.{name}", hints.get(name, Any), value, one.text if one else "")
    return arguments


def converted(where: str, hint: Any, value: Any, text: str = "") -> Any:
    """A value of a configuration converted to a type; `text` states its meaning in an error.

    Raises:
        BadInput: naming the setting `where` and what it takes.
    """
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in arms:
        return None
    arms = tuple(arm for arm in arms if arm is not type(None))
    if isinstance(value, str):  # the class whose notation this is, if one has its own
        arms = tuple(arm for arm in arms if hasattr(arm, "is_named_by") and arm.is_named_by(value)) or arms
    errors = []
    for arm in arms:
        try:
            return _as(where, arm, value)
        except BadInput as error:
            errors.append(error)
    first = errors[0]
    if isinstance(first, NotAChoice):
        raise NotAChoice(where, value, first.known, text)
    raise BadInput(where, value, f"{first.hint}: {text}" if text else first.hint)


def _as(where: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum) and not isinstance(value, kind):
        return choice(where, kind, value)
    if isinstance(value, str) and hasattr(kind, "parse"):
        return named(where, kind.parse, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in _WORDS and type(value) is not kind:
        raise BadInput(where, value, f"give {_WORDS[kind]}")
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(converted(where, get_args(kind)[0], one) for one in value)
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return {name: converted(f"{where}.{name}", get_args(kind)[1], one) for name, one in value.items()}
    if get_origin(kind) in (tuple, Mapping):
        raise BadInput(where, value, "give a list" if get_origin(kind) is tuple else "give names with values, {name: value}")
    return value


def choice(field: str, kind: type[E], value: object) -> E:
    """The member of an Enum with this value.

    Raises:
        NotAChoice: naming the setting and its possible values.
    """
    known = [member.value for member in kind]
    if value not in known:
        raise NotAChoice(field, value, known)
    return kind(value)


def named(field: str, parse: Callable[[str], T], text: str) -> T:
    """`parse(text)`, whose error names the setting."""
    try:
        return parse(text)
    except BadInput as error:
        raise BadInput(field, text, error.hint) from None
