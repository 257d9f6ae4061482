"""Show that the tests notice: seed one fault at a time into a copy of the package and expect the tests to fail.

The faults are listed in `experiments/faults`, a file for each area. Run: `python experiments/seeded_faults.py`, or with words to
seed only the faults of these areas, or whose names hold one of the words; `--workers` seeds several at a time. Copies are
temporary folders; the tree itself is never written. First a copy must pass as it is. Only tests that `make test` runs count.
Exits with 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("numdev", "tests", "configs", "pyproject.toml", "README.md", "LICENSE")


FAULTS = ROOT / "experiments" / "faults"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `numdev/{file}`; then a test of `tests`, such as `attention/mask`, must fail."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def faults() -> list[Fault]:
    """Those of all areas: the name of a file of the folder is the area."""
    tables = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FAULTS.glob("*.yaml"))}
    return [Fault(area, **row | {"tests": tuple(row["tests"])}) for area, rows in tables.items() for row in rows]


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of pytest on the copy, and the first test that failed."""
    files = [str(Path("tests", module).with_name(f"test_{Path(module).name}.py")) for module in tests]
    options = [
        "-x",
        "-q",
        "-m",
        "not slow and not exhaustive",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile",
        "first failure",
    ]  # no shrinking
    command = [sys.executable, "-m", "pytest", *options, *files]
    # No bytecode: a fault written within the second and of the same length would be hidden by the old one's.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else done.stdout[-300:]


def seed(copy: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the tests notice the fault, and which test did."""
    path = copy / "numdev" / fault.file
    original = path.read_text()
    if original.count(fault.old) != 1:
        return False, f"the line to change occurs {original.count(fault.old)} times in {fault.file}"
    path.write_text(original.replace(fault.old, fault.new))
    try:
        status, first = run_tests(copy, fault.tests)
    finally:
        path.write_text(original)
    return status == 1, first  # 0: survived; above 1: the tests did not even run


def copied(copy: Path) -> Path:
    """Copy into a folder what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy / name)
    return copy


def main(words: list[str], workers: int) -> int:
    """The exit status."""
    chosen = [each for each in faults() if not words or each.area in words or any(word in each.name for word in words)]
    if not chosen:
        areas = ", ".join(sorted({fault.area for fault in faults()}))
        print(f"no fault and no area is called {' or '.join(words)}; the areas are {areas}")
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: Queue[Path] = Queue()
        for number in range(workers):
            copies.put(copied(Path(folder, str(number))))
        tests = sorted({each for fault in chosen for each in fault.tests})

        def whole(test: str) -> tuple[str, int, str]:
            copy = copies.get()
            try:
                return test, *run_tests(copy, (test,))
            finally:
                copies.put(copy)

        def seeded(fault: Fault) -> tuple[Fault, bool, str]:
            copy = copies.get()
            try:
                return fault, *seed(copy, fault)
            finally:
                copies.put(copy)

        for test, status, first in pool.map(whole, tests):
            if status:
                print(f"without any fault {test} fails: {first}")
                return 1
        print(f"without any fault: {', '.join(tests)} pass", flush=True)
        caught = 0
        for fault, noticed, first in pool.map(seeded, chosen):
            caught += noticed
            print(f"{'caught  ' if noticed else 'SURVIVED'}  {fault.name:52}  {first}", flush=True)
    print(f"{caught} of {len(chosen)} faults caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="an area, or part of the name of a fault; without any, all faults")
    parser.add_argument("--workers", type=int, default=1, help="how many faults are seeded at a time, each in a copy of its own")
    arguments = parser.parse_args()
    sys.exit(main(arguments.words, arguments.workers))
