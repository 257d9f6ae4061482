"""The results of training runs: differences of weights, and beside them losses and what is known of each run as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from numdev.report.reading.frames import LABEL, Results, load
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.results.store import Store

KIND = "training"  # of measurement, as records state it
WHOLE = "model"  # the name under which all weights together stand beside the tensors
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


def at_the_end(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of all weights after the last step of training; runs that stopped before it have none.

    The last step is what the task states, or where rows do not have that, the last of any replicate of the point.
    """
    whole = rows[rows["tensor"] == WHOLE]
    last = whole["problem.steps"] if "problem.steps" in whole else whole.groupby("key")["step"].transform("max")
    return whole[whole["step"] == last]
