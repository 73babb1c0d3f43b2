"""Which rows of calls on NumPy arrays the reference computes."""

from contextlib import contextmanager
from unittest import mock

import numpy as np

from cuflash.backends.numpy import (
    flagged as numpy_flagged,
)
from cuflash.backends.numpy import (
    parts as numpy_parts,
)
from cuflash.backends.numpy import (
    rows as numpy_rows,
)
from cuflash.backends.numpy.flagged import Flagged
from cuflash.backends.numpy.kinds import Kind


@contextmanager
def by_reference(share=1.0):
    """Let the reference compute all rows, or a share of them, by chance."""
    rng = np.random.default_rng(0)

    def find(values, options):
        q, *of_keys = (x for n, x in values.arrays.items() if n in "qkv")
        rows = rng.random(q.shape[:-1]) < share
        finite = [np.isfinite(x).all(axis=-1) for x in of_keys]
        keys = ~np.logical_and.reduce(finite)
        none = np.zeros_like(rows)
        given = rows, none, none, keys, np.zeros_like(keys)
        flagged = Flagged(*given, options, values.largest)
        return flagged, np.full(len(rows), Kind.BOUNDED)

    def all_unbounded(q, *others):
        return np.zeros(len(q), int)

    with (
        mock.patch.object(numpy_parts, "find", find),
        mock.patch.object(numpy_flagged, "kinds", all_unbounded),
    ):
        yield


@contextmanager
def rows_counted():
    """Return a list of how many rows each part has the reference compute.

    A row of several heads is one.
    """
    counts = []

    class Counted(numpy_rows.Rows):
        def __init__(self, *given):
            super().__init__(*given)
            counts.append(len(self.index))

    with mock.patch.object(numpy_rows, "Rows", Counted):
        yield counts
