"""Time and memory of a training step, by the number of atoms."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import morse, potential
from .training import HEADS, HIDDEN


class Cost(NamedTuple):
    """Of a step on one configuration."""

    atoms: int
    by: str
    seconds: float
    nbytes: int


def costs(
    ways: Mapping[str, Any],
    sizes: list[int],
    rounds: int,
    largest: Mapping[str, int],
) -> Iterator[Cost]:
    """Measure steps, the least CPU seconds of some rounds.

    `largest` are the most atoms of a way.
    """
    parameters = potential.new_parameters(HEADS, HIDDEN, seed=2)
    for atoms in sizes:
        r = morse.configurations(1, atoms, seed=0)
        target = np.zeros_like(r)
        for name, calls in ways.items():
            if atoms > largest.get(name, atoms):
                continue
            given = parameters, r, target, calls
            seconds = min(_seconds(given) for _ in range(rounds))
            yield Cost(atoms, name, seconds, _nbytes(given))


def _seconds(given: tuple) -> float:
    """CPU time of all threads, whatever else the machine does."""
    start = time.process_time()
    potential.step(*given)
    return time.process_time() - start


def _nbytes(given: tuple) -> int:
    """The most memory that a step holds at once, but for its arguments."""
    tracemalloc.start()
    try:
        potential.step(*given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
