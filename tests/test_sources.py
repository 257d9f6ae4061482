"""What is hashed into a key: all of numdev that a measurement can run, and the sources of a user's function or class."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev import BadInput, Custom, Distribution, Exact, Problem, Shape, sources
from numdev.results.environment import environment
from numdev.results.record import key_of
from numdev.sources import PACKAGE, computing, digest, digest_of, loaded
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
    roots = of("api", "measurement", "attention", "arithmetic", "results.record", "results.environment")
    roots.remove("numdev.measurement.studies")  # measures many points, each as it is measured by itself
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


FIELD = "attention.function"
PROBLEM = Problem(Distribution(), Shape(queries=4, keys=4, head_dim=4))
FUNCTION = "def f(q, k, v, mask, scale):\n    return v[..., :1, :].expand(v.shape) * {factor}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from, whose modules are forgotten again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "_SEEN", {})
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


STAMP = iter(range(10**9, 2 * 10**9, 10))


def write(path: Path, text: str) -> None:
    """The file with a time of its own: Python tells sources of one size apart by the second in which they were written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (stamp := next(STAMP), stamp))


def fresh(name: str) -> str:
    """The digest as a new process would tell it."""
    for module in [own for own in sys.modules if own.partition(".")[0] in ("mine", "pkg", "helper")]:
        del sys.modules[module]
    importlib.invalidate_caches()
    sources._SEEN.clear()
    return loaded(name, FIELD).digest


TREE = {
    "pkg/__init__.py": "",
    "pkg/mine.py": "from pkg.near import g\nfrom . import beside\nimport pkg.sub.deep as deep\n\n"
    "def f(*args, **kw):\n    from .late import h\n    import helper\n",
    "pkg/near.py": "from pkg.second import *\ng = 1\n",
    "pkg/second.py": "x = 1\n",
    "pkg/beside.py": "",
    "pkg/late.py": "def h(): pass\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/deep.py": "from ..other import y\n",
    "pkg/other.py": "y = 1\n",
    "helper.py": "",
}


@pytest.mark.parametrize("edited", TREE)
def test_every_module_that_it_imports_counts(folder: Path, edited: str) -> None:
    """Directly, through others, relatively, by star, inside of functions, from the package or the folder beside it."""
    for name, text in TREE.items():
        write(folder / name, text)
    before = fresh("pkg.mine:f")
    for other in ("pkg/unused.py", "pkg/notes.md", "unused.py", "pkg/near.txt"):
        write(folder / other, "EDITED = 1\n")
    assert fresh("pkg.mine:f") == before, "nothing else counts"
    write(folder / edited, TREE[edited] + "EDITED = 1\n")
    assert fresh("pkg.mine:f") != before


class TestSessions:
    @pytest.mark.parametrize("edited", ["mine", "helper"])
    def test_an_edit_of_it_or_of_what_it_imports_is_refused_until_it_is_reloaded(self, folder: Path, edited: str) -> None:
        texts = {"helper": "factor = 1.0\n", "mine": "import helper\n" + FUNCTION.format(factor="helper.factor * 1.0")}
        for name, text in texts.items():
            write(folder / f"{name}.py", text)
        before, q = Custom("mine:f"), torch.ones(1, 1, 2, 2)
        write(folder / f"{edited}.py", texts[edited].replace("1.0", "2.0"))
        words = rf"^attention.function: .*{edited}.py has changed since {edited} was imported; .*reload"
        with pytest.raises(BadInput, match=words):
            Custom("mine:f")
        importlib.reload(sys.modules[edited])
        with pytest.raises(BadInput, match="a module of it was reloaded since it was named; make the Custom again"):
            before(q, q, q, PROBLEM.mask)
        after = Custom("mine:f")
        assert after.digest != before.digest
        assert float(after(q, q, q, PROBLEM.mask).out[0, 0, 0, 0]) == 2.0

    def test_what_has_not_changed_is_accepted_again(self, folder: Path) -> None:
        write(
            folder / "mine.py",
            "import dataclasses\nimport functools\n\n@dataclasses.dataclass\nclass D:\n    x: int = 1\n\n"
            "def deco(g):\n    @functools.wraps(g)\n    def inner(*a, **k):\n        return g(*a, **k)\n    return inner\n\n"
            "g = lambda x: [y for y in range(x)]\n\n@deco\n" + FUNCTION.format(factor=1.0),
        )
        importlib.import_module("mine")
        digests = {Custom("mine:f").digest for _ in range(3)}
        importlib.reload(sys.modules["mine"])
        assert {Custom("mine:f").digest} == digests
        sys.modules["mine"].f(*[torch.ones(1, 1, 2, 2)] * 3, mask=None, scale=1.0)

    def test_a_function_that_is_in_no_file_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main: Any = sys.modules["__main__"]
        monkeypatch.setattr(main, "f", lambda: None, raising=False)
        monkeypatch.setattr(main, "__file__", None, raising=False)
        with pytest.raises(BadInput, match="write the function to a file"):
            loaded("__main__:f", FIELD)


class TestWithoutSource:
    def test_of_python_by_its_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = loaded("math:sqrt", FIELD).digest
        assert loaded("math:sin", FIELD).digest != before
        monkeypatch.setattr(platform, "python_version", lambda: "3.99")
        built_in = loaded("sys:getsizeof", FIELD).digest
        monkeypatch.undo()
        assert loaded("sys:getsizeof", FIELD).digest != built_in

    def test_of_a_package_that_it_imports_the_version_counts(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(folder / "mine.py", "import scipy\nimport jaxtyping\nimport torch\nimport os\n" + FUNCTION.format(factor=1.0))
        _, parts = sources._walk("mine") if importlib.import_module("mine") else ({}, set())
        assert parts == {"scipy", "jaxtyping"}
        before, real = loaded("mine:f", FIELD).digest, sources._version
        newer: Callable[[str], str] = lambda top: "99" if top == "scipy" else real(top)  # noqa: E731
        monkeypatch.setattr(sources, "_version", newer)
        assert loaded("mine:f", FIELD).digest != before
        assert real("scipy") == importlib.import_module("scipy").__version__


@pytest.mark.parametrize("start", [["script.py"], ["-m", "script"]])
def test_a_class_of_a_script_is_known_by_the_script(folder: Path, start: list[str]) -> None:
    text = "from dataclasses import dataclass\nfrom numdev.sources import foreign, loaded\n@dataclass(frozen=True)\nclass Mine:\n"
    text += "    x: int = {}\ndef f():\n    pass\nprint(foreign(Mine(5))['sources'], loaded('__main__:f', 'f').digest)\n"
    result = []
    for default in (1, 1, 2):
        write(folder / "script.py", text.format(default))
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        ran = subprocess.run([sys.executable, *start], cwd=folder, env=environment, capture_output=True, text=True, check=True)
        result.append(ran.stdout.split())
    assert result[0] == result[1]
    assert not set(result[0]) & set(result[2])


def test_a_class_of_ones_own_is_known_by_its_source(folder: Path) -> None:
    """As a variant: fields alone would not tell an edit of what it computes."""
    text = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine:\n    x: int = {}\n"
    write(folder / "mine.py", text.format(1))
    before = sources.foreign(PROBLEM, importlib.import_module("mine").Mine(5), None)
    assert sources.foreign(PROBLEM, Exact()) == {}
    write(folder / "mine.py", text.format(2))
    stale = sys.modules["mine"].Mine(5)
    with pytest.raises(BadInput, match="has changed since mine was imported"):
        sources.foreign(stale)
    importlib.reload(sys.modules["mine"])
    assert sources.foreign(sys.modules["mine"].Mine(5)) != before
