"""Exit codes: what CI sees of points that have no figures, alone, in sweeps and in studies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numdev.cli.exit_codes import code_of_point, code_of_study, worst
from numdev.results.record import BAD_OUTPUT, Status
from tests.cli.test_cli import Command, numdev

__all__ = ["numdev"]  # the fixture

SMALL = ("problem.n=8", "problem.head_dim=4", "seeds=1", "device=cpu")
CODES = {Status.OK: 0, Status.UNSUPPORTED: 3, Status.OUT_OF_MEMORY: 1, Status.ERROR: 1} | dict.fromkeys(BAD_OUTPUT, 5)
MINE = """\
import numdev as nd
def refuses(q, k, v, mask, scale):
    raise nd.Unsupported('problem.n', 'never')
def forgets(q, k, v, mask, scale):
    raise MemoryError('no more')
def fails(q, k, v, mask, scale):
    raise RuntimeError('deliberate')
def works(q, k, v, mask, scale):
    return v
def breaks(q, k, v, mask, scale):
    return v * float('nan')
def loses(q, k, v, mask, scale):
    return v * 0
def widens(q, k, v, mask, scale):
    return v.double()
"""
STUDY = """\
title: Mine
base: {{attention: custom, problem.n: 8, problem.head_dim: 4, seeds: 1, precision: fp32}}
axes:
  attention.function: [{}]
"""


@pytest.mark.parametrize("status", Status)
def test_of_a_point(status: Status) -> None:
    assert code_of_point(status) == CODES[status]


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
        ("measure", "breaks,fails", 1),
        ("speed", "works,breaks", 5),
        ("speed", "refuses,forgets", 1),
    ],
)
def test_of_points_and_sweeps(numdev: Command, program: str, functions: str, code: int) -> None:
    Path("mine.py").write_text(MINE)
    function = ",".join(f"mine:{name}" for name in functions.split(","))
    sweep = ("-m",) if "," in functions else ()
    ran = numdev(program, *sweep, *small(program), "attention=custom", "precision=fp32", f"attention.function={function}")
    assert ran.code == code, ran.out + ran.err


def small(program: str) -> tuple[str, ...]:
    return SMALL if program == "measure" else (*SMALL, "timing.seconds=0.001", "timing.least=3", "timing.most=3")


@pytest.mark.parametrize(
    ("functions", "code", "said"),
    [
        ("works,refuses,forgets", 0, "1 unsupported, 1 out_of_memory"),
        ("works,loses,widens,breaks", 5, "1 nonfinite, 1 zero, 1 invalid"),
        ("works,fails", 1, "1 error"),
        ("refuses", 3, "1 unsupported"),
    ],
)
def test_of_studies(numdev: Command, functions: str, code: int, said: str) -> None:
    """What is unsupported by design does not fail a study whose other points have figures; the summary says it."""
    Path("mine.py").write_text(MINE)
    Path("own/study").mkdir(parents=True)
    text = STUDY.format(", ".join(f'"mine:{name}"' for name in functions.split(",")))
    Path("own/study/mine.yaml").write_text(text)
    ran = numdev("measure", "--config-dir", "own", "study=mine", "device=cpu")
    assert ran.code == code, ran.out + ran.err
    (summary,) = [line for line in ran.out.splitlines() if line.startswith("mine: ")]
    assert summary.endswith(said)


def test_a_full_disk_ends_a_study_with_2_and_loses_nothing(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text(MINE)
    Path("own/study").mkdir(parents=True)
    Path("own/study/mine.yaml").write_text(STUDY.format('"mine:works", "mine:breaks", "mine:refuses"'))
    command = ("measure", "--config-dir", "own", "study=mine", "device=cpu")
    replace, calls = os.replace, []

    def fills_up(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) > 2:  # the manifest and the first record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*paths)

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fills_up)
        ran = numdev(*command)
    assert ran.code == 2
    (sentence,) = [line for line in ran.err.splitlines() if line.startswith("results: ")]
    assert sentence.endswith("could not be written (No space left on device); free some space, then run again")
    assert "3 points, 2 measured" in numdev(*command).out


def test_a_disk_that_fills_up_within_a_measurement_ends_with_2(numdev: Command) -> None:
    Path("mine.py").write_text("def full(q, k, v, mask, scale):\n    raise OSError(28, 'No space left on device', 'scratch')\n")
    ran = numdev("measure", *SMALL, "attention=custom", "precision=fp32", "attention.function=mine:full")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1), ran.err
    assert "scratch" in ran.err
    assert "free some space" in ran.err


@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("breaks", "32 elements of the variant's out are not finite where golden is (32 NaN)."),
        ("loses", "Every element of the variant's out is 0 and golden's are not (1 of 1 replicates)."),
    ],
)
def test_a_wrong_output_comes_first_and_is_never_praised(numdev: Command, function: str, first: str) -> None:
    Path("mine.py").write_text(MINE)
    ran = numdev("measure", *SMALL, "attention=custom", "precision=fp32", f"attention.function=mine:{function}")
    assert ran.out.splitlines()[1].startswith(first)
    assert not [word for word in ("deviates less", "deviates more", "equally", "no difference") if word in ran.out]


def test_what_reads_results_says_it_and_ends_so_too(numdev: Command) -> None:
    """A study of a kernel that is sound and one that is not; the comparison of equal results has no regression."""
    Path("mine.py").write_text(MINE)
    Path("own/study").mkdir(parents=True)
    for functions, code in (('"mine:works"', 0), ('"mine:works", "mine:breaks"', 5)):
        Path("own/study/mine.yaml").write_text(STUDY.format(functions))
        assert numdev("measure", "--config-dir", "own", "study=mine", "device=cpu").code == code
        report, compared = numdev("report", "out=report"), numdev("compare", "results", "results")
        assert (report.code, compared.code) == (code, code), report.out + compared.out
    said = "1 of 2 points have an output that is wrong or not finite (1 nonfinite). mine"
    assert next(line for line in report.out.splitlines() if line).startswith(f"note: {said}")
    assert compared.out.startswith(f"note: A: {said}")
    assert "no regression in 2 comparisons" in compared.out
