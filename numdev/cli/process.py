"""What a command hands to Hydra through the process: arguments and environment, as they are while Hydra reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def given(arguments: Sequence[str], **environment: str) -> Iterator[None]:
    """Set the arguments of the process and some variables of its environment; both are put back at the end."""
    argv, before = sys.argv, {name: os.environ.get(name) for name in environment}
    sys.argv = [argv[0], *arguments]
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
