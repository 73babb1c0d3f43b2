"""Expected results of packed sequences: each computed separately."""

import itertools

import numpy as np

from . import expected
from .compare import assert_all, assert_forward_matches, assert_matches
from .data import inputs

_OFFSETS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"


def many_sequences(*lengths):
    """Return offsets of short sequences, then of these of (q, k) tokens.

    A warp tests 32 offsets at a time: it finds the last ones in two rounds.
    An even number, from 36 on, so that steps of two end beyond the last.
    """
    short = [(0, 1), (0, 0), (1, 2), (0, 0), (1, 0), (0, 0)] * 7
    short = short[: 36 + len(lengths) % 2]
    both = zip(*short, *lengths, strict=True)
    return tuple((0, *itertools.accumulate(x)) for x in both)


def packed_inputs(case):
    """q, k, v and dout with a batch axis of one, and without it."""
    arrays = inputs(case)
    return arrays, [x[0] for x in arrays]


def sequences_of(case):
    """Yield each sequence's queries, keys and options."""
    options = {n: x for n, x in case.meaning().items() if n not in _OFFSETS}
    of_q, of_k = case.offsets
    slopes = options.get("alibi_slopes", np.zeros(0))
    for i in range(len(of_q) - 1):
        if slopes.ndim == 2:  # a row for each sequence
            options = {**options, "alibi_slopes": slopes[i]}
        yield (
            slice(of_q[i], of_q[i + 1]),
            slice(of_k[i], of_k[i + 1]),
            {**options, "first_batch": i},
        )


def assert_packed_forward(got, q, k, v, case):
    """Assert out (total_q, heads, head_dim_v) and lse (heads, total_q)."""
    out, lse = got
    for i, j, options in sequences_of(case):
        want = expected.forward(
            q[:, i], k[:, j], v[:, j], sums=case.sums(), **options
        )
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)
    rest = slice(case.offsets[0][-1], None)
    assert_all(out[rest], 0, "out[rest]", case)
    assert_all(lse[:, rest], -np.inf, "lse[:, rest]", case)


def max_scores_of_sequences(q, k, case):
    """Yield each sequence's queries and their expected max_score."""
    for i, j, options in sequences_of(case):
        yield (
            i,
            expected.max_score(q[:, i], k[:, j], sums=case.sums(), **options),
        )


def assert_packed_gradients(got, dout, q, k, v, case, dlse=None, **more):
    """Assert dq, dk, dv, and dsink if there is a sink.

    dlse : (1, heads, total_q), or None.
    **more : further arguments of `expected.backward`.
    """
    dsinks = []
    for i, j, options in sequences_of(case):
        parts = dout[:, i], q[:, i], k[:, j], v[:, j]
        of_lse = None if dlse is None else dlse[..., i]
        want = expected.backward(
            *parts, dlse=of_lse, sums=case.sums(), **options, **more
        )
        for name, x, place, one in zip(
            ("dq", "dk", "dv"), got, (i, j, j), want, strict=False
        ):
            assert_matches(x[None, place], one, name, case)
        dsinks += want[3:]
    for x, offsets in zip(got, (*case.offsets, case.offsets[1]), strict=False):
        assert_all(x[offsets[-1] :], 0, "x[offsets[-1] :]", case)
    if "sink" in case.arrays_of:
        assert_matches(got[3], sum_of(dsinks, got[3].shape), "dsink", case)


def sum_of(parts, shape):
    """Return the expected sum; errors of its parts add up."""
    zero = np.zeros(shape)
    return expected.Expected(
        sum((x.ref for x in parts), zero),
        sum((np.asarray(x.low, np.float64) for x in parts), zero),
        sum(x.tiny for x in parts),
        expected.GRADIENT_FACTOR,
    )
