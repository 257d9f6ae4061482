"""Planted causes of a loss spike, told apart by the sentence; replays, resume, processes; figures of heads against golden."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import random
import re
import weakref
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.nn import functional

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.tiled import TiledBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.doctor import (
    AGAIN,
    ALONE,
    EMULATED,
    EXACT,
    FIGURES,
    NUDGED,
    RUN,
    STEP,
    HeadLog,
    Replay,
    judged,
    replay_limit,
    worst_heads,
)
from tests.cases import Inputs, draw_all, on
from tests.training.spiking import AT, CASES, STEPS, Case, heavy_first_key, kernel, nothing
from tests.training.toy import TILED

STAYS = r": with exact attention the loss stays at 0\.\S+, not \S+\. One exact step is enough: "
LARGE = r"Head 1 of layers\.1 \(logits of std 3\d\d, P saturates in 9\d% of rows, an error of \S+\)"
MANY = r"Not head \d of layers\.0 alone, which errs most \(logits of std 0\.0\d+, an error of \S+\)"
SPIKES = r"The loss is \S+ around step \d+, after 0\.\d+\. "
TIED = r"Head 0 of layers\.0 \(logits of std 1\d\.\d, keys share the largest score in 100% of rows, an error of \S+\)"
EXPECTED = {
    "large logits": ("attention", rf"{SPIKES}{LARGE}{STAYS}scores of the forward pass, else in bf16\."),
    "accumulators": ("attention", rf"{SPIKES}{MANY}{STAYS}accumulator of the forward pass, else in bf16\."),
    "ties": ("attention", rf"{SPIKES}{TIED}{STAYS}values of the forward pass, else in bf16\."),
    "learning rate": (
        "not attention",
        rf"{SPIKES}Exact attention from step 40 on also spikes \(loss \S+\): attention is not the cause\.",
    ),
    "none": ("no spike", r"No spike in steps 40 to 54: the largest loss is 0\.01\d+; of the first 40 steps only .*"),
}
RATE = CASES["learning rate"]


LONG = ("accumulators", "large logits")


def diagnosed(case: Case, folder: Path, **settings: Any) -> nd.doctor[Any]:
    batches, step = case.set_up(folder, **settings)
    for batch in batches:
        batches.note(step(batch))
    return batches


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES])
def test_planted_causes_are_told_apart(name: str, tmp_path: Path) -> None:
    verdict, sentence = EXPECTED[name]
    diagnosis = diagnosed(CASES[name], tmp_path).diagnosis
    assert diagnosis.verdict == verdict
    assert re.fullmatch(sentence, diagnosis.sentence), diagnosis.sentence


class TestReplays:
    def test_the_same_attention_repeats_the_run_to_the_bit(self, tmp_path: Path) -> None:
        """Dropout and the optimizer's momentum are restored too; and the model is left as the run left it."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        layer.self_attn.dropout = 0.0
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        x, weights = torch.randn(60, 2, 6, 16), list[torch.Tensor]()
        batches = nd.doctor(layer, x, steps=60, state=[optimizer], folder=tmp_path, checkpoint=20)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = layer(batch).pow(3).sum().square()
            loss.backward()
            optimizer.step()
            batches.note(loss, spike=number == 50)
            if number == 55:
                weights = [p.detach().clone() for p in layer.parameters()]
        run, again, *_ = batches.diagnosis.replays
        assert again.losses == run.losses
        assert len(run.losses) == 36, "from the last checkpoint but one, at step 20, to five steps after the spike"
        assert all(map(torch.equal, layer.parameters(), weights))

    def test_a_step_that_changes_what_is_not_restored_is_undecided(self, tmp_path: Path) -> None:
        batches, step = Case().set_up(tmp_path)
        for number, batch in enumerate(batches):
            batches.note(step(batch) + 10.0 * (number == AT))
        assert batches.diagnosis.verdict == "undecided"
        assert "a step changes something that is not in state" in batches.diagnosis.sentence

    def test_a_loss_that_is_not_finite_spikes_at_once(self, tmp_path: Path) -> None:
        diagnosis = diagnosed(replace(RATE, jump=math.nan), tmp_path).diagnosis
        assert (diagnosis.verdict, diagnosis.spike) == ("not attention", AT + 1)
        assert json.loads((tmp_path / "rank0/diagnosis.json").read_bytes())["replays"][0]["peak"] is None

    def test_attention_that_the_model_calls_itself(self, tmp_path: Path) -> None:
        """Within `attend`, whose attention stands for one that is not known: its emulation does not spike, and names no step."""
        with nd.attend(kernel(accumulator=BF16)):
            diagnosis = diagnosed(replace(CASES["accumulators"], attention=None), tmp_path).diagnosis
        assert diagnosis.verdict == "attention"
        assert diagnosis.sentence.endswith("Its tiled emulation does not spike, so that no step is named.")
        assert [each.title for each in diagnosis.replays] == [RUN, AGAIN, NUDGED, EXACT, ALONE, EMULATED]

    def test_an_emulation_has_the_formats_of_the_attention(self, tmp_path: Path) -> None:
        """Vanilla attention in BF16 stores S in BF16."""
        case = replace(CASES["large logits"], attention=VanillaBackward(BF16))
        diagnosis = diagnosed(case, tmp_path).diagnosis
        healing = [each.title for each in diagnosis.replays if each.title.startswith(STEP) and not each.spikes]
        assert healing == [f"{STEP}scores of the forward pass, else in bf16"]

    @pytest.mark.parametrize("at", [10, 45])
    def test_a_run_that_overflows_at_any_step_is_examined(self, at: int, tmp_path: Path) -> None:
        batches, step = Case().set_up(tmp_path)
        for batch in batches:
            batches.note(step(batch) + (math.nan if batches.step == at else 0.0))
        assert (batches.diagnosis.verdict, batches.diagnosis.spike) == ("not attention", at)
        assert batches.diagnosis.sentence.startswith(f"The loss is inf or NaN around step {at}, after 0.0")

    def test_gradients_of_several_steps_are_restored(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        batches = nd.doctor(layer, torch.randn(60, 2, 6, 16), steps=60, state=optimizer, folder=tmp_path, checkpoint=15)
        for batch in batches:
            loss = layer(batch).pow(3).sum().square()
            loss.backward()
            if batches.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            batches.note(loss, spike=batches.step == 50 and not batches.replay)
        run, again, *_ = batches.diagnosis.replays
        assert again.losses == run.losses

    def test_attention_beside_that_is_not_made_exact(self, tmp_path: Path) -> None:
        """One layer of the model is matrix products and a softmax."""
        batches, step = RATE.set_up(tmp_path)

        def both(batch: Any) -> torch.Tensor:
            x = torch.randn(1, 1, 4, 4)
            return step(batch) + 0.0 * ((x @ x.mT).softmax(-1) @ x).sum()

        with pytest.warns(UserWarning, match="attention ran elsewhere"):
            deque(map(batches.note, map(both, batches)))
        assert batches.diagnosis.verdict == "undecided"
        assert "of matrix products in a function outside of any module." in batches.diagnosis.sentence

    def test_on_request(self, tmp_path: Path) -> None:
        """What is asked for is a rise within the noise of the data, which exact attention has too."""
        batches, step = Case().set_up(tmp_path)
        for number, batch in enumerate(batches):
            batches.note(step(batch), spike=number == 20)
        assert (batches.diagnosis.verdict, batches.diagnosis.spike) == ("not attention", 20)


def replay(title: str, peak: float, first: float = 1.0) -> Replay:
    return Replay(title, (first, peak), peak, peak > 2.0)


HEAD = {"layer": "a", "head": 1, "logit_std": 340.0, "saturated": 0.9, "tied": 0.0, "error": 0.5}


class TestJudgement:
    def judged(self, again: float, nudged: float, exact: float, first: float = 1.0, missed: str = "") -> tuple[str, str]:
        peaks = {"run": 9.0, "a": again, "n": nudged, "e": exact}
        replays = [replay(title, peak, first if title == "a" else 1.0) for title, peak in peaks.items()]
        return judged(replays, 400, [HEAD], 1.8, missed)

    def test_a_spike_that_any_change_moves_is_undecided(self) -> None:
        verdict, sentence = self.judged(9.0, 1.0, 1.5)
        assert verdict == "undecided"
        assert "so it does with one weight moved by a last place (1)" in sentence

    def test_exact_attention_that_spikes_acquits(self) -> None:
        sentence = "Exact attention from step 400 on also spikes (loss 3): attention is not the cause."
        assert self.judged(9.0, 9.0, 3.0) == self.judged(9.0, 1.0, 3.0) == ("not attention", sentence)

    def test_a_replay_that_does_not_repeat_the_run_decides_nothing(self) -> None:
        assert self.judged(1.0, 9.0, 1.0)[0] == self.judged(1.0, 9.0, 9.0)[0] == "undecided"

    def test_a_replay_that_begins_with_another_loss_decides_nothing(self) -> None:
        verdict, sentence = self.judged(9.0, 9.0, 1.0, first=1.01)
        assert verdict == "undecided"
        assert "the loss of step 400 is 1.01, not 1: a step changes something" in sentence
        assert self.judged(9.0, 9.0, 3.0, first=1.0005)[0] == "not attention"

    def test_exact_attention_that_leaves_a_part_of_the_spike_is_undecided(self) -> None:
        assert self.judged(9.0, 9.0, 1.9)[0] == "undecided"
        assert "the loss still rises to 1.9" in self.judged(9.0, 9.0, 1.9)[1]

    def test_attention_that_is_not_made_exact_is_not_acquitted(self) -> None:
        verdict, sentence = self.judged(9.0, 9.0, 9.0, missed="7 of matrix products in b")
        assert verdict == "undecided"
        assert sentence.endswith(": 7 of matrix products in b.")

    def test_where_a_replay_spikes(self) -> None:
        """Between the limit of the run and its peak; at most ten times the height of the limit; half of what is no spike."""
        assert replay_limit([1.0] * 40, 2.0, 5.0) == 3.0
        assert replay_limit([1.0] * 40, 2.0, 1e9) == replay_limit([1.0] * 40, 2.0, math.inf) == 11.0
        assert replay_limit([1.0] * 40, 2.0, 1.5) == 1.25
        assert replay_limit([], math.inf, math.inf) == math.inf
        assert replay_limit([1.0, 3.0, 2.0], math.inf, math.inf) == 3.0

    def test_heads_by_their_largest_error_up_to_the_spike(self) -> None:
        """A head with hardly a gradient, and an error as small, is not the worst; what errs after the spike does not count."""
        names = ("step", "head", "out_rmse", "out_size", "dq_rmse", "dq_size")
        values = [(1, 0, 0.1, 1.0, 1e-9, 1e-9), (1, 1, 0.0, 1.0, 0.2, 1.0)]
        values += [(2, 0, 0.0, 1.0, math.nan, math.nan), (3, 0, 9.0, 1.0, 0.0, 0.0)]
        rows = [{"layer": "a", "call": 0, **dict(zip(names, each, strict=True))} for each in values]
        heads = worst_heads(rows, spike=2)
        assert [(each["head"], each["step"]) for each in heads] == [(1, 1), (0, 1)]
        assert heads[0]["error"] == pytest.approx(0.2 * math.sqrt(2))

    def test_a_head_that_overflows_comes_first_where_exact_attention_does_not(self) -> None:
        """At the next step its inputs are not finite, so that exact attention is not either."""
        names = ("step", "head", "out_rmse", "out_size", "dq_rmse", "dq_size")
        values = [
            (1, 0, 0.5, 1.0, 0.0, 1.0),
            (1, 1, 0.1, 1.0, 0.0, 1.0),
            (2, 0, 0.5, 1.0, 0.0, 1.0),
            (2, 1, math.nan, 1.0, 0.0, 1.0),
        ]
        values += [(3, head, math.nan, math.nan, math.nan, math.nan) for head in (0, 1)]
        heads = worst_heads([{"layer": "a", "call": 0, **dict(zip(names, each, strict=True))} for each in values], spike=3)
        assert [(each["head"], each["step"], each["error"]) for each in heads] == [(1, 2, math.inf), (0, 1, 0.5)]


class TestFiles:
    def test_a_killed_run_goes_on_to_the_same_diagnosis(self, tmp_path: Path) -> None:
        whole = diagnosed(RATE, tmp_path / "whole")
        batches, step = RATE.set_up(tmp_path / "killed")
        for number, batch in enumerate(batches):
            batches.note(step(batch))
            if number == STEPS + 3:  # within the second replay
                break
        with pytest.warns(UserWarning, match="doctor: goes on from step 40 of "):
            resumed = diagnosed(RATE, tmp_path / "killed")
        assert resumed.diagnosis == whole.diagnosis
        assert not list(tmp_path.glob("**/.*"))
        first, second = (pd.concat(map(pd.read_parquet, sorted(each.folder.glob("log-*.parquet")))) for each in (whole, resumed))
        pd.testing.assert_frame_equal(first, second)

    def test_a_shuffled_loader_goes_on_with_the_same_batches(self, tmp_path: Path) -> None:
        """Its order is drawn from torch's generator when the loop begins."""

        def run(folder: str, stop: int) -> list[float]:
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
            layer.self_attn.dropout = 0.0
            loader: Any = torch.utils.data.DataLoader(torch.randn(30, 6, 16), shuffle=True)  # type: ignore[arg-type]
            batches, losses = nd.doctor(layer, loader, steps=30, folder=tmp_path / folder, checkpoint=10), list[float]()
            for batch in batches:
                loss = layer(batch).square().mean()
                batches.note(loss)
                losses.append(float(loss))
                if batches.step == stop:
                    break
            return losses

        whole = run("whole", 30)
        run("killed", 25)
        with pytest.warns(UserWarning, match="goes on from step 10"):
            assert run("killed", 30) == whole[10:]

    def test_other_batches_are_refused(self, tmp_path: Path) -> None:
        for seed in (0, 1):
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
            data = torch.randn(30, 2, 6, 16, generator=torch.Generator().manual_seed(seed))
            batches = nd.doctor(layer, data, steps=30, folder=tmp_path, checkpoint=10)
            with pytest.raises(nd.BadInput, match="^batches: 0 cannot be used; its batch is another") if seed else nullcontext():
                for batch in batches:
                    batches.note(layer(batch).square().mean())
                    if batches.step == 15:
                        break

    def test_the_log_looks_at_one_head_in_turn(self, tmp_path: Path) -> None:
        rows = pd.concat(map(pd.read_parquet, sorted(diagnosed(Case(), tmp_path, every=5).folder.glob("log-*.parquet"))))
        assert rows["step"].tolist() == list(range(0, STEPS, 5))
        assert rows["head"].tolist() == [step // 5 % 2 for step in rows["step"]]
        assert {"layer", "call", "loss", "gradient_norm", *FIGURES} <= set(rows)
        assert rows.drop(columns="layer").notna().all().all()

    @pytest.mark.slow
    def test_processes_agree_and_write_files_of_their_own(self, tmp_path: Path) -> None:
        """The loss of rank 1 alone spikes, by data that rank 0 does not see."""
        context = multiprocessing.get_context("spawn")
        both = [context.Process(target=one_of_two, args=(rank, tmp_path)) for rank in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join(120)
            assert each.exitcode == 0
        first, second = (json.loads((tmp_path / f"doctor/rank{rank}/diagnosis.json").read_bytes()) for rank in range(2))
        assert first["verdict"] == second["verdict"] == "attention"
        assert first["replays"] == second["replays"]
        assert first["heads"] != second["heads"], "each has looked at its own"


def one_of_two(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    plant = heavy_first_key if rank == 1 else nothing
    diagnosed(replace(CASES["accumulators"], plant=plant), folder / "doctor")
    torch.distributed.destroy_process_group()


class TestRefused:
    @pytest.mark.parametrize("name", ["steps", "every", "heads", "checkpoint"])
    def test_numbers_below_one(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(nd.BadInput, match=f"^{name}: 0 cannot be used; give a whole number of at least 1$"):
            Case().set_up(tmp_path, **{name: 0})

    def test_state_that_cannot_be_saved(self, tmp_path: Path) -> None:
        with pytest.raises(nd.BadInput, match="^state: 'float' cannot be used; give what has state_dict"):
            Case().set_up(tmp_path, state=[0.1])

        class Odd:
            def state_dict(self) -> object:
                return {"generator": random.Random(0)}

            def load_state_dict(self, state: object) -> None:
                """Takes anything."""

        with pytest.raises(nd.BadInput, match="state holds more than tensors, numbers and text; give another folder"):
            next(iter(Case().set_up(tmp_path, state=[Odd()])[0]))

    def test_what_is_no_number(self, tmp_path: Path) -> None:
        for name in ("steps", "every", "heads", "checkpoint"):
            with pytest.raises((nd.BadInput, TypeCheckError)) as error:  # the latter with --shapes
                Case().set_up(tmp_path, **{name: 2.5})
            assert name in str(error.value)
        batches, _ = Case().set_up(tmp_path)
        next(iter(batches))
        with pytest.raises(nd.BadInput, match=r"^loss: \(3,\) cannot be used; give one number$"):
            batches.note(torch.zeros(3))

    def test_a_step_without_its_loss(self, tmp_path: Path) -> None:
        with pytest.raises(nd.BadInput, match=r"^loss: None cannot be used; call note\(loss\) in each step of the loop$"):
            list(Case().set_up(tmp_path)[0])

    def test_a_model_that_calls_no_attention(self, tmp_path: Path) -> None:
        batches = nd.doctor(nn.Linear(2, 2), [1.0, 2.0], steps=2, folder=tmp_path)
        with pytest.raises(nd.Unsupported, match="^model: it called .*scaled_dot_product_attention nowhere"):
            deque(map(batches.note, batches))

    def test_no_batches_and_a_loop_that_has_not_ended(self, tmp_path: Path) -> None:
        batches = nd.doctor(nn.Linear(2, 2), list[float](), steps=2, folder=tmp_path)
        with pytest.raises(nd.BadInput, match="^batches: 0 cannot be used; give some$"):
            list(batches)
        with pytest.raises(nd.BadInput, match="^diagnosis: None cannot be used"):
            _ = batches.diagnosis

    def test_folders_of_another_run(self, tmp_path: Path) -> None:
        batches, step = Case().set_up(tmp_path)
        for number, batch in enumerate(batches):
            batches.note(step(batch))
            if number == 12:
                break
        for other in (replace(Case(), attention=kernel(scores=BF16)), replace(Case(), gains=(1.0, 1.0))):
            with pytest.raises(
                nd.BadInput, match="^folder: .* cannot be used; it(s checkpoint does not fit| holds a run with other)"
            ):
                next(iter(other.set_up(tmp_path)[0]))
        for path in batches.folder.glob("checkpoint-*"):
            path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(nd.BadInput, match="a checkpoint is damaged"):
            next(iter(Case().set_up(tmp_path)[0]))
        (batches.folder / "diagnosis.json").touch()
        with pytest.raises(nd.BadInput, match="it holds a diagnosis"):
            next(iter(Case().set_up(tmp_path)[0]))


CAUSAL, HEADS = nd.Mask(causal=True), 4


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


def test_a_gradient_that_q_has_by_another_way_is_none_of_the_call(inputs: Inputs) -> None:
    q, k, v, do = (x.double().requires_grad_() for x in inputs)
    log = HeadLog(MODEL, None, every=1)
    with log.active():
        (MODEL(q, k, v) + 3 * q).backward(do.detach())
    assert all(row["dq_rmse"] < 1e-12 < row["dq_size"] for row in log.rows())


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
        assert log.is_idle == (step % 3 > 0), "in other steps the model's calls go on by themselves"
        logged(log, inputs)
    for row in log.rows():
        heads.setdefault(row["step"], []).append(row["head"])
    assert heads == {0: [0, 1], 3: [2, 3], 6: [0, 1]}
