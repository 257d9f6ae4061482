"""The log-probability of a token: logits `h w^T`, their log-softmax, and the target's; with the gradient of the cross-entropy.

    logprob_t = l_{t, y_t} - lse_t,   lse_t = log sum_v exp(l_tv)
    dl = softmax(l) - onehot(y),   dh = dl w,   dw = dl^T h            of the loss sum_t -logprob_t

A fused kernel walks the vocabulary in blocks with the online recurrence of attention (m, l, rescale) and never stores the logits
(Wijmans et al. 2024, "Cut Your Losses", arXiv 2411.09009); an unfused one rounds them to the format of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Inputs, Operation, Output, Result, RoundsInputs
from numdev.operations.base import Compiled, Emulated, Entries, InDtype, Seeded, Steps, columns, jit, power_of_two
from numdev.settings import held, setting

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Problem(Seeded):
    """h `[tokens, hidden]` and w `[vocabulary, hidden]`, normal, with logits of standard deviation `spread`; y `[tokens]`.

    Targets are drawn from the softmax of the logits, as a sampler draws tokens.
    """

    tokens: int = setting(64, "rows of h", "count")
    vocabulary: int = setting(4096, "rows of w", "count")
    hidden: int = setting(256, "entries of a row of h and of w", "count")
    spread: float = setting(3.0, "standard deviation of the logits")

    @property
    def largest(self) -> int:
        return max(self.tokens * self.vocabulary, self.vocabulary * self.hidden, self.tokens * self.hidden)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        h = Entries.NORMAL.draw(generator, self.tokens, self.hidden)
        w = Entries.NORMAL.draw(generator, self.vocabulary, self.hidden) * self.spread / math.sqrt(self.hidden)
        uniform = Entries.UNIFORM.draw(generator, self.tokens, self.vocabulary)
        return {"h": h, "w": w, "y": (h @ w.T - uniform.log().neg().log()).argmax(-1).double()}  # by Gumbel's maximum

    def naive(self, fmt: Format) -> Torch:
        return Torch(fmt)


class Targets(RoundsInputs):
    """Rounds h and w; targets are whole numbers, which no format rounds."""

    def round_inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        h, w, y = inputs
        return *super().round_inputs(h, w), y


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step; a `kernel` stores inputs, dl and gradients in its format, log-probabilities in FP32."""

    WIDE = ("exponential", "rescale", "sum")
    STORED = ("inputs", "difference", "gradient")
    factors = {"logits": ("inputs", "inputs"), "products": ("difference", "inputs")}  # noqa: RUF012

    inputs: Cast = setting(None, "h and w as the algorithm receives them", "format")
    logits: Dot = setting(None, "the running sum of h w^T; behind `@`, after how many products it is rounded", "format")
    stored: Cast = setting(None, "the logits as log-softmax reads them", "format")
    exponential: Cast = setting(None, "l - m, then exp", "format")
    rescale: Cast = setting(None, "the factor exp(m_old - m_new) of a new maximum", "format")
    sum: Dot = setting(None, "the running sum of the exponentials, times the factor", "format")
    lse: Cast = setting(None, "log of the sum, then + m", "format")
    difference: Cast = setting(None, "dl: exp(l - lse), then - 1 at the target", "format")
    products: Dot = setting(None, "the running sums of dh = dl w and dw = dl^T h", "format")
    gradient: Cast = setting(None, "dh and dw as they are returned", "format")
    output: Cast = setting(None, "l - lse, the log-probability", "format")


@dataclass(frozen=True)
class Blocked(Targets, Emulated):
    """The vocabulary in blocks of columns, by the online recurrence; each step under a policy. One block is the naive order."""

    precision: Policy = held(follows="precision")
    block: int = setting(1024, "columns of the vocabulary in one block", "count")

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("variant.block", self.block, "give the number of columns, at least 1")

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.precision.carrier

    @property
    def formats(self) -> dict[str, Format]:
        policy = self.precision
        return {"logprob": policy.output.to, "lse": policy.lse.to, "dh": policy.gradient.to, "dw": policy.gradient.to}

    def __call__(self, h: Tensor, w: Tensor, y: Tensor) -> Result:
        policy, y = self.precision, y.long()
        m, total = torch.full((len(h), 1), -math.inf, dtype=torch.float64, device=h.device), torch.zeros((), device=h.device)
        logits = policy.stored(policy.logits(h, w.T, unit=policy.units.get("logits"))).double()
        for block in logits.split(self.block, -1):
            largest = torch.maximum(m, block.amax(-1, keepdim=True))
            part = policy.sum.sum(policy.exponential(policy.do(Elementary.SUBTRACT, "exponential", block, largest).exp()))
            if bool(m.isfinite().all()):
                factor = policy.rescale(policy.do(Elementary.SUBTRACT, "rescale", m, largest).exp())
                part = policy.do(Elementary.ADD, "sum", policy.do(Elementary.MULTIPLY, "sum", total, factor), part)
            m, total = largest, part
        lse = policy.do(Elementary.ADD, "lse", policy.lse(total.log()), m)
        target = logits.gather(-1, y[:, None])
        p = policy.difference(policy.do(Elementary.SUBTRACT, "difference", logits, lse).exp())
        dl = policy.do(Elementary.SUBTRACT, "difference", p, torch.zeros_like(p).scatter_(-1, y[:, None], 1.0)).to(h.dtype)
        unit = policy.units.get("products")
        dh, dw = policy.products(dl, w, unit=unit), policy.products(dl.T, h, unit=unit)
        logprob = policy.do(Elementary.SUBTRACT, "output", target, lse)
        outputs = {"logprob": logprob[:, 0], "lse": lse[:, 0], "dh": policy.gradient(dh), "dw": policy.gradient(dw)}
        return Result(outputs)


@dataclass(frozen=True)
class Torch(Targets, InDtype):
    """Product, log-softmax and gather of torch, each in the format, and autograd's gradients; golden is that in FP64."""

    OUTPUTS = ("logprob", "lse", "dh", "dw")

    upcast: bool = setting(False, "whether the logits are cast to FP32 before log-softmax, as trainers do")
    fp32_head: bool = setting(False, "whether the product is in FP32 too, of inputs in the format")
    gradients: bool = setting(True, "whether dh and dw are computed, which a sampler does not need")

    @property
    def formats(self) -> dict[str, Format]:
        of_logits = FP32 if (self.upcast or self.fp32_head) and self.format != FP64 else self.format
        return {"logprob": of_logits, "lse": of_logits} | dict.fromkeys(("dh", "dw") if self.gradients else (), self.format)

    def __call__(self, h: Tensor, w: Tensor, y: Tensor) -> Result:
        (h, w), y = (x.detach().to(self.dtype).requires_grad_(self.gradients) for x in (h, w)), y.long()
        with torch.set_grad_enabled(self.gradients):
            wide = (h.float(), w.float()) if self.fp32_head else (h, w)
            logits = wide[0] @ wide[1].T
            logits = logits.float() if self.upcast else logits
            logprob = logits.log_softmax(-1).gather(-1, y[:, None])[:, 0]
            gradients = torch.autograd.grad(-logprob.sum(), (h, w)) if self.gradients else ()
        outputs = {"logprob": logprob.detach(), "lse": logits.detach().logsumexp(-1)}
        return Result(outputs | dict(zip(("dh", "dw"), gradients, strict=False)))


@dataclass(frozen=True)
class Fused(Targets, InDtype):
    """`torch.nn.functional.linear_cross_entropy`, of which torch 2.13 has a form in chunks; it returns no log-sum-exp."""

    OUTPUTS = ("logprob", "dh", "dw")

    def __call__(self, h: Tensor, w: Tensor, y: Tensor) -> Result:
        made: Callable[..., Tensor] | None = getattr(functional, "linear_cross_entropy", None)
        if made is None:
            raise Unsupported("variant", "torch has linear_cross_entropy from 2.13 on; choose logprob=torch")
        (h, w), y = (x.detach().to(self.dtype).requires_grad_() for x in (h, w)), y.long()
        with torch.enable_grad():
            loss = made(h, w, y, reduction="none")
            dh, dw = torch.autograd.grad(loss.sum(), (h, w))
        return Result({"logprob": -loss.detach(), "dh": dh, "dw": dw}, kernel="torch linear_cross_entropy")


@jit
def _logprob(
    h_ptr: tl.tensor, w_ptr: tl.tensor, y_ptr: tl.tensor, o_ptr: tl.tensor, lse_ptr: tl.tensor, tokens: tl.tensor,
    vocabulary: tl.tensor, hidden: tl.tensor,
    BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    y = tl.load(y_ptr + rows, mask=rows < tokens, other=0)
    m, total = tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32)
    target = tl.zeros([BR], tl.float32)
    for first in range(0, vocabulary, BC):
        columns = first + tl.arange(0, BC)
        logits = tl.zeros([BR, BC], tl.float32)
        for start in range(0, hidden, BK):
            at = start + tl.arange(0, BK)
            h = tl.load(
                h_ptr + rows[:, None] * hidden + at[None, :], mask=(rows < tokens)[:, None] & (at < hidden)[None, :], other=0.0
            )
            w = tl.load(
                w_ptr + columns[None, :] * hidden + at[:, None],
                mask=(columns < vocabulary)[None, :] & (at < hidden)[:, None],
                other=0.0,
            )
            logits = tl.dot(h, w, logits, input_precision="ieee")
        target += tl.sum(tl.where(columns[None, :] == y[:, None], logits, 0.0), 1)
        logits = tl.where((columns < vocabulary)[None, :], logits, float("-inf"))
        largest = tl.maximum(m, tl.max(logits, 1))
        total = total * tl.exp(m - largest) + tl.sum(tl.exp(logits - largest[:, None]), 1)
        m = largest
    lse = m + tl.log(total)
    tl.store(o_ptr + rows, target - lse, mask=rows < tokens)
    tl.store(lse_ptr + rows, lse, mask=rows < tokens)


@dataclass(frozen=True)
class Triton(Targets, Compiled):
    """A fused Triton kernel that stores no logits, FP32 inside; it returns log-probabilities in FP32, and no gradients."""

    OUTPUTS = ("logprob", "lse")
    WIDE = ("logprob", "lse")

    br: int = setting(16, "tokens of one program, a power of two", "count")
    bc: int = setting(64, "columns of the vocabulary in one block, a power of two", "count")
    bk: int = setting(64, "products that a program loads at once, a power of two", "count")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("br", "bc", "bk"):
            power_of_two(name, getattr(self, name))

    def __call__(self, h: Tensor, w: Tensor, y: Tensor) -> Result:
        logprob, lse = (h.new_empty(len(h), dtype=torch.float32) for _ in range(2))
        grid = (math.ceil(len(h) / self.br),)
        _logprob(h)[grid](h, w, y.int(), logprob, lse, len(h), *w.shape, self.br, self.bc, self.bk)
        return Result({"logprob": logprob, "lse": lse}, kernel=f"triton logprob {self.br}x{self.bc}x{self.bk}")


LOGPROB = Operation(
    name="logprob",
    golden=Torch(FP64),
    inputs=(Inputs(("h", "w", "y")),),
    outputs=(
        Output("logprob", "the log-probability of the target"),
        Output("lse", "log of the sum of the exponentials of the logits"),
        Output("dh", "the gradient of the sum of -logprob by h"),
        Output("dw", "the gradient of the sum of -logprob by w"),
    ),
    rows=dict.fromkeys(("h", "y", "logprob", "lse", "dh"), 0),
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, Blocked, Torch, Triton),
    smaller="fewer tokens, or a smaller vocabulary",
)
