"""The command `numdev`: which of its parts is asked for, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from numdev.version import package_version

HELP = """\
numdev: how far fast attention strays numerically from exact attention, and which step and format is to blame

  numdev measure [setting=value ...]       one point: every figure of one variant on one problem
  numdev measure -m setting=a,b,c ...      a sweep over all combinations
  numdev measure study=NAME [...]          every point of a study; what is there is not measured again
  numdev map     [setting=value ...]       where one head errs: a map, a distribution and the numbers, of any output
  numdev paper   [seeds=2 device=cpu ...]  all studies of the paper, then reports/paper
  numdev report  [results=DIR out=DIR ...] tables, figures and documents from what was measured
  numdev compare A B [tolerance=1.1 ...]   two folders of results: what changed, how surely; for a kernel's own CI
  numdev speed   [study=NAME ...]          time, memory and traffic of attentions, and the deviation beside them
  numdev train   [study=fig7 ...]          models trained with fast and with plain attention: how far their weights come apart
  numdev studies                           the studies there are
  numdev tune    [formats=bf16 ...]        pin the launch settings of the Triton kernel for this GPU

  numdev measure --help                    what can be set, and what each option means
  numdev measure ... --cfg job             the settings of a command, without running it
  eval "$(numdev -sc install=bash)"        completion of the shell; also install=zsh and install=fish
  numdev --version

Exit code:
    0  every point that was asked for by itself, or as a job of a sweep, has figures, NaN and Inf among them; of a study no point
       ended in an error and at least one has figures, while others may be unsupported or out of memory, as the summary says
    1  a point ended in an error or, asked for by itself, out of memory; results could not be written; compare found a regression
    2  a setting cannot be used
    3  a point asked for by itself is unsupported, as attention=triton is without a GPU; so is every point of a study
  130  Ctrl-C, after which the same command goes on where it stopped
A sweep ends with the gravest of its jobs' codes: 2, 1, 3, 0."""

COMMANDS = ("compare", "map", "measure", "paper", "report", "speed", "studies", "train", "tune")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `numdev` with these arguments, those of the process unless given, and exit.

    Raises:
        SystemExit: always, with the exit code that `HELP` states.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_dispatch(given))
    except KeyboardInterrupt as error:
        kept = getattr(error, "kept", None)
        points = "" if kept is None else f" {kept} points kept,"
        print(f"interrupted;{points} run the same command to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has stopped
        sys.exit(0)


def _dispatch(given: list[str]) -> int:
    command, *rest = given or ["--help"]
    if command in ("--help", "-h", "help"):
        print(HELP)
        return 0
    if command == "--version":
        print(f"numdev {package_version()}")
        return 0
    if command in ("-sc", "--shell-completion"):
        from numdev.cli import completion

        return completion.complete(given)
    if command == "studies":
        return _studies(rest)
    if command == "compare":
        from numdev.cli import compare

        return compare.run(rest)
    if command == "tune":
        from numdev.cli import tune

        return tune.run(rest)
    if command in COMMANDS:
        from numdev.cli import launch

        return launch.launch(command, rest)
    from numdev.nearest import one_of

    print(f"numdev: there is no command {command!r}; {one_of(command, COMMANDS)}, or --help", file=sys.stderr)
    return 2


def _studies(arguments: list[str]) -> int:
    """Prints the names and titles of all studies."""
    from argparse import Namespace

    from numdev.cli import plain
    from numdev.cli.library import Library, config_folder

    def show(_: Namespace) -> int:
        library = Library((config_folder(),))
        names = library.options("study")
        for name in names:
            print(f"{name:<{max(map(len, names))}}  {library.study(name)['title']}")
        return 0

    return plain.run(show, plain.Parser("studies", "Prints the name and the title of every study."), arguments)


if __name__ == "__main__":
    main()
