"""What the documentation says to type: its commands compose, its Python runs, on small sizes."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from numdev.cli import build, compare, launch, schema, tune
from numdev.cli.app import refuse_unknown
from numdev.cli.expand import Expander
from numdev.cli.library import Library, config_folder, study_fields
from numdev.cli.main import COMMANDS
from numdev.cli.studies import stated

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_LAUNCHER = ("hydra/launcher=", "hydra.launcher.")  # packages that numdev does not depend on


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is to be written to, and its text."""

    language: str
    file: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*(match or "" for match in found)) for found in _FENCE.findall((DOCS / page).read_text())]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every line of a shell block; settings of the environment in front are left away."""
    for line in text.splitlines():
        words = shlex.split(line.removesuffix("&"), comments=True)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            words = words[1:]
        if words:
            yield words[0], words[1:]


def jobs(overrides: list[str]) -> Iterator[list[str]]:
    """Jobs of a sweep in which each of its values occurs."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    sweeps = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()] if one.is_sweep_override() else [text]
        for one, text in zip(parsed, overrides, strict=True)
    ]
    for i in range(max(map(len, sweeps))):
        yield [values[min(i, len(values) - 1)] for values in sweeps]


def check_numdev(words: list[str], cwd: Path) -> None:
    """A `numdev` command can be understood: everything but the measuring is done with it."""
    command, rest = words[0], words[1:]
    if command.startswith("-"):
        assert command in ("--help", "--version")
        return
    assert command in COMMANDS
    if command == "studies":
        assert rest == []
    elif command == "compare":
        compare._settings(rest)
    elif command == "tune":
        tune._settings(rest)
    else:
        check_hydra(command, rest, cwd)


def check_hydra(command: str, arguments: list[str], cwd: Path) -> None:
    kept = [text for text in launch.ordered(command, arguments) if not text.startswith(_LAUNCHER)]
    folders = [config_folder()]
    if "--config-dir" in kept:
        at = kept.index("--config-dir")
        folders.insert(0, cwd / kept[at + 1])
        del kept[at : at + 2]
    is_sweep = "-m" in kept
    overrides = [text for text in kept if text not in ("-m", "--cfg", "job")]
    searched = [f"hydra.searchpath=[{', '.join(f'file://{folder}' for folder in folders[:-1])}]"] if folders[1:] else []
    schema.register()
    with initialize_config_dir(str(folders[-1]), version_base="1.3"):
        for job in jobs(overrides) if is_sweep else [overrides]:
            cfg = compose(launch.CONFIGS[command], [*searched, *job], return_hydra_config=True)
            hydra = cfg.hydra
            OmegaConf.set_struct(cfg, False)
            del cfg["hydra"]
            refuse_unknown(cfg)
            if command in ("measure", "speed"):
                check_points(cfg, hydra, job, Library(tuple(folders)))


def check_points(cfg: Any, hydra: Any, job: list[str], library: Library) -> None:
    if cfg.study is None:
        build.point(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        return
    name = hydra.runtime.choices["study"]
    fields = study_fields(name, OmegaConf.to_container(cfg.study))  # type: ignore[arg-type]
    assert Expander(library, stated(job, hydra.runtime.choices, cfg)).study(name, fields).points


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language in ("sh", "python", "toml") for b in blocks(page))])
def test_what_a_page_says_to_type_works(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, Python is run and commands are composed in the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look for the names of their annotations
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page):
        if block.file:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page, "exec", dont_inherit=True), vars(module))
        elif block.language == "sh":
            for program, words in commands(block.text):
                assert program in ("numdev", "make"), f"{program}: this test does not know what that is"
                if program == "make":
                    assert words[0] in targets
                else:
                    check_numdev(words, tmp_path)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


