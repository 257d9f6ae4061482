"""Captioned pictures of a folder, text, and each way in which they can be wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from numdev.errors import BadInput
from numdev.results.record import describe
from numdev.training.data import Folder, Text
from numdev.training.tasks import TextToImage


def pictures(folder: Path) -> Folder:
    """24 pictures of one colour each; the caption says how red."""
    for number in range(24):
        (folder / f"A picture, number {number}").mkdir()
        Image.new("RGB", (40, 24), (10 * number, 0, 255)).save(folder / f"A picture, number {number}" / "0.png")
    return Folder(str(folder))


def test_pictures_come_with_their_captions_and_no_step_sees_one_held_out(tmp_path: Path) -> None:
    folder, tokens = pictures(tmp_path), dict[str, tuple[int, ...]]()
    parts = [folder.held_out(99, 16), *(folder.drawn(step, seed, 50, 16) for step in range(4) for seed in (0, 1))]
    held_out, drawn = set(parts[0].captions), {caption for part in parts[1:] for caption in part.captions}
    assert (len(held_out), held_out & drawn) == (2, set())
    assert held_out | drawn == {f"a picture, number {number}" for number in range(24)}
    for part in parts:
        for picture, row, caption in zip(part.pictures, part.tokens.tolist(), part.captions, strict=True):
            expected = 10 * int(caption.split()[-1]) / 127.5 - 1
            assert picture[0, 3, 5].item() == pytest.approx(expected, abs=2**-22)  # two roundings in FP32
            assert (picture.shape, picture[2].min()) == ((3, 16, 16), 1)
            assert tokens.setdefault(caption, tuple(row)) == tuple(row)
    assert len(set(tokens.values())) == 24
    assert {token for row in tokens.values() for token in row} == set(range(1, folder.tokens)), "no caption is padded"
    assert torch.equal(folder.drawn(3, 1, 50, 16).pictures, parts[-1].pictures)


def test_a_task_trains_on_pictures_and_others_under_their_name_are_told_apart(tmp_path: Path) -> None:
    folder = pictures(tmp_path)
    task = TextToImage(folder, batch=4, picture=8, patch=4, width=16, depth=1, heads=2, euler_steps=2)
    assert math.isnan(task.samples(task.model(0), 0).score), "there is no measure of what it shows"
    assert torch.isfinite(task.loss(task.model(0), task.held_out()))
    image = tmp_path / "A picture, number 5" / "0.png"
    Image.effect_noise((40, 24), 90).save(image)
    assert describe(Folder(str(tmp_path)))["digest"] != describe(folder)["digest"]
    for content in (image.read_bytes()[:400], b"not an image"):
        image.write_bytes(content)
        with pytest.raises(BadInput, match="number 5/0.png.*cannot be decoded"):
            TextToImage(Folder(str(tmp_path)))
    for path in ("", "nowhere", str(image.parent)):
        with pytest.raises(BadInput, match="a folder with a subfolder of images for each caption; this has 0 images"):
            Folder(path)


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
