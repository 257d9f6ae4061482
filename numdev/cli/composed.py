"""Configurations as Hydra composes them, each option of a group once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from numdev.cli import schema
from numdev.cli.library import OPERATION, STUDY, Library
from numdev.cli.requests import Flat, flat, type_mend
from numdev.errors import BadInput
from numdev.nearest import one_of


class _Composed(NamedTuple):
    """What Hydra composed, as it stands there, and to try values in, of which the last one stays."""

    plain: dict[str, Any]
    scratch: DictConfig


@dataclass
class Composer:
    """What Hydra makes of a primary file with one option of a group in place of the default.

    Attributes:
        folders: that of numdev, and those that the user adds with `--config-dir`.
        name: of the primary file.
        operation: the option of `operation`; None for that of the primary file, which may also have no such group.
    """

    folders: tuple[Path, ...]
    name: str
    operation: str | None = None
    library: Library = field(init=False)
    of: dict[str, Any] = field(init=False)  # the node that makes the operation
    _composed: dict[str, _Composed] = field(default_factory=dict, init=False)
    _values: dict[str, Flat] = field(default_factory=dict, init=False)
    _checked: dict[tuple[str, str, str], Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.library = Library(self.folders)
        schema.register()
        config = self._config("")
        self.choices = of_points(config.plain["hydra"]["runtime"]["choices"])
        node: Any = OmegaConf.to_container(config.scratch.get(OPERATION) or OmegaConf.create(), resolve=True)
        self.of = dict(node)

    def values(self, group: str = "", option: str = "") -> Flat:
        """Every setting by its dotted name, interpolations as they are written; only the group's where an option is given."""
        memo = f"{group}={option}"
        if memo not in self._values:
            plain = self._config(self._key(group, option)).plain
            chosen = {group: plain[group]} if group else {name: plain[name] for name in plain if name not in ("hydra", OPERATION)}
            self._values[memo] = dict(flat(chosen))
        return self._values[memo]

    def check(self, group: str, option: str, key: str, value: Any) -> Any:
        """The value, converted to the type that the setting has under this option; each is checked once.

        Raises:
            BadInput: if it is of another type.
        """
        memo = self._key(group, option), key, repr(value)
        if memo not in self._checked:
            self._checked[memo] = self._check(memo[0], key, value)
        return self._checked[memo]

    def _check(self, composed: str, key: str, value: Any) -> Any:
        scratch = self._config(composed).scratch
        try:
            OmegaConf.update(scratch, key, value, merge=False)
            if isinstance(value, str) and "${" in value:
                return value
            checked = OmegaConf.select(scratch, key)
        except OmegaConfBaseException as error:
            raise BadInput(key, value, type_mend(str(error))) from None
        return OmegaConf.to_container(checked) if OmegaConf.is_config(checked) else checked

    def of_others(self, group: str, key: str) -> list[str]:
        """The options of a group that have a setting."""
        return [option for option in self.library.options(group) if _names(self.library.leaf(group, option), key, group)]

    def before_equals(self) -> list[str]:
        """What an override may name: groups and settings."""
        return [*self.choices, *([OPERATION] if self.of else []), *self.known()]

    def known(self) -> list[str]:
        """The names of all settings, with those that an option alone has, but for what only refers to others."""
        values = dict(self.values())
        for group in self.choices:
            for option in self.library.options(group):
                values |= {key: one for key, one in flat({group: self.library.leaf(group, option)}) if key not in values}
        declared = schema.settings()
        return [key for key, one in values.items() if key in declared or not ("._" in key or _refers(one))]

    def _key(self, group: str, option: str) -> str:
        return f"{group}={option}" if group and self.choices.get(group) != option else ""

    def _config(self, key: str) -> _Composed:
        if key not in self._composed:
            group, _, option = key.partition("=")
            if key and not self.library.has(group, option):
                raise BadInput(group, option, one_of(option, self.library.options(group)))
            with _initialised(self.folders, self.name) as search:
                stated = [f"{OPERATION}={self.operation}"] if self.operation else []
                config = compose(self.name, [*search, *stated, *([key] if key else [])], return_hydra_config=True)
            if key:
                with open_dict(config):
                    del config["hydra"]
            self._composed[key] = _Composed(_plain(config), config)
        return self._composed[key]


def _plain(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def of_points(choices: Mapping[Any, Any]) -> dict[str, str]:
    """The groups of a point with their options, of all that Hydra has chosen."""
    return {
        str(group): str(option)
        for group, option in choices.items()
        if option is not None and not str(group).startswith("hydra/") and group not in (OPERATION, STUDY)
    }


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _names(leaf: Flat, key: str, group: str) -> bool:
    return key in dict(flat({group: leaf}))


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


def composed_with(folders: tuple[Path, ...], name: str, overrides: list[str]) -> dict[str, Any]:
    """What Hydra makes of a primary file and overrides, interpolations as they are written, without Hydra's own part."""
    schema.register()
    with _initialised(folders, name) as search:
        return _plain(compose(name, [*search, *overrides]))


@lru_cache(maxsize=8)
def composer(folders: tuple[Path, ...], name: str = "config", operation: str | None = None) -> Composer:
    """The composer of some folders, kept so that a second study composes no option again."""
    return Composer(folders, name, operation)
