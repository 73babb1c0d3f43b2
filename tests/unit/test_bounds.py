"""Which bounds of a window are dropped: those that hide nothing.

Of all small lengths, against the dense mask of the reference.
"""

from itertools import product

import numpy as np
import pytest

from cuflash.reference.masks import visible
from cuflash.request import fields as fields_of_options
from cuflash.request.problem import Signature
from cuflash.request.validate import attention as validate
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import scalars
from helpers.compare import assert_elements

LENGTHS = range(1, 5)
# Past both lengths, also their sum.
BOUNDS = [None, *range(2 * max(LENGTHS) + 1)]
CALLS = [
    {"causal": causal, "window": (left, right)}
    for causal, left, right in product((False, True), BOUNDS, BOUNDS)
]

of_queries = pytest.mark.parametrize("seqlen_q", LENGTHS)


def of_kernels(problem):
    """Return the window in a struct, which has a bound for each dropped."""
    fields = fields_of_options.window(Signature(problem, 4, {}))
    return fields["window_left"], fields["window_right"]


@of_queries
@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_dropped_bounds_hide_nothing(seqlen_q, seqlen_k):
    """And bounds that hide nothing are dropped."""
    lengths = seqlen_q, seqlen_k
    for call in CALLS:
        causal, window = scalars.bounds_that_mask(
            **call, seqlen_q=seqlen_q, seqlen_k=seqlen_k, packed=False
        )
        got = visible(*lengths, causal=causal, window=window)
        assert_elements(got, visible(*lengths, **call), "visible", call)
        left, right = window
        for bound, alone in (left, (left, None)), (right, (None, right)):
            idle = visible(*lengths, window=alone).all()
            assert idle == (bound is None), call


@of_queries
def test_kernels_have_the_same_window(seqlen_q):
    q = np.zeros((1, seqlen_q, 1, 2), np.float32)
    for seqlen_k, call in product(LENGTHS, CALLS):
        k = np.zeros((1, seqlen_k, 1, 2), np.float32)
        problem = validate.forward(q, k, k, **call).problem
        got = visible(seqlen_q, seqlen_k, window=of_kernels(problem))
        assert_elements(
            got, visible(seqlen_q, seqlen_k, **call), "visible", call
        )


@of_queries
def test_windows_of_caches(seqlen_q):
    """Whatever a sequence has of the capacity: bounds are cut to that."""
    q = np.zeros((1, seqlen_q, 1, 2), np.float32)
    for capacity, call in product((2, 4), CALLS):
        k = np.zeros((1, capacity, 1, 2), np.float32)
        problem = validate_kvcache.forward_kvcache(q, k, k, **call).problem
        found = of_kernels(problem)
        for n in range(capacity + 1):
            got = visible(seqlen_q, n, window=found)
            assert_elements(
                got, visible(seqlen_q, n, **call), "visible", (n, call)
            )


def test_packed_sequences_keep_their_bounds():
    """Whose lengths are not known: here, more than one token."""
    for call in CALLS:
        causal, (left, right) = scalars.bounds_that_mask(
            **call, seqlen_q=1, seqlen_k=1, packed=True
        )
        got = visible(5, 5, causal=causal, window=(left, right))
        assert_elements(got, visible(5, 5, **call), "visible", call)
