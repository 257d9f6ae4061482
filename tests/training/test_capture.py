"""q, k, v and dO of a model in files that `problem=captured` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.backward.naive import NaiveBackward
from tests.cli.test_cli import Command, numdev  # noqa: F401

EAGER = NaiveBackward.eager(BF16)


def step(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    out.pow(3).sum().backward()  # type: ignore[no-untyped-call]
    return out.detach()


def test_what_attention_takes_is_kept(tmp_path: Path) -> None:
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
    assert found["model.k"].dtype == torch.bfloat16
    assert torch.equal(found["model.q"], q.bfloat16())
    assert found["model.k"].any()
    assert torch.equal(found["model.do"], do.bfloat16())
    with safe_open(captured.paths[0], "pt") as file:
        assert file.metadata() == {"step": "0", "model": '{"call": 0, "scale": 0.5, "mask": "is_causal"}'}


def test_chosen_layers_and_steps(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with nd.capture(model, tmp_path, layers=["layers.1.self_attn"], steps=[0, 2, 70]) as captured:
        for number in range(4):
            step(model, x + number)
            captured.step()
        captured.step(70)
        model(x)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step{n:06d}.safetensors" for n in (0, 2, 70)]
    assert {name.rpartition(".")[0] for name in load_file(captured.paths[2])} == {"layers.1.self_attn"}
    assert not torch.equal(
        load_file(captured.paths[0])["layers.1.self_attn.q"], load_file(captured.paths[2])["layers.1.self_attn.q"]
    )
    assert "layers.1.self_attn.do" not in load_file(captured.paths[70])
    assert captured.seen.calls == 10


def test_calls_by_number_and_steps_by_entering_again(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    """A module that calls twice is two layers."""
    context = nd.capture(model, tmp_path, layers=[0, 2, 3])
    for _ in range(2):
        with context:
            step(model, x)
            step(model, x)
    assert sorted(context.paths) == [0, 1]
    layers = {name.rpartition(".")[0] for name in load_file(context.paths[1])}
    assert layers == {"layers.0.self_attn", "layers.0.self_attn#1", "layers.1.self_attn#1"}


def test_the_model_computes_what_it_computes_without(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    want = step(model, x)
    with nd.capture(model, tmp_path):
        assert torch.equal(step(model, x), want)
    with nd.attend(EAGER) as seen:
        want = step(model, x)
        with nd.capture(model, tmp_path):
            assert torch.equal(step(model, x), want)
    assert seen.calls == 4


def test_steps_of_training_are_measured(model: nn.Module, x: Tensor, tmp_path: Path, numdev: Command) -> None:  # noqa: F811
    """Early and late: the question of Figure 3 asked of what a model that learns gives to its attention."""
    optimizer, target = torch.optim.SGD(model.parameters(), 0.1), torch.zeros_like(x)
    with nd.capture(model, tmp_path, layers=["layers.0.self_attn"], steps=[0, 5]) as captured:
        for _ in range(6):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
            captured.step()
    for number in (0, 5):
        path = captured.paths[number]
        problem = nd.Problem(nd.Captured(str(path), layer="layers.0.self_attn"), nd.Shape(queries=6, keys=6, head_dim=8))
        record = nd.measure(problem, nd.Tiled(nd.Precision.kernel(BF16), nd.Tiling(4, 4)), device="cpu")
        assert record.status is nd.Status.OK
        assert len({row["seed"] for row in record.rows}) == 4
    ran = numdev(
        "measure",
        "problem=captured",
        f"problem.source.path={path}",
        "problem.source.layer=layers.0.self_attn",
        "problem.n=6",
        "problem.head_dim=8",
        "tiling.bc=4",
        "tiling.br=4",
        f"results={tmp_path / 'results'}",
    )
    assert ran.code == 0, ran


def test_mistakes_are_told(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(nd.BadInput, match=r"^layers: 'layers.0.self_atn' .*did you mean layers.0.self_attn"):
        nd.capture(model, tmp_path, layers=["layers.0.self_atn"])
    missing = r"^layers: 'layers.0' .*it called no attention in step 0; layers.0.self_attn, "
    with pytest.raises(nd.BadInput, match=missing), nd.capture(model, tmp_path, layers=["layers.0"]):
        step(model, x)
    with pytest.warns(UserWarning, match="enter capture after attend"), nd.capture(model, tmp_path), nd.attend(EAGER):
        step(model, x)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_step_leaves_no_file(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="invalid"), nd.capture(model, tmp_path):
        step(model, x).view(7)
    assert not list(tmp_path.iterdir())
