"""Threads over blocks of a run, in each of which torch has one thread: the work of a block is not shared out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Block = TypeVar("Block")
Result = TypeVar("Result")


def in_threads(work: Callable[[Block], Result], blocks: Sequence[Block]) -> Iterator[Result]:
    """What the work gives of each block, in their order, by as many threads as torch has."""
    if min(torch.get_num_threads(), len(blocks)) == 1:
        return map(work, blocks)
    return _pool(torch.get_num_threads()).map(work, blocks)


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in each of which torch has one thread."""
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "numdev-fused")
    for _ in range(threads):
        pool.submit(begin)
    started.wait()
    torch.set_num_threads(threads)  # for threads that begin later: the last call counts for them
    return pool
