"""A kind of measurement of one's own: two classes, and it is run, stored, read and explained; what a runner keeps."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, zeros

from numdev.attention.exact import Exact
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Distribution, Problem, Shape
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation import Deviations
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kept, Kind, Point, Runner
from numdev.measurement.studies import run
from numdev.report.document.report import make_report
from numdev.report.reading.frames import load
from numdev.results.record import Column, Status, Use
from numdev.results.store import LONG, Store
from numdev.results.study import Study, StudyPoint

SEED = Column("seed", "", "the replicate", Use.PLACE)


@dataclass(frozen=True)
class Largest(Kind):
    """The kind `largest`: the largest entry of each input, and, in a long table, every entry of the first."""

    operation: Operation = ATTENTION
    name: ClassVar[str] = "largest"
    seeds: ClassVar[int] = 3

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        input_, entry = Column("input", "", "which input", Use.PLACE), Column("entry", "", "an entry of the first")
        largest = Column("largest", "absolute", "largest entry", Use.CHIEF)
        return {"largest": (SEED, input_, largest), "entries": (SEED, entry)}

    def run(self, point: Point, context: Context) -> Findings:
        if point.problem.shape.queries == 1:
            raise Unsupported("problem.queries", "one query is not enough")
        rows, entries = [], []
        for seed in context.replicates():
            drawn = self.operation.draw(point.problem, seed, context.device)
            names = [name for inputs in self.operation.inputs for name in inputs.names]
            rows += [{"seed": seed, "input": n, "largest": float(t.max())} for n, t in zip(names, drawn, strict=True)]
            entries += [{"seed": seed, "entry": value} for value in drawn[0].flatten().tolist()]
        return Findings({"largest": rows, "entries": entries}, kernel="max")


def problem(queries: int) -> Problem:
    return Problem(Distribution(), Shape(queries=queries, keys=8, head_dim=64))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    points = tuple(StudyPoint(problem(n), Exact(), None, 3, "one", {"n": n}) for n in (1, 16))
    store = Store(tmp_path)
    run(Study("mine", "Mine", None, (), points), Runner(Largest(), "cpu"), store)
    return store


def test_the_runner_gives_it_key_seeds_status_and_progress() -> None:
    runner, calls = Runner(Largest(), "cpu"), list[tuple[int, int]]()
    record = runner.measure(problem(16), None, on_replicate=lambda done, total: calls.append((done, total)))
    assert (record.kind, record.operation, record.outputs, record.kernel) == ("largest", "attention", ("out", "lse"), "max")
    assert (record.status, record.key) == (Status.OK, runner.key(problem(16), None))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert [row["input"] for row in record.rows] == ["q", "k", "v"] * 3
    assert runner.measure(problem(1), None).reason == "problem.queries: one query is not enough"
    with pytest.raises(BadInput, match="^seeds: 0 "):
        runner.measure(problem(16), None, seeds=0)
    assert "input  largest" in repr(record)


def test_the_store_keeps_every_table(store: Store) -> None:
    good = next(record for record in store.records() if record.status is Status.OK)
    q = problem(16).inputs(2)["q"].flatten().tolist()
    assert len(good.table("entries")) == 3 * len(q) > LONG
    assert [row["entry"] for row in good.table("entries") if row["seed"] == 2] == q
    assert list((store.path / "records" / good.key).glob("entries.*.parquet"))


def test_numdev_report_has_its_tables_its_figure_and_its_documents(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_report(store.path, out, console=Console(file=StringIO()), formats=("pdf", "html"))
    summary = pd.read_csv(out / "summary.csv")
    expected = {name: max_of(name) for name in "qkv"}
    assert dict(zip(summary["input"], summary["largest.mean"], strict=True)) == pytest.approx(expected, rel=1e-8)
    assert summary["replicates"].tolist() == [3, 3, 3]
    assert len(pd.read_csv(out / "entries.csv")) == 3 * 16 * 64
    assert "| `largest` | absolute, in the units of the output | largest entry |" in (out / "columns.md").read_text()
    drawn, page = (out / "figures" / "mine.svg").read_text(), (out / "report.html").read_text()
    assert "Largest over input" in drawn
    assert "Measurements of largest" in page
    assert not [word for word in ("golden", "numdev measure", "baseline") if word in page.partition("<script")[0]]
    assert (out / "report.pdf").read_bytes().startswith(b"%PDF")


def max_of(name: str) -> float:
    """The mean over replicates of the largest entry of an input, by another way."""
    return sum(float(problem(16).inputs(seed)[name].max()) for seed in range(3)) / 3


def test_kinds_that_stand_beside_one_another_have_folders_of_their_own(store: Store, tmp_path: Path) -> None:
    points = (StudyPoint(problem(16), Exact(), None, 1, "one", {"n": 16}),)
    run(Study("far", "Far", None, (), points), Runner(Deviations(ATTENTION), "cpu"), store)
    make_report(store.path, tmp_path / "both", console=Console(file=StringIO()))
    assert set(pd.read_parquet(tmp_path / "both" / "results.parquet")["study"]) == {"far"}
    assert set(pd.read_parquet(tmp_path / "both" / "largest" / "results.parquet")["study"]) == {"mine"}
    with pytest.raises(BadInput, match="a figure is of one kind; name the studies of deviation or largest"):
        make_report(store.path, tmp_path / "no", plot={"x": "n"})


def test_a_report_reads_its_rows_and_says_what_they_mean(store: Store) -> None:
    result = load(store, kind="largest")
    assert result.rows[["label.n", "seed", "input"]].to_numpy().tolist() == [[16, s, i] for s in range(3) for i in "qkv"]
    assert result.points["kind"].tolist() == ["largest"] * 2
    assert result.points["status"].tolist() == ["unsupported", "ok"]
    with pytest.raises(BadInput, match="holds no results of deviation but mine of largest"):
        load(store, kind="deviation")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=40), st.integers(1, 12))
def test_it_is_a_dictionary_that_evicts_the_least_recently_used(uses: list[tuple[int, int]], limit: int) -> None:
    """Against a model; the sizes of a key's value differ, one larger than the limit is kept alone."""
    kept, model, made = Kept(8 * limit), OrderedDict[int, int](), list[int]()
    for key, size in uses:

        def make(key: int = key, size: int = size) -> tuple[Tensor, ...]:
            made.append(key)
            return tuple(zeros(1).double() for _ in range(size))

        before = len(made)
        kept.get(key, make)
        assert (len(made) > before) == (key not in model)
        model.setdefault(key, min(size, limit))
        model.move_to_end(key)
        while sum(model.values()) > limit:
            model.popitem(last=False)


def test_a_value_that_needs_others_is_kept_with_them() -> None:
    kept = Kept(1 << 10)
    assert kept.get("sum", lambda: kept.get("one", lambda: 1) + kept.get("two", lambda: 2)) == 3
    assert kept.get("one", lambda: 5) == 1
