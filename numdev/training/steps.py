"""Where a call of attention stands: in which step of a run, and in which module of a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn


def callers() -> Iterator[Any]:
    """Of every method on the stack of this thread, innermost first, the object whose method it is."""
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]


class Steps:
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


class Running:
    """Knows, within it, which module of a model is running on a thread."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
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
