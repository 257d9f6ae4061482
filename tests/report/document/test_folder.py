from __future__ import annotations

import shutil
from pathlib import Path
from threading import Thread

import pytest

from numdev.errors import BadInput, StoreError
from numdev.report.document.folder import MANIFEST, listed, refuse_other, replacing

Files = dict[str, str]


def write(out: Path, files: Files, results: str = "results", studies: list[str] | None = None) -> None:
    with replacing(out, out.parent / results, studies) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def read(out: Path) -> Files:
    own = MANIFEST, ".lock"
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file() and path.name not in own}


FIRST = {"claims.md": "1", "report.pdf": "1", "figures/a.svg": "1", "figures/b.svg": "1"}
LATER = {"claims.md": "2", "figures/b.svg": "2", "speed/c.csv": "2"}


def test_nothing_of_the_last_report_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, FIRST)
    assert read(out) == FIRST
    write(out, LATER)
    assert read(out) == LATER
    manifest = (out / MANIFEST).read_bytes()
    write(out, FIRST)
    write(out, LATER)
    assert (out / MANIFEST).read_bytes() == manifest


def test_a_report_waits_for_another_that_is_written(tmp_path: Path) -> None:
    out, ended = tmp_path / "out", list[str]()

    def second() -> None:
        with replacing(out, tmp_path / "results", None) as folder:
            ended.append("second")
            (folder / "claims.md").write_text("2")

    other = Thread(target=second)
    with replacing(out, tmp_path / "results", None) as folder:
        other.start()
        other.join(0.3)  # long enough to come this far, were there no lock
        ended.append("first")
        (folder / "claims.md").write_text("1")
    other.join()
    assert ended == ["first", "second"]
    assert read(out) == {"claims.md": "2"}


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    own = {"notes.md": "mine", "figures/own.svg": "mine"}
    (out / "figures").mkdir()
    for name, text in own.items():
        (out / name).write_text(text)
    write(out, FIRST)
    write(out, LATER)
    assert read(out) == {**own, **LATER}


@pytest.mark.parametrize(("results", "studies"), [("others", None), ("results", ["fig3"])])
def test_another_report_is_not_touched(tmp_path: Path, results: str, studies: list[str] | None) -> None:
    out = tmp_path / "out"
    write(out, FIRST)
    with pytest.raises(BadInput, match=r"^out: .*holds the report on everything in .*results; give another folder, or remove"):
        write(out, LATER, results, studies)
    assert read(out) == FIRST
    shutil.rmtree(out)
    write(out, LATER, results, studies)
    with pytest.raises(BadInput, match="^out: "):
        refuse_other(out, tmp_path / "results", None)
    refuse_other(out, tmp_path / results, studies)


def test_an_error_leaves_the_last_report_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, FIRST)
    with pytest.raises(FileExistsError):
        write(out, {"claims.md": "half", "claims.md/below": ""})
    assert read(out) == FIRST
    assert {path.name for path in out.iterdir()} == {"claims.md", "report.pdf", "figures", MANIFEST, ".lock"}


def test_a_folder_that_holds_report_and_results_may_move(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    write(tmp_path / "here" / "out", FIRST)
    (tmp_path / "here").rename(tmp_path / "there")
    write(tmp_path / "there" / "out", LATER)
    assert read(tmp_path / "there" / "out") == LATER


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"^out: .*file cannot be written \(Not a directory\)"):
        refuse_other(tmp_path / "file" / "below", tmp_path, None)
    assert listed(tmp_path / "file") == []
