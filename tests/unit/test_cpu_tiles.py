"""NumPy's tiles give the reference's results for each option.

Two tiles of queries, three of keys, so some are skipped, some masked in part.
"""

import numpy as np
import pytest

import cuflash
from helpers.compare import assert_elements
from helpers.flagged import by_reference

BATCH, QUERIES, KEYS, HEADS, HEADS_KV = 2, 300, 1100, 2, 1
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def ids(length):
    return np.sort(RNG.integers(0, 9, (BATCH, length), np.int32))


PAIRS = QUERIES, KEYS
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (200, 50)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": np.abs(normal(BATCH, HEADS)) / 8},
    "bias": {"bias": normal(BATCH, HEADS, *PAIRS)},
    "broadcast bias": {"bias": normal(1, HEADS, 1, KEYS), "causal": True},
    "bias of -inf": {"bias": np.where(normal(*PAIRS) < 1, -np.inf, 0)},
    "mask": {"mask": normal(BATCH, 1, *PAIRS) < -0.5},
    "sink": {"sink": normal(HEADS), "causal": True},
    "ids": {"segment_ids_q": ids(QUERIES), "segment_ids_k": ids(KEYS)},
    "dropout": {"dropout": 0.3, "seed": 5},
    "larger scores": {"scale": 3.0},
}
OPTIONS["bias of -inf"]["bias"] = OPTIONS["bias of -inf"]["bias"].astype("f")
OPTIONS["many"] = {
    **OPTIONS["softcap"],
    **OPTIONS["slopes"],
    **OPTIONS["broadcast bias"],
    **OPTIONS["mask"],
    **OPTIONS["sink"],
    **OPTIONS["dropout"],
}


def results(arrays, dlse, options):
    """Return out, lse and all gradients."""
    dout, *qkv = arrays
    asked = {f"return_d{x}": True for x in ("bias", "sink") if x in options}
    out, lse = cuflash.forward(*qkv, return_lse=True, **options)
    return (
        out,
        lse,
        *cuflash.backward(dout, *qkv, out, lse, dlse=dlse, **options, **asked),
    )


def longest(x):
    return np.linalg.norm(x, axis=-1).max()


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name):
    """Where the reference computes half of the rows, which are anywhere.

    Each within some float32 roundings of the largest element.

    Sums are of at most 1100 terms with roundings at random signs, as much as
    sqrt(1100) < 34 of one sign; a score of 16 is rounded to 16 of them.
    """
    q, dout = normal(BATCH, QUERIES, HEADS, 24), normal(2, QUERIES, HEADS, 16)
    k, v = (normal(BATCH, KEYS, HEADS_KV, d) for d in (24, 16))
    largest = OPTIONS[name].get("scale", 24**-0.5) * longest(q) * longest(k)
    given = (dout, q, k, v), normal(BATCH, HEADS, QUERIES), OPTIONS[name]
    got = results(*given)
    with by_reference(0.5):
        want = results(*given)
    for a, b in zip(got, want, strict=True):
        seen = np.isfinite(b)
        assert_elements(np.isfinite(a), seen, "np.isfinite(a)")
        assert a.dtype == b.dtype
        bound = (34 + largest) * 2.0**-24 * np.abs(b[seen]).max()
        assert np.abs(a[seen] - b[seen]).max() <= bound
