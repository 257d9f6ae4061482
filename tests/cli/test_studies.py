"""Studies measured by several processes: the same records, the same words, whatever happens to one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numdev.cli.progress import Progress as Bar
from numdev.errors import StoreError
from numdev.measurement.runner import Runner
from numdev.results.record import Record
from numdev.results.store import Store
from tests.cli.commands import Command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")

WHOLE = """\
title: Several problems
base: {problem.head_dim: 8, seeds: 1}
axes: {precision: [bf16, fp32], problem.n: [16, 24], attention: [tiled, triton]}
"""
SEVERAL = ("measure", "--config-dir", "mine", "study=several", "device=cpu")
POINTS = 8  # of which triton cannot run half without a GPU


def kept(results: str) -> dict[str, bytes]:
    """Every file of a folder of results; records without their time."""
    found = {str(path.relative_to(results)): path.read_bytes() for path in Path(results).rglob("*.json")}
    for record in Store(Path(results)).records():
        found[f"records/{record.key}.json"] = replace(record, seconds=0.0).to_json()
    return found


@pytest.fixture(autouse=True)
def _several(own_study: Any) -> None:
    own_study(WHOLE, "several")


def test_no_byte_of_a_study_depends_on_the_number_of_workers(numdev: Command) -> None:
    """Neither a record nor a manifest nor the summary, also of points that are unsupported."""
    said, found = [], []
    for workers in ("1", "2"):
        ran = numdev(*SEVERAL, f"workers={workers}", f"results=r{workers}")
        assert ran.code == 0, ran.err
        said.append(ran.out.replace(ran.out.split(" measured in ")[1].split(" s")[0], "TIME", 1))
        found.append(kept(f"r{workers}"))
        assert {record.environment["threads"] for record in Store(Path(f"r{workers}")).records()} == {"1"}
    assert len(found[0]) == POINTS + 1
    assert said == [said[0]] * 2
    assert found == [found[0]] * 2


def test_a_mistake_of_a_worker_ends_the_command_as_its_own_would(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (*SEVERAL, "workers=2")
    whole = Store.put

    def full(self: Store, record: Record) -> None:
        raise StoreError("results: the disk is full")

    monkeypatch.setattr(Store, "put", full)
    ran = numdev(*command)
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "results: the disk is full")
    monkeypatch.setattr(Store, "put", whole)
    monkeypatch.setattr(Runner, "measure", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    ran = numdev(*command)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith("workers: one of them was killed; ")


def test_ctrl_c_keeps_what_is_measured(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Bar.point

    def interrupted(self: Bar, done: int, text: str = "") -> None:
        if done >= 4:
            raise KeyboardInterrupt  # before the bar knows of them
        shown(self, done, text)

    monkeypatch.setattr(Bar, "point", interrupted)
    ran = numdev(*SEVERAL, "workers=2")
    assert ran.code == 130
    words = ran.err.splitlines()[-1]
    kept_points = int(words.removeprefix("interrupted; ").split()[0])
    assert words == f"interrupted; {kept_points} points kept, run the same command to continue"
    assert len(list(Store(Path("results")).records())) == kept_points >= 4
    assert not list(Path("results").rglob("*.tmp"))
    assert not multiprocessing.active_children()
    monkeypatch.setattr(Bar, "point", shown)
    assert numdev(*SEVERAL, "workers=2").code == numdev(*SEVERAL, "workers=1", "results=whole").code == 0
    assert kept("results") == kept("whole")


def test_gradients_and_functions_of_the_user_are_measured_by_workers(numdev: Command, own_study: Any) -> None:
    """Torch computes gradients on threads of its own, and a function's file lies beside the configuration."""
    Path("mine.py").write_text("def attend(q, k, v, mask, scale):\n    return (q @ k.mT * (scale or 1)).softmax(-1) @ v\n")
    toy = "title: T\nbase: {problem.n: 16, problem.head_dim: 4, seeds: 1, BASE}\naxes: {precision: [bf16, fp16], AXIS}\n"
    own = toy.replace("BASE", "attention: custom, attention.function: 'mine:attend'")
    own_study(own.replace("AXIS", "problem: [uniform, normal]"), "own")
    own_study(toy.replace(", BASE", "").replace("AXIS", "backward: [tiled, naive]"), "backwards")
    for study, operation in (("own", "attention"), ("backwards", "attention_backward")):
        command = ("measure", "--config-dir", "mine", f"study={study}", f"operation={operation}", "device=cpu")
        ran = numdev(*command, "workers=2", f"results={study}2")
        assert ran.code == 0, ran.err
    assert numdev(*command, "workers=1", f"results={study}1").code == 0
    assert kept(f"{study}1") == kept(f"{study}2")
