"""Captions as numbers: words of a fixed vocabulary, padded to a fixed length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from numdev.errors import BadInput

NULL, UNKNOWN = 0, 1
"""Tokens that are no word: what pads a caption (and is all of a dropped one), and a word outside of the vocabulary."""

_WORD = re.compile(r"[\w'-]+")


def words_of(caption: str) -> list[str]:
    """The words of a caption in lower case, without punctuation."""
    return _WORD.findall(caption.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words in order; the token of a word is its place, behind NULL and UNKNOWN.

    Attributes:
        words: each once.
        length: tokens of a caption. A shorter one is padded with NULL, whose embedding is learned like that of a word: a model
            attends to all tokens, so that no call of attention needs a mask.
    """

    words: tuple[str, ...]
    length: int

    @classmethod
    def of(cls, captions: Iterable[str], length: int, most: int = 1022) -> Vocabulary:
        """The `most` most frequent words of captions, equally frequent ones in the order of the alphabet."""
        counted = Counter(word for caption in captions for word in words_of(caption))
        ranked = sorted(counted, key=lambda word: (-counted[word], word))
        return cls(tuple(ranked[:most]), length)

    @property
    def size(self) -> int:
        """Number of different tokens."""
        return len(self.words) + 2

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words, start=2)}

    def encode(self, captions: Iterable[str]) -> Int[Tensor, "captions length"]:
        """Tokens of captions.

        Raises:
            BadInput: a caption has more words than `length`; nothing is cut off.
        """
        rows = [self._row(caption) for caption in captions]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length)

    def _row(self, caption: str) -> list[int]:
        found = [self._places.get(word, UNKNOWN) for word in words_of(caption)]
        if len(found) > self.length:
            mend = f"it has {len(found)} words and a caption may have {self.length}; shorten it or raise `words` of the data"
            raise BadInput("caption", caption, mend)
        return found + [NULL] * (self.length - len(found))
