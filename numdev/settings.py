"""A setting is a field of the object that it becomes; help, schema, dictionary and objects are made from the fields.

A field declares its sentence and unit in its metadata. `make` makes an object of values as YAML has them, from the types of the
fields; it knows no class.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, InitVar, dataclass, field, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from numdev.errors import BadInput, NotAChoice

E = TypeVar("E", bound=Enum)
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
_KEY = "setting"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Overruled:
    """Settings of the same group that together replace another one; it is then read only if they have the value `value`.

    A value of None stands for any.
    """

    by: tuple[str, ...]
    value: Any = None


@dataclass(frozen=True)
class Setting:
    """One thing that a user can set.

    Attributes:
        name: in its group; a dot leads into a nested node.
        default: of the command line, where it may refer to another setting.
        text: its meaning, for `--help`, the data dictionary and the reference.
        unit: of its value; empty where it has none.
        column: of tables, behind `problem.` or what the group is part of, where it is not the name; empty where there is none.
        overruled: see `Overruled`.
        word: its name on the axis of a figure; empty where that is the name.
        kind: the type of its value.
    """

    name: str
    default: Any
    text: str
    unit: str
    column: str
    overruled: Overruled | None
    word: str = ""
    kind: Any = Any


@dataclass(frozen=True)
class _Declared:
    """A field of a dataclass: a setting, an object of another node, or an object whose settings lie in this node.

    Attributes:
        follows: the setting or node that the command line takes it from, unless it is set.
        none: the word for None, of a setting that null leaves as it is.
        nested: the class of an object whose settings lie beside this field's, or under its name if `changes`.
    """

    text: str = ""
    unit: str = ""
    column: str | None = None
    overruled: Overruled | None = None
    word: str = ""
    follows: str = ""
    none: str = ""
    nested: type | None = None
    changes: bool = False


def setting(  # a parameter for each thing that a setting may say
    default: Any,
    text: str,
    unit: str = "",
    *,
    column: str | None = None,
    overruled: Overruled | None = None,
    word: str = "",
    follows: str = "",
    none: str = "",
) -> Any:  # as `dataclasses.field`: the type is the annotation's
    """A field of a dataclass that a user can set; see `Setting`. With the default None the object chooses its value."""
    said = _Declared(text, unit, column, overruled, word, follows, none)
    return field(default=default, metadata={_KEY: said})


def held(default: Any = MISSING, follows: str = "") -> Any:
    """A field for the object of another node, or for a value of one, that a user sets there: `${problem.head_dim}`."""
    return field(default=default, metadata={_KEY: _Declared(follows=follows)})


def inline(kind: type) -> Any:
    """A field for an object whose settings lie in the node of the object that holds it."""
    return field(default_factory=kind, metadata={_KEY: _Declared(nested=kind)})


def changes(kind: type) -> Any:
    """A field for changes to an object, `{field: value}`: each of its settings is null where it is unchanged."""
    return field(default=None, metadata={_KEY: _Declared(nested=kind, changes=True)})


def _fields(kind: Callable[..., Any]) -> Mapping[str, Field[Any]]:
    """The fields of a dataclass, those of its initialisation alone included."""
    known: Mapping[str, Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    return known


def declared(kind: type, prefix: str = "") -> Iterator[Setting]:
    """The settings that the fields of a dataclass declare, those of a nested one with its name in front."""
    hints = types_of(kind)
    for name, each in _fields(kind).items():
        said: _Declared | None = each.metadata.get(_KEY)
        factory = each.default_factory
        if said is None:
            if isinstance(factory, type) and is_dataclass(factory):
                yield from declared(factory, f"{prefix}{name}.")
        elif said.nested is None:
            if said.text:
                column = prefix + (name if said.column is None else said.column) if said.column != "" else ""
                default = f"${{{said.follows}}}" if said.follows else each.default
                default = default.value if isinstance(default, Enum) else default
                kind_of = hints.get(name, Any)
                yield Setting(prefix + name, default, said.text, said.unit, column, said.overruled, said.word, kind_of)
        elif said.changes:
            for one in declared(said.nested, f"{prefix}{name}."):
                yield Setting(one.name, None, one.text, one.unit, one.column, one.overruled, one.word, one.kind)
        else:
            for one in declared(said.nested):
                column = f"{prefix}{name}.{one.column}" if one.column else ""
                yield Setting(prefix + one.name, one.default, one.text, one.unit, column, one.overruled, one.word, one.kind)


def node_of(kind: type) -> dict[str, Any]:
    """The entries of an object's node for other nodes: null, or the reference to what an entry follows."""
    plain = {name: each.metadata.get(_KEY) for name, each in _fields(kind).items()}
    nodes = {name: said for name, said in plain.items() if said is not None and not said.text and said.nested is None}
    return {name: f"${{{said.follows}}}" if said.follows else None for name, said in nodes.items()}


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
    for name, each in _fields(kind).items():
        said: _Declared | None = each.metadata.get(_KEY)
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
        group, _, name = error.field.partition(".")
        if type(error) is not BadInput or error.field == f"{where}.{name}" or name.partition(".")[0] not in _fields(kind):
            raise
        hint = error.hint.replace(f"{group}.", f"{where}.")  # it names the group that such objects are mostly in
        raise BadInput(f"{where}.{name}", error.value, hint) from None


def _converted_all(kind: Callable[..., Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments that are set, converted to their types."""
    known, hints, said = _parameters(kind), types_of(kind), _fields(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known and not isinstance(known, defaultdict):
            raise BadInput(f"{where}.{name}", value, f"{getattr(kind, '__name__', kind)} takes no such argument")
        one = said[name].metadata.get(_KEY) if name in said else None
        if one is not None and one.none and value == one.none:
            arguments[name] = None
        elif value is not None or known[name] is not None:
            arguments[name] = converted(f"{where}.{name}", hints.get(name, Any), value, one.text if one is not None else "")
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
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(converted(where, get_args(kind)[0], one) for one in value)
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
