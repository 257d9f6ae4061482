"""What a person sees in a terminal: a point, a sweep, a dry run, formats, and mistakes in one's own kernel."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from numdev.cli import show
from numdev.cli.show import Metrics, PointNames, sentences
from numdev.measurement.deviation import COLUMNS, KIND
from numdev.results.record import BAD_OUTPUT, Record, Status, Use
from tests.cli.commands import SMALL, Command, jobs, refusal, unless

NAMES = PointNames("attention=tiled precision=bf16 problem=uniform problem.n=1024", "tiled", "eager")


def record(variant: list[float], baseline: list[float] | None, outputs: tuple[str, ...] = ("out", "lse")) -> Record:
    """A record whose figures are those of its seeds, alike for every metric and output."""
    figures = [column.name for column in COLUMNS if column.use in (Use.CHIEF, Use.FIGURE)]
    of = {("variant", "golden"): variant, ("variant", "golden_same_inputs"): variant}
    if baseline is not None:
        of |= {("variant", "baseline"): variant, ("baseline", "golden"): baseline}
    rows = [
        {"seed": seed, "cluster": "", "subject": subject, "reference": reference, "output": output}
        | dict.fromkeys(figures, value)
        | {"primary": output == outputs[0]}
        for (subject, reference), values in of.items()
        for output in outputs
        for seed, value in enumerate(values)
    ]
    config = {"seeds": len(variant)}
    tables = {KIND: rows, "counters": []}
    return Record("0" * 32, KIND, "attention", outputs, {KIND: COLUMNS, "counters": ()}, config, {}, Status.OK, tables=tables)


def printed(found: Record, metrics: Metrics = Metrics.CHIEF) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show.point(console, found, Path("results"), NAMES, already=True, metrics=metrics)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


class TestPoint:
    @pytest.mark.parametrize("outputs", [("out", "lse"), ("dq", "dk", "dv", "delta")])
    def test_fits_a_terminal_of_80_by_24(self, outputs: tuple[str, ...]) -> None:
        lines = printed(record([1.234e-5, 1.345e-5, 1.456e-5], [2.345e-6, 3.456e-6, 2.567e-6], outputs))
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines), "no figure is clipped"
        assert lines[0] == NAMES.line
        assert all(any(line.startswith(output) for line in lines) for output in outputs)

    @pytest.mark.parametrize(
        ("variant", "baseline", "said"),
        [
            ([2.0, 2.2, 2.1], [1.0, 1.0, 1.0], "tiled / baseline = 2.1 [1.9, 2.4]: deviates more."),
            ([1.0, 1.0, 1.1], [2.0, 2.0, 2.0], ": deviates less."),
            ([1.0, 1.2, 0.8], [1.0, 1.0, 1.0], ": no difference is shown."),
            ([1.0, 2.0], [1.0, 2.0], ": deviates equally."),
            ([2.0], [1.0], "tiled / baseline = 2.0 (one replicate)."),
            ([2.0, 0.0, 2.1], [1.0, 1.0, 1.0], ", without 1 zero or not finite: deviates more."),
            ([0.0, 0.0], [1.0, 1.0], "tiled / baseline = unknown, without 2 zero or not finite."),
        ],
    )
    def test_says_in_words_which_deviates_more(self, variant: list[float], baseline: list[float], said: str) -> None:
        _, sentence = sentences(record(variant, baseline), NAMES)
        assert sentence.endswith(said)

    @pytest.mark.parametrize("status", BAD_OUTPUT)
    def test_gives_no_verdict_of_a_wrong_output(self, status: Status) -> None:
        found = replace(record([1.0, 1.0, 1.1], [2.0, 2.0, 2.0]), status=status, reason="many are wrong")
        (sentence,) = sentences(found, NAMES)
        assert "deviates" not in sentence
        assert printed(found)[1] == "Many are wrong."

    def test_without_a_baseline_it_gives_the_deviation_with_its_interval(self) -> None:
        (sentence,) = sentences(record([1.0, 1.2, 1.1], None), NAMES)
        assert sentence == "max_difference of out from golden: tiled 1.1 [0.9, 1.3]."


class TestDryRun:
    def test_of_a_point_measures_and_writes_nothing(self, numdev: Command) -> None:
        ran = numdev("measure", *unless(("seeds=",), SMALL), "seeds=4", "dry_run=true")
        assert (ran.code, ran.err) == (0, "")
        assert "1 point, 0 measured already; 4 replicates to measure, " in ran.out
        assert "Nothing was measured or written." in ran.out
        assert not list(Path().iterdir())

    def test_of_a_sweep_and_of_a_study_counts_what_is_there(self, numdev: Command, toy_configs: Path) -> None:
        def there() -> set[str]:
            return {str(path) for path in Path("results").rglob("*") if "sweep" not in path.parts}

        numdev("measure", *SMALL, "-m", "tiling.bc=8")
        before = there()
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=8,16", "dry_run=true")
        assert (ran.code, ran.err) == (0, "")
        assert [line.rpartition("  ")[2] for line in jobs(ran.out)[:2]] == ["measured already", "to measure"]
        assert "2 points, 1 measured already; 1 replicates to measure, " in ran.out
        ran = numdev("measure", "--config-dir", str(toy_configs), "study=toy", "dry_run=true", "device=cpu", "precision=bf16")
        assert ran.code == 0, ran.err
        assert "3 points, 1 measured already; 2 replicates to measure, " in ran.out, "the point of the sweep is one of the study"
        assert there() == before
        assert "memory of the largest point unknown" in numdev("train", "dry_run=true", "device=cpu").out

    def test_refuses_what_needs_figures_or_more_memory_than_there_is(self, numdev: Command) -> None:
        assert refusal(numdev("measure", *SMALL, "dry_run=true", "objective=out.rmse")).startswith("objective: 'out.rmse'")
        assert "are free on cpu; use " in refusal(numdev("measure", "problem.n=100000000000", "device=cpu", "dry_run=true"))


class TestSettings:
    def test_a_syntax_error_in_ones_own_kernel_is_one_sentence(self, numdev: Command) -> None:
        Path("torn.py").write_text("import torch\ndef mine(q, k:\n    return q\n")
        Path("raises.py").write_text("import torch\n\nx = 1 / 0\n")
        for name, words in (("torn", "torn.py, line 2: "), ("raises", "raises.py, line 3: division by zero")):
            sentence = refusal(numdev("measure", *SMALL, "attention=custom", f"attention.function={name}:mine"))
            assert sentence.startswith("attention.function: ")
            assert words in sentence
