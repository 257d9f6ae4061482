"""Attention exchanged under an unmodified model, forward and backward.

Two things are needed to see every call of torch's `scaled_dot_product_attention`. A `TorchFunctionMode` sees a call by whatever
name, and of operators below the function. It sees none from inside `nn.MultiheadAttention`, whose own function torch gives to the
mode as a whole, and runs without it. So the name in `torch.nn.functional` is replaced as well, while any interception is active.

Each thread has its own stack of interceptions. Torch computes gradients on threads of its own, on which a checkpointed layer
calls its attention again. The mode comes with them, but not from `Tensor.backward` and `torch.autograd.grad`, which it sees
itself and which run without it: for their time such threads, which Python has not started, take the answer of their caller.

The mask tensor of a model is read as a `Mask`: a causal limit, a sliding window, and a number of keys per batch entry where these
state it, which kernels have; else as the tensor that it is.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import OperatorBase, OpOverloadPacket
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from numdev.arithmetic.formats import format_of
from numdev.attention.base import Attention, Backward
from numdev.attention.differentiable import check_dtypes, rounded_once, uncast
from numdev.attention.mask import Bias, Dropout, Mask
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, NumdevError, Unsupported

_SDPA = torch._C._nn.scaled_dot_product_attention  # what the name in torch.nn.functional is bound to in torch itself
_FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
_SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.special.softmax, functional.softmax)
_GRADIENTS = (torch.Tensor.backward, torch.autograd.grad)
_CONCERNING = frozenset({_SDPA, *_FUSED, *_SOFTMAX, *_GRADIENTS, functional.multi_head_attention_forward})
_OPERATORS = (OperatorBase, OpOverloadPacket)
_ATEN_SOFTMAX = re.compile(r"aten\.(_|_safe_)?softmax\b")
_MASK = "attn_mask"
_NAMED = 12  # layers that a sentence names
_COMPILED = "torch.compile must not fuse what numdev computes"


@runtime_checkable
class Trainable(Protocol):
    """An implementation that computes attention under a model."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q, k and v, with the gradients of the implementation."""


Variant: TypeAlias = Attention | Backward | Trainable


@contextmanager
def attend(variant: Variant, *, read_masks: bool = False, dropout: bool = False) -> Iterator[CallCounts]:
    """Within it, every call of `torch.nn.functional.scaled_dot_product_attention` is computed by `variant`.

    The model is not changed. A variant of the backward pass (`TiledBackward`, `NaiveBackward`, `TritonBackward`,
    `SdpaBackward`, ...) gives O and the gradients; one of the forward pass alone gives O where no gradient is recorded.
    `nn.MultiheadAttention` and `nn.TransformerEncoder` call that function too: their fused path is switched off meanwhile. Calls
    are exchanged on the thread that enters, and in the gradients that it asks for within the context. Nothing waits for a device.

        >>> with nd.attend(variant) as seen:
        ...     model(x).sum().backward()
        >>> seen.require()

    Args:
        variant: of the backward pass, or of the forward pass.
        read_masks: whether a mask tensor on a GPU is read, for which the host waits; False refuses it.
        dropout: whether P is dropped as the model asks for it, what is kept being drawn from torch's generator of the device:
            after one `torch.manual_seed` every variant drops the same, as torch itself does on a CPU; False refuses it.

    Yields:
        what became of the calls: `calls`, `missed`, `elsewhere`, and `require()`, which raises where a call was missed or none
        was made. Leaving the context after no call, or after a missed one, warns.

    Raises:
        BadInput: in a call, for arguments that do not fit together.
        Unsupported: in a call, naming the argument, for a mask that is learned or that the variant cannot add to the scores, for
            a softcap and dropout that it does not compute, and for inputs that require a gradient where the variant has none.
    """
    exchange = Exchange(variant, read_masks, dropout)
    with exchange.active():
        yield exchange.seen
    exchange.seen.warn("attend", stacklevel=4)


@dataclass
class CallCounts:
    """Calls of attention under a model, and what became of them."""

    calls: int = 0  # those that were answered
    # Those that ran without being answered, by the name of what ran. Attention of matrix products is known by its softmax: over
    # the last axis of at least four, or of three whose last two are of one length. One without torch's softmax is not seen, and
    # neither is an operator that calls none of torch's.
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def missed(self) -> int:
        """How many calls ran without being answered."""
        return sum(self.elsewhere.values())

    def require(self) -> None:
        """Raise Unsupported unless there were calls, and each was answered."""
        if not self.calls:
            why = "it called torch.nn.functional.scaled_dot_product_attention nowhere"
            raise Unsupported("model", f"{why}; choose its sdpa implementation (attn_implementation='sdpa', need_weights=False)")
        if self.missed:
            raise Unsupported("model", f"attention ran elsewhere, and was not exchanged: {self.ran()}")

    def warn(self, who: str, hint: str = "", *, stacklevel: int = 3) -> None:
        """Warn where there was no call or one was missed, for the caller of a context that ends."""
        if not self.calls:
            ran = f"; it ran {self.ran()}" if self.missed else ""
            warnings.warn(f"{who}: no call of scaled_dot_product_attention was made{ran}{hint}", stacklevel=stacklevel)
        elif self.missed:
            warnings.warn(f"{who}: attention ran elsewhere, and was not exchanged: {self.ran()}", stacklevel=stacklevel)

    def ran(self) -> str:
        counts = [f"{count} of {name}" for name, count in self.elsewhere.items()]
        return ", ".join(counts[:_NAMED]) + (f" and {len(counts) - _NAMED} others" if len(counts) > _NAMED else "")


Onward = Callable[..., Tensor]
"""Computes a call of `Arguments` without who answers: by the next on the stack, in the end by torch's function."""


class Interception(ABC):
    """Answers calls of attention within `active`, which may be entered again, also within itself.

    Attributes:
        seen: what became of the calls.
    """

    def __init__(self, read_masks: bool = False, dropout: bool = False) -> None:
        self.seen, self._reader = CallCounts(), MaskReader(read_masks, drops=dropout)

    @abstractmethod
    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """O."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which calls on this thread are answered."""
        stack = (*_stack(), self)
        with _PATCH.installed(), _answering(stack), _Mode(stack):
            yield


class Exchange(Interception):
    """Answers every call by one implementation."""

    def __init__(self, variant: Variant, read_masks: bool = False, dropout: bool = False) -> None:
        super().__init__(read_masks, dropout)
        self._variant = trainable(variant)
        self._reader.learns = isinstance(variant, Backward) and variant.learns

    def answer(self, arguments: Arguments, *_: Any) -> Tensor:
        call = Call.of(arguments, self._reader)
        return call.shaped(self._variant.attend(call.q, call.k, call.v, call.mask, call.scale))


def trainable(variant: Variant) -> Trainable:
    """`variant` as it computes under a model; raises BadInput for what is no implementation of attention."""
    if isinstance(variant, Trainable):
        return variant
    if isinstance(variant, Attention) and "out" in variant.formats:
        return ForwardAlone(variant)
    hint = "give an implementation of attention, or of its backward pass with a method `attend`"
    raise BadInput("variant", type(variant).__name__, hint)


@dataclass(frozen=True)
class ForwardAlone:
    """A forward pass under a model that is not trained."""

    primal: Attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q; raises Unsupported where a gradient is recorded."""
        check_dtypes(q, k, v)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            name = type(self.primal).__name__
            hint = f"use an implementation of the backward pass (such as TiledBackward({name}(...), ...)), or torch.no_grad()"
            raise Unsupported("variant", f"{name} has no backward pass; {hint}")
        with torch.no_grad(), uncast(q):
            return rounded_once(self.primal(*self.primal.round_inputs(q, k, v), mask, scale).out, q.dtype)


def callers(kind: type) -> Iterator[Any]:
    """The objects of a class whose methods are on the stack of this thread, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames and isinstance(caller := frame.f_locals.get("self"), kind):
            yield caller
        frame = frame.f_back  # type: ignore[assignment]


Stack = tuple[Interception, ...]  # who answers, the innermost last


class _Local(threading.local):
    stack: Stack | None = None  # empty while an answer is computed


_LOCAL = _Local()
_COMPUTING: list[Stack] = []  # those of threads that wait for gradients


def _stack() -> Stack:
    """Who answers on this thread: on one of torch's own, those of the thread that waits for its gradients.

    Raises Unsupported where several threads wait for gradients under different answers, of which one called this.
    """
    if _LOCAL.stack is not None or not isinstance(threading.current_thread(), threading._DummyThread):
        return _LOCAL.stack or ()
    stacks = set(_COMPUTING)
    if len(stacks) > 1:
        why = "threads compute gradients of checkpointed layers under different attentions at once"
        raise Unsupported("model", f"{why}; take turns")
    return next(iter(stacks), ())


@contextmanager
def _answering(stack: Stack) -> Iterator[None]:
    before, _LOCAL.stack = _LOCAL.stack, stack
    try:
        yield
    finally:
        _LOCAL.stack = before


def _ask(args: Any, kwargs: Any, stack: Stack) -> Tensor:
    """The answer to a call of torch's function, without the mode below, which takes microseconds for each operation in it."""
    with _answering(()), torch._C.DisableTorchFunction():
        if not stack:
            if "softcap" not in kwargs:
                return _PATCH.beneath(*args, **kwargs)
            arguments = Arguments(*args, **kwargs).cast()
            plain = VanillaBackward(format_of(arguments.query.dtype))
            return Exchange(plain, read_masks=True, dropout=True).answer(arguments)
        top, beneath = stack[-1], stack[:-1]
        top.seen.calls += 1  # beforehand: a checkpointed layer ends as soon as it has what it needs again
        try:
            return top.answer(Arguments(*args, **kwargs), lambda own: _ask((own.query, own.key, own.value), own.named, beneath))
        except NumdevError:
            top.seen.calls -= 1
            raise


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None,
) -> Tensor:
    """torch's `scaled_dot_product_attention` of scores `S = softcap tanh(scale Q K^T / softcap)`, which torch's function has not.

    `attend`, `shadow` and `capture` see it as they see torch's. Without them torch's operations compute it, with all scores in
    memory (`VanillaBackward`); the host waits for a mask tensor on a GPU.
    """
    return _uncompiled((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), {"softcap": softcap}, _stack())


def _uncompiled(args: Any, kwargs: Any, stack: Stack) -> Tensor:
    """`_ask`, which torch.compile takes into no graph: a compiler fuses operations, and loses the roundings between them."""
    if "torch._dynamo" not in sys.modules:  # nobody compiles, and importing it takes seconds
        return _ask(args, kwargs, stack)
    if type(Arguments(*args, **kwargs).query).__module__.startswith("torch._subclasses"):  # a tracer: the caller is in its graph
        raise Unsupported("model", f"{_COMPILED}, and it traces nn.MultiheadAttention as one; run that module uncompiled")
    return _eagerly()(args, kwargs, stack)


_eagerly = lru_cache(maxsize=1)(lambda: torch.compiler.disable(_ask, reason=_COMPILED))  # takes a while


class _Mode(TorchFunctionMode):
    """Sees each function of torch that a thread calls, by whatever name."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CONCERNING and not isinstance(func, _OPERATORS):
            return func(*args, **kwargs)
        if func in _GRADIENTS and _stack() == self._stack:
            _COMPUTING.append(self._stack)
            try:
                return func(*args, **kwargs)
            finally:
                _COMPUTING.remove(self._stack)
        with nullcontext() if _LOCAL.stack is not None else _answering(self._stack):  # a thread of torch's own has none
            stack = _stack()
            if stack and stack[-1] is self._stack[-1]:
                if func is _SDPA:
                    return _uncompiled(args, kwargs, stack)
                if name := _unanswered(func, args, kwargs):
                    for each in stack:
                        each.seen.elsewhere[name] = each.seen.elsewhere.get(name, 0) + 1
            return func(*args, **kwargs)


def _unanswered(func: Any, args: Any, kwargs: Any) -> str:
    """The name of a function that computes attention itself; empty for one that does not."""
    if func is functional.multi_head_attention_forward:
        return "nn.MultiheadAttention with need_weights=True" if kwargs.get("need_weights", True) else ""
    if func in _FUSED:
        return f"torch.{func.__name__}"
    operator = str(func) if isinstance(func, _OPERATORS) else ""
    if func in _SOFTMAX or _ATEN_SOFTMAX.match(operator):
        return f"matrix products in {_layer()}" if _is_of_scores(*args, **kwargs) else ""
    return operator if "attention" in operator or "attn" in operator else ""


def _is_of_scores(x: Any = None, dim: Any = None, *_: object, **named: Any) -> bool:
    """Whether a softmax with these arguments is that of scores `[..., heads, queries, keys]`, or `[batch, tokens, tokens]`."""
    x = named.get("input", named.get("self", x))
    if not isinstance(x, Tensor) or x.ndim < 3 or dim not in (-1, x.ndim - 1):
        return False
    return x.shape[-1] > 1 and (x.ndim > 3 or x.shape[-1] == x.shape[-2])


def _layer() -> str:
    """The innermost module whose method calls, by its name in the outermost one that runs on this thread."""
    modules = list(callers(nn.Module))
    if not modules:
        return "a function outside of any module"
    names = {module: name for name, module in modules[-1].named_modules()}
    return next((names[module] for module in modules if names.get(module)), type(modules[0]).__name__)


class _Patch:
    """Replaces the name in `torch.nn.functional` while any interception is active, and switches off inference's fused path."""

    def __init__(self) -> None:
        self._lock, self._count, self._fused = threading.Lock(), 0, True
        self.beneath: Callable[..., Tensor] = _SDPA

    @contextmanager
    def installed(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self.beneath = functional.scaled_dot_product_attention
                self._fused = torch.backends.mha.get_fastpath_enabled()
                functional.scaled_dot_product_attention = _replacement  # type: ignore[assignment]
                torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    # Else someone else replaced it meanwhile, and calls ours, which stays good
                    if functional.scaled_dot_product_attention is _replacement:
                        functional.scaled_dot_product_attention = self.beneath
                    torch.backends.mha.set_fastpath_enabled(self._fused)


_PATCH = _Patch()


def _replacement(*args: Any, **kwargs: Any) -> Tensor:
    """Stands for `torch.nn.functional.scaled_dot_product_attention` while any interception is active."""
    stack = _stack()
    return _uncompiled(args, kwargs, stack) if stack else _PATCH.beneath(*args, **kwargs)


@dataclass(frozen=True)
class Arguments:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, under torch's own names and with its defaults.

    A softcap is one of `softcapped_attention` alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None

    @property
    def named(self) -> dict[str, Any]:
        """Those behind the tensors that are no defaults, as torch's function takes them, which has no softcap."""
        return {each.name: getattr(self, each.name) for each in fields(self)[3:] if getattr(self, each.name) is not each.default}

    def cast(self) -> Arguments:
        """Within autocast with q, k and v in its dtype: torch's function is on autocast's list. FP64 is left alone, as there."""
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (self.query, self.key, self.value))
        return replace(self, query=q, key=k, value=v)


@dataclass(frozen=True)
class Call:
    """A call as implementations of attention take it: q, k and v are `[batch, heads, tokens, dim]`, the scale may be None.

    `leading` are the dimensions of the model's own output before queries and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    leading: tuple[int, ...]

    @staticmethod
    def of(arguments: Arguments, reader: MaskReader) -> Call:
        """The call that computes what torch's function would with these arguments.

        Raises BadInput or Unsupported, naming the argument, for shapes that do not fit together, for what no implementation here
        has, and for a mask that is learned.
        """
        for name, tensor in (("query", arguments.query), ("key", arguments.key), ("value", arguments.value)):
            if tensor.is_nested:
                hint = "it is a nested tensor; pad the sequences, or give enable_nested_tensor=False to the model"
                raise Unsupported(name, hint)
            if tensor.ndim < 2 or 0 in tensor.shape:
                raise BadInput(name, tuple(tensor.shape), "give [..., heads, tokens, head_dim], none of them 0")
            if (dims := arguments.query.ndim) != tensor.ndim:
                hint = f"give it the {dims} dimensions of query; no implementation here repeats one over the other's batch"
                raise BadInput(name, tuple(tensor.shape), hint)
        if arguments.is_causal and arguments.attn_mask is not None:
            raise BadInput("is_causal", True, "give it or attn_mask, not both")
        arguments = arguments.cast()
        q, k, v = (_four(x) for x in (arguments.query, arguments.key, arguments.value))
        if q.shape[1] != k.shape[1] and not arguments.enable_gqa and k.shape[1] != 1:
            raise BadInput("enable_gqa", False, f"q has {q.shape[1]} heads and k {k.shape[1]}; give enable_gqa=True")
        leading, (queries, keys), mask = arguments.query.shape[:-2], (q.shape[-2], k.shape[-2]), Mask()
        if arguments.is_causal:
            if queries > keys:
                why = f"torch aligns it top left, so that the last {queries - keys} queries see every key, which no Mask states"
                raise Unsupported("is_causal", f"{why}; call attention for these queries apart")
            k, v = k[..., :queries, :], v[..., :queries, :]  # what is beyond, no query sees: the rest has one alignment
            mask = Mask(causal=True)
        elif arguments.attn_mask is not None:
            mask = reader.read(arguments.attn_mask, (*leading, queries, keys))
        if arguments.dropout_p > 0:
            if not reader.drops:
                hint = "give dropout=True to attend or shadow, set the model's dropout to 0, or call model.eval()"
                raise Unsupported("dropout_p", f"{arguments.dropout_p:g}: {hint}")
            drawn = arguments.query.new_empty(*leading, queries, keys).bernoulli_(1 - arguments.dropout_p)  # as torch's products
            mask = replace(mask, dropout=Dropout(_four(drawn.bool())[..., : k.shape[-2]], arguments.dropout_p))
        if arguments.softcap is not None:
            mask = replace(mask, softcap=arguments.softcap)
        return Call(q, k, v, mask, arguments.scale, tuple(leading))

    def shaped(self, out: Tensor) -> Tensor:
        """O as the model expects it."""
        return out if len(self.leading) == 2 else out.reshape(*self.leading, *out.shape[-2:])


def _four(x: Tensor) -> Tensor:
    """`[batch, heads, tokens, dim]`; without heads there is one, and what is before them counts as batch."""
    return x if x.ndim == 4 else x.reshape(-1, x.shape[-3] if x.ndim > 4 else 1, *x.shape[-2:])


@dataclass
class MaskReader:
    """Reads mask tensors, and keeps the last one of a device: a model gives the same to all of its layers.

    A mask on a device is refused unless the host `waits` to read it.
    """

    waits: bool = False
    learns: bool = False  # whether who computes has a gradient by a mask tensor
    drops: bool = False  # whether dropout is drawn
    _last: tuple[Tensor, tuple[object, ...], Mask] | None = field(default=None, repr=False)

    def read(self, tensor: Tensor, shape: tuple[int, ...]) -> Mask:
        """The `Mask` that says the same as a mask tensor of scores of a shape `[..., heads, queries, keys]`.

        Raises BadInput for a tensor that does not fit the scores; Unsupported for one that is learned, that hides every key by
        the lowest number, or that the host must not wait for.
        """
        bias = sys.modules.get("torch.nn.attention.bias")
        if bias is not None and isinstance(tensor, bias.CausalBias):  # states a mask without holding one
            if tensor.variant is bias.CausalVariant.UPPER_LEFT and shape[-2] != shape[-1]:
                raise Unsupported(_MASK, "it is aligned top left, which no Mask states for other than as many queries as keys")
            return Mask(causal=True)
        learned = tensor.requires_grad and torch.is_grad_enabled()
        if learned and not self.learns:
            hint = "it is learned; ExactBackward and TiledBackward have a gradient by it within attend, else use torch.no_grad()"
            raise Unsupported(_MASK, hint)
        if tensor.device.type == "cpu" and not learned:
            return _read(tensor, shape)
        # Equal for two views of the same values, while one of them is held; torch counts no changes of inference tensors.
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, shape
        known = () if learned or tensor.is_inference() else (*place, tensor._version)
        if known and self._last is not None and self._last[1] == known:
            return self._last[2]
        if tensor.device.type != "cpu" and not self.waits:
            why = f"it lies on {tensor.device.type}, and the host would have to wait to read it"
            raise Unsupported(_MASK, f"{why}; give read_masks=True, or a model without a mask tensor (is_causal=True)")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(_MASK, "it cannot be read while a CUDA graph is captured; give a model without a mask tensor")
        if learned:
            source = _of_scores(tensor, shape)
            return Mask(bias=Bias(_biases(source), source))
        mask = _read(tensor, shape)
        self._last = (tensor, known, mask)  # holds the tensor: its memory is no other's while it is known
        return mask


def _read(tensor: Tensor, shape: tuple[int, ...]) -> Mask:
    values = _biases(_of_scores(tensor, shape))
    seen = values > float("-inf")
    if bool(((values != 0) & seen).any()) or not bool((seen == seen[:, :1]).all()):
        return Mask(bias=Bias(values))
    seen = seen[:, 0]
    batch, (queries, keys) = math.prod(shape[:-3]) if len(shape) > 3 else math.prod(shape[:-2]), shape[-2:]
    counted = (seen.any(-2) * torch.arange(1, keys + 1)).amax(-1).tolist()  # up to the last key that any query sees
    lengths = tuple(counted * (batch // len(counted)))
    padded = None if min(lengths) == keys else lengths
    widest = max(int(seen.sum(-1).amax()), 1)
    for causal in (False, True):
        for window in (None, widest if causal else (widest + 1) // 2):
            mask = Mask(causal, window, padded)
            visible = mask.visible(queries, keys, (0, queries), (0, keys), seen.device)
            if bool(seen.all() if visible is None else (visible[:, 0] == seen).all()):
                return mask
    return Mask(bias=Bias(values))


def _biases(tensor: Tensor) -> Tensor:
    """What is added to the scores, in FP64. Where a mask only hides, the lowest number of its dtype counts as minus infinity.

    Some models write that. Beside a key that is seen, the P of both is exactly 0; in a row that sees none it is not.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bool:
        return torch.zeros(tensor.shape, dtype=torch.float64).masked_fill_(~tensor, float("-inf"))
    lowest = torch.finfo(tensor.dtype).min
    if bool(((tensor <= lowest / 2) & (tensor > float("-inf"))).any(-1).logical_and((tensor <= lowest / 2).all(-1)).any()):
        why = "a row sees no key and holds the lowest number, with which torch gives the mean of all values"
        raise Unsupported(_MASK, f"{why}; give minus infinity")
    return tensor.double().masked_fill(tensor == lowest, float("-inf"))


def _of_scores(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[batch or 1, heads or 1, queries, keys]`, of a tensor that fits scores of a shape."""
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    if not 2 <= x.ndim <= len(shape) or not all(size in (1, other) for size, other in pairs):
        raise BadInput(_MASK, tuple(x.shape), f"it must fit the scores, {tuple(shape)}")
    x = x[(None,) * (len(shape) - x.ndim)].expand(*(-1,) * (len(shape) - 2), *shape[-2:])
    x = _four(x if x.ndim < 5 else x.expand(*shape[:-3], *x.shape[-3:]))
    return x[: 1 if x.stride(0) == 0 else None, : 1 if x.stride(1) == 0 else None]
