"""Files of tensors that say what they hold: step and SHA-256 stand in their names, so that a damaged one is told at once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from numdev.errors import NumdevError
from numdev.results.files import write_atomically

_DIGITS = 32  # of the 64 hexadecimal digits of SHA-256, which a name has room for
_SUFFIX = ".safetensors"


class Damaged(NumdevError):
    """A file whose content is not what was written."""


@dataclass(frozen=True)
class Sealed:
    """A file `<kind>-<step>-<digest>.safetensors`."""

    path: Path
    step: int

    @staticmethod
    def write(folder: Path, kind: str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Sealed:
        """Write copies of tensors, whole or not at all; a file of the same kind and step is replaced.

        Raises:
            StoreError: if it cannot be written.
        """
        held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        data = save(held, metadata={"facts": json.dumps(dict(facts))})
        path = folder / f"{kind}-{step:08d}-{_digest(data)}{_SUFFIX}"
        write_atomically(path, data)
        for other in Sealed.all(folder, kind):
            if other.step == step and other.path != path:
                other.path.unlink(missing_ok=True)
        return Sealed(path, step)

    @staticmethod
    def all(folder: Path, kind: str) -> list[Sealed]:
        """The files of a kind in a folder, by step."""
        pattern = re.compile(rf"{re.escape(kind)}-(\d+)-[0-9a-f]{{{_DIGITS}}}{re.escape(_SUFFIX)}")
        named = ((path, pattern.fullmatch(path.name)) for path in sorted(folder.glob(f"{kind}-*{_SUFFIX}")))
        return [Sealed(path, int(match[1])) for path, match in named if match]

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors and its facts.

        Raises:
            Damaged: if it is not there, or not what was written.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise Damaged(f"{self.path} cannot be read ({error.strerror})") from None
        if _digest(data) != self.path.name.removesuffix(_SUFFIX).rpartition("-")[2]:
            raise Damaged(f"{self.path} is damaged: its content does not have the SHA-256 of its name")
        length = int.from_bytes(data[:8], "little")
        facts: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["facts"])
        return load(data), facts


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
