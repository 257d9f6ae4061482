"""Where compiled code is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("numba")

from numdev.attention.fused import backward_entry, entry, layout, passes, rounding

pytestmark = pytest.mark.xdist_group("fused")  # compiled once, by one worker

PROGRAM = """
import sys, numpy as np
from numdev.attention.fused import entry, layout, passes, rounding
found = np.empty(2, np.float32)
entry.sums(np.ones((2, 9), np.float32), found)
assert found.tolist() == [9.0, 9.0]
print(sum(entry.sums.stats.cache_hits.values()), entry.sums.stats.cache_path)
"""


def told(folder: Path) -> list[str]:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_second_process_does_not_compile(tmp_path: Path) -> None:
    assert told(tmp_path)[0] == "0"
    hits, place = told(tmp_path)
    assert hits == "1"
    assert Path(place).is_relative_to(tmp_path)


def test_what_can_be_written(tmp_path: Path) -> None:
    assert entry.is_writable(tmp_path / "not" / "there")
    (tmp_path / "file").touch()
    assert not entry.is_writable(tmp_path / "file" / "below")


def test_nothing_writable_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where every folder would be made."""
    monkeypatch.setattr(entry, "cache_folders", lambda: [Path(sys.executable) / "below"])
    assert not entry.is_cached()


@pytest.mark.parametrize("modules", [entry.MODULES, backward_entry.MODULES], ids=["forward", "backward"])
def test_the_stamp_follows_every_compiled_source(
    modules: tuple[ModuleType, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {layout, rounding, passes} <= set(modules)
    before = entry.stamp(*modules)
    for module in modules:
        copy = tmp_path / "copy.py"
        shutil.copy(str(module.__file__), copy)
        with copy.open("a") as file:
            file.write("# changed\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(copy))
            assert entry.stamp(*modules) != before
    assert entry.stamp(*modules) == before


def test_what_takes_half_a_minute_is_said_once_and_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    from numba.core.event import Event, EventStatus

    def compiles(module: str) -> Event:
        def function() -> None: ...

        function.__module__ = module
        return Event("numba:compile", EventStatus.START, {"dispatcher": SimpleNamespace(py_func=function)})

    announce = entry.Announce()
    announce.on_start(compiles("users.own"))
    assert not caplog.messages
    for _ in range(2):
        announce.on_start(compiles("numdev.attention.fused.entry"))
    (said,) = caplog.messages
    assert said.startswith("compiling the arithmetic of tiles for this processor, which takes about half a minute; ")
