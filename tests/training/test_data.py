"""A folder of captioned pictures, text and captions as numbers, and each way in which they can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
    lines = []
    for number in range(24):
        Image.new("RGB", (40, 24), (10 * number, 0, 255)).save(tmp_path / f"{number:02}.png")
        lines.append(json.dumps({"file_name": f"{number:02}.png", "text": f"A picture, number {number}"}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_pictures_come_with_their_captions(folder: Path) -> None:
    data = Folder(str(folder), words=8)
    drawn = data.drawn(0, 0, 20, 16)
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


def test_a_task_trains_on_it(folder: Path) -> None:
    task = TextToImage(Folder(str(folder), words=8), batch=4, picture=8, patch=4, width=16, depth=1, heads=2, euler_steps=2)
    batch = task.batch_of(3, 0)
    assert batch["tokens"].shape == (4, 8)
    samples = task.samples(task.model(0), 0)
    assert samples.score != samples.score  # there is no measure of what it shows
    assert len(samples.captions) == 2
    assert torch.isfinite(task.loss(task.model(0), task.held_out()))


def test_other_pictures_under_the_same_name_are_told_apart(folder: Path) -> None:
    before = describe(Folder(str(folder)))
    Image.new("RGB", (40, 24), (1, 2, 3)).save(folder / "05.png")
    after = describe(Folder(str(folder)))
    assert before["digest"] != after["digest"]
    assert before["path"] == after["path"]


def append(folder: Path, text: str) -> None:
    with (folder / "metadata.jsonl").open("a") as file:
        file.write(text)


def truncate(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "03.png")
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:4000])


def lengthen(folder: Path) -> None:
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace("A picture, number 3", "word " * 40))


SPOILT: dict[str, Callable[[Path], object]] = {
    "metadata.jsonl cannot be read": lambda folder: shutil.move(folder / "metadata.jsonl", folder / "elsewhere"),
    "it holds 0 images": lambda folder: [image.rename(image.with_suffix(".txt")) for image in folder.glob("*.png")],
    r"extra.png is not named in metadata.jsonl \(1 of 25\)": lambda folder: Image.new("RGB", (8, 8)).save(folder / "extra.png"),
    "03.png is named in metadata.jsonl, and there is no": lambda folder: shutil.move(folder / "03.png", folder / "elsewhere"),
    "03.png.*cannot be decoded": truncate,
    "03.png.*be decoded": lambda folder: (folder / "03.png").write_text("not an image"),
    "line 25 of metadata.jsonl is not": lambda folder: append(folder, "{oops\n"),
    "line 25 of metadata.jsonl is": lambda folder: append(folder, '{"file_name": "03.png", "text": " "}\n'),
    "line 25 of metadata": lambda folder: append(folder, '{"file_name": "./03.png", "text": "b"}\n'),
    "it has 40 words and a caption may have 32": lengthen,
}


@pytest.mark.parametrize("said", SPOILT)
def test_mistakes_are_refused_before_training(folder: Path, said: str) -> None:
    SPOILT[said](folder)
    with pytest.raises(BadInput, match=said) as caught:
        TextToImage(Folder(str(folder)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "nowhere/to/be/found"])
def test_no_folder_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match="name a folder of images"):
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


def test_frequent_words_come_first_and_a_caption_is_never_cut_off() -> None:
    words = Vocabulary.of(["A red fox, a dog.", "a red cat"], 8)
    assert words.words == ("a", "red", "cat", "dog", "fox")
    assert words.encode(["a cat barks"]).tolist() == [[2, 4, UNKNOWN, NULL, NULL, NULL, NULL, NULL]]
    with pytest.raises(BadInput, match="it has 3 words and a caption may have 2"):
        Vocabulary(("a",), 2).encode(["a a a"])
