"""The results of training runs: differences of weights, and beside them losses and what is known of each run as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from numdev.report.reading.frames import LABEL, Results, load
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.results.store import Store

KIND = "training"  # of measurement, as records state it
LOSS, RUN, WATCH = "loss", "run", "watch"  # the tables beside that of weights; the last of runs that are watched


def load_training(store: Store, studies: Sequence[str] | None = None) -> Results:
    """Loads the studies of training; `rows` are those of the weights, `further` has the tables `loss`, `run` and `watch`.

    Every setting of a point stands in its rows: by them a run differs from its reference.

    Raises:
        BadInput: as `load`.
    """
    return load(
        store, studies, kind=KIND, tables=(LOSS, RUN, WATCH), axes=(LABEL, ENTRY_ROLE, "problem.", "variant.", "baseline.")
    )
