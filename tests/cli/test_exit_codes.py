"""Exit codes: what CI sees of points that have no figures, alone, in sweeps and in studies."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numdev.cli.exit_codes import BAD_INPUT, FAILED, UNSUPPORTED, code_of, code_of_study, worst
from numdev.errors import BadInput, Unsupported
from numdev.results.record import BAD_OUTPUT, Status
from tests.cli.commands import Command, refusal

SMALL = ("problem.n=8", "problem.head_dim=4", "seeds=1", "device=cpu")
MINE = """\
import sys
import numdev as nd
def refuses(q, k, v, mask, scale):
    raise nd.Unsupported('problem.n', 'never')
def forgets(q, k, v, mask, scale):
    raise MemoryError('no more')
def fails(q, k, v, mask, scale):
    raise RuntimeError('deliberate')
def exits(q, k, v, mask, scale):
    sys.exit(7)
def works(q, k, v, mask, scale):
    return v
def breaks(q, k, v, mask, scale):
    return v * float('nan')
def loses(q, k, v, mask, scale):
    return v * 0
def widens(q, k, v, mask, scale):
    return v.double()
"""
TIMING = {"measure": (), "speed": ("timing.seconds=0.001", "timing.least=3", "timing.most=3")}
STUDY = """\
title: Mine
base: {{attention: custom, problem.n: 8, problem.head_dim: 4, seeds: 1, precision: fp32}}
axes:
  attention.function: [{}]
"""


WHOLE = ("measure", "--config-dir", "mine", "study=mine", "device=cpu")


def study_of(functions: str) -> str:
    return STUDY.format(", ".join(f'"mine:{name}"' for name in functions.split(",")))


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)


@given(st.lists(st.sampled_from(Status), max_size=6))
def test_of_a_study(statuses: list[Status]) -> None:
    code = code_of_study(statuses)
    if Status.ERROR in statuses:
        assert code == 1
    elif set(BAD_OUTPUT) & set(statuses):
        assert code == 5
    elif not statuses or Status.OK in statuses:
        assert code == 0
    else:
        assert code == (1 if Status.OUT_OF_MEMORY in statuses else 3)


@given(st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=6))
def test_the_gravest_is_first_a_bad_setting_then_a_failure(codes: list[int]) -> None:
    order = [2, 1, 5, 3, 0]
    assert worst(codes) == (order[min(map(order.index, codes))] if codes else 0)


@pytest.mark.parametrize(
    ("program", "functions", "code"),
    [
        ("measure", "works", 0),
        ("measure", "widens", 5),
        ("measure", "refuses", 3),
        ("measure", "works,refuses", 3),
        ("measure", "exits", 1),
        ("measure", "breaks,exits", 1),
        ("measure", "breaks,fails", 1),
        ("speed", "works,breaks", 5),
        ("speed", "refuses,forgets", 1),
    ],
)
def test_of_points_and_sweeps(numdev: Command, program: str, functions: str, code: int) -> None:
    function = ",".join(f"mine:{name}" for name in functions.split(","))
    own = ("attention=custom", "precision=fp32", f"attention.function={function}")
    ran = numdev(program, *(["-m"] if "," in functions else []), *SMALL, *TIMING[program], *own)
    assert ran.code == code, ran.out + ran.err


@pytest.mark.parametrize(
    ("functions", "code", "said"),
    [
        ("works,refuses,forgets", 0, "1 unsupported, 1 out_of_memory"),
        ("works,loses,widens,breaks", 5, "1 nonfinite, 1 zero, 1 invalid"),
        ("works,fails,exits", 1, "2 error"),
        ("refuses", 3, "1 unsupported"),
    ],
)
def test_of_studies(numdev: Command, own_study: Any, functions: str, code: int, said: str) -> None:
    """What is unsupported by design does not fail a study whose other points have figures; the summary says it."""
    own_study(study_of(functions), "mine")
    ran = numdev(*WHOLE)
    assert ran.code == code, ran.out + ran.err
    (summary,) = [line for line in ran.out.splitlines() if line.startswith("mine: ")]
    assert summary.endswith(said)


def test_a_function_that_ends_python_is_an_error_of_its_point_in_a_worker_too(numdev: Command, own_study: Any) -> None:
    own_study(study_of("works,exits"), "mine")
    ran = numdev(*WHOLE, "workers=2")
    assert ran.code == 1
    assert "mine: 2 points, 2 measured" in ran.out
    assert "it called sys.exit(7) (in exits of mine.py, line " in " ".join(ran.out.split())


def test_a_full_disk_ends_a_study_with_2_and_loses_nothing(
    numdev: Command, own_study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_study(study_of("works,breaks,refuses"), "mine")
    replace, calls = os.replace, []

    def fills_up(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) > 2:  # the manifest and the first record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*paths)

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fills_up)
        ran = numdev(*WHOLE)
    assert ran.code == 2
    (sentence,) = [line for line in ran.err.splitlines() if line.startswith("results: ")]
    assert sentence.endswith("could not be written (No space left on device); free some space, then run again")
    assert "3 points, 2 measured" in numdev(*WHOLE).out


def test_a_disk_that_fills_up_within_a_measurement_ends_with_2(numdev: Command) -> None:
    Path("mine.py").write_text("def full(q, k, v, mask, scale):\n    raise OSError(28, 'No space left on device', 'scratch')\n")
    ran = numdev("measure", *SMALL, "attention=custom", "precision=fp32", "attention.function=mine:full")
    sentence = refusal(ran)
    assert "scratch" in sentence
    assert "free some space" in sentence


def test_what_reads_results_says_it_and_ends_so_too(numdev: Command, own_study: Any) -> None:
    """A study of a kernel that is sound and one that is not; the comparison of equal results has no regression."""
    for functions, code in (("works", 0), ("works,breaks", 5)):
        own_study(study_of(functions), "mine")
        assert numdev(*WHOLE).code == code
        report, compared = numdev("report", "out=report"), numdev("compare", "results", "results")
        assert (report.code, compared.code) == (code, code), report.out + compared.out
    said = "1 of 2 points have an output that is wrong or not finite (1 nonfinite). mine"
    assert next(line for line in report.out.splitlines() if line).startswith(f"note: {said}")
    assert compared.out.startswith(f"note: A: {said}")
    assert "no regression in 2 comparisons" in compared.out
    own_study(study_of("fails,exits"), "mine")
    assert (numdev(*WHOLE, "results=bad").code, numdev("report", "results=bad", "out=bad_report").code) == (1, 1)


def test_what_an_implementation_refuses_has_the_code_of_unsupported_points() -> None:
    codes = [code_of(error) for error in (Unsupported("kernel", "no"), BadInput("kernel", "x", "y"), RuntimeError())]
    assert codes == [UNSUPPORTED, BAD_INPUT, FAILED]
