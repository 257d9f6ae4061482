"""Processes that do one task after another. They are forked, so what they work on need not be sent to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, NoReturn

from numdev.errors import NumdevError

_PATIENCE = 5.0  # seconds in which a process ends that is told to; a torch operation is not interrupted

Tell = Callable[[Any], None]
Work = Callable[[Any, Tell], Any]
"""What a worker does with a task; it may tell something meanwhile, and returns the result."""


@dataclass(frozen=True)
class Said:
    """What a worker told, or, if `is_result`, the result of its task; `worker` is its number."""

    worker: int
    value: Any
    is_result: bool


class Pool:
    """Workers, each a process that takes the next task when it is free; use it in a `with`, which ends them.

    They know everything that this process knew when the pool was made. Ctrl-C reaches this process alone, which ends them. They
    end by themselves if this process is killed: when they next tell something.
    """

    def __init__(self, count: int, work: Work) -> None:
        """Fork `count` workers. Start no thread before that they would wait for."""
        context = multiprocessing.get_context("fork")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=_serve, args=(work, theirs, list(self._pipes)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for a task ends
        for process in self._processes:
            if kind is not None:
                process.terminate()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, tasks: Iterable[Any]) -> Iterator[Said]:
        """Hand out tasks in their order, and yield what workers say as it comes, until each task has its result.

        Raises:
            NumdevError: if a worker is killed. An error that a task raises is raised here.
        """
        waiting, idle, busy = list(tasks)[::-1], list(range(len(self._pipes)))[::-1], set[int]()
        while waiting or busy:
            while waiting and idle:
                busy.add(number := idle.pop())
                self._pipes[number].send(waiting.pop())
            for pipe in wait([self._pipes[number] for number in busy]):
                number = next(i for i in busy if self._pipes[i] is pipe)
                kind, value = self._received(number)
                if kind == "raised":
                    raise value
                if kind == "result":
                    busy.remove(number)
                    idle.append(number)
                yield Said(number, value, kind == "result")

    def _received(self, number: int) -> tuple[str, Any]:
        try:
            said: tuple[str, Any] = self._pipes[number].recv()
        except (EOFError, ConnectionResetError):
            self._processes[number].join(_PATIENCE)
            code = self._processes[number].exitcode
            mend = "the system ends processes where memory ends; use workers=1, or less memory. What is measured is kept"
            raise NumdevError(f"workers: one of them ended with {code}; {mend}") from None
        return said


def _serve(work: Work, pipe: Connection[Any, Any], of_parent: Iterable[Connection[Any, Any]]) -> None:
    """Do tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    for other in of_parent:
        other.close()  # or the pipes would outlive the parent

    def tell(value: Any) -> None:
        _send(pipe, "told", value)

    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            _send(pipe, "result", work(task, tell))
        except Exception as error:
            error.add_note(traceback.format_exc())
            _send(pipe, "raised", error)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End, and remove files that are half written."""
    sys.exit(128 + number)


def _send(pipe: Connection[Any, Any], kind: str, value: Any) -> None:
    try:
        pipe.send((kind, value))
    except OSError:
        os._exit(1)  # the parent was killed; no error of the task is to blame
    except Exception as error:  # it cannot be sent
        pipe.send(("raised", NumdevError(f"workers: {type(value).__name__} cannot be sent ({error}): {value}")))
