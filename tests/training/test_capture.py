"""q, k, v and dO of a model in files that `problem=captured` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
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
        mask = '{"causal": true, "window": null, "key_lengths": null}'
        assert file.metadata() == {"step": "0", "model": f'{{"call": 0, "scale": 0.5, "mask": {mask}}}'}


def _mask(kind: str) -> dict[str, Any]:
    """Arguments of torch's function for 6 queries and keys of 2 batch entries."""
    rows, keys = torch.arange(6)[:, None], torch.arange(6)
    if kind == "causal":
        return {"is_causal": True}
    if kind == "window":
        return {"attn_mask": (keys <= rows) & (rows - keys < 3)}
    if kind == "padding":
        return {"attn_mask": (keys < torch.tensor([4, 6])[:, None])[:, None, None]}
    return {}


@pytest.mark.parametrize("kind", ["none", "causal", "window", "padding"])
def test_gradients_are_those_of_the_model_that_was_captured(kind: str, tmp_path: Path) -> None:
    """torch's autograd in FP64 is the oracle: mask, scale, q, k, v and dO of the file are those of the model's call.

    An entry is rounded fewer than 100 times on its way from q, k, v and dO, and no partial sum exceeds 50, so the error is below
    100 * 50 * 2^-53 < 1e-12.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with nd.capture(nn.Identity(), tmp_path) as captured:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, **_mask(kind))
        out.backward(do)  # type: ignore[no-untyped-call]
    source, shape = nd.Captured(str(captured.paths[0])), nd.Shape(2, 3, 3, 6, 6, 4)
    problem = nd.Problem(source, shape)
    found = ATTENTION_BACKWARD.exact(*ATTENTION_BACKWARD.draw(problem, 0, torch.device("cpu")), **problem.arguments())
    for name, leaf in (("dq", q), ("dk", k), ("dv", v)):
        assert leaf.grad is not None
        assert float((found.tensors()[name] - leaf.grad).abs().max()) < 1e-12
    assert problem.scale == 0.3
    other = nd.Problem(source, shape, nd.Mask(), 0.5)
    assert (other.mask, other.scale) == (nd.Mask(), 0.5), "stated ones are honoured"


def test_a_mask_that_no_file_keeps_is_refused_with_its_reason(tmp_path: Path, numdev: Command) -> None:  # noqa: F811
    """Unless another one is stated. The model runs on."""
    q, bias = torch.randn(1, 2, 6, 4), torch.linspace(0, 1, 36).reshape(6, 6)
    with nd.capture(nn.Identity(), tmp_path) as captured:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    source, shape = nd.Captured(str(captured.paths[0])), nd.Shape(queries=6, keys=6, head_dim=4)
    with pytest.raises(
        nd.BadInput, match=r"could not keep the mask of model \(attn_mask: it adds to the scores.*problem.causal="
    ):
        nd.Problem(source, shape)
    assert nd.Problem(source, shape, nd.Mask(causal=True)).mask.causal
    small = ("measure", "problem=captured", f"problem.source.path={captured.paths[0]}", "problem.n=6", "problem.head_dim=4")
    ran = numdev(*small, "device=cpu")
    assert (ran.code, "it adds to the scores" in ran.err) == (2, True)
    assert numdev(*small, "device=cpu", "problem.causal=false").code == 0


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


def test_the_model_computes_what_it_computes_without_and_an_interrupted_step_leaves_no_file(
    model: nn.Module, x: Tensor, tmp_path: Path
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


def test_mistakes_are_told(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(nd.BadInput, match=r"^layers: 'layers.0.self_atn' .*did you mean layers.0.self_attn"):
        nd.capture(model, tmp_path, layers=["layers.0.self_atn"])
    missing = r"^layers: 'layers.0' .*it called no attention in step 0; layers.0.self_attn, "
    with pytest.raises(nd.BadInput, match=missing), nd.capture(model, tmp_path, layers=["layers.0"]):
        step(model, x)
    with pytest.warns(UserWarning, match="enter capture after attend"), nd.capture(model, tmp_path), nd.attend(EAGER):
        step(model, x)
    assert not list(tmp_path.iterdir())
