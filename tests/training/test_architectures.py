"""Architectures of other libraries, small and of random weights: what the table in docs/reference/architectures.md says of each.

A model in FP64 is compared with itself under exact attention: two orders of summation of some hundred products of numbers near
1, through two layers, agree to 1e-10.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import numdev as nd
from numdev.attention.mask import Mask

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
BEHIND, BEFORE = ({"attention_mask": torch.tensor([[1] * 6, row])} for row in ([1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]))
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = SIZES | {"vocab_size": 32, "pad_token_id": 0}
GROUPED = SMALL | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"image_size": 16, "patch_size": 8}
BART = {"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "dropout": 0.0}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OPT = {"vocab_size": 32, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
MODERN = SMALL | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
WAVES: dict[str, Any] = {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [4], "num_feat_extract_layers": 1, "layerdrop": 0.0}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0, "hidden_dropout": 0.0}
WAVES |= {"attention_dropout": 0.0, "apply_spec_augment": False, "feat_extract_norm": "layer"}
SWIN: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def of_transformers(config: str, inputs: dict[str, Tensor], **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", minversion="4.56")
    kind = getattr(transformers, config, None) or pytest.skip(f"this version has no {config}")
    return transformers.AutoModel.from_config(kind(**settings), attn_implementation="sdpa"), inputs


def softcapped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; docs/how-to/exchange-attention.md has it too."""
    causal = attention_mask is None and query.shape[-2] > 1
    out = nd.softcapped_attention(query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True, softcap=softcap)
    return out.transpose(1, 2), None


def of_gemma2() -> tuple[nn.Module, dict[str, Tensor]]:
    """With weights large enough for its scores to reach the cap."""
    transformers = pytest.importorskip("transformers", minversion="4.56")
    transformers.AttentionInterface.register("softcapped", softcapped)
    transformers.AttentionMaskInterface.register("softcapped", transformers.masking_utils.sdpa_mask)
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(**SMALL | heads, attn_logit_softcapping=0.5, initializer_range=0.5)
    return transformers.AutoModel.from_config(config, attn_implementation="softcapped"), TEXT


def of_torch() -> tuple[nn.Module, dict[str, Tensor]]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": normal(2, 6, 16)}


def of_diffusers() -> tuple[nn.Module, dict[str, Tensor]]:
    attention = pytest.importorskip("diffusers.models.attention")
    block: nn.Module = attention.BasicTransformerBlock(16, 4, 4, cross_attention_dim=8)
    return block, {"hidden_states": normal(2, 6, 16), "encoder_hidden_states": normal(2, 5, 8)}


TEXT, IMAGES = {"input_ids": TOKENS}, {"pixel_values": normal(2, 3, 16, 16)}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "nn.TransformerEncoder": of_torch,
    "BasicTransformerBlock (diffusers)": of_diffusers,
    "BERT": lambda: of_transformers("BertConfig", TEXT | BEHIND, **SMALL, **NO_DROPOUT),
    "RoBERTa": lambda: of_transformers("RobertaConfig", TEXT | BEHIND, **SMALL, **NO_DROPOUT),
    "ModernBERT": lambda: of_transformers("ModernBertConfig", TEXT | BEHIND, **MODERN),
    "ESM": lambda: of_transformers(
        "EsmConfig", TEXT | BEHIND, **SMALL, **NO_DROPOUT, mask_token_id=31, position_embedding_type="rotary"
    ),
    "GPT-2": lambda: of_transformers("GPT2Config", TEXT | BEFORE, **GPT2),
    "GPT-NeoX": lambda: of_transformers("GPTNeoXConfig", TEXT, **SMALL),
    "OPT": lambda: of_transformers("OPTConfig", TEXT | BEFORE, **OPT, word_embed_proj_dim=16),
    "Llama": lambda: of_transformers("LlamaConfig", TEXT | BEFORE, **GROUPED),
    "Mistral": lambda: of_transformers("MistralConfig", TEXT, **GROUPED, sliding_window=3),
    "Qwen3": lambda: of_transformers("Qwen3Config", TEXT | BEFORE, **GROUPED, head_dim=4),
    "Gemma": lambda: of_transformers("GemmaConfig", TEXT, **SMALL, num_key_value_heads=1, head_dim=8),
    "Gemma 2": of_gemma2,
    "Phi": lambda: of_transformers("PhiConfig", TEXT, **SMALL, resid_pdrop=0.0, embd_pdrop=0.0),
    "Cohere": lambda: of_transformers("CohereConfig", TEXT, **GROUPED),
    "Falcon with ALiBi": lambda: of_transformers(
        "FalconConfig",
        TEXT,
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        multi_query=False,
    ),
    "T5": lambda: of_transformers(
        "T5Config", TEXT | {"decoder_input_ids": TOKENS}, vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4
    ),
    "BART": lambda: of_transformers("BartConfig", TEXT | BEHIND | {"decoder_input_ids": TOKENS}, **BART),
    "Whisper": lambda: of_transformers(
        "WhisperConfig",
        {"input_features": normal(2, 4, 12), "decoder_input_ids": TOKENS},
        **BART,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=8,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    ),
    "wav2vec 2.0": lambda: of_transformers("Wav2Vec2Config", {"input_values": normal(2, 48)}, **SMALL, **WAVES),
    "ViT": lambda: of_transformers("ViTConfig", IMAGES, **SIZES, **IMAGE, **NO_DROPOUT),
    "DINOv2": lambda: of_transformers(
        "Dinov2Config", IMAGES, **IMAGE, **NO_DROPOUT, hidden_size=16, num_hidden_layers=2, num_attention_heads=4
    ),
    "CLIP, of images": lambda: of_transformers("CLIPVisionConfig", IMAGES, **SIZES, **IMAGE),
    "Swin": lambda: of_transformers("SwinConfig", IMAGES, **SWIN, **NO_DROPOUT, drop_path_rate=0.0),
}
LEARNED = "T5", "Swin"  # what these add to the scores, of which nd.shadow has no gradient


@dataclass
class Spy:
    """Exact attention that keeps what it was asked, and its O."""

    outs: list[Tensor] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        out = nd.ExactBackward().attend(q, k, v, mask, scale)
        self.outs.append(out.detach())
        self.masks.append(mask)
        return out


def described(masks: list[Mask]) -> str:
    """In a word each, the masks of the calls of a model."""
    words = []
    for mask in masks:
        parts = {"causal": mask.causal, "window": mask.window, "padding": mask.key_lengths, "tensor": mask.bias is not None}
        parts["softcap"] = mask.softcap is not None
        words += [name for name, value in parts.items() if value] or ["none"]
    return ", ".join(dict.fromkeys(words))


def table() -> dict[str, list[str]]:
    """The cells behind the name of each architecture."""
    lines = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines[1:]}


def test_the_table_has_every_architecture() -> None:
    assert list(table()) == list(MODELS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_the_table_is_what_happens(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library about a model this small
        model, inputs = MODELS[name]()
    model = model.double().eval()

    def run() -> Tensor:
        result = model(**inputs)
        out: Tensor = result if isinstance(result, Tensor) else result[0]
        return out

    def differentiated() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        run().square().mean().backward()  # type: ignore[no-untyped-call]
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    masks, *cells = table()[name]
    with torch.set_grad_enabled(name not in LEARNED):
        expected, spy = run().detach(), Spy()
        with nd.attend(spy) as seen, nd.capture(model, tmp_path) as captured:
            assert torch.allclose(run(), expected, rtol=0, atol=1e-10)
        seen.require()
        assert described(spy.masks) == masks
        with nd.shadow({"exact": nd.ExactBackward()}, nd.ExactBackward(), model=model) as log:
            out = run()
            assert torch.allclose(out, expected, rtol=0, atol=1e-10)
            if out.requires_grad:
                out.square().mean().backward()  # type: ignore[no-untyped-call]
    assert {row["output"] for row in log.rows} == ({"out"} if name in LEARNED else {"out", "dq", "dk", "dv"})
    assert len({row["call"] for row in log.rows}) == seen.calls
    assert max(row["max_difference"] for row in log.rows) < 1e-12
    assert all(row["layer"] for row in log.rows)
    assert_measured_again(captured.paths[0], spy)
    slopes = differentiated()
    with nd.attend(nd.ExactBackward()):
        own = differentiated()
    assert own.keys() == slopes.keys()
    assert all(torch.allclose(own[name], slope, rtol=0, atol=1e-10) for name, slope in slopes.items())
    assert cells == ["yes"] * 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gemma_2_computes_what_it_does_with_its_own_attention() -> None:
    """transformers computes its softmax in FP32: P and what follows is off by some 2^-24, and without the cap by far more."""
    torch.manual_seed(0)
    built, inputs = of_gemma2()
    model: Any = built.double().eval()
    with nd.attend(nd.ExactBackward()) as seen:
        out = model(**inputs)[0]
    seen.require()
    model.set_attn_implementation("eager")
    assert torch.allclose(out, model(**inputs)[0], rtol=0, atol=1e-5)
    for layer in model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert not torch.allclose(out, model(**inputs)[0], rtol=0, atol=1e-3)


def assert_measured_again(path: Path, spy: Spy) -> None:
    """Exact attention of the file's q, k, v, mask and scale is the O that the model had, call by call."""
    import json

    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        notes = {name: json.loads(text) for name, text in file.metadata().items() if name != "step"}
        shapes = {name: [file.get_tensor(f"{name}.{letter}").shape for letter in "qk"] for name in notes}
    assert len(notes) == len(spy.outs)
    for name, note in notes.items():
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = shapes[name]
        shape = nd.Shape(batch, heads, kv_heads, queries, keys, dim)
        problem = nd.Problem(nd.Captured(str(path), name), shape)
        drawn = problem.inputs(0)
        out = nd.Exact()(drawn["q"], drawn["k"], drawn["v"], problem.mask, problem.scale).out
        assert torch.allclose(out, spy.outs[note["call"]], rtol=0, atol=1e-12), name
