"""Linear attention with decay, `o_t = S_t^T q_t`: the gated delta rule, and Mamba-2's state-space duality (SSD).

    delta:  S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T         (Yang et al. 2024, arXiv 2412.06464, section 3.1)
    ssd:    S_t = a_t S_{t-1} + beta_t k_t v_t^T                                 (Dao & Gu 2024, arXiv 2405.21060)

with a_t = exp(g_t) in (0, 1]; Mamba-2 calls k, v, q and beta B, x, C and dt. S `[key, value]` is 0 at first. Decode steps token
by token; training walks chunks of C tokens: with G_i = g_1 + .. + g_i and D_ij = exp(G_i - G_j) within one,

    T = (I + tril(beta (K K^T * D), -1))^-1 beta,   U = T V,   W = T (exp(G) K),   N = U - W S       (of ssd: N = beta V)
    O = exp(G) Q S + tril(Q K^T * D) N,   S' = exp(G_C) S + (exp(G_C - G) K)^T N

which is the WY form of Yang et al. 2024 (arXiv 2406.06484), with decay as in arXiv 2412.06464.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.arithmetic.products import Dot, product
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Inputs, Operation, Output, Result, RoundsInputs
from numdev.operations.base import Compiled, Emulated, Entries, InDtype, Seeded, Steps, columns, jit, power_of_two
from numdev.settings import held, setting

if TYPE_CHECKING:
    import triton.language as tl


class Rule(Enum):
    """How a token changes the state."""

    DELTA = "delta"
    SSD = "ssd"


@dataclass(frozen=True)
class Problem(Seeded):
    """q, k `[heads, n, key]` with rows of length 1, v `[heads, n, value]` normal; g and beta `[heads, n]`.

    g = -decay e with e exponentially distributed, and beta is uniform in (0, 1).
    """

    heads: int = setting(2, "heads, each with a state of its own", "count")
    n: int = setting(1024, "tokens", "count")
    key: int = setting(64, "entries of a row of q and k", "count")
    value: int = setting(64, "entries of a row of v", "count")
    rule: Rule = setting(Rule.DELTA, "how a token changes the state: delta or ssd")
    decay: float = setting(0.01, "mean of -log a_t")

    @property
    def largest(self) -> int:
        return self.heads * self.n * max(self.key, self.value)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        q, k = (Entries.NORMAL.draw(generator, self.heads, self.n, self.key) for _ in range(2))
        v = Entries.NORMAL.draw(generator, self.heads, self.n, self.value)
        g, beta = (Entries.UNIFORM.draw(generator, self.heads, self.n) for _ in range(2))
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        return {"q": q, "k": k, "v": v, "g": self.decay * (1 - g).log(), "beta": beta}

    def arguments(self) -> dict[str, Any]:
        return {"rule": self.rule}

    def naive(self, fmt: Format) -> Eager:
        return Eager(fmt)


class Gates(RoundsInputs):
    """Rounds q, k and v; g and beta are in FP32, as kernels have them, or beside FP64 in that."""

    def round_inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        gates = Cast(FP64 if self.rounds.to == FP64 else FP32)
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        return *super().round_inputs(*inputs[:3]), *(gates(x.double()).to(dtype) for x in inputs[3:])


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step; a `kernel` stores inputs, T, U, W, N, the operands of products and o in its format."""

    STORED = ("inputs", "inverse", "transformed", "fresh", "operands", "output")

    inputs: Cast = setting(None, "q, k and v as the algorithm receives them", "format")
    decay: Cast = setting(None, "a_t; in chunks G, its running sum, and exp of its differences", "format")
    scores: Dot = setting(None, "the sums of K K^T and Q K^T; token by token, of S^T k", "format")
    inverse: Cast = setting(None, "T, by forward substitution in chunks, each row rounded once", "format")
    transformed: Dot = setting(None, "U = T V and W = T (exp(G) K)", "format")
    fresh: Cast = setting(None, "N = U - W S; token by token beta (v - S^T k)", "format")
    operands: Cast = setting(None, "what enters the products with S and N: the decayed Q, K and Q K^T, and S", "format")
    values: Dot = setting(None, "the sums of W S, Q S, (Q K^T) N and K^T N; token by token of S^T q", "format")
    state: Cast = setting(None, "S as it is carried from token to token, or chunk to chunk", "format")
    output: Cast = setting(None, "o as it is returned", "format")


@dataclass(frozen=True)
class Recurrent(Gates, Emulated):
    """Token by token, as decode steps; each step under a policy."""

    precision: Policy = held(follows="precision")

    @property
    def formats(self) -> dict[str, Format]:
        return {"o": self.precision.format, "state": self.precision.state.to}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, rule: Rule) -> Result:
        policy, do = self.precision, self.precision.do
        state, a, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), policy.decay(g.exp()), list[Tensor]()
        to, of_inputs, of_fresh = policy.state.to, policy.inputs.to, policy.fresh.to
        for t in range(q.shape[1]):
            state = do(Elementary.MULTIPLY, "state", state, a[:, t, None, None], to, policy.decay.to)
            fresh, row = v[:, t, None, :], k[:, t, None, :]  # [heads, 1, value] and [heads, 1, key]
            if rule is Rule.DELTA:
                fresh = do(Elementary.SUBTRACT, "fresh", fresh, policy.scores(row, policy.operands(state)))
            fresh = do(Elementary.MULTIPLY, "fresh", fresh, beta[:, t, None, None])
            change = do(Elementary.MULTIPLY, "state", row.mT, fresh, of_inputs, of_fresh)
            state = do(Elementary.ADD, "state", state, change, to, to)
            outputs.append(policy.values(q[:, t, None, :], policy.operands(state)))
        return Result({"o": policy.output(torch.cat(outputs, 1)), "state": state})


@dataclass(frozen=True)
class Chunked(Recurrent):
    """Chunks of tokens, as training walks them; each step under a policy."""

    chunk: int = setting(64, "tokens of a chunk", "count")

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise BadInput("variant.chunk", self.chunk, "give the number of tokens, at least 1")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, rule: Rule) -> Result:
        state, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), list[Tensor]()
        for part in zip(*(x.split(self.chunk, 1) for x in (q, k, v, g, beta)), strict=True):
            o, state = self._chunk(state, *part, delta=rule is Rule.DELTA)
            outputs.append(o)
        return Result({"o": torch.cat(outputs, 1), "state": state})

    def _chunk(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, delta: bool
    ) -> tuple[Tensor, Tensor]:
        """The outputs of a chunk and the state after it."""
        policy, do = self.precision, self.precision.do
        total, sums = torch.zeros_like(g[:, :1]), list[Tensor]()
        for one in g.split(1, 1):
            total = do(Elementary.ADD, "decay", total, one)
            sums.append(total)
        total = torch.cat(sums, 1)[..., None]  # G, [heads, C, 1]
        decay = policy.decay(do(Elementary.SUBTRACT, "decay", total, total.mT).tril().exp()).tril()  # D, [heads, C, C], 0 above
        grown, left = policy.decay(total.exp()), policy.decay(do(Elementary.SUBTRACT, "decay", total[:, -1:], total).exp())
        inputs = policy.operands(state)
        if delta:
            inverse = self._inverse(do(Elementary.MULTIPLY, "scores", policy.scores(k, k.mT), decay), beta)
            u = policy.transformed(inverse, v)
            w = policy.transformed(inverse, policy.operands(k * grown))
            fresh = do(Elementary.SUBTRACT, "fresh", u, policy.values(policy.operands(w), inputs))
        else:
            fresh = do(Elementary.MULTIPLY, "fresh", v, beta[..., None])
        weights = policy.operands(do(Elementary.MULTIPLY, "scores", policy.scores(q, k.mT), decay))
        o = do(Elementary.ADD, "values", policy.values(policy.operands(q * grown), inputs), policy.values(weights, fresh))
        carried = do(Elementary.MULTIPLY, "state", state, grown[:, -1:])
        return policy.output(o), do(Elementary.ADD, "state", carried, policy.values(policy.operands(k * left).mT, fresh))

    def _inverse(self, products: Tensor, beta: Tensor) -> Tensor:
        """`(I + tril(beta products, -1))^-1 beta` row by row: T_i = beta_i (e_i - sum_{j < i} products_ij T_j)."""
        inverse = torch.zeros_like(products)
        for i in range(products.shape[-1]):
            row = -product(products[:, i : i + 1, :i], inverse[:, :i]) if i else torch.zeros_like(products[:, :1])
            row[:, 0, i] += 1
            inverse[:, i : i + 1] = self.precision.inverse(row * beta[:, i : i + 1, None])
        return inverse


@dataclass(frozen=True)
class Eager(Gates, InDtype):
    """The recurrence token by token in tensor operations of torch; golden is that in FP64."""

    OUTPUTS = ("o", "state")

    upcast: bool = setting(False, "whether all but q, k, v and the outputs is in FP32, as decode kernels have it")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, rule: Rule) -> Result:
        q, k, v, a, beta = (x.to(torch.float32 if self.upcast else self.dtype) for x in (q, k, v, g.exp(), beta))
        state, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), list[Tensor]()
        for t in range(q.shape[1]):
            row, fresh = k[:, t, :, None], v[:, t, None, :]
            state = state * a[:, t, None, None]
            if rule is Rule.DELTA:
                fresh = fresh - row.mT @ state
            state = state + row * (beta[:, t, None, None] * fresh)
            outputs.append(q[:, t, None, :] @ state)
        return Result({"o": torch.cat(outputs, 1).to(self.dtype), "state": state.to(self.dtype)})


@dataclass(frozen=True)
class Fla(Gates, InDtype):
    """The kernels of the package fla-core in chunks or token by token (flash-linear-attention), on a GPU."""

    OUTPUTS = ("o", "state")
    WIDE = ("state",)
    FORMATS = (BF16, FP16)

    recurrent: bool = setting(False, "whether its kernel token by token runs, of the delta rule, and not the one in chunks")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, rule: Rule) -> Result:
        if importlib.util.find_spec("fla") is None:
            raise Unsupported("variant", "the package fla-core is not installed; pip install fla-core")
        if not q.is_cuda:
            raise Unsupported("variant", "the kernels of fla-core need a GPU; use device=cuda")
        if rule is Rule.SSD and self.recurrent:
            raise Unsupported("variant.recurrent", "it is that of the delta rule; use problem.rule=delta")
        heads = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v, g, beta)]  # [1, n, heads, ...]
        if rule is Rule.SSD:
            run, inputs = (
                importlib.import_module("fla.ops.simple_gla").chunk_simple_gla,
                (heads[2] * heads[4][..., None]).to(v.dtype),
            )
            o, state = run(*heads[:2], inputs, g=heads[3], scale=1.0, output_final_state=True)
        else:
            module = importlib.import_module("fla.ops.gated_delta_rule")
            run = module.fused_recurrent_gated_delta_rule if self.recurrent else module.chunk_gated_delta_rule
            o, state = run(*heads[:3], g=heads[3], beta=heads[4], scale=1.0, output_final_state=True)
        return Result({"o": o[0].transpose(0, 1), "state": state[0]}, kernel=f"fla {run.__name__}")


@jit
def _scan(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, g_ptr: tl.tensor, b_ptr: tl.tensor, o_ptr: tl.tensor,
    s_ptr: tl.tensor, n: tl.tensor, key: tl.tensor, value: tl.tensor,
    DELTA: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
) -> None:  # fmt: skip
    head, rows = tl.program_id(0), tl.arange(0, BK)
    at = tl.program_id(1) * BV + tl.arange(0, BV)
    state = tl.zeros([BK, BV], tl.float32)
    for t in range(0, n):
        place = head * n + t
        q = tl.load(q_ptr + place * key + rows, mask=rows < key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + place * key + rows, mask=rows < key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + place * value + at, mask=at < value, other=0.0).to(tl.float32)
        state *= tl.exp(tl.load(g_ptr + place))
        if DELTA:
            v -= tl.sum(state * k[:, None], 0)
        state += k[:, None] * (tl.load(b_ptr + place) * v)[None, :]
        tl.store(o_ptr + place * value + at, tl.sum(state * q[:, None], 0).to(o_ptr.dtype.element_ty), mask=at < value)
    inside = (rows < key)[:, None] & (at < value)[None, :]
    tl.store(s_ptr + (head * key + rows[:, None]) * value + at[None, :], state, mask=inside)


@dataclass(frozen=True)
class Triton(Gates, Compiled):
    """A Triton kernel token by token, its state in FP32 registers; a program for each head and block of value columns."""

    OUTPUTS = ("o", "state")
    WIDE = ("state",)

    bv: int = setting(16, "columns of v of a program, a power of two", "count")

    def __post_init__(self) -> None:
        super().__post_init__()
        power_of_two("bv", self.bv)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, rule: Rule) -> Result:
        (heads, n, key), value = q.shape, v.shape[-1]
        o, state = torch.empty_like(v), v.new_empty(heads, key, value, dtype=torch.float32)
        size, grid = max(16, 1 << (key - 1).bit_length()), (heads, -(-value // self.bv))
        _scan(q)[grid](q, k, v, g, beta, o, state, n, key, value, rule is Rule.DELTA, size, self.bv)
        return Result({"o": self.stored(o), "state": state}, kernel=f"triton scan bv={self.bv}")


SCAN = Operation(
    name="scan",
    golden=Eager(FP64),
    inputs=(Inputs(("q", "k", "v", "g", "beta")),),
    outputs=(Output("o", "S_t^T q_t of each token"), Output("state", "S after the last token")),
    rows=dict.fromkeys(("q", "k", "v", "g", "beta", "o", "state"), 0),
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, Chunked, Eager, Fla, Triton),
    smaller="fewer heads or tokens",
)
