"""What attention does in each head, layer and step while a model trains, and how far it deviates from exact attention there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from numdev.arithmetic.formats import format_of
from numdev.attention.base import Backward, softmax_scale
from numdev.attention.differentiable import uncast
from numdev.attention.exact import ExactBackward
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.measurement.metrics import largest_singular
from numdev.training.attend import ForwardAlone, Variant, trainable
from numdev.training.call import Arguments, Call
from numdev.training.recorders import Recorder
from numdev.training.watch import ExactCall, policy_of

FIGURES = {
    "largest_logit": ("", "largest |scale q k|, in the format of S"),
    "logit_std": ("", "standard deviation of the scores that are seen"),
    "saturated": ("", "share of rows whose largest exact P rounds to 1 in the format of O"),
    "tied": ("", "share of rows whose largest score occurs more than once, in the format of S"),
    "out_size": ("absolute", "root mean square of exact O"),
    "out_rmse": ("absolute", "root mean square of O - exact O"),
    "out_rank": ("", "stable rank of O - exact O, the mean over the batch; NaN where one has no error"),
    "dq_size": ("absolute", "root mean square of exact dQ; NaN where no gradient came"),
    "dq_rmse": ("absolute", "root mean square of dQ - exact dQ"),
    "dq_rank": ("", "stable rank of dQ - exact dQ, the mean over the batch"),
}
"""Unit and meaning of what is kept of a head in a step; exact is FP64 of the same q, k, v and dO."""

Place = tuple[str, int, int]
"""Layer, number of the call in its step, head."""


class HeadLog(Recorder):
    """Answers calls by an attention, or lets them go on, and keeps the figures of some heads in some steps.

    It looks in `every` so many steps (0: never) at so many KV `heads` of a layer in turn (None: all). Attention of the head
    `exact` is exact. `of_step` holds what is known of a step itself, and `call` is the last one that was looked at.
    """

    def __init__(
        self, model: nn.Module, attention: Variant | None, every: int = 0, heads: int | None = None, exact: Place | None = None
    ) -> None:
        super().__init__(model, read_masks=True)
        self._attention = None if attention is None else trainable(attention)
        primal = attention.primal if isinstance(attention, (Backward, ForwardAlone)) else None
        self._policy = None if primal is None else policy_of(primal)
        self._every, self._heads, self._exact = every, heads, exact
        self._looks: list[tuple[dict[str, Any], int, dict[str, Tensor]]] = []
        self.of_step: dict[int, dict[str, float]] = {}
        self.call: Call | None = None

    def answer(self, arguments: Arguments, onward: Callable[[], Tensor]) -> Tensor:
        """See `Interception`."""
        (number, layer), looks = self._call(), self._every > 0 and self._step % self._every == 0
        replaces = self._exact is not None and self._exact[:2] == (layer, number)
        if self._attention is None and not looks and not replaces:
            return onward()
        call = Call.of(arguments, self._reader)
        if self._attention is None:  # its dQ is that of the model's q, which nothing else is made of
            q, out = arguments.query, onward().reshape(*call.q.shape[:3], call.v.shape[-1])
        else:
            q = call.q.view_as(call.q)  # a node of its own, whose gradient is dQ of this call alone
            out = self._attention.attend(q, call.k, call.v, call.mask, call.scale)
        if looks:
            self._look(call, q, out, {"step": self._step, "layer": layer, "call": number})
        if replaces and self._exact is not None:
            exact = ExactBackward().attend(call.q, call.k, call.v, call.mask, call.scale)
            chosen = torch.arange(exact.shape[1], device=exact.device) == self._exact[2]
            out = torch.where(chosen[:, None, None], exact, out)
        return call.shaped(out)

    def _look(self, call: Call, q: Tensor, out: Tensor, place: dict[str, Any]) -> None:
        """Have some heads of a call computed exactly, and their errors reduced, on the device."""
        self.call, kv_heads = call, call.k.shape[1]
        group, count = call.q.shape[1] // kv_heads, min(self._heads or kv_heads, kv_heads)
        first = min(self._step // self._every * count % kv_heads, kv_heads - count)

        def of_q(x: Tensor) -> Tensor:
            return x.reshape(*call.q.shape[:3], x.shape[-1])[:, first * group : (first + count) * group]

        k, v = (x[:, first : first + count] for x in (call.k, call.v))
        policy = self._policy or Precision.kernel(format_of(call.q.dtype))
        figures = _Figures(policy.format.u)
        self._looks.append((place, first * group, figures.values))
        with torch.no_grad(), uncast(q):
            mask = call.mask.of_heads(first * group, (first + count) * group)
            exact = ExactCall(figures, (of_q(call.q), k, v), mask, softmax_scale(call.q, call.scale))
            rounded = policy.round_inputs(of_q(call.q), k, v)
            exact.compare(rounded[0], rounded[1], of_q(out), policy)
        if out.requires_grad and q.requires_grad:
            out.register_hook(lambda do: exact.take(of_q(do)))
            q.register_hook(lambda dq: exact.compare_dq(of_q(dq)))

    def rows(self) -> list[dict[str, Any]]:
        """One for each step, call and head since the last time; waits for the device."""
        looks, self._looks, rows = self._looks, [], list[dict[str, Any]]()
        for place, first, values in looks:
            known = {name: values[name].tolist() for name in FIGURES if name in values}
            for head in range(len(known["out_size"])):
                of_head = {name: known[name][head] if name in known else math.nan for name in FIGURES}
                rows.append({**place, "head": first + head, **self.of_step.get(place["step"], {}), **of_head})
        return rows

    @property
    def shape(self) -> Shape:
        """That of the last call that was looked at."""
        assert self.call is not None
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = self.call.q.shape, self.call.k.shape
        return Shape(batch, heads, kv_heads, queries, keys, dim)


class _Figures:
    """The `FIGURES` of the heads of one call, on the device."""

    def __init__(self, u: float) -> None:
        self._u, self.values = u, dict[str, Tensor]()

    def forward(self, exact: ExactCall, s: Tensor, error: Tensor) -> None:
        logits, one = exact.without(s, 0.0).double(), exact.p.amax(-1, keepdim=True) > 1 - self._u / 2
        count = _of_heads(exact.without(torch.ones_like(s), 0.0), torch.sum)
        mean, square = (_of_heads(x, torch.sum) / count for x in (logits, logits.square()))
        self.values |= {
            "largest_logit": _of_heads(logits.abs(), torch.amax),
            "logit_std": (square - mean.square()).clamp(0).sqrt(),
        }
        self.values |= {"saturated": _of_heads(one.double()), "tied": _of_heads(exact.tied(s)[..., None].double())}
        self.values |= _compared("out", exact.out, error)

    def delta(self, exact: ExactCall, error: Tensor) -> None:
        """Is not asked for."""

    def dq(self, exact: ExactCall, error: Tensor) -> None:
        self.values |= _compared("dq", exact.dq, error)


def _compared(output: str, exact: Tensor, error: Tensor) -> dict[str, Tensor]:
    """Size, error and rank of an output."""
    matrices = error.flatten(0, 2)
    energy = matrices.square().sum((-2, -1))
    usable = energy.isfinite() & (energy > 0)  # anything else has no eigenvalues, or no direction
    top, _ = largest_singular(matrices.masked_fill(~usable[:, None, None], 0.0))
    rank = torch.where(usable, energy / top, math.nan).view(error.shape[:3]).mean(0).flatten()
    return {
        f"{output}_size": _of_heads(exact.square()).sqrt(),
        f"{output}_rmse": _of_heads(error.square()).sqrt(),
        f"{output}_rank": rank,
    }


def _of_heads(x: Tensor, reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
    """Of `[batch, kv_heads, group, rows, any]` one number for each head."""
    return reduce(x, (0, 3, 4)).flatten()
