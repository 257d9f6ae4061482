"""`dry_run=true`: how many points a command would measure, and with how much memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from numdev.cli.progress import output
from numdev.measurement.runner import Runner
from numdev.results.environment import available_bytes
from numdev.results.store import Store
from numdev.results.study import StudyPoint, stored


@dataclass(frozen=True)
class Plan:
    """The work of a command.

    Attributes:
        points: of the study, or 1.
        there: of these, those whose figures are stored.
        replicates: of the others.
        bytes: that the largest of the others needs; 0 where it is not known.
        free: memory of the device.
    """

    points: int
    there: int
    replicates: int
    bytes: int
    free: int

    @staticmethod
    def of(points: Sequence[tuple[str, StudyPoint]], bench: Runner, store: Store, *, fresh: bool) -> Plan:
        """The plan of points with their keys."""
        left = [point for key, point in points if not point.refused and (fresh or stored(store, key) is None)]
        needed = max((bench.kind.needed_bytes(point.problem, point.variant) for point in left), default=0)
        there = len(points) - len(left) - sum(bool(point.refused) for _, point in points)
        return Plan(len(points), there, sum(point.seeds for point in left), needed, available_bytes(bench.device))

    def __add__(self, other: Plan) -> Plan:
        bytes, free = max(self.bytes, other.bytes), min(self.free, other.free)
        return Plan(self.points + other.points, self.there + other.there, self.replicates + other.replicates, bytes, free)

    def row(self) -> dict[str, str]:
        """Replicates and memory as text; no figure where nothing is left to measure."""
        memory = size_text(self.bytes) if self.bytes else "unknown"
        return {"replicates": str(self.replicates), "memory": memory if self.replicates else ""}

    def sentence(self) -> str:
        """All of it in words."""
        text = f"{self.points} point{'s' * (self.points != 1)}, {self.there} measured already"
        if not self.replicates:
            return f"{text}; nothing is left to measure."
        replicates, memory = self.row().values()
        return f"{text}; {replicates} replicates to measure: {memory} of the {size_text(self.free)} that are free."


def show(plans: Mapping[str, Plan]) -> None:
    """Print the plans of some studies, a row each, and their sum."""
    rows, (first, *others) = Table("study", "points", "there", "replicates", "memory", box=SIMPLE_HEAD), plans.values()
    for name, one in plans.items():
        rows.add_row(name, str(one.points), str(one.there), *one.row().values())
    console = output()
    console.print(rows)
    console.print(sum(others, first).sentence(), markup=False)
    console.print("Nothing was measured or written.", markup=False)


def size_text(size: int) -> str:
    """A number of bytes in the unit in which it has one to four digits, such as `37 MiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size / 1024:.3g} KiB"
