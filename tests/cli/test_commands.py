"""Commands as users type them: maps, speed, sweeps, points one by one, and studies measured by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import numdev as nd
from numdev.cli.progress import Progress as Bar
from numdev.errors import StoreError
from numdev.measurement.runner import Runner
from numdev.results.record import Record
from numdev.results.store import Store
from tests.cli.commands import Command, refusal
from tests.test_examples import CONFIGS, ROWS

SMALL = ("problem.n=16", "problem.head_dim=8", "device=cpu")
FIGURES = ("error_map.png", "error_map.svg", "error_histogram.png", "error_histogram.svg")


def test_the_largest_error_of_a_map_is_that_of_the_measurement(numdev: Command, tmp_path: Path) -> None:
    """Of the third replicate of another problem than the default, which `numdev measure` stores under its place."""
    stated = (*SMALL, "problem=normal", "precision=fp16", "problem.heads=2")
    ran = numdev("map", *stated, "seed=2", "head=1", "out=m")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == sorted((*FIGURES, "elements.csv"))
    numdev("measure", *stated, "seeds=3", "results=r")
    record = next((tmp_path / "r" / "records").glob("*.json")).read_text()
    rows = [r for r in yaml.safe_load(record)["tables"]["deviation"] if r["seed"] == 2 and r["output"] == "out"]
    found = next(r for r in rows if (r["subject"], r["reference"]) == ("variant", "golden"))
    both = [pd.read_csv(tmp_path / "m" / "elements.csv")]
    numdev("map", *stated, "seed=2", "out=m")
    both.append(pd.read_csv(tmp_path / "m" / "elements.csv"))
    assert max(own["error"].abs().max() for own in both) == pytest.approx(found["max_difference"], rel=1e-6)
    worst = both[0].iloc[int(both[0]["error"].abs().argmax())]
    assert f"at row {worst['row']}, column {worst['column']}, " in ran.out
    assert "out of attention=tiled precision=fp16: head 1 of 2, replicate 2, 16 x 8 elements" in ran.out


@pytest.mark.parametrize(("output", "rows"), [("dq", 8), ("dv", 16)])
def test_a_map_of_gradients(numdev: Command, tmp_path: Path, output: str, rows: int) -> None:
    ran = numdev("map", *SMALL, "problem.queries=8", "operation=attention_backward", f"output={output}", "out=m")
    assert (ran.code, ran.err) == (0, "")
    assert f"{output} of backward=tiled precision=bf16: replicate 0, {rows} x 8 elements" in ran.out
    assert len(pd.read_csv(tmp_path / "m" / "elements.csv")) == 8 * rows


def test_a_map_of_the_difference_from_a_baseline(numdev: Command) -> None:
    ran = numdev("map", *SMALL, "reference=baseline", "baseline=uniform", "out=m")
    assert (ran.code, ran.err) == (0, "")
    assert "u max |baseline|" in ran.out
    assert "replaced" not in ran.out
    own = numdev("map", *SMALL, "subject=baseline", "baseline=uniform", "out=m")
    assert own.out.startswith("out of baseline=uniform: replicate 0")
    assert own.out.rstrip().endswith("; the last map there is replaced")


def test_a_sweep_of_maps_has_a_folder_for_each_job(numdev: Command, tmp_path: Path) -> None:
    ran = numdev("map", "-m", *SMALL, "precision=bf16,fp16", "out=m")
    assert ran.code == 0
    folders = [path for path in (tmp_path / "m").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all((folder / name).is_file() for folder in folders for name in FIGURES)


def test_a_map_of_a_kernel_without_its_device_is_unsupported(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ran = numdev("map", *SMALL, "attention=triton")
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)


def test_a_function_that_ends_python_is_an_error_of_its_map(numdev: Command) -> None:
    Path("exits.py").write_text("def mine(q, k, v, mask, scale):\n    raise SystemExit(7)\n")
    ran = numdev("map", *SMALL, "attention=custom", "attention.function=exits:mine")
    assert ran.code == 1
    assert "it called sys.exit(7) (in mine of exits.py, line 2)" in ran.err


POINT = ("problem.n=32", "problem.head_dim=8", "device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3")
STUDY = """\
title: Toy
base: {baseline: none, problem.head_dim: 8, precision: fp32, seeds: 1}
axes:
  kernel: {vanilla: {attention: vanilla}, math: {attention: sdpa, attention.backend: math}, none: {attention: flex}}
  problem.n: [16, 32]
"""


def test_one_point_of_speed_shows_every_figure(numdev: Command) -> None:
    ran = numdev("speed", *POINT, "attention=vanilla", "precision=fp32", "metrics=all")
    assert ran.code == 0
    for word in ("latency", "tflops", "peak_bytes", "intensity", "rmse"):
        assert word in ran.out
    assert len(list(Store(Path("results/speed")).records())) == 1
    assert "already measured" in numdev("speed", *POINT, "attention=vanilla", "precision=fp32").out


def test_a_sweep_of_speed_is_a_line_each(numdev: Command) -> None:
    ran = numdev("speed", *POINT, "-m", "attention=vanilla,tiled,flex")
    assert ran.code == 3, "flex has no figures here"
    _, names, *lines = ran.out.splitlines()
    assert names.split() == ["attention", "ms", "TFLOP/s", "of", "matmul", "MiB", "RMSE", "status"]
    assert [line.split()[0] for line in lines] == ["vanilla", "tiled", "flex"]
    assert float(lines[0].split()[1]) > 0
    assert "unsupported, attention: FlexAttention" in lines[2]


def test_a_study_of_speed_ends_with_its_report_and_goes_on_where_it_stopped(numdev: Command, own_study: Any) -> None:
    own_study(STUDY)
    command = ("speed", "--config-dir", "mine", "study=toy", *POINT[2:], "out=shown")
    first = numdev(*command)
    assert first.code == 0
    assert "6 points, 6 measured" in first.out
    assert len(pd.read_csv("shown/speed.csv")) == 4
    assert (pd.read_csv("shown/points.csv")["status"] == "unsupported").sum() == 2
    assert Path("shown/figures/toy_memory.svg").is_file()
    assert "0 measured" in numdev(*command).out
    told = Store(Path("results/speed")).studies()["toy"]["command"]
    assert told == "numdev speed --config-dir mine study=toy timing.seconds=0.001 timing.least=3 timing.most=3"


TINY = ("problem.head_dim=8", "seeds=2", "device=cpu")
SWEEP = (*TINY, "tiling.bc=8", "-m", "problem.n=16,32,64", "precision=bf16,fp16")


def the_sweep(results: str = "results") -> tuple[str, dict[str, object]]:
    ((name, manifest),) = Store(Path(results)).studies().items()
    return name, manifest


@pytest.mark.slow
def test_a_sweep_has_a_report_a_figure_a_document_and_a_comparison(numdev: Command) -> None:
    assert numdev("measure", *SWEEP).code == 0
    name, manifest = the_sweep()
    assert manifest["swept"] == ["problem.n", "precision"]
    assert manifest["title"] == "Sweep over sequence length N and precision policy; head dimension d = 8, tile columns Bc = 8"
    assert (
        manifest["command"] == "numdev measure problem.head_dim=8 seeds=2 tiling.bc=8 -m problem.n=16,32,64 precision=bf16,fp16"
    )

    ran = numdev("report", "out=o", "format=pdf")
    assert ran.code == 0, ran.err
    assert Path("o/report.pdf").read_bytes().startswith(b"%PDF")
    summary = pd.read_csv("o/summary.csv")
    own = summary[(summary["subject"] == "variant") & (summary["output"] == "out") & (summary["reference"] == "golden")]
    assert own[["label.problem.n", "label.precision"]].values.tolist() == [[n, p] for n in (16, 32, 64) for p in ("bf16", "fp16")]
    drawn = Path(f"o/figures/{name}.svg").read_text()
    assert "RMSE of out from golden over sequence length N, by precision policy" in drawn
    assert Path(f"o/figures/{name}.png").is_file()

    same = numdev("compare", "results", "results", "out=c")
    assert (same.code, same.err) == (0, "")
    assert "no regression in 12 comparisons" in same.out  # out and lse
    assert set(pd.read_csv("c/compare.csv")["change"]) == {"equal bits"}

    asked = numdev("report", "out=p", "plot=x: precision, y: lse.max_ulp, colour: subject, facet: problem.n")
    assert asked.code == 0, asked.err
    drawn = Path("p/figures/plot.svg").read_text()
    assert "Largest difference of lse from golden over precision policy, by implementation, for each sequence length N" in drawn

    sentence = refusal(numdev("report", "out=q", "plot=x: problem.m"))
    assert sentence.startswith("plot.x: 'problem.m' cannot be used; the results have no such column; did you mean problem.n")
    assert not Path("q").exists(), "what is asked for is checked before anything is written"


def test_the_page_names_its_sweep_as_the_results_do(numdev: Command) -> None:
    assert numdev("measure", "-m", "problem.n=4,8", "precision=bf16,fp16", "tiling.bc=64", "seeds=1").code == 0
    page = Path(__file__).parents[2] / "docs" / "how-to" / "own-sweep.md"
    assert page.read_text().count(f"numdev report study={the_sweep()[0]} plot=") == 2


def test_a_sweep_that_goes_on_is_the_same_sweep_and_another_one_is_not(numdev: Command) -> None:
    numdev("measure", *TINY, "-m", "problem.n=16,32")
    numdev("measure", "problem.head_dim=8", "seeds=3", "-m", "problem.n=32,64", "device=cpu")
    _, manifest = the_sweep()
    points = manifest["points"]
    assert isinstance(points, list)
    assert sorted(point["labels"]["problem.n"] for point in points) == [16, 32, 64]
    seeds = {point["labels"]["problem.n"]: Store(Path("results")).get(point["key"]) for point in points}
    assert {n: record.config["seeds"] for n, record in seeds.items() if record} == {16: 2, 32: 3, 64: 3}
    assert str(manifest["command"]).count("numdev measure") == 2
    numdev("measure", *TINY, "softmax=fa1", "-m", "problem.n=16,32")
    assert len(Store(Path("results")).studies()) == 2
    frame = nd.load("results")
    assert set(frame["label.softmax"]) == {"fa1", "fa2"}, "who does not state it has the default"
    figure = nd.plot(frame, x="problem.n", y="rmse", colour="softmax")
    assert figure.axes[0].get_xlabel() == ""  # it stands below all panels
    assert figure.get_supxlabel() == "sequence length N, tokens"
    assert figure.get_supylabel() == "RMSE of out from golden, absolute"


def test_a_point_beside_a_sweep_has_a_line_of_its_own(numdev: Command) -> None:
    assert numdev("measure", *TINY, "precision=kernel_bf16", "precision.probabilities=e4m3fn", "problem.n=32").code == 0
    assert numdev("measure", *TINY, "-m", "precision=bf16,kernel_bf16", "problem.n=16,64").code == 0
    frame = nd.load("results")
    figure: Any = nd.plot(frame, x="problem.n", y="out.max_difference", colour="precision")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    places = [container.lines[0].get_xdata().tolist() for container in figure.axes[0].containers]
    found = dict(zip(names, places, strict=True))
    assert found["kernel_bf16, format of probabilities = e4m3fn"] == [32]
    assert found["kernel_bf16"] == found["bf16"] == [16, 64]


def test_single_points_have_a_report(numdev: Command) -> None:
    for precision in ("bf16", "fp16"):
        assert numdev("measure", "problem.n=16", *TINY, f"precision={precision}").code == 0
    name, manifest = the_sweep()
    assert (name, manifest["swept"]) == ("points_attention", [])
    ran = numdev("report", "out=o")
    assert ran.code == 0, ran.err
    assert set(pd.read_csv("o/points.csv")["label.precision"]) == {"bf16", "fp16"}
    assert Path("o/figures/points_attention.png").is_file()


@pytest.mark.slow
def test_a_sweep_of_the_backward_pass_and_one_of_a_foreign_operation(numdev: Command) -> None:
    small = ("operation=attention_backward", "problem.n=16", *TINY, "results=backward")
    assert numdev("measure", *small, "-m", "precision=bf16,fp16").code == 0
    ran = numdev("report", "results=backward", "out=b", "plot=x: precision, y: dk.rmse")
    assert ran.code == 0, ran.err
    figure = Path("b/figures/plot.svg")
    assert "RMSE of dk from golden over precision policy" in figure.read_text()

    ran = numdev("measure", *CONFIGS, *ROWS, "results=foreign", "-m", "form.block=16,32,64", "precision=bf16,kernel_bf16")
    assert ran.code == 0, ran.err
    ran = numdev("report", "results=foreign", "out=f")
    assert ran.code == 0, ran.err
    (figure,) = Path("f/figures").glob("*.svg")
    assert "RMSE of p from golden over form.block, by precision policy" in figure.read_text()


@pytest.mark.slow
def test_a_document_has_a_title_and_an_author_of_ones_own(numdev: Command) -> None:
    assert numdev("measure", *TINY, "-m", "tiling.bc=8,16").code == 0
    head = ("title=Tiles, Bc: it's & co", "author=A. Author")
    assert numdev("report", "out=h", "format=html", *head).code == 0
    page = Path("h/report.html").read_text()
    assert "<title>Tiles, Bc: it&#39;s &amp; co</title>" in page
    assert '<meta name="author" content="A. Author">' in page
    assert "it stands in a document; give format=pdf" in refusal(numdev("report", "out=o", *head))


def test_a_sweep_of_speed_has_a_report(numdev: Command) -> None:
    quick = ("timing.seconds=0.001", "timing.least=3", "timing.most=3", "problem.n=16", "problem.head_dim=8", "device=cpu")
    assert numdev("speed", *quick, "-m", "attention=tiled,naive").code == 0
    ran = numdev("report", "results=results/speed", "out=o")
    assert ran.code == 0, ran.err
    assert set(pd.read_csv("o/speed.csv")["label.attention"]) == {"tiled", "naive"}
    (figure,) = Path("o/figures").glob("*.svg")
    assert "median time of one call over implementation" in figure.read_text().lower()
    assert "tflops" in nd.load("results/speed")
    assert refusal(numdev("report", "results=results/speed", "out=o", "format=pdf")).startswith("format: ")


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


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
class TestWorkers:
    """Studies measured by several processes: the same records, the same words, whatever happens to one of them."""

    @pytest.fixture(autouse=True)
    def _several(self, own_study: Any) -> None:
        own_study(WHOLE, "several")

    def test_no_byte_of_a_study_depends_on_the_number_of_workers(self, numdev: Command) -> None:
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

    def test_a_mistake_of_a_worker_ends_the_command_as_its_own_would(
        self, numdev: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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

    def test_ctrl_c_keeps_what_is_measured(self, numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_gradients_and_functions_of_the_user_are_measured_by_workers(self, numdev: Command, own_study: Any) -> None:
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
