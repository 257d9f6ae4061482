"""How many processes measure a study."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from numdev.api import Bench
from numdev.attention.emulation import baseline_for
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement import studies
from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.measurement.speed import Speeds
from numdev.results.study import StudyPoint


def point(n: int, bc: int = 8, seeds: int = 1) -> StudyPoint:
    variant = Tiled(Precision.parse("bf16"), Tiling(bc=bc))
    return StudyPoint(Problem(Distribution(), Shape(queries=n, keys=n, head_dim=4)), variant, baseline_for(variant.format), seeds)


class TestNumber:
    BENCH = Bench(device="cpu")
    MANY = tuple(point(16, bc, seeds=10) for bc in range(1, 11))

    @pytest.fixture(autouse=True)
    def _eight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(studies, "usable_cores", lambda: 8)
        monkeypatch.setattr(studies, "available_bytes", lambda _: 1 << 40)

    @pytest.mark.parametrize(
        ("count", "points", "is_alone", "number"),
        [
            (None, MANY, True, 8),
            (None, MANY, False, 1),  # beside other shards
            (None, MANY[:2], True, 1),  # not worth it
            (None, [], True, 1),
            (3, MANY, False, 3),
            (3, MANY[:2], True, 2),
        ],
    )
    def test_is_that_of_the_cores_where_it_is_worth_it_or_as_set(
        self, count: int | None, points: Sequence[StudyPoint], is_alone: bool, number: int
    ) -> None:
        assert studies.processes(count, self.BENCH, points, is_alone=is_alone) == number

    def test_leaves_memory_for_the_largest_point_of_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Deviations, "needed_bytes", lambda *_: 1 << 30)
        monkeypatch.setattr(studies, "available_bytes", lambda _: 3 << 30)
        assert studies.processes(None, self.BENCH, self.MANY, is_alone=True) == 3
        assert studies.processes(8, self.BENCH, self.MANY, is_alone=True) == 3

    def test_is_one_for_times_and_where_torch_has_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BadInput, match="^workers: 2 cannot be used; they measure deviations, on a CPU"):
            studies.processes(2, Runner(Speeds(ATTENTION), "cpu"), [], is_alone=True)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert studies.processes(None, self.BENCH, self.MANY, is_alone=True) == 1
        with pytest.raises(BadInput, match="^workers: 2 .* with one thread each; leave out workers, or OMP_NUM_THREADS"):
            studies.processes(2, self.BENCH, self.MANY, is_alone=True)
