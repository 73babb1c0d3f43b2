"""What Hypothesis draws for the tests of the reference."""

from dataclasses import replace

from hypothesis import strategies as st

from helpers.punishing import KINDS
from helpers.reference_cases import OPTION_ARRAYS, ReferenceCase

VALUES = ["normal", *(kind.__name__ for kind in KINDS)]


@st.composite
def reference_cases(draw, smallest=0):
    """Draw a small call: tiles that fit, and tiles that don't."""
    length = st.integers(smallest, 13)
    return ReferenceCase(
        lead=draw(st.sampled_from([(), (2,), (2, 3)])),
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        head_dim=draw(st.integers(1, 9)),
        head_dim_v=draw(st.integers(1, 9)),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0, 3.0, -0.5, 0.0])),
        block_q=draw(st.integers(1, 15)),
        block_k=draw(st.integers(1, 15)),
        seed=draw(st.integers(0, 2**32 - 1)),
        values=draw(st.sampled_from(VALUES)),
    )


def windows(longest=15):
    """Draw (left, right), either of them None for no bound."""
    bound = st.none() | st.integers(0, longest)
    return st.tuples(bound, bound)


@st.composite
def optional_cases(draw):
    """Draw a call with any options together."""
    names = draw(st.sets(st.sampled_from([*OPTION_ARRAYS])))
    if "segment_ids_q" in names or "segment_ids_k" in names:
        names |= {"segment_ids_q", "segment_ids_k"}
    return replace(
        draw(reference_cases()),
        window=draw(windows()),
        softcap=draw(st.sampled_from([None, 0.5, 20.0])),
        arrays_of=tuple(sorted(names)),
        dropout=draw(st.sampled_from([0.0, 0.25, 0.9])),
    )


@st.composite
def tile_questions(draw):
    """Draw the arguments of `masks.tile_visibility`, in order."""
    seqlen_q, seqlen_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    queries = sorted(draw(st.integers(0, seqlen_q)) for _ in range(2))
    keys = sorted(draw(st.integers(0, seqlen_k)) for _ in range(2))
    bounds = draw(st.booleans()), draw(windows())
    return (*queries, *keys, seqlen_q, seqlen_k, *bounds)


@st.composite
def logits(draw):
    """Draw (rows, keys, exponent, seed) of logits up to 10**exponent."""
    return (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 30)),
        draw(st.sampled_from([0, 1, 2, 3, 10, 100, 300])),
        draw(st.integers(0, 2**32 - 1)),
    )
