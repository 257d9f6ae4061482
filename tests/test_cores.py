from __future__ import annotations

import os

import psutil
import pytest

from numdev.cores import cores_of, usable_cores

LAPTOP = ["0,4", "1,5", "2,6", "3,7"] * 2


@pytest.mark.parametrize(
    ("siblings", "limits", "count"),
    [
        (LAPTOP, [], 4),
        (LAPTOP[:3], [], 3),
        (["0,4", "0,4"], [], 1),
        (LAPTOP, ["max 100000"], 4),
        (LAPTOP, ["200000 100000"], 2),
        (LAPTOP, ["250000 100000", "max 100000", "800000 100000"], 2),
        (LAPTOP, ["100000 50000"], 2),
        (LAPTOP, ["50000 100000"], 1),
        (LAPTOP, ["300000"], 3),
        ([], [], 1),
    ],
)
def test_two_threads_of_a_core_count_once_and_a_group_has_its_share(siblings: list[str], limits: list[str], count: int) -> None:
    assert cores_of(siblings, limits) == count


def test_this_process_uses_no_more_than_it_may() -> None:
    most = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    assert 1 <= usable_cores() <= most
    allowed = psutil.Process().cpu_affinity()
    assert allowed
    try:
        psutil.Process().cpu_affinity(allowed[:1])
        assert usable_cores() == 1
    finally:
        psutil.Process().cpu_affinity(allowed)
