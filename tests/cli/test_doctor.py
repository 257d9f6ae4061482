"""The command: a folder that a loop has written, a function of one's own, the page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numdev.cli.main import main
from tests.training.spiking import CASES

SETUP = """\
from pathlib import Path
from tests.training.spiking import CASES
def healthy(): return CASES["none"].set_up(Path("made"))
def spiking(): return CASES["learning rate"].set_up(Path("made"))
def wrong(): return 1
"""


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"loop_{tmp_path.name}.py").write_text(SETUP)
    return tmp_path


@pytest.mark.slow
def test_a_folder_that_a_loop_has_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches, step = CASES["ties"].set_up(here / "made")
    for batch in batches:
        batches.note(step(batch))
    assert code("made") == 1
    first, *replays, last = capsys.readouterr().out.splitlines()
    assert first == f"ATTENTION: {batches.diagnosis.sentence}"
    assert replays[3].split(maxsplit=2)[::2] == ["stays", "exact attention"]
    assert last == "page: made/doctor.html"
    page = (here / "made/doctor.html").read_text()
    assert batches.diagnosis.sentence in page
    assert all(each.title in page for each in batches.diagnosis.replays)
    assert code("made") == 1
    assert (here / "made/doctor.html").read_text() == page


def test_heads_of_all_processes_are_shown_and_none_may_lack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = {"step": 1, "layer": "", "call": 0, "head": 0}
    replay = {"title": "the run", "losses": [1.0, None], "peak": None, "spikes": True}
    whole = {"verdict": "undecided", "sentence": "It is open.", "spike": 1, "first": 0, "limit": 2.0, "replays": [replay]}
    for rank, error in enumerate((0.25, 0.75)):
        (here / f"made/rank{rank}").mkdir(parents=True)
        (here / f"made/rank{rank}/diagnosis.json").write_text(json.dumps(whole | {"heads": [head | {"error": error}]}))
    assert code("made") == 4
    page = (here / "made/doctor.html").read_text()
    assert page.index("<td>0.75<") < page.index("<td>0.25<")
    (here / "made/rank2").mkdir()
    assert code("made") == 2
    assert "what: 'made' cannot be used; rank2 holds no diagnosis; give the folder" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("healthy", "NO SPIKE: No spike in"), ("spiking", "NOT ATTENTION: The loss is ")])
def test_a_function_of_ones_own(name: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(f"loop_{here.name}:{name}") == 0
    assert capsys.readouterr().out.startswith(words)
    assert code(f"loop_{here.name}:{name}") == 2
    assert "it holds a diagnosis, which numdev doctor shows" in capsys.readouterr().err


def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what, words in (
        ("absent", "absent holds no diagnosis"),
        ("absent:setup", "its module cannot be imported"),
        (f"loop_{here.name}:wrong", "return an nd.doctor, and a function"),
    ):
        assert code(what) == 2
        assert words in capsys.readouterr().err
    assert code() == 2
    assert code("--help") == 0
    assert "usage: numdev doctor WHAT\n" in capsys.readouterr().out
