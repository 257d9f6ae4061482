"""Data to train on: streams of random numbers, and text. Rendered scenes are in `scenes`.

Everything random is a function of its purpose, a seed and a step, whatever was drawn before: a resumed run draws what the
uninterrupted one drew.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from numdev.errors import BadInput
from numdev.settings import setting


class Purpose(Enum):
    """The use of a stream of random numbers: two purposes never read the same."""

    SCENES = 1
    NOISE = 2
    TIMES = 3
    DROPPED = 4
    ORDER = 5
    SAMPLES = 6
    JUDGE = 7
    REORDERED = 8


def stream(purpose: Purpose, seed: int, step: int) -> np.random.Generator:
    """The generator of one purpose, seed and step; both are at least 0."""
    return np.random.Generator(np.random.SFC64([purpose.value, seed, step]))


def normal(purpose: Purpose, seed: int, step: int, shape: torch.Size) -> Tensor:
    """Normal numbers of one purpose, seed and step, by PyTorch, which draws them several times faster than NumPy."""
    state = np.random.SeedSequence([purpose.value, seed, step]).generate_state(1, np.uint64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(state[0] >> np.uint64(1))))


_PATH = "task.data.path"


@dataclass(frozen=True)
class Text:
    """A text, whose last tenth is held out of training; a byte is a token. `digest` is the SHA-256 of the file."""

    path: str = setting("numdev", "file of text; `numdev` is prose of its own documentation")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (content := _read(self.path)):
            raise BadInput(_PATH, self.path, "the file is empty; name a file of text, or `numdev`")
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())

    def ready(self, length: int) -> None:
        """Raise BadInput unless both parts hold a window of `length` tokens."""
        if (count := len(_tokens(self.path, self.digest))) // 10 < length:
            raise BadInput(_PATH, self.path, f"it has {count} bytes; a tenth of it is held out and must hold {length}")

    def drawn(self, step: int, seed: int, count: int, length: int) -> Int[Tensor, "count length"]:
        """Windows of the text at places that are a function of (seed, step, row)."""
        size = len(_tokens(self.path, self.digest))
        return self._windows(stream(Purpose.ORDER, seed, step).integers(0, size - size // 10 - length + 1, count), length)

    def held_out(self, count: int, length: int) -> Int[Tensor, "count length"]:
        """Windows at equal distances in the part that is held out."""
        size = len(_tokens(self.path, self.digest))
        return self._windows(size - size // 10 + np.linspace(0, size // 10 - length, count).astype(np.int64), length)

    def _windows(self, starts: np.ndarray, length: int) -> Tensor:
        return _tokens(self.path, self.digest)[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()


@lru_cache(maxsize=4)
def _tokens(path: str, digest: str) -> UInt8[Tensor, " bytes"]:
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise BadInput(_PATH, path, "the file has changed since it was named; start again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _read(path: str) -> bytes:
    try:
        if path == "numdev":
            return (files("numdev") / "data" / "prose.txt").read_bytes()
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(_PATH, path, f"name a file of text, or `numdev` ({error.strerror})") from error
