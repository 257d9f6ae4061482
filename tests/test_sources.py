"""Which files are hashed into a key: all that a measurement can run, and nothing of documentation, command line or report."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from numdev.results.environment import environment
from numdev.results.record import key_of
from numdev.sources import KEEPS_OR_SHOWS, PACKAGE, computing, digest, digest_of
from tests.test_imports import MODULES, imports, of

HASHED = {
    ".".join(["numdev", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__") for path in computing()
}


def reached(roots: list[str]) -> set[str]:
    """Every module of numdev that these import, directly or not, also inside of functions.

    The package itself, whose names are all public ones, is not followed: no module of it asks it for one.
    """
    found, todo = set[str](), list(roots)
    while todo:
        name = todo.pop()
        if name in MODULES and name not in found | {"numdev"}:
            found.add(name)
            todo += [each.imported for each in imports(name)]
    return found


def test_all_that_a_measurement_can_run_is_hashed() -> None:
    """By the imports: from both benches, every implementation of attention, and what problems are made of."""
    roots = [*of("api", "measurement", "attention", "arithmetic", "results.record", "results.environment")]
    assert len(roots) > 30
    assert reached(roots) <= HASHED


def test_nothing_that_is_hashed_imports_what_is_not() -> None:
    left_out = {name for name in MODULES if name not in HASHED}
    for name in HASHED - {"numdev"}:  # the package itself offers the public names, and runs none of them
        assert not {each.imported for each in imports(name)} & left_out, name


def test_what_is_left_out_is_command_line_report_and_store() -> None:
    left_out = {name for name in MODULES if name not in HASHED}
    assert left_out == set(of(*(part.removesuffix("/").removesuffix(".py").replace("/", ".") for part in KEEPS_OR_SHOWS)))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what is hashed, and of some of what is not."""
    folder = tmp_path / "numdev"
    for path in [*computing(), *(PACKAGE / "cli").glob("*.py"), PACKAGE / "results" / "store.py"]:
        (folder / path.relative_to(PACKAGE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(PACKAGE))
    return folder


def test_an_edit_of_any_of_them_is_another_key_and_of_anything_else_the_same(package: Path) -> None:
    facts = environment(torch.device("cpu"))
    assert digest_of(package) == digest_of(PACKAGE) == digest() == facts["sources"]
    seen = {digest()}
    for path in computing(package):
        path.write_bytes(path.read_bytes() + b"\nEDITED = True\n")
        seen.add(digest_of(package))
    assert len({key_of({}, facts | {"sources": each}) for each in seen}) == 1 + len(computing())
    edited = digest_of(package)
    for name in ("cli/main.py", "results/store.py", "README.md", "precision.pyc"):
        (package / name).write_text("# edited")
    assert digest_of(package) == edited


def test_names_and_lengths_are_told_apart(package: Path) -> None:
    """A file that is renamed, or whose end moves to the next file, is another source."""
    before = digest_of(package)
    (package / "attention" / "mask.py").rename(package / "attention" / "mask2.py")
    renamed = digest_of(package)
    a, b = computing(package)[:2]
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(one + other)
    b.write_bytes(b"")
    assert len({before, renamed, digest_of(package)}) == 3


def test_it_is_fast_and_taken_once() -> None:
    """A quarter of a second is a tenth of what a command takes to start."""
    start = time.perf_counter()
    digest_of(PACKAGE)
    assert time.perf_counter() - start < 0.25
    digest()
    assert digest.cache_info().currsize == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_two_dirty_states_of_a_checkout_have_two_keys_and_a_commit_of_documentation_the_same(package: Path) -> None:
    """What a process says of its own sources, in a checkout of which it knows nothing but the files."""
    root = package.parent

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)

    def key() -> tuple[str, str]:
        command = "import torch; from numdev.results.record import key_of; "
        command += "from numdev.results.environment import environment; "
        command += "e = environment(torch.device('cpu')); print(e['revision'], key_of({}, e))"
        ran = subprocess.run(
            [sys.executable, "-c", command], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, check=True
        )
        revision, found = ran.stdout.decode().split()
        return revision, found

    shutil.copy(PACKAGE / "__init__.pyi", package)
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    clean = key()
    (root / "README.md").write_text("documentation")
    git("add", ".")
    git("commit", "-m", "documentation")
    documented = key()
    assert documented[0] != clean[0]
    assert documented[1] == clean[1]
    states = []
    for factor in ("2.0", "3.0"):
        text = (PACKAGE / "attention" / "tiling.py").read_text()
        (package / "attention" / "tiling.py").write_text(text + f"\nFACTOR = {factor}\n")
        states.append(key())
    assert states[0][0] == states[1][0]
    assert states[0][0].endswith("-dirty")
    assert len({clean[1], states[0][1], states[1][1]}) == 3
