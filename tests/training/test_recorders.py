"""Variants beside the one that a model runs on, and q, k, v and dO of a model in files that `problem=captured` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import numdev as nd
from numdev import Bias, Mask
from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.exact import ExactBackward
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.measurement.metrics import METRICS, Deviation
from tests.training.test_attend import dense
from tests.training.toy import KERNEL, TILED

EAGER = NaiveBackward.eager(FP32)
PLACES = ("step", "call", "layer", "pass", "output", "head", "subject", "reference")


@pytest.fixture
def model() -> nn.Module:
    """Two layers with two heads of 8."""
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)


@pytest.fixture
def x() -> Tensor:
    """Six tokens of two sequences."""
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, x: Tensor) -> Tensor:
    """O of a forward and a backward pass; the sum of a normalised output would have gradient 0."""
    model.zero_grad()
    out: Tensor = model(x)
    out.pow(3).sum().backward()  # type: ignore[no-untyped-call]
    return out.detach()


def only(rows: list[dict[str, Any]], **expected: object) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in expected.items())]
    return found


class TestShadow:
    def test_the_model_runs_on_the_reference(self, model: nn.Module, x: Tensor) -> None:
        """Bit for bit, forward and backward."""
        with nd.attend(EAGER):
            expected = step(model, x)
        slopes = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with nd.shadow({"tiled": TILED}, EAGER) as log:
            assert torch.equal(step(model, x), expected)
        assert all(torch.equal(p.grad, slope) for p, slope in zip(model.parameters(), slopes, strict=True))  # type: ignore[arg-type]
        assert (log.seen.calls, log.seen.missed) == (2, 0)

    def test_every_comparison_has_a_row(self, model: nn.Module, x: Tensor) -> None:
        with nd.shadow({"tiled": TILED, "forward": KERNEL}, EAGER, model=model) as log:
            step(model, x)
        with log, torch.no_grad():
            model(x)
        assert all(set(row) == {*PLACES, *METRICS} for row in log.rows)
        assert len({tuple(row[name] for name in PLACES) for row in log.rows}) == len(log.rows)
        layers = {(row["call"], row["layer"]) for row in log.rows}
        assert layers == {(0, "layers.0.self_attn"), (1, "layers.1.self_attn")}
        golden = ("golden", "golden_same_inputs")
        subjects = {(row["subject"], row["reference"]) for row in log.rows if row["output"] == "out"}
        assert subjects == {("reference", one) for one in golden} | {
            (name, one) for name in ("tiled", "forward") for one in (*golden, "reference")
        }
        # 2 calls of 2 heads; forward 8 pairs; backward 5 pairs of three gradients, in the step that had one.
        assert [sum(row["step"] == at for row in log.rows) for at in range(2)] == [2 * 2 * (8 + 15), 2 * 2 * 8]
        assert {row["pass"] for row in log.rows if row["step"] == 1} == {"forward"}
        assert len(nd.plot(log.rows, x="step", y="out.rmse", facet="call").axes) == 2

    def test_each_figure_is_of_the_results_it_says(self) -> None:
        """Against each implementation called by itself on the same q, k, v and dO."""
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(2, 3, 6, 4, generator=generator) for _ in range(4))
        a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
        with nd.shadow({"tiled": TILED}, EAGER) as log:
            out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.7)
            out.backward(do)  # type: ignore[no-untyped-call]
        how: Any = (nd.Mask(causal=True), 0.7)
        rounded = KERNEL.round_inputs(q.double(), k.double(), v.double())  # type: ignore[call-arg]
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
            for reference, side in (("reference", other), ("golden", exact)):
                found = Deviation.between(getattr(gradients, output)[:, 2], getattr(side, output)[:, 2], BF16).metrics()
                row = only(log.rows, reference=reference, output=output, subject="tiled", head=2)
                assert {name: row[name] for name in METRICS} == found
        assert only(log.rows, output="dq", subject="reference", reference="golden", head=0)["max_ulp"] > 0

    def test_the_reference_is_measured_as_the_model_has_it(self) -> None:
        """FP32 attention in a BF16 model returns BF16, and is measured in BF16's ulp: half of one and what FP32 adds to it."""
        q = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
        with nd.shadow({"fp32": VanillaBackward(FP32)}, EAGER) as log:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert 0.3 < only(log.rows, subject="reference", reference="golden")["max_ulp"] < 0.51
        assert only(log.rows, subject="fp32", reference="golden")["rmse"] < 1e-6

    def test_rows_are_saved_in_full(self, model: nn.Module, x: Tensor, tmp_path: Path) -> None:
        log = nd.shadow({"forward": KERNEL}, EAGER, model=model)
        with pytest.raises(nd.BadInput, match="no call of attention was recorded"):
            log.save(tmp_path / "rows.parquet")
        with log, torch.no_grad():
            model(x)
        log.save(tmp_path / "rows.parquet")
        assert pd.read_parquet(tmp_path / "rows.parquet").to_dict("records") == log.rows

    def test_mistakes_are_refused(self) -> None:
        with pytest.raises(nd.BadInput, match="^variants: {}"):
            nd.shadow({}, EAGER)
        with pytest.raises(nd.BadInput, match="^variants: 'reference'"):
            nd.shadow({"reference": TILED}, EAGER)
        with pytest.raises(nd.BadInput, match="no rows"):
            nd.plot([])
        q = torch.randn(1, 1, 3, 2, requires_grad=True)
        with pytest.raises(nd.Unsupported, match="^variant: Tiled has no backward pass"), nd.shadow({"tiled": TILED}, KERNEL):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)


MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=3), Mask(key_lengths=(4, 6))]
BIASES = [
    Bias.hiding((torch.arange(6) >= torch.tensor([[0], [2]]))[:, None, None].expand(-1, 1, 6, -1)),  # padding before the keys
    Bias(torch.linspace(-1, 1, 108, dtype=torch.float64).reshape(1, 3, 6, 6)),  # positions, of each head
]


class TestCapture:
    def test_what_attention_takes_is_kept(self, tmp_path: Path) -> None:
        """In the dtype that autocast gives it, with the gradient of its output, and a note of what it was asked."""
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(4))
        leaf = q.clone().requires_grad_()
        with nd.capture(nn.Identity(), tmp_path) as captured, torch.autocast("cpu", torch.bfloat16):
            out = torch.nn.functional.scaled_dot_product_attention(leaf, k, v, is_causal=True, scale=0.5)
            out.backward(do.bfloat16())  # type: ignore[no-untyped-call]
            k.zero_()  # later than the call
        assert captured.paths == {0: tmp_path / "step000000.safetensors"}
        found = load_file(captured.paths[0])
        assert found.keys() == {"model.q", "model.k", "model.v", "model.do"}
        assert torch.equal(found["model.q"], q.bfloat16())
        assert found["model.k"].any()
        assert torch.equal(found["model.do"], do.bfloat16())
        with safe_open(captured.paths[0], "pt") as file:
            mask = '{"causal": true, "window": null, "key_lengths": null, "softcap": null}'
            assert file.metadata() == {"step": "0", "model": f'{{"call": 0, "scale": 0.5, "mask": {mask}}}'}

    @pytest.mark.parametrize("mask", [*MASKS, *(Mask(bias=bias) for bias in BIASES)], ids=str)
    def test_gradients_are_those_of_the_model_that_was_captured(self, mask: Mask, tmp_path: Path) -> None:
        """torch's autograd in FP64 is the oracle: mask, scale, q, k, v and dO of the file are those of the model's call.

        An entry is rounded fewer than 100 times on its way from q, k, v and dO, and no partial sum exceeds 50, so the error is
        below 100 * 50 * 2^-53 < 1e-12.
        """
        generator = torch.Generator().manual_seed(1)
        q, k, v, do = (torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_()
        with nd.capture(nn.Identity(), tmp_path) as captured:
            seen = dense(mask, (2, 3, 6, 6)) if mask.bias is None else mask.bias.values
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, attn_mask=seen)
            out.backward(do)  # type: ignore[no-untyped-call]
        source, shape = nd.Captured(str(captured.paths[0])), nd.Shape(2, 3, 3, 6, 6, 4)
        problem = nd.Problem(source, shape)
        found = ATTENTION_BACKWARD.exact(*ATTENTION_BACKWARD.draw(problem, 0, torch.device("cpu")), **problem.arguments())
        for name, leaf in (("dq", q), ("dk", k), ("dv", v)):
            assert leaf.grad is not None
            assert float((found.tensors()[name] - leaf.grad).abs().max()) < 1e-12
        assert problem.scale == 0.3
        if mask.bias is None:
            assert problem.mask == mask
        else:
            with pytest.raises(nd.BadInput, match="replicates have other masks; give problem.batch"):
                nd.Problem(source, nd.Shape(queries=6, keys=6, head_dim=4))
            assert nd.Problem(source, nd.Shape(queries=6, keys=6, head_dim=4), causal=True).mask == Mask(causal=True)
        other = nd.Problem(source, shape, nd.Mask(), 0.5)
        assert (other.mask, other.scale) == (nd.Mask(), 0.5), "stated ones are honoured"

    def test_a_mask_that_no_file_keeps_is_refused_with_its_reason(self, tmp_path: Path) -> None:
        """Unless another one is stated. The model runs on."""
        q, bias = torch.randn(1, 2, 6, 4), torch.linspace(0, 1, 36).reshape(6, 6).requires_grad_()
        with nd.capture(nn.Identity(), tmp_path) as captured:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        source, shape = nd.Captured(str(captured.paths[0])), nd.Shape(queries=6, keys=6, head_dim=4)
        why = r"could not keep the mask of model \(attn_mask: it is learned.*problem.causal="
        with pytest.raises(nd.BadInput, match=why):
            nd.Problem(source, shape)
        assert nd.Problem(source, shape, nd.Mask(causal=True)).mask.causal

    def test_chosen_layers_and_steps(self, model: nn.Module, x: Tensor, tmp_path: Path) -> None:
        with nd.capture(model, tmp_path, layers=["layers.1.self_attn"], steps=[0, 2, 70]) as captured:
            for number in range(4):
                step(model, x + number)
                captured.step()
            captured.step(70)
            model(x)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step{n:06d}.safetensors" for n in (0, 2, 70)]
        first, third, last = (load_file(captured.paths[n]) for n in (0, 2, 70))
        assert {name.rpartition(".")[0] for name in third} == {"layers.1.self_attn"}
        assert not torch.equal(first["layers.1.self_attn.q"], third["layers.1.self_attn.q"])
        assert "layers.1.self_attn.do" not in last
        assert captured.seen.calls == 10

    def test_calls_by_number_and_steps_by_entering_again(self, model: nn.Module, x: Tensor, tmp_path: Path) -> None:
        """A module that calls twice is two layers."""
        context = nd.capture(model, tmp_path, layers=[0, 2, 3])
        for _ in range(2):
            with context:
                step(model, x)
                step(model, x)
        assert sorted(context.paths) == [0, 1]
        layers = {name.rpartition(".")[0] for name in load_file(context.paths[1])}
        assert layers == {"layers.0.self_attn", "layers.0.self_attn#1", "layers.1.self_attn#1"}

    def test_the_model_computes_what_it_computes_without_and_an_interrupted_step_leaves_no_file(
        self, model: nn.Module, x: Tensor, tmp_path: Path
    ) -> None:
        plain = step(model, x)
        with pytest.raises(RuntimeError, match="invalid"), nd.capture(model, tmp_path):
            step(model, x).view(7)
        assert not list(tmp_path.iterdir())
        with nd.capture(model, tmp_path):
            assert torch.equal(step(model, x), plain)
        with nd.attend(EAGER) as seen:
            exchanged = step(model, x)
            with nd.capture(model, tmp_path):
                assert torch.equal(step(model, x), exchanged)
        assert seen.calls == 4

    def test_mistakes_are_told(self, model: nn.Module, x: Tensor, tmp_path: Path) -> None:
        with pytest.raises(nd.BadInput, match=r"^layers: 'layers.0.self_atn' .*did you mean layers.0.self_attn"):
            nd.capture(model, tmp_path, layers=["layers.0.self_atn"])
        missing = r"^layers: 'layers.0' .*it called no attention in step 0; layers.0.self_attn, "
        with pytest.raises(nd.BadInput, match=missing), nd.capture(model, tmp_path, layers=["layers.0"]):
            step(model, x)
        with pytest.warns(UserWarning, match="enter capture after attend"), nd.capture(model, tmp_path), nd.attend(EAGER):
            step(model, x)
        assert not list(tmp_path.iterdir())
