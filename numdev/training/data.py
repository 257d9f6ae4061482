"""Data to train on: streams of random numbers, captioned pictures of a folder, and text. Rendered scenes are in `scenes`.

Everything random is a function of its purpose, a seed and a step, whatever was drawn before: a resumed run draws what the
uninterrupted one drew.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image, ImageOps
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
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")

NULL, UNKNOWN = 0, 1
"""Tokens that are no word: what pads a caption (and is all of a dropped one), and a word outside of the vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """Words in order; the token of a word is its place, behind NULL and UNKNOWN.

    A caption of fewer than `length` tokens is padded with NULL, whose embedding is learned like that of a word: a model attends
    to all tokens, so that no call of attention needs a mask.
    """

    words: tuple[str, ...]
    length: int

    @property
    def size(self) -> int:
        """Number of different tokens."""
        return len(self.words) + 2

    def encode(self, captions: Iterable[str]) -> Int[Tensor, "captions length"]:
        """Tokens of captions, none of which has more words than `length`."""
        places = {word: place for place, word in enumerate(self.words, start=2)}
        rows = [[places.get(word, UNKNOWN) for word in words_of(caption)] for caption in captions]
        return torch.tensor([row + [NULL] * (self.length - len(row)) for row in rows], dtype=torch.int64)


def words_of(caption: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return re.findall(r"[\w'-]+", caption.lower())


@dataclass(frozen=True)
class Captioned:
    """Pictures [count, 3, height, width] in [-1, 1], FP32; the tokens [count, length] of their captions; and the captions."""

    pictures: Tensor
    tokens: Tensor
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Folder:
    """Images of a folder, cut to a square around the middle and scaled; one in ten is held out of training.

    The folder follows the convention `imagefolder`: the name of the subfolder in which an image lies is its caption. Each image
    is shown once in every pass, in an order of its own by seed. Images are decoded once and kept in memory, 8 bits for each
    colour of a pixel. There is no measure of what a made picture shows, so samples have no score. `digest` is the SHA-256 of the
    names and of all images: it distinguishes results of other pictures in the same folder.

    Raises:
        BadInput: for a folder or an image that cannot be used.
    """

    path: str = setting("", "folder with a subfolder of images for each caption, which is its name")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for image in _images(self.path):
            digest.update(f"{image.relative_to(self.path).as_posix()}\0".encode() + hashlib.sha256(image.read_bytes()).digest())
        object.__setattr__(self, "digest", digest.hexdigest())

    def ready(self, picture: int) -> None:
        """Decode all images, so that an error is raised before training."""
        _load(self, picture)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of all captions, in the order of the alphabet."""
        captions = [words_of(image.parent.name) for image in _images(self.path)]
        return Vocabulary(tuple(sorted({word for words in captions for word in words})), max(1, *map(len, captions)))

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        """Pictures of a training step, a function of the arguments."""
        training, _ = _load(self, picture)
        places, size = np.arange(step * count, (step + 1) * count), len(training.captions)
        passes = places // size
        orders = {number: stream(Purpose.ORDER, seed, number).permutation(size) for number in np.unique(passes).tolist()}
        return _shown(training, np.concatenate([order[places[passes == one] % size] for one, order in orders.items()]))

    def held_out(self, count: int, picture: int) -> Captioned:
        """Up to `count` pictures that no training step sees, the same in every call."""
        _, held_out = _load(self, picture)
        return _shown(held_out, np.arange(min(count, len(held_out.captions))))

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> float:
        """NaN: there is no measure."""
        return float("nan")


@lru_cache(maxsize=4)
def _load(folder: Folder, picture: int) -> tuple[Captioned, Captioned]:
    """All pictures that are trained on, and those held out, of 8 bits: a tenth and at least one, by a hash of the name."""
    images, words = _images(folder.path), folder.vocabulary
    ranked = sorted(images, key=lambda image: hashlib.sha256(image.relative_to(folder.path).as_posix().encode()).hexdigest())
    count = max(1, len(images) // 10)
    training, held_out = (
        Captioned(torch.stack([_decoded(image, picture) for image in part]), words.encode(captions), captions)
        for part in (sorted(ranked[count:]), sorted(ranked[:count]))
        for captions in [tuple(image.parent.name for image in part)]
    )
    return training, held_out


def _images(path: str) -> list[Path]:
    """The images of a folder, in the order of their names."""
    if not path or not Path(path).is_dir():
        raise BadInput(_PATH, path, "name a folder with a subfolder of images for each caption")
    images = sorted(image for image in Path(path).glob("*/*") if image.suffix.lower() in _IMAGES)
    if len(images) < 2:
        hint = "use at least 2, since one is held out of training"
        raise BadInput(_PATH, path, f"its subfolders hold {len(images)} images ({', '.join(_IMAGES)}); {hint}")
    return images


def _decoded(path: Path, picture: int) -> UInt8[Tensor, "3 height width"]:
    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (picture, picture), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadInput(_PATH, str(path), f"the image cannot be decoded ({error}); replace or remove it") from error
    return torch.from_numpy(np.asarray(fitted).transpose(2, 0, 1).copy())


def _shown(part: Captioned, rows: np.ndarray) -> Captioned:
    pictures, tokens = (x[torch.from_numpy(rows)] for x in (part.pictures, part.tokens))
    return Captioned(pictures.float() / 127.5 - 1, tokens, tuple(part.captions[row] for row in rows))


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
