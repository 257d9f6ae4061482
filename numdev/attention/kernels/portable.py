"""Launching the portable kernels of both passes: policies, tilings and recurrences as compile-time numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.formats import BF16, FP16, FP32, TF32, Format
from numdev.arithmetic.listing import Listing
from numdev.arithmetic.products import Dot
from numdev.arithmetic.quantise import Microscaled, Quantised, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.accepts import ALL, BINARY, MASK, RECOMPUTE, TILING, Accepts, of
from numdev.attention.kernels import backward, casts, forward
from numdev.attention.kernels.casts import INSTEAD, spec
from numdev.attention.kernels.driver import Bound, binds
from numdev.attention.kernels.forward import Sizes, Tile, View
from numdev.attention.kernels.launch import TABLES, Launch, Launches, Plan, block_side, device_of, held_dtype, interpreting
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Exponential, Maximum, Normalise, OnlineSoftmax, Recompute, ScaleOn
from numdev.attention.tiling import KernelLaunch, Order, Tiling
from numdev.errors import Unsupported

_MOST_DIM = 256  # beyond this, and beyond such a side, a tile does not fit into registers
_SIDES = range(1, 257)
_COMBINED_ROWS = 4  # of a program, one for each of its warps
_PREPARED_ROWS = 64  # of a program that prepares


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, delta
Arguments = Callable[..., tuple[Any, ...]]


class Inputs(NamedTuple):
    """Tensors of the backward pass: `out` and `lse` are those of the forward pass, the LSE contiguous in FP32."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)  # the cache of `code` finds it by identity: to hash a policy takes as long as to read it
class Request:
    """Settings of the forward kernel.

    Attributes:
        precision: the policy; the caller rounds the inputs.
        tiling: Br, Bc, order (forward or reverse) and splits.
        softmax: the recurrence.
        tf32: whether FP32 operands are multiplied as TF32.
        exactly: whether every operation is rounded by itself, and the results are in FP32; otherwise the compiler may fuse a
            product with the sum that follows, and `S - m` of the largest score is not always 0.
        warps, stages: launch settings.
        parallel: whether each split of a fixed size has a program, and not one program all of them in order.
    """

    precision: Precision
    tiling: Tiling
    softmax: OnlineSoftmax
    tf32: bool = False
    exactly: bool = False
    warps: int = 4
    stages: int = 2
    parallel: bool = False

    def __post_init__(self) -> None:
        _FORWARD.check(self, *INSTEAD)

    @property
    def launch(self) -> Launch:
        return Launch(self.tiling.br, self.tiling.bc, self.warps, self.stages)

    @property
    def rounds_each(self) -> bool:
        """Whether the compiler must not contract: what it contracts depends on the tile, and the bits with it."""
        return self.exactly or self.tiling.split_size is not None


@dataclass(frozen=True, eq=False)
class BackwardRequest:
    """Settings of the backward kernels.

    Attributes:
        precision: the policy; the caller rounds the inputs and O.
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


# What the caller rounds: inputs before the kernel, and the output after it. Smoothing q doubles the head_dim of q and k, and the
# kernel has one for q, k and v.
_LISTED = BINARY.but(listing=(None, Accepts(Listing, **of("name numbers turns has_nan has_nar", ALL))))
_OUTSIDE = Accepts(Cast, to=_LISTED, **of("rounding overflow subnormals seed", ALL))
_GRID = (_OUTSIDE, Accepts(Microscaled, element=_OUTSIDE, **of("block scale", ALL)))
_QUANTISED = Accepts(
    Quantised,
    "precision.quantise",
    to=_GRID,
    values=(None, *_GRID),
    queries=(None, _OUTSIDE),
    smoothing=(Smoothing.NONE, Smoothing.K),
    **of("scale block block_q hadamard values_scale seed", ALL),
)
_DOT = Accepts(Dot, accumulate=casts.CAST, every=ALL)
_FORWARD = Accepts(
    Request,
    "attention",
    precision=Accepts(
        Precision,
        "precision",
        inputs=(_OUTSIDE, _QUANTISED),
        output=_OUTSIDE,
        **of("exponential rescale probabilities accumulator", casts.CAST),
        **of("scores row_sum values", _DOT),
    ),
    tiling=TILING.but(br=_SIDES, bc=_SIDES, order=(Order.FORWARD, Order.REVERSE)),
    softmax=Accepts(
        OnlineSoftmax,
        "softmax",
        normalise=(Normalise.EACH, Normalise.END),
        exp=Accepts(Exponential, binary=ALL),
        scale_on=(ScaleOn.SCORES, ScaleOn.QUERIES),
        maximum=(Maximum.RUNNING, Maximum.LOCAL),
        **of("rescale_threshold p_scale", ALL),
    ),
    **of("tf32 exactly warps stages parallel", ALL),
)
_LAUNCH = Accepts(Launch, "tiling", **of("br bc", _SIDES), **of("warps stages", ALL))
_BACKWARD = Accepts(
    BackwardRequest,
    "tiling",
    precision=Accepts(
        BackwardPrecision,
        "precision",
        **of("inputs output", _OUTSIDE),
        **of("exponential probabilities difference ds dq_sum dk_sum dv_sum", casts.CAST),
        **of("scores dp delta dq dk dv", _DOT),
    ),
    recompute=RECOMPUTE,
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
    MASK.check(mask, *INSTEAD)
    soft, tiling = request.softmax, request.tiling
    per = 0 if tiling.split_size is None or request.parallel else tiling.split_size // tiling.bc
    if tiling.split_size is not None and tiling.order is Order.REVERSE:
        raise Unsupported("tiling.order", "the kernel joins splits of a fixed size from the first to the last; give forward")
    steps = _policy(request.precision, (factor, soft.p_scale, soft.log_scale), request.tf32)
    each, scaled, local = soft.normalise is Normalise.EACH, soft.p_scale != 1.0, soft.maximum is Maximum.LOCAL
    # `alpha O + P V` is one accumulation where nothing is rounded between the two.
    plain = steps.values.kind == steps.accumulator.kind == casts.IDENTITY.value and steps.values.every == 0
    tile = _tile(tiling.br, tiling.bc, dim, tiling.order, mask)._replace(ragged=block_side(tiling.bc) != tiling.bc)
    binary, lazy = soft.exp.binary, soft.threshold > 0
    fused = plain and not (each or scaled or local)
    return forward.Code(tile, steps, binary, lazy, each, fused, scaled, local, per, request.parallel)


@lru_cache(maxsize=256)
def backward_code(
    request: BackwardRequest, of_rows: bool, mask: Mask, shape: tuple[int, int, int], factors: backward.Factors
) -> backward.Code:
    """The constants of a backward kernel; `shape` is queries, keys and head_dim, and the kernel `of_rows` meets tiles of keys.

    Raises:
        Unsupported: naming the step that the kernels cannot round.
    """
    MASK.check(mask, *INSTEAD)
    queries, keys, dim = shape
    launch = request.launches.rows if of_rows else request.launches.keys
    side = launch.bc if of_rows else launch.br  # of a tile of the loop
    ragged, window = block_side(side) != side, mask.window is not None
    ends = (
        (keys % block_side(side) != 0 or mask.causal or mask.key_lengths is not None)
        if of_rows
        else queries % block_side(side) != 0
    )
    early, late = not ragged and (window or (mask.causal and not of_rows)), ragged or window or ends
    return backward.Code(
        tile=_tile(launch.br, launch.bc, dim, request.order, mask)._replace(ragged=ragged),
        policy=_policy(request.precision, tuple(factors), request.tf32),
        masked=early or late,
        parts=2 if (early if request.order is Order.REVERSE else late) else 1,
        binary=request.recompute.exponential.binary,
        of_probabilities=request.recompute.delta is DeltaForm.PROBABILITIES,
    )


def _tile(br: int, bc: int, dim: int, order: Order, mask: Mask) -> Tile:
    limits = (mask.causal, mask.window is not None, mask.key_lengths is not None)
    return Tile(block_side(br), block_side(bc), block_side(dim), dim, order is Order.REVERSE, False, *limits)


@lru_cache(maxsize=256)
def _policy(precision: Precision | BackwardPrecision, constants: tuple[float, ...], tf32: bool) -> Any:
    """The steps of a pass; `constants` multiply or divide in some of them."""
    is_backward, specs = isinstance(precision, BackwardPrecision), []
    policy: Any = backward.Policy if is_backward else forward.Policy
    for name in policy._fields:
        step, formats = getattr(precision, name), _formats_of(precision)
        once = not precision.is_harmless(name, torch.float32, constants)
        cast, every = (step.accumulate, step.every or 0) if isinstance(step, Dot) else (step, 0)
        product = casts.FP32_OPERANDS.value
        if name in _OPERANDS:
            other = (getattr(precision, _OPERANDS[name]).to,) if _OPERANDS[name] else ()
            product = operand(*formats, *other, tf32=tf32)
        specs.append(spec(cast, f"precision.{name}", once)._replace(every=every, product=product))
    return policy(*specs)


# Of each product the step in whose format an operand is that is no input.
_OPERANDS = {"scores": "", "dp": "", "values": "probabilities", "dv": "probabilities", "dq": "ds", "dk": "ds"}


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


def _result_dtype(request: Request | BackwardRequest) -> torch.dtype:
    return torch.float32 if request.exactly else held_dtype(request.precision.output.to)


def _finished(request: Request | BackwardRequest, x: Tensor) -> Tensor:
    """`x` rounded to the output's format, in its dtype, or in FP32 where operations are rounded one by one."""
    output = request.precision.output
    if request.exactly:
        return output.apply_(x)
    native = output.to.dtype
    assert native is not None, "each of the formats has a dtype"
    return x if x.dtype == native else output.apply_(x).to(native)


class Launcher:
    """A kernel for calls whose arguments, made of their tensors by `arguments` in the same order, differ in these alone.

    Tensors of different calls are aligned alike. The first launch is Triton's, which compiles for the numbers among them.
    `tile` describes the request for the error of a tile that does not fit, which is Unsupported.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Arguments, tile: str = "", **options: Any) -> None:
        self._kernel, self._grid, self._arguments, self._tile, self._options = kernel, grid, arguments, tile, options
        self._again: Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(tensors, device)
        else:
            self._launch(tensors, device)

    def _launch(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        if self._again is not None:
            self._again(*tensors)
            return
        arguments = self._arguments(*tensors)
        try:
            compiled = self._kernel[self._grid](*arguments, **self._options)
        except OutOfResources as error:
            why = f"{self._tile} needs {error.required} bytes of {error.name}, and the GPU has {error.limit}"
            raise Unsupported("tiling", f"{why}; give a smaller tiling.br or tiling.bc") from None
        if compiled is not None:  # the interpreter compiles nothing
            grid, make = (*self._grid, 1, 1)[:3], self._arguments
            run = compiled[grid]
            self._again = Bound(compiled, grid, arguments, device) if binds(compiled) else lambda *own: run(*make(*own))


def _tile_of(launch: Launch, q: Tensor) -> str:
    return f"a tile of {launch.br} x {launch.bc} at head_dim {q.shape[-1]} in {launch.stages} stages"


def _options(request: Request | BackwardRequest, launch: Launch) -> dict[str, Any]:
    rounds_each = request.rounds_each if isinstance(request, Request) else request.exactly
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": not rounds_each}


def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    return TABLES.of(values, device, lambda: torch.tensor(values, dtype=torch.int32))


def view(tensor: Tensor) -> View:
    """A tensor in memory."""
    return View(tensor, *tensor.stride())


def _sizes(q: Tensor, k: Tensor, mask: Mask, launch: Launch) -> Sizes:
    (heads, queries), (kv_heads, keys) = q.shape[1:3], k.shape[1:3]
    return Sizes(heads, heads // kv_heads, queries, keys, mask.window or 0, launch.br, launch.bc)


def plan(request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Plan:
    """The call for tensors like these: `out` rounded to the output's format, LSE `[batch, heads, queries]` in FP32.

    Raises:
        Unsupported: for a head_dim that the kernel does not have, and when it runs for a tile that does not fit into shared
            memory.
    """
    check_dims(q, v)
    launch, soft, size = request.launch, request.softmax, request.tiling.split_size
    bounds, lengths = tuple(request.tiling.split_bounds(k.shape[2])), mask.key_lengths or (0,)
    bounds = bounds if size is None or request.parallel else (0, bounds[-1])
    splits, parts = len(bounds) - 1, request.parallel
    factor, dtype, device, shape = float(scale * soft.log_scale), _result_dtype(request), q.device, (splits, *q.shape)
    factors = forward.Factors(factor, soft.log_scale, soft.threshold, soft.p_scale)
    made = code(request, mask, q.shape[-1], factor)
    numbers = factors, _sizes(q, k, mask, launch), made._replace(words=not request.rounds_each and _has_words(made, v))
    grid = triton.cdiv(q.shape[2], launch.br), q.shape[0] * q.shape[1], splits

    def arguments(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        return view(q), view(k), view(v), *rest, *numbers

    attend = Launcher(forward.attention, grid, arguments, _tile_of(launch, q), **_options(request, launch))
    combine = combined(request, shape, device, dtype, numbers if parts else None)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(shape, dtype=torch.float32 if splits > 1 else dtype, device=device)
        lse = torch.empty((2, *shape[:-1]) if parts else shape[:-1], dtype=torch.float32, device=device)
        attend(q, k, v, out, lse, _numbers(lengths, device), _numbers(bounds, device))
        out, lse = (out[0], lse[0]) if splits == 1 else combine(out, lse)
        return _finished(request, out), lse

    name = "numdev instrumented" if request.exactly else "numdev portable"
    shown = launch.br, launch.bc, launch.warps, launch.stages, splits if size is None else 1, size
    return Plan(run, KernelLaunch(name, *shown, rescale_threshold=soft.rescale_threshold))


def _has_words(made: forward.Code, v: Tensor) -> bool:
    """Whether the kernel reads v as words: of E4M3, as P then is, if words hold whole columns, for 16 rows and a plain softmax.

    A cache is then read up to 1.3 times as fast (`reports/reference/h200/benchmarks/decode_variants.txt`). Before compute
    capability 9.0 no instruction rounds P once.
    """
    tile, places = made.tile, (v.data_ptr(), v.shape[-1], *v.stride()[:-1])
    is_plain = made.fused and not made.lazy and tile.br == 16 and tile.pad >= 128
    on_gpu = v.dtype == torch.float8_e4m3fn and device_of(v.device).capability >= 90
    return is_plain and on_gpu and v.stride(-1) == 1 and all(place % 4 == 0 for place in places)


def combined(
    request: Request, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, joined: tuple[Any, ...] | None = None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The call that makes one result from those of splits, `[splits, batch, heads, queries, dim]`, in a second launch.

    Splits of a fixed size are joined with the numbers of the kernel that made them, `joined`.
    """
    (splits, *rest, dim), soft = shape, request.softmax
    rows = math.prod(rest)
    policy = _policy(request.precision, (1.0, soft.p_scale, soft.log_scale), request.tf32)
    kernel: Any = forward.combine
    numbers: tuple[Any, ...] = dim, block_side(dim), _COMBINED_ROWS, triton.next_power_of_2(splits), policy
    if joined is not None:
        kernel, (factors, _, own) = forward.joined, joined
        numbers = factors, _COMBINED_ROWS, own
    options: dict[str, Any] = {"num_warps": _COMBINED_ROWS, "enable_fp_fusion": not request.rounds_each}
    grid = (triton.cdiv(rows, _COMBINED_ROWS),)
    launch = Launcher(kernel, grid, lambda *tensors: (*tensors, splits, rows, *numbers), **options)

    def run(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(*rest, dim, dtype=dtype, device=device)
        lse = torch.empty(*rest, dtype=torch.float32, device=device)
        launch(parts, part_lse, out, lse)
        return out, lse

    return run


class Memory(NamedTuple):
    """What the backward kernels write: the LSE in the units of the exponent, delta, and the gradients."""

    base: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class BackwardPlan:
    """The backward kernels for inputs like these. `prepare`, `dq` and `dk_dv` launch them, in this order.

    Raises:
        Unsupported: for a head_dim that the kernels do not have; from the launches, for a tile that does not fit into shared
            memory.
    """

    def __init__(self, request: BackwardRequest, inputs: Inputs, mask: Mask, scale: float) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        check_dims(q, v)
        (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
        log = math.log2(math.e) if request.recompute.exponential.binary else 1.0
        factors, launches = backward.Factors(float(scale * log), log, scale), request.launches
        by_keys, by_rows = (backward_code(request, each, mask, (queries, keys, dim), factors) for each in (False, True))
        self.request, self._device, self._shapes = request, q.device, (q.shape, k.shape, v.shape)
        self._lengths, self._of_probabilities = mask.key_lengths or (0,), by_rows.of_probabilities
        of_rows, of_keys = _sizes(q, k, mask, launches.rows), _sizes(q, k, mask, launches.keys)
        preparing = by_rows._replace(tile=by_rows.tile._replace(br=_PREPARED_ROWS))

        def prepared(out: Tensor, do: Tensor, lse: Tensor, *saved: Tensor) -> tuple[Any, ...]:
            return view(out), view(do), lse, backward.Saved(*saved), factors, of_rows, preparing

        def tiled(written: int, *numbers: Any) -> Arguments:
            def arguments(*tensors: Tensor) -> tuple[Any, ...]:
                saved, lengths = tensors[4 + written : -1], tensors[-1]
                views = map(view, tensors[:4])
                return *views, *tensors[4 : 4 + written], backward.Saved(*saved), lengths, factors, *numbers

            return arguments

        def launcher(kernel: Any, blocks: int, pairs: int, made: Arguments, launch: Launch, **options: Any) -> Launcher:
            return Launcher(kernel, (blocks, pairs), made, _tile_of(launch, q), **_options(request, launch) | options)

        rows, blocks = triton.cdiv(queries, _PREPARED_ROWS), triton.cdiv(queries, launches.rows.br)
        self._preparing = launcher(backward.prepare, rows, batch * heads, prepared, launches.rows, num_warps=4)
        self._walks = [  # for dQ, and delta
            launcher(backward.walk, blocks, batch * heads, tiled(1, of_rows, delta, by_rows), launches.rows)
            for delta in (False, True)
        ]
        blocks, own = triton.cdiv(keys, launches.keys.bc), tiled(2, of_keys, by_keys)
        self._dk_dv = launcher(backward.dk_dv, blocks, batch * kv_heads, own, launches.keys)

    def memory(self) -> Memory:
        """Not yet written."""
        (*rows, _), dtype = self._shapes[0], _result_dtype(self.request)
        saved = [torch.empty(rows, dtype=torch.float32, device=self._device) for _ in range(2)]
        return Memory(*saved, *(torch.empty(shape, dtype=dtype, device=self._device) for shape in self._shapes))

    def prepare(self, inputs: Inputs, memory: Memory) -> None:
        """The LSE in the units of the exponent, and delta: in a second launch where it is of dP and P."""
        self._preparing(inputs.out, inputs.do, inputs.lse, *memory[:2])
        if self._of_probabilities:
            self.dq(inputs, memory, delta=True)

    def dq(self, inputs: Inputs, memory: Memory, *, delta: bool = False) -> None:
        """dQ, or delta."""
        self._walks[delta](*inputs[:4], memory.dq, *memory[:2], _numbers(self._lengths, self._device))

    def dk_dv(self, inputs: Inputs, memory: Memory) -> None:
        """dK and dV."""
        self._dk_dv(*inputs[:4], memory.dk, memory.dv, *memory[:2], _numbers(self._lengths, self._device))

    def run(self, *tensors: Tensor) -> Gradients:
        """dQ, dK and dV rounded to the output's format, and delta in FP32; every element is written."""
        inputs, memory = Inputs(*tensors), self.memory()
        self.prepare(inputs, memory)
        self.dq(inputs, memory)
        self.dk_dv(inputs, memory)
        dq, dk, dv = (_finished(self.request, x) for x in memory[2:])
        return dq, dk, dv, memory.delta

    @property
    def plan(self) -> Plan:
        keys, rows = self.request.launches.keys, self.request.launches.rows
        name = "numdev instrumented backward" if self.request.exactly else "numdev portable backward"
        return Plan(self.run, KernelLaunch(name, keys.br, rows.bc, keys.warps, keys.stages))
