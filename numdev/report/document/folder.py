"""The folder of a report: on what it reports, and its files. A report replaces the last one on the same, and no other."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numdev.errors import BadInput, StoreError
from numdev.results.store import refuse_unwritable, write_atomically

MANIFEST = "report.json"
_OLDER = ("environment.json", "columns.md")  # of every report, also of one without a manifest


def refuse_other(out: Path, results: Path, studies: Sequence[str] | None) -> None:
    """Find out before anything is measured that a folder cannot hold the report on studies of `results`, all unless given.

    Raises:
        BadInput: if it holds the report on others, or files of a report that no manifest lists.
        StoreError: if it cannot be written.
    """
    refuse_unwritable("out", out)
    held, hint = _read(out), "give another folder, or remove this one"
    if held is None:
        if any((out / name).exists() for name in _OLDER):
            raise BadInput("out", str(out), f"it holds a report without {MANIFEST}, as an older numdev wrote it; {hint}")
    elif (held["results"], held["studies"]) != (_where(results, out), studies and sorted(studies)):
        of = "everything" if held["studies"] is None else ", ".join(held["studies"])
        raise BadInput("out", str(out), f"it holds the report on {of} in {os.path.normpath(out / held['results'])}; {hint}")


@contextmanager
def replacing(out: Path, results: Path, studies: Sequence[str] | None) -> Iterator[Path]:
    """A folder to write a report into; at the end its files replace those of the last report, of which none stays in `out`.

    Files that no report wrote stay, and so do those of the last report that were changed since. Nothing changes on an error.

    Raises:
        BadInput, StoreError: as `refuse_other`.
    """
    refuse_other(out, results, studies)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as name:
            yield Path(name)
            _publish(Path(name), out, {"results": _where(results, out), "studies": studies and sorted(studies)})
    except BaseException:
        with suppress(OSError):  # it holds something
            out.rmdir()
        raise


def listed(out: Path) -> list[str]:
    """The files of the report that a folder holds."""
    return list((_read(out) or {"files": ()})["files"])


def _publish(made: Path, out: Path, about: dict[str, Any]) -> None:
    """Move the files of a report to their places, and remove those of the last one that it does not have."""
    new = {path.relative_to(made).as_posix(): _digest(path) for path in sorted(made.rglob("*")) if path.is_file()}
    last: dict[str, str] = (_read(out) or {"files": {}})["files"]

    def put(files: dict[str, str]) -> None:
        write_atomically(out / MANIFEST, (json.dumps(about | {"files": files}, indent=1) + "\n").encode())

    put(last | new)  # first, so that whatever ends this here, the next report knows of these files
    for file in new:
        try:
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(made / file, out / file)
        except OSError as error:
            raise StoreError(f"out: {out / file} could not be written ({error.strerror}); give another folder") from error
    for file, digest in last.items():
        if file not in new and (out / file).is_file() and _digest(out / file) == digest:
            (out / file).unlink()
    put(new)


def _read(out: Path) -> dict[str, Any] | None:
    """The folder's manifest; None where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise BadInput("out", str(out), f"its {MANIFEST} cannot be read; give another folder, or remove this one") from None
    return manifest


def _where(results: Path, out: Path) -> str:
    """The results as seen from the report, so that a folder that holds both can move."""
    return Path(os.path.relpath(results, out)).as_posix()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
