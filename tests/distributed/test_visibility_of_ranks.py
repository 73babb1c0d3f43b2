"""Which pairs ranks compute together, one by one.

By the probes of helpers/visibility.py: a key that two ranks count, or none,
shows. Chunks are short, so that windows begin and end at all their tokens.
"""

from itertools import product

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed.layouts import LAYOUTS, num_chunks
from helpers import visibility as probe
from helpers.backends import EMULATED, NUMPY
from helpers.data import Case
from helpers.ranks import TIMEOUT, Shared

CHUNK = 3
WINDOWS = [
    None, (0, 0), (1, 0), (CHUNK - 1, 1), (CHUNK, None), (CHUNK + 1, CHUNK),
    (None, 0), (None, CHUNK - 1), (2 * CHUNK, CHUNK + 1),
]  # fmt: skip
# Packed sequences in chunks of queries and keys: some have none of either.
EQUAL = [(1, 1), (0, 0), (3, 3)]
UNEQUAL = [(0, 2), (2, 3), (0, 1), (2, 0), (0, 2), (3, 1)]

on_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def offsets_of(chunks, count):
    """Return cu_seqlens of queries and of keys."""
    ends = np.cumsum(np.array(chunks) * count, axis=0).T.tolist()
    return tuple((0, *x) for x in ends)


def seen_of(case):
    """Return the pairs that a case's whole sequences see."""
    options = {"causal": case.causal, "window": case.window or (None, None)}
    if case.offsets is None:
        return probe.pairs(case.seqlen_q, case.seqlen_k, **options)
    seen = np.zeros((case.seqlen_q, case.seqlen_k), bool)
    for at in zip(*(zip(x, x[1:], strict=False) for x in case.offsets),
                  strict=True):  # fmt: skip
        rows, keys = (slice(*x) for x in at)
        lengths = (x.stop - x.start for x in (rows, keys))
        seen[rows, keys] = probe.pairs(*lengths, **options)
    return seen


def check(backend, size, layout, **fields):
    """Check both directions of ranks that are threads."""
    if "offsets" in fields:
        q, k = fields["offsets"]
        fields |= {"seqlen_q": q[-1], "seqlen_k": k[-1]}
    case = Case("float32", num_heads_q=2, **fields)
    shared, seen = Shared(case, size, layout), seen_of(case)
    q, k, v, dout = probe.arrays(
        case.dtype, 1, case.seqlen_q, case.seqlen_k, 2
    )
    lse = np.where(seen.any(-1), 0, -np.inf).astype(np.float32)
    given = {
        "q": q, "k": k, "v": v, "dout": dout, "out": np.zeros_like(dout),
        "lse": np.tile(lse, (1, 2, 1)),
    }  # fmt: skip
    if shared.packed:
        given = {name: x[0] for name, x in given.items()}

    def of_rank(group):
        own = {
            name: backend.place(shared.part(name, x, group.rank))
            for name, x in given.items()
        }
        options = shared.options(group) | {"scale": 1.0}
        dout, out, lse = (own.pop(x) for x in ("dout", "out", "lse"))
        states = distributed.forward(**own, return_lse=True, **options)
        gradients = distributed.backward(
            dout, *own.values(), out, lse, **options
        )
        return [backend.fetch(x) for x in (*states, *gradients)]

    with backend.running(case):
        each = distributed.run_threads(size, of_rank, timeout=TIMEOUT)
    results = shared.joined(each)
    if shared.packed:
        results = [x[None] for x in results]
    probe.assert_states(*results[:2], seen, q, v)
    probe.assert_gradients(results[2:], seen, q, k, dout)


@pytest.mark.parametrize("backend", [NUMPY])
@on_layouts
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunks", [(1, 1), (1, 2), (2, 1)])
def test_windows(backend, layout, size, chunks):
    """Of as many queries as keys, of fewer and of more."""
    count = num_chunks(size, layout)
    lengths = [x * CHUNK * count for x in chunks]
    fields = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
    for window, causal in product(WINDOWS, (False, True)):
        check(backend, size, layout, causal=causal, window=window, **fields)


@pytest.mark.parametrize("backend", [NUMPY])
@on_layouts
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunks", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_packed_sequences(backend, layout, size, chunks):
    """Keys of a sequence without queries are nobody's."""
    offsets = offsets_of(chunks, num_chunks(size, layout))
    for window, causal in product(WINDOWS[:4], (False, True)):
        check(backend, size, layout, causal=causal, window=window,
              offsets=offsets)  # fmt: skip


@pytest.mark.parametrize("backend", [EMULATED])
@on_layouts
def test_kernels(backend, layout):
    """Kernels merge and add what ranks of a packed call computed."""
    offsets = offsets_of(UNEQUAL, num_chunks(2, layout))
    check(backend, 2, layout, offsets=offsets)
