"""Our fast kernels as operators of torch: its own checks of an operator, and the bits of the kernels themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import numdev as nd
import numdev.attention.fused
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton, TritonBackward
from tests.cases import on

MASKS: list[dict[str, Any]] = [{}, {"causal": True, "window": 7}, {"key_lengths": [5, 21], "scale": 0.3}]


def tensors(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((2, 4, 20, 16), (2, 2, 24, 16), (2, 2, 24, 16))
    q, k, v = on(device, tuple(torch.randn(shape, dtype=dtype) for shape in shapes))
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_torch_accepts_both_operators(device: str, mask: dict[str, Any]) -> None:
    """Schemas, registration with autograd, and shapes and strides without data, also where they are symbols."""
    q, k, v = tensors(device)
    torch.library.opcheck(torch.ops.numdev.attention, (q, k, v), mask)
    out, lse = torch.ops.numdev.attention(q, k, v, **mask)
    saved = [x.detach() for x in (q, k, v, out, lse, out)]
    rest = mask.get("causal", False), mask.get("window"), mask.get("key_lengths"), mask.get("scale")
    torch.library.opcheck(torch.ops.numdev.attention_backward, (*saved, *rest))
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("mask", MASKS)
def test_bits_are_those_of_the_kernels_also_where_torch_compiles(device: str, mask: dict[str, Any]) -> None:
    q, k, v = tensors(device)
    kernels = TritonBackward(Triton(nd.Format.parse("fp32")), nd.Format.parse("fp32"))
    settings = Mask(mask.get("causal", False), mask.get("window"), tuple(mask.get("key_lengths", ())) or None), mask.get("scale")
    expected = kernels.forward(q.detach(), k.detach(), v.detach(), *settings)
    do = torch.ones_like(expected.out)
    of = kernels.backward(q.detach(), k.detach(), v.detach(), do, kernels.forward.saved(expected), *settings)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nd.fused_attention(q, k, v, **mask)

    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        out = run(q, k, v)
        assert torch.equal(out, expected.out)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))  # of a sum: dO has strides of 0
        assert all(map(torch.equal, gradients, (of.dq, of.dk, of.dv)))


def test_autocast_casts_as_it_does_for_torch(device: str) -> None:
    q, k, v = tensors(device)
    with torch.autocast(device, torch.float16):
        out = nd.fused_attention(q, k, v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert out.dtype == theirs.dtype == torch.float16
    assert torch.equal(out, nd.fused_attention(q.half(), k.half(), v.half()))


def test_what_it_does_not_take(device: str) -> None:
    q, k, v = tensors(device)
    with pytest.raises(nd.BadInput, match=r"q: .*float64.*give q, k and v in one of torch\.bfloat16"):
        nd.fused_attention(q.double(), k.double(), v.double())
    with pytest.raises(nd.BadInput, match=r"k: .*float16"):
        nd.fused_attention(q, k.half(), v)
    with pytest.raises(nd.BadInput, match=r"problem\.kv_heads"):
        nd.fused_attention(q[:, :3], k, v)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_captures_both_passes() -> None:
    q, k, v = tensors("cuda", torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = nd.fused_attention(q, k, v, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    expected, stream = step(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
