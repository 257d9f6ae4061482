"""A cache of computed values that evicts the least recently used ones beyond a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from cachetools import LRUCache

_OTHER_BYTES = 64  # of a Python object that does not state its size


@runtime_checkable
class Sized(Protocol):
    """A value that states its bytes, as a tensor does."""

    @property
    def nbytes(self) -> int: ...


class LeastRecentlyUsed:
    """Values by key, up to `limit` bytes in all; a value larger than the limit is kept alone."""

    def __init__(self, limit: int) -> None:
        # LRUCache refuses a value larger than its limit; counted as the whole limit, the value evicts all others.
        self._entries = LRUCache[Hashable, Any](limit, getsizeof=lambda value: min(bytes_of(value), limit))

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key; `make` computes it where the cache has none."""
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]

    def get_all(self, keys: Sequence[Hashable], make: Callable[[list[int]], Sequence[Any]]) -> list[Any]:
        """The values of several keys; one call of `make` computes those that the cache has not, given their places in order."""
        found = {place: self._entries[key] for place, key in enumerate(keys) if key in self._entries}
        missing = [place for place in range(len(keys)) if place not in found]
        for place, value in zip(missing, make(missing) if missing else (), strict=True):
            found[place] = self._entries[keys[place]] = value
        return [found[place] for place in range(len(keys))]


def bytes_of(value: object) -> int:
    """Bytes of a value: those that it states, or the sum of its parts'."""
    if isinstance(value, Sized):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    return _OTHER_BYTES
