"""What a measurement gets besides its point: folders in which it may keep something, and who is told of its progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

Told = Callable[[int, int], None]  # replicates of a point done, replicates in all
Within = Callable[[int, int, str], None]  # steps of the replicate at hand that are done, in all, and what it does


class Where(TypedDict, total=False):
    """Arguments of a measurement by name; see `numdev.measurement.protocol.Context`."""

    folder: Path | None
    shared: Path | None
    told: Told | None
    within: Within | None
