"""Figures of each head against exact attention and singular values; one head that is exact; the model computes what it did."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward
from numdev.training.doctor import FIGURES, HeadLog
from tests.cases import Inputs, draw_all, on

TILES, CAUSAL, HEADS = nd.Tiling(4, 4), nd.Mask(causal=True), 4
TILED = TiledBackward(nd.Tiled(nd.Precision.kernel(BF16), TILES), BackwardPrecision.kernel(BF16), TILES)


class Model(nn.Module):
    """Causal attention of four heads, of which pairs share a KV head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


MODEL = Model()


@pytest.fixture
def inputs() -> Inputs:
    return on("cpu", draw_all((2, HEADS, 2, 6, 6, 8), 1), torch.bfloat16)


def called(inputs: Inputs) -> tuple[Tensor, ...]:
    """O and the gradients of a call of the model."""
    *leaves, do = (x.clone().requires_grad_() for x in inputs)
    out = MODEL(*leaves)
    out.backward(do.detach())
    return out.detach(), *(x.grad for x in leaves)


def logged(log: HeadLog, inputs: Inputs) -> tuple[Tensor, ...]:
    with log.active():
        return called(inputs)


@pytest.mark.parametrize("attention", [TILED, None], ids=["given", "the model's own"])
def test_figures_are_those_of_exact_attention(attention: TiledBackward | None, inputs: Inputs) -> None:
    log = HeadLog(MODEL, attention, every=1)
    out, dq, _, _ = logged(log, inputs)
    rows = log.rows()
    assert [row["head"] for row in rows] == list(range(HEADS))
    q, k, v, do = (x.double() for x in inputs)
    exact, gradients = Exact()(q, k, v, CAUSAL).out, ExactBackward()(q, k, v, do, CAUSAL)
    seen = torch.ones(6, 6).tril().bool()
    for head, row in enumerate(rows):
        scores = (q[:, head] @ k[:, head // 2].mT / 8**0.5)[:, seen]
        p = (q[:, head] @ k[:, head // 2].mT / 8**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        expected = {
            "largest_logit": scores.abs().max(),
            "logit_std": scores.std(correction=0),
            "saturated": (p.amax(-1) > 1 - 2.0**-9).double().mean(),  # the first row sees one key
            "tied": torch.zeros(()),
            **compared("out", out[:, head], exact[:, head]),
            **compared("dq", dq[:, head], gradients.dq[:, head]),
        }
        assert set(expected) == set(FIGURES)
        for name, value in expected.items():  # S of the log is rounded to FP32
            assert row[name] == pytest.approx(float(value), rel=1e-6), name


def test_heads_in_turn_have_the_figures_of_all_heads_also_under_a_mask_of_each(inputs: Inputs) -> None:
    bias = torch.randn(1, HEADS, 6, 6, generator=torch.Generator().manual_seed(0)).masked_fill_(torch.eye(6) > 0, float("-inf"))
    q, k, v, _ = inputs
    logs = [HeadLog(MODEL, TILED, every=1, heads=heads) for heads in (None, 1)]
    rows: list[dict[tuple[int, int], dict[str, float]]] = []
    for log in logs:
        for _ in range(2):
            with log.active():
                functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
            log.step()
        rows.append({(row["step"], row["head"]): row for row in log.rows()})
    whole, parts = rows
    assert list(parts) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for place, row in parts.items():
        assert {name: row[name] for name in FIGURES} == pytest.approx({name: whole[place][name] for name in FIGURES}, nan_ok=True)


def compared(output: str, result: Tensor, exact: Tensor) -> dict[str, Tensor]:
    error = result.double() - exact
    sigma = torch.linalg.svdvals(error)
    rank = (sigma.square().sum(-1) / sigma[:, 0].square()).mean()
    return {
        f"{output}_size": exact.square().mean().sqrt(),
        f"{output}_rmse": error.square().mean().sqrt(),
        f"{output}_rank": rank,
    }


def test_ties_are_counted_in_the_format_of_s_with_inputs_that_the_attention_rounds(inputs: Inputs) -> None:
    """Keys that differ by less than BF16 holds."""
    q, k, v, do = (x.float() for x in inputs)
    k = k[:, :, :1] * (1 + 2.0**-12 * torch.arange(6)[:, None])
    log = HeadLog(MODEL, TILED, every=1)
    logged(log, (q, k, v, do))
    assert all(row["tied"] == pytest.approx(5 / 6) for row in log.rows()), "all rows but the first, which sees one key"


def test_the_model_runs_on_the_attention_bit_for_bit(inputs: Inputs) -> None:
    with nd.attend(TILED):
        expected = called(inputs)
    assert all(map(torch.equal, logged(HeadLog(MODEL, TILED, every=1), inputs), expected))
    assert all(map(torch.equal, logged(HeadLog(MODEL, None, every=1), inputs), called(inputs)))


@pytest.mark.parametrize("attention", [TILED, None], ids=["given", "the model's own"])
def test_one_head_alone_is_exact(attention: TiledBackward | None, inputs: Inputs) -> None:
    own = logged(HeadLog(MODEL, attention), inputs)
    with nd.attend(ExactBackward()):
        exact = called(inputs)
    mixed = logged(HeadLog(MODEL, attention, exact=("", 0, 2)), inputs)
    for result, plain, best in zip(mixed[:2], own, exact, strict=False):  # O and dQ; heads share dK and dV
        assert torch.equal(result[:, 2], best[:, 2])
        assert not torch.equal(plain[:, 2], best[:, 2])
        assert all(torch.equal(result[:, head], plain[:, head]) for head in (0, 1, 3))


def test_an_error_that_is_not_finite_or_zero_has_no_rank(inputs: Inputs) -> None:
    q, k, v, do = inputs
    log = HeadLog(MODEL, ExactBackward(), every=1)
    v = v.clone()
    v[:, 0] = float("inf")
    logged(log, (q, k, v, do))
    assert all(row["out_rank"] != row["out_rank"] for row in log.rows()[:2])


def deep(log: HeadLog, inputs: Inputs, biases: list[Tensor | None]) -> list[dict[str, object]]:
    """The rows of calls in one graph, each of the output of the one before."""
    q, k, v, do = (x.clone().requires_grad_() for x in inputs)
    with log.active():
        for number, bias in enumerate(biases):
            q = functional.scaled_dot_product_attention(q * 2, k, v + number, attn_mask=bias, enable_gqa=True)
        q.backward(do.detach())
    return log.rows()


def test_calls_that_are_computed_at_once_have_the_figures_of_each_alone(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    of_heads, of_all = (torch.randn(1, heads, 6, 6, generator=generator).bfloat16() for heads in (HEADS, 1))
    biases = [None, of_all, of_heads, None, of_all, of_heads + 1]
    at_once = deep(HeadLog(MODEL, None, every=1), inputs, biases)
    monkeypatch.setattr("numdev.training.doctor._AT_ONCE", 1)
    alone = deep(HeadLog(MODEL, None, every=1), inputs, biases)
    assert [(row["call"], row["head"]) for row in at_once] == [(call, head) for call in range(6) for head in range(HEADS)]
    assert len({str(row) for row in alone}) == 6 * HEADS
    for row, other in zip(at_once, alone, strict=True):
        assert row == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("attention", [TILED, None], ids=["given", "the model's own"])
def test_nothing_is_held_of_the_graph_of_a_step(attention: TiledBackward | None, inputs: Inputs) -> None:
    log, held = HeadLog(MODEL, attention, every=1), list[weakref.ref[Tensor]]()
    for step in range(3):
        log.step(step)
        q, k, v, do = (x.clone().requires_grad_() * 1 for x in inputs)
        with log.active():
            out = MODEL(q, k, v)
            out.backward(do.detach())
        held += [weakref.ref(x) for x in (q, k, v, out)]
        del q, k, v, do, out
    gc.collect()
    assert not any(reference() is not None for reference in held)


def test_heads_take_turns_by_kv_head(inputs: Inputs) -> None:
    log, heads = HeadLog(MODEL, None, every=3, heads=1), dict[int, list[int]]()
    for step in range(8):
        log.step(step)
        logged(log, inputs)
    for row in log.rows():
        heads.setdefault(row["step"], []).append(row["head"])
    assert heads == {0: [0, 1], 3: [2, 3], 6: [0, 1]}
    assert log.seen.calls == 3, "in other steps the model's calls go on by themselves"
