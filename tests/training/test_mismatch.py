"""Log-probabilities by two engines: what is exchanged, and the attribution of a variance that is known beforehand."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn import functional

from numdev.arithmetic.formats import BF16, FP32, FP64
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported
from numdev.measurement.runner import Runner
from numdev.operations import logprob, matmul, rmsnorm, router, scan
from numdev.results.record import Status
from numdev.training import tasks
from numdev.training.data import Text
from numdev.training.mismatch import EXCHANGED, KIND, Cached, Engine, Mismatches, Problem, compared, effects

TASK = tasks.Language(Text(), steps=2, warmup=0, batch=2, length=16, width=32, depth=2, heads=2, experts=4)
PLAIN = Engine(Cached(FP32), rmsnorm.Eager(FP32), matmul.Torch(FP32), router.Eager(FP32), scan.Eager(FP32), logprob.Torch(FP32))
NARROW = Engine(
    Cached(BF16, splits=2, cache=Cast.parse("e4m3fn:saturate")),
    rmsnorm.Torch(BF16),
    matmul.Torch(BF16, splits=2),
    router.Eager(BF16),
    scan.Eager(BF16, upcast=True),
    logprob.Torch(BF16, upcast=True),
    residual=BF16,
)
OPERATIONS = tuple(EXCHANGED)


def untrained() -> tasks.LanguageModel:
    made = TASK.model(0)
    assert isinstance(made, tasks.LanguageModel)
    return made


@pytest.fixture(scope="module")
def model() -> tasks.LanguageModel:
    """Its head and its gates are not 0."""
    made = untrained()
    generator = torch.Generator().manual_seed(1)
    for x in made.parameters():
        x.data += torch.randn(x.shape, generator=generator) * 0.1
    return made.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return TASK.held_out()["tokens"][:3]


def subsets(operations: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [own for size in range(len(operations) + 1) for own in combinations(operations, size)]


class TestEffects:
    @given(st.lists(st.floats(-10, 10), min_size=16, max_size=16))
    @settings(max_examples=50, deadline=None)
    def test_are_those_of_a_regression_on_factors_of_plus_and_minus_one(self, values: list[float]) -> None:
        names = ("a", "b", "c", "d")
        sets = subsets(names)
        signs = np.array([[1 if name in own else -1 for name in names] for own in sets])
        design = np.stack([np.prod(signs[:, [names.index(n) for n in of]], axis=1) for of in sets], axis=1)
        beta = dict(zip(sets, np.linalg.solve(design, values), strict=True))
        found = effects(names, dict(zip(sets, values, strict=True)))
        assert set(found) == {own for own in sets if 0 < len(own) < 3}
        for own, effect in found.items():
            assert effect == pytest.approx(2 ** len(own) * beta[own], abs=1e-9)

    def test_of_a_sum_are_its_terms(self) -> None:
        terms = {"a": 3.0, "b": 0.5, "c": 0.0}
        found = effects(tuple(terms), {own: sum((terms[name] for name in own), 0.0) for own in subsets(tuple(terms))})
        assert {own[0]: value for own, value in found.items() if len(own) == 1} == pytest.approx(terms)
        assert all(value == pytest.approx(0) for own, value in found.items() if len(own) == 2)


class TestCompared:
    """Columns of a Hadamard matrix but the first have mean 0, variance 1, and no covariance."""

    columns = torch.from_numpy(hadamard(16)[:, 1:7].T.copy()).double().view(6, 2, 8)

    def rows(self, weights: list[Tensor]) -> dict[str, list[dict[str, Any]]]:
        each = dict(zip(OPERATIONS, weights, strict=True))
        zero = torch.zeros(2, 8, dtype=torch.float64)
        return compared(lambda own: -sum((each[name] for name in own), zero), zero, OPERATIONS)

    def test_shares_of_independent_differences_are_their_variances(self) -> None:
        sizes = torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0, 0.1], dtype=torch.float64) * 1e-2
        tables = self.rows([size * column for size, column in zip(sizes, self.columns, strict=True)])
        (whole,) = tables[KIND]
        total = float(sizes.square().sum())
        assert whole["std"] == pytest.approx(total**0.5)
        assert whole["explained"] == pytest.approx(1)
        assert whole["interactions"] == pytest.approx(0, abs=1e-12)
        for row, size in zip(tables["effects"][:6], sizes.tolist(), strict=True):
            assert (row["order"], row["first"]) == (1, pytest.approx(size**2 / total))
            assert row["share"] == pytest.approx(row["first"], abs=1e-12) == row["last"]

    def test_an_interaction_is_twice_the_covariance(self) -> None:
        a, b = 0.02 * self.columns[0], 0.01 * (self.columns[0] + self.columns[1])
        tables = self.rows([a, b, *torch.zeros(4, 2, 8, dtype=torch.float64)])
        total = float((a + b).square().mean())
        shares = {row["effect"]: row["share"] for row in tables["effects"]}
        covariance = float((a * b).mean())
        assert shares["attention x rmsnorm"] == pytest.approx(2 * covariance / total)
        assert shares["attention"] == pytest.approx((float(a.square().mean()) + covariance) / total)
        assert sum(abs(share) for share in shares.values()) == pytest.approx(1 + 2 * covariance / total)
        assert tables[KIND][0]["explained"] == pytest.approx(1)

    def test_what_three_operations_do_together_is_not_explained(self) -> None:
        together = 0.01 * self.columns[0]

        def computed(own: tuple[str, ...]) -> Tensor:
            return together * all(name in own for name in OPERATIONS[:3])

        tables = compared(computed, torch.zeros(2, 8, dtype=torch.float64), OPERATIONS)
        assert tables[KIND][0]["explained"] == pytest.approx(0.75)  # an effect of 1 / 4 in each of the three
        assert tables["effects"][-1]["share"] == pytest.approx(0.25)

    def test_ratios_are_those_of_tokens_and_of_sequences(self) -> None:
        d = torch.full((2, 32), 0.02, dtype=torch.float64)
        d[1] = 0.0
        tables = compared(lambda own: -d if own else torch.zeros_like(d), torch.zeros_like(d))
        (whole,) = tables[KIND]
        assert (whole["outside_1"], whole["outside_10"]) == (0.5, 0.0)
        assert np.isnan(whole["explained"])
        assert not tables["effects"]
        lengths = tables["lengths"]
        assert [row["position"] for row in lengths] == [*range(2, 33, 2)]
        assert [row["sequence_std"] for row in lengths] == pytest.approx([0.02 * n / 2**0.5 for n in range(2, 33, 2)])
        assert [row["sequence_outside_10"] for row in lengths] == [0.5 * (np.expm1(0.02 * n) > 0.1) for n in range(2, 33, 2)]


class TestEngine:
    def test_in_fp32_is_the_model(self, model: tasks.LanguageModel, tokens: Tensor) -> None:
        expected = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        assert (PLAIN.log_probabilities(model, tokens) - expected).abs().max() < 2e-5  # 100 u times logits below 4

    def test_in_fp64_is_the_model_in_fp64(self, model: tasks.LanguageModel, tokens: Tensor) -> None:
        golden = untrained().double()
        golden.load_state_dict(model.state_dict())
        expected = golden.hidden(tokens[:, :-1]).detach() @ golden.out.weight.detach().T  # the logits are cast to FP32
        expected = expected.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        assert (Engine.exact().log_probabilities(golden, tokens) - expected).abs().max() < 1e-12

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_each_operation_is_exchanged_alone(self, model: tasks.LanguageModel, tokens: Tensor, name: str) -> None:
        engine = PLAIN.exchanged(NARROW, (name,))
        assert {one.name for one in fields(Engine) if getattr(engine, one.name) != getattr(PLAIN, one.name)} <= {*EXCHANGED[name]}
        d = engine.log_probabilities(model, tokens) - PLAIN.log_probabilities(model, tokens)
        assert 1e-5 < d.abs().max() < 1

    def test_results_that_calls_share_are_those_of_each_alone(self, model: tasks.LanguageModel, tokens: Tensor) -> None:
        kept: dict[Any, Any] = {}
        for own in subsets(("attention", "rmsnorm", "scan", "logprob")):
            engine = PLAIN.exchanged(NARROW, own)
            assert torch.equal(engine.log_probabilities(model, tokens, kept), engine.log_probabilities(model, tokens))
        assert [len(kept[engine.scan]) for engine in (PLAIN, NARROW)] == [2, 2]  # with and without the other norm

    def test_all_exchanged_is_the_other(self) -> None:
        assert PLAIN.exchanged(NARROW, OPERATIONS) == NARROW
        assert PLAIN.exchanged(NARROW, ()) == PLAIN

    def test_the_residual_stream_is_rounded_after_each_addition_and_nothing_else(self, model: tasks.LanguageModel) -> None:
        seen: list[Tensor] = []
        norms = [
            module for name, module in model.named_modules() if name == "norm" or name.endswith(("attention_norm", "mlp_norm"))
        ]
        hooks = [norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for norm in norms]
        tokens = TASK.held_out()["tokens"][:1]
        try:
            narrow = replace(PLAIN, residual=BF16).log_probabilities(model, tokens)
        finally:
            for hook in hooks:
                hook.remove()
        assert len(seen) == 2 * TASK.depth + 1
        assert all(bool((x == x.bfloat16().float()).all()) for x in seen)
        assert not bool((narrow == narrow.float().bfloat16()).all())

    def test_rows_of_a_call_do_not_matter_to_products_row_by_row(self, model: tasks.LanguageModel, tokens: Tensor) -> None:
        engine = replace(PLAIN, matmul=matmul.Torch(FP64))  # whose order of summation rounds far below FP32
        whole, parts = (replace(engine, batch=batch).log_probabilities(model, tokens) for batch in (0, 7))
        assert (whole - parts).abs().max() < 1e-6

    def test_refuses_a_model_whose_attention_it_does_not_see(self, tokens: Tensor) -> None:
        blind = untrained()
        blind.blocks[1].attention = tasks.DeltaRule(TASK.width, TASK.heads)
        with pytest.raises(Unsupported, match="nowhere"), pytest.warns(UserWarning, match="no call"):
            PLAIN.log_probabilities(blind, tokens)


def test_a_cache_in_e4m3_rounds_keys_and_values_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 32, 16, generator=generator).bfloat16().float() for _ in range(3))
    own = Cached(FP32, cache=Cast.parse("e4m3fn:saturate")).attend(q, k, v, Mask(causal=True))
    scales = [x.abs().amax(-1, keepdim=True) / 448 for x in (k, v)]
    k, v = ((x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in zip((k, v), scales, strict=True))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (own - expected).abs().max() < 1e-5


def test_the_scan_of_the_model_is_that_of_the_operation() -> None:
    q, k, v, g, beta = scan.Problem(heads=3, n=20, key=8, value=4).inputs(0).values()
    expected = scan.Eager(FP64)(q, k, v, g, beta, rule=scan.Rule.DELTA).tensors()["o"]
    assert torch.allclose(tasks.scan(q, k, v, g, beta), expected, rtol=0, atol=1e-14)


def test_the_router_of_the_model_is_that_of_the_operation() -> None:
    x, w = router.Problem(tokens=50, experts=6, k=2, hidden=16).inputs(0).values()
    expected = router.Eager(FP64)(x, w, k=2, score=router.Score.SOFTMAX).tensors()["weights"]
    assert torch.allclose(tasks.route(x, w, 2), expected, rtol=0, atol=1e-14)


def test_experts_compute_the_tokens_that_are_routed_to_them() -> None:
    experts = tasks.Experts(16, 5)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    weights = tasks.route(x, experts.router, 2)
    assert ((weights > 0).sum(-1) == 2).all()
    expected = torch.stack([weights[..., i, None] * one(x) for i, one in enumerate(experts.experts)]).sum(0)
    assert torch.allclose(experts(x), expected, atol=1e-6)


class TestKind:
    def test_sets_of_sequences_share_no_token(self, tmp_path: Path) -> None:
        text = np.random.default_rng(0).bytes(12_000)
        (tmp_path / "text").write_bytes(text)
        problem = Problem(replace(TASK, data=Text(str(tmp_path / "text"))), sequences=4)
        places = sorted(text.index(bytes(one.tolist())) for one in torch.cat([problem.tokens(seed) for seed in range(16)]))
        assert places[0] >= len(text) * 9 // 10
        assert all(later - one >= TASK.length + 1 for one, later in pairwise(places))

    def test_a_record_is_the_same_again(self, tmp_path: Path) -> None:
        problem = Problem(TASK, sequences=2)
        first, again = (Runner(Mismatches(), "cpu").measure(problem, NARROW, PLAIN, 1, shared=tmp_path) for _ in range(2))
        assert first.status is Status.OK, first.reason
        assert repr(first.tables) == repr(again.tables)  # NaN is not itself
        (row,), main = first.rows, [one for one in first.table("effects") if one["order"] == 1]
        assert [one["effect"] for one in main] == [*OPERATIONS]
        assert row["explained"] == pytest.approx(sum(one["share"] for one in main))
        assert row["trainer_error"] < 1e-4 < row["sampler_error"]
        assert len(list(tmp_path.glob("*/trained.json"))) == 1

    def test_equal_engines_do_not_differ(self, tmp_path: Path) -> None:
        record = Runner(Mismatches(), "cpu").measure(
            Problem(TASK, sequences=2, factorial=False), NARROW, NARROW, 1, shared=tmp_path
        )
        assert (record.rows[0]["std"], record.rows[0]["largest"], record.table("effects")) == (0, 0, [])

    def test_refuses_what_it_cannot_compare(self) -> None:
        with pytest.raises(BadInput, match=r"task.*task=language"):
            Problem("scenes")
        with pytest.raises(BadInput, match=r"problem\.sequences.*at least 2"):
            Problem(TASK, sequences=1)
        with pytest.raises(BadInput, match="must hold"):
            Problem(TASK, sequences=100)
        with pytest.raises(BadInput, match="at most so many"):
            Problem(TASK, sequences=2).tokens(16)
        with pytest.raises(BadInput, match="baseline"):
            Runner(Mismatches(), "cpu").measure(Problem(TASK), NARROW, None)
        with pytest.raises(BadInput, match=r"batch"):
            replace(PLAIN, batch=-1)


def test_split_sums_of_torch_are_added_in_fp32() -> None:
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 12), (12, 3)))
    variant = matmul.Torch(BF16, splits=3)
    a, b = variant.round_inputs(a, b)
    parts = [a.double()[:, i : i + 4] @ b.double()[i : i + 4] for i in (0, 4, 8)]
    expected = parts[0].float() + parts[1].float() + parts[2].float()
    assert torch.allclose(variant(a, b).tensors()["c"].float(), expected.bfloat16().float(), rtol=2**-7)
    with pytest.raises(BadInput, match=r"variant\.splits"):
        matmul.Torch(BF16, matmul.Call.BMM, splits=2)


def test_upcast_forms_round_where_they_say() -> None:
    x, w = rmsnorm.Problem(8, 64).inputs(0).values()
    variant = rmsnorm.Eager(BF16, upcast=True)
    x, w = variant.round_inputs(x, w)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(variant(x, w, eps=1e-6).tensors()["y"], exact.float().bfloat16() * w)
    inputs = scan.Problem(heads=2, n=16, key=8, value=8).inputs(0).values()
    narrow = scan.Eager(BF16, upcast=True)
    o = narrow(*narrow.round_inputs(*inputs), rule=scan.Rule.DELTA).tensors()["o"]
    wide = scan.Eager(FP64)(*(x.double() for x in narrow.round_inputs(*inputs)), rule=scan.Rule.DELTA).tensors()["o"]
    assert (o - wide).abs().max() <= 2**-8 * wide.abs().max()  # rounded once, at the end
