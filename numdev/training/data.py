"""Data of a user to train on: captioned pictures of a folder, and text. Rendered scenes are in `scenes`."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.task import Purpose, stream

_PATH = "task.data.path"

NULL, UNKNOWN = 0, 1
"""Tokens that are no word: what pads a caption (and is all of a dropped one), and a word outside of the vocabulary."""


def words_of(caption: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return re.findall(r"[\w'-]+", caption.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words in order; the token of a word is its place, behind NULL and UNKNOWN.

    A caption of fewer than `length` tokens is padded with NULL, whose embedding is learned like that of a word: a model attends
    to all tokens, so that no call of attention needs a mask.
    """

    words: tuple[str, ...]
    length: int

    @classmethod
    def of(cls, captions: Iterable[str], length: int) -> Vocabulary:
        """The 1022 most frequent words of captions, equally frequent ones in the order of the alphabet."""
        counted = Counter(word for caption in captions for word in words_of(caption))
        return cls(tuple(sorted(counted, key=lambda word: (-counted[word], word))[:1022]), length)

    @property
    def size(self) -> int:
        """Number of different tokens."""
        return len(self.words) + 2

    def encode(self, captions: Iterable[str]) -> Int[Tensor, "captions length"]:
        """Tokens of captions.

        Raises:
            BadInput: a caption has more words than `length`; nothing is cut off.
        """
        places = {word: place for place, word in enumerate(self.words, start=2)}
        rows = []
        for caption in captions:
            tokens = [places.get(word, UNKNOWN) for word in words_of(caption)]
            if len(tokens) > self.length:
                hint = f"it has {len(tokens)} words and a caption may have {self.length}; shorten it or raise `words` of the data"
                raise BadInput("caption", caption, hint)
            rows.append(tokens + [NULL] * (self.length - len(tokens)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length)


@dataclass(frozen=True)
class Captioned:
    """Pictures [count, 3, height, width] in [-1, 1], FP32; the tokens [count, length] of their captions; and the captions."""

    pictures: Tensor
    tokens: Tensor
    captions: tuple[str, ...]


@runtime_checkable
class Pictures(Protocol):
    """Captioned pictures, as a frozen dataclass."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def ready(self, picture: int) -> None:
        """Reads and checks all data, so that an error is raised before training."""

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        """Pictures of a training step, a function of the arguments."""

    def held_out(self, count: int, picture: int) -> Captioned:
        """Up to `count` pictures that no training step sees, the same in every call."""

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> float:
        """Share of pictures that show what their captions say; NaN where there is no measure."""


_METADATA = "metadata.jsonl"
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Folder:
    """Captioned images of a folder, cut to a square around the middle and scaled; one in ten is held out of training.

    The folder follows the convention `imagefolder`: images, and `metadata.jsonl` with `file_name` and `text`. Each image is shown
    once in every pass, in an order of its own by seed. Images are decoded once and kept in memory, 8 bits for each colour of a
    pixel. There is no measure of what a made picture shows, so samples have no score. `digest` is the SHA-256 of the metadata and
    of all images: it distinguishes results of other pictures in the same folder.

    Raises:
        BadInput: for anything in the folder that cannot be used, by its name.
    """

    path: str = setting("", "folder of images with metadata.jsonl, whose lines have file_name and text")
    words: int = setting(32, "tokens of a caption")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.words < 1:
            raise BadInput("task.data.words", self.words, "use at least 1")
        digest = hashlib.sha256()
        for name, text in _entries(self.path).items():
            image = hashlib.sha256((Path(self.path) / name).read_bytes()).hexdigest()
            digest.update(json.dumps([name, text, image]).encode())
        object.__setattr__(self, "digest", digest.hexdigest())

    def ready(self, picture: int) -> None:
        _load(self, picture)

    @property
    def vocabulary(self) -> Vocabulary:
        """The most frequent words of the captions that are trained on."""
        captions = _entries(self.path)
        return Vocabulary.of([captions[name] for name in _parts(captions)[0]], self.words)

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        training, _ = _load(self, picture)
        places, size = np.arange(step * count, (step + 1) * count), len(training.captions)
        passes = places // size
        orders = {number: stream(Purpose.ORDER, seed, number).permutation(size) for number in np.unique(passes).tolist()}
        return _shown(training, np.concatenate([order[places[passes == one] % size] for one, order in orders.items()]))

    def held_out(self, count: int, picture: int) -> Captioned:
        _, held_out = _load(self, picture)
        return _shown(held_out, np.arange(min(count, len(held_out.captions))))

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> float:
        return float("nan")


@lru_cache(maxsize=4)
def _load(folder: Folder, picture: int) -> tuple[Captioned, Captioned]:
    """All pictures that are trained on, and those held out, of 8 bits; every image is decoded and every caption encoded."""
    captions, words = _entries(folder.path), folder.vocabulary
    training, held_out = (
        Captioned(
            torch.stack([_decoded(Path(folder.path) / name, picture) for name in names]),
            words.encode(captions[name] for name in names),
            tuple(captions[name] for name in names),
        )
        for names in _parts(captions)
    )
    return training, held_out


def _shown(part: Captioned, rows: np.ndarray) -> Captioned:
    pictures, tokens = (x[torch.from_numpy(rows)] for x in (part.pictures, part.tokens))
    return Captioned(pictures.float() / 127.5 - 1, tokens, tuple(part.captions[row] for row in rows))


def _parts(captions: dict[str, str]) -> tuple[list[str], list[str]]:
    """Names of the images that are trained on, and of those held out: a tenth and at least one, by a hash of the name."""
    ranked, count = sorted(captions, key=lambda name: hashlib.sha256(name.encode()).hexdigest()), max(1, len(captions) // 10)
    return sorted(ranked[count:]), sorted(ranked[:count])


def _entries(path: str) -> dict[str, str]:
    """The caption of each image by its file name, in the order of the names."""

    def refused(why: str) -> BadInput:
        return BadInput(_PATH, path, why)

    folder = Path(path)
    if not path or not folder.is_dir():
        raise refused("name a folder of images with metadata.jsonl")
    images = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.suffix.lower() in _IMAGES}
    if len(images) < 2:
        raise refused(f"it holds {len(images)} images ({', '.join(_IMAGES)}); use at least 2, since one is held out of training")
    captions: dict[str, str] = {}
    number = 0
    try:
        for line in (folder / _METADATA).read_text(encoding="utf-8").splitlines():
            number += 1
            if line.strip():
                entry = json.loads(line)
                name, caption = Path(entry["file_name"]).as_posix(), entry["text"]
                if not caption.strip() or name in captions:
                    raise ValueError
                captions[name] = caption
    except OSError as error:
        hint = 'write a line {"file_name": ..., "text": ...} for each image'
        raise refused(f"{_METADATA} cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        hint = 'is not {"file_name": ..., "text": ...} with an image that no line before names, and a text that is not empty'
        raise refused(f"line {number} of {_METADATA} {hint}") from None
    if strays := sorted(images ^ set(captions)):
        lacks = f"is not named in {_METADATA}" if strays[0] in images else f"is named in {_METADATA}, and there is no such image"
        raise refused(f"{strays[0]} {lacks} ({len(strays)} of {len(images)}); each image needs one line")
    return dict(sorted(captions.items()))


def _decoded(path: Path, picture: int) -> UInt8[Tensor, "3 height width"]:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (picture, picture), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadInput(_PATH, str(path), f"the image cannot be decoded ({error}); replace or remove it") from error
    return torch.from_numpy(np.asarray(fitted).transpose(2, 0, 1).copy())


@dataclass(frozen=True)
class Text:
    """A text, whose last tenth is held out of training; a byte is a token. `digest` is the SHA-256 of the file.

    Raises:
        BadInput: there is no such file, or nothing in it.
    """

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
