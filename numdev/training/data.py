"""Data to train on: streams of random numbers, captioned pictures of a folder, and text. Rendered scenes are in `scenes`.

Everything random is a function of its purpose, a seed and a step, whatever was drawn before: a resumed run draws what the
uninterrupted one drew.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
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
    REORDERED = 8


def stream(purpose: Purpose, seed: int, step: int) -> np.random.Generator:
    """The generator of one purpose, seed and step; both are at least 0."""
    return np.random.Generator(np.random.SFC64([purpose.value, seed, step]))


def normal(purpose: Purpose, seed: int, step: int, shape: torch.Size) -> Tensor:
    """Normal numbers of one purpose, seed and step, by PyTorch, which draws them several times faster than NumPy."""
    state = np.random.SeedSequence([purpose.value, seed, step]).generate_state(1, np.uint64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(state[0] >> np.uint64(1))))


_PATH = "task.data.path"
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
NULL = 0  # the token that pads a caption, and all tokens of one that is left out


class Captioned(NamedTuple):
    """Pictures of captions, in FP32 from -1 to 1."""

    pictures: Float32[Tensor, "count 3 height width"]
    tokens: Int[Tensor, "count length"]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Folder:
    """Images in subfolders that have their caption as name; one in ten, at least one, is held out of training.

    Each is cut to a square around its middle and scaled. A word of a caption is a token. There is no measure of what a made
    picture shows, so samples have no score. `digest` is the SHA-256 of the names and of the files. Raises BadInput for a folder
    with fewer than two images.
    """

    path: str = setting("", "folder with a subfolder of images for each caption, which is its name")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(images := self._images()) < 2:
            hint = f"name a folder with a subfolder of images for each caption; this has {len(images)} images, and 2 are needed"
            raise BadInput(_PATH, self.path, hint)
        parts = [(image.relative_to(self.path).as_posix(), hashlib.sha256(image.read_bytes()).hexdigest()) for image in images]
        object.__setattr__(self, "digest", hashlib.sha256(repr(parts).encode()).hexdigest())

    @property
    def words(self) -> dict[str, int]:
        """The token of each word of the captions, in the order of the alphabet."""
        return {word: token for token, word in enumerate(sorted({word for one in self._captions() for word in one}), NULL + 1)}

    @property
    def tokens(self) -> int:
        """How many different tokens there are."""
        return NULL + 1 + len(self.words)

    @property
    def length(self) -> int:
        """Tokens of the longest caption."""
        return max(map(len, self._captions()))

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        """Pictures of a width at places that are a function of (seed, step, row)."""
        size = len(_decoded(self, picture)[-1])
        return self._shown(stream(Purpose.ORDER, seed, step).integers(max(1, size // 10), size, count), picture)

    def held_out(self, count: int, picture: int) -> Captioned:
        """Up to `count` pictures that no training step sees, the same in every call."""
        return self._shown(np.arange(min(count, max(1, len(_decoded(self, picture)[-1]) // 10))), picture)

    def score(self, pictures: Float[Tensor, "count 3 height width"], captions: tuple[str, ...]) -> float:
        """NaN, for there is no measure."""
        return math.nan

    def _images(self) -> list[Path]:
        """By a hash of their names; the first tenth is held out."""
        images = [image for image in Path(self.path or "none").glob("*/*") if image.suffix.lower() in _IMAGES]
        return sorted(images, key=lambda image: hashlib.sha256("/".join(image.parts[-2:]).encode()).digest())

    def _captions(self) -> list[list[str]]:
        return [image.parent.name.lower().split() for image in self._images()]

    def _shown(self, rows: np.ndarray, picture: int) -> Captioned:
        pictures, tokens, captions = _decoded(self, picture)
        return Captioned(pictures[rows].float() / 127.5 - 1, tokens[rows], tuple(captions[row] for row in rows))


@lru_cache(maxsize=4)
def _decoded(folder: Folder, picture: int) -> tuple[UInt8[Tensor, "count 3 height width"], Tensor, list[str]]:
    """All pictures of a folder, the tokens of their captions, and the captions."""
    from PIL import Image, ImageOps  # late: few train on pictures

    pictures, words, length = list[np.ndarray](), folder.words, folder.length
    for path in folder._images():
        try:
            with Image.open(path) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (picture, picture), Image.Resampling.BOX)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadInput(_PATH, str(path), f"the image cannot be decoded ({error}); replace or remove it") from None
        pictures.append(np.asarray(fitted).transpose(2, 0, 1))
    rows = [[words[word] for word in caption] + [NULL] * (length - len(caption)) for caption in folder._captions()]
    return torch.from_numpy(np.stack(pictures)), torch.tensor(rows), [" ".join(caption) for caption in folder._captions()]


@dataclass(frozen=True)
class Text:
    """A text, whose last tenth is held out of training; a byte is a token. `digest` is the SHA-256 of the file."""

    path: str = setting(
        "numdev", "file of text; `numdev` is prose of its own documentation, `python` the reference of Python that Python ships"
    )
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
        if path == "python":
            return "\n".join(text for _, text in sorted(import_module("pydoc_data.topics").topics.items())).encode()
        return Path(path).read_bytes()
    except (OSError, ImportError) as error:
        raise BadInput(_PATH, path, f"name a file of text, `numdev` or `python` ({error})") from error
