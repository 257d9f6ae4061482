"""Blocks of the documentation's pages, and whether what they say to type can be understood."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from numdev.cli import certify as certification
from numdev.cli import compare as comparison
from numdev.cli import launch, studies
from numdev.cli.exit_codes import Ended
from numdev.cli.main import COMMANDS
from numdev.report.comparison import Criterion

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Packages that numdev does not depend on, a GPU, and the figure that a sweeper would minimise, which a dry run does not have.
_OMITTED = ("hydra/launcher=", "hydra.launcher.", "hydra/sweeper=", "hydra.sweeper.", "hydra/callbacks=", "hydra.callbacks.")
_OMITTED += ("device=", "objective=")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is to be written to, and its text."""

    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*result) for result in _FENCE.findall(page.read_text())]


def check(text: str, folder: Path) -> None:
    """Every line of a shell block can be understood where `folder` is the current one."""
    for line in text.splitlines():
        words = shlex.split(line.removesuffix("&"), comments=True)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):  # settings of the environment
            words = words[1:]
        if words:
            check_line(words[0], words[1:], folder)


def check_line(program: str, words: list[str], folder: Path) -> None:
    if program == "numdev":
        check_numdev(words, folder)
    elif program == "make":
        assert set(words) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif program == "python":
        assert words[0] == "-m"
        assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()
    elif program == "pytest":
        assert all(word.startswith(("--numdev-depth=", "--junitxml=")) for word in words)
    elif program == "jupyter":
        assert words[0] == "lab"
        assert (ROOT / words[1]).is_file()
    else:
        assert (program, words[0]) == ("pip", "install"), f"{program}: this test does not know what that is"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", " ".join(words))) <= set(extras)


def check_numdev(words: list[str], folder: Path) -> None:
    """Runs a command as a dry run, or shows its settings where it has none; a study must hold no point that is refused."""
    command, rest = words[0], words[1:]
    if command.startswith("-"):
        assert command in ("--help", "--version")
        return
    assert command in COMMANDS
    if "--help" in rest:
        return
    if command == "compare":
        settings = comparison.read(rest)
        Criterion(settings.metric, settings.reference, settings.tolerance)
    elif command == "certify":
        certification.read(rest)
    elif command != "studies":
        kept = [text for text in rest if not text.startswith(_OMITTED)]
        kept = [re.sub(r"=choice\((.*)\)$", r"=\1", text) for text in kept]  # values that a sweeper would draw from
        if "--config-dir" in kept:
            at = kept.index("--config-dir") + 1
            kept[at] = next(str(path / kept[at]) for path in (folder, ROOT) if (path / kept[at]).is_dir())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(studies, "dry_run", planned)
            assert launch.launch(command, kept + {"map": [], "report": ["--cfg", "job"]}.get(command, ["dry_run=true"])) == 0


def planned(work: Any, cfg: Any) -> Ended:
    refused = [point.refused for study, _ in work for point in study.points if point.refused]
    assert not refused, refused
    return Ended(0)
