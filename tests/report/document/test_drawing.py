"""Figures drawn by several processes are those drawn by one."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure

from numdev.errors import StoreError
from numdev.report.document.figures import Picture, write_all
from numdev.report.figures.plot import Plot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def draw(rows: pd.DataFrame) -> Figure:
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.plot(rows["x"], rows["y"])
    return figure


def pictures(folder: Path) -> dict[Path, Picture]:
    rows = [pd.DataFrame({"x": [0, 1], "y": [i, 2 * i]}) for i in range(5)]
    return {
        folder / f"f{i}": Picture(Plot(draw, "A line."), own, f"Line {i}", (f"It rises by {i}.",)) for i, own in enumerate(rows)
    }


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    for count in (1, 2, 7):
        write_all(pictures(tmp_path / str(count)), count)
    written = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()}
    assert set(written) == {f"f{i}.{kind}" for i in range(5) for kind in ("png", "svg")}
    assert len(set(written.values())) == len(written)
    for count in (2, 7):
        assert {path.name: path.read_bytes() for path in (tmp_path / str(count)).iterdir()} == written
    write_all({}, 2)


def test_an_error_is_the_reports_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for count in (1, 2):
        with pytest.raises(StoreError, match="file"):
            write_all(pictures(tmp_path / "file"), count)
