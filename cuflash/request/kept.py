"""What calls with one `TileMask` leave to later ones: flags of tiles."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any


class Kept:
    """The newest of what several calls share, by all that it depends on.

    A call has flags of its own for each direction, shape and kernel.
    """

    MOST = 8

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        """A copy keeps nothing: memory of a device stays there."""
        return Kept, ()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable) -> Any:
        """What is kept, None if nothing is."""
        return self._found.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        """Keep a value, if none is; return what is kept."""
        with self._lock:
            kept = self._found.setdefault(key, value)
            while len(self._found) > self.MOST:
                del self._found[next(iter(self._found))]
        return kept
