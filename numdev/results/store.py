"""Results on disk: one file per point, written so that a kill, a full disk or a second writer loses nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev.errors import StoreError
from numdev.results import sweep
from numdev.results.files import write_atomically
from numdev.results.record import OldResults, Record
from numdev.results.tables import LONG, pack, unpack

__all__ = ["Store", "StoreError", "write_atomically"]


@dataclass
class Store:
    """A folder of results.

    `records/<key>.json` is a point, `records/<key>/<table>.*.parquet` a long table of it, `studies/<name>.json` says which points
    belong to a study, `sweeps/<name>/` which to a sweep or to none (`numdev.results.sweep`), `work/<key>/` is what a measurement
    keeps until its record is stored, and `runs/` what points share.

    Attributes:
        path: the folder; it is made when something is written.
        torn: files that could not be read, such as half a copy; their points count as not measured.
    """

    path: Path
    torn: list[Path] = field(default_factory=list)

    def get(self, key: str) -> Record | None:
        """The record of a key, or None where there is none, or where its file or that of a long table is damaged.

        Raises:
            OldResults: for the record of an older numdev.
        """
        return self._read(self._record(key))

    def holds(self, key: str) -> bool:
        """Whether there is a file of a record under this key, which need not be whole."""
        return self._record(key).is_file()

    def put(self, record: Record) -> None:
        """Write one record, its long tables first: a record that is there has them all.

        Raises:
            StoreError: if it cannot be written.
            ValueError: for a long table whose rows differ in their columns.
        """
        apart: dict[str, dict[str, Any]] = {}
        folder = self.path / "records" / record.key
        for name, rows in record.tables.items():
            if len(rows) > LONG:
                data = pack(name, rows)
                digest = hashlib.sha256(data).hexdigest()
                file = f"{name}.{digest[:8]}.parquet"  # other rows, another file: what a record names is never half of another
                write_atomically(folder / file, data)
                apart[name] = {"file": f"{record.key}/{file}", "rows": len(rows), "digest": digest}
        write_atomically(self._record(record.key), record.to_json(apart))
        named = {Path(stated["file"]).name for stated in apart.values()}
        for path in folder.glob("*.parquet") if folder.is_dir() else ():
            if path.name not in named:
                path.unlink(missing_ok=True)

    def work(self, key: str) -> Path:
        """The folder of a measurement's own, for what it would lose if it were interrupted; the measurement makes it."""
        return self.path / "work" / key

    @property
    def shared(self) -> Path:
        """The folder of what several points share, such as training runs, each under a key of its own; it stays."""
        return self.path / "runs"

    def _table(self, stated: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a long table; ValueError where they are not those that were stored."""
        data = (self.path / "records" / stated["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != stated["digest"]:
            raise ValueError(f"{stated['file']} is damaged")
        return unpack(data)

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
        """Every study's manifest by name, then those of sweeps and single points, which are like it."""
        paths = sorted((self.path / "studies").glob("*.json"))
        names = [*(path.stem for path in paths), *sweep.names(self.path)]
        return {name: found for name in names if (found := self.study(name)) is not None}

    def study(self, name: str) -> dict[str, Any] | None:
        """The manifest of one study or sweep, or None where there is none or its file is damaged."""
        path = self.path / "studies" / f"{name}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return sweep.manifest(self.path, name, self._note_torn)
        except (OSError, ValueError):
            self._note_torn(path)
            return None
        return found

    def _record(self, key: str) -> Path:
        return self.path / "records" / f"{key}.json"

    def _read(self, path: Path) -> Record | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            self._note_torn(path)
            return None
        try:
            return Record.from_json(data, self._table)
        except OldResults as error:
            mend = "run its study again into another folder, or delete this one"
            raise OldResults(f"results: {path} is of an older numdev, whose records do not state their kind; {mend}") from error
        except (OSError, ValueError):
            self._note_torn(path)
            return None

    def _note_torn(self, path: Path) -> None:
        if path not in self.torn:
            self.torn.append(path)
