"""Results on disk: one file per point, written so that a kill, a full disk or a second writer loses nothing."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev.errors import NumdevError
from numdev.results.record import Record


class StoreError(NumdevError):
    """Results could not be written; what was there before is untouched."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write all of `data` to `path` or nothing: temporary file, fsync, rename, fsync of the folder.

    Two writers of one path each leave a whole file; the last rename stands.

    Raises:
        StoreError: if the disk is full or the folder cannot be written; the temporary file is removed.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        mend = "free some space" if error.errno == errno.ENOSPC else "check that the folder exists and may be written"
        raise StoreError(f"results: {path} could not be written ({error.strerror}); {mend}, then run again") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every file system lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class Store:
    """A folder of results: `records/<key>.json`, and `studies/<name>.json`, which points belong to a study.

    Attributes:
        path: the folder; it is made when something is written.
        torn: files that could not be read, such as half a copy; their points count as not measured.
    """

    path: Path
    torn: list[Path] = field(default_factory=list)

    def get(self, key: str) -> Record | None:
        """The record of a key, or None where there is none or its file is torn."""
        return self._read(self._record(key))

    def put(self, record: Record) -> None:
        """Write one record."""
        write_atomically(self._record(record.key), record.to_json())

    def records(self) -> Iterator[Record]:
        """Every readable record, by key."""
        for path in sorted((self.path / "records").glob("*.json")):
            record = self._read(path)
            if record is not None:
                yield record

    def put_study(self, name: str, manifest: dict[str, Any]) -> None:
        """Write which points a study has, with their scenarios and labels."""
        write_atomically(self.path / "studies" / f"{name}.json", json.dumps(manifest, indent=1).encode())

    def studies(self) -> dict[str, dict[str, Any]]:
        """Every study's manifest by name."""
        found = {}
        for path in sorted((self.path / "studies").glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_bytes())
            except (OSError, ValueError):
                self._note_torn(path)
        return found

    def _record(self, key: str) -> Path:
        return self.path / "records" / f"{key}.json"

    def _read(self, path: Path) -> Record | None:
        try:
            return Record.from_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self._note_torn(path)
            return None

    def _note_torn(self, path: Path) -> None:
        if path not in self.torn:
            self.torn.append(path)
