"""How many points ran by which compiled code of numdev."""

from __future__ import annotations

from numdev.cli.show import outcome
from numdev.results.compiled import compiled
from numdev.results.record import Status
from numdev.results.study import Outcome, PointEnded, StudyPoint

KERNELS = [
    "numdev fused",
    "",
    "numdev instrumented br=64 bc=16 warps=4 stages=2",
    "numdev fused; ",
    "numdev instrumented br=64 bc=32 warps=4 stages=2; numdev instrumented br=64 bc=32 warps=4 stages=1; numdev fused",
    "pytorch_flash::flash_fwd_kernel numdev",
    "cudnn; numdev",
]


def test_points_are_counted_by_the_name_without_launch_settings() -> None:
    assert compiled(KERNELS) == {"numdev fused": 3, "numdev instrumented": 2, "numdev": 1}
    assert compiled(["", "cudnn"]) == {}


def test_the_last_line_of_a_study_says_so() -> None:
    point, done = StudyPoint(None, None, None, 1), Outcome()
    for kernel in KERNELS[:3]:
        done.add(point, PointEnded(Status.OK, "", 1.0, was_there=False, kernel=kernel))
    done.add(point, PointEnded(Status.UNSUPPORTED, "no"))
    told = outcome("toy", done).plain
    assert (
        told == "toy: 4 points, 3 measured in 3.0 s, 1 already there, 1 by numdev fused, 1 by numdev instrumented, 1 unsupported"
    )
    assert "by" not in outcome("toy", Outcome()).plain
