"""From YAML files and statements to the request for a point.

Hydra composes once for each choice of an option (`composed`); the values of a point are set in a copy (`Composer.request`).
Studies and single points state settings in layers, of which later ones override earlier ones.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import numdev
from numdev.attention.groups import preset, presets
from numdev.cli import schema
from numdev.errors import BadInput, NotHonoured, NumdevError, one_of

OPERATION, STUDY = "operation", "study"  # the groups whose options are no part of a point
CHOICE = "override /operation@_global_.operation"
"""How the defaults list of a study's file chooses the operation of its points."""
_OF_THE_RUN = ("device", "results", "fresh", "metrics", "dry_run")
_OF_THE_USER = ("command-line", "hydra.searchpath in command-line")  # the names that Hydra gives to the user's config folders
_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")

Flat = dict[str, Any]  # dotted name to value
Statements = Mapping[str, Any]  # a group and its option, or a dotted setting and its value


def config_folder() -> Path:
    """The folder of the configs that ship with numdev: in an installed package, or beside it in a checkout."""
    package = Path(numdev.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise NumdevError(f"configs: there is no folder of that name in {package} or beside it; install numdev again")


def make_importable(sources: Iterable[Any]) -> None:
    """Let `_target_` and `attention.function` name modules of the user's, behind everything that can be imported already.

    They lie in the working directory, in a folder of `--config-dir`, or in the folder around that: a checkout with `configs/`
    beside its modules works from any working directory. `sources` are Hydra's `runtime.config_sources`.
    """
    own = [Path(source.path).resolve() for source in sources if source.provider in _OF_THE_USER]
    for folder in (Path.cwd(), *(each for one in own for each in (one, one.parent))):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


class PresetSource(ConfigSource):
    """Options that need no file, since the objects that they make have names: `numdev://presets`, behind all folders."""

    @staticmethod
    def scheme() -> str:
        return "numdev"

    def load_config(self, config_path: str) -> ConfigResult:
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(_preset(config_path)), {"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return not config_path or bool(presets(config_path))

    def is_config(self, config_path: str) -> bool:
        return _preset(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return list(presets(config_path)) if results_filter is not ObjectType.GROUP else []


def _preset(config_path: str) -> dict[str, Any] | None:
    group, _, option = config_path.removesuffix(".yaml").rpartition("/")
    return preset(group, option)


class PresetsLast(SearchPathPlugin):
    """Adds `PresetSource` behind the folders that are searched."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("numdev", f"{PresetSource.scheme()}://presets")


def register() -> None:
    """Make schemas and presets known to Hydra, in this process: other applications of Hydra have configs of their own."""
    schema.register()
    for plugin in (PresetSource, PresetsLast):
        Plugins.instance().register(plugin)


@dataclass(frozen=True)
class Library:
    """The YAML files of config folders, of which the first that has a file counts; each file is read once.

    Attributes:
        folders: that of numdev, and those that the user adds with `--config-dir`.
    """

    folders: tuple[Path, ...]

    @cached_property
    def _read(self) -> dict[str, dict[str, Any]]:
        return {}

    def leaf(self, group: str, option: str) -> dict[str, Any]:
        """The settings of an option of a group in its own file, without its defaults list.

        Raises:
            BadInput: if the group has no such option.
        """
        return {name: value for name, value in self.load(f"{group}/{option}").items() if name != "defaults"}

    def options(self, group: str) -> list[str]:
        """The options of a group, such as the studies of `study`: files, and those that need none."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")} | {*presets(group)})

    def study(self, name: str) -> dict[str, Any]:
        """A study's file, its fields checked.

        Raises:
            BadInput: if there is no such study, or the file is not one.
        """
        return study_fields(name, self.load(f"{STUDY}/{name}"))

    def operation_of(self, study: str) -> str | None:
        """The option of `operation` that a study's file chooses in its defaults list; None where it chooses none.

        Raises:
            BadInput: if the defaults list says anything else.
        """
        if study not in self.options(STUDY):
            return None  # it is made in Python
        chosen = [item for item in self.load(f"{STUDY}/{study}").get("defaults", []) if item != "_self_"]
        if not chosen:
            return None
        if len(chosen) > 1 or not isinstance(chosen[0], Mapping) or list(chosen[0]) != [CHOICE]:
            raise BadInput("study", study, f"its defaults list may hold only {CHOICE}: NAME")
        return str(chosen[0][CHOICE])

    def load(self, name: str) -> dict[str, Any]:
        """A file by its name without `.yaml`, or an option that needs none, as plain containers."""
        if name not in self._read:
            group, _, option = name.rpartition("/")
            path = next((path for folder in self.folders if (path := folder / f"{name}.yaml").is_file()), None)
            leaf = preset(group, option) if path is None else _contents(path)
            if leaf is None:
                raise BadInput(group, option, one_of(option, self.options(group)))
            self._read[name] = leaf
        return self._read[name]


def _contents(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BadInput("configs", str(path), f"it could not be read ({reason})") from None
    if not isinstance(loaded, dict):
        raise BadInput("configs", str(path), "it must hold keys and values")
    return {str(key): value for key, value in loaded.items()}


def study_fields(name: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a study, checked against `StudyConfig`; those that its file leaves out have their defaults."""
    own, known = {key: value for key, value in loaded.items() if key != "defaults"}, schema.StudyConfig.__annotations__
    if unknown := next((key for key in own if key not in known), None):
        raise BadInput("study", name, f"a study has no field {unknown}; {one_of(unknown, known)}")
    try:
        return plain(OmegaConf.merge(OmegaConf.structured(schema.StudyConfig), own), throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInput("study", name, f"{str(error).splitlines()[0]}; see docs/how-to/add-study.md") from None


def plain(config: Any, *, resolve: bool = False, throw_on_missing: bool = False) -> dict[str, Any]:
    """A configuration as plain containers; references are kept as they are written unless `resolve` is true."""
    container = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=throw_on_missing)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def overrides_of(hydra: Any) -> list[str]:
    """The overrides of a job, as they were written; `hydra` is Hydra's own part of the configuration."""
    texts: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [str(text) for text in texts]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name; a mapping is never a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(settings: Flat) -> dict[str, Any]:
    """The inverse of `flat`."""
    config: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, name = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return config


def written(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def resolved(settings: Flat) -> Flat:
    """The settings with every reference replaced by the value that it names; references to nodes are kept.

    Raises:
        BadInput: for a reference that leads nowhere, or to itself.
    """
    config, values = OmegaConf.create(nested(settings)), dict(settings)
    for key, value in settings.items():
        if isinstance(value, str) and "${" in value:
            try:
                target = OmegaConf.select(config, key)
            except OmegaConfBaseException as error:
                name = _last_reference(settings, key)
                raise BadInput(name, settings[name], f"{str(error).splitlines()[0]}; refer to a setting that there is") from None
            values[key] = value if isinstance(target, DictConfig) else plain_value(target)
    return values


def _last_reference(settings: Flat, key: str) -> str:
    """The last setting of a chain of references that begins with this one, which is the one to correct."""
    chain = [key]
    while (
        (target := reference(settings[chain[-1]], chain[-1])) in settings
        and target not in chain
        and "${" in str(settings[target])
    ):
        chain.append(str(target))
    return chain[-1]


def plain_value(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def reference(value: str, key: str) -> str | None:
    """The dotted name that `${name}` or `${.name}`, as the value of a setting, refers to; None where it is neither."""
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return None
    dots, name = match.groups()
    parts = key.split(".")
    return ".".join([*(parts[: len(parts) - len(dots)] if dots else []), name])


def type_hint(message: str) -> str:
    """Which type a setting takes, derived from OmegaConf's message."""
    first = message.splitlines()[0]
    if kind := re.search(r"could not be converted to (\w+)", first):
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return f"give {kinds.get(kind[1], kind[1])}"
    if "is not a valid bool" in first:
        return "give true or false"
    if "Cannot convert" in first and "to string" in first:
        return "give text"
    if "is not Optional" in first:
        return "it cannot be null"
    return "give a list" if "not a ListConfig" in first else first


@dataclass(frozen=True)
class Statement:
    """The origin of a setting's value: the setting and its value, or the option of a group, whose file states it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={written(self.value)}"


Said = Mapping[str, Statement]


@dataclass(frozen=True)
class Request:
    """The settings of a point, and which of them are stated explicitly.

    Attributes:
        raw: every setting by dotted name, as it is written.
        said: what states each explicit setting, by dotted name. Defaults are not explicit, and null states nothing.
        options: the option of each group.
        foreign: stated settings that the chosen options do not have.
    """

    raw: Flat
    said: Said
    options: Mapping[str, str]
    foreign: tuple[NotHonoured, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting, nested; references to values are resolved, those to nodes are not."""
        return nested(resolved(self.raw))


@lru_cache(maxsize=512)
def composed(folders: tuple[Path, ...], name: str, overrides: tuple[str, ...] = ()) -> tuple[DictConfig, dict[str, str]]:
    """Compose a primary file with overrides by Hydra; also the option of each group of a point. Not to be changed."""
    register()
    with _initialised(folders, name) as search:
        config = compose(name, [*search, *overrides], return_hydra_config=True)
    choices = groups_of_points(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


@contextmanager
def _initialised(folders: tuple[Path, ...], name: str) -> Iterator[list[str]]:
    """Hydra as the running command has initialised it, or over these folders; yields what names the further ones.

    Hydra looks for the primary file before it reads where else to search.
    """
    if GlobalHydra.instance().is_initialized():
        yield []
        return
    first = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), folders[0])
    others = [f"file://{folder}" for folder in folders if folder != first]
    with initialize_config_dir(str(first), version_base="1.3"):
        yield [f"hydra.searchpath=[{','.join(others)}]"] if others else []


def groups_of_points(choices: Mapping[Any, Any]) -> dict[str, str]:
    """The groups of a point with their options, of all that Hydra has chosen."""
    return {
        str(group): str(option)
        for group, option in choices.items()
        if option is not None and not str(group).startswith("hydra/") and group not in (OPERATION, STUDY)
    }


@dataclass(frozen=True)
class Composer:
    """Makes requests from a primary file and layers of statements.

    Attributes:
        folders: that of numdev, and those that the user adds with `--config-dir`.
        name: of the primary file.
        operation: the option of `operation`; None for that of the primary file, which may also have no such group.
    """

    folders: tuple[Path, ...]
    name: str = "config"
    operation: str | None = None

    @cached_property
    def library(self) -> Library:
        return Library(self.folders)

    @property
    def choices(self) -> dict[str, str]:
        """The groups of a point with their default options."""
        return self._composed()[1]

    @property
    def of(self) -> dict[str, Any]:
        """The node that makes the operation."""
        node = self._composed()[0].get(OPERATION)
        return {} if node is None else plain(node, resolve=True)

    def _composed(self, *overrides: str) -> tuple[DictConfig, dict[str, str]]:
        operation = [f"{OPERATION}={self.operation}"] if self.operation else []
        return composed(self.folders, self.name, (*operation, *overrides))

    def config(self, options: Mapping[str, str]) -> DictConfig:
        """A configuration of one's own, with these options in place of the defaults.

        Raises:
            BadInput: if a group has no such option.
        """
        config, choices = self._composed()
        config = copy.deepcopy(config)
        for group, option in options.items():
            self.library.leaf(group, option)
            if option != choices.get(group):
                config[group] = self._composed(f"{group}={option}")[0][group]
        return config

    def values(self, group: str = "", option: str = "") -> Flat:
        """Every setting by its dotted name, references as they are written; only the group's where an option is named."""
        settings = plain(self.config({group: option} if group else {}))
        return dict(flat({name: node for name, node in settings.items() if (name == group if group else name != OPERATION)}))

    def of_others(self, group: str, key: str) -> list[str]:
        """The options of a group that have a setting."""
        return [option for option in self.library.options(group) if key in dict(flat({group: self.library.leaf(group, option)}))]

    def before_equals(self) -> list[str]:
        """The names that an override may have: groups and settings."""
        return [*self.choices, *([OPERATION] if self.of else []), *self.known()]

    def known(self) -> list[str]:
        """The names of all settings, with those that an option alone has, but for what only refers to others."""
        values = self.values()
        for group in self.choices:
            for option in self.library.options(group):
                values |= {key: one for key, one in flat({group: self.library.leaf(group, option)}) if key not in values}
        declared = schema.settings()
        refers = {key for key, one in values.items() if isinstance(one, str) and "${" in one}
        return [key for key in values if key in declared or not ("._" in key or key in refers)]

    def request(self, *layers: Statements) -> Request:
        """The request that layers of statements make, each above the one before it.

        Choosing an option states what its file holds. It also drops what earlier layers state of the node that it replaces within
        its group, such as the source of a problem.

        Raises:
            BadInput: for a setting that does not exist or has another type.
        """
        chosen, values, said = self._stack(layers)
        config, foreign = self.config(chosen), list[NotHonoured]()
        names = dict(flat(plain(config)))
        for key, value in values.items():
            if key in _OF_THE_RUN:
                raise BadInput(key, value, "it belongs to the run, not to a point of a study; give it on the command line")
            if key in names and "._" not in key:
                set_value(config, key, value)
                continue
            group = key.partition(".")[0]
            option = chosen.get(group, self.choices.get(group, ""))
            able = self.of_others(group, key) if option else []
            if not able:
                raise BadInput(key, value, f"there is no such setting; {one_of(key, self.known(), most=12)}")
            if value is not None:
                hint = f"{group}={option} does not read it; leave it out, or take {group}={' or '.join(able)}"
                foreign.append(NotHonoured(key, value, hint))
        raw = dict(flat({name: node for name, node in plain(config).items() if name != OPERATION}))
        return Request(raw, _not_null(said, raw, chosen), {**self.choices, **chosen}, tuple(foreign))

    def said(self, raw: Flat, *layers: Statements) -> dict[str, Statement]:
        """The origin of each setting of the layers whose final value is not null.

        An option whose file names a constructor, `_target_`, states that choice; any other option states what its file holds.
        """
        chosen, _, said = self._stack(layers)
        return _not_null(said, raw, chosen)

    def _stack(self, layers: Sequence[Statements]) -> tuple[dict[str, str], Flat, dict[str, Statement]]:
        """The chosen options by group, the values that override them, and what states each setting."""
        chosen, values, said = dict[str, str](), Flat(), dict[str, Statement]()
        for layer in layers:
            self.check_replaced(layer)
            choices, own = self.split(layer)
            for group, option in choices.items():
                chosen[group] = option
                leaf = dict(flat({group: self.library.leaf(group, option)}))
                said = {key: one for key, one in said.items() if one.name != group}
                for key in [key for key in values if key.startswith(f"{group}.")]:
                    if key in leaf or self._replaces_node(group, option, key):
                        del values[key]
                        said.pop(key, None)
                names = [group] if f"{group}._target_" in leaf else [key for key in leaf if "._" not in key]
                said |= dict.fromkeys(names, Statement(group, option))
            values |= dict(flat(own))
            said |= {key: Statement(key, value) for key, value in flat(own)}
        return chosen, values, said

    def _replaces_node(self, group: str, option: str, key: str) -> bool:
        """Whether an option lacks a setting of a node within its group that other options have."""
        return key.count(".") > 1 and key not in self.values(group, option) and bool(self.of_others(group, key))

    def check_replaced(self, layer: Statements) -> None:
        """Check a layer for an option of whose file nothing is left, since values of the layer itself replace it.

        Raises:
            NotHonoured: naming the group.
        """
        choices, own = self.split(layer)
        values = dict(flat(own))
        for group, option in choices.items():
            of_file = {key: value for key, value in flat({group: self.library.leaf(group, option)}) if value is not None}
            if of_file and all(values.get(key, value) not in (None, value) for key, value in of_file.items()):
                stronger = " and ".join(f"{key}={written(values[key])}" for key in of_file)
                raise NotHonoured(group, option, f"{stronger} replaces all that it states; leave one of them out")

    def split(self, statements: Statements) -> tuple[dict[str, str], dict[str, Any]]:
        """Options of groups, and values."""
        choices = {}
        for group in (key for key in statements if key in self.choices):
            option = statements[group]
            if isinstance(option, (Mapping, list)):
                raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
            choices[group] = str(option)
        return choices, {key: value for key, value in statements.items() if key not in choices}

    def stands_for(self, statements: Statements) -> Flat:
        """The options and values that are stated, and what the files of the options state."""
        choices, values = self.split(statements)
        leaves = {group: self.library.leaf(group, option) for group, option in choices.items()}
        return dict(flat(leaves)) | choices | dict(flat(values))

    def typed(self, key: str, value: Any) -> Any:
        """A value of the type of its setting."""
        config = self.config({})
        return set_value(config, key, value) if key in dict(flat(plain(config))) else value


def mapping(where: str, value: Any) -> Statements:
    """Settings with their values; nothing at all states nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(where, value, "give settings with their values, {setting: value}")
    return value


def set_value(config: DictConfig, key: str, value: Any) -> Any:
    """Set a value in a configuration; returns it as the setting's type has it.

    Raises:
        BadInput: if it is of another type.
    """
    try:
        OmegaConf.update(config, key, value, merge=False)
        return value if isinstance(value, str) and "${" in value else plain_value(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        raise BadInput(key, value, type_hint(str(error))) from None


def _not_null(said: Said, raw: Flat, chosen: Mapping[str, str]) -> dict[str, Statement]:
    """The statements whose setting is not null."""
    return {key: one for key, one in said.items() if key in chosen or raw.get(key, one.value) is not None}


@lru_cache(maxsize=8)
def composer(folders: tuple[Path, ...], name: str = "config", operation: str | None = None) -> Composer:
    """The composer of some folders, kept with the files that it has read."""
    return Composer(folders, name, operation)
