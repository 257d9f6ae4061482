"""A causal language model: each token is predicted from those before it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.nn import functional

from numdev.training.models.attention import Attention, RootMeanSquare


class LanguageModel(nn.Module):
    """Pre-norm blocks of causal self-attention and an MLP, with learned positions (Radford et al. 2019).

    Args:
        vocabulary: number of different tokens.
        length: most tokens of a sequence.
        width: of a token.
        depth: number of blocks.
        heads: of attention.
        qk_norm: see `Attention`.
    """

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int, *, qk_norm: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(_Block(width, heads, qk_norm=qk_norm) for _ in range(depth))
        self.norm = RootMeanSquare(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, tokens: Int[Tensor, "batch tokens"]) -> Float32[Tensor, "batch tokens vocabulary"]:
        """Logits of the token behind each; before training all are 0."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).float()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RootMeanSquare(width), RootMeanSquare(width)
        self.attention = Attention(width, heads, qk_norm=qk_norm, causal=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def next_token_loss(model: nn.Module, tokens: Int[Tensor, "batch tokens"]) -> Float32[Tensor, ""]:
    """Mean of -log p(token | those before it) over all tokens but the first of each sequence, in nats; FP32."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
