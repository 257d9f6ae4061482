"""Multi-head attention through PyTorch's function, looked up in its module at each call so that it can be exchanged."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class RootMeanSquare(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned weight (Zhang and Sennrich 2019), in the dtype of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6).to(x.dtype)


class Attention(nn.Module):
    """Attention of tokens to themselves, or to `context`.

    Args:
        width: of the tokens; heads * head_dim.
        heads: number of heads.
        context: width of what is attended to; 0 where tokens attend to themselves.
        qk_norm: normalise q and k of each head by their root mean square (Henry et al. 2020, arXiv 2010.04245; Dehghani et al.
            2023, arXiv 2302.05442), which bounds the logits and with them the growth that makes losses spike.
        causal: a token sees itself and what stands before it.
    """

    def __init__(self, width: int, heads: int, *, context: int = 0, qk_norm: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.q_norm = RootMeanSquare(width // heads) if qk_norm else nn.Identity()
        self.k_norm = RootMeanSquare(width // heads) if qk_norm else nn.Identity()

    def forward(
        self, x: Float[Tensor, "batch tokens width"], context: Float[Tensor, "batch keys other"] | None = None
    ) -> Float[Tensor, "batch tokens width"]:
        seen = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(seen).unflatten(-1, (2, self.heads, -1)).transpose(1, 3).unbind(2)
        found = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))
