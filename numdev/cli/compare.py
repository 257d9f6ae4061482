"""`numdev compare`, which takes two folders and so no arguments of Hydra: settings as `name=value`, or as `--name value`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from numdev.errors import BadInput, one_of

_PURPOSE = """\
Compares B, measured on another machine, version or kernel, with A. Points
match by study, scenario and labels."""
_RULES = """\
A point is worse if B / A lies above the tolerance significantly: replicates are
paired by seed where problem and baseline are the same, p is by Student's t on
the logarithm of the ratio, adjusted by Holm's method for the number of
comparisons, and has to be below 0.05. It is broken if A has a result and B
none, or zeros, or more NaN and Inf. Both are regressions, and so is a point
that B lacks. Points of equal bits are told apart and not tested. A point is the
same if the 95 % interval of B / A lies within the tolerance; if it is neither
worse nor better nor the same, a change is not shown. The change is unknown
where there is one replicate alone, where problem, baseline or seeds differ, and
where both sides hold NaN or Inf.

Exit code: 0 if no regression was shown; 1 for a regression; 2 for what cannot
be used, if compare.csv cannot be written, or if nothing could be tested: no
point was tested, has equal bits or failed in A alone; 5 if there is no
regression and B has outputs that are NaN, Inf or zeros alone."""
SETTINGS: dict[str, tuple[Any, str]] = {  # default and meaning
    "study": ("", "one study, or several as NAME,NAME; else all"),
    "metric": ("rmse", "where larger is worse: rmse, max_difference, max_ulp, ..., or latency of speed"),
    "reference": ("golden", "golden, golden_same_inputs or baseline"),
    "out": ("", "folder where compare.csv is written, with every comparison"),
    "tolerance": (
        1.0,
        "ratio B / A up to which a change does not matter; latency needs one: a run's replicates share its conditions",
    ),
}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parsed(
    prog: str,
    about: tuple[str, str],
    places: Mapping[str, str],
    settings: Mapping[str, tuple[Any, str]],
    arguments: Sequence[str],
) -> Namespace:
    """The arguments in their `places` and the settings of a command that is not Hydra's, both by name with their meanings.

    The help states `about` above and below them. A setting has the type of its default.

    Raises:
        BadInput: for an argument that the command does not take.
        SystemExit: with 2 where one is missing or has no such value, with 0 after `--help`.
    """
    form: Any = RawDescriptionHelpFormatter
    usage = " ".join([prog, *map(str.upper, places), *["[setting=value ...]"] * bool(settings)])
    parser = _Parser(prog, usage, *about, formatter_class=form, allow_abbrev=False)
    for name, text in places.items():
        parser.add_argument(name, metavar=name.upper(), help=text)
    group = parser.add_argument_group("settings, as name=value or --name value")
    for name, (default, text) in settings.items():
        words = f"{text} (default: {default})" if default else text
        group.add_argument(f"--{name}", default=default, type=type(default), metavar="VALUE", help=words)
    flags = [f"--{text}" if "=" in text and text.partition("=")[0] in settings else text for text in arguments]
    values, unknown = parser.parse_known_intermixed_args(flags)
    if unknown:
        hint = one_of(unknown[0].lstrip("-").partition("=")[0], settings)
        if not unknown[0].startswith("-") and "=" not in unknown[0]:
            hint = f"give one {', one '.join(map(str.upper, places))}, and settings as name=value"
        raise BadInput(parser.prog, unknown[0], f"{hint}, or --help")
    return values


def run(arguments: Sequence[str]) -> int:
    """The exit code, as `_RULES` states it. Raises NumdevError for what cannot be compared or written, and as `parsed` does."""
    from numdev.cli.exit_codes import BAD_INPUT, BAD_OUTPUT, FAILED
    from numdev.cli.progress import output
    from numdev.report.comparison import REGRESSIONS, SIGNIFICANT, Criterion, compare, show, untested, write
    from numdev.report.document.tables import bad_outputs

    places = dict.fromkeys("ab", "a folder of results, as results= of other commands")
    settings = parsed("numdev compare", (_PURPOSE, _RULES), places, SETTINGS, arguments)
    criterion = Criterion(settings.metric, settings.reference, settings.tolerance)
    studies = settings.study.strip("[]").split(",") if settings.study else None
    a, b = _load("A", settings.a, studies), _load("B", settings.b, studies)
    changes, console = compare(a, b, criterion), output()
    for side, results in (("A", a), ("B", b)):
        for note in (*filter(None, [bad_outputs(results)]), *results.notes):
            console.print(f"note: {side}: {note}", markup=False)
    show(changes, a, b, console)
    if settings.out:
        write(changes, Path(settings.out))
        console.print(f"report: {settings.out}/compare.csv", markup=False)
    count, tests = int(changes["change"].isin(REGRESSIONS).sum()), int(changes["p"].notna().sum())
    judged = f"{tests} tested by {criterion.metric}, adjusted p < {SIGNIFICANT}, tolerance {criterion.tolerance:g}"
    comparisons = f"{len(changes)} comparison{'s' * (len(changes) != 1)}"
    if reason := untested(changes):
        console.print(f"nothing could be tested in {comparisons}: {reason}", markup=False, soft_wrap=True)
        return BAD_INPUT
    console.print(f"{count or 'no'} regression{'s' * (count > 1)} in {comparisons} ({judged})", markup=False)
    return FAILED if count else BAD_OUTPUT if bad_outputs(b) else 0


def _load(side: str, folder: str, studies: Sequence[str] | None) -> Any:
    """One side's `Results`; what is wrong with them is said of A or B."""
    from numdev.report.reading.frames import TRAINING, load
    from numdev.results.store import Store

    if not Path(folder).is_dir():
        raise BadInput(side, folder, "there is no such folder")
    try:
        results = load(Store(Path(folder)), studies)
    except BadInput as error:
        field, value = ("study", error.value) if error.field == "study" else (side, folder)
        raise BadInput(field, value, error.hint) from None
    if trained := [name for name, manifest in results.manifests.items() if manifest["kind"] == TRAINING]:
        hint = f"{', '.join(trained)} compares weights of training runs, which numdev report shows; name others by study="
        raise BadInput(side, folder, hint)
    return results
