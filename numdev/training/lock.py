"""One process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Within it no other process holds the lock of this file; the operating system releases it when a process ends or is killed.

    `waiting` is called once where another process holds it. The file stays: who removed it would let a third process lock another
    file of the same name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
