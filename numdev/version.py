"""Which numdev this is."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version


@lru_cache(maxsize=1)
def package_version() -> str:
    """The installed version of numdev, or that of the source tree."""
    try:
        return version("numdev")
    except PackageNotFoundError:
        return "0+source"
