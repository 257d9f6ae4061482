"""Studies of a user, which tests of the command line measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import STUDY


@pytest.fixture
def own_study(tmp_path: Path) -> Callable[..., Path]:
    """`own_study(text, "toy")` writes a study into the config folder `mine`, which it returns."""

    def write(text: str, name: str = "toy") -> Path:
        file = tmp_path / "mine" / "study" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path / "mine"

    return write


@pytest.fixture
def toy_configs(own_study: Callable[..., Path]) -> Path:
    """A config folder with the study `toy`."""
    return own_study(STUDY)
