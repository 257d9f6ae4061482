"""Launching the portable backward kernels: a policy, a tiling and a way to recompute as compile-time numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.rounding import Cast
from numdev.attention.accepts import ALL, EXP_OR_EXP2, MASK, RECOMPUTE, Accepts, backward_policy, of
from numdev.attention.kernels import backward
from numdev.attention.kernels.arguments import Sight, Sizes, Tile, View
from numdev.attention.kernels.backward_arguments import Code, Every, Factors, Fused, Policy, Products, Saved
from numdev.attention.kernels.backward_launch import Launches
from numdev.attention.kernels.casts import CAST, INSTEAD, spec
from numdev.attention.kernels.launch import Launch
from numdev.attention.kernels.portable import operand
from numdev.attention.kernels.runtime import interpreting
from numdev.attention.kernels.tables import Tables
from numdev.attention.mask import Mask
from numdev.attention.operations import BACKWARD_OPERATIONS, is_harmless
from numdev.attention.precision import BackwardPrecision
from numdev.attention.softmax import DeltaForm, Recompute
from numdev.attention.tiling import Order
from numdev.errors import Unsupported

_MOST, _MOST_DIM = 256, 256  # a side of a tile, and a head_dim, beyond which nothing fits into registers
_PREPARED_ROWS = 64  # of a program that prepares


@dataclass(frozen=True)
class Request:
    """What is compiled.

    Attributes:
        precision: the policy; the caller rounds inputs, O and the gradients.
        recompute: the form of delta, and the exponential.
        launches: the tiles of both kernels: `br` of the first is the number of queries in a tile of dK and dV, `bc` of the
            second the number of keys in a tile of dQ.
        order: of both loops, forward or reverse.
        tf32: whether FP32 operands are multiplied as TF32.
        exactly: rounds every operation by itself; else the compiler may fuse a product with the sum that follows.
    """

    precision: BackwardPrecision
    recompute: Recompute
    launches: Launches
    order: Order = Order.FORWARD
    tf32: bool = False
    exactly: bool = False

    def __post_init__(self) -> None:
        _ACCEPTS.check(self, *INSTEAD)

    def code(self, of_rows: bool, mask: Mask, shape: tuple[int, int, int], factors: Factors) -> Code:
        """The constants of one kernel; `shape` is queries, keys and head_dim, and the kernel `of_rows` meets tiles of keys."""
        MASK.check(mask, *INSTEAD)
        queries, keys, dim = shape
        launch = self.launches.rows if of_rows else self.launches.keys
        br, bc, pad = (max(16, triton.next_power_of_2(n)) for n in (launch.br, launch.bc, dim))
        ragged = bc != launch.bc if of_rows else br != launch.br
        ends = keys % bc != 0 or mask.causal or mask.key_lengths is not None if of_rows else queries % br != 0
        window = mask.window is not None
        early, late = not ragged and (window or (mask.causal and not of_rows)), ragged or window or ends
        return Code(
            tile=Tile(br, bc, pad, dim, self.order is Order.REVERSE, ragged),
            sight=Sight(mask.causal, window, mask.key_lengths is not None),
            policy=_policy(self.precision, tuple(factors)),
            every=self.every,
            products=self.products,
            fused=self.fused,
            masked=early or late,
            parts=2 if (early if self.order is Order.REVERSE else late) else 1,
            binary=self.recompute.exponential.is_binary,
            of_probabilities=self.recompute.delta is DeltaForm.PROBABILITIES,
        )

    @property
    def every(self) -> Every:
        """Products between roundings of the running sums; 0 for one rounding in each tile."""
        return Every(*(getattr(self.precision, name).every or 0 for name in Every._fields))

    @property
    def products(self) -> Products:
        """How the operands of the five products are multiplied."""
        if interpreting():
            return Products("ieee", "ieee", "ieee")
        if self.tf32:
            return Products("tf32", "tf32", "tf32")
        step = self.precision
        inputs = step.inputs.to
        return Products(operand(inputs), operand(inputs, step.ds.to), operand(inputs, step.probabilities.to))

    @property
    def fused(self) -> Fused:
        """Where nothing is rounded between the product of a tile and the running sum."""
        step, plain = self.precision, Cast(FP32)
        return Fused(*(getattr(step, name) == Dot(plain) and getattr(step, f"{name}_sum") == plain for name in Fused._fields))


_LAUNCH = Accepts(Launch, "tiling", **of("br bc", range(1, _MOST + 1)), **of("warps stages", ALL))
_ACCEPTS = Accepts(
    Request,
    "tiling",
    precision=backward_policy(CAST),
    recompute=RECOMPUTE.but(exponential=EXP_OR_EXP2),
    launches=Accepts(Launches, **of("keys rows", _LAUNCH)),
    order=(Order.FORWARD, Order.REVERSE),
    **of("tf32 exactly", ALL),
)


class Given(NamedTuple):
    """Tensors of the backward pass: `out` and `lse` are those of the forward pass, the LSE contiguous in FP32."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor


class Found(NamedTuple):
    """Gradients before their cast to the output's format, and `delta [batch, heads, queries]` in FP32."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def storage(precision: BackwardPrecision) -> torch.dtype:
    """The narrowest dtype of the inputs in memory."""
    name = "ieee" if interpreting() else operand(precision.inputs.to)
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)


@lru_cache(maxsize=256)
def _policy(precision: BackwardPrecision, constants: tuple[float, ...]) -> Policy:
    found = []
    for name in Policy._fields:
        step = getattr(precision, name)
        cast = step.accumulate if isinstance(step, Dot) else step
        once = not is_harmless(precision, torch.float32, name, constants, BACKWARD_OPERATIONS)
        found.append(spec(cast, f"precision.{name}", once))
    return Policy(*found)


_LENGTHS = Tables(64)


@dataclass(frozen=True)
class Prepared:
    """The tensors that one call reads and writes. `prepare`, `dq` and `dk_dv` launch its kernels, in this order."""

    request: Request
    given: Given
    found: Found
    base: Tensor
    lengths: Tensor
    mask: Mask
    scale: float

    @property
    def saved(self) -> Saved:
        """What the preparation leaves for each row."""
        return Saved(self.base, self.found.delta)

    @property
    def factors(self) -> Factors:
        """The numbers of the arithmetic."""
        log = math.log2(math.e) if self.request.recompute.exponential.is_binary else 1.0
        return Factors(float(self.scale * log), log, self.scale)

    @property
    def views(self) -> tuple[View, ...]:
        """q, k, v, do and O in memory."""
        return tuple(View(each, *each.stride()) for each in self.given[:5])

    def sizes(self, launch: Launch) -> Sizes:
        """Of the problem, and of the tiles of one kernel."""
        (_, heads, queries, _), (kv_heads, keys) = self.given.q.shape, self.given.k.shape[1:3]
        return Sizes(heads, heads // kv_heads, queries, keys, self.mask.window or 0, launch.br, launch.bc)

    def code(self, of_rows: bool) -> Code:
        """Of one kernel."""
        queries, dim = self.given.q.shape[2:]
        return self.request.code(of_rows, self.mask, (queries, self.given.k.shape[2], dim), self.factors)

    @contextmanager
    def fitting(self, launch: Launch) -> Iterator[None]:
        """A context in which kernels are launched on the device of the inputs; raises Unsupported if a kernel does not fit."""
        q = self.given.q
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            try:
                yield
            except OutOfResources as error:
                tile = f"a tile of {launch.br} x {launch.bc} at head_dim {q.shape[-1]} in {launch.stages} stages"
                why = f"{tile} needs {error.required} bytes of {error.name}, and the GPU has {error.limit}"
                raise Unsupported("tiling", f"{why}; give a smaller tiling.br or tiling.bc") from None


def prepared(request: Request, given: Given, mask: Mask, scale: float, dtype: torch.dtype = torch.float32) -> Prepared:
    """A call with memory for its gradients, in `dtype`.

    Raises:
        Unsupported: for a head_dim that the kernels do not have.
    """
    q, k, v = given.q, given.k, given.v
    dim = q.shape[-1]
    if dim > _MOST_DIM:
        raise Unsupported("problem.head_dim", f"{dim} does not fit into registers; give at most {_MOST_DIM}")
    if v.shape[-1] != dim:
        raise Unsupported("problem.head_dim", f"the kernels have one for q, k and v, and v has {v.shape[-1]}, q {dim}")
    delta, base = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    of_q, of_k, of_v = (torch.empty(each.shape, dtype=dtype, device=q.device) for each in (q, k, v))
    numbers = mask.key_lengths or (0,)
    lengths = _LENGTHS.get(numbers, q.device, lambda: torch.tensor(numbers, dtype=torch.int32))
    return Prepared(request, given, Found(of_q, of_k, of_v, delta), base, lengths, mask, scale)


def prepare(call: Prepared) -> None:
    """The LSE in the units of the exponent, and delta: in a second launch where it is of dP and P."""
    batch, heads, queries, _ = call.given.q.shape
    code, launch = call.code(True), call.request.launches.rows
    *_, do, out = call.views
    tile = code.tile._replace(br=_PREPARED_ROWS)
    with call.fitting(launch):
        backward.prepare[triton.cdiv(queries, _PREPARED_ROWS), batch * heads](
            out, do, call.given.lse, call.saved, call.factors, call.sizes(launch), code._replace(tile=tile),
            num_warps=4, enable_fp_fusion=not call.request.exactly,
        )  # fmt: skip
    if code.of_probabilities:
        _walk(call, True)


def dq(call: Prepared) -> None:
    """dQ, after `prepare`."""
    _walk(call, False)


def _walk(call: Prepared, delta: bool) -> None:
    batch, heads, queries, _ = call.given.q.shape
    launch = call.request.launches.rows
    q, k, v, do, _ = call.views
    with call.fitting(launch):
        backward.walk[triton.cdiv(queries, launch.br), batch * heads](
            q, k, v, do, call.found.dq, call.saved, call.lengths, call.factors, call.sizes(launch), delta, call.code(True),
            num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=not call.request.exactly,
        )  # fmt: skip


def dk_dv(call: Prepared) -> None:
    """dK and dV, after `prepare`."""
    batch, kv_heads, keys, _ = call.given.k.shape
    launch = call.request.launches.keys
    q, k, v, do, _ = call.views
    with call.fitting(launch):
        backward.dk_dv[triton.cdiv(keys, launch.bc), batch * kv_heads](
            q, k, v, do, call.found.dk, call.found.dv, call.saved, call.lengths, call.factors, call.sizes(launch),
            call.code(False),
            num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=not call.request.exactly,
        )  # fmt: skip


def run(request: Request, given: Given, mask: Mask, scale: float, dtype: torch.dtype = torch.float32) -> Found:
    """The gradients of one call, in `dtype`: every element is written, whatever memory held before.

    Raises:
        Unsupported: for a head_dim that the kernels do not have, and a tile that does not fit into shared memory.
    """
    call = prepared(request, given, mask, scale, dtype)
    prepare(call)
    dq(call)
    dk_dv(call)
    return call.found
