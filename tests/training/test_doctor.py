"""Planted causes of a loss spike, told apart by the sentence; the replays, resume, processes, and what is refused."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.doctor import AGAIN, ALONE, EMULATED, EXACT, NUDGED, RUN, STEP, Replay, judged, replay_limit, worst_heads
from numdev.training.doctor import FIGURES
from tests.training.spiking import AT, CASES, STEPS, Case, heavy_first_key, kernel, nothing

STAYS = r": with exact attention the loss stays at 0\.\S+, not \S+\. One exact step is enough: "
LARGE = r"Head 1 of layers\.1 \(logits of std 3\d\d, P saturates in 9\d% of rows, an error of \S+\)"
MANY = r"No head alone; head \d of layers\.0 \(logits of std 0\.0\d+, an error of \S+\) errs most"
TIED = r"Head 0 of layers\.0 \(logits of std 1\d\.\d, keys share the largest score in 100% of rows, an error of \S+\)"
EXPECTED = {
    "large logits": ("attention", rf"{LARGE}{STAYS}scores of the forward pass, else in bf16\."),
    "accumulators": ("attention", rf"{MANY}{STAYS}accumulator of the forward pass, else in bf16\."),
    "ties": ("attention", rf"{TIED}{STAYS}values of the forward pass, else in bf16\."),
    "learning rate": ("not attention", r"Exact attention from step 40 on also spikes \(loss \S+\): attention is not the cause\."),
    "none": ("no spike", r"No spike in steps 0 to 54: the largest loss is 0\.01\d+\."),
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

    def test_on_request(self, tmp_path: Path) -> None:
        """What is asked for is a rise within the noise of the data, which exact attention has too."""
        batches, step = Case().set_up(tmp_path)
        for number, batch in enumerate(batches):
            batches.note(step(batch), spike=number == 20)
        assert (batches.diagnosis.verdict, batches.diagnosis.spike) == ("not attention", 20)


def replay(title: str, peak: float, limit: float = 2.0) -> Replay:
    return Replay(title, (peak,), peak, peak > limit)


HEAD = {"layer": "a", "head": 1, "logit_std": 340.0, "saturated": 0.9, "tied": 0.0, "error": 0.5}


class TestJudgement:
    def judged(self, again: float, nudged: float, exact: float) -> tuple[str, str]:
        return judged([replay("run", 9.0), replay("a", again), replay("n", nudged), replay("e", exact)], 400, [HEAD])

    def test_a_spike_that_any_change_moves_is_undecided(self) -> None:
        verdict, sentence = self.judged(9.0, 1.0, 1.5)
        assert verdict == "undecided"
        assert "so it does with one weight moved by a last place (1)" in sentence

    def test_exact_attention_that_spikes_acquits(self) -> None:
        sentence = "Exact attention from step 400 on also spikes (loss 3): attention is not the cause."
        assert self.judged(9.0, 9.0, 3.0) == self.judged(9.0, 1.0, 3.0) == ("not attention", sentence)

    def test_a_replay_that_does_not_repeat_the_run_decides_nothing(self) -> None:
        assert self.judged(1.0, 9.0, 1.0)[0] == self.judged(1.0, 9.0, 9.0)[0] == "undecided"

    def test_where_a_replay_spikes(self) -> None:
        """Between the limit of the run and its peak; at most ten times the height of the limit; half of what is no spike."""
        assert replay_limit([1.0] * 40, 2.0, 5.0) == 3.0
        assert replay_limit([1.0] * 40, 2.0, 1e9) == replay_limit([1.0] * 40, 2.0, math.inf) == 11.0
        assert replay_limit([1.0] * 40, 2.0, 1.5) == 1.25
        assert replay_limit([], math.inf, math.inf) == math.inf

    def test_heads_by_their_largest_error_up_to_the_spike(self) -> None:
        """A head with hardly a gradient, and an error as small, is not the worst; what errs after the spike does not count."""
        names = ("step", "head", "out_rmse", "out_size", "dq_rmse", "dq_size")
        values = [(1, 0, 0.1, 1.0, 1e-9, 1e-9), (1, 1, 0.0, 1.0, 0.2, 1.0)]
        values += [(2, 0, 0.0, 1.0, math.nan, math.nan), (3, 0, 9.0, 1.0, 0.0, 0.0)]
        rows = [{"layer": "a", "call": 0, **dict(zip(names, each, strict=True))} for each in values]
        heads = worst_heads(rows, spike=2)
        assert [(each["head"], each["step"]) for each in heads] == [(1, 1), (0, 1)]
        assert heads[0]["error"] == pytest.approx(0.2 * math.sqrt(2))


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
        with pytest.raises(nd.BadInput, match=f"^{name}: 0 cannot be used; give at least 1$"):
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
