"""Results on disk: one file per point, written so that a kill, a full disk or a second writer loses nothing; and manifests.

A manifest says which points belong to a study, to a sweep or to single points, under which scenarios and claims.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from numdev.errors import StoreError
from numdev.results.record import Record, Rows, write_atomically

LONG = 1000  # rows from which a table is kept apart
_MOST_COMMANDS = 4  # of a sweep, that are named in one line


def refuse_unwritable(setting: str, folder: Path) -> None:
    """Find out that nothing can be written into a folder, which need not be there; leaves nothing behind.

    Raises:
        StoreError: naming the setting that states the folder.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise StoreError(f"{setting}: {nearest} cannot be written ({error.strerror}); give another folder") from error


class EntryRole(Enum):
    """Role of an entry of an axis in the claims that compare the entries."""

    SUBJECT = "subject"  # what the claims speak of
    EXPECTED = "expected"  # what the claims say the subjects are like
    CONTROL = "control"  # what the subjects have to differ from for the comparison to mean anything
    ASIDE = "aside"  # measured beside the others and not judged


class Role(Enum):
    """Role of a scenario for the source of a study's claims."""

    PAPER = "paper"  # the source states these circumstances
    ASSUMED = "assumed"  # the source leaves them open, and they are our assumption about it
    BEYOND = "beyond"  # where else we look
    CONTROL = "control"  # what the others are held against


@dataclass(frozen=True)
class Scenario:
    """Circumstances under which a study repeats its question."""

    name: str  # in the study's file
    title: str  # what they are, for a reader: "uniform inputs, every step in F, FlashAttention-1"
    role: Role = Role.BEYOND
    stands_for: str = ""  # the row of the source's table that this scenario repeats, where the claim is on a table


@dataclass
class Store:
    """A folder of results.

    `records/<key>.json` is a point, `records/<key>/<table>.*.parquet` a long table of it, `studies/<name>.json` the manifest of a
    study, `work/<key>/` is what a measurement keeps until its record is stored, and `runs/` what points share. A sweep from the
    command line has a manifest too, as do single points. Its jobs may run in several processes, so each point has a file of its
    own, `studies/<name>/<digest>.json`, named after its labels: one that is measured again, with other seeds or elsewhere,
    replaces the one with the same labels.
    """

    path: Path  # the folder; it is made when something is written
    # Files that could not be read, such as half a copy; their points count as not measured
    torn: list[Path] = field(default_factory=list)

    def get(self, key: str) -> Record | None:
        """The record of a key, or None where there is none, or where its file or that of a long table is damaged."""
        record: Record | None = self._read(self._record(key), self._whole)
        return record

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
        named = {Path(table["file"]).name for table in apart.values()}
        for path in folder.glob("*.parquet"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def records(self) -> Iterator[Record]:
        """Every readable record, by key."""
        for path in sorted((self.path / "records").glob("*.json")):
            record = self._read(path, self._whole)
            if record is not None:
                yield record

    def work(self, key: str) -> Path:
        """The folder of a measurement's own, for what it would lose if it were interrupted; the measurement makes it."""
        return self.path / "work" / key

    @property
    def shared(self) -> Path:
        """The folder of what several points share, such as training runs, each under a key of its own; it stays."""
        return self.path / "runs"

    def put_study(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Write which points a study has, with their scenarios and labels: its `manifest`."""
        write_atomically(self._manifest(name), json.dumps(manifest, indent=1).encode())

    def put_point(self, manifest: Mapping[str, Any], point: Mapping[str, Any]) -> None:
        """Write a point of a sweep (`StudyPoint.stored`), and its manifest, which has no points."""
        name, head = manifest["name"], json.dumps(manifest, indent=1).encode()
        if not self._manifest(name).is_file() or self._manifest(name).read_bytes() != head:
            write_atomically(self._manifest(name), head)
        labels = hashlib.sha256(json.dumps(point["labels"], sort_keys=True, default=str).encode()).hexdigest()
        write_atomically(self.path / "studies" / name / f"{labels[:16]}.json", json.dumps(point, indent=1, default=str).encode())

    def count(self, name: str) -> int:
        """How many points of a sweep have a file."""
        return len(list((self.path / "studies" / name).glob("*.json")))

    def studies(self) -> dict[str, dict[str, Any]]:
        """Every study's manifest by name, then those of sweeps and single points."""
        names = sorted(path.stem for path in (self.path / "studies").glob("*.json"))
        manifests = {name: manifest for name in names if (manifest := self.study(name)) is not None}
        return dict(sorted(manifests.items(), key=lambda item: item[1].get("swept") is not None))

    def study(self, name: str) -> dict[str, Any] | None:
        """The manifest of one study or sweep, or None where there is none or its file is damaged."""
        manifest: dict[str, Any] | None = self._read(self._manifest(name), json.loads)
        if manifest is None or manifest.get("swept") is None:
            return manifest
        paths = sorted((self.path / "studies" / name).glob("*.json"))
        points = [point for path in paths if (point := self._read(path, json.loads)) is not None]
        if not points:
            return None
        points.sort(key=lambda point: int(point["number"]))
        commands = list(dict.fromkeys(str(point["command"]) for point in points))
        more = f" && ... {len(commands) - _MOST_COMMANDS} more" if len(commands) > _MOST_COMMANDS else ""
        return manifest | {"command": " && ".join(commands[:_MOST_COMMANDS]) + more, "points": points}

    def _record(self, key: str) -> Path:
        return self.path / "records" / f"{key}.json"

    def _manifest(self, name: str) -> Path:
        return self.path / "studies" / f"{name}.json"

    def _read(self, path: Path, parse: Callable[[bytes], Any]) -> Any:
        """What a file holds; None where there is none, or where it, or a long table that it names, is damaged."""
        if (data := _bytes(path)) is None:
            return None
        try:
            return parse(data)
        except (OSError, ValueError):
            if _bytes(path) != data:  # a writer has replaced it, and removed the long tables that the first one named
                return self._read(path, parse)
            if path.is_file() and path not in self.torn:
                self.torn.append(path)
            return None

    def _whole(self, data: bytes) -> Record:
        return Record.from_json(data, self._table)

    def _table(self, apart: dict[str, Any]) -> Rows:
        """The rows of a long table; ValueError where they are not those that were stored."""
        data = (self.path / "records" / apart["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != apart["digest"]:
            raise ValueError(f"{apart['file']} is damaged")
        from pyarrow import parquet  # imported late: only long tables need it

        rows: Rows = parquet.read_table(io.BytesIO(data)).to_pylist()
        return rows


def _bytes(path: Path) -> bytes | None:
    """What a file holds, nothing where it cannot be read; None where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        return b""


def pack(name: str, rows: Rows) -> bytes:
    """A long table in Parquet, every number in full.

    Raises:
        ValueError: if its rows differ in their columns, or a column holds what is of no one type.
    """
    import pyarrow as pa  # imported late: only long tables need it
    from pyarrow import parquet

    columns = list(rows[0])
    if any(list(row) != columns for row in rows):
        raise ValueError(f"table {name}: every row of a long table needs the same columns, {', '.join(columns)}")
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), buffer, compression="zstd")
    return buffer.getvalue()
