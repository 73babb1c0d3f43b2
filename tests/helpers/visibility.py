"""Probes: calls whose results tell exactly which pairs were visible.

Scores are 0 and every number is a small integer, so each sum is exact in any
order and dtype. One pair too many or too few changes

    lse         the logarithm of the number of keys that a query sees,
    out, dq     sums of the codes of these keys,
    dk, dv      sums of the codes of the queries that see a key.

Codes are 1 or -1, drawn once for each index: another set of the same size has
other sums in some of 15 columns. For backward, lse is 0 and out is 0, so P is
1 at each visible pair and delta is 0; dout . v is 1, so dS is 1 too.

Columns, of 32: scores vanish because q and k are coded in different ones.

    q     codes     0
    k     0         codes
    v     codes     1 0 ...
    dout  0         1 codes
"""

import numpy as np

import cuflash
from cuflash.reference import masks

from .data import unlike
from .dtypes import DTYPES, lse_dtype

HEAD_DIM = 32
HALF = HEAD_DIM // 2


def codes(name, batch, tokens, heads):
    """Return 1 or -1 for each index and column: (batch, tokens, heads, HALF).

    A batch element or a head has the codes of its neighbour, a token on.
    """
    rng = np.random.default_rng([ord(x) for x in name])
    drawn = rng.choice([-1.0, 1.0], (tokens + batch + heads, HALF))
    at = np.add.outer(np.add.outer(range(batch), range(tokens)), range(heads))
    return drawn[at]


def arrays(dtype, batch, seqlen_q, seqlen_k, num_heads_q=1, num_heads_kv=1):
    """Return q, k, v and dout, each by strides of its own."""
    of_q = batch, seqlen_q, num_heads_q
    of_k = batch, seqlen_k, num_heads_kv
    q, dout = (np.zeros((*of_q, HEAD_DIM)) for _ in range(2))
    k, v = (np.zeros((*of_k, HEAD_DIM)) for _ in range(2))
    q[..., :HALF] = codes("q", *of_q)
    k[..., HALF:] = codes("k", *of_k)
    v[..., :HALF], v[..., HALF] = codes("v", *of_k), 1
    dout[..., HALF:] = codes("dout", *of_q)
    dout[..., HALF] = 1
    named = {"q": q, "k": k, "v": v, "dout": dout}
    return tuple(
        unlike(x.astype(DTYPES[dtype]), name) for name, x in named.items()
    )


def pairs(seqlen_q, seqlen_k, **options):
    """Return which query sees which key: bool (seqlen_q, seqlen_k)."""
    return masks.visible(seqlen_q, seqlen_k, **options)


def per_head(seen, q):
    """Return the visible pairs as float64 (batch, heads, queries, keys)."""
    batch, seqlen_q, heads, _ = q.shape
    seen = np.asarray(seen, np.float64)
    seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
    return np.broadcast_to(seen, (batch, heads, *seen.shape[2:]))


def _heads_first(x, heads):
    x = np.asarray(x, np.float64).swapaxes(1, 2)
    return x.repeat(heads // x.shape[1], axis=1)


def check_forward(backend, seen, q, k, v, dout=None, more=0, **options):
    """Assert that `forward` adds the visible pairs and no other.

    more : what a sink adds to each row's sum.
    """
    out, lse = cuflash.forward(
        *map(backend.place, (q, k, v)), scale=1.0, return_lse=True, **options
    )
    assert_states(backend.fetch(out), backend.fetch(lse), seen, q, v, more)


def assert_states(out, lse, seen, q, v, more=0):
    """Assert that out and lse are those of the visible pairs."""
    seen = per_head(seen, q)
    count = seen.sum(-1) + more
    with np.errstate(divide="ignore"):
        # Half a key: far more than the roundings of lse and of the sums.
        near = np.abs(np.exp(np.asarray(lse, np.float64)) - count) <= 0.5
    report(~near, "lse", np.exp(lse), count, "keys (batch, head, query)")
    sums = seen @ _heads_first(v, q.shape[2])
    got = np.asarray(out, np.float64).swapaxes(1, 2) * count[..., None]
    # Rounding to bfloat16: 2^-8 of a sum, which is below 128 here.
    report(~(np.abs(got - sums) <= 0.5), "out", got, sums, "sums of codes")


def check_backward(backend, seen, q, k, v, dout, **options):
    """Assert that `backward` adds the visible pairs and no other."""
    got = gradients(backend, seen, q, k, v, dout, **options)
    assert_gradients(got, seen, q, k, dout)


def gradients(backend, seen, q, k, v, dout, **options):
    """Return what `backward` does where each visible pair has dS = P = 1."""
    batch, seqlen_q, heads, _ = q.shape
    lse = np.zeros((batch, heads, seqlen_q), lse_dtype(q.dtype))
    seen = per_head(seen, q)
    # No weight where a row sees nothing: that is what lse says of it.
    lse[~seen.any(-1)] = -np.inf
    out = unlike(np.zeros_like(dout), "out")
    placed = map(backend.place, (dout, q, k, v, out, lse))
    got = cuflash.backward(*placed, scale=1.0, **options)
    return [backend.fetch(x) for x in got]


def assert_gradients(got, seen, q, k, dout):
    """Assert that dq, dk and dv are those of the visible pairs."""
    seen = per_head(seen, q)
    kv = k.shape[2]
    wanted = {
        "dq": seen @ _heads_first(k, q.shape[2]),
        "dk": _of_groups(
            seen.swapaxes(2, 3) @ _heads_first(q, q.shape[2]), kv
        ),
        "dv": _of_groups(
            seen.swapaxes(2, 3) @ _heads_first(dout, q.shape[2]), kv
        ),
    }
    for (name, sums), x in zip(wanted.items(), got, strict=True):
        sums = sums.swapaxes(1, 2).astype(x.dtype).astype(np.float64)
        x = np.asarray(x, np.float64)
        report(x != sums, name, x, sums, "(batch, token, head, column)")


def _of_groups(x, kv):
    """Add up the query heads of each key head."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv, heads // kv, *rest).sum(2)


def report(wrong, name, got, wanted, what):
    """Fail with the first wrong element, and how many there are."""
    at = np.argwhere(wrong)
    if len(at):
        first = tuple(int(i) for i in at[0])
        raise AssertionError(
            f"{name}{list(first)}: got {np.asarray(got)[first]:.6g}, want "
            f"{np.asarray(wanted)[first]:.6g} {what}; {len(at)} of "
            f"{np.size(got)} are wrong"
        )
