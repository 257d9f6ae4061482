"""A file that is written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from numdev.errors import StoreError


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write all of `data`, whole or in parts, to `path` or nothing: temporary file, fsync, rename, fsync of the folder.

    Two writers of one path each leave a whole file; the last rename stands.

    Raises:
        StoreError: if the disk is full or the folder cannot be written; the temporary file is removed.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            for part in (data,) if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "check that the folder exists and may be written"
        raise StoreError(f"results: {path} could not be written ({error.strerror}); {hint}, then run again") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


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


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every file system lets a folder be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
