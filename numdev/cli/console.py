"""The two consoles: results go to stdout, everything else to stderr."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

_NARROWEST_FILE = 120  # columns where no terminal sets a width

ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


def output() -> Console:
    """For results: as wide as the terminal, and wide enough for a table where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST_FILE)
    return console


def has_own_terminal() -> bool | None:
    """False where other jobs write to the same terminal at the same time, so that bars would overwrite each other; else None."""
    hydra = HydraConfig.get()
    return None if hydra.mode is RunMode.RUN or is_basic(hydra.launcher) else False


def is_basic(launcher: Any) -> bool:
    """Whether a launcher runs one job after the other in this process."""
    return str(launcher._target_).rpartition(".")[2] == "BasicLauncher"
