"""A user's captioned pictures, in the `imagefolder` convention: images, and `metadata.jsonl` with `file_name` and `text`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data.counter import Purpose, stream
from numdev.training.data.pictures import Captioned
from numdev.training.data.tokens import Vocabulary

_FIELD = "task.data.path"
_METADATA = "metadata.jsonl"
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Folder:
    """Captioned images of a folder, cut to a square around the middle and scaled; one in ten is held out of training.

    Each image is shown once in every pass, in an order of its own by seed. Images are decoded once and kept in memory, 8 bits for
    each colour of a pixel. There is no measure of what a made picture shows, so samples have no score.

    Attributes:
        path: of the folder.
        words: tokens of a caption; shorter ones are padded.
        digest: SHA-256 of the metadata and of all images, so that results of other pictures in the same folder are told apart.

    Raises:
        BadInput: there is no such folder, no image or no metadata in it, an image without a caption or too long a one, an entry
            without an image, or an image that cannot be decoded.
    """

    path: str = setting("", "folder of images with metadata.jsonl, whose lines have file_name and text")
    words: int = setting(32, "tokens of a caption")
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.words < 1:
            raise BadInput("task.data.words", self.words, "use at least 1")
        if not self.path:
            raise BadInput(_FIELD, self.path, "name a folder of images with metadata.jsonl")
        entries = _entries(Path(self.path))
        digest = hashlib.sha256()
        for name, text in entries:
            image = hashlib.sha256((Path(self.path) / name).read_bytes()).hexdigest()
            digest.update(json.dumps([name, text, image]).encode())
        object.__setattr__(self, "digest", digest.hexdigest())

    def ready(self, picture: int) -> None:
        _load(self, picture)

    @property
    def vocabulary(self) -> Vocabulary:
        """The most frequent words of the captions that are trained on."""
        return _words(self)

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        loaded = _load(self, picture)
        places = np.arange(step * count, (step + 1) * count)
        passes = places // len(loaded.training)
        order = np.concatenate(
            [
                _order(seed, each, len(loaded.training))[places[passes == each] % len(loaded.training)]
                for each in np.unique(passes).tolist()
            ]
        )
        return loaded.of(loaded.training[torch.from_numpy(order)])

    def held_out(self, count: int, picture: int) -> Captioned:
        loaded = _load(self, picture)
        return loaded.of(loaded.held_out[:count])

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
        return ()


@dataclass(frozen=True, eq=False)
class _Loaded:
    """Decoded images, captions and their tokens; the rows that are trained on, and those held out."""

    images: UInt8[Tensor, "count 3 height width"]
    tokens: Tensor
    captions: tuple[str, ...]
    training: Tensor
    held_out: Tensor

    def of(self, rows: Tensor) -> Captioned:
        captions = tuple(self.captions[row] for row in rows.tolist())
        return Captioned(self.images[rows].float() / 127.5 - 1, self.tokens[rows], captions)


@lru_cache(maxsize=4)
def _load(folder: Folder, picture: int) -> _Loaded:
    entries = _entries(Path(folder.path))
    images = torch.stack([_decoded(Path(folder.path) / name, picture) for name, _ in entries])
    captions = tuple(text for _, text in entries)
    held_out, training = _parts(entries)
    return _Loaded(images, _words(folder).encode(captions), captions, torch.tensor(training), torch.tensor(held_out))


@lru_cache(maxsize=4)
def _words(folder: Folder) -> Vocabulary:
    entries = _entries(Path(folder.path))
    return Vocabulary.of([entries[row][1] for row in _parts(entries)[1]], folder.words)


@lru_cache(maxsize=8)
def _order(seed: int, number: int, count: int) -> np.ndarray:
    """The order of the images in one pass."""
    return stream(Purpose.ORDER, seed, number).permutation(count)


def _parts(entries: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Rows that are held out, a tenth and at least one, by a hash of the name; and the others."""
    ranked = sorted(range(len(entries)), key=lambda row: hashlib.sha256(entries[row][0].encode()).hexdigest())
    count = max(1, len(entries) // 10)
    return sorted(ranked[:count]), sorted(ranked[count:])


def _entries(folder: Path) -> list[tuple[str, str]]:
    """File name and caption of each image, in the order of the names."""
    if not folder.is_dir():
        raise BadInput(_FIELD, str(folder), "name a folder of images with metadata.jsonl")
    images = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.suffix.lower() in _IMAGES}
    if not images:
        raise BadInput(_FIELD, str(folder), f"it holds no image ({', '.join(_IMAGES)})")
    if not (folder / _METADATA).is_file():
        raise BadInput(
            _FIELD, str(folder), f'it has no {_METADATA}; write a line {{"file_name": ..., "text": ...}} for each image'
        )
    told = [_line(folder, number, line) for number, line in enumerate(_lines(folder), start=1) if line.strip()]
    captions = dict(told)
    if len(captions) < len(told):
        name, count = Counter(name for name, _ in told).most_common(1)[0]
        raise BadInput(_FIELD, str(folder), f"{_METADATA} names {name} {count} times; keep one line for each image")
    if missing := sorted(set(captions) - images):
        raise BadInput(_FIELD, str(folder), f"{_METADATA} names {missing[0]}, and there is no such image")
    if bare := sorted(images - set(captions)):
        raise BadInput(_FIELD, str(folder), f"{bare[0]} has no caption ({len(bare)} of {len(images)}); add it to {_METADATA}")
    if len(images) < 2:
        raise BadInput(_FIELD, str(folder), "it holds one image; use at least 2, since one is held out of training")
    return sorted(captions.items())


def _lines(folder: Path) -> list[str]:
    try:
        return (folder / _METADATA).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(_FIELD, str(folder), f"{_METADATA} is not UTF-8") from error


def _line(folder: Path, number: int, line: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
        name, text = entry["file_name"], entry["text"]
    except (ValueError, KeyError, TypeError) as error:
        mend = f"line {number} of {_METADATA} is no JSON object with file_name and text"
        raise BadInput(_FIELD, str(folder), mend) from error
    if not isinstance(name, str) or not isinstance(text, str) or not text.strip():
        raise BadInput(_FIELD, str(folder), f"line {number} of {_METADATA} has no caption; text must be words")
    return Path(name).as_posix(), text


def _decoded(path: Path, picture: int) -> UInt8[Tensor, "3 height width"]:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (picture, picture), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadInput(_FIELD, str(path), f"the image cannot be decoded ({error}); replace or remove it") from error
    return torch.from_numpy(np.asarray(fitted).transpose(2, 0, 1).copy())
