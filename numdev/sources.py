"""Which numdev this is: its version, and the modules that a measurement can run, by what identifies them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
KEEPS_OR_SHOWS = (
    "cli/",
    "explorer/",
    "report/",
    "results/store.py",
    "results/study.py",
    "training/recorders.py",
)
"""Modules that no measurement runs. Each states what is measured, keeps it or shows it. No other module imports these."""


def computing(package: Path = PACKAGE) -> list[Path]:
    """The Python files of the package that a measurement can run, in the order of their names."""
    names = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return [names[name] for name in sorted(names) if not name.startswith(KEEPS_OR_SHOWS)]


def digest_of(package: Path) -> str:
    """SHA-256 of the names and the bytes of `computing(package)`: a comment counts too, documentation beside them does not."""
    sources = hashlib.sha256()
    for path in computing(package):
        data = path.read_bytes()
        sources.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data)
    return sources.hexdigest()


@lru_cache(maxsize=1)
def digest() -> str:
    """That of numdev as it was when this process first asked for it, which is when it imports what measures."""
    return digest_of(PACKAGE)


def package_version() -> str:
    """The installed version of numdev, or that of the source tree."""
    try:
        return version("numdev")
    except PackageNotFoundError:
        return "0+source"
