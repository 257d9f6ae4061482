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
from numdev.errors import BadInput, Unsupported
from numdev.training.huggingface import register

EXACT, EAGER = ExactBackward(), NaiveBackward.eager(BF16)
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0]])
PADDING = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])


def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="4.56")


def bert(attention: str = "sdpa") -> Any:
    config = transformers().BertConfig(vocab_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModel.from_config(config, attn_implementation=attention).double()


def llama(attention: str = "sdpa") -> Any:
    config = transformers().LlamaConfig(vocab_size=32, num_key_value_heads=2, **SMALL)
    torch.manual_seed(0)
    return transformers().AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


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
    """sdpa, which models take unless told otherwise, and a registered name; with padding and without."""

    def run(model: Any, *, padded: bool = padded) -> Tensor:
        out: Tensor = model(input_ids=TOKENS, **{"attention_mask": PADDING} if padded else {})[0][PADDING.bool()]
        return out

    expected = exchanged(make(), run)
    if make is not bert or int(transformers().__version__.split(".")[0]) >= 5:  # an earlier Bert takes no registered name
        counted = register("numdev_exact", EXACT)
        same(results(make("numdev_exact"), run), expected)
        assert counted.calls == 2
    if padded and make is bert:  # under a causal limit no token sees the padding behind it
        assert not torch.allclose(run(make(), padded=False), expected[0], rtol=1e-5, atol=1e-5), "padding changes nothing"


def test_arguments_of_transformers_that_are_not_read_are_refused() -> None:
    transformers()
    with pytest.raises(BadInput, match="^name: 'sdpa'"):
        register("sdpa", EXACT)
    register("numdev_exact", EXACT)
    from transformers import AttentionInterface

    forward = AttentionInterface()["numdev_exact"]
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(Unsupported, match="^softcap: it caps the scores"):
        forward(torch.nn.Identity(), q, q, q, None, softcap=30.0)
    model, left = llama("numdev_exact"), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    with pytest.raises(Unsupported, match="^attn_mask: no Mask states it"):
        model(input_ids=TOKENS, attention_mask=left)


@pytest.mark.parametrize("family", ["Bloom", "CodeGen"])
def test_a_model_that_transformers_does_not_run_by_sdpa_is_refused(family: str) -> None:
    """Each read a mask of sdpa's as one of its own, and was not causal any more."""
    named = {"vocab_size": 32, "hidden_size": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    library = transformers()
    torch.manual_seed(0)
    seen = register("numdev_exact", EXACT)
    config = getattr(library, f"{family}Config")(**named)
    model = library.AutoModel.from_config(config, attn_implementation="numdev_exact").double()
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"^attn_implementation: 'numdev_exact': transformers does not run {family}Model"):
            model(input_ids=TOKENS)
    assert seen.calls == 0


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
