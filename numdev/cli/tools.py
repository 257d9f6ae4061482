"""The commands without Hydra, `compare` and `studies`: settings as `name=value`, or as `--name value`."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from numdev.errors import BadInput, NumdevError, StoreError, one_of

_COMPARE = """\
Compares B, measured on another machine, version or kernel, with A. Points
match by study, scenario and labels."""
_COMPARED = """\
A point is worse if B / A lies above the tolerance significantly: replicates are
paired by seed where problem and baseline are the same, p is by Student's t on
the logarithm of the ratio, adjusted by Holm's method for the number of
comparisons, and has to be below 0.05. It is broken if A has a result and B
none, or zeros, or more NaN and Inf. Both are regressions, and so is a point
that B lacks. Points of equal bits are told apart and not tested. The change is
unknown where there is one replicate alone, where problem, baseline or seeds
differ, and where both sides hold NaN or Inf.

Exit code: 0; 1 for a regression; 2 for what cannot be used, or if compare.csv
cannot be written; 5 if there is no regression and B has outputs that are NaN,
Inf or zeros alone."""


class Parser(ArgumentParser):
    """Takes settings as `name=value`, as commands with Hydra do, or as `--name value`; an error is a `BadInput`."""

    def __init__(self, command: str, purpose: str, more: str = "", **settings: tuple[str, str]) -> None:
        """`settings` are by name the default and the meaning."""
        form: Any = RawDescriptionHelpFormatter
        super().__init__(f"numdev {command}", None, purpose, more, formatter_class=form, allow_abbrev=False)
        self.settings = settings
        if command == "compare":
            self.add_argument("folders", nargs="*", metavar="A B", help="two folders of results, as results= of other commands")
        group = self.add_argument_group("settings, as name=value or as --name value")
        for name, (default, text) in settings.items():
            words = f"{text} (default: {default})" if default else text
            group.add_argument(f"--{name}", default=default, type=lambda value: value.strip("[]"), metavar="VALUE", help=words)

    def read(self, arguments: list[str]) -> Namespace:
        """The settings and folders that these arguments give.

        Raises:
            BadInput: an argument that the command does not take.
        """
        flags = [f"--{text}" if "=" in text and text.partition("=")[0] in self.settings else text for text in arguments]
        parsed, unknown = self.parse_known_intermixed_args(flags)
        unknown += [text for text in getattr(parsed, "folders", []) if "=" in text and not Path(text).is_dir()]
        if unknown:
            hint = f"{one_of(unknown[0].lstrip('-').partition('=')[0], self.settings)}, or --help"
            raise BadInput(self.prog, unknown[0], hint if self.settings else "it takes no arguments")
        return parsed

    def error(self, message: str) -> NoReturn:
        """In place of argparse's own exit."""
        raise BadInput(self.prog, "", f"{message}; see --help")


COMPARE = Parser(
    "compare",
    _COMPARE,
    _COMPARED,
    study=("", "one study, or several as NAME,NAME; else all"),
    metric=("rmse", "where larger is worse: rmse, max_difference, max_ulp, ..., or latency of speed"),
    reference=("golden", "golden, golden_same_inputs or baseline"),
    out=("", "folder where compare.csv is written, with every comparison"),
    tolerance=(
        "1.0",
        "the ratio B / A up to which a change does not matter; latency needs one, as a run's replicates share its conditions",
    ),
)
STUDIES = Parser("studies", "Prints the name and the title of every study.")


def run(command: str, arguments: list[str]) -> int:
    """The exit code of a command: its own, 2 for what the user can mend, 1 for every other failure.

    Raises:
        SystemExit: with 0, after `--help`.
    """
    function, parser = COMMANDS[command]
    try:
        return function(parser.read(arguments))
    except NumdevError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, (BadInput, StoreError)) else 1


def _studies(_: Namespace) -> int:
    from numdev.cli.compose import composer, config_folder

    own = composer((config_folder(),))
    width = max(map(len, own.options("study"))) + 2
    for name in own.options("study"):
        print(fill(own.study(name)["title"], 80, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width))
    return 0


def _compare(settings: Namespace) -> int:
    from numdev.cli.exit_codes import BAD_OUTPUT, FAILED
    from numdev.cli.progress import output
    from numdev.report.comparison import REGRESSIONS, SIGNIFICANT, Criterion, compare, show, write
    from numdev.report.document.tables import bad_outputs

    folders = settings.folders
    if len(folders) == 1:
        raise BadInput("B", "", f"the second folder of results is missing: numdev compare {shlex.quote(folders[0])} B")
    if len(folders) != 2:
        raise BadInput("numdev compare", " ".join(folders[2:]), "give two folders of results, A and B, or --help")
    criterion = Criterion(settings.metric, settings.reference, tolerance(settings.tolerance))
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
    text = f"{count or 'no'} regression{'s' * (count > 1)} in {len(changes)} comparison{'s' * (len(changes) != 1)} ({judged})"
    console.print(text, markup=False)
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
    except BadInput as error:
        field, value = ("study", error.value) if error.field == "studies" else (side, folder)
        raise BadInput(field, value, error.hint) from None
    if trained := [name for name, manifest in results.manifests.items() if manifest["kind"] == TRAINING]:
        hint = f"{', '.join(trained)} compares weights of training runs, which numdev report shows; name others by study="
        raise BadInput(side, folder, hint)
    return results


COMMANDS: dict[str, tuple[Callable[[Namespace], int], Parser]] = {
    "compare": (_compare, COMPARE),
    "studies": (_studies, STUDIES),
}
