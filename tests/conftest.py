"""Shape and type annotations are enforced while the tests run, and every test starts from the same seed."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, settings
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in NumPy; Triton reads this when it is imported

# All but what is compiled: Triton and numba compile the source of a function, and a checker wrapped around it has none.
ROOT = Path(__file__).resolve().parent.parent / "numdev"


def checked(folder: Path, package: str) -> list[str]:
    """The modules and packages of a folder."""
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)])]


# Results and what reads them hold no tensors, and are most of the calls of a test that measures and reports.
NO_TENSORS = ("numdev.results", "numdev.report", "numdev.cli")

COMPILED = ("numdev.attention.kernels", "numdev.attention.compiled")
install_import_hook(
    [name for name in checked(ROOT, "numdev") if name not in ("numdev.attention", "numdev.__main__", *NO_TENSORS)]
    + [name for name in checked(ROOT / "attention", "numdev.attention") if name not in COMPILED]
    + ["numdev.attention.compiled.rules", "numdev.attention.compiled.run"],
    "beartype.beartype",
)

if TYPE_CHECKING:
    from numdev.results.store import Store

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.register_profile("first failure", parent=settings.get_profile("repeatable"), phases=[Phase.generate])
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads of torch in each worker")


def pytest_configure(config: pytest.Config) -> None:
    # One unless asked for: the tensors are small, and threads that wait for each other make the suite several times slower.
    torch.set_num_threads(config.getoption("--threads"))
    ignored = "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
    config.addinivalue_line("filterwarnings", ignored)  # beartype picks the item of a tuple that it checks at random


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: on a GPU if there is one, else interpreted."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Commands configure logging for their process; here many share one."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    known = {logger: logger.level for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)}
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for logger in root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.setLevel(known.get(logger, logging.NOTSET))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the toy results stay together, so that one worker alone measures them."""
    for item in items:
        if "toy_results" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("toy_results"))


@pytest.fixture(scope="session")
def toy_results(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every study of the paper at toy size, measured once. Tests read it; those that change something copy it."""
    from tests.toy_studies import measure_all  # numdev must not be imported before the hook above is in place

    path: Path = tmp_path_factory.mktemp("toy") / "results"
    return measure_all(path)
