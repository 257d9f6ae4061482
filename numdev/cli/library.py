"""The YAML files of `configs/`: where they are, and what one of them says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import numdev
from numdev.cli.schema import StudyConfig
from numdev.errors import BadInput, NumdevError
from numdev.nearest import one_of

OPERATION, STUDY = "operation", "study"  # the groups whose options are no part of a point
PRECISION = "precision"
_PRESET = re.compile(r"(?:(?:kernel|eager|uniform)_)?[a-z0-9]+")
CHOICE = "override /operation@_global_.operation"
"""How the defaults list of a study's file chooses the operation of its points."""


def config_folder() -> Path:
    """The folder of the configs that ship with numdev: in an installed package, or beside it in a checkout."""
    package = Path(numdev.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise NumdevError(f"configs: there is no folder of that name in {package} or beside it; install numdev again")


@dataclass
class Library:
    """Config folders, the first that has a file counts; each file is read once.

    Attributes:
        folders: that of numdev, and those that the user adds with `--config-dir`.
    """

    folders: tuple[Path, ...]
    _read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def leaf(self, group: str, option: str) -> dict[str, Any]:
        """What an option of a group says.

        Raises:
            BadInput: if the group has no such option.
        """
        return self.load(f"{group}/{option}")

    def has(self, group: str, option: str) -> bool:
        """Whether a group has an option: a file, or a preset of `precision` that a format makes."""
        return option in self.options(group) or is_preset(group, option)

    def options(self, group: str) -> list[str]:
        """The options of a group that have files, such as the studies of `study`."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def study(self, name: str) -> dict[str, Any]:
        """A study's file, its fields checked.

        Raises:
            BadInput: if there is no such study, or the file is not one.
        """
        return study_fields(name, self.leaf(STUDY, name))

    def operation_of(self, study: str) -> str | None:
        """The option of `operation` that a study's file chooses in its defaults list; None where it chooses none.

        Raises:
            BadInput: if the defaults list says anything else.
        """
        if not any(path.is_file() for path in self._candidates(f"{STUDY}/{study}")):
            return None  # it is made in Python
        chosen = [item for item in self.leaf(STUDY, study).get("defaults", []) if item != "_self_"]
        if not chosen:
            return None
        if len(chosen) > 1 or not isinstance(chosen[0], Mapping) or list(chosen[0]) != [CHOICE]:
            raise BadInput("study", study, f"its defaults list may hold only {CHOICE}: NAME")
        return str(chosen[0][CHOICE])

    def load(self, name: str) -> dict[str, Any]:
        """A file by its name without `.yaml`, as plain containers."""
        if name not in self._read:
            group, _, option = name.rpartition("/")
            path = next((path for path in self._candidates(name) if path.is_file()), None)
            if path is None and not is_preset(group, option):
                raise BadInput(group, option, one_of(option, self.options(group)))
            self._read[name] = {"preset": option} if path is None else _plain(path)
        return self._read[name]

    def _candidates(self, name: str) -> Iterator[Path]:
        for folder in self.folders:
            yield folder / f"{name}.yaml"


def is_preset(group: str, option: str) -> bool:
    """Whether an option without a file is a preset of a format, such as `e8m10` or `kernel_e8m10`."""
    if group != PRECISION or not _PRESET.fullmatch(option):
        return False
    from numdev.arithmetic.formats import Format  # late: it imports torch

    try:
        Format.parse(option.rpartition("_")[2])
    except BadInput:
        return False
    return True


def study_fields(name: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a study, checked against `StudyConfig`; those that are not given have their defaults."""
    own = {key: value for key, value in loaded.items() if key != "defaults"}
    if unknown := next((key for key in own if key not in StudyConfig.__annotations__), None):
        raise BadInput("study", name, f"a study has no field {unknown}; {one_of(unknown, StudyConfig.__annotations__)}")
    try:
        checked = OmegaConf.merge(OmegaConf.structured(StudyConfig), own)
        fields = OmegaConf.to_container(checked, resolve=False, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInput("study", name, f"{str(error).splitlines()[0]}; see docs/how-to/add-study.md") from None
    assert isinstance(fields, dict)
    return {str(key): value for key, value in fields.items()}


def _plain(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BadInput("configs", str(path), f"it could not be read ({reason})") from None
    if not isinstance(loaded, dict):
        raise BadInput("configs", str(path), "it must hold keys and values")
    return {str(key): value for key, value in loaded.items()}
