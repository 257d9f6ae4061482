"""Where Hydra finds the configs of numdev: `numdev://FOLDER`, of which each file is read once."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf

from numdev.cli.library import config_folder, is_preset

SCHEME = "numdev"


class FolderSource(ConfigSource):
    """A folder of YAML files, and the presets of formats that have no file.

    Hydra composes every job of a sweep anew; a file is parsed again only if it changed.
    """

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._file(config_path)
        if self._is_preset(config_path):
            made = OmegaConf.create({"preset": Path(config_path).stem})
            return ConfigResult(self.provider, self.full_path(), made, {"package": None})
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        state = path.stat()
        config, header = _read(path, state.st_mtime_ns, state.st_size)
        return ConfigResult(self.provider, self.full_path(), copy.deepcopy(config), dict(header))

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path).is_file() or self._is_preset(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = []
        for path in (Path(self.path) / config_path).iterdir():
            self._list_add_result(found, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(found))

    def _is_preset(self, config_path: str) -> bool:
        """Whether a path names an option that has no file, since a format makes it."""
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        return not self._file(config_path).is_file() and is_preset(group, option)

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


@lru_cache(maxsize=1024)
def _read(path: Path, changed: int, size: int) -> tuple[Container, dict[str, str | None]]:
    """A file's content and its header (`# @package ...`); the same for as long as its time and its size are."""
    with path.open(encoding="utf-8") as file:
        header = ConfigSource._get_header_dict(file.read())
        file.seek(0)
        return OmegaConf.load(file), header


class ReadOnce(SearchPathPlugin):
    """Reads the folder that ships with numdev through `FolderSource`, wherever it is searched."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path == str(config_folder()):
                element.path = f"{SCHEME}://{element.path}"


def register() -> None:
    """Make both known to Hydra, in this process: other applications of Hydra have configs of their own."""
    for plugin in (FolderSource, ReadOnce):
        Plugins.instance().register(plugin)
