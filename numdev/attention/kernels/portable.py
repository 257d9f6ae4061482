"""Launching the portable kernel: a policy, a tiling and a recurrence as compile-time numbers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, FP16, FP32, TF32, Format
from numdev.arithmetic.quantise import Quantised, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.accepts import ALL, EXP_OR_EXP2, MASK, QUANTISED, ROUNDED, SOFTMAX, TILING, Accepts, of, policy
from numdev.attention.kernels import combine, forward
from numdev.attention.kernels.arguments import Code, Every, Factors, Policy, Products, Recurrence, Sight, Sizes, Tile, View
from numdev.attention.kernels.casts import CAST, INSTEAD, Spec, spec
from numdev.attention.kernels.runtime import interpreting
from numdev.attention.kernels.tables import Tables
from numdev.attention.mask import Mask
from numdev.attention.operations import is_harmless
from numdev.attention.precision import Precision
from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, SumOver
from numdev.attention.tiling import Order, Tiling
from numdev.errors import Unsupported

_MOST_KEYS, _MOST_DIM = 256, 256  # beyond these a tile does not fit into registers
_COMBINED_ROWS = 4  # of a program, one for each of its warps


@dataclass(frozen=True)
class Request:
    """What is compiled.

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
        _ACCEPTS.check(self, *INSTEAD)

    def code(self, mask: Mask, dim: int, factor: float) -> Code:
        """The constants of the kernel that is compiled; `factor` multiplies the scores."""
        MASK.check(mask, *INSTEAD)
        br, bc, pad = (max(16, triton.next_power_of_2(n)) for n in (self.tiling.br, self.tiling.bc, dim))
        tile = Tile(br, bc, pad, dim, self.tiling.order is Order.REVERSE, bc != self.tiling.bc)
        sight = Sight(mask.causal, mask.window is not None, mask.key_lengths is not None)
        return Code(tile, sight, self.policy(factor), self.every, self.products, self.recurrence)

    def policy(self, factor: float) -> tuple[Spec, ...]:
        """The casts of the steps; `factor` multiplies the scores."""
        soft = self.softmax
        return _policy(self.precision, (factor, soft.p_scale, soft.log_scale))

    @property
    def every(self) -> Every:
        """Products between roundings of the running sums; 0 for one rounding in each tile."""
        step = self.precision
        return Every(step.scores.every or 0, step.row_sum.every or 0, step.values.every or 0)

    @property
    def products(self) -> Products:
        """How the operands of `Q K^T` and of `P V` are multiplied."""
        if interpreting():
            return Products("ieee", "ieee")
        inputs = formats_of(self.precision)
        if self.tf32:
            return Products("tf32", "tf32")
        probabilities = self.precision.probabilities
        assert isinstance(probabilities, Cast), "refused otherwise"
        return Products(operand(*inputs), operand(*inputs, probabilities.to))

    @property
    def recurrence(self) -> Recurrence:
        """The form of the online softmax; `alpha O + P V` is one accumulation where nothing is rounded between the two."""
        soft, step = self.softmax, self.precision
        each = soft.normalise is Normalise.EACH
        plain = all(cast == Cast(FP32) for cast in (step.values.accumulate, step.accumulator)) and step.values == Dot(Cast(FP32))
        scaled, local = soft.p_scale != 1.0, soft.maximum is Maximum.LOCAL
        return Recurrence(
            binary=soft.exp.is_binary,
            lazy=soft.threshold > 0,
            each=each,
            fused=plain and not (each or scaled or local),
            scaled=scaled,
            local=local,
        )


_SIDES = range(1, _MOST_KEYS + 1)
_ACCEPTS = Accepts(
    Request,
    "attention",
    # The caller rounds the inputs; smoothing q doubles the head_dim of q and k, and the kernel has one for q, k and v.
    precision=policy(CAST).but(inputs=(ROUNDED, QUANTISED.but(smoothing=(Smoothing.NONE, Smoothing.K), smoothing_block=(None,)))),
    tiling=TILING.but(br=_SIDES, bc=_SIDES, order=(Order.FORWARD, Order.REVERSE)),
    softmax=SOFTMAX.but(exp=EXP_OR_EXP2, tie_shift=(None,), sum_over=(SumOver.EXPONENTIALS,)),
    **of("tf32 exactly warps stages", ALL),
)


def formats_of(precision: Precision) -> tuple[Format, ...]:
    """The formats of q, k and v; FP32 if they are quantised, since they are dequantised before the kernel."""
    return (FP32,) if isinstance(precision.inputs, Quantised) else (precision.inputs.to,)


def operand(*formats: Format) -> str:
    """The narrowest type of a tensor core's operands that holds all formats, so that products are exact; `ieee` is FP32."""
    for name, fmt in (("fp16", FP16), ("bf16", BF16), ("tf32", TF32)):
        if all(fmt.covers(each) for each in formats):
            return name
    return "ieee"


def storage(precision: Precision) -> torch.dtype:
    """The narrowest dtype of the inputs in memory."""
    name = "ieee" if interpreting() else operand(*formats_of(precision))
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)


@lru_cache(maxsize=256)
def _policy(precision: Precision, constants: tuple[float, ...]) -> tuple[Spec, ...]:
    found = []
    names: tuple[str, ...] = Policy._fields
    for name in names:
        step = getattr(precision, name)
        cast = step.accumulate if isinstance(step, Dot) else step
        found.append(spec(cast, f"precision.{name}", not is_harmless(precision, torch.float32, name, constants)))
    return Policy(*found)


_TABLES = Tables(64)


def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    return _TABLES.get(values, device, lambda: torch.tensor(values, dtype=torch.int32))


def check_dims(q: Tensor, v: Tensor) -> None:
    """Raise Unsupported for a head_dim that the kernel does not have."""
    dim = q.shape[-1]
    if dim > _MOST_DIM:
        raise Unsupported("problem.head_dim", f"{dim} does not fit into registers; give at most {_MOST_DIM}")
    if v.shape[-1] != dim:
        raise Unsupported("problem.head_dim", f"the kernel has one for q, k and v, and v has {v.shape[-1]}, q {dim}")


def run(
    request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """`out` before its cast to the output's format, in `out_dtype`; LSE `[..., queries]` in FP32.

    Raises:
        Unsupported: for a head_dim that the kernel does not have, and a tile that does not fit into shared memory.
    """
    check_dims(q, v)
    dim = q.shape[-1]
    splits = request.tiling.splits
    out = torch.empty(splits, *q.shape, dtype=torch.float32 if splits > 1 else out_dtype, device=q.device)
    lse = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        try:
            _attend(request, q, k, v, mask, scale, out, lse)
        except OutOfResources as error:
            tile = f"a tile of {request.tiling.br} x {request.tiling.bc} at head_dim {dim} in {request.stages} stages"
            mend = "give a smaller tiling.br or tiling.bc"
            why = f"{tile} needs {error.required} bytes of {error.name}, and the GPU has {error.limit}; {mend}"
            raise Unsupported("tiling", why) from None
        if splits == 1:
            return out[0], lse[0]
        return combined(request, out, lse, out_dtype)


def _attend(request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out: Tensor, lse: Tensor) -> None:
    """Each split's `O` and LSE: out `[splits, batch, heads, queries, dim]`, lse without the last."""
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    tiling, soft = request.tiling, request.softmax
    factor = float(scale * soft.log_scale)
    lengths = _numbers(mask.key_lengths or (0,), q.device)
    bounds = _numbers(tuple(tiling.split_bounds(keys)), q.device)
    grid = (triton.cdiv(queries, tiling.br), batch * heads, tiling.splits)
    forward.attention[grid](
        View(q, *q.stride()),
        View(k, *k.stride()),
        View(v, *v.stride()),
        out,
        lse,
        lengths,
        bounds,
        Factors(factor, soft.log_scale, soft.threshold, soft.p_scale),
        Sizes(heads, heads // kv_heads, queries, keys, mask.window or 0, tiling.br, tiling.bc),
        request.code(mask, dim, factor),
        num_warps=request.warps,
        num_stages=request.stages,
        enable_fp_fusion=not request.exactly,
    )


def combined(request: Request, parts: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One result from those of the splits, parts `[splits, batch, heads, queries, dim]`, in a second launch."""
    splits, *shape, dim = parts.shape
    out = torch.empty(*shape, dim, dtype=dtype, device=parts.device)
    lse = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    policy = request.policy(1.0)
    combine.combine[(triton.cdiv(lse.numel(), _COMBINED_ROWS),)](
        parts, part_lse, out, lse, splits, lse.numel(),
        dim, max(16, triton.next_power_of_2(dim)), _COMBINED_ROWS, triton.next_power_of_2(splits),
        policy,
        num_warps=_COMBINED_ROWS, enable_fp_fusion=not request.exactly,
    )  # fmt: skip
    return out, lse
