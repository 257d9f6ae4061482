"""Text as bytes, and its held-out tenth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.errors import BadInput
from numdev.training.data.text import Text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "counted.txt"
    path.write_bytes(bytes(range(200)))
    return path


def test_windows_are_successive_bytes_of_the_part_that_is_trained_on(text: Path) -> None:
    windows = torch.cat([Text(str(text)).drawn(step, 0, 64, 16) for step in range(20)])
    assert torch.equal(windows.diff(dim=1), torch.ones_like(windows[:, 1:]))
    assert windows.min() == 0
    assert windows.max() == 179


def test_the_last_tenth_is_held_out(text: Path) -> None:
    held_out = Text(str(text)).held_out(3, 10)
    assert held_out[:, 0].tolist() == [180, 185, 190]
    assert held_out[-1, -1] == 199


def test_the_same_windows_in_any_order_of_calls() -> None:
    data = Text()
    first = [data.drawn(step, 1, 4, 32) for step in (0, 1)]
    assert torch.equal(data.drawn(1, 1, 4, 32), first[1])
    assert torch.equal(data.drawn(0, 1, 4, 32), first[0])
    assert not torch.equal(first[0], first[1])


def test_a_short_text_is_refused(text: Path) -> None:
    with pytest.raises(BadInput, match="it has 200 bytes; a tenth of it is held out and must hold 21"):
        Text(str(text)).ready(21)
    Text(str(text)).ready(20)


def test_no_file_is_refused() -> None:
    with pytest.raises(BadInput, match="name a file of text"):
        Text("nowhere/to/be/found.txt")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BadInput, match=r"^task\.data\.path: '.*empty\.txt' cannot be used; the file is empty; name a"):
        Text(str(tmp_path / "empty.txt"))


def test_a_file_that_changes_is_told_apart(text: Path) -> None:
    before = Text(str(text))
    text.write_bytes(bytes(range(1, 201)))
    assert before != Text(str(text))
    with pytest.raises(BadInput, match="has changed"):
        before.held_out(1, 5)
