"""PyTorch's scaled_dot_product_attention with the LSE, which it saves for its backward pass but does not return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.attention.base import Output
from numdev.attention.mask import Mask
from numdev.attention.vendor.sdpa import Sdpa
from numdev.errors import Unsupported

_NAMES = ("_saved_logsumexp", "_saved_log_sumexp")  # by the names of torch's derivatives.yaml


@dataclass(frozen=True)
class SavingSdpa(Sdpa):
    """`Sdpa` as it runs when gradients are required: O and LSE are those that PyTorch's own backward pass reads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Shapes as in `Output`.

        Raises:
            Unsupported: with PyTorch's own reason, if the backend cannot run the request; and if it saves no LSE.
        """
        with torch.enable_grad():
            q, k, v = (x.detach().to(self.dtype).requires_grad_() for x in (q, k, v))
            found = super().__call__(q, k, v, mask, scale)
        return Output(found.out.detach(), self._saved_lse(found.out), ran=found.ran)

    def _saved_lse(self, out: Tensor) -> Tensor:
        """LSE `[batch, heads, queries]`: cuDNN's has one more dimension, that of efficient attention more rows than queries."""
        node: Any = out.grad_fn
        while node is not None:
            for name in _NAMES:
                lse = getattr(node, name, None)
                if lse is not None:
                    return (lse.squeeze(-1) if lse.ndim == out.ndim else lse)[..., : out.shape[-2]].detach()
            node = node.next_functions[0][0] if node.next_functions else None
        raise Unsupported("attention.backend", f"{self.backend.value} saves no LSE for its backward pass")
