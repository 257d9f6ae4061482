"""From YAML files and statements to the request for a point.

Hydra composes once for each option (`composed`); the values of a point replace those of its options (`Composer.request`). Studies
and single points state settings in layers, of which later ones override earlier ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import numdev
from numdev.attention.groups import preset
from numdev.attention.groups import presets as presets_of_objects
from numdev.cli import schema
from numdev.cli.schema import nested
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


@lru_cache(maxsize=1)
def _shared() -> dict[str, dict[str, Any]]:
    """The options of `configs/presets.yaml`, by group and name."""
    return plain(OmegaConf.load(config_folder() / "presets.yaml"))


def presets(group: str) -> list[str]:
    """The options of a group that have no file of their own."""
    return [*_shared().get(group, ()), *presets_of_objects(group)]


class PresetSource(ConfigSource):
    """Options without a file of their own: `numdev://presets`, behind all folders."""

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
        if not config_path:
            return ["precision", *_shared()] if results_filter is not ObjectType.CONFIG else []
        return presets(config_path) if results_filter is not ObjectType.GROUP else []


def _preset(config_path: str) -> dict[str, Any] | None:
    group, _, option = config_path.removesuffix(".yaml").rpartition("/")
    return _shared().get(group, {}).get(option) or preset(group, option)


class PresetsLast(SearchPathPlugin):
    """Adds `PresetSource` behind the folders that are searched."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("numdev", f"{PresetSource.scheme()}://presets")


def register() -> None:
    """Make schemas and presets known to Hydra, in this process: other applications of Hydra have configs of their own."""
    schema.register()
    for plugin in (PresetSource, PresetsLast):
        Plugins.instance().register(plugin)


@lru_cache(maxsize=1024)
def _loaded(folders: tuple[Path, ...], name: str) -> dict[str, Any] | None:
    """A file by its name without `.yaml`, of the first folder that has it, or an option that needs none; None without either."""
    path = next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)
    if path is None:
        return _preset(name)
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise BadInput("configs", str(path), f"it could not be read ({' '.join(str(error).split())})") from None
    if not OmegaConf.is_dict(loaded):
        raise BadInput("configs", str(path), "it must hold keys and values")
    return plain(loaded)


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
    return [str(text) for text in plain(hydra.overrides)["task"]]


def params_of(hydra: Any) -> list[str]:
    """The settings that a file, and not the command line, sweeps over; `hydra` as in `overrides_of`."""
    return [str(name) for name in OmegaConf.select(hydra, "sweeper.params") or ()]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name; a mapping is never a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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

    def value_of(key: str, *seen: str) -> Any:
        value = settings[key]
        if not isinstance(value, str) or "${" not in value:
            return value
        name = reference(value, key)
        if name in settings and name not in seen:
            return value_of(name, *seen, name)
        if any(one.startswith(f"{name}.") for one in settings):
            return settings[seen[0]]
        try:  # text around a reference, a resolver of OmegaConf, or a mistake
            return OmegaConf.select(OmegaConf.create(nested(settings)), key)
        except OmegaConfBaseException as error:
            raise BadInput(key, value, f"{str(error).splitlines()[0]}; refer to a setting that there is") from None

    return {key: value_of(key, key) for key in settings}


def reference(value: Any, key: str) -> str | None:
    """The dotted name that `${name}` or `${.name}`, as the value of a setting, refers to; None where it is neither."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and "${" in value else None
    if match is None:
        return None
    dots, name = match.groups()
    parts = key.split(".")
    return ".".join([*(parts[: len(parts) - len(dots)] if dots else []), name])


@dataclass(frozen=True)
class Statement:
    """The origin of a setting's value: the setting and its value, or the option of a group, whose file states it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={written(self.value)}"


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
    said: Mapping[str, Statement]
    options: Mapping[str, str]
    foreign: tuple[NotHonoured, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting, nested; references to values are resolved, those to nodes are not."""
        return nested(resolved(self.raw))


@lru_cache(maxsize=512)
def composed(folders: tuple[Path, ...], name: str, overrides: tuple[str, ...] = ()) -> tuple[Flat, dict[str, str]]:
    """Every setting of a primary file with overrides as Hydra composes it, and the option of each group. Not to be changed.

    Composes within the running command, or over these folders; Hydra looks for the primary file before it reads where else to
    search.
    """
    register()
    first = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), folders[0])
    others = [f"file://{folder}" for folder in folders if folder != first]
    is_running = GlobalHydra.instance().is_initialized()
    searched = [f"hydra.searchpath=[{','.join(others)}]"] if others and not is_running else []
    with nullcontext() if is_running else initialize_config_dir(str(first), version_base="1.3"):
        config = compose(name, [*searched, *overrides], return_hydra_config=True)
    choices = {str(group): str(option) for group, option in config.hydra.runtime.choices.items() if option is not None}
    return dict(flat({key: node for key, node in plain(config).items() if key != "hydra"})), choices


def groups_of_points(choices: Mapping[Any, Any]) -> dict[str, str]:
    """The groups of a point with their options, of all that Hydra has chosen."""
    names = [group for group, option in choices.items() if option is not None and not str(group).startswith("hydra/")]
    return {str(group): str(choices[group]) for group in names if group not in (OPERATION, STUDY)}


@dataclass(frozen=True)
class Composer:
    """Makes requests from a primary file and layers of statements.

    Attributes:
        folders: that of numdev, and those that the user adds with `--config-dir`; the first that has a file counts.
        name: of the primary file.
        operation: the option of `operation`; None for that of the primary file, which may also have no such group.
    """

    folders: tuple[Path, ...]
    name: str = "config"
    operation: str | None = None

    def load(self, name: str) -> dict[str, Any]:
        """A file by its name without `.yaml`, or an option that needs none, as plain containers.

        Raises:
            BadInput: if there is neither.
        """
        loaded = _loaded(self.folders, name)
        if loaded is None:
            group, _, option = name.rpartition("/")
            raise BadInput(group, option, one_of(option, self.options(group)))
        return loaded

    def options(self, group: str) -> list[str]:
        """The options of a group, such as the studies of `study`: files, and those that need none."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")} | {*presets(group)})

    def leaf(self, group: str, option: str) -> Flat:
        """The settings of an option of a group in its own file, without its defaults list.

        Raises:
            BadInput: if the group has no such option.
        """
        return dict(flat({group: {name: value for name, value in self.load(f"{group}/{option}").items() if name != "defaults"}}))

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
        if any(not isinstance(item, Mapping) or list(item) != [CHOICE] for item in chosen):
            raise BadInput("study", study, f"its defaults list may hold only {CHOICE}: NAME")
        return str(chosen[-1][CHOICE]) if chosen else None

    def _composed(self, *overrides: str) -> tuple[Flat, dict[str, str]]:
        operation = [f"{OPERATION}={self.operation}"] if self.operation else []
        return composed(self.folders, self.name, (*operation, *overrides))

    @cached_property
    def choices(self) -> dict[str, str]:
        """The groups of a point with their default options."""
        return groups_of_points(self._composed()[1])

    @property
    def own_operation(self) -> str | None:
        """The option of `operation`."""
        return self._composed()[1].get(OPERATION)

    @property
    def of(self) -> dict[str, Any]:
        """The node that makes the operation."""
        node: dict[str, Any] = nested(resolved(self._composed()[0])).get(OPERATION, {})
        return node

    def values(self, options: Mapping[str, str] | None = None) -> Flat:
        """Every setting of a point by its dotted name, references as they are written, with these options of groups.

        Raises:
            BadInput: if a group has no such option.
        """
        settings = {key: value for key, value in self._composed()[0].items() if key.partition(".")[0] != OPERATION}
        for group, option in (options or {}).items():
            self.load(f"{group}/{option}")
            if option != self.choices.get(group):
                of_group = self._composed(f"{group}={option}")[0]
                settings = {key: value for key, value in settings.items() if key.partition(".")[0] != group}
                settings |= {key: value for key, value in of_group.items() if key.partition(".")[0] == group}
        return settings

    def of_others(self, group: str, key: str) -> list[str]:
        """The options of a group that have a setting."""
        return [option for option in self.options(group) if key in self.leaf(group, option)]

    def known(self) -> list[str]:
        """The names of all settings, with those that an option alone has, but for what only refers to others."""
        leaves = (self.leaf(group, option) for group in self.choices for option in self.options(group))
        values = {key: value for leaf in leaves for key, value in leaf.items()}
        values = self.values() | {key: value for key, value in values.items() if key not in self.values()}
        refers = {key for key, one in values.items() if isinstance(one, str) and "${" in one}
        return [key for key in values if key in schema.settings() or not ("._" in key or key in refers)]

    def request(self, *layers: Statements) -> Request:
        """The request that layers of statements make, each above the one before it.

        Choosing an option states what its file holds. It also drops what earlier layers state of the node that it replaces within
        its group, such as the source of a problem.

        Raises:
            BadInput: for a setting that does not exist.
        """
        chosen, stated = self._stated(layers)
        raw, foreign = self.values(chosen), list[NotHonoured]()
        known = {key for key in raw if "._" not in key}
        for key, value in ((key, one.value) for key, one in stated.items() if key == one.name and key not in chosen):
            if key in _OF_THE_RUN:
                raise BadInput(key, value, "it belongs to the run, not to a point of a study; give it on the command line")
            group = key.partition(".")[0]
            if key in known:
                raw[key] = value
            elif not (able := self.of_others(group, key) if group in self.choices else []):
                raise BadInput(key, value, f"there is no such setting; {one_of(key, self.known(), most=12)}")
            elif value is not None:
                option = chosen.get(group, self.choices[group])
                hint = f"{group}={option} does not read it; leave it out, or take {group}={' or '.join(able)}"
                foreign.append(NotHonoured(key, value, hint))
        return Request(raw, self.said(raw, *layers), {**self.choices, **chosen}, tuple(foreign))

    def said(self, raw: Flat, *layers: Statements) -> dict[str, Statement]:
        """The origin of each setting of the layers whose final value is not null.

        An option whose file names a constructor, `_target_`, states that choice; any other option states what its file holds.
        """
        return {key: one for key, one in self._stated(layers)[1].items() if raw.get(key, one.value) is not None}

    def _stated(self, layers: Sequence[Statements]) -> tuple[dict[str, str], dict[str, Statement]]:
        """The chosen options by group, and what states each setting: a later statement replaces an earlier one."""
        chosen, stated = dict[str, str](), dict[str, Statement]()
        for layer in layers:
            choices, values = self.split(layer)
            for group, option in choices.items():
                leaf, has = self.leaf(group, option), self.values({group: option})
                for key, one in list(stated.items()):
                    lacks = key.count(".") > 1 and key not in has and self.of_others(group, key)  # of a node that others have
                    if one.name == group or (key.startswith(f"{group}.") and (key in leaf or lacks)):
                        del stated[key]
                names = [group] if f"{group}._target_" in leaf else [key for key in leaf if "._" not in key]
                stated |= dict.fromkeys(names, Statement(group, option))
            chosen |= choices
            stated |= {key: Statement(key, value) for key, value in values.items()}
        return chosen, stated

    def split(self, statements: Statements) -> tuple[dict[str, str], Flat]:
        """Options of groups, and values by dotted name.

        Raises:
            NotHonoured: for an option of whose file nothing is left, since values beside it replace it.
        """
        choices = {group: statements[group] for group in statements if group in self.choices}
        values = dict(flat({key: value for key, value in statements.items() if key not in choices}))
        for group, option in choices.items():
            if isinstance(option, (Mapping, list)):
                raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
            of_file = {key: value for key, value in self.leaf(group, option).items() if value is not None}
            if of_file and all(values.get(key, value) not in (None, value) for key, value in of_file.items()):
                stronger = " and ".join(f"{key}={written(values[key])}" for key in of_file)
                raise NotHonoured(group, option, f"{stronger} replaces all that it states; leave one of them out")
        return {group: str(option) for group, option in choices.items()}, values

    def stands_for(self, statements: Statements) -> Flat:
        """The options and values that are stated, and what the files of the options state."""
        choices, values = self.split(statements)
        leaves = (self.leaf(group, option) for group, option in choices.items())
        return {key: value for leaf in leaves for key, value in leaf.items()} | choices | values


@lru_cache(maxsize=8)
def composer(folders: tuple[Path, ...], name: str = "config", operation: str | None = None) -> Composer:
    """The composer of some folders, kept with what it has composed."""
    return Composer(folders, name, operation)
