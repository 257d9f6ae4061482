"""Calls of torch's `scaled_dot_product_attention` under any model, answered by another implementation.

Two things are needed to see every call. A `TorchFunctionMode` sees a call by whatever name, and of operators below the function.
It sees none from inside `nn.MultiheadAttention`, whose own function torch gives to the mode as a whole, and runs without it. So
the name in `torch.nn.functional` is replaced as well, while any interception is active. The fused path that
`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take outside of training is switched off meanwhile.

Each thread has its own stack of interceptions. Torch computes gradients on threads of its own, on which a checkpointed layer
calls its attention again. The mode comes with them, but not from `Tensor.backward` and `torch.autograd.grad`, which it sees
itself and which run without it: for their time such threads, which Python has not started, take the answer of their caller.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from numdev.errors import NumdevError, Unsupported
from numdev.training.call import Arguments

Onward = Callable[[Arguments], Tensor]

_SDPA = torch._C._nn.scaled_dot_product_attention  # what the name in torch.nn.functional is bound to in torch itself
_FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
_SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.special.softmax, functional.softmax)
_CONCERNING = frozenset({_SDPA, *_FUSED, *_SOFTMAX, functional.multi_head_attention_forward})
_GRADIENTS = (torch.Tensor.backward, torch.autograd.grad)
_PLAIN = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType})
_NAMED = 12  # layers that a sentence names
_COMPILED = "torch.compile must not fuse what numdev computes"
_WEIGHTS = "nn.MultiheadAttention with need_weights=True"


@runtime_checkable
class Answer(Protocol):
    """An object that computes calls of attention."""

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """O. `onward` calls what would have computed it without this one: the next on the stack, in the end torch's function."""


@dataclass
class CallCounts:
    """Calls of attention under a model, and what became of them.

    Attributes:
        calls: those that were answered.
        elsewhere: those that ran without being answered, by the name of what ran. Attention of matrix products is known by its
            softmax: over the last axis of at least four, or of three whose last two are of one length. One without torch's
            softmax is not seen, and neither is an operator that calls none of torch's.
    """

    calls: int = 0
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
            raise Unsupported("model", f"attention ran elsewhere, and was not exchanged: {self._ran()}")

    def warn(self, who: str, hint: str = "", *, stacklevel: int = 3) -> None:
        """Warn where there was no call or one was missed, for the caller of a context that ends."""
        if not self.calls:
            ran = f"; it ran {self._ran()}" if self.missed else ""
            warnings.warn(f"{who}: no call of scaled_dot_product_attention was made{ran}{hint}", stacklevel=stacklevel)
        elif self.missed:
            warnings.warn(f"{who}: attention ran elsewhere, and was not exchanged: {self._ran()}", stacklevel=stacklevel)

    def _ran(self) -> str:
        counts = [f"{count} of {name}" for name, count in self.elsewhere.items()]
        return ", ".join(counts[:_NAMED]) + (f" and {len(counts) - _NAMED} others" if len(counts) > _NAMED else "")


class Interception:
    """A context in which an `Answer` computes calls of attention; it may be entered again, also within itself."""

    def __init__(self, answer: Answer, seen: CallCounts) -> None:
        self._answer = answer
        self._seen = seen

    def __enter__(self) -> None:
        _PATCH.install()
        before = _stack()
        mode = _Mode((*before, self))
        _LOCAL.entered = [*getattr(_LOCAL, "entered", ()), (before, mode)]
        _LOCAL.stack = (*before, self)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        before, mode = _LOCAL.entered.pop()
        try:
            mode.__exit__(None, None, None)
        finally:
            _LOCAL.stack = before
            _PATCH.remove()

    def ask(self, arguments: Arguments, onward: Onward) -> Tensor:
        self._seen.calls += 1  # beforehand: a checkpointed layer ends as soon as it has what it needs again
        try:
            return self._answer.answer(arguments, onward)
        except NumdevError:
            self._seen.calls -= 1
            raise

    def miss(self, name: str) -> None:
        self._seen.elsewhere[name] = self._seen.elsewhere.get(name, 0) + 1


_LOCAL = threading.local()


def _stack() -> tuple[Interception, ...]:
    """Who answers on this thread, the innermost last; none while one computes its answer."""
    stack: tuple[Interception, ...] | None = getattr(_LOCAL, "stack", None)
    if stack is None:
        return _PATCH.of_gradients() if isinstance(threading.current_thread(), threading._DummyThread) else ()
    return stack


@contextmanager
def _answering(stack: Iterable[Interception]) -> Any:
    before = getattr(_LOCAL, "stack", None)
    _LOCAL.stack = tuple(stack)
    try:
        yield
    finally:
        if before is None:
            del _LOCAL.stack
        else:
            _LOCAL.stack = before


def _ask(arguments: Arguments, stack: tuple[Interception, ...]) -> Tensor:
    if not stack:
        with _answering(()):
            return arguments.call(_PATCH.beneath)
    *others, top = stack
    with _answering(()):
        return top.ask(arguments, lambda again: _ask(again, tuple(others)))


def _uncompiled(arguments: Arguments, stack: tuple[Interception, ...]) -> Tensor:
    """`_ask`, which torch.compile takes into no graph: a compiler fuses operations, and loses the roundings between them."""
    if "torch._dynamo" not in sys.modules:  # nobody compiles, and importing it takes seconds
        return _ask(arguments, stack)
    if type(arguments.query).__module__.startswith("torch._subclasses"):  # a tracer: the caller is in its graph
        raise Unsupported("model", f"{_COMPILED}, and it traces nn.MultiheadAttention as one; run that module uncompiled")
    if _PATCH.eagerly is None:
        _PATCH.eagerly = torch.compiler.disable(_ask, reason=_COMPILED)
    return _PATCH.eagerly(arguments, stack)


class _Mode(TorchFunctionMode):
    """Sees each function of torch that a thread calls, by whatever name."""

    def __init__(self, stack: tuple[Interception, ...]) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENTS and _stack() == self._stack:
            with _PATCH.gradients(self._stack):
                return func(*args, **kwargs)
        if not _concerns(func):
            return func(*args, **kwargs)
        if hasattr(_LOCAL, "stack"):
            return self._called(func, args, kwargs)
        with _answering(self._stack):  # a thread of torch's own, to which the mode came
            return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        stack = _stack()
        if not stack or stack[-1] is not self._stack[-1]:
            return func(*args, **kwargs)
        if func is _SDPA:
            return _uncompiled(Arguments(*args, **kwargs), stack)
        name = _unanswered(func, args, kwargs)
        for each in stack if name else ():
            each.miss(name)
        return func(*args, **kwargs)


def _unanswered(func: Any, args: Any, kwargs: Any) -> str:
    """The name of a function that computes attention itself; empty for one that does not."""
    if func is functional.multi_head_attention_forward:
        return _WEIGHTS if kwargs.get("need_weights", True) else ""
    if func in _FUSED:
        return f"torch.{func.__name__}"
    if _is_softmax(func):
        return f"matrix products in {_layer()}" if _is_of_scores(*args, **kwargs) else ""
    return str(func)


def _is_of_scores(x: Any = None, dim: Any = None, *_: object, **named: Any) -> bool:
    """Whether a softmax with these arguments is that of scores `[..., heads, queries, keys]`, or `[batch, tokens, tokens]`."""
    x = named.get("input", named.get("self", x))
    if not isinstance(x, Tensor) or x.ndim < 3 or dim not in (-1, x.ndim - 1):
        return False
    return x.shape[-1] > 1 and (x.ndim > 3 or x.shape[-1] == x.shape[-2])


def callers() -> Iterator[Any]:
    """Of every method on the stack of this thread, innermost first, the object whose method it is."""
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]


def _layer() -> str:
    """The innermost module whose method calls, by its name in the outermost one that runs on this thread."""
    modules = [each for each in callers() if isinstance(each, torch.nn.Module)]
    if not modules:
        return "a function outside of any module"
    names = {module: name for name, module in modules[-1].named_modules()}
    return next((names[module] for module in modules if names.get(module)), type(modules[0]).__name__)


def _concerns(func: Any) -> bool:
    """Whether it computes attention. Every function of torch that a thread calls comes here: almost all are plain."""
    if type(func) not in _PLAIN and isinstance(func, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return "attention" in str(func) or "attn" in str(func) or _is_softmax(func)
    return func in _CONCERNING


def _is_softmax(func: Any) -> bool:
    return func in _SOFTMAX or str(func).split(".")[:2] in (["aten", "softmax"], ["aten", "_softmax"], ["aten", "_safe_softmax"])


class _Patch:
    """The replaced name in `torch.nn.functional`, and the fused path switched off, while any interception is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._fused = True
        self.beneath: Callable[..., Tensor] = _SDPA
        self.eagerly: Callable[[Arguments, tuple[Interception, ...]], Tensor] | None = None  # `_ask`; takes a while to make
        self._computing: list[tuple[Interception, ...]] = []

    @contextmanager
    def gradients(self, stack: tuple[Interception, ...]) -> Iterator[None]:
        """The time in which a thread waits for gradients, and its answers are those of torch's own threads."""
        with self._lock:
            self._computing.append(stack)
        try:
            yield
        finally:
            with self._lock:
                self._computing.remove(stack)

    def of_gradients(self) -> tuple[Interception, ...]:
        """Who answers on a thread of torch's own.

        Raises:
            Unsupported: where several threads wait for gradients under different answers, of which one called this.
        """
        with self._lock:
            stacks = set(self._computing)
        if len(stacks) > 1:
            raise Unsupported(
                "model", "threads compute gradients of checkpointed layers under different attentions at once; take turns"
            )
        return next(iter(stacks), ())

    def install(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self.beneath = functional.scaled_dot_product_attention
                self._fused = torch.backends.mha.get_fastpath_enabled()
                functional.scaled_dot_product_attention = _replacement  # type: ignore[assignment]
                torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                current: Any = functional.scaled_dot_product_attention
                if current is _replacement:  # else someone else replaced it meanwhile, and calls ours, which stays good
                    functional.scaled_dot_product_attention = self.beneath
                torch.backends.mha.set_fastpath_enabled(self._fused)


_PATCH = _Patch()


def _replacement(*args: Any, **kwargs: Any) -> Tensor:
    """Stands for `torch.nn.functional.scaled_dot_product_attention` while any interception is active."""
    stack = _stack()
    if not stack:
        return _PATCH.beneath(*args, **kwargs)
    return _uncompiled(Arguments(*args, **kwargs), stack)


class StepCounter:
    """Counts steps and the calls within each. `step()` begins the next; so does entering a context again after a call."""

    def __init__(self) -> None:
        self.number = 0
        self.calls = 0

    def enter(self) -> None:
        """Begins the next step unless nothing was called in this one."""
        if self.calls:
            self.step(None)

    def step(self, number: int | None) -> None:
        """The calls that follow are of another step: the next one, unless it is given."""
        self.number, self.calls = self.number + 1 if number is None else number, 0

    def call(self) -> int:
        """The number of this call in its step, from 0."""
        self.calls += 1
        return self.calls - 1


class RunningModule:
    """A context that knows which module of a model is running on a thread."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._local = threading.local()
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        if self._model is None:
            return
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name)))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def name(self) -> str:
        """Of the innermost module that runs, as `named_modules` has it; empty outside of the model and for the model itself."""
        names = self._names()
        return names[-1] if names else ""

    def _begin(self, name: str, *_: object) -> None:
        self._names().append(name)

    def _end(self, *_: object) -> None:
        self._names().pop()

    def _names(self) -> list[str]:
        if not hasattr(self._local, "names"):
            self._local.names = []
        names: list[str] = self._local.names
        return names


class Recorder(ABC):
    """A context that answers calls and knows in which step and in which module of a model each is made.

    Attributes:
        seen: what became of the calls.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.seen = CallCounts()
        self._steps, self._running = StepCounter(), RunningModule(model)
        self._interception = Interception(self, self.seen)

    def _enter(self) -> None:
        self._steps.enter()
        self._running.__enter__()
        self._interception.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._interception.__exit__(kind, *error)
        self._running.__exit__(kind, *error)

    def step(self, number: int | None = None) -> None:
        """The calls that follow are of the next step, or of the one that is given."""
        self._steps.step(number)

    @abstractmethod
    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        """See `Answer`."""
