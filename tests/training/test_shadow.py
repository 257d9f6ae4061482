"""Variants beside the one that a model runs on: every metric by step, call, head and output, of the right pair of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn

import numdev as nd
from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.exact import ExactBackward
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.measurement.deviation.metrics import METRICS, Deviation

KERNEL = nd.Tiled(nd.Precision.kernel(BF16), nd.Tiling(4, 4))
TILED = TiledBackward(KERNEL, BackwardPrecision.kernel(BF16), nd.Tiling(4, 4))
EAGER = NaiveBackward.eager(FP32)
PLACES = ("step", "call", "layer", "pass", "output", "head", "subject", "reference")


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(3).sum()  # the sum of a normalised output would have gradient 0


def only(rows: list[dict[str, Any]], **expected: object) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in expected.items())]
    return found


def test_the_model_runs_on_the_reference(model: nn.Module, x: Tensor) -> None:
    """Bit for bit, forward and backward."""
    with nd.attend(EAGER):
        expected = loss(model, x)
        expected.backward()
    slopes = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with nd.shadow({"tiled": TILED}, EAGER) as log:
        got = loss(model, x)
        got.backward()
    assert torch.equal(got, expected)
    assert all(torch.equal(p.grad, slope) for p, slope in zip(model.parameters(), slopes, strict=True))  # type: ignore[arg-type]
    assert (log.seen.calls, log.seen.missed) == (2, 0)


def test_every_comparison_has_a_row(model: nn.Module, x: Tensor) -> None:
    with nd.shadow({"tiled": TILED, "forward": KERNEL}, EAGER, model=model) as log:
        loss(model, x).backward()
    with log, torch.no_grad():
        model(x)
    assert all(set(row) == {*PLACES, *METRICS} for row in log.rows)
    places = {tuple(row[name] for name in PLACES) for row in log.rows}
    assert len(places) == len(log.rows)
    layers = {(row["call"], row["layer"]) for row in log.rows}
    assert layers == {(0, "layers.0.self_attn"), (1, "layers.1.self_attn")}
    golden = ("golden", "golden_same_inputs")
    subjects = {(row["subject"], row["reference"]) for row in log.rows if row["output"] == "out"}
    assert subjects == {("reference", one) for one in golden} | {
        (name, one) for name in ("tiled", "forward") for one in (*golden, "reference")
    }
    # 2 calls of 2 heads; forward 8 pairs; backward 5 pairs of three gradients, in the step that had one.
    assert [sum(row["step"] == step for row in log.rows) for step in range(2)] == [2 * 2 * (8 + 15), 2 * 2 * 8]
    assert {row["pass"] for row in log.rows if row["step"] == 1} == {"forward"}


def test_each_figure_is_of_the_results_it_says() -> None:
    """Against each implementation called by itself on the same q, k, v and dO."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 3, 6, 4, generator=generator) for _ in range(4))
    a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
    with nd.shadow({"tiled": TILED}, EAGER) as log:
        out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.7)
        out.backward(do)  # type: ignore[no-untyped-call]
    how: Any = (nd.Mask(causal=True), 0.7)
    wide = [x.double() for x in (q, k, v)]
    rounded = KERNEL.round_inputs(*wide)  # type: ignore[call-arg]
    tiled = KERNEL(*rounded, *how).out
    eager = nd.Naive(nd.Precision.eager(FP32))(q, k, v, *how).out
    for reference, expected in (
        ("golden", nd.Exact()(q, k, v, *how).out),
        ("golden_same_inputs", nd.Exact()(*rounded, *how).out),
        ("reference", eager),
    ):
        row = only(log.rows, output="out", subject="tiled", reference=reference, head=1)
        assert {name: row[name] for name in METRICS} == Deviation.between(tiled[:, 1], expected[:, 1], BF16).metrics()
    a, b, c, d = TILED.round_inputs(q.double(), k.double(), v.double(), do.double())
    gradients, other = TILED(a, b, c, d, *how), EAGER(q, k, v, do, *how)
    exact = ExactBackward()(q, k, v, do, *how)
    for output in ("dq", "dk", "dv"):
        place: dict[str, Any] = {"output": output, "subject": "tiled", "head": 2}
        for reference, side in (("reference", other), ("golden", exact)):
            found = Deviation.between(getattr(gradients, output)[:, 2], getattr(side, output)[:, 2], BF16).metrics()
            row = only(log.rows, reference=reference, **place)
            assert {name: row[name] for name in METRICS} == found
    assert only(log.rows, output="dq", subject="reference", reference="golden", head=0)["max_ulp"] > 0


def test_the_reference_is_measured_as_the_model_has_it() -> None:
    """FP32 attention in a BF16 model returns BF16, and is measured in BF16's ulp: half of one and what FP32 adds to it."""
    q = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    with nd.shadow({"fp32": VanillaBackward(FP32)}, EAGER) as log:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert 0.3 < only(log.rows, subject="reference", reference="golden")["max_ulp"] < 0.51
    assert only(log.rows, subject="fp32", reference="golden")["rmse"] < 1e-6


def test_rows_are_kept_as_parquet_and_drawn(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with nd.shadow({"tiled": TILED}, EAGER) as log:
        for _ in range(2):
            loss(model, x).backward()
            log.step()
    log.save(tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist() == log.rows
    with pytest.raises(nd.BadInput, match="^path: .*parquet"):
        log.save(tmp_path / "rows.csv")
    assert len(nd.plot(log.rows, x="step", y="dq.rmse", facet="call").axes) == 2
    with pytest.raises(nd.BadInput, match="no rows"):
        nd.plot([])


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(nd.BadInput, match="^variants: {}"):
        nd.shadow({}, EAGER)
    with pytest.raises(nd.BadInput, match="^variants: 'reference'"):
        nd.shadow({"reference": TILED}, EAGER)
    with pytest.raises(nd.BadInput, match="^rows: 0"):
        nd.shadow({"tiled": TILED}, EAGER).save(tmp_path / "rows.parquet")
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    with pytest.raises(nd.Unsupported, match="^variant: Tiled has no backward pass"), nd.shadow({"tiled": TILED}, KERNEL):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
