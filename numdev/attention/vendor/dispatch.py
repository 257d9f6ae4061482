"""The base of kernels of other makers: a dtype, rounded inputs, proof of which kernel ran, packages, gradients by autograd."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention, Backward, Gradients, Output, Passes, Report, check_backward_shapes
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.differentiable import check_dtypes, rounded_once, uncast
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiling import KernelLaunch
from numdev.errors import BadInput, Unsupported

T = TypeVar("T")
Result = tuple[Tensor, Tensor | None]
IN_TORCH = (BF16, FP16, FP32, FP64, E4M3FN, E5M2)  # formats that are a dtype of torch


class InDtype(Attention):
    """A forward pass in a dtype of torch."""

    fmt: Format
    field: ClassVar[str] = "attention"  # what a refusal names

    @property
    def family(self) -> str:
        """Of the kernels that may run, as `proven` knows them; empty where any operations of torch may."""
        return ""

    @property
    def precision(self) -> Precision:
        """The policy of kernels, as far as it is known."""
        return Precision.kernel(self.fmt)

    @property
    def input_key(self) -> Hashable:
        return Cast(self.fmt), torch.float32

    @property
    def storage(self) -> torch.dtype:
        return dtype_of(self.fmt)

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs in the dtype of the format, each rounded once."""
        cast, dtype = Cast(self.fmt), self.storage
        return cast(q.double()).to(dtype), cast(k.double()).to(dtype), cast(v.double()).to(dtype)

    def launch(self, kernel: str) -> KernelLaunch:
        """The launch of a kernel that the profiler names so."""
        return KernelLaunch(kernel)

    def launched(self, run: Callable[[], Result], *request: Any) -> Output:
        """The result of a call by a kernel of its family; a request is tensors, and what else tells it from others."""
        key = (self, *((x.shape, x.stride(), x.data_ptr() % 16, x.device) if isinstance(x, Tensor) else x for x in request))
        with refusals(self.field, self.family):
            (out, lse), kernel = proven(run, self.family, self.field, key, request[0].device)
        return Output(out, lse, launch=self.launch(kernel))


def dtype_of(fmt: Format) -> torch.dtype:
    """The dtype of a format; raises BadInput for a format without one."""
    if fmt.dtype is None:
        raise BadInput("precision", fmt.name, "torch has no dtype for it; use bf16, fp16, fp32 or fp64")
    return fmt.dtype


@lru_cache(maxsize=1)
def dense(mask: Mask, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "batch_or_1 heads_or_1 queries keys"] | None:
    """The mask as a tensor, or None where every key is seen; an input, and so made once for a request and not timed."""
    return mask.visible(queries, keys, (0, queries), (0, keys), device)


@lru_cache(maxsize=64)
def hides_rows(mask: Mask, batch: int, queries: int, keys: int) -> bool:
    """Whether there is a query that sees no key; computed once for a request."""
    return not bool(mask.seeing_heads(batch, queries, keys).all())


def is_refusal(error: Exception) -> bool:
    """Whether an error refuses a request, rather than reporting that memory or the device has failed."""
    failed = ("can't allocate memory", "out of memory", "CUDA error")
    return not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in failed)


@contextmanager
def refusals(field: str, who: str) -> Iterator[None]:
    """Raises what PyTorch refuses within it as `Unsupported`, naming `field`, with the reasons that it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            if not is_refusal(error):
                raise
            reasons = " ".join(dict.fromkeys(str(warning.message).split(" (Triggered")[0] for warning in caught))
            raise Unsupported(field, f"{who}: {(str(error) or type(error).__name__).splitlines()[0]} {reasons}".strip()) from None


os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some versions of the profiler's library write lines to the terminal
_RAN: dict[Hashable, str] = {}  # the kernel of each request; the profiler runs once for each in a process
_EACH_REQUEST = ContextVar("whether each request is proven, or the first of an implementation alone", default=True)


@contextmanager
def proven_once() -> Iterator[None]:
    """A context in which the kernel of an implementation is proven for its first request, and not for each."""
    token = _EACH_REQUEST.set(False)
    try:
        yield
    finally:
        _EACH_REQUEST.reset(token)


def proven(run: Callable[[], T], family: str, field: str, request: tuple[Hashable, ...], device: torch.device) -> tuple[T, str]:
    """Runs; returns the result and the name of the kernel. Unsupported if it is of another family.

    A request begins with the implementation.
    """
    key = request if _EACH_REQUEST.get() else request[:1]
    if key in _RAN:
        return run(), _RAN[key]
    result, names = kernels_of(run, device)
    if not names:
        raise Unsupported(field, f"asked for {family}, and the profiler names no kernel, so which one ran cannot be verified")
    actual, kernel = kernel_family(names)
    if actual != family:
        raise Unsupported(field, f"asked for {family}, but {actual or 'another kernel'} ran ({kernel or ', '.join(names)[:200]})")
    _RAN[key] = kernel
    return result, kernel


# Families by fragments of kernel names. cuDNN's names contain `flash` too, and of the kernels of a backward pass the first
# fragment names the one that does most of the work, so the order counts.
_FAMILIES = {
    **dict.fromkeys(("cudnn_generated", "cudnn"), "cudnn"),
    **dict.fromkeys(("flex_attention", "flex_decoding"), "flex"),
    **dict.fromkeys(("fmha_cutlass", "efficient_attention"), "efficient"),
    **dict.fromkeys(("flashattnfwdsm", "flashattnbwdsm"), "fa3"),
    **dict.fromkeys(("flashattentionforwardsm", "flashattentionbackwardsm"), "fa4"),
    **dict.fromkeys(("qk_int8_sv", "_attn_fwd"), "sageattention"),
    **dict.fromkeys(("flash_fwd", "flash_bwd_dq_dk_dv", "flash_attention"), "flash"),
    **dict.fromkeys(("attention_math", "gemm", "gemv", "softmax", "nvjet", "cutlass"), "math"),
}
_OPERATORS = ("scaled_dot_product", "_softmax_backward_data")  # the second is of the gradients of what has no operator of its own
_ENTRY = "aten::scaled_dot_product_attention"  # the operator that chooses


def kernels_of(run: Callable[[], T], device: torch.device) -> tuple[T, tuple[str, ...]]:
    """The result of a call and the names of the kernels that it ran on the GPU, or of its attention operators on a CPU."""
    run()  # the first call may compile or set up, which must not be counted
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as watched:
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = watched.events() or []
    if device.type == "cuda":
        names = [event.name for event in events if event.device_type.name == "CUDA"]
    else:
        names = [event.name for event in events if any(part in event.name for part in _OPERATORS) and event.name != _ENTRY]
    return result, tuple(dict.fromkeys(names))


def kernel_family(names: tuple[str, ...]) -> tuple[str, str]:
    """The family that the kernels of a call belong to, and the kernel name that shows it; empty strings if none is known."""
    shown = ((family, name) for part, family in _FAMILIES.items() for name in names if part in name.lower())
    return next(shown, ("", ""))


class Packaged(InDtype):
    """A function of a package that numdev needs for nothing else, on a CUDA device; `family` is that of its kernels."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    @property
    def places(self) -> Mapping[str, str]:
        """The distributions that may hold it, with the module of the function; the first that is installed counts."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """The distribution and its version; empty if none is installed."""
        return next((f"{name} {_version(name)}" for name in self.places if _version(name)), "")

    @property
    def missing(self) -> str:
        """Says that none is installed."""
        return f"{' or '.join(self.places)} is not installed; pip install numdev[{next(iter(self.places))}]"

    def cost_model(self, launch: KernelLaunch) -> CostModel | None:
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.fmt), packed_rows=1)

    def function(self, name: str, device: torch.device) -> Callable[..., Any]:
        """A function of its module; raises Unsupported where the package is not installed, or cannot run."""
        if not self.digest:
            raise Unsupported(self.field, self.missing)
        if device.type not in self.devices:
            raise Unsupported(self.field, f"{self.digest} runs on CUDA devices; use device=cuda")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(self.places[self.digest.split()[0]]), name)
        except (ImportError, OSError) as error:
            raise Unsupported(self.field, f"{self.digest} does not work with torch {torch.__version__}: {error}") from error
        return function

    def launch(self, kernel: str) -> KernelLaunch:
        return KernelLaunch(f"{self.digest} {kernel[:200]}")  # of some compilers a name holds a whole signature


_version = lru_cache(lambda name: next((each.version for each in metadata.distributions(name=name)), ""))


class ByAutograd(Backward):
    """A forward pass of torch, differentiated by torch's autograd. Delta is not returned.

    The forward pass refuses what it cannot honour. The profiler says which kernel computes the gradients, and a kernel of
    another family than the forward pass's is refused.
    """

    fmt: Format
    field: ClassVar[str] = "backward"  # what a refusal names

    @property
    def precision(self) -> BackwardPrecision:
        """The policy of kernels, as far as it is known."""
        return BackwardPrecision.kernel(self.fmt)

    @property
    def formats(self) -> dict[str, Format]:
        return dict.fromkeys(("dq", "dk", "dv"), self.fmt)

    @property
    def input_key(self) -> Hashable:
        return self.forward.input_key

    @property
    def storage(self) -> torch.dtype:
        return dtype_of(self.fmt)

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs in the dtype of the format, each rounded once."""
        return *self.forward.round_inputs(q, k, v), Cast(self.fmt)(do.double()).to(self.storage)

    @property
    def forward_pass(self) -> InDtype:
        forward: InDtype = self.forward
        return forward

    def cost_model(self, launch: KernelLaunch) -> CostModel | None:
        """The cost model of the forward pass, without its tile, which is not that of the backward pass."""
        model: CostModel | None = self.forward.cost_model(KernelLaunch())
        return None if model is None else replace(model, br=None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The gradients, in the dtype of the format. What PyTorch cannot run is refused with its own reason."""
        forward, backward = self.passes(q, k, v, do, mask, scale)
        return backward(forward())

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """See `Backward`. torch decides what the forward pass keeps."""
        check_backward_shapes(q, k, v, do, mask, adds=True)  # the forward pass refuses what it has not
        q, k, v, do = (x.detach().to(self.storage) for x in (q, k, v, do))
        leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        layouts = tuple((x.shape, x.stride(), x.data_ptr() % 16) for x in (*leaves, do))
        family, request = self.forward.family, (self, layouts, mask, scale, do.device)

        def attend() -> Output:
            try:
                with torch.enable_grad():
                    output: Output = self.forward.bare(*leaves, mask, scale)
                    return output
            except Unsupported as error:  # the forward pass names a setting of its own
                own = error.field.split(".")[0] == "attention"
                raise Unsupported(self.field if own else error.field, str(error).removeprefix(f"{error.field}: ")) from None

        def backward(output: Output) -> Gradients:
            def run() -> tuple[Tensor, ...]:
                return torch.autograd.grad(output.out, leaves, do, retain_graph=True)

            with refusals(self.field, family or type(self).__name__), self.compiling():
                (dq, dk, dv), kernel = proven(run, family, self.field, request, do.device) if family else (run(), "")
            return Gradients(dq, dk, dv, None, launch=self.forward_pass.launch(kernel))

        return attend, backward

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, report: Report | None = None
    ) -> Tensor:
        """See `Backward`. torch's autograd records the operations themselves, so that there is nothing to report."""
        check_dtypes(q, k, v)
        dtype = q.dtype
        q, k, v = (rounded_once(x, self.storage) for x in (q, k, v))
        with uncast(q), self.compiling():
            return rounded_once(self.forward.bare(q, k, v, mask, scale).out, dtype)

    def compiling(self) -> AbstractContextManager[None]:
        """The context in which gradients are computed."""
        return nullcontext()
