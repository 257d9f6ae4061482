"""The models that are trained: a diffusion transformer under rectified flow, and a causal language model.

Attention is `torch.nn.functional.scaled_dot_product_attention` alone, looked up at each call so that it can be exchanged. `route`
and `scan` can be exchanged as torch's own functions can: a `TorchFunctionMode` sees their calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

Tokens: TypeAlias = Float[Tensor, "batch tokens width"]


class RootMeanSquare(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a learned weight (Zhang and Sennrich 2019), in the dtype of x."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6).to(x.dtype)


class Attention(nn.Module):
    """Attention of tokens to themselves, or to something of the width `context`.

    `qk_norm` normalises q and k of each head by their root mean square (Henry et al. 2020, arXiv 2010.04245; Dehghani et al.
    2023, arXiv 2302.05442), which bounds the logits and with them the growth that makes losses spike.
    """

    def __init__(self, width: int, heads: int, *, context: int = 0, qk_norm: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = (RootMeanSquare(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tokens, context: Float[Tensor, "batch keys other"] | None = None) -> Tokens:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).transpose(1, 3).unbind(2)
        out = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(2))


def _mlp(width: int, times: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, times * width), nn.GELU(approximate="tanh"), nn.Linear(times * width, width))


def _wide(x: Tensor) -> Tensor:
    """In FP32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def route(x: Float[Tensor, "*batch width"], w: Float[Tensor, "experts width"], k: int) -> Float[Tensor, "*batch experts"]:
    """Softmax of `x w^T` over the k experts of a token that score highest, 0 for others (Shazeer et al. 2017, section 2.1)."""
    if has_torch_function((x, w)):
        routed: Tensor = handle_torch_function(route, (x, w), x, w, k)
        return routed
    top, places = _wide(x @ w.T).topk(k, -1)
    return x.new_zeros(*x.shape[:-1], len(w)).scatter(-1, places, top.softmax(-1).to(x.dtype))


def scan(
    q: Float[Tensor, "heads tokens key"],
    k: Float[Tensor, "heads tokens key"],
    v: Float[Tensor, "heads tokens value"],
    g: Float[Tensor, "heads tokens"],
    beta: Float[Tensor, "heads tokens"],
) -> Float[Tensor, "heads tokens value"]:
    """The gated delta rule token by token: `o_t = S_t^T q_t`, `S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`.

    a_t = exp(g_t) (Yang et al. 2024, arXiv 2412.06464, section 3.1).
    """
    if has_torch_function((q, k, v, g, beta)):
        o: Tensor = handle_torch_function(scan, (q, k, v, g, beta), q, k, v, g, beta)
        return o
    state, a, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), g.exp()[..., None, None], list[Tensor]()
    for t in range(q.shape[1]):
        state = a[:, t] * state
        row = k[:, t, :, None]
        state = state + row * (beta[:, t, None, None] * (v[:, t, None] - row.mT @ state))
        outputs.append(q[:, t, None] @ state)
    return torch.cat(outputs, 1)


class DeltaRule(nn.Module):
    """Linear attention by the gated delta rule, in place of attention; rows of q and k have length 1."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gates = nn.Linear(width, 2 * heads)
        nn.init.constant_(self.gates.bias[:heads], 3.0)  # a_t = 0.95: the state lasts

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = _wide(self.qkv(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        g, beta = _wide(self.gates(x)).unflatten(-1, (2, self.heads)).permute(2, 0, 3, 1).flatten(1, 2)
        o = scan(functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, functional.logsigmoid(g), beta.sigmoid())
        return self.out(o.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2).to(x.dtype))


class Experts(nn.Module):
    """A mixture of MLPs of half the usual hidden width, of which each token is routed to two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) / math.sqrt(width))
        self.experts = nn.ModuleList(_mlp(width, 2) for _ in range(experts))

    def forward(self, x: Tokens) -> Tokens:
        tokens, weights = x.flatten(0, -2), route(x, self.router, 2).flatten(0, -2)
        out = torch.zeros_like(tokens)
        for weight, expert in zip(weights.unbind(-1), self.experts, strict=True):
            own = weight.nonzero().flatten()
            out = out.index_add(0, own, (weight[own, None] * expert(tokens[own])).to(out.dtype))
        return out.view_as(x)


class LanguageModel(nn.Module):
    """Pre-norm blocks of causal self-attention and an MLP, with learned positions (Radford et al. 2019).

    `vocabulary` is the number of different tokens, `length` the most of a sequence, `depth` the number of blocks. With `experts`
    the first block has the gated delta rule in place of attention, and the second so many experts in place of its MLP.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, *, qk_norm: bool = True, experts: int = 0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(_CausalBlock(width, heads, qk_norm=qk_norm) for _ in range(depth))
        if experts:
            self.blocks[0].attention = DeltaRule(width, heads)
            self.blocks[1].mlp = Experts(width, experts)
        self.norm = RootMeanSquare(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.out.weight)

    def hidden(self, tokens: Int[Tensor, "batch tokens"]) -> Tokens:
        """The input of the head."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Int[Tensor, "batch tokens"]) -> Float32[Tensor, "batch tokens vocabulary"]:
        """Logits of the token behind each; before training all are 0."""
        return self.out(self.hidden(tokens)).float()


class _CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RootMeanSquare(width), RootMeanSquare(width)
        self.attention = Attention(width, heads, qk_norm=qk_norm, causal=True)
        self.mlp = _mlp(width)

    def forward(self, x: Tokens) -> Tokens:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


Pictures: TypeAlias = Float[Tensor, "batch 3 height width"]
Times: TypeAlias = Float[Tensor, " batch"]
_WORD = 64  # width of a word's embedding
_WAVES = 128  # width of the embedding of time


class DiffusionTransformer(nn.Module):
    """The picture that a noisy one becomes, at a time and under a caption.

    The blocks are adaLN-zero (Peebles and Xie 2022, arXiv 2212.09748, section 3.2): time and caption make shift, scale and gate
    of self-attention and of the MLP. Between the two, patches attend to the caption's tokens. All gates, the projection behind
    cross-attention and the output start at zero: each block starts as the identity, and the picture as 0. Captions are padded
    with a learned token that is attended to like any other, so no call of attention has a mask.

    There is no host synchronisation and no shape that depends on data, so a CUDA graph can capture a step. Under autocast and
    with weights of a narrower dtype the picture is returned in FP32.

    `picture` is a height in pixels, `patch` that of what becomes a token, and `length` the number of tokens of a caption.
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

    def forward(self, noisy: Pictures, time: Times, tokens: Int[Tensor, "batch length"]) -> Pictures:
        dtype, n, p = self.into.weight.dtype, self.across, self.patch
        x = self.into(functional.pixel_unshuffle(noisy, p).flatten(2).mT.contiguous().to(dtype)) + self.places
        words = self.words(tokens) + self.order
        state = functional.silu(self.time(waves(time).to(dtype)) + self.caption(words.flatten(1)))
        for block in self.blocks:
            x = block(x, words, state)
        shift, scale = self.modulation(state)[:, None].chunk(2, dim=-1)
        x = self.out(_normal(x) * (1 + scale) + shift).float().reshape(-1, n, n, 3, p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, n * p, n * p)


class Block(nn.Module):
    """Self-attention, cross-attention to the caption, and an MLP, each added to what comes in; starts as the identity."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.modulation = _zero(nn.Linear(width, 6 * width))
        self.attention = Attention(width, heads, qk_norm=qk_norm)
        self.cross = Attention(width, heads, context=_WORD, qk_norm=qk_norm)
        _zero(self.cross.out)
        self.mlp = _mlp(width)

    def forward(self, x: Tokens, words: Float[Tensor, "batch length word"], state: Float[Tensor, "batch width"]) -> Tokens:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(state)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(_normal(x) * (1 + scale) + shift)
        x = x + self.cross(_normal(x), words)
        return x + mlp_gate * self.mlp(_normal(x) * (1 + mlp_scale) + mlp_shift)


def waves(time: Times) -> Float[Tensor, "batch waves"]:
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


Prediction = Callable[[Tensor, Tensor], Tensor]
"""f(x, t): the pictures [batch, ...] that noisy ones [batch, ...] at times [batch] become."""


def flow_loss(
    picture_of: Prediction, noise: Float32[Tensor, "batch ..."], picture: Float32[Tensor, "batch ..."], time: Times
) -> Float32[Tensor, ""]:
    """Mean of (1 - t)^2 || (X_1 - X_0) - v(X_t, t) ||^2, which is that of || X_1 - f(X_t, t) ||^2; FP32.

    Rectified flow minimises E || (X_1 - X_0) - v(X_t, t) ||^2 with X_t = (1 - t) X_0 + t X_1 from noise X_0 to a picture X_1
    (Liu, Gong and Liu 2022, arXiv 2209.03003, equation 1; Lipman et al. 2022, arXiv 2210.02747, equation 23 with sigma_min = 0).
    Here the model predicts the picture, f = X_t + (1 - t) v, which lies in far fewer dimensions than the velocity (Li and He
    2025, arXiv 2511.13720), and the weight (1 - t)^2 keeps the last details, where noise is nearly gone, from outweighing the
    rest. The minimum is the same at every weight: the mean of X_1 over all that pass X_t at t. Mean over batch and pixels.
    """
    t = time.reshape(-1, *[1] * (noise.dim() - 1))
    predicted = picture_of(torch.lerp(noise, picture, t.expand_as(noise)), time)
    return (predicted.float() - picture).square().mean()


def flowed(picture_of: Prediction, noise: Float[Tensor, "batch ..."], steps: int) -> Float[Tensor, "batch ..."]:
    """The picture at t = 1 to which dx/dt = v(x, t) = (f(x, t) - x) / (1 - t) leads from noise, by Euler's method in equal steps.

    Exact, but for rounding, where the flow is straight: v is then the same along the way.
    """
    x = noise
    for step in range(steps):
        time = x.new_full((len(x),), step / steps)
        velocity = (picture_of(x, time) - x) / (1 - time).reshape(-1, *[1] * (x.dim() - 1))
        x = x + velocity / steps
    return x
