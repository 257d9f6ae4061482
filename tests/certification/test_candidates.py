"""Candidates, each beside the kernel that errs so; both were written apart, and the candidates in FP64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from numdev.arithmetic.formats import BF16
from numdev.certification.accuracy import BACKWARD, CASES, FORWARD, Known, Pass, Predictions
from numdev.certification.candidates import CURVES, DECLARED, KEYS, Candidate, capped, clamped, curved, limited, reduced
from numdev.certification.culprit import Compared, Hypothesis, Search
from numdev.certification.kernel import kernel_of
from numdev.certification.simulation import Layout, Simulation
from tests.certification.backward_kernels import FlashGradients, rounded_groups
from tests.certification.forward_kernels import PRECISION, Flash

NEAREST: dict[str, tuple[Candidate | str, Layout]] = {
    "argument of exp at least -6": (clamped(False, -6.0), Layout(80)),
    "argument of exp2 at least -13": (clamped(False, -13 * math.log(2)), Layout(48)),
    "S clamped at 2": (limited("scaled scores", 2.0), Layout(48)),
    "S capped by tanh": (capped("scaled scores", 10.0**-2), Layout(80)),
    "ln 2 in BF16": (reduced(torch.round, 0.69140625 / math.log(2) - 1), Layout(48)),
    "ln 2 in FP16, rounded down": (reduced(torch.floor, 0.693359375 / math.log(2) - 1), Layout(112)),
    "splits merged in base 2": ("splits weighed by 2 to the power of their LSE", Layout(48, splits=4)),
    "splits of base 2 merged in base e": (
        "splits merged by e to the power of their LSE in base 2, their LSE too",
        Layout(64, splits=5),
    ),
    "ring of 12": ("the O of splits in BF16, merged one after the other", Layout(64, splits=12)),
    "ring of 12, its LSE in BF16": ("the LSE of splits in BF16, merged one after the other", Layout(48, splits=12)),
    "partial outputs in BF16, of 144": ("the O of splits in BF16", Layout(144, splits=3)),
    "P in INT8 by tiles of 48": ("P in INT8 with a scale of each token", Layout(48)),
    "P in INT8 by 48 of 144": ("P in INT8 with a scale of each tile of 1 query by 48 keys", Layout(144, reverse=True)),
}
"""Of each kernel the candidate, or its title in the catalogue, and the layout."""


@cache
def known() -> Known:
    """Scores that rise or fall by 12, of 1,000 keys: each of these faults shows in them."""
    return Predictions("kernel_bf16").of(next(case for case in CASES if case.name == "ramp"), range(9801, 9802))


@pytest.mark.parametrize("name", NEAREST)
def test_a_candidate_errs_as_its_kernel_does(name: str) -> None:
    outputs, (nearest, layout) = kernel_of(PRECISION[name][0], BF16, torch.device("cpu")).on(known().inputs), NEAREST[name]
    candidate = next((each for each in known().predictions.candidates if each.title == nearest), nearest)
    assert isinstance(candidate, Candidate)
    left = Compared(known(), outputs).left((candidate, layout))
    assert max(left.values()) < 0.25, left  # of the error: what FP32 rounds otherwise, and then P or O


@pytest.mark.parametrize(
    ("of_pass", "name"), [(FORWARD, "tall causal"), (BACKWARD, "grouped heads")], ids=["forward", "backward"]
)
def test_candidates_share_what_none_of_them_changes(of_pass: Pass, name: str) -> None:
    """On inputs that keep results each gives the bits that it gives alone, in any order."""
    predictions = Predictions("kernel_bf16", 16, of_pass=of_pass)
    inputs = predictions.of(next(case for case in CASES if case.name == name), range(1)).inputs.first
    every = [DECLARED, *predictions.candidates]
    for candidate in random.Random(0).sample(every, len(every)):
        shared, alone = (
            of_pass.simulated(Simulation(each, predictions.policy, Layout(48), candidate.changes))
            for each in (inputs, replace(inputs))
        )
        for output, x in alone.items():
            assert torch.equal(shared[output].nan_to_num(), x.nan_to_num()), (candidate.title, output)
    assert len(inputs.shared) > 1


@pytest.mark.parametrize(("keys", "of_each"), [(range(KEYS), False), ((3, 7, 11, 15), False), (range(KEYS), True)])
def test_a_curve_is_a_sum_of_chebyshev_polynomials(keys: range | tuple[int, ...], of_each: bool) -> None:
    title, terms = next(iter(CURVES)), 5
    factors = 0.01 * torch.randn(terms, KEYS if of_each else 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exp = curved(title, False, keys, terms, *factors.flatten().tolist()).changes["exp"]
    x = -5 * torch.rand(3, 2 * KEYS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    place = 2 * np.mod(x.numpy() / math.log(2), 1) - 1
    column = np.arange(2 * KEYS) % KEYS
    error = np.stack(
        [np.polynomial.chebyshev.chebval(place[:, i], factors[:, column[i] % factors.shape[1]].numpy()) for i in range(2 * KEYS)],
        -1,
    )
    expected = np.exp(x.numpy() + np.where(np.isin(column, list(keys)), error, 0))
    assert np.allclose(exp(x).numpy(), expected, rtol=1e-12)


class OfTies(Search):
    """A search in which the first of three cases tells no hypothesis from another, and all three the last one alone."""

    def __init__(self, right: Hypothesis) -> None:
        self.right = right

    def score(self, hypothesis: Hypothesis, cases: Sequence[Compared]) -> float:
        return -1.0 if hypothesis == self.right and len(cases) == 3 else 0.0


def test_a_case_of_which_some_rows_err_as_permitted_does_not_come_before_one_that_errs_more() -> None:
    predictions, kernel = Predictions("kernel_bf16", of_pass=BACKWARD), FlashGradients(group=rounded_groups)
    every = [predictions.of(case, range(3)) for case in CASES if case.name in ("sink", "grouped heads")]
    outputs = [kernel_of(Flash(64), BF16, torch.device("cpu"), kernel).on(each.inputs) for each in every]
    compared = [Compared(each, x) for each, x in zip(every, outputs, strict=True)]
    assert [case.known.name.partition(" range")[0] for case in Search(compared, compared).cases] == ["grouped heads", "sink"]


def test_a_hypothesis_without_effect_on_the_first_cases_is_not_lost_among_many() -> None:
    every = [(Candidate("step", str(i)), Layout()) for i in range(400)]
    assert OfTies(every[-1]).best(every, [Compared.__new__(Compared) for _ in range(3)])[0] == every[-1]
