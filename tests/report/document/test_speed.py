"""The report of speed studies: what follows from the figures, where lines cross, and files."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from rich.console import Console

from numdev.api import Bench
from numdev.attention.exact import Exact
from numdev.errors import BadInput
from numdev.measurement.studies import run
from numdev.report.document.report import make_report
from numdev.report.figures.theme import styled
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import SPEED, load
from numdev.report.studies.speed import SPEED_FIGURES, frame
from numdev.results.store import Store
from tests.toy_studies import toy

pytestmark = pytest.mark.xdist_group("speed of reports")


def test_a_report_takes_its_own_kind_of_study(speed_results: Path, tmp_path: Path) -> None:
    """Both kinds in one folder, where an override of results= puts them."""
    others, console = Store(tmp_path / "others"), Console(file=io.StringIO(), width=200)
    run(toy("sign", ("uniform",), base={"problem.n": 16, "problem.head_dim": 8, "seeds": 1}), Bench(Exact(), "cpu"), others)
    others.put_study("sign", others.studies()["sign"] | {"figure": None, "claims": []})
    with pytest.raises(BadInput, match=r"no results of speed but sign of deviation; .*study=speed_cpu"):
        make_report(others.path, tmp_path / "speed", console=console, kind=SPEED)
    both = shutil.copytree(speed_results, others.path, dirs_exist_ok=True)
    make_report(both, tmp_path / "speed", console=console, kind=SPEED)
    assert set(pd.read_csv(tmp_path / "speed" / "speed.csv")["study"]) == {"toy"}
    make_report(both, tmp_path / "report", ["sign"], console=console)
    assert set(pd.read_parquet(tmp_path / "report" / "results.parquet")["study"]) == {"sign"}


def test_one_row_per_point_and_replicate(speed_results: Path) -> None:
    rows = frame(load(Store(speed_results)))
    assert len(rows) == 2 * 2 * 2 * 2
    assert set(rows["series"]) == {"vanilla", "tiled"}
    assert set(rows["phase"]) == {"prefill", "decode"}
    assert list(rows["phase"] == "decode") == list(rows["problem.shape.queries"] == 1)
    assert rows["tflops"].tolist() == pytest.approx((rows["operations"] / rows["latency"] / 1e12).tolist())
    assert not {"wasserstein", "subject", "reference"} & set(rows)


def test_the_report_is_whole(speed_results: Path, tmp_path: Path) -> None:
    console = Console(width=200, record=True)
    make_report(speed_results, tmp_path, console=console, kind=SPEED)
    drawn = {f"figures/toy_{name}.{kind}" for name in SPEED_FIGURES for kind in ("png", "svg")}
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    tables = {f"{name}.csv" for name in ("speed", "points", "timings", "claims")}
    assert files == {*tables, "claims.md", "columns.md", "environment.json"} | drawn
    failed = pd.read_csv(tmp_path / "points.csv").query("status != 'ok'")
    assert len(failed) == 4
    assert all("cudnn runs on CUDA devices" in reason for reason in failed["reason"])
    for name in ("speed.csv", "points.csv"):
        assert not [column for column in pd.read_csv(tmp_path / name).columns if meaning(column) is None]
    assert "attention.backend: cudnn" in console.export_text()


def test_every_line_lies_within_its_panel(speed_results: Path) -> None:
    """Panels that share an axis, the second with ten times the speed and a thousandth of the memory."""
    rows = frame(load(Store(speed_results)))
    rows = rows[rows["phase"] == "prefill"]
    wider = rows.assign(tflops=10 * rows["tflops"], peak_bytes=rows["peak_bytes"] / 1000)
    wider["problem.shape.head_dim"] = 32
    for name in ("throughput", "memory"):
        with styled():
            figure = SPEED_FIGURES[name](pd.concat([rows, wider]))
        assert len(figure.axes) == 2
        for axes in figure.axes:
            low, high = axes.get_ylim()
            bars = [bar for bar in axes.containers if isinstance(bar, ErrorbarContainer)]  # whose ends may leave it
            heights = [float(y) for bar in bars for y in np.asarray(bar.lines[0].get_ydata())]
            assert low <= min(heights) <= max(heights) <= high
