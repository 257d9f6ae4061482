"""The command `numdev`: which of its parts is asked for, and how it ends."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from textwrap import fill

from numdev.errors import BadInput, one_of
from numdev.sources import package_version

HELP = """\
numdev: how far fast attention deviates numerically from exact attention, and
which step and which number format cause it

  numdev measure [setting=value ...]    one point: a variant on a problem
  numdev measure -m setting=a,b,c ...   a sweep over all combinations
  numdev measure study=NAME [...]       every point of a study that is missing
  numdev map     [setting=value ...]    the error of each element of one head
  numdev paper   [seeds=2 ...]          all studies of the paper, and its report
  numdev report  [results=DIR ...]      tables, figures, documents from results
  numdev compare A B [tolerance=1.1]    what changed between two results folders
  numdev certify KERNEL [...]           whether a kernel is as accurate as its
                                        formats permit, and which step errs
  numdev doctor WHAT                    whether attention caused a loss spike
                                        in a training run of your own
  numdev speed   [study=NAME ...]       time, memory, traffic, and deviation
  numdev train   [study=fig7 ...]       models trained with fast and with plain
                                        attention: how far their weights differ
  numdev studies                        the studies there are

  numdev measure --help                 what can be set, and what it means
  numdev measure ... dry_run=true       points and memory; measures nothing
  numdev measure ... --cfg job          the settings of a command; runs nothing
  numdev --version

Exit code:
    0  every point asked for by itself, or as a job of a sweep, has figures; no
       point of a study ended in an error, and at least one has figures: the
       summary lists the unsupported ones
    1  a point ended in an error, or, asked for by itself, out of memory;
       compare found a regression; certify: FAIL; report: every point failed;
       doctor: exact attention removes the spike
    2  a setting cannot be used, or results cannot be written (a full disk);
       compare could test nothing
    3  a point asked for by itself is unsupported, as attention=triton is
       without a GPU; so is every point of a study; a kernel refuses every
       input of certify
    4  certify: INCONCLUSIVE, more seeds would decide; doctor: undecided
    5  an output is NaN or Inf where the exact one is finite, 0 everywhere, or
       of another shape, dtype or device; report, compare: results hold such;
       certify: the kernel raises, or returns another shape, dtype or device
  130  Ctrl-C; the same command continues
A sweep ends with the first of 2, 1, 5, 3, 0 that one of its jobs ended with."""

COMMANDS = ("certify", "compare", "doctor", "map", "measure", "paper", "report", "speed", "studies", "train")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `numdev` with these arguments, those of the process unless given, and exit.

    Raises:
        SystemExit: always, with the exit code that `HELP` states.
    """
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt as error:
        kept = f"{error}, " if str(error) else ""  # by a study
        print(f"interrupted; {kept}run the same command to continue", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the output has ended
        sys.exit(0)
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from numdev.cli.exit_codes import code_of, sentence_of

        print(sentence_of(error), file=sys.stderr)
        sys.exit(code_of(error))


def _dispatch(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        print(HELP)
        return 0
    if command == "--version":
        print(f"numdev {package_version()}")
        return 0
    if command in ("certify", "compare", "doctor"):
        code: int = import_module(f"numdev.cli.{command}").run(rest)
        return code
    if command == "studies":
        ArgumentParser("numdev studies", description="Prints the name and the title of every study.").parse_args(rest)
        return _list_studies()
    if command in COMMANDS:
        from numdev.cli import launch

        return launch.launch(command, rest)
    raise BadInput("numdev", command, f"there is no such command; {one_of(command, COMMANDS)}, or --help")


def _list_studies() -> int:
    from numdev.cli.compose import composer
    from numdev.sources import config_folder

    own = composer((config_folder(),))
    width = max(map(len, own.options("study"))) + 2
    for name in own.options("study"):
        print(fill(own.load(f"study/{name}")["title"], 80, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width))
    return 0


if __name__ == "__main__":
    main()
