"""Every test starts from the same seed; `--shapes` enforces the annotations of what computes, shapes included."""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from filelock import FileLock
from hypothesis import Phase, settings
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in NumPy; Triton reads this when it is imported
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # where oneDNN has AMX, flash asks torch for AVX-512, and fails

if TYPE_CHECKING:
    from numdev.results.store import Store
    from tests.cli.commands import Command

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("numdev.attention.kernels", "numdev.attention.fused")  # by Triton and by torch, which read sources: a check has none


def computing() -> list[str]:
    """The packages and modules that work on tensors."""
    attention = (f"numdev.attention.{module.name}" for module in pkgutil.iter_modules([str(ROOT / "numdev/attention")]))
    return ["numdev.arithmetic", "numdev.measurement", "numdev.training", *(name for name in attention if name not in COMPILED)]


settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.register_profile("first failure", parent=settings.get_profile("repeatable"), phases=[Phase.generate])
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads of torch in each worker")
    parser.addoption("--shapes", action="store_true", help="check types and shapes at each call, which takes a third longer")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shapes"):
        install_import_hook(computing(), "beartype.beartype")
        ignored = "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
        config.addinivalue_line("filterwarnings", ignored)  # beartype picks the item of a tuple that it checks at random
    # One unless asked for: the tensors are small, and threads that wait for each other make the suite several times slower.
    torch.set_num_threads(config.getoption("--threads"))


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
    """Tests of the toy results stay together, as what they read of them is kept by their worker."""
    for item in items:
        if "toy_results" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("toy_results"))


@pytest.fixture
def numdev(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """`numdev("measure", "seeds=1")` runs that command in an empty folder, and forgets what it imported from there."""
    from numdev import sources
    from numdev.cli.main import main
    from tests.cli.commands import Ran

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sources, "_SEEN", {})
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, captured.out, captured.err)

    yield run
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def toy_results(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Store:
    """Every study of the paper at toy size, measured once. Tests read it; those that change something copy it."""
    from numdev.results.store import Store
    from tests.toy_studies import measure_all  # late: the hook above comes before numdev

    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent  # of all workers
    with FileLock(folder / "toy.lock"):
        if not (folder / "toy").is_dir():
            measure_all(folder / "unfinished").path.rename(folder / "toy")
    return Store(folder / "toy")
