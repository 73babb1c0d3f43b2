"""What Hypothesis draws for the tests of the reference."""

from hypothesis import strategies as st

from helpers.reference_cases import ReferenceCase


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
    )


@st.composite
def tile_questions(draw):
    """Draw (q_start, q_stop, k_start, k_stop, seqlen_q, seqlen_k, causal)."""
    seqlen_q, seqlen_k = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    queries = sorted(draw(st.integers(0, seqlen_q)) for _ in range(2))
    keys = sorted(draw(st.integers(0, seqlen_k)) for _ in range(2))
    return (*queries, *keys, seqlen_q, seqlen_k, draw(st.booleans()))


@st.composite
def logits(draw):
    """Draw (rows, keys, exponent, seed) of logits up to 10**exponent."""
    return (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 30)),
        draw(st.sampled_from([0, 1, 2, 3, 10, 100, 300])),
        draw(st.integers(0, 2**32 - 1)),
    )
