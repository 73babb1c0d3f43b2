"""How far rounding may move tangents and second gradients."""

from typing import NamedTuple

import numpy as np


class Bounds(NamedTuple):
    """Largest difference of two correct results, for each."""

    out_dot: float
    lse_dot: float
    q: float
    k: float
    v: float
    bias: float
    sink: float


def bounds(
    inputs, direction, dout, dlse, *, scale, unit, softcap=None, dropout=0.0,
    added=0.0, stored=0.0, group=1,
):  # fmt: skip
    """Derive the largest difference of two orders of summation, in `unit`.

    A score is a product of head_dim terms, scaled, and what is added to it;
    with s the largest, and as in `reference_cases.bounds`, a weight P has the
    relative error

        rel = (2 (head_dim + 12) s + 3 n_k + 11) unit.

    Each of P, W, dP, D, b and U is off by at most r times its largest
    magnitude, with

        r = rel + (2 (head_dim + head_dim_v) + n_k + 20) unit + stored

    for products of head_dim and head_dim_v terms, sums over keys, and a few
    roundings more. `stored` is the unit of the dtype, to which out is
    rounded, which D reads. A softcap's slope 1 - t^2 is off by
    2 t (1 - t^2) < 1 times the error of a score over the cap, and its
    curvature, whose derivative is below 2 / cap^2, by as much over the cap. A
    term that is a product of up to four of them is off by 5 r of its
    magnitude. With w, g and u the largest of W, of dP and D, and of U, and z
    dropout's factor:

        |b| <= w,  |P' V + P V'| <= z (2 w |V| + |V'|)
        |dO . ddO| <= 2 g w + u,  |E| <= 3 g w + u
        |T / P| <= 2 g w + g w + u + |E| <= 6 g w + 2 u

    A row of P adds up to 1, a column to at most n_q, and a key head has
    `group` columns. Sums over all pairs or rows add a unit for each term.

    Parameters
    ----------
    inputs : dict
        q, k and v, as (..., seqlen, d).
    direction : dict
        Tangents by name.
    added : float
        The largest number that bias, sink and slopes add to a score.
    """
    q, k, v = (inputs[x] for x in "qkv")
    of = {x: largest(direction.get(x)) for x in ("q", "k", "v", "bias")}
    of["sink"] = largest(direction.get("sink"))
    n_q, n_k, d, d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    s = scale * longest(q) * longest(k) + added
    z, scale = 1 / (1 - dropout), abs(scale)
    terms = 2 * (d + 12) * abs(s) + 3 * n_k + 11
    terms += 2 * (d + d_v) + n_k + 20
    bent = 0.0
    if softcap is not None:
        terms += 2 * (d + 12) * abs(s) / softcap + 4
        bent = 1 / softcap
    r = terms * unit + stored
    x_dot = scale * longest(direction.get("q")) * longest(k)
    x_dot += scale * longest(q) * longest(direction.get("k"))
    w = x_dot + of["bias"] + of["sink"]
    g = 2 * z * longest(dout) * longest(v) + largest(dlse)
    u = z * longest(dout) * longest(direction.get("v"))
    t = 6 * g * w + 2 * u
    t_x = t + 2 * bent * g * x_dot
    rows, columns = q[..., 0].size, n_q * group
    both = 2 * 5 * r  # two results
    return Bounds(
        out_dot=both * z * (2 * w * largest(v) + of["v"]),
        lse_dot=both * w,
        q=both * scale * (t_x * largest(k) + 2 * g * of["k"]),
        k=both * scale * (t_x * largest(q) + 2 * g * of["q"]) * columns,
        v=both * 2 * w * z * largest(dout) * columns,
        bias=(both + 2 * rows * n_k * unit) * t * rows * n_k,
        sink=(both + 2 * rows * unit) * 2 * t * rows,
    )


def largest(array):
    """Return the largest magnitude; 0 of no array."""
    return 0.0 if array is None else float(abs(array).max(initial=0.0))


def longest(array):
    """Return the length of the longest row; 0 of no array."""
    if array is None:
        return 0.0
    return float(np.sqrt((array**2).sum(axis=-1)).max(initial=0.0))
