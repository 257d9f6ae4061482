"""A folder of captioned pictures, text and captions as numbers, and each way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from numdev.errors import BadInput
from numdev.results.record import describe
from numdev.training.data import NULL, UNKNOWN, Folder, Text, Vocabulary
from numdev.training.tasks import TextToImage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 pictures of one colour each; the caption says how red."""
    for number in range(24):
        (tmp_path / f"A picture, number {number}").mkdir()
        Image.new("RGB", (40, 24), (10 * number, 0, 255)).save(tmp_path / f"A picture, number {number}" / "0.png")
    return tmp_path


def test_pictures_come_with_their_captions(folder: Path) -> None:
    drawn = Folder(str(folder)).drawn(0, 0, 20, 16)
    assert drawn.pictures.shape == (20, 3, 16, 16)
    for picture, caption in zip(drawn.pictures, drawn.captions, strict=True):
        expected = 10 * int(caption.split()[-1]) / 127.5 - 1
        assert picture[0, 3, 5].item() == pytest.approx(expected, abs=2**-22)  # two roundings in FP32
        assert (picture[2] == 1).all()


def test_a_pass_shows_each_picture_once_and_never_one_held_out(folder: Path) -> None:
    data = Folder(str(folder))
    steps = [data.drawn(step, 4, 11, 8).captions for step in range(4)]
    shown = [caption for step in steps for caption in step]
    held_out = set(data.held_out(99, 8).captions)
    assert len(held_out) == 2
    assert len(set(shown[:22])) == len(set(shown[22:])) == 22
    assert shown[:22] != shown[22:]
    assert not held_out & set(shown)
    assert data.drawn(2, 4, 11, 8).captions == steps[2]


def test_a_task_trains_on_it_and_other_pictures_under_its_name_are_told_apart(folder: Path) -> None:
    task = TextToImage(Folder(str(folder)), batch=4, picture=8, patch=4, width=16, depth=1, heads=2, euler_steps=2)
    assert task.batch_of(3, 0)["tokens"].shape == (4, 4)
    samples = task.samples(task.model(0), 0)
    assert samples.score != samples.score  # there is no measure of what it shows
    assert torch.isfinite(task.loss(task.model(0), task.held_out()))
    before = describe(task.data)
    Image.new("RGB", (40, 24), (1, 2, 3)).save(folder / "A picture, number 5" / "0.png")
    after = describe(Folder(str(folder)))
    assert before["digest"] != after["digest"]
    assert before["path"] == after["path"]


def test_what_cannot_be_used_is_refused_before_training(folder: Path) -> None:
    for path in ("", "nowhere/to/be/found"):
        with pytest.raises(BadInput, match="name a folder with a subfolder of images for each caption"):
            Folder(path)
    with pytest.raises(BadInput, match="its subfolders hold 0 images"):
        Folder(str(folder / "A picture, number 3"))
    noise, image = (
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8),
        folder / "A picture, number 3" / "0.png",
    )
    Image.fromarray(noise).save(image)
    for content in (image.read_bytes()[:4000], b"not an image"):
        image.write_bytes(content)
        with pytest.raises(BadInput, match="number 3/0.png.*cannot be decoded"):
            TextToImage(Folder(str(folder)))


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


def test_words_are_numbered_behind_those_that_are_none() -> None:
    assert Vocabulary(("a", "cat"), 4).encode(["A cat.", "a dog"]).tolist() == [[2, 3, NULL, NULL], [2, UNKNOWN, NULL, NULL]]
