"""A diffusion transformer: patches attend to each other and to the caption's tokens, under time and caption."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from numdev.training.models.attention import Attention


class DiffusionTransformer(nn.Module):
    """The picture that a noisy one becomes, at a time and under a caption.

    The blocks are adaLN-zero (Peebles and Xie 2022, arXiv 2212.09748, section 3.2): time and caption make shift, scale and gate
    of self-attention and of the MLP. Between the two, patches attend to the caption's tokens. All gates, the projection behind
    cross-attention and the output start at zero: each block starts as the identity, and the picture as 0. Captions are padded
    with a learned token that is attended to like any other, so no call of attention has a mask.

    There is no host synchronisation and no shape that depends on data, so a CUDA graph can capture a step. Under autocast and
    with weights of a narrower dtype the picture is returned in FP32.

    Args:
        picture: height and width, in pixels.
        patch: height and width of the squares that become tokens.
        width: of the tokens.
        depth: number of blocks.
        heads: of attention; width / heads is head_dim.
        vocabulary: number of different tokens of captions.
        length: tokens of a caption.
        qk_norm: see `Attention`.
    """

    def __init__(
        self, picture: int, patch: int, width: int, depth: int, heads: int, vocabulary: int, length: int, *, qk_norm: bool = True
    ) -> None:
        super().__init__()
        self.patch, self.across = patch, picture // patch
        pixels = 3 * patch * patch
        self.into = nn.Linear(pixels, width)
        self.places = nn.Parameter(_waves_of_places(self.across, width))
        self.words = nn.Embedding(vocabulary, _WORD)
        self.order = nn.Parameter(torch.randn(length, _WORD) * 0.5)
        self.caption = nn.Linear(length * _WORD, width)
        self.time = nn.Sequential(nn.Linear(_WAVES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads, qk_norm=qk_norm) for _ in range(depth))
        self.modulation = _zero(nn.Linear(width, 2 * width))
        self.out = _zero(nn.Linear(width, pixels))

    def forward(
        self,
        noisy: Float[Tensor, "batch 3 height width"],
        time: Float[Tensor, " batch"],
        tokens: Int[Tensor, "batch length"],
    ) -> Float[Tensor, "batch 3 height width"]:
        dtype = self.into.weight.dtype
        x = self.into(self._patches(noisy).to(dtype)) + self.places
        words = self.words(tokens) + self.order
        state = functional.silu(self.time(waves(time).to(dtype)) + self.caption(words.flatten(1)))
        for block in self.blocks:
            x = block(x, words, state)
        shift, scale = self.modulation(state)[:, None].chunk(2, dim=-1)
        return self._picture(self.out(_normal(x) * (1 + scale) + shift).float())

    def _patches(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> [batch, tokens, 3 patch^2]."""
        n, p = self.across, self.patch
        return x.reshape(-1, 3, n, p, n, p).permute(0, 2, 4, 1, 3, 5).reshape(-1, n * n, 3 * p * p)

    def _picture(self, x: Tensor) -> Tensor:
        """The inverse of `_patches`."""
        n, p = self.across, self.patch
        return x.reshape(-1, n, n, 3, p, p).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, n * p, n * p)


class Block(nn.Module):
    """Self-attention, cross-attention to the caption, and an MLP, each added to what comes in; starts as the identity."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.modulation = _zero(nn.Linear(width, 6 * width))
        self.attention = Attention(width, heads, qk_norm=qk_norm)
        self.cross = Attention(width, heads, context=_WORD, qk_norm=qk_norm)
        _zero(self.cross.out)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(
        self,
        x: Float[Tensor, "batch tokens width"],
        words: Float[Tensor, "batch length word"],
        state: Float[Tensor, "batch width"],
    ) -> Float[Tensor, "batch tokens width"]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(state)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(_normal(x) * (1 + scale) + shift)
        x = x + self.cross(_normal(x), words)
        return x + mlp_gate * self.mlp(_normal(x) * (1 + mlp_scale) + mlp_shift)


_WORD = 64  # width of a word's embedding
_WAVES = 128  # width of the embedding of time


def waves(time: Float[Tensor, " batch"]) -> Float[Tensor, "batch waves"]:
    """cos and sin of 1000 t at frequencies from 1 to 1 / 10,000, as the positions of Vaswani et al. 2017, section 3.5; FP32."""
    half = _WAVES // 2
    steps = torch.arange(half, device=time.device, dtype=torch.float32)
    angles = 1000 * time.float()[:, None] * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _waves_of_places(across: int, width: int) -> Float[Tensor, "tokens width"]:
    """Initial embedding of patches: a half of the width waves over rows, the other half over columns.

    Their frequencies rise evenly to a half wave per patch, so that neighbours differ and any smooth kernel of the distance is an
    inner product of embeddings.
    """
    quarter = width // 4
    frequencies = torch.exp(-math.log(100) / quarter * torch.arange(quarter))
    angles = torch.arange(across)[:, None] * frequencies
    along = torch.cat([angles.sin(), angles.cos()], dim=-1)
    rows, columns = along[:, None].expand(-1, across, -1), along[None].expand(across, -1, -1)
    return torch.cat([rows, columns], dim=-1).reshape(across * across, -1).clone()


def _normal(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
