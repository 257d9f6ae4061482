"""Measure the speed of the instrument itself: `make bench`.

Prints a table, and with `--out FOLDER` writes it as `benchmarks.csv` with the environment beside it. Exit code 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import cast, distance, doctor, interception, overhead, roofline, tiled, training_task
from benchmarks.timing import Result
from numdev.results.environment import environment
from numdev.results.record import write_atomically

SECTIONS = {
    "tiled": tiled,
    "roofline": roofline,
    "cast": cast,
    "wasserstein": distance,
    "overhead": overhead,
    "training_task": training_task,
    "interception": interception,
    "doctor": doctor,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="which to run; all unless given")
    parser.add_argument("--out", type=Path, help="folder for benchmarks.csv and environment.json")
    options = parser.parse_args()
    found: list[Result] = []
    missing = []
    for name in options.sections or SECTIONS:
        try:
            found += SECTIONS[name].results()
        except ModuleNotFoundError as error:  # a peer that is measured beside numdev, and is no dependency of it
            missing.append(f"{name} needs {error.name}: pip install {error.name}")
    show(found)
    if options.out and found:
        write(found, options.out)
    for line in missing:
        print(line, file=sys.stderr)
    return 0 if not missing and all(result.met for result in found) else 1


def show(found: list[Result]) -> None:
    table = Table("what", "ours, s", "theirs or limit, s", "ratio", "target", "met")
    for result in found:
        figures = [f"{result.seconds:.4g}", f"{result.other:.4g}", f"{result.ratio:.3g}"]
        table.add_row(result.name, *figures, result.target, "yes" if result.met else "NO")
    Console(width=160).print(table)


def write(found: list[Result], out: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(found[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in found)
    write_atomically(out / "benchmarks.csv", text.getvalue().encode())
    facts = environment(torch.device("cpu"))
    write_atomically(out / "environment.json", json.dumps(facts, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main())
