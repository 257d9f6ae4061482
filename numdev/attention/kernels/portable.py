"""Launching the portable kernels of both passes: policies, tilings and recurrences as compile-time numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, FP16, FP32, TF32, Format
from numdev.arithmetic.quantise import Quantised, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention import accepts
from numdev.attention.accepts import ALL, Accepts, of
from numdev.attention.kernels import backward, casts, forward
from numdev.attention.kernels.casts import INSTEAD, Spec, spec
from numdev.attention.kernels.forward import Sizes, Tile, View
from numdev.attention.kernels.launch import Launch, Launches
from numdev.attention.kernels.runtime import TABLES, BackwardInputs, BackwardOutputs, interpreting
from numdev.attention.mask import Mask
from numdev.attention.operations import BACKWARD_OPERATIONS, OPERATIONS, Row, is_harmless
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Maximum, Normalise, OnlineSoftmax, Recompute, SumOver
from numdev.attention.tiling import Order, Tiling
from numdev.errors import Unsupported

_MOST_DIM = 256  # beyond this, and beyond such a side, a tile does not fit into registers
_SIDES = range(1, 257)
_COMBINED_ROWS = 4  # of a program, one for each of its warps
_PREPARED_ROWS = 64  # of a program that prepares


@dataclass(frozen=True, eq=False)  # the cache of `code` finds it by identity: to hash a policy takes as long as to read it
class Request:
    """Settings of the forward kernel.

    Attributes:
        precision: the policy; the caller rounds inputs and output.
        tiling: Br, Bc, order (forward or reverse) and splits.
        softmax: the recurrence.
        tf32: whether FP32 operands are multiplied as TF32.
        exactly: whether every operation is rounded by itself; otherwise the compiler may fuse a product with the sum that
            follows, and `S - m` of the largest score is not always 0.
        warps, stages: launch settings.
    """

    precision: Precision
    tiling: Tiling
    softmax: OnlineSoftmax
    tf32: bool = False
    exactly: bool = False
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        _FORWARD.check(self, *INSTEAD)


@dataclass(frozen=True, eq=False)
class BackwardRequest:
    """Settings of the backward kernels.

    Attributes:
        precision: the policy; the caller rounds inputs, O and the gradients.
        recompute: the form of delta, and the exponential.
        launches: the tiles of both kernels: `br` of the first is the number of queries in a tile of dK and dV, `bc` of the
            second the number of keys in a tile of dQ.
        order: of both loops, forward or reverse.
        tf32, exactly: see `Request`.
    """

    precision: BackwardPrecision
    recompute: Recompute
    launches: Launches
    order: Order = Order.FORWARD
    tf32: bool = False
    exactly: bool = False

    def __post_init__(self) -> None:
        _BACKWARD.check(self, *INSTEAD)


# The caller rounds the inputs; smoothing q doubles the head_dim of q and k, and the kernel has one for q, k and v.
_QUANTISED = accepts.QUANTISED.but(smoothing=(Smoothing.NONE, Smoothing.K), smoothing_block=(None,))
_FORWARD = Accepts(
    Request,
    "attention",
    precision=accepts.policy(casts.CAST).but(inputs=(accepts.ROUNDED, _QUANTISED)),
    tiling=accepts.TILING.but(br=_SIDES, bc=_SIDES, order=(Order.FORWARD, Order.REVERSE)),
    softmax=accepts.SOFTMAX.but(exp=accepts.EXP_OR_EXP2, tie_shift=(None,), sum_over=(SumOver.EXPONENTIALS,)),
    **of("tf32 exactly warps stages", ALL),
)
_LAUNCH = Accepts(Launch, "tiling", **of("br bc", _SIDES), **of("warps stages", ALL))
_BACKWARD = Accepts(
    BackwardRequest,
    "tiling",
    precision=accepts.backward_policy(casts.CAST),
    recompute=accepts.RECOMPUTE.but(exponential=accepts.EXP_OR_EXP2),
    launches=Accepts(Launches, **of("keys rows", _LAUNCH)),
    order=(Order.FORWARD, Order.REVERSE),
    **of("tf32 exactly", ALL),
)


@lru_cache(maxsize=256)
def code(request: Request, mask: Mask, dim: int, factor: float) -> forward.Code:
    """The constants of the forward kernel; `factor` multiplies the scores.

    Raises:
        Unsupported: naming the step that the kernel cannot round.
    """
    accepts.MASK.check(mask, *INSTEAD)
    soft, tiling = request.softmax, request.tiling
    steps = _policy(request.precision, (factor, soft.p_scale, soft.log_scale), request.tf32)
    each, scaled, local = soft.normalise is Normalise.EACH, soft.p_scale != 1.0, soft.maximum is Maximum.LOCAL
    # `alpha O + P V` is one accumulation where nothing is rounded between the two.
    plain = steps.values.kind == steps.accumulator.kind == casts.IDENTITY.value and steps.values.every == 0
    tile = _tile(tiling.br, tiling.bc, dim, tiling.order, mask)._replace(ragged=_side(tiling.bc) != tiling.bc)
    binary, lazy = soft.exp.binary, soft.threshold > 0
    return forward.Code(tile, steps, binary, lazy, each, plain and not (each or scaled or local), scaled, local)


@lru_cache(maxsize=256)
def backward_code(
    request: BackwardRequest, of_rows: bool, mask: Mask, shape: tuple[int, int, int], factors: backward.Factors
) -> backward.Code:
    """The constants of a backward kernel; `shape` is queries, keys and head_dim, and the kernel `of_rows` meets tiles of keys.

    Raises:
        Unsupported: naming the step that the kernels cannot round.
    """
    accepts.MASK.check(mask, *INSTEAD)
    queries, keys, dim = shape
    launch = request.launches.rows if of_rows else request.launches.keys
    side = launch.bc if of_rows else launch.br  # of a tile of the loop
    ragged, window = _side(side) != side, mask.window is not None
    ends = (keys % _side(side) != 0 or mask.causal or mask.key_lengths is not None) if of_rows else queries % _side(side) != 0
    early, late = not ragged and (window or (mask.causal and not of_rows)), ragged or window or ends
    return backward.Code(
        tile=_tile(launch.br, launch.bc, dim, request.order, mask)._replace(ragged=ragged),
        policy=_backward_policy(request.precision, tuple(factors), request.tf32),
        masked=early or late,
        parts=2 if (early if request.order is Order.REVERSE else late) else 1,
        binary=request.recompute.exponential.binary,
        of_probabilities=request.recompute.delta is DeltaForm.PROBABILITIES,
    )


def _side(length: int) -> int:
    """A side of a block in registers."""
    side: int = max(16, triton.next_power_of_2(length))
    return side


def _tile(br: int, bc: int, dim: int, order: Order, mask: Mask) -> Tile:
    limits = (mask.causal, mask.window is not None, mask.key_lengths is not None)
    return Tile(_side(br), _side(bc), _side(dim), dim, order is Order.REVERSE, False, *limits)


@lru_cache(maxsize=256)
def _policy(precision: Precision, constants: tuple[float, ...], tf32: bool) -> Any:
    """The steps of the forward pass; `constants` multiply or divide in some of them."""
    inputs, probabilities = _formats_of(precision), precision.probabilities
    assert isinstance(probabilities, Cast), "refused otherwise"
    products = {"scores": operand(*inputs, tf32=tf32), "values": operand(*inputs, probabilities.to, tf32=tf32)}
    return forward.Policy(*_specs(precision, forward.Policy._fields, constants, OPERATIONS, products))


@lru_cache(maxsize=256)
def _backward_policy(precision: BackwardPrecision, constants: tuple[float, ...], tf32: bool) -> Any:
    """The steps of the backward pass."""
    inputs, ds, p = precision.inputs.to, precision.ds.to, precision.probabilities.to
    operands = {"scores": inputs, "dp": inputs, "dq": ds, "dk": ds, "dv": p}
    products = {name: operand(inputs, fmt, tf32=tf32) for name, fmt in operands.items()}
    return backward.Policy(*_specs(precision, backward.Policy._fields, constants, BACKWARD_OPERATIONS, products))


def _specs(
    precision: Precision | BackwardPrecision,
    names: tuple[str, ...],
    constants: tuple[float, ...],
    table: Mapping[str, Row],
    products: Mapping[str, int],
) -> Iterator[Spec]:
    for name in names:
        step = getattr(precision, name)
        once = not is_harmless(precision, torch.float32, name, constants, table)
        cast, every = (step.accumulate, step.every or 0) if isinstance(step, Dot) else (step, 0)
        made = spec(cast, f"precision.{name}", once)
        yield made._replace(every=every, product=products.get(name, casts.FP32_OPERANDS.value))


def operand(*formats: Format, tf32: bool = False) -> int:
    """The narrowest type of a tensor core's operands that holds all formats, so that products are exact, else FP32."""
    if interpreting():
        return casts.FP32_OPERANDS.value
    if tf32:
        return casts.TF32_OPERANDS.value
    kinds = ((casts.FP16_OPERANDS, FP16), (casts.BF16_OPERANDS, BF16), (casts.TF32_OPERANDS, TF32))
    return next((kind.value for kind, fmt in kinds if all(fmt.covers(each) for each in formats)), casts.FP32_OPERANDS.value)


def _formats_of(precision: Precision | BackwardPrecision) -> tuple[Format, ...]:
    """The formats of q, k and v; FP32 if they are quantised, since they are dequantised before the kernel."""
    return (FP32,) if isinstance(precision.inputs, Quantised) else (precision.inputs.to,)


def storage(precision: Precision | BackwardPrecision) -> torch.dtype:
    """The narrowest dtype of the inputs in memory."""
    dtypes = {casts.FP16_OPERANDS.value: torch.float16, casts.BF16_OPERANDS.value: torch.bfloat16}
    return dtypes.get(operand(*_formats_of(precision)), torch.float32)


def check_dims(q: Tensor, v: Tensor) -> None:
    """Raise Unsupported for a head_dim that the kernels do not have."""
    dim = q.shape[-1]
    if dim > _MOST_DIM:
        raise Unsupported("problem.head_dim", f"{dim} does not fit into registers; give at most {_MOST_DIM}")
    if v.shape[-1] != dim:
        raise Unsupported("problem.head_dim", f"the kernels have one for q, k and v, and v has {v.shape[-1]}, q {dim}")


@contextmanager
def _fitting(q: Tensor, launch: Launch) -> Iterator[None]:
    """Launch on the device of q; raise Unsupported if the tile does not fit."""
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        try:
            yield
        except OutOfResources as error:
            tile = f"a tile of {launch.br} x {launch.bc} at head_dim {q.shape[-1]} in {launch.stages} stages"
            why = f"{tile} needs {error.required} bytes of {error.name}, and the GPU has {error.limit}"
            raise Unsupported("tiling", f"{why}; give a smaller tiling.br or tiling.bc") from None


def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    return TABLES.get(values, device, lambda: torch.tensor(values, dtype=torch.int32))


def _view(tensor: Tensor) -> View:
    return View(tensor, *tensor.stride())


def _sizes(q: Tensor, k: Tensor, mask: Mask, launch: Launch) -> Sizes:
    (heads, queries), (kv_heads, keys) = q.shape[1:3], k.shape[1:3]
    return Sizes(heads, heads // kv_heads, queries, keys, mask.window or 0, launch.br, launch.bc)


def run(
    request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """`out` before its cast to the output's format, in `out_dtype`; LSE `[..., queries]` in FP32.

    Raises:
        Unsupported: for a head_dim that the kernel does not have, and a tile that does not fit into shared memory.
    """
    check_dims(q, v)
    tiling, soft, splits = request.tiling, request.softmax, request.tiling.splits
    factor, launch = float(scale * soft.log_scale), Launch(tiling.br, tiling.bc, request.warps, request.stages)
    out = torch.empty(splits, *q.shape, dtype=torch.float32 if splits > 1 else out_dtype, device=q.device)
    lse = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(q.shape[2], tiling.br), q.shape[0] * q.shape[1], splits)
    with _fitting(q, launch):
        forward.attention[grid](
            _view(q),
            _view(k),
            _view(v),
            out,
            lse,
            _numbers(mask.key_lengths or (0,), q.device),
            _numbers(tuple(tiling.split_bounds(k.shape[2])), q.device),
            forward.Factors(factor, soft.log_scale, soft.threshold, soft.p_scale),
            _sizes(q, k, mask, launch),
            code(request, mask, q.shape[-1], factor),
            num_warps=request.warps,
            num_stages=request.stages,
            enable_fp_fusion=not request.exactly,
        )
        return (out[0], lse[0]) if splits == 1 else combined(request, out, lse, out_dtype)


def combined(request: Request, parts: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One result from those of the splits, parts `[splits, batch, heads, queries, dim]`, in a second launch."""
    (splits, *shape, dim), soft = parts.shape, request.softmax
    out = torch.empty(*shape, dim, dtype=dtype, device=parts.device)
    lse = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    forward.combine[(triton.cdiv(lse.numel(), _COMBINED_ROWS),)](
        parts, part_lse, out, lse, splits, lse.numel(),
        dim, _side(dim), _COMBINED_ROWS, triton.next_power_of_2(splits),
        _policy(request.precision, (1.0, soft.p_scale, soft.log_scale), request.tf32),
        num_warps=_COMBINED_ROWS, enable_fp_fusion=not request.exactly,
    )  # fmt: skip
    return out, lse


class BackwardCall:
    """One call with memory for its gradients, in `dtype`. `prepare`, `dq` and `dk_dv` launch its kernels, in this order.

    Raises:
        Unsupported: for a head_dim that the kernels do not have; from the launches, for a tile that does not fit into shared
            memory.
    """

    def __init__(
        self, request: BackwardRequest, inputs: BackwardInputs, mask: Mask, scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        check_dims(q, v)
        base, delta = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
        log = math.log2(math.e) if request.recompute.exponential.binary else 1.0
        self.request, self.inputs, self.mask = request, inputs, mask
        dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
        self.outputs = BackwardOutputs(dq, dk, dv, delta)
        self._saved = backward.Saved(base, delta)
        self._factors = backward.Factors(float(scale * log), log, scale)
        self._lengths = _numbers(mask.key_lengths or (0,), q.device)

    def prepare(self) -> None:
        """The LSE in the units of the exponent, and delta: in a second launch where it is of dP and P."""
        batch, heads, queries, _ = self.inputs.q.shape
        launch, constants = self.request.launches.rows, self._code(True)
        with _fitting(self.inputs.q, launch):
            backward.prepare[triton.cdiv(queries, _PREPARED_ROWS), batch * heads](
                _view(self.inputs.out), _view(self.inputs.do), self.inputs.lse, self._saved, self._factors, self._sizes(launch),
                constants._replace(tile=constants.tile._replace(br=_PREPARED_ROWS)),
                num_warps=4, enable_fp_fusion=not self.request.exactly,
            )  # fmt: skip
        if constants.of_probabilities:
            self._walk(True)

    def dq(self) -> None:
        """dQ."""
        self._walk(False)

    def _walk(self, delta: bool) -> None:
        batch, heads, queries, _ = self.inputs.q.shape
        launch = self.request.launches.rows
        with _fitting(self.inputs.q, launch):
            backward.walk[triton.cdiv(queries, launch.br), batch * heads](
                *map(_view, self.inputs[:4]), self.outputs.dq, self._saved, self._lengths, self._factors, self._sizes(launch),
                delta, self._code(True),
                num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=not self.request.exactly,
            )  # fmt: skip

    def dk_dv(self) -> None:
        """dK and dV."""
        batch, kv_heads, keys, _ = self.inputs.k.shape
        launch = self.request.launches.keys
        with _fitting(self.inputs.q, launch):
            backward.dk_dv[triton.cdiv(keys, launch.bc), batch * kv_heads](
                *map(_view, self.inputs[:4]), self.outputs.dk, self.outputs.dv, self._saved, self._lengths, self._factors,
                self._sizes(launch), self._code(False),
                num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=not self.request.exactly,
            )  # fmt: skip

    def run(self) -> BackwardOutputs:
        """The gradients: every element is written, whatever memory held before."""
        self.prepare()
        self.dq()
        self.dk_dv()
        return self.outputs

    def _code(self, of_rows: bool) -> backward.Code:
        queries, dim = self.inputs.q.shape[2:]
        return backward_code(self.request, of_rows, self.mask, (queries, self.inputs.k.shape[2], dim), self._factors)

    def _sizes(self, launch: Launch) -> Sizes:
        return _sizes(self.inputs.q, self.inputs.k, self.mask, launch)
