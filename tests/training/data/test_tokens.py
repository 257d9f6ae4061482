"""Captions as numbers."""

from __future__ import annotations

import pytest

from numdev.errors import BadInput
from numdev.training.data.tokens import NULL, UNKNOWN, Vocabulary


def test_frequent_words_come_first_and_ties_by_the_alphabet() -> None:
    words = Vocabulary.of(["A red fox, a dog.", "a red cat"], 8)
    assert words.words == ("a", "red", "cat", "dog", "fox")
    assert words.encode(["a cat barks"]).tolist() == [[2, 4, UNKNOWN, NULL, NULL, NULL, NULL, NULL]]


def test_the_vocabulary_is_cut_off_at_its_most_frequent_words() -> None:
    words = Vocabulary.of(["b b a a c"], 4, most=2)
    assert words.size == 4
    assert words.encode(["c"])[0, 0] == UNKNOWN


def test_a_caption_is_never_cut_off() -> None:
    with pytest.raises(BadInput, match="it has 3 words and a caption may have 2"):
        Vocabulary(("a",), 2).encode(["a a a"])


def test_no_captions_are_no_rows() -> None:
    assert Vocabulary(("a",), 5).encode([]).shape == (0, 5)
