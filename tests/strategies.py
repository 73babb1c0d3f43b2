"""What Hypothesis draws: the structure of a call.

Numbers are not drawn one by one. A case carries a seed; its arrays follow
from that (helpers/data.py), so examples are small, quick to draw, shrink by
their shapes and print as one line.
"""

from hypothesis import strategies as st

from helpers.data import Case
from helpers.dtypes import DTYPES

# Around tile sizes and vector widths is where kernels go wrong.
EDGES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 200]
HEAD_DIMS = [1, 2, 7, 8, 16, 31, 32, 64, 65, 96, 128, 192, 255, 256]

# A kernel is compiled for each pair: on a GPU a few, padded and not, alike
# for q and v and not.
GPU_HEAD_DIMS = [(7, 7), (40, 40), (64, 64), (128, 128), (160, 80), (256, 256)]


def lengths(longest):
    edges = [n for n in EDGES if n <= longest]
    return st.integers(0, longest) | st.sampled_from(edges)


def head_dims(backend):
    """Draw (head_dim, head_dim_v), often alike."""
    if backend.name != "numpy":
        return st.sampled_from(GPU_HEAD_DIMS)
    one = st.integers(1, 256) | st.sampled_from(HEAD_DIMS)
    return one.map(lambda d: (d, d)) | st.tuples(one, one)


@st.composite
def block_sizes(draw, seqlen, backend):
    """Draw any tile size on the CPU; a GPU's legal ones are tested apart.

    The CPU path loops over tiles in Python: at most 16 along a sequence.
    """
    if backend.name != "numpy" or draw(st.booleans()):
        return None
    return draw(st.integers(max(1, -(-seqlen // 16)), 256))


@st.composite
def cases(
    draw,
    backend,
    dtypes=tuple(DTYPES),
    layout="contiguous",
    causal=True,
    longest=200,
):
    """Draw a whole call; causal=False for calls that never are."""
    seqlen_q, seqlen_k = draw(lengths(longest)), draw(lengths(longest))
    num_heads_kv = draw(st.integers(1, 2))
    head_dim, head_dim_v = draw(head_dims(backend))
    return Case(
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.integers(1, 2)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_kv * draw(st.integers(1, 3)),
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal and draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.25])),
        block_q=draw(block_sizes(seqlen_q, backend)),
        block_k=draw(block_sizes(seqlen_k, backend)),
        layout=layout,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
