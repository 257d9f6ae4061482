"""Which files are hashed into a key: all that a measurement can run, and nothing of documentation, command line or report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from numdev.results.environment import environment
from numdev.results.record import key_of
from numdev.sources import PACKAGE, computing, digest, digest_of
from tests.test_imports import MODULES, imports, of

HASHED = {
    ".".join(["numdev", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__") for path in computing()
}


def reached(roots: list[str]) -> set[str]:
    """Every module of numdev that these import, directly or not, also inside of functions.

    The package itself, whose names are all public ones, is not followed: no module of it asks it for one.
    """
    result, todo = set[str](), list(roots)
    while todo:
        name = todo.pop()
        if name in MODULES and name not in result | {"numdev"}:
            result.add(name)
            todo += [each.imported for each in imports(name)]
    return result


def test_all_that_a_measurement_can_run_is_hashed() -> None:
    """By the imports: from both benches, every implementation of attention, and what problems are made of."""
    roots = [*of("api", "measurement", "attention", "arithmetic", "results.record", "results.environment")]
    assert len(roots) > 30
    assert reached(roots) <= HASHED


def test_nothing_that_is_hashed_imports_what_is_not() -> None:
    left_out = {name for name in MODULES if name not in HASHED}
    for name in HASHED - {"numdev"}:  # the package itself offers the public names, and runs none of them
        assert not {each.imported for each in imports(name)} & left_out, name


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
