"""The worst-case error of the demo model's logits, in float64.

An error analysis of one forward pass. Beside each array stands e, a bound on
the Euclidean norm of a token's errors, the same for all tokens, to first
order in u = 2**-53. Each operation adds its own roundings, counted as in
docs/guide/accuracy.md, to the errors of its inputs times the norm of its
derivative. The bound holds for every order of the sums, so it holds for a
pass with a KV cache, too.
"""

import numpy as np

from demo_parts.model import to_numpy

U = 2.0**-53


def longest(x):
    """Return the largest Euclidean norm of a row."""
    return float(np.linalg.norm(x, axis=-1).max())


def product(x, w, e):
    """Bound x W: a sum of n products errs by at most n u |x| |W|."""
    own = len(w) * U * longest(np.abs(x) @ np.abs(w))
    return np.linalg.norm(w, 2) * e + own


def norm(x, gain, e):
    """Bound x / r times the gain, with r^2 = mean(x^2) + 1e-6.

    The derivative of x / r is (I - x x^T / (C r^2)) / r, of norm 1 / r. r^2
    is a sum of positive terms: its relative error is (C + 2) u, half of that
    in r. The power errs by 4 u, the two products by u each.
    """
    channels = x.shape[-1]
    r = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    own = (channels / 2 + 7) * U * longest(x / r * gain)
    return np.abs(gain).max() / r.min() * e + own


def attention(q, k, v, e):
    """Bound the heads' out, joined; e is that of q, k and v.

    A score s_j errs by at most f = |scale| e (|q| + |k|), so that out errs by
    sum_j P_j (s_j's error) (v_j - out). sum_j P_j |v_j - out| is at most
    max|v|, as the square of a mean is at most the mean of squares. The errors
    of v add e.

    The page bounds the roundings of one element of out by 2 max|v| times
    `whole`, and those of lse by `lse`; b is 4 here, for any tile. Up to 128
    parts may be merged, which the page leaves out: a weight exp(lse - m) has
    the relative error of lse, 6 u for each unit of |lse| < a + log n, and 4 u
    of exp; sums of 128 with four rescalings, and a quotient, have 150 u.
    """
    n, num_heads, d = q.shape[1:]
    scale = d**-0.5
    score = scale * e * (longest(q) + longest(k))
    passed = num_heads**0.5 * (longest(v) * score + e)
    a = scale * longest(q) * longest(k)
    sums, top = n + 6 * -(-n // 4), a + np.log(n)
    whole = d * a + 12 * a + sums + 5
    lse = d * a + 16 * a + sums + 4 * top + 4
    own = 2 * np.abs(v).max() * U * (whole + lse + 6 * top + 4 + 150)
    return passed + (num_heads * d) ** 0.5 * own


def logits(model, saved):
    """Bound the errors of model.forward's logits, given what it saved."""
    p = {name: to_numpy(x) for name, x in model.p.items()}
    saved = {
        name: [to_numpy(part) for part in x] if type(x) is tuple else x
        for name, x in saved.items()
    }
    num_layers = model.config.num_layers
    x, _ = saved["0.norm1"]
    e = U * longest(x)
    for i in range(num_layers):
        y = norm(x, p[f"{i}.norm1"], e)
        n, q, k, v, out, _ = saved[f"{i}.attention"]
        y = attention(q, k, v, product(n, p[f"{i}.qkv"], y))
        y = product(out.reshape(x.shape), p[f"{i}.out"], y)
        x, _ = saved[f"{i}.norm2"]
        e += y + U * longest(x)

        y = norm(x, p[f"{i}.norm2"], e)
        n, hidden = saved[f"{i}.mlp"]
        y = product(n, p[f"{i}.mlp_in"], y)
        squares = hidden * hidden
        y = 2 * hidden.max() * y + U * longest(squares)
        y = product(squares, p[f"{i}.mlp_out"], y)
        x, _ = saved[f"{i + 1}.norm1" if i + 1 < num_layers else "norm"]
        e += y + U * longest(x)
    return product(to_numpy(saved["last"]), p["logits"], norm(x, p["norm"], e))
