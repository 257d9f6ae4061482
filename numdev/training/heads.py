"""What attention does in each head, layer and step while a model trains, and how far it deviates from exact attention there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from numdev.arithmetic.formats import format_of
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Backward, softmax_scale
from numdev.attention.differentiable import uncast
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
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

_AT_ONCE = 1 << 25  # scores, 256 MB in FP64
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
        self._looks: list[_Look] = []
        self._figures: list[tuple[list[_Look], Tensor]] = []
        self.of_step: dict[int, dict[str, float]] = {}
        self.call: Call | None = None

    @property
    def looks_now(self) -> bool:
        """Whether figures of this step are kept."""
        return self._every > 0 and self._step % self._every == 0

    @property
    def is_idle(self) -> bool:
        """Whether the calls of this step go on by themselves."""
        return self._attention is None and self._exact is None and not self.looks_now

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `Interception`, which costs some microseconds for each operation of a model."""
        with nullcontext() if self.is_idle else super().active():
            yield

    def answer(self, arguments: Arguments, onward: Callable[[], Tensor]) -> Tensor:
        """See `Interception`."""
        number, layer = self._call()
        replaces = self._exact is not None and self._exact[:2] == (layer, number)
        if self._attention is None and not self.looks_now and not replaces:
            return onward()
        call = Call.of(arguments, self._reader)
        if self._attention is None:  # its dQ is that of the model's q, which nothing else is made of
            q, out = arguments.query, onward().reshape(*call.q.shape[:3], call.v.shape[-1])
        else:
            q = call.q.view_as(call.q)  # a node of its own, whose gradient is dQ of this call alone
            out = self._attention.attend(q, call.k, call.v, call.mask, call.scale)
        if self.looks_now:
            self._look(call, q, out, {"step": self._step, "layer": layer, "call": number})
        if replaces and self._exact is not None:
            exact = ExactBackward().attend(call.q, call.k, call.v, call.mask, call.scale)
            chosen = torch.arange(exact.shape[1], device=exact.device) == self._exact[2]
            out = torch.where(chosen[:, None, None], exact, out)
        return call.shaped(out)

    def _look(self, call: Call, q: Tensor, out: Tensor, place: dict[str, Any]) -> None:
        """Keep what the figures of some heads of a call are made of."""
        self.call = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        kv_heads, shape = call.k.shape[1], call.q.shape[:3]
        group, count = shape[1] // kv_heads, min(self._heads or kv_heads, kv_heads)
        first = min(self._step // self._every * count % kv_heads, kv_heads - count)
        heads = slice(first * group, (first + count) * group)

        def of_q(x: Tensor) -> Tensor:  # is held by the graph, so it holds no tensor of the graph
            return x.detach().reshape(*shape, x.shape[-1])[:, heads].clone()

        tensors = {"q": of_q(call.q), "out": of_q(out)}
        tensors |= {name: x.detach()[:, first : first + count].clone() for name, x in (("k", call.k), ("v", call.v))}
        mask = call.mask.of_heads(heads.start, heads.stop)
        self._looks.append(_Look(place, heads.start, mask, softmax_scale(call.q, call.scale), tensors))
        if out.requires_grad and q.requires_grad:
            out.register_hook(lambda do: tensors.__setitem__("do", of_q(do)))
            q.register_hook(lambda dq: tensors.__setitem__("dq", of_q(dq)))

    def _write(self) -> None:
        """Have the heads that were looked at computed exactly, and their errors reduced, on the device."""
        looks, self._looks, alike = self._looks, [], defaultdict[Hashable, list[_Look]](list)
        for look in looks:
            alike[look.kind].append(look)
        for same in alike.values():
            at_once = max(_AT_ONCE // same[0].scores, 1)
            for first in range(0, len(same), at_once):
                some = same[first : first + at_once]
                self._figures.append((some, self._compared(some)))

    @torch.no_grad()
    def _compared(self, looks: list[_Look]) -> Tensor:
        """`[figures, heads]` of calls of one kind, one after the other: the heads of one call."""
        tensors = {name: torch.cat([look.tensors[name] for look in looks], 1) for name in looks[0].tensors}
        q, k, v, out = (tensors[name] for name in ("q", "k", "v", "out"))
        policy = self._policy or Precision.kernel(format_of(q.dtype))
        with uncast(q):
            exact = ExactCall((q, k, v), looks[0].mask, looks[0].scale)
            is_rounded = policy.inputs == Cast(format_of(q.dtype))
            s = exact.scores(*((q, k) if is_rounded else policy.round_inputs(q, k, v)[:2]), policy)
            logits, count = exact.without(s, 0.0).double(), _of_heads(exact.without(torch.ones_like(s), 0.0), torch.sum)
            mean, square = (_of_heads(x, torch.sum) / count for x in (logits, logits.square()))
            figures = {
                "largest_logit": _of_heads(logits.abs(), torch.amax),
                "logit_std": (square - mean.square()).clamp(0).sqrt(),
                "saturated": _of_heads((exact.p.amax(-1, keepdim=True) > 1 - policy.format.u / 2).double()),
                "tied": _of_heads(exact.tied(s)[..., None].double()),
            }
            outputs = {"out": (exact.out, exact.grouped(out).sub(exact.out))}
            if "dq" in tensors:
                exact.take(tensors["do"])
                outputs["dq"] = exact.dq, exact.grouped(tensors["dq"]).sub(exact.dq)
        for name, pair in outputs.items():
            figures |= {f"{name}_{one}": _of_heads(x.square()).sqrt() for one, x in zip(("size", "rmse"), pair, strict=True)}
        errors = [error for _, error in outputs.values()]
        same = len({error.shape for error in errors}) == 1
        ranks = _ranks(torch.stack(errors)) if same else [_ranks(error[None])[0] for error in errors]
        figures |= {f"{name}_rank": rank for name, rank in zip(outputs, ranks, strict=True)}
        unknown = torch.full_like(figures["out_size"], math.nan)
        return torch.stack([figures.get(name, unknown) for name in FIGURES])

    def rows(self) -> list[dict[str, Any]]:
        """One for each step, call and head since the last time; waits for the device."""
        self._write()
        figures, self._figures, rows = self._figures, [], list[dict[str, Any]]()
        for looks, values in figures:
            for look, of_look in zip(looks, values.unflatten(1, (len(looks), -1)).unbind(1), strict=True):
                for head, column in enumerate(of_look.T.tolist(), look.first):
                    step = self.of_step.get(look.place["step"], {})
                    rows.append({**look.place, "head": head, **step, **dict(zip(FIGURES, column, strict=True))})
        return sorted(rows, key=lambda row: (row["step"], row["call"], row["head"]))

    @property
    def shape(self) -> Shape:
        """That of the last call that was looked at."""
        assert self.call is not None
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = self.call.q.shape, self.call.k.shape
        return Shape(batch, heads, kv_heads, queries, keys, dim)


@dataclass(frozen=True, eq=False)
class _Look:
    """Some heads of a call, from number `first` on: copies of its q, k, v and out, later of do and dq."""

    place: dict[str, Any]
    first: int
    mask: Mask
    scale: float
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> Hashable:
        """Equal for calls that can be computed as heads of one: only a bias of each head may differ from one to the other."""
        own = id(self) if self.mask.bias is not None and self.mask.bias.values.shape[1] > 1 else None
        return self.mask, self.scale, own, *((name, x.shape, x.dtype) for name, x in self.tensors.items())

    @property
    def scores(self) -> int:
        return math.prod(self.tensors["q"].shape[:3]) * self.tensors["k"].shape[2]


def _ranks(errors: Tensor) -> Tensor:
    """Stable ranks of `[outputs, batch, kv_heads, group, rows, dim]`, the mean over the batch: `[outputs, heads]`."""
    matrices = errors.flatten(0, 3)
    energy = matrices.square().sum((-2, -1))
    usable = energy.isfinite() & (energy > 0)  # anything else has no eigenvalues, or no direction
    top, _ = largest_singular(matrices.masked_fill(~usable[:, None, None], 0.0))
    return torch.where(usable, energy / top, math.nan).view(errors.shape[:4]).mean(1).flatten(1)


def _of_heads(x: Tensor, reduce: Callable[..., Tensor] = torch.mean) -> Tensor:
    """Of `[batch, kv_heads, group, rows, any]` one number for each head."""
    return reduce(x, (0, 3, 4)).flatten()
