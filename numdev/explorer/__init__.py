"""The explorer of the notebooks: two policies side by side, each with the command that measures the same point.

Widgets and their pictures alone live here: they configure as `numdev.cli` does, and measure by `numdev.measurement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numdev.errors import Unsupported

if TYPE_CHECKING:
    from numdev.explorer.widgets import Explorer


def explore(
    left: Mapping[str, Any] | None = None,
    right: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    *,
    metric: str = "max_difference",
    seed: int = 0,
) -> Explorer:
    """Widgets for two policies of tiled attention on the same inputs, drawn side by side with common axes.

    Settings have their names and values of the command line, as in `{"precision": "bf16", "precision.row_sum": "fp32"}`. Those
    that have no widget are honoured too. Below the picture stand the two commands that measure the same points.

    Args:
        left: settings of the policy on the left; every step in BF16 unless given.
        right: those of the policy on the right; BF16 with FP32 inside unless given.
        shared: settings of both, such as `{"problem": "captured", "problem.n": 128, "seeds": 3, "device": "cpu"}`.
        metric: of `Deviation`.
        seed: the replicate whose errors are drawn element by element; the metric is drawn over all replicates.

    Raises:
        BadInput: for a setting that does not exist or a value that cannot be used; afterwards that is a message in the widget.
        Unsupported: where ipywidgets is not installed.
    """
    try:
        from numdev.explorer.widgets import Explorer
    except ModuleNotFoundError as error:
        if error.name != "ipywidgets":
            raise
        raise Unsupported("explore", "it needs ipywidgets; install it with pip install 'numdev[notebooks]'") from None
    return Explorer(left or {"precision": "bf16"}, right or {"precision": "kernel_bf16"}, shared or {}, metric, seed)
