"""Where modules of the user's own are found: in the working directory, a folder of `--config-dir`, and the folder around that."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OF_THE_USER = ("command-line", "hydra.searchpath in command-line")  # the names that Hydra gives to the user's config folders


def make_importable(sources: Iterable[Any]) -> None:
    """Let `_target_` and `attention.function` name modules that lie there, behind everything that can be imported already.

    So a checkout with `configs/` beside its modules, named by `--config-dir configs`, works from any working directory.

    Args:
        sources: Hydra's `runtime.config_sources`.
    """
    own = [Path(source.path).resolve() for source in sources if source.provider in _OF_THE_USER]
    for folder in (Path.cwd(), *(each for one in own for each in (one, one.parent))):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
