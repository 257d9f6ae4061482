"""From YAML files and statements to the settings of a point, and what states each of them.

Hydra composes once for each option (`composed`); the values of a point replace those of its options (`Composer.request`). Studies
and the command line state settings in layers, of which later ones override earlier ones. What cannot be used, such as a setting,
an option or a file that there is not, is a BadInput that names it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache, reduce
from itertools import takewhile
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from numdev.attention.groups import preset
from numdev.attention.groups import presets as presets_of_objects
from numdev.attention.precision import FORMATS
from numdev.cli import schema
from numdev.cli.schema import nested, written
from numdev.errors import BadInput, NotHonoured, one_of
from numdev.settings import converted, declared, flat
from numdev.sources import config_folder

OPERATION, STUDY = "operation", "study"  # the groups whose options are no part of a point
_OF_THE_USER = ("command-line", "hydra.searchpath in command-line")  # the names that Hydra gives to the user's config folders
_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")

Flat = dict[str, Any]  # dotted name to value
Statements = Mapping[str, Any]  # a group and its option, or a dotted setting and its value


def make_importable(sources: Iterable[Any]) -> None:
    """Let `_target_` and `attention.function` name modules of the user's, behind everything that can be imported already.

    They lie in the working directory, in a folder of `--config-dir`, or in the folder around that: a checkout with `configs/`
    beside its modules works from any working directory. `sources` are Hydra's `runtime.config_sources`.
    """
    own = [Path(source.path).resolve() for source in sources if source.provider in _OF_THE_USER]
    folders = dict.fromkeys(str(each) for each in (Path.cwd(), *(each for one in own for each in (one, one.parent))))
    sys.path += [folder for folder in folders if folder not in sys.path]


@lru_cache(maxsize=1)
def _shared() -> dict[str, dict[str, Any]]:
    """The options of `configs/presets.yaml`, by group and name."""
    return plain(OmegaConf.load(config_folder() / "presets.yaml"))


def presets(group: str) -> list[str]:
    """The options of a group that have no file of their own."""
    return [*_shared().get(group, ()), *presets_of_objects(group)]


def meanings(group: str) -> dict[str, str]:
    """The options of a group that ship with numdev: the comments above them in `configs/`, or the sentences of their objects."""
    shared = re.search(rf"^{group}:\n((?: .*\n)*)", (config_folder() / "presets.yaml").read_text(), re.MULTILINE)
    texts = {name: text for text, name in re.findall(r"((?: *#.*\n)+) *(\w+):", shared[1] if shared else "")}
    for path in sorted((config_folder() / group).glob("*.yaml")):
        texts[path.stem] = "".join(takewhile(lambda line: line.startswith("#"), path.open()))
    comments = {name: " ".join(line.strip(" #") for line in text.splitlines()) for name, text in texts.items()}
    return {name: " ".join(text.split()) for name, text in presets_of_objects(group).items()} | comments


def explained(group: str, *names: str) -> str:
    """The help on the options of a group, or on those named: each with its meaning, and the settings of its own object."""
    rows, own = list[tuple[str, str]](), Composer((config_folder(),))
    for option, text in meanings(group).items():
        leaf = own.leaf(group, option)
        shown = {key: value for key, value in leaf.items() if "._" not in key and ".fmt." not in key and "${" not in str(value)}
        settings = [f"{key}={written(value)}" for key, value in shown.items()] if len(shown) < len(leaf) else []
        is_format = group == "precision" and option.rpartition("_")[2] in map(str, FORMATS)  # the help speaks of all at once
        rows += [(option, " ".join([text, *settings]))] if option in (names or [option]) and not is_format else []
    return schema.in_columns(rows)


def explained_operation(name: str) -> str:
    """The help on an operation whose classes declare their settings: problem, steps of the policy, its nodes, implementations."""
    from numdev.cli.build import located  # late: it imports torch

    own = Composer((config_folder(),), operation=name)
    values, summary = own.values(), (config_folder() / OPERATION / f"{name}.yaml").read_text().splitlines()[1].strip("# ")
    parts = [f"numdev measure operation={name}: {summary}\n"]
    groups = dict.fromkeys(("problem", *(key.removesuffix("._target_") for key in values if key.endswith("._target_"))))
    nodes = {group: group for group in groups if group not in (OPERATION, "baseline", "task.data", name)}
    nodes |= {f"{name}={option}": name for option in own.options(name)}
    for title, group in nodes.items():
        leaf = own.leaf(name, title.partition("=")[2]) if "=" in title else values
        rows = [(f"{group}.preset={values.get('precision.preset')}", "of all steps; those below change one")] * (
            group == "precision"
        )
        rows += [
            (f"{group}.{one.name}={written(leaf[f'{group}.{one.name}'])}", f"{one.unit}: {one.text}".removeprefix(": "))
            for one in declared(located(leaf[f"{group}._target_"]))
            if f"{group}.{one.name}" in leaf and one.name != "preset"
        ]
        text = meanings(group).get(title.partition("=")[2], "")
        parts.append(f"== {title} ==\n  {schema.in_columns([(text, '')] * bool(text) + rows)}\n")
    return "\n".join([*parts, "numdev measure --help has the formats of steps, the baselines and the settings of the run."])


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
    OmegaConf.register_new_resolver("numdev.options", explained, replace=True)
    OmegaConf.register_new_resolver("numdev.operation", explained_operation, replace=True)
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
    """The fields of a study, checked against `StudyConfig`; those that are left out have their defaults."""
    known = schema.StudyConfig.__annotations__
    if unknown := next((key for key in loaded if key not in known), None):
        raise BadInput("study", name, f"a study has no field {unknown}; {one_of(unknown, known)}")
    try:
        fields = plain(OmegaConf.merge(OmegaConf.structured(schema.StudyConfig), loaded), throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInput("study", name, f"{str(error).splitlines()[0]}; see docs/how-to/add-study.md") from None
    first = next(iter(fields["figures"]), None) if fields["plot"] is None else None
    return fields | {"figure": fields["figure"] or first}


def plain(config: Any, *, resolve: bool = False, throw_on_missing: bool = False) -> dict[str, Any]:
    """A configuration as plain containers; references are kept as they are written unless `resolve` is true."""
    container = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=throw_on_missing)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def overrides_of(hydra: Any) -> list[Override]:
    """The overrides of a job; `hydra` is Hydra's own part of the configuration."""
    return OverridesParser.create().parse_overrides([str(text) for text in plain(hydra.overrides)["task"]])


def at(config: Mapping[str, Any], path: str) -> Any:
    """The node or value of a dotted path."""
    return reduce(getitem, path.split("."), config)


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which the value or the node that it names has taken the place of every reference."""
    try:
        return plain(OmegaConf.create(dict(config)), resolve=True)
    except OmegaConfBaseException as error:
        keys = [str(error.full_key)]
        with suppress(KeyError):  # of the last reference on the way, which leads nowhere
            while (name := reference(at(config, keys[-1]), keys[-1])) is not None and name not in keys:
                at(config, name)
                keys.append(name)
        hint = f"{str(error).splitlines()[0]}; refer to a setting that there is"
        raise BadInput(keys[-1], at(config, keys[-1]), hint) from None


def reference(value: Any, key: str) -> str | None:
    """The dotted name that `${name}` or `${.name}`, as the value of a setting, refers to; None where it is neither."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and "${" in value else None
    if match is None:
        return None
    dots, name = match.groups()
    parts = key.split(".")
    return ".".join([*(parts[: len(parts) - len(dots)] if dots else []), name])


@lru_cache(maxsize=512)
def composed(folders: tuple[Path, ...], name: str, overrides: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """A primary file with overrides as Hydra composes it, and the option of each group. Not to be changed.

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
    return {key: value for key, value in plain(config).items() if key != "hydra"}, choices


def groups_of_points(choices: Mapping[Any, Any]) -> dict[str, str]:
    """The groups of a point with their options, of all that Hydra has chosen."""
    own = {str(group): str(option) for group, option in choices.items() if option is not None}
    return {group: option for group, option in own.items() if group not in (OPERATION, STUDY) and not group.startswith("hydra/")}


class Statement(NamedTuple):
    """The origin of a setting's value: the setting and its value, or the option of a group, whose file states it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={written(self.value)}"


@dataclass(frozen=True)
class Request:
    """The settings of a point, and which of them are explicit.

    Defaults are not explicit, null states nothing, and an option that makes an object is stated as a whole, by its group's name.
    """

    composer: Composer  # of the options that there are
    raw: Flat  # every setting by dotted name, as it is written
    said: Mapping[str, Statement]  # what states each explicit setting, also one that the chosen options do not have
    options: Mapping[str, str]  # the option of each group

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting, nested, with every reference resolved."""
        return resolved(nested(self.raw))


@dataclass(frozen=True)
class Composer:
    """Makes requests from a primary file and layers of statements."""

    folders: tuple[Path, ...]  # that of numdev, and those that the user adds by `--config-dir`; the first that has a file counts
    name: str = "config"  # of the primary file
    operation: str | None = None  # the option of `operation`; None for that of the primary file, which may have no such group

    def load(self, name: str) -> dict[str, Any]:
        """A file by its name without `.yaml`, or an option that needs none, as plain containers."""
        loaded = _loaded(self.folders, name)
        if loaded is None:
            group, _, option = name.rpartition("/")
            raise BadInput(group, option, one_of(option, self.options(group)))
        return loaded

    def options(self, group: str) -> list[str]:
        """The options of a group, such as the studies of `study`: files, and those that need none."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")} | {*presets(group)})

    def leaf(self, group: str, option: str) -> Flat:
        """The settings of an option of a group in its own file, without its defaults list."""
        return dict(flat({group: {name: value for name, value in self.load(f"{group}/{option}").items() if name != "defaults"}}))

    def options_with(self, key: str) -> list[str]:
        """The options of a setting's group that have the setting."""
        group = key.partition(".")[0]
        return [option for option in self.options(group) if key in self.leaf(group, option)]

    def study(self, name: str) -> dict[str, Any]:
        """The fields of a study's file and of the files in its defaults list, all checked."""
        self.load(f"{STUDY}/{name}")
        config, choices = composed(self.folders, self.name, (f"{STUDY}={name}",))
        if groups_of_points(choices) != replace(self, operation=choices.get(OPERATION)).choices:
            raise BadInput(STUDY, name, "its defaults list may choose the operation, and files of study/, but no other option")
        return study_fields(name, config[STUDY])

    def operation_of(self, study: str) -> str | None:
        """The operation that a study's file chooses, else that of `config.yaml`; None where that has no such group."""
        of_study = (f"{STUDY}={study}",) if study in self.options(STUDY) else ()  # others are made in Python
        return composed(self.folders, "config", of_study)[1].get(OPERATION)

    def _composed(self, *overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
        operation = [f"{OPERATION}={self.operation}"] if self.operation else []
        return composed(self.folders, self.name, (*operation, *overrides))

    @cached_property
    def choices(self) -> dict[str, str]:
        """The groups of a point with their default options."""
        return groups_of_points(self._composed()[1])

    @property
    def of(self) -> dict[str, Any]:
        """The node that makes the operation."""
        return dict(resolved(self._composed()[0]).get(OPERATION, {}))

    def values(self, options: Mapping[str, str] | None = None) -> Flat:
        """Every setting of a point by its dotted name, references as they are written, with these options of groups."""
        config = {key: node for key, node in self._composed()[0].items() if key != OPERATION}
        for group, option in (options or {}).items():
            if option != self.choices.get(group):
                config[group] = self._composed(f"{group}={option}")[0][group]
        return dict(flat(config))

    def known(self) -> list[str]:
        """The names of all settings and groups, with those that an option alone has, but for what only refers to others."""
        leaves = (self.leaf(group, option) for group in self.choices for option in self.options(group))
        values = {key: value for leaf in leaves for key, value in leaf.items()} | self.values()
        return [key for key, one in values.items() if key in schema.settings() or not ("._" in key or "${" in str(one))]

    def request(self, *layers: Statements) -> Request:
        """The request that layers of statements make, each above the one before it.

        Choosing an option states what its file holds. It also drops what earlier layers state of the node that it replaces within
        its group, such as the source of a problem.
        """
        options, origins = dict(self.choices), dict[str, Statement]()
        for layer in layers:
            for group, option in self.split(layer)[0].items():
                options[group], leaf, has = option, self.leaf(group, option), self.values({group: option})
                for key, one in [*origins.items()]:
                    lacks = key.startswith(f"{group}.") and key.count(".") > 1 and key not in has and self.options_with(key)
                    if one.name == group or key in leaf or lacks:
                        del origins[key]
            origins |= self.statements(layer)
        raw, said = self.values(options), dict[str, Statement]()
        for key, one in origins.items():
            if key == one.name:
                if key in schema.of_runs():
                    hint = "it belongs to the run, not to a point of a study; give it on the command line"
                    raise BadInput(key, one.value, hint)
                if (key not in raw and not self.options_with(key)) or "._" in key:
                    raise self.unknown(key, one.value)
                raw |= {key: one.value} if key in raw else {}
            if key != one.name and origins.get(f"{one.name}._target_") == one:
                said[one.name] = one
            elif "._" not in key and raw.get(key, one.value) is not None:
                said[key] = one
        return Request(self, raw, said, options)

    def unknown(self, name: str, value: Any) -> BadInput:
        """The error of a setting that there is not, or that only other options than the chosen ones have."""
        group = name.partition(".")[0]
        if options := [f"{group}={one}" for one in self.options_with(name)]:
            has = "have" if options[1:] else "has"
            return BadInput(name, value, f"only {' and '.join(options)} {has} it; take {' or '.join(options)}, or leave it out")
        names = [*self.choices, *({OPERATION} & self._composed()[1].keys()), *self.known(), *self._of_study]
        alike = [one for one in names if one.count(".") == name.count(".")]  # a group is not mistyped into one of its settings
        hint = one_of(name, alike if get_close_matches(name, alike) else names, most=12)
        return BadInput(name, value, f"there is no such setting; {hint}")

    @property
    def _of_study(self) -> list[str]:
        return [f"{STUDY}.{field}" for field in schema.StudyConfig.__annotations__] if STUDY in self.values() else []

    def check(self, override: Override, options: Mapping[str, str], *, is_sweep: bool) -> None:
        """Raise BadInput for an override of the command line that sets what the options lack, or to what it does not take."""
        name, value = override.key_or_group, str(override.input_line).partition("=")[2]
        if override.is_delete():
            raise BadInput(name, "~", "a setting cannot be deleted; null is what most take for none")
        if override.is_sweep_override() and not is_sweep:
            raise BadInput(name, value, f"a sweep needs -m, and a list brackets, {name}=[{value}]")
        place = ".".join(name.split(".")[:2]) if name.startswith(STUDY) else name
        names = [*self.choices, OPERATION, *self.values(options), *self._of_study]
        if not any(one == place or one.startswith(f"{place}.") for one in names):
            raise self.unknown(name, value)
        one = schema.of_commands().get(name)
        for each in list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]:
            if one is not None and isinstance(each, str):
                converted(name, one.kind, each, one.text)

    def statements(self, layer: Statements) -> dict[str, Statement]:
        """The origin of each setting of a layer; a value stands above the file of an option."""
        choices, values = self.split(layer)
        of_files = {key: Statement(group, option) for group, option in choices.items() for key in self.leaf(group, option)}
        return of_files | {key: Statement(key, value) for key, value in values.items()}

    def split(self, layer: Statements) -> tuple[dict[str, str], Flat]:
        """The options of groups that a layer states, and its values by dotted name.

        Refuses an option of whose file nothing is left, since values beside it replace it.
        """
        choices = {group: layer[group] for group in layer if group in self.choices}
        values = dict(flat({key: value for key, value in layer.items() if key not in choices}))
        for group, option in choices.items():
            if isinstance(option, (Mapping, list)):
                raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
            of_file = {key: value for key, value in self.leaf(group, option).items() if value is not None}
            if of_file and all(values.get(key, value) not in (None, value) for key, value in of_file.items()):
                stronger = " and ".join(f"{key}={written(values[key])}" for key in of_file)
                raise NotHonoured(group, option, f"{stronger} replaces all that it states; leave one of them out")
        return {group: str(option) for group, option in choices.items()}, values


@lru_cache(maxsize=8)
def composer(folders: tuple[Path, ...], name: str = "config", operation: str | None = None) -> Composer:
    """The composer of some folders, kept with what it has composed."""
    return Composer(folders, name, operation)
