"""The table of a sweep on a terminal: its header once, then one line for each job as it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from numdev.results.record import Status

_GAP = "  "
_UNSAID = ("dry_run", "plot", "out")  # of what a header says that all jobs share
_STYLES = {"ok": "green", "unsupported": "yellow"}  # by the status in words: results are imported late


@dataclass(frozen=True)
class Headings:
    """What the figures of a command's jobs are.

    Attributes:
        title: one line above the table.
        columns: names and widths of the figures; behind them stands how the job ended.
    """

    title: str
    columns: Mapping[str, int]


HEADINGS = {
    "measure": Headings(
        "max_difference from golden, and variant / baseline with its 95 % interval",
        {"variant": 9, "baseline": 9, "variant / baseline": 19},
    ),
    "speed": Headings(
        "time of one call, and its root mean square error", {"ms": 8, "TFLOP/s": 8, "of matmul": 9, "MiB": 8, "RMSE": 8}
    ),
    "train": Headings(
        "difference of the weights from those of the reference after the last step",
        {"step": 6, "max_difference": 14, "relative_frobenius": 18, "same bits": 9},
    ),
}
PLANNED = Headings("estimates; nothing is measured", {"replicates": 10, "time": 9, "memory": 9})


def status_text(status: Status) -> tuple[str, str]:
    """The word and its style."""
    return status.value, style_of(status)


def style_of(status: Status) -> str:
    """How the word for a status is printed."""
    return _STYLES.get(status.value, "red")


@dataclass
class SweepTable:
    """Lays out the jobs of a sweep: settings that differ between jobs on the left, figures on the right.

    The launcher lays it out before the first job; jobs print their own lines, also in other processes.

    Attributes:
        headings: of the figures; None where jobs print no line, such as those of studies.
        axes: the settings that have columns of their own, with their widths; none before `lay_out`.
    """

    headings: Headings | None = None
    axes: dict[str, int] = field(default_factory=dict)

    def lay_out(self, jobs: Sequence[Sequence[str]], constant: Iterable[str]) -> None:
        """Give each setting of the jobs a column, but for those that the command line sets once for all jobs."""
        fixed = set(constant)
        for job in jobs:
            for name, value in map(_parted, job):
                if name not in fixed:
                    self.axes[name] = max(self.axes.get(name, len(name)), len(value))

    def header(self, job: Sequence[str]) -> Text:
        """Title, the settings that all jobs share, as one of them has them, and the names of the columns."""
        assert self.headings is not None
        shared = [text for text in job if _parted(text)[0] not in (*self.axes, *_UNSAID)]
        title = self.headings.title + (f"; {' '.join(shared)}" if shared and self.axes else "")
        names = [name.ljust(width) for name, width in self.axes.items()] or [self._label(job)]
        names += [name.rjust(width) for name, width in self.headings.columns.items()]
        return Text.assemble(title, "\n", (_GAP.join([*names, "status"]), "bold"))

    def line(self, job: Sequence[str], cells: Sequence[str], status: Status | None, remark: str) -> Text:
        """One job: `cells` are its figures, empty where it has none; then how it ended, None in a dry run, and a remark."""
        assert self.headings is not None
        own = dict(map(_parted, job))
        left = [own.get(name, "").ljust(width) for name, width in self.axes.items()] or [self._label(job)]
        widths = self.headings.columns.values()
        right = [cell.rjust(width) for cell, width in zip(cells or [""] * len(widths), widths, strict=True)]
        ended = [] if status is None else [status_text(status), ", " if remark else ""]
        return Text.assemble(_GAP.join([*left, *right, ""]), *ended, remark)

    @staticmethod
    def _label(job: Sequence[str]) -> str:
        return " ".join(job) or "defaults"


def _parted(text: str) -> tuple[str, str]:
    name, _, value = text.lstrip("+").partition("=")
    return name, value
