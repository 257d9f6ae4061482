"""Blocks of the documentation's pages, and whether what they say to type can be understood."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from numdev.cli import build, expand, launch
from numdev.cli import certify as certification
from numdev.cli import compare as comparison
from numdev.cli.commands import refuse_unknown
from numdev.cli.compose import config_folder, plain, register, study_fields
from numdev.cli.main import COMMANDS
from numdev.report.comparison import Criterion

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_PLUGINS = ("hydra/launcher=", "hydra.launcher.", "hydra/sweeper=", "hydra.sweeper.")  # packages that numdev does not depend on


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
    """All is done with a command but to measure."""
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
        check_hydra(command, rest, folder)


def check_hydra(command: str, arguments: list[str], folder: Path) -> None:
    kept = [
        text for text in launch.ordered(command, [launch.braced(text) for text in arguments]) if not text.startswith(_PLUGINS)
    ]
    folders = [config_folder()]
    if "--config-dir" in kept:
        at = kept.index("--config-dir")
        folders.insert(0, next(path for path in (folder / kept[at + 1], ROOT / kept[at + 1]) if path.is_dir()))
        del kept[at : at + 2]
    overrides = [text for text in kept if text not in ("-m", "--cfg", "job")]
    searched = [f"hydra.searchpath=[{', '.join(f'file://{path}' for path in folders[:-1])}]"] if folders[1:] else []
    register()
    composed = []
    with initialize_config_dir(str(folders[-1]), version_base="1.3"):
        for job in jobs(overrides) if "-m" in kept else [overrides]:
            cfg = compose(launch.CONFIGS[command], [*searched, *job], return_hydra_config=True)
            hydra = cfg.hydra
            OmegaConf.set_struct(cfg, False)
            del cfg["hydra"]
            refuse_unknown(cfg, hydra.runtime.choices)
            composed.append((cfg, hydra))
    for cfg, hydra in composed if command != "report" else ():  # behind the context, in which Hydra searches its folder alone
        check_points(command, cfg, hydra)


def jobs(overrides: list[str]) -> Iterator[list[str]]:
    """Jobs of a sweep in which each of its values occurs."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    sweeps = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()] if one.is_sweep_override() else [text]
        for one, text in zip(parsed, overrides, strict=True)
    ]
    for i in range(max(map(len, sweeps))):
        yield [values[min(i, len(values) - 1)] for values in sweeps]


def check_points(command: str, cfg: Any, hydra: Any) -> None:
    expander = expand.expander(hydra, cfg, command)
    if command == "paper":
        points = [point for name in cfg.studies for point in expander.study(name, expander.composer.study(name)).points]
    elif command == "map" or cfg.study is None:
        request = expander.request()
        points = [build.point(replace(request, raw={"seeds": None} | request.raw))]
    else:
        name = hydra.runtime.choices["study"]
        points = [*expander.study(name, study_fields(name, plain(cfg.study))).points]
    assert points
    assert [point.refused for point in points if point.refused] == []
    assert command != "speed" or all(point.baseline is None for point in points)
