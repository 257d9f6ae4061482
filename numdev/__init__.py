"""numdev: how far fast attention deviates numerically from exact attention, and which step and format cause it.

    >>> import numdev as nd
    >>> problem = nd.Problem(nd.Distribution(nd.Kind.UNIFORM), nd.Shape(queries=1024, keys=1024, head_dim=64))
    >>> nd.measure(problem, nd.Tiled(nd.Precision.parse("bf16"), nd.Tiling(br=64, bc=64)))

Implements "Is Flash Attention Stable?" (Golden et al. 2024) and goes beyond it.
"""

from __future__ import annotations

import lazy_loader

from numdev.sources import package_version

__version__ = package_version()

# `__init__.pyi` lists the public names; each is imported when it is first asked for: `numdev --help` does not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
