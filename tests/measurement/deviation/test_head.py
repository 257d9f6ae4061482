"""One head of an output: the right one, of the right subject, beside the right reference."""

from __future__ import annotations

import pytest
import torch
from numdev.measurement.deviation.head import Compared, Head, Place, Reference, Subject

from numdev.api import measure
from numdev.arithmetic.formats import BF16
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution
from numdev.attention.emulation import baseline_for
from numdev.attention.operation import ATTENTION, ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import Deviation

CPU = torch.device("cpu")
PROBLEM = Problem(Distribution(), Shape(batch=2, heads=4, kv_heads=2, queries=12, keys=16, head_dim=8))
VARIANT = Tiled(Precision.parse("bf16"), Tiling(8, 8))
BASELINE = baseline_for(BF16)
COMPARED = Compared(ATTENTION, PROBLEM, VARIANT, BASELINE)


def place(**parts: object) -> Place:
    return Place(**parts)  # type: ignore[arg-type]


def test_the_head_is_that_of_the_outputs() -> None:
    inputs = tuple(PROBLEM.inputs(1).values())
    found = COMPARED.head(place(head=5, seed=1), CPU)
    out = VARIANT(*VARIANT.round_inputs(*inputs), PROBLEM.mask).out
    golden = ATTENTION.exact(*inputs, **PROBLEM.arguments()).tensors()["out"]
    assert (found.output, found.heads, found.fmt) == ("out", 8, BF16)
    torch.testing.assert_close(found.x, out[1, 1].double(), rtol=0, atol=0)
    torch.testing.assert_close(found.reference, golden[1, 1], rtol=0, atol=0)


@pytest.mark.parametrize("subject", Subject)
@pytest.mark.parametrize("reference", Reference)
def test_heads_together_have_the_figures_of_the_record(subject: Subject, reference: Reference) -> None:
    if subject is Subject.BASELINE and reference is Reference.BASELINE:
        return
    record = measure(PROBLEM, VARIANT, BASELINE, seeds=1, device="cpu")
    heads = [COMPARED.head(place(head=number, subject=subject, reference=reference), CPU) for number in range(8)]
    found = Deviation.between(torch.stack([h.x for h in heads]), torch.stack([h.reference for h in heads]), heads[0].fmt)
    row = next(row for row in record.rows if (row["subject"], row["output"], row["reference"]) == (subject, "out", reference))
    assert (found.max_difference, found.equal_share) == (row["max_difference"], row["equal_share"])


def test_a_vector_is_one_column() -> None:
    found = COMPARED.head(place(output="lse", head=7), CPU)
    assert found.x.shape == (12, 1)


def test_gradients_have_heads_of_their_own_number() -> None:
    variant = TiledBackward(VARIANT, BackwardPrecision.parse("bf16"), VARIANT.tiling)
    compared = Compared(ATTENTION_BACKWARD, PROBLEM, variant)
    shapes = {name: compared.head(place(output=name), CPU) for name in ("dq", "dk", "dv", "delta")}
    assert {name: (tuple(h.x.shape), h.heads) for name, h in shapes.items()} == {
        "dq": ((12, 8), 8),
        "dk": ((16, 8), 4),
        "dv": ((16, 8), 4),
        "delta": ((12, 1), 8),
    }


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"output": "dq"}, "output"),
        ({"head": 8}, "head"),
        ({"head": -1}, "head"),
        ({"seed": -1}, "seed"),
        ({"subject": Subject.BASELINE, "reference": Reference.BASELINE}, "reference"),
    ],
)
def test_what_there_is_not_is_refused_by_name(parts: dict[str, object], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        COMPARED.head(place(**parts), CPU)
    assert refused.value.field == field


def test_a_missing_baseline_and_replicate_are_refused_by_name() -> None:
    def field(compared: Compared, at: Place) -> str:
        with pytest.raises(BadInput) as refused:
            compared.head(at, CPU)
        return refused.value.field

    captured = Problem(Captured(), Shape(queries=8, keys=8, head_dim=32))
    assert field(Compared(ATTENTION, PROBLEM, VARIANT), place(subject=Subject.BASELINE)) == "baseline"
    assert field(Compared(ATTENTION, captured, VARIANT), place(seed=24)) == "seed"
    assert isinstance(Compared(ATTENTION, captured, VARIANT).head(place(seed=23), CPU), Head)
