"""Tests of a ratio against a tolerance; those against SciPy are in `tests/report/comparison/test_changes.py`."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from numdev.report.statistics.significance import unpaired

CLOSE = 1e-12  # FP64 on values of size 1


def test_replicates_that_differ_in_the_last_bit_alone_are_tested_without_a_warning() -> None:
    a = np.array([1.0, 1.0 + 2**-52, 1.0])
    with warnings.catch_warnings(action="error"):
        found = unpaired(2 * a, a, 1.0)
    assert found.ratio.estimate == pytest.approx(0.5, rel=CLOSE)
    assert found.p == 0.5**3  # half of all may differ
