"""The gradients of torch's own attention: scaled_dot_product_attention, FlexAttention, and matmul, softmax, matmul."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.backward.base import Gradients, check_backward_shapes
from numdev.attention.backward.cost import BackwardCostModel
from numdev.attention.backward.function import check_dtypes, rounded_once, uncast
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import Recompute
from numdev.attention.backward.saving import SavingSdpa
from numdev.attention.backward.timed import Passes
from numdev.attention.backward.walk import BackwardWalk
from numdev.attention.base import Output
from numdev.attention.honours import PRESET, SIDES, Honours
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.tiling import Order
from numdev.attention.vendor.dispatch import IN_TORCH, InDtype, proven, refusals
from numdev.attention.vendor.flex import Flex, keeping_graphs
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput, Unsupported
from numdev.settings import setting

_GROUP = "backward"


class ByAutograd:
    """A forward pass of torch, differentiated by torch's autograd. Delta is not returned.

    The forward pass refuses what it cannot honour. The profiler says which kernel computes the gradients, and a kernel of
    another family than the forward pass's is refused.
    """

    fmt: Format
    field: ClassVar[str] = _GROUP  # what a refusal names

    @property
    def forward(self) -> InDtype:
        """What is differentiated."""
        raise NotImplementedError

    @property
    def idle(self) -> dict[str, str]:
        """See `numdev.attention.honours`."""
        return {}

    @property
    def formats(self) -> dict[str, Format]:
        return dict.fromkeys(("dq", "dk", "dv"), self.fmt)

    @property
    def format(self) -> Format:
        """Of the primary output, `dq`."""
        return self.fmt

    @property
    def input_key(self) -> Hashable:
        return self.forward.input_key

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs in the dtype of the format, each rounded once."""
        return *self.forward.round_inputs(q, k, v), Cast(self.fmt)(do.double()).to(self.forward.dtype)

    @property
    def forward_pass(self) -> InDtype:
        """See `numdev.attention.backward.timed.TimedBackward`."""
        return self.forward

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the inputs, so that a call converts nothing."""
        return self.forward.storage

    @property
    def is_tf32(self) -> bool:
        """See `numdev.attention.base.Held`."""
        return self.forward.is_tf32

    def cost_model(self, ran: Ran) -> BackwardCostModel | None:
        """The cost model of the forward pass, without its tile, which is not that of the backward pass."""
        model = self.forward.cost_model(Ran())
        return None if model is None else BackwardCostModel(replace(model, br=None))

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """See `numdev.attention.backward.emulation.EmulatedBackward`."""
        return BackwardWalk(BackwardPrecision.kernel(self.fmt))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The gradients, in the dtype of the format. Shapes as in `Gradients`.

        Raises:
            Unsupported: with PyTorch's own reason, if it cannot run the request, or another kernel ran than was asked for.
        """
        return self.passes(q, k, v, do, mask, scale).backward()

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """See `numdev.attention.backward.timed.TimedBackward`. torch decides what the forward pass keeps."""
        check_backward_shapes(q, k, v, do, mask)
        q, k, v, do = (x.detach().to(self.forward.dtype) for x in (q, k, v, do))
        leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

        def attend() -> Output:
            try:
                with torch.enable_grad():
                    return self.forward.bare(*leaves, mask, scale)
            except Unsupported as error:  # the forward pass names a setting of its own
                said = str(error).removeprefix(f"{error.field}: ")
                own = error.field.split(".")[0] == "attention"
                raise Unsupported(self.field if own else error.field, said) from None

        def gradients(out: Tensor) -> Gradients:
            return self._gradients(out, leaves, do, (mask, scale))

        left = attend().out
        return Passes(attend, lambda: gradients(left), lambda: gradients(attend().out))

    @property
    def primal(self) -> InDtype:
        """See `numdev.attention.backward.base.Differentiable`."""
        return self.forward

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """See `numdev.attention.backward.base.Differentiable`. torch's autograd records the operations themselves."""
        check_dtypes(q, k, v)
        q, k, v, dtype = *(rounded_once(x, self.forward.dtype) for x in (q, k, v)), q.dtype
        with uncast(q), self._compiling():
            return rounded_once(self.forward.bare(q, k, v, mask, scale).out, dtype)

    def _gradients(self, out: Tensor, leaves: tuple[Tensor, ...], do: Tensor, asked: Hashable) -> Gradients:
        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, do, retain_graph=True)

        layouts = tuple((x.shape, x.stride(), x.data_ptr() % 16) for x in (*leaves, do))
        wanted, kernel = self.forward.family, ""
        with refusals(self.field, wanted or type(self).__name__), self._compiling():
            if wanted:
                (dq, dk, dv), kernel = proven(run, wanted, self.field, (self, layouts, asked, do.device), do.device)
            else:
                dq, dk, dv = run()
        return Gradients(dq, dk, dv, None, ran=Ran(kernel))

    def _compiling(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class SdpaBackward(ByAutograd):
    """The gradients of `torch.nn.functional.scaled_dot_product_attention` by one backend and no other; see `Sdpa`.

    PyTorch's kernels round dK and dV of each head before they sum those of the heads that share a KV head.

    Attributes:
        backend: see `Backend`.
        fmt: of inputs and gradients.
    """

    honours: ClassVar[Honours] = Honours(PRESET | {f"{_GROUP}.backend"}, "kernel", IN_TORCH)
    field: ClassVar[str] = f"{_GROUP}.backend"

    backend: Backend = setting(Backend.FLASH, "which implementation of PyTorch is asked for: flash, cudnn, efficient or math")
    fmt: Format = BF16

    @property
    def forward(self) -> Sdpa:
        return Sdpa(self.backend, self.fmt)

    @property
    def forward_pass(self) -> Sdpa:
        """It returns the LSE that the backward pass reads; `math` saves none."""
        return self.forward if self.backend is Backend.MATH else SavingSdpa(self.backend, self.fmt)

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """The walk of the CUDA kernel if there is a GPU, else that of the CPU kernel.

        Raises:
            BadInput: for heads that share a KV head: no policy here rounds dK and dV of each head before they are summed.
        """
        if shape.heads != shape.kv_heads:
            mend = "give as many as heads: PyTorch rounds dK and dV of each head before it sums them, which no policy expresses"
            raise BadInput("problem.kv_heads", shape.kv_heads, mend)
        if self.backend is Backend.FLASH:
            return _flash_on_gpu(self.fmt, shape) if torch.cuda.is_available() else _flash_on_cpu(self.fmt, shape)
        if self.backend is Backend.MATH:
            return BackwardWalk(BackwardPrecision.kernel(self.fmt), why="it has no tiles")
        return super().walk(shape, mask)


def _flash_on_gpu(fmt: Format, shape: Shape) -> BackwardWalk:
    """The launch templates of FlashAttention-2 for GPUs with 144 KiB of shared memory.

    A block of keys meets the tiles of queries from the last to the first, and adds to dQ by atomics, in any order.
    """
    tiles = {32: (128, 128), 64: (128, 128), 96: (64, 128), 128: (64, 128)}
    br, bc = tiles.get(shape.head_dim, (None, None))
    why = "its tiles are known only at head_dim 32, 64, 96 and 128"
    policy = BackwardPrecision.kernel(fmt)
    return BackwardWalk(policy, br=br, bc=bc, order=Order.RANDOM, query_order=Order.REVERSE, why=why)


def _flash_on_cpu(fmt: Format, shape: Shape) -> BackwardWalk:
    """`aten::_scaled_dot_product_flash_attention_for_cpu_backward`, whose running sums are in the dtype of its outputs.

    It multiplies dS by the scale before dS is rounded. If the scale is a power of two, this equals scaling the sums at the end;
    otherwise it rounds once less.
    """
    queries = shape.queries
    policy = BackwardPrecision.kernel(fmt).with_step(dq_sum=fmt, dk_sum=fmt, dv_sum=fmt)
    br = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return BackwardWalk(policy, Recompute(), br=br, bc=512, order=Order.FORWARD, query_order=Order.FORWARD)


@dataclass(frozen=True)
class FlexBackward(ByAutograd):
    """The gradients of `torch.nn.attention.flex_attention` under `torch.compile`, never in its eager form; see `Flex`.

    Attributes:
        br, bc: the tile of the generated kernel of the forward pass; None leaves it to PyTorch. Those of the backward
            pass are always left to it.
        fmt: of inputs and gradients.
    """

    honours: ClassVar[Honours] = Honours(PRESET | SIDES, "kernel", IN_TORCH)

    br: int | None = None
    bc: int | None = None
    fmt: Format = BF16

    def __post_init__(self) -> None:
        Flex(self.br, self.bc)  # checks the sizes

    @property
    def forward(self) -> Flex:
        return Flex(self.br, self.bc, self.fmt)

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """One pass computes dQ, another dK and dV, each over the tiles in order; but blocks that the mask cuts come first."""
        policy = BackwardPrecision.kernel(self.fmt)
        if mask.is_none:
            forward = Order.FORWARD
            return BackwardWalk(policy, order=forward, query_order=forward, why="it depends on the launch")
        return BackwardWalk(policy, why="blocks that the mask cuts come first, an order that no tiling here can express")

    def _compiling(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = keeping_graphs()
        return found


@dataclass(frozen=True)
class VanillaBackward(ByAutograd):
    """The gradients of matmul, softmax, matmul of torch in the dtype itself; see `Vanilla`.

    `NaiveBackward.eager` emulates these operations in any format.

    Attributes:
        fmt: the format of inputs, scores, P and gradients; torch must be able to multiply matrices in it.
    """

    honours: ClassVar[Honours] = Honours(PRESET, "eager", IN_TORCH)

    fmt: Format = BF16

    @property
    def forward(self) -> Vanilla:
        return Vanilla(self.fmt)

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        return BackwardWalk(BackwardPrecision.eager(self.fmt), why="it has no tiles")
