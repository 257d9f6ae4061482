"""Figures of attention in each step of a training run: logits, ties, and how far it deviates from exact attention; and attention
with random errors of that size: a control that has the size of a structured error, and nothing else of it.

Exact means FP64 of the same q, k, v and dO. FP32 is not enough: its scores err by up to `d 2^-24 max |q| |k|`, some 0.04 at
head_dim 64 and logits of 10^4, such as come before a loss spikes, more than the `u = 2^-9` of BF16 inside; and the bias of
delta is a mean over all rows, in which errors of BF16 cancel to 10^-5 of |delta|. FP64 has 29 bits more, `2 ((d + 4) A + N +
2) 2^-53 max |v|` for O (the bound of `numdev.attention.exact`), below 10^-9 there. Sums are in any order, and S and P are
held whole: four products for each call, and 8 bytes for each entry of P until its gradient has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from numdev.attention.base import Backward, Gradients, group_heads, softmax_scale
from numdev.attention.differentiable import rounded_once, uncast
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.steps import Steps
from numdev.attention.vendor.vanilla import VanillaBackward

FIGURES = {
    "largest_logit": ("", "largest |scale q k| of a step, in the format of S"),
    "tie_rate": ("", "share of rows whose largest score occurs more than once, in the format of S"),
    "deviation": ("absolute", "largest |O - exact O| of a step"),
    "relative_deviation": ("relative", "norm of O - exact O over that of exact O, over all calls of a step"),
    "delta_bias": ("", "sum of delta - exact delta over that of |exact delta|, over all calls; NaN where no delta is returned"),
    "dq_error": ("relative", "norm of dQ - exact dQ over that of exact dQ, over all calls of a step"),
}
"""Unit and meaning of each figure of a step, in the order of `Watch.row`."""

Inputs = tuple[Tensor, ...]
_SUMS = ("logit", "tied", "rows", "deviation", "error", "out", "biased", "delta", "dq_error", "dq")


class Watch:
    """The figures of one step, on the device: nothing waits for it, and a CUDA graph can hold it.

    A step begins, and the calls of attention add what they find in forward and backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._of = dict(zip(_SUMS, self._sums.unbind(), strict=True))

    def begin(self) -> None:
        """Forget the step before."""
        self._sums.zero_()

    @property
    def row(self) -> Float[Tensor, " figures"]:
        """The figures of the step so far, in the order of `FIGURES`; NaN for one of which there was nothing."""
        of = self._of
        relative, bias, dq = of["error"] / of["out"], of["biased"] / of["delta"], of["dq_error"] / of["dq"]
        return torch.stack((of["logit"], of["tied"] / of["rows"], of["deviation"], relative.sqrt(), bias, dq.sqrt()))

    def forward(self, exact: ExactCall, s: Tensor, out: Tensor) -> None:
        """Note the scores of a call, in the format of S, and how far its O deviates."""
        error, tied = exact.grouped(out).sub(exact.out), exact.tied(s)
        self._add(torch.maximum, logit=exact.without(s, 0.0).abs().amax(), deviation=error.abs().amax())
        self._add(tied=tied.sum(), rows=tied.numel(), error=error.square().sum(), out=exact.out.square().sum())

    def delta(self, exact: ExactCall, gradients: Gradients) -> None:
        """Note the error of the delta of a call."""
        if gradients.delta is not None:
            error = exact.grouped(gradients.delta[..., None]).sub(exact.delta)
            self._add(biased=error.sum(), delta=exact.delta.abs().sum())

    def dq(self, exact: ExactCall, dq: Tensor) -> None:
        """Note how far the dQ of a call deviates."""
        self._add(dq_error=exact.grouped(dq).sub(exact.dq).square().sum(), dq=exact.dq.square().sum())

    def _add(self, joined: Callable[[Tensor, Any], Tensor] = torch.add, **figures: Tensor | int) -> None:
        for name, x in figures.items():
            self._of[name].copy_(joined(self._of[name], x))


@dataclass(frozen=True)
class Watched:
    """An implementation that is watched: its bits are returned, and `watch` learns of each call in which gradients are recorded.

    The gradients have the same bits too, unless q, k and v are one tensor, whose three gradients may be added in another order.
    """

    attention: Backward
    watch: Watch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.attention.attend(q, k, v, mask, scale)
        q = q.view_as(q)  # a node of its own, whose gradient is dQ of this call alone
        with torch.no_grad(), uncast(q):
            exact = ExactCall((q, k, v), mask, softmax_scale(q, scale))
        out = self.attention.attend(q, k, v, mask, scale, partial(self.watch.delta, exact))
        with torch.no_grad(), uncast(q):
            self.watch.forward(exact, exact.scores(q, k, self.attention.primal.precision), out)
        if out.requires_grad:
            out.register_hook(exact.take)
        if q.requires_grad:
            q.register_hook(partial(self.watch.dq, exact))
        return out


class ExactCall:
    """One call of attention in FP64: `P = softmax(scale Q K^T)`, `O = P V`; then `delta = rowsum(dO * O)` and
    `dQ = scale (P * (dO V^T - delta)) K`. Heads that share a KV head are grouped.
    """

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask, factor: float) -> None:
        self._factor, self._kv_heads = factor, inputs[1].shape[1]
        q, k, v = (x.detach().double() for x in inputs)
        self._k, self._v = (mask.without_padding(x)[:, :, None] for x in (k, v))
        rows, keys = q.shape[-2], k.shape[-2]
        seen = mask.seen(rows, keys, (0, rows), (0, keys), q.device, self._kv_heads)
        self._hidden = None if seen is None else ~seen
        s, self._cap = (self.grouped(q) @ self._k.mT).mul_(factor), mask.softcap
        self._slope = mask.cap_slope(s)
        mask.cap_(s)
        self._bias = mask.added((0, rows), (0, keys), s)
        if self._bias is not None:
            s.add_(self._bias)
        p = self.without(s, float("-inf")).softmax(-1)
        self.p = p if self._hidden is None else p.masked_fill_(self._hidden, 0.0)  # NaN in rows that see nothing
        self._times_z = partial(mask.times_z, rows=(0, rows))  # of dropout
        self.out = self._times_z(self.p) @ self._v
        self.dq = self.delta = torch.empty(0)

    def scores(self, q: Tensor, k: Tensor, policy: Precision) -> Tensor:
        """S as a policy rounds it."""
        steps = Steps.of(policy, q.shape[-2])
        steps.at(0, 0, 0)
        q, k = (group_heads(x.detach().to(policy.carrier), self._kv_heads) for x in (q, k))
        s = steps.scores(q, k.mT, self._factor, self._cap)
        return steps.raised(s, self._cap, None if self._bias is None else self._bias.to(policy.carrier))

    def take(self, do: Tensor) -> None:
        """The gradient of O, of which the others follow."""
        do = self.grouped(do)
        self.delta = (do * self.out).sum(-1, keepdim=True)
        ds = self._times_z(do @ self._v.mT).sub_(self.delta).mul_(self.p)
        ds = ds if self._slope is None else ds.mul_(self._slope)
        self.dq = (self.without(ds, 0.0) @ self._k).mul_(self._factor)
        self.p = self.out = torch.empty(0)  # what is held until backward is held no longer

    def tied(self, s: Tensor) -> Tensor:
        """Whether the largest score of a row occurs more than once."""
        s = self.without(s, float("-inf"))
        most = s.amax(-1, keepdim=True)
        return ((s == most) & (most > float("-inf"))).sum(-1) > 1

    def without(self, x: Tensor, value: float) -> Tensor:
        """Entries that no row sees replaced."""
        return x if self._hidden is None else x.masked_fill(self._hidden, value)

    def grouped(self, x: Tensor) -> Tensor:
        """A tensor of the call in FP64, as those of this class are."""
        return group_heads(x.detach().double(), self._kv_heads)


@dataclass(eq=False)
class Beside:
    """One call that implementations compute beside each other, each on leaves of its own.

    `result` makes what the model gets of the O of each; and then, with dO, of the gradients of each that records them. `leaf` is
    q, k or v as an implementation takes it.
    """

    attentions: Mapping[str, Any]
    result: Callable[[Beside, Mapping[str, Inputs], Tensor | None], Inputs]  # no method of this object, which holds tensors
    how: tuple[Mask, float | None]
    leaf: Callable[[str, Tensor], Tensor] = lambda _, x: x.detach().requires_grad_()
    leaves: dict[str, Inputs] = field(default_factory=dict)
    outs: dict[str, Tensor] = field(default_factory=dict)

    def out(self, *inputs: Tensor) -> Tensor:
        """O of q, k and v, whose gradients can be computed once."""
        out: Tensor = _Beside.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return out


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Beside, *inputs: Tensor) -> Tensor:
        ctx.call = call
        for name, attention in call.attentions.items():
            call.leaves[name] = tuple(call.leaf(name, x) for x in inputs)
            with torch.enable_grad():
                call.outs[name] = attention.attend(*call.leaves[name], *call.how)
        return call.result(call, {name: (out.detach(),) for name, out in call.outs.items()}, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call, grad = ctx.call, torch.autograd.grad
        recorded = {name: out for name, out in call.outs.items() if out.requires_grad}
        results = {name: grad(x, call.leaves[name], do.to(x.dtype), retain_graph=True) for name, x in recorded.items()}
        return None, *call.result(call, results, do)


_PRIME = 2**31 - 1


@dataclass(frozen=True)
class Noise:
    """Plain attention with random errors of the size of the difference between `attention` and it, element by element.

    Let O be of plain attention, and E the difference of the other's from it on the same q, k and v. The result is O + s dose E,
    with random signs s: of dose 1 each element errs as much as with the other attention, in a direction of its own. Below 1, the
    error of an element is s E with probability dose^2, else 0: E is often one last place, and there is no quarter of one. The
    expected square of all errors is dose^2 that of E either way. So are those of dQ, dK and dV, of the same dO. Of dose 0, bits
    are those of plain attention. Signs are a function of O, or of dO: runs that are equal so far draw the same.
    """

    attention: Backward
    dose: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        attentions = {"plain": VanillaBackward(self.attention.format), "other": self.attention}
        return Beside(attentions, self._mixed, (mask, scale)).out(q, k, v)

    def _mixed(self, _: Beside, results: Mapping[str, Inputs], do: Tensor | None) -> Inputs:
        """Results of plain attention with errors, in their dtype; the seed is a sum of the bits of O or dO times their places."""
        x, mixed = results["plain"][0] if do is None else do, list[Tensor]()
        bits = x.detach().float().contiguous().view(-1).view(torch.int32).long()
        places = torch.arange(1, bits.numel() + 1, device=x.device) * 48271 % _PRIME
        random = torch.Generator().manual_seed(int((bits % _PRIME * places % _PRIME).sum()))
        for plain, other in zip(results["plain"], results["other"], strict=True):
            draws = torch.rand(2, *plain.shape, dtype=torch.float64, generator=random).to(plain.device)
            factor = torch.where(draws[0] < 0.5, -1.0, 1.0) * max(self.dose, 1.0) * (draws[1] < self.dose**2)
            mixed.append(rounded_once(plain.double() + factor * (other.double() - plain.double()), plain.dtype))
        return tuple(mixed)
