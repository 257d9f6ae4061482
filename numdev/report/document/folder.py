"""The folder of a report: on what it reports, and its files. A report replaces the last one on the same, and no other."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from numdev.errors import BadInput, StoreError
from numdev.results.record import write_atomically
from numdev.results.store import refuse_unwritable

MANIFEST = "report.json"
_LOCK = ".lock"


def refuse_other(out: Path, results: Path, studies: Sequence[str] | None) -> None:
    """Find out before anything is measured that a folder cannot hold the report on studies of `results`, all unless given.

    Raises:
        BadInput: if it holds the report on others.
        StoreError: if it cannot be written.
    """
    refuse_unwritable("out", out)
    held, about = _read(out), _about(out, results, studies)
    if held and {name: held[name] for name in about} != about:
        of = "everything" if held["studies"] is None else ", ".join(held["studies"])
        hint = (
            f"it holds the report on {of} in {os.path.normpath(out / held['results'])}; give another folder, or remove this one"
        )
        raise BadInput("out", str(out), hint)


@contextmanager
def replacing(out: Path, results: Path, studies: Sequence[str] | None) -> Iterator[Path]:
    """A folder to write a report into; at the end its files replace those of the last report, of which none stays in `out`.

    Files that no report wrote stay. Nothing changes on an error. Of several processes one is within at a time, so that the last
    report is of all that those before it have measured.

    Raises:
        BadInput, StoreError: as `refuse_other`.
    """
    refuse_other(out, results, studies)
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / _LOCK, mode=0o666):
        refuse_other(out, results, studies)  # again: another process may have written one while this one waited
        try:
            with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as name:
                yield Path(name)
                _publish(Path(name), out, _about(out, results, studies))
        except BaseException:
            if [path.name for path in out.iterdir()] == [_LOCK]:
                (out / _LOCK).unlink()
                out.rmdir()
            raise


def listed(out: Path) -> list[str]:
    """The files of the report that a folder holds."""
    return list(_read(out).get("files", ()))


def _publish(made: Path, out: Path, about: dict[str, Any]) -> None:
    """Move the files of a report to their places, and remove those of the last one that it does not have."""
    new = [path.relative_to(made).as_posix() for path in sorted(made.rglob("*")) if path.is_file()]
    gone = [name for name in listed(out) if name not in new]

    def put(files: list[str]) -> None:
        write_atomically(out / MANIFEST, (json.dumps(about | {"files": files}, indent=1) + "\n").encode())

    put([*new, *gone])  # first, so that whatever ends this here, the next report knows of these files
    for file in new:
        try:
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(made / file, out / file)
        except OSError as error:
            raise StoreError(f"out: {out / file} could not be written ({error.strerror}); give another folder") from error
    for file in gone:
        (out / file).unlink(missing_ok=True)
    put(new)


def _read(out: Path) -> dict[str, Any]:
    """The folder's manifest; empty where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError):
        raise BadInput("out", str(out), f"its {MANIFEST} cannot be read; give another folder, or remove this one") from None
    return manifest


def _about(out: Path, results: Path, studies: Sequence[str] | None) -> dict[str, Any]:
    """On what a report is: the results as seen from the report, so that a folder that holds both can move."""
    return {"results": Path(os.path.relpath(results, out)).as_posix(), "studies": studies and sorted(studies)}
