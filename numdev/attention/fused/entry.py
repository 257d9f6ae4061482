"""The passes as numba keeps them on disk, so that a second process does not compile them again.

The cache lies beside this file in `__pycache__`, in the user's cache folder where that cannot be written (`~/.cache/numba`), or
where `NUMBA_CACHE_DIR` says; where none can be written, every process compiles. Its key names the processor, numba's version and
the sources of the compiled modules: `sources` is a variable of every function here, which numba makes part of the key.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import njit
from numba.core import event

from numdev.attention.fused import layout, passes, rounding

LOG = logging.getLogger("numdev")


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the nearest one above it that exists."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def cache_folders() -> list[Path]:
    """Where numba would keep compiled code, in the order in which it tries."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [*([Path(given)] if given else []), Path(__file__).parent / "__pycache__", Path(user)]


def is_cached() -> bool:
    """Whether numba can keep compiled code; told to where it cannot, it would fail."""
    return any(map(is_writable, cache_folders()))


def stamp(*modules: ModuleType) -> str:
    """What identifies the sources of compiled modules."""
    found = hashlib.sha256()
    for module in modules:
        found.update(Path(str(module.__file__)).read_bytes())
    return found.hexdigest()


class Announce(event.Listener):  # type: ignore[misc]
    """Say once, before it happens, that a pass is compiled: the first point seems to hang otherwise."""

    def __init__(self) -> None:
        self.done = not multiprocessing.current_process().name.endswith(("MainProcess", "-1"))  # of several workers the first

    def on_start(self, event: event.Event) -> None:
        if self.done or not event.data["dispatcher"].py_func.__module__.startswith("numdev."):
            return
        self.done = True
        again = "later commands find it compiled" if is_cached() else "NUMBA_CACHE_DIR names a folder to keep it in"
        LOG.warning("compiling the arithmetic of tiles for this processor, which takes about half a minute; %s", again)

    def on_end(self, event: event.Event) -> None:
        """Nothing: the figures follow."""


event.register("numba:compile", Announce())

MODULES = (layout, rounding, passes)


def _entries(sources: str, *, cached: bool) -> tuple[Any, Any, Any, Any]:
    compiled = njit(nogil=True, error_model="numpy", cache=cached)

    @compiled
    def begin(s, planes, ranges, place, ops, settings, table):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        passes.begin(s, planes, ranges, place, ops, settings, table)

    @compiled
    def finish(p, planes, events, place, ops, settings, table):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        passes.finish(p, planes, events, place, ops, settings, table)

    @compiled
    def add(o, product, planes, place, ops, settings):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        passes.add(o, product, planes, place, ops, settings)

    @compiled
    def sums(p, found):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        passes.sum_rows(p, found)

    return begin, finish, add, sums


begin, finish, add, sums = _entries(stamp(*MODULES), cached=is_cached())
