"""A user's own sweep, and points one by one: kept with what was stated, reported, drawn and compared like a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import numdev as nd
from numdev.results.store import Store
from tests.cli.commands import Command, refusal
from tests.test_examples import CONFIGS, ROWS

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


def test_a_sweep_of_speed(numdev: Command) -> None:
    quick = ("timing.seconds=0.001", "timing.least=3", "timing.most=3", "problem.n=16", "problem.head_dim=8", "device=cpu")
    assert numdev("speed", *quick, "-m", "attention=tiled,naive").code == 0
    ran = numdev("report", "results=results/speed", "out=o")
    assert ran.code == 0, ran.err
    assert set(pd.read_csv("o/speed.csv")["label.attention"]) == {"tiled", "naive"}
    (figure,) = Path("o/figures").glob("*.svg")
    assert "median time of one call over implementation" in figure.read_text().lower()
    assert "tflops" in nd.load("results/speed")
    assert refusal(numdev("report", "results=results/speed", "out=o", "format=pdf")).startswith("format: ")
