"""Run commands in tests, and read what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SMALL = ("problem.n=32", "problem.head_dim=8", "seeds=1", "device=cpu")
STUDY = """\
title: Toy
base: {problem.n: 32, problem.head_dim: 8, seeds: 1}
axes: {precision: [bf16, fp16], tiling.bc: [8, 16, 32]}
"""


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]


def refusal(ran: Ran) -> str:
    """The one sentence of a command that refuses what it was given, and prints nothing else."""
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    return ran.err


def settings(text: str) -> dict[str, Any]:
    """The settings of `a=1 b=null`, with their values."""
    return {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in text.split())}


def unless(stated: tuple[str, ...], usual: tuple[str, ...]) -> list[str]:
    """The usual settings but for those that are stated: a setting is given once."""
    names = {text.partition("=")[0] for text in stated}
    return [text for text in usual if text.partition("=")[0] not in names]


def jobs(out: str) -> list[str]:
    """The lines of a sweep's jobs, below a title and the names of the columns."""
    return [line.rstrip() for line in out.splitlines()[2:]]


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search, "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
