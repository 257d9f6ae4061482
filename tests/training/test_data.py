"""Text, and each way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.errors import BadInput
from numdev.training.data import Text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "counted.txt"
    path.write_bytes(bytes(range(200)))
    return path


def test_windows_are_successive_bytes_and_the_last_tenth_is_held_out(text: Path) -> None:
    windows = torch.cat([Text(str(text)).drawn(step, 0, 64, 16) for step in range(20)])
    assert torch.equal(windows.diff(dim=1), torch.ones_like(windows[:, 1:]))
    assert (int(windows.min()), int(windows.max())) == (0, 179)
    held_out = Text(str(text)).held_out(3, 10)
    assert held_out[:, 0].tolist() == [180, 185, 190]
    assert held_out[-1, -1] == 199


def test_a_short_text_and_an_empty_one_are_refused(text: Path) -> None:
    Text(str(text)).ready(20)
    with pytest.raises(BadInput, match="it has 200 bytes; a tenth of it is held out and must hold 21"):
        Text(str(text)).ready(21)
    (text.parent / "empty.txt").touch()
    with pytest.raises(BadInput, match=r"^task\.data\.path: '.*empty\.txt' cannot be used; the file is empty; name a"):
        Text(str(text.parent / "empty.txt"))


def test_a_file_that_changes_is_told_apart(text: Path) -> None:
    before = Text(str(text))
    text.write_bytes(bytes(range(1, 201)))
    assert before != Text(str(text))
    with pytest.raises(BadInput, match="has changed"):
        before.held_out(1, 5)
