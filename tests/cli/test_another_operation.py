"""The command line composes, checks and builds the points of an operation that numdev knows nothing of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from numdev.cli.compose import Composer, config_folder, study_fields
from numdev.cli.expand import Expander
from numdev.errors import BadInput
from numdev.results.study import Study

HERE = "tests.cli.test_another_operation"
PRIMARY = f"""\
defaults: [measure_schema, _self_, problem: few, variant: mean, steps: wide]
operation: {{_target_: {HERE}.Sum}}
baseline:
  _target_: {HERE}.Exactly
  width: ${{problem.n}}
"""
FILES = {
    "primary": PRIMARY,
    "problem/few": f"_target_: {HERE}.Rows\nn: 4\nscale: 1.0\n",
    "variant/mean": f"_target_: {HERE}.Mean\nsteps: ${{steps}}\norder: up\n",
    "variant/other": f"_target_: {HERE}.Exactly\nwidth: 3\n",
    "steps/wide": f"_target_: {HERE}.Steps\nbits: 24\n",
    "steps/narrow": f"_target_: {HERE}.Steps\nbits: 8\n",
}


class Direction(Enum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True)
class Sum:
    """The operation."""


@dataclass(frozen=True)
class Rows:
    n: int
    scale: float

    def replicates(self, seeds: int | None) -> int:
        return 2 if seeds is None else seeds


@dataclass(frozen=True)
class Steps:
    bits: int


@dataclass(frozen=True)
class Mean:
    steps: Steps
    order: Direction


@dataclass(frozen=True)
class Exactly:
    width: int


@pytest.fixture
def library(tmp_path: Path) -> Composer:
    for name, text in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return Composer((config_folder(), tmp_path), "primary")


def study(library: Composer, task: dict[str, Any] | None = None, **parts: Any) -> Study:
    return Expander(library, task or {}).study("toy", study_fields("toy", {"title": "Toy"} | parts))


def test_points_are_made_of_the_nodes(library: Composer) -> None:
    made = study(library, axes={"steps": ["wide", "narrow"], "problem.n": [4, 8]}, base={"variant.order": "down"})
    assert [point.variant for point in made.points] == [Mean(Steps(bits), Direction.DOWN) for bits in (24, 24, 8, 8)]
    assert [point.problem for point in made.points] == [Rows(4, 1.0), Rows(8, 1.0)] * 2
    assert [point.baseline for point in made.points] == [Exactly(4), Exactly(8)] * 2
    assert {point.seeds for point in made.points} == {2}
    assert not any(point.refused for point in made.points)


def test_a_variant_without_a_declaration_honours_its_own_node_and_what_that_refers_to(library: Composer) -> None:
    made = study(library, axes={"variant": ["mean", "other"], "steps.bits": [8]})
    mean, other = made.points
    assert (mean.variant, mean.refused) == (Mean(Steps(8), Direction.UP), "")
    assert other.refused.startswith("steps.bits: 8 cannot be used; variant=other does not read it")
    assert study(library, base={"variant": "other", "variant.order": "up"}).points[0].refused.startswith("variant.order: 'up'")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"variant.order": "sideways"}, r"variant\.order: 'sideways' .*up, down"),
        ({"problem.n": "many"}, r"problem\.n: 'many' .*whole number"),
        ({"steps.bitz": 3}, r"steps\.bitz: 3 .*did you mean steps\.bits"),
        ({"variant": "median"}, r"variant: 'median' .*mean"),
    ],
)
def test_mistakes_name_the_setting(library: Composer, layer: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        study(library, base=layer)
