"""Where modules of the user's own are found."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from numdev.cli.modules import make_importable


def test_the_working_directory_the_config_folder_and_the_one_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, behind everything else, each once; folders that numdev or Hydra brings are left out."""
    here, folder = tmp_path / "here", tmp_path / "mine" / "configs"
    here.mkdir()
    folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    sources = [
        SimpleNamespace(provider="main", path="/numdev/configs"),
        SimpleNamespace(provider="hydra", path="hydra.conf"),
        SimpleNamespace(provider="command-line", path=str(folder)),
    ]
    make_importable(sources)
    make_importable(sources)
    assert sys.path == ["/nowhere", str(here), str(folder), str(folder.parent)]
