"""Calls of ranks that are threads, compared with the whole sequence's."""

import numpy as np

from cuflash import distributed

from . import expected
from .compare import assert_forward_matches, assert_gradients_match
from .data import inputs
from .packed import (
    assert_packed_forward,
    assert_packed_gradients,
    packed_inputs,
)

TIMEOUT = 120.0  # seconds: a rank may wait while another compiles a kernel
ROWS, LSE = None, -1  # the axes of tokens, as `shard` takes them
AXES = {
    "q": ROWS, "k": ROWS, "v": ROWS, "out": ROWS, "dout": ROWS, "lse": LSE,
    "dq": ROWS, "dk": ROWS, "dv": ROWS,
}  # fmt: skip


class Shared:
    """The arrays of a case, and how ranks share them."""

    def __init__(self, case, size, layout="zigzag", ulysses=1):
        self.case, self.size = case, size
        self.layout, self.ulysses = layout, ulysses
        self.packed = case.offsets is not None
        self.whole = given = inputs(case)
        if self.packed:
            self.whole, given = packed_inputs(case)
        self.given = dict(zip(("q", "k", "v", "dout"), given, strict=True))

    def offsets(self, name):
        """The offsets that cut an array, None if it is not packed."""
        if not self.packed:
            return None
        return self.case.offsets[name.lstrip("d") in ("k", "v")]

    def part(self, name, array, rank):
        """A rank's part of a whole array."""
        return distributed.shard(
            array,
            rank,
            self.size,
            layout=self.layout,
            axis=AXES[name],
            cu_seqlens=self.offsets(name),
        )

    def join(self, name, parts):
        """The whole array of all ranks' parts."""
        return distributed.unshard(
            parts,
            layout=self.layout,
            axis=AXES[name],
            cu_seqlens=self.offsets(name),
        )

    def options(self, group):
        """The keyword arguments of both directions."""
        return {
            **self.case.meaning(),
            "group": group,
            "layout": self.layout,
            "ulysses": self.ulysses,
        }

    def run(self, backend, group, dlse=None):
        """Out, lse, dq, dk and dv of a rank, as NumPy arrays.

        dlse : of the whole sequence, or None.
        """
        q, k, v, dout = (
            backend.place(self.part(name, x, group.rank))
            for name, x in self.given.items()
        )
        options = self.options(group)
        out, lse = distributed.forward(q, k, v, return_lse=True, **options)
        if dlse is not None:
            dlse = backend.place(self.part("lse", dlse, group.rank))
        gradients = distributed.backward(
            dout, q, k, v, out, lse, **options, dlse=dlse,
            deterministic=self.case.deterministic,
        )  # fmt: skip
        return [backend.fetch(x) for x in (out, lse, *gradients)]

    def results(self, backend, dlse=None):
        """The whole results of ranks that are threads."""
        with backend.running(self.case):
            each = distributed.run_threads(
                self.size,
                lambda group: self.run(backend, group, dlse),
                timeout=TIMEOUT,
            )
        return self.joined(each)

    def joined(self, each):
        """The whole results of `run` by rank."""
        names = "out", "lse", "dq", "dk", "dv"
        return [
            self.join(name, [x[i] for x in each])
            for i, name in enumerate(names)
        ]

    def check(self, results):
        """Compare whole results with the float64 reference."""
        case, (q, k, v, dout) = self.case, self.whole
        if self.packed:
            assert_packed_forward(results[:2], q, k, v, case)
            assert_packed_gradients(results[2:], dout, q, k, v, case)
            return
        want = expected.forward(q, k, v, **case.meaning())
        assert_forward_matches(results[:2], want, case)
        want = expected.backward(dout, q, k, v, **case.meaning())
        assert_gradients_match(results[2:], want, case)


def bits_of(arrays):
    """The bytes of arrays, to compare them bit by bit."""
    return [np.ascontiguousarray(x).tobytes() for x in arrays]
