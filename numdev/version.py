"""Which numdev this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version of numdev, or that of the source tree."""
    try:
        return version("numdev")
    except PackageNotFoundError:
        return "0+source"
