"""`numdev compare`: two folders of results side by side, with an exit code for CI."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numdev.cli import plain
from numdev.cli.plain import Parser
from numdev.errors import BadInput

_MORE = """\
A point is worse if B / A lies above the tolerance significantly: replicates are paired by seed where problem and baseline are
the same, p is by Student's t on the logarithm of the ratio, adjusted by Holm's method for the number of comparisons, and has to
be below 0.05. It is broken if A has a result and B none, or zeros, or more NaN and Inf. Both are regressions, and so is a point
that B lacks. Points that A lacks are listed. Points of equal bits are told apart and not tested; one replicate alone has no
interval, and its change is unknown; so is that of a point with NaN or Inf on both sides.

Exit code: 0; 1 for a regression; 2 for what cannot be used, or if compare.csv cannot be written; 5 if there is no regression and
B has outputs that are NaN, Inf or zeros alone."""


def parser() -> Parser:
    """The arguments of the command."""
    purpose = "Compares B, measured on another machine, version or kernel, with A. Points match by study, scenario and labels."
    own = Parser("compare", purpose, _MORE)
    own.folders("A B", "two folders of results, as results= of other commands names them")
    own.setting("study", "", "one study, or several as NAME,NAME; all unless given", "NAME")
    own.setting("metric", "rmse", "where larger is worse: rmse, max_difference, max_ulp, ..., or latency, peak_bytes of speed")
    own.setting("reference", "golden", "golden, golden_same_inputs or baseline")
    own.setting("out", "", "where compare.csv is written, with every comparison", "FOLDER")
    ratio = "the ratio B / A up to which a change does not matter; latency needs one, as a run's replicates share its conditions"
    own.setting("tolerance", "1.0", ratio)
    return own


def run(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    return plain.run(_compare, parser(), arguments)


def _two(folders: list[str]) -> list[str]:
    """The folders A and B."""
    for folder in folders:
        if "=" in folder and not Path(folder).is_dir():
            raise parser().refusal(folder)
    if len(folders) == 1:
        raise BadInput("B", "", f"the second folder of results is missing: numdev compare {shlex.quote(folders[0])} B")
    if len(folders) != 2:
        raise BadInput("numdev compare", " ".join(folders[2:]), "give two folders of results, A and B, or --help")
    return folders


def _compare(settings: Namespace) -> int:
    from numdev.cli.exit_codes import BAD_OUTPUT, FAILED
    from numdev.cli.progress import output
    from numdev.report.comparison.changes import REGRESSIONS, SIGNIFICANT, Criterion, compare
    from numdev.report.comparison.tables import show, write
    from numdev.report.document.tables import bad_outputs

    folders, criterion = _two(settings.folders), Criterion(settings.metric, settings.reference, tolerance(settings.tolerance))
    studies = settings.study.split(",") if settings.study else None
    a, b = (_load(side, folder, studies) for side, folder in zip("AB", folders, strict=True))
    changes, console = compare(a, b, criterion), output()
    for side, results in (("A", a), ("B", b)):
        for note in (*filter(None, [bad_outputs(results)]), *results.notes):
            console.print(f"note: {side}: {note}", markup=False)
    show(changes, a, b, console)
    if settings.out:
        write(changes, Path(settings.out))
        console.print(f"report: {settings.out}/compare.csv", markup=False)
    count = int(changes["change"].isin(REGRESSIONS).sum())
    tests = int(changes["p"].notna().sum())
    judged = f"{tests} tested by {criterion.metric}, adjusted p < {SIGNIFICANT}, tolerance {criterion.tolerance:g}"
    console.print(
        f"{count or 'no'} regression{'s' * (count > 1)} in {len(changes)} comparison{'s' * (len(changes) != 1)} ({judged})",
        markup=False,
    )
    return FAILED if count else BAD_OUTPUT if bad_outputs(b) else 0


def tolerance(text: str) -> float:
    """The ratio up to which a change does not matter."""
    try:
        return float(text)
    except ValueError:
        raise BadInput("tolerance", text, "give the ratio up to which a change does not matter, such as 1.1") from None


def _load(side: str, folder: str, studies: Sequence[str] | None) -> Any:
    """One side's `Results`; what is wrong with them is said of A or B."""
    from numdev.report.reading.frames import TRAINING, load
    from numdev.results.store import Store

    try:
        results = load(Store(Path(folder)), studies)
        trained = [name for name, manifest in results.manifests.items() if manifest["kind"] == TRAINING]
        if trained:
            hint = f"{', '.join(trained)} compares weights of training runs, which numdev report shows; name others by study="
            raise BadInput(side, folder, hint)
        return results
    except BadInput as error:
        if error.field == "studies":
            raise BadInput("study", error.value, error.mend) from None
        raise BadInput(side, folder, error.mend) from None
