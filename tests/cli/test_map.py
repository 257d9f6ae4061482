"""`numdev map`: what it takes, refuses, writes and says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.cli.commands import Command

SMALL = ("problem.n=16", "problem.head_dim=8", "device=cpu")
FIGURES = ("error_map.png", "error_map.svg", "error_histogram.png", "error_histogram.svg")


def test_the_largest_error_is_that_of_the_measurement(numdev: Command, tmp_path: Path) -> None:
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
def test_gradients(numdev: Command, tmp_path: Path, output: str, rows: int) -> None:
    ran = numdev("map", *SMALL, "problem.queries=8", "operation=attention_backward", f"output={output}", "out=m")
    assert (ran.code, ran.err) == (0, "")
    assert f"{output} of backward=tiled precision=bf16: replicate 0, {rows} x 8 elements" in ran.out
    assert len(pd.read_csv(tmp_path / "m" / "elements.csv")) == 8 * rows


def test_the_difference_from_a_baseline(numdev: Command) -> None:
    ran = numdev("map", *SMALL, "reference=baseline", "baseline=uniform", "out=m")
    assert (ran.code, ran.err) == (0, "")
    assert "u max |baseline|" in ran.out
    assert "replaced" not in ran.out
    own = numdev("map", *SMALL, "subject=baseline", "baseline=uniform", "out=m")
    assert own.out.startswith("out of baseline=uniform: replicate 0")
    assert own.out.rstrip().endswith("; the last map there is replaced")


def test_a_sweep_has_a_folder_for_each_job(numdev: Command, tmp_path: Path) -> None:
    ran = numdev("map", "-m", *SMALL, "precision=bf16,fp16", "out=m")
    assert ran.code == 0
    folders = [path for path in (tmp_path / "m").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all((folder / name).is_file() for folder in folders for name in FIGURES)


def test_a_kernel_without_its_device_is_unsupported(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ran = numdev("map", *SMALL, "attention=triton")
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)


def test_a_function_that_ends_python_is_an_error(numdev: Command) -> None:
    Path("exits.py").write_text("def mine(q, k, v, mask, scale):\n    raise SystemExit(7)\n")
    ran = numdev("map", *SMALL, "attention=custom", "attention.function=exits:mine")
    assert ran.code == 1
    assert "it called sys.exit(7) (in mine of exits.py, line 2)" in ran.err
