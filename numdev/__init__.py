"""numdev: how far fast attention strays numerically from exact attention, and which step and format is to blame.

    >>> import numdev as nd
    >>> problem = nd.Problem(nd.Distribution(nd.Kind.UNIFORM), nd.Shape(queries=1024, keys=1024, head_dim=64))
    >>> nd.measure(problem, nd.Tiled(nd.Precision.parse("bf16"), nd.Tiling(br=64, bc=64)))

Implements "Is Flash Attention Stable?" (Golden et al. 2024) and goes beyond it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from numdev.version import package_version

if TYPE_CHECKING:
    from numdev.public import *  # noqa: F403

__version__ = package_version()


class _Package(ModuleType):
    """Imports `numdev.public` when one of its names is first asked for: `numdev --help` need not wait for torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'numdev' has no attribute {name!r}")
        public = importlib.import_module("numdev.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module 'numdev' has no attribute {name!r}")
        return getattr(public, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
