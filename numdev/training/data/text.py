"""Text for a language model, as bytes: the prose that ships with numdev, or a user's file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data.counter import Purpose, stream

_FIELD = "task.data.path"
BYTES = 256
"""Number of different tokens."""


@dataclass(frozen=True)
class Text:
    """A text, whose last tenth is held out of training; a byte is a token.

    Attributes:
        path: of the file; `numdev` is the one that ships: prose of numdev's own documentation.
        digest: SHA-256 of the file.

    Raises:
        BadInput: there is no such file, or nothing in it.
    """

    path: str = setting("numdev", "file of text; `numdev` is prose of its own documentation")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (content := _read(self.path)):
            raise BadInput(_FIELD, self.path, "the file is empty; name a file of text, or `numdev`")
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())

    def ready(self, length: int) -> None:
        """Checks that both parts hold a window of `length` tokens.

        Raises:
            BadInput: the text is too short.
        """
        if (count := len(_tokens(self.path, self.digest))) // 10 < length:
            raise BadInput(_FIELD, self.path, f"it has {count} bytes; a tenth of it is held out and must hold {length}")

    def drawn(self, step: int, seed: int, count: int, length: int) -> Int[Tensor, "count length"]:
        """Windows of the text at places that are a function of (seed, step, row)."""
        tokens, held_out = self._parts()
        starts = stream(Purpose.ORDER, seed, step).integers(0, len(tokens) - len(held_out) - length + 1, count)
        return _windows(tokens, starts, length)

    def held_out(self, count: int, length: int) -> Int[Tensor, "count length"]:
        """Windows at equal distances in the part that is held out."""
        held_out = self._parts()[1]
        return _windows(held_out, np.linspace(0, len(held_out) - length, count).astype(np.int64), length)

    def _parts(self) -> tuple[UInt8[Tensor, " bytes"], UInt8[Tensor, " tenth"]]:
        tokens = _tokens(self.path, self.digest)
        return tokens, tokens[-(len(tokens) // 10) :]


def _windows(tokens: Tensor, starts: np.ndarray, length: int) -> Tensor:
    return tokens[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()


@lru_cache(maxsize=4)
def _tokens(path: str, digest: str) -> UInt8[Tensor, " bytes"]:
    read = _read(path)
    if hashlib.sha256(read).hexdigest() != digest:
        raise BadInput(_FIELD, path, "the file has changed since it was named; start again")
    return torch.frombuffer(bytearray(read), dtype=torch.uint8)


def _read(path: str) -> bytes:
    try:
        if path == "numdev":
            return (files("numdev") / "data" / "prose.txt").read_bytes()
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(_FIELD, path, f"name a file of text, or `numdev` ({error.strerror})") from error
