"""The report of speed studies: what follows from the figures, where lines cross, and files."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from numdev.api import speed_bench
from numdev.arithmetic.formats import FP32
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput
from numdev.measurement.speed.timing import Budget
from numdev.report.document.report import make_report, make_speed_report
from numdev.report.figures.theme import styled
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import load
from numdev.report.studies.speed import SPEED_FIGURES, crossovers, frame, looks, shape_text
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint, run
from tests.report.printed import assert_legible

VARIANTS: dict[str, Any] = {
    "vanilla": Vanilla(FP32),
    "tiled": Tiled(Precision.parse("fp32")),
    "cudnn": Sdpa(Backend.CUDNN, FP32),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speed")
    points = [
        StudyPoint(Problem(Distribution(Kind.NORMAL), Shape(queries=q, keys=n, head_dim=16)), v, None, 2, "normal", {"kernel": k})
        for k, v in VARIANTS.items()
        for n in (32, 64)
        for q in (n, 1)
    ]
    outcome = run(Study("toy", "A toy", None, (), tuple(points)), speed_bench("cpu", Budget(1e-4, 3, 3)), Store(path))
    assert not outcome.has_errors
    return path


def test_a_report_takes_its_own_kind_of_study(results: Path, toy_results: Store, tmp_path: Path) -> None:
    """Both kinds in one folder, where an override of results= puts them."""
    others = [path.name for path in (toy_results.path / "studies").iterdir() if path.stem not in ("fig3", "sign")]
    shutil.copytree(toy_results.path, tmp_path / "both", ignore=shutil.ignore_patterns(*others))
    shutil.copytree(results, tmp_path / "both", dirs_exist_ok=True)
    console = Console(file=io.StringIO(), width=200)
    make_speed_report(tmp_path / "both", tmp_path / "speed", console)
    assert set(pd.read_csv(tmp_path / "speed" / "speed.csv")["study"]) == {"toy"}
    make_report(tmp_path / "both", tmp_path / "report", console=console)
    assert "toy" not in set(pd.read_parquet(tmp_path / "report" / "results.parquet")["study"])
    make_report(tmp_path / "both", tmp_path / "timed", ["toy"], console=console)
    assert set(pd.read_csv(tmp_path / "timed" / "speed.csv")["study"]) == {"toy"}
    with pytest.raises(BadInput, match=r"no results of speed but fa3_table3, fig3, .* of deviation; .*study=speed_cpu"):
        make_speed_report(toy_results.path, tmp_path / "speed", console)


def test_one_row_per_point_and_replicate(results: Path) -> None:
    rows = frame(load(Store(results)))
    assert len(rows) == 2 * 2 * 2 * 2
    assert set(rows["series"]) == {"vanilla", "tiled"}
    assert set(rows["phase"]) == {"prefill", "decode"}
    assert list(rows["phase"] == "decode") == list(rows["problem.shape.queries"] == 1)
    assert rows["tflops"].tolist() == pytest.approx((rows["operations"] / rows["latency"] / 1e12).tolist())
    assert not {"wasserstein", "subject", "reference"} & set(rows)


def test_the_report_is_whole_and_the_same_each_time(results: Path, tmp_path: Path) -> None:
    console = Console(width=200, record=True)
    make_speed_report(results, tmp_path / "a", console)
    make_speed_report(results, tmp_path / "b", Console(quiet=True))
    first, second = ({str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.*")} for out in map(tmp_path.joinpath, "ab"))
    assert first == second
    drawn = {f"figures/toy_{name}.{kind}" for name in SPEED_FIGURES for kind in ("png", "svg")}
    assert set(first) == {"speed.csv", "crossover.csv", "unsupported.csv", "columns.md", "environment.json"} | drawn
    failed = pd.read_csv(tmp_path / "a" / "unsupported.csv")
    assert len(failed) == 4
    assert all("cudnn runs on CUDA devices" in reason for reason in failed["reason"])
    for name in ("speed.csv", "crossover.csv", "unsupported.csv"):
        assert not [column for column in pd.read_csv(tmp_path / "a" / name).columns if meaning(column) is None]
    assert "attention.backend: cudnn" in console.export_text()
    with pytest.raises(BadInput, match="results"):
        make_speed_report(tmp_path / "none", tmp_path / "out")


def line(algorithm: str, series: str, times: dict[int, float]) -> pd.DataFrame:
    shape: dict[str, Any] = {"study": "s", "scenario": "normal", "scenario.title": "normal inputs", "format": "bf16"}
    shape |= {"problem.shape.head_dim": 64, "problem.mask.causal": False}
    shape |= {"phase": "prefill", "problem.shape.heads": 4, "problem.shape.kv_heads": 2, "problem.mask.window": None}
    common = shape | {"algorithm": algorithm, "attention": series, "series": series}
    return pd.DataFrame([common | {"problem.shape.keys": n, "latency": t} for n, t in times.items()])


@given(st.floats(5.5, 11.5), st.floats(0.2, 0.9))
def test_two_straight_lines_cross_where_they_cross(crossing: float, steepness: float) -> None:
    """Vanilla as N^2, the other as N^(2 - s) and slower below 2^crossing: on log axes both are straight."""
    lengths = [1 << i for i in range(5, 13)]
    vanilla = {n: float(n) ** 2 for n in lengths}
    tiled = {n: n ** (2 - steepness) * 2 ** (crossing * steepness) for n in lengths}
    found = crossovers(pd.concat([line("vanilla", "vanilla", vanilla), line("tiled", "tiled", tiled)]))
    assert len(found) == 1
    assert found["crossover"][0] == pytest.approx(2**crossing, rel=1e-6)
    assert not found["from_the_start"][0]
    assert found["times_at_longest"][0] == pytest.approx(vanilla[4096] / tiled[4096])


def test_faster_from_the_start_never_and_again_slower() -> None:
    vanilla = line("vanilla", "vanilla", {32: 1.0, 64: 1.0, 128: 1.0})
    always = line("tiled", "always", {32: 0.5, 64: 0.5})
    never = line("tiled", "never", {32: 2.0, 64: 0.5, 128: 1.5})
    late = line("tiled", "late", {32: 0.5, 64: 2.0, 128: 0.5})
    found = crossovers(pd.concat([vanilla, always, never, late])).set_index("series")
    assert found["crossover"]["always"] == 32
    assert found["from_the_start"]["always"]
    assert found["longest"]["always"] == 64
    assert math.isnan(found["crossover"]["never"])
    assert found["crossover"]["late"] == pytest.approx(64 * math.sqrt(2))


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    point = StudyPoint(Problem(Distribution(), Shape(queries=8, keys=8)), Sdpa(Backend.CUDNN), None, 1)
    run(Study("none", "None", None, (), (point,)), speed_bench("cpu"), Store(tmp_path / "results"))
    make_speed_report(tmp_path / "results", tmp_path / "out", Console(quiet=True))
    assert len(pd.read_csv(tmp_path / "out" / "unsupported.csv")) == 1
    assert not (tmp_path / "out" / "figures").exists()


def test_every_line_lies_within_its_panel(results: Path) -> None:
    """Panels that share an axis, the second with ten times the speed and a thousandth of the memory."""
    rows = frame(load(Store(results)))
    rows = rows[rows["phase"] == "prefill"]
    wider = rows.assign(tflops=10 * rows["tflops"], peak_bytes=rows["peak_bytes"] / 1000)
    wider["problem.shape.head_dim"] = 32
    for name in ("throughput", "memory"):
        with styled():
            figure = SPEED_FIGURES[name](pd.concat([rows, wider]))
        assert len(figure.axes) == 2
        for axes in figure.axes:
            low, high = axes.get_ylim()
            heights = [float(y) for line in axes.get_lines() for y in np.atleast_1d(line.get_ydata())]
            assert low <= min(heights) <= max(heights) <= high


@pytest.mark.parametrize("name", SPEED_FIGURES)
def test_every_axis_is_named_and_no_text_leaves_the_figure(name: str, results: Path) -> None:
    plot = SPEED_FIGURES[name]
    with styled():
        figure = plot(frame(load(Store(results))))
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert_legible(figure)
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02
    assert figure.get_supxlabel()
    assert figure.get_supylabel()
    assert len(plot.alt) > 60
    assert plot.title


def test_the_tradeoff_spans_a_decade_and_names_its_points(results: Path) -> None:
    rows = frame(load(Store(results)))
    figure = SPEED_FIGURES["tradeoff"](rows)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(rows["series"])
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert high / low >= 10 * (1 - 1e-9)
        drawn = [float(np.asarray(line.get_ydata())[0]) for line in axes.lines]
        assert drawn
        assert all(low < y < high for y in drawn)


def test_an_attention_looks_as_its_role_in_the_study() -> None:
    entries = {"plain": "control", "first": None, "whole": "aside", "second": None}
    rows = pd.DataFrame({"series": [*entries, *entries], "role.kernel": [*entries.values()] * 2})
    found = looks(rows)
    assert list(found) == list(entries)
    assert len(set(found.values())) == 4
    renamed = looks(rows.assign(series=rows["series"].str.upper()))
    assert list(renamed.values()) == list(found.values())
    assert looks(rows.drop(columns="role.kernel"))["plain"] != found["plain"]


def test_a_study_says_what_the_others_are_held_against() -> None:
    plain = line("vanilla", "whole", {32: 1.0, 64: 1.0}).assign(**{"role.kernel": "control"})
    other = line("vanilla", "vanilla", {32: 9.0, 64: 9.0}).assign(**{"role.kernel": None})
    tiled = line("tiled", "tiled", {32: 0.5, 64: 0.5}).assign(**{"role.kernel": None})
    assert crossovers(pd.concat([plain, other, tiled]))["times_at_longest"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "d = 64, no mask, bf16, 8 heads"),
        ({"problem.mask.causal": True}, "d = 64, causal, bf16, 8 heads"),
        ({"problem.mask.window": math.nan, "problem.shape.kv_heads": 2}, "d = 64, no mask, bf16, 8 heads on 2"),
        ({"problem.mask.window": 128.0, "problem.mask.causal": True}, "d = 64, causal window 128, bf16, 8 heads"),
    ],
)
def test_a_shape_in_words(changed: dict[str, object], expected: str) -> None:
    shape = {"format": "bf16", "problem.shape.head_dim": 64, "problem.shape.heads": 8, "problem.shape.kv_heads": 8}
    assert shape_text(shape | {"problem.mask.causal": False, "problem.mask.window": None} | changed) == expected
