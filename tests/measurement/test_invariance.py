"""The kind `invariance`, on variants whose dependence on what is beside a row is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Problem, Shape
from numdev.attention.problem import Kind as Distributed
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement.invariance import KIND, Invariances
from numdev.measurement.operation import Draws, Inputs, Operation, Output, Result, RoundsInputs
from numdev.measurement.runner import Runner
from numdev.results.record import Status

ULP = 2.0**-52  # of numbers from 1 to 2


@dataclass(frozen=True)
class Rows(Draws):
    n: int = 10

    def inputs(self, seed: int, device: Any = "cpu") -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": 1 + torch.rand(self.n, 4, generator=generator, dtype=torch.float64) / 2,
            "w": torch.ones(4, dtype=torch.float64),
        }

    @property
    def bytes(self) -> int:
        return 1000


@dataclass(frozen=True)
class Twisted(RoundsInputs):
    """x, to which a rule adds ulps."""

    rule: str = "none"
    seed: int = 0
    rounds = Cast(FP64)

    @property
    def formats(self) -> dict[str, Format]:
        return {"y": FP64}

    def replicate(self, seed: int) -> Twisted:
        return replace(self, seed=seed) if self.rule == "draws" else self

    def __call__(self, x: Tensor, w: Tensor) -> Result:
        ulps: dict[str, Callable[[], Any]] = {
            "none": lambda: 0,
            "place": lambda: torch.arange(len(x))[:, None],
            "batch": lambda: 2 * (len(x) == 10),
            "small": lambda: 3 * (len(x) == 1),
            "beside": lambda: (x.sum() * 1000).floor() % 97,
            "few": lambda: 1 * (x.shape[1] < 20),
            "draws": lambda: torch.randint(0, 9, x.shape, generator=torch.Generator().manual_seed(self.seed)),
        }
        return Result({"y": x * w + ulps[self.rule]() * ULP})


TWISTED = Operation(
    "twisted", Twisted(), (Inputs(("x", "w")),), (Output("y", "x w"),), rows={"x": 0, "y": 0}
)  # fmt: skip


def figures(variant: Any, baseline: Any = None) -> dict[str, dict[str, float]]:
    """The rows of one replicate by surroundings; of several with the same, the one that differs most."""
    record = Runner(Invariances(TWISTED), "cpu").measure(Rows(), variant, baseline, 1)
    assert (record.status, record.kind) == (Status.OK, KIND), record.reason
    return {row["surroundings"]: row for row in sorted(record.rows, key=lambda row: row["max_ulp"])}


@pytest.mark.parametrize(
    ("rule", "differing"),
    [
        ("none", {}),
        ("place", {"alone": 9, "moved": 9}),
        ("batch", {"alone": 2, "half": 2}),
        ("small", {"alone": 3}),
        ("draws", {"repeat": 8, "alone": 8, "half": 8, "moved": 8, "others": 8}),
    ],
)
def test_differences_are_seen_where_they_are_and_nowhere_else(rule: str, differing: dict[str, float]) -> None:
    measured = figures(Twisted(rule))
    assert set(measured) == {"repeat", "alone", "half", "moved", "others"}
    for name, row in measured.items():
        if name in differing and rule == "draws":  # a repeat draws anew; a batch of another size draws other numbers
            assert row["equal_share"] < 1 or name in ("half", "others", "alone", "moved")
            assert row["max_ulp"] <= differing[name]
        elif name in differing:
            assert row["max_ulp"] == pytest.approx(differing[name])
        else:
            assert (row["equal_share"], row["max_ulp"], row["rms_ulp"], row["over_error"]) == (1, 0, 0, 0)
    if rule == "draws":
        assert measured["repeat"]["equal_share"] < 0.5
    if rule == "place":  # rows 9 - i in place of i: differences of 9, 7, .., 1 ulp, each twice
        assert measured["moved"]["rms_ulp"] == pytest.approx((sum(d * d for d in range(1, 10, 2)) / 5) ** 0.5)
        assert measured["moved"]["over_error"] == pytest.approx((165 / 5) ** 0.5 / (285 / 10) ** 0.5)


def test_what_depends_on_the_numbers_beside_it_shows_among_others() -> None:
    measured = figures(Twisted("beside"))
    assert measured["others"]["equal_share"] < 1
    assert measured["repeat"]["equal_share"] == measured["moved"]["equal_share"] == 1


def test_a_baseline_is_another_form_of_the_same_rows() -> None:
    assert figures(Twisted(), Twisted("batch"))["baseline"]["max_ulp"] == 2
    assert figures(Twisted(), Twisted())["baseline"]["equal_share"] == 1


def test_emulated_attention_is_invariant_and_its_tiles_are_not() -> None:
    """By construction: products of one fixed shape (`numdev.arithmetic.products`)."""
    problem = Problem(Distribution(Distributed.NORMAL), Shape(batch=3, heads=2, kv_heads=1, queries=20, keys=40, head_dim=8))
    policy = Precision.parse("kernel_bf16")
    variant, other = (Tiled(policy, Tiling(br=8, bc=bc)) for bc in (16, 8))
    record = Runner(Invariances(ATTENTION), "cpu").measure(problem, variant, other, 2)
    assert record.status is Status.OK, record.reason
    shares = {(row["surroundings"], row["output"]): row["equal_share"] for row in record.rows}
    assert {share for (surroundings, _), share in shares.items() if surroundings != "baseline"} == {1.0}
    assert {surroundings for surroundings, _ in shares} >= {"decode", "few"}
    assert shares["baseline", "lse"] < 1


@pytest.mark.parametrize("rule", ["none", "few"])
def test_the_last_places_of_a_row_alone(rule: str) -> None:
    """What adds an ulp to a call on fewer than 20 places differs in `decode` and `few`, and nowhere else."""

    @dataclass(frozen=True)
    class Places(Rows):
        def inputs(self, seed: int, device: Any = "cpu") -> dict[str, Tensor]:
            return {"x": 1 + torch.rand(self.n, 20, dtype=torch.float64) / 2, "w": torch.ones((), dtype=torch.float64)}

    operation = replace(TWISTED, suffix={"x": 1, "y": 1})
    record = Runner(Invariances(operation), "cpu").measure(Places(), Twisted(rule), None, 1)
    assert record.status is Status.OK, record.reason
    differing = {row["surroundings"]: row["max_ulp"] for row in record.rows if row["max_ulp"]}
    assert differing == ({} if rule == "none" else {"decode": 1, "few": 1})
    assert {row["surroundings"]: row["compared"] for row in record.rows}["few"] == 160


def test_what_has_no_rows_or_only_one_is_refused() -> None:
    with pytest.raises(BadInput, match="Operation.rows"):
        Runner(Invariances(replace(TWISTED, rows={})), "cpu").measure(Rows(), Twisted(), None, 1)
    with pytest.raises(BadInput, match="at least 2"):
        Runner(Invariances(TWISTED), "cpu").measure(Rows(1), Twisted(), None, 1)
