"""Attention exchanged under models of other libraries, with random weights; skipped where a library is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.exact import ExactBackward
from numdev.attention.naive import NaiveBackward

EXACT, EAGER = ExactBackward(), NaiveBackward.eager(BF16)
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0]])
PADDING = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])


def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="4.56")


def bert() -> Any:
    config = transformers().BertConfig(vocab_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModel.from_config(config, attn_implementation="sdpa").double()


def llama() -> Any:
    config = transformers().LlamaConfig(vocab_size=32, num_key_value_heads=2, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


def results(model: Any, run: Callable[[Any], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What a model makes, and the gradients of its weights."""
    model.zero_grad()
    out = run(model)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> None:
    """In FP64, with numbers near 1 and a few hundred of them in a sum."""
    assert torch.allclose(ours[0], theirs[0], rtol=1e-11, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-11) for a, b in zip(ours[1], theirs[1], strict=True))


def exchanged(model: Any, run: Callable[[Any], Tensor], calls: int = 2) -> tuple[Tensor, list[Tensor]]:
    """With exact attention a model has the result and the gradients that it has without, and each call is exchanged."""
    expected = results(model, run)
    with nd.attend(EXACT) as seen:
        same(results(model, run), expected)
    assert (seen.calls, seen.missed) == (calls, 0)
    with nd.attend(EAGER):
        assert not torch.allclose(results(model, run)[0], expected[0], rtol=1e-5, atol=0.0)
    return expected


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("padded", [False, True])
def test_transformers(make: Any, padded: bool) -> None:
    """By sdpa, which models take unless told otherwise; with padding and without."""

    def run(model: Any, *, padded: bool = padded) -> Tensor:
        out: Tensor = model(input_ids=TOKENS, **{"attention_mask": PADDING} if padded else {})[0][PADDING.bool()]
        return out

    expected = exchanged(make(), run)
    if padded and make is bert:  # under a causal limit no token sees the padding behind it
        assert not torch.allclose(run(make(), padded=False), expected[0], rtol=1e-5, atol=1e-5), "padding changes nothing"


def test_diffusers() -> None:
    """A transformer block of a diffusion model: self-attention over patches, cross-attention to a caption."""
    attention = pytest.importorskip("diffusers.models.attention")
    torch.manual_seed(0)
    block = attention.BasicTransformerBlock(16, 4, 4, cross_attention_dim=8).double().eval()
    patches, caption = torch.randn(2, 6, 16).double(), torch.randn(2, 5, 8).double()
    exchanged(block, lambda block: block(patches, encoder_hidden_states=caption))


@pytest.mark.parametrize("pooling", ["token", "map"])
def test_timm(pooling: str) -> None:
    """A vision transformer: self-attention in two blocks; `map` adds a call in which one learned query sees all patches."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    model = timm.VisionTransformer(**sizes, global_pool=pooling, qk_norm=True).double()
    pictures = torch.randn(2, 3, 16, 16).double()
    exchanged(model, lambda model: model(pictures), calls=2 if pooling == "token" else 3)
