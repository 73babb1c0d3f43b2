"""Directions of a call's inputs, their derivatives, and bounds of errors."""

from typing import NamedTuple

import numpy as np

from .reference_cases import EPS, bounds
from .reference_dense import dense_attention, dense_vjp

INPUTS = "q", "k", "v", "bias", "sink"
H = 1e-30  # of a complex step: h^2 is far below one rounding of 1


def inputs_of(case):
    """Return the inputs that have gradients, by name, in float64."""
    q, k, v, _ = case.arrays()
    added = case.option_arrays()
    found = {"q": q, "k": k, "v": v, **added}
    return {name: found[name] for name in INPUTS if name in found}


def direction_of(case, names, lead=()):
    """Return tangents of the named inputs that a case has, standard normal.

    Those of bias and sink have all the axes that broadcasting leaves out.
    """
    rng = np.random.default_rng(case.seed + 4)
    found = {}
    for name, x in inputs_of(case).items():
        tangent = rng.standard_normal((*lead, *x.shape))
        if name in names:
            found[name] = tangent
    return found


def with_directions_first(case, direction):
    """Return the arguments of `jvp`, several tangents being the first axis."""
    axes = {"bias": len(case.lead) + 2, "sink": len(case.lead)}
    arguments = {}
    for name, x in direction.items():
        missing = axes.get(name, x.ndim - 1) - (x.ndim - 1)
        shape = x.shape[:1] + (1,) * missing + x.shape[1:]
        arguments[f"{name}_dot"] = x.reshape(shape)
    return arguments


def cotangents_of(case):
    """Return dout and dlse, standard normal."""
    rng = np.random.default_rng(case.seed + 5)
    dout = case.arrays()[3]
    return dout, rng.standard_normal(dout.shape[:-1])


def moved(inputs, direction, step):
    """Return the inputs in extended precision, moved along a direction."""
    wide = np.result_type(np.longdouble, step)
    return {
        name: x.astype(wide) + step * direction.get(name, 0.0)
        for name, x in inputs.items()
    }


def derivative(call, inputs, direction):
    """Return the derivative of call(inputs) by a complex step."""
    step = np.clongdouble(1j) * np.longdouble(H)
    ahead = call(moved(inputs, direction, step))
    return {name: x.imag / np.longdouble(H) for name, x in ahead.items()}


def difference(call, inputs, direction, h):
    """Return the central difference of call(inputs)."""
    h = np.longdouble(h)
    ahead, behind = (call(moved(inputs, direction, step)) for step in (h, -h))
    # lse of rows that see nothing is -inf on both sides, and does not move.
    with np.errstate(invalid="ignore"):
        return {
            name: np.where(x == behind[name], 0, x - behind[name]) / (2 * h)
            for name, x in ahead.items()
        }


def forward_of(case):
    """Return a function from inputs to out and lse."""

    def call(inputs):
        out, lse = dense_attention(case, inputs)
        return {"out": out, "lse": lse}

    return call


def backward_of(case):
    """Return a function from inputs to their gradients."""
    dout, dlse = cotangents_of(case)
    return lambda inputs: dense_vjp(case, dout, dlse, inputs)


class Bounds(NamedTuple):
    """Largest difference of two correct float64 results, for each."""

    out_dot: float
    lse_dot: float
    q: float
    k: float
    v: float
    bias: float
    sink: float


def derivative_bounds(case, direction):
    """Derive the largest difference of two orders of summation.

    As in `reference_cases.bounds`, whose `rel`, the relative error of a
    weight, is that of out over the largest |V|: each of P, W, dP, D, b and U
    has an error of at most r times its largest magnitude, with

        r = rel + (2 (head_dim + head_dim_v) + n_k + 20) EPS

    for products of head_dim and head_dim_v terms, sums over keys, and a few
    roundings more; a softcap's slope is off by its t's error, as there, and
    its curvature, whose derivative is below 2 / cap^2, by as much over the
    cap. A term that is a product of up to four of them is off by 5 r of its
    magnitude. With w, g and u the largest of W, of dP and D, and of U:

        |b| <= w,  |P' V + P V'| <= z (2 w |V| + |V'|)
        |dO . ddO| <= 2 g w + u,  |E| <= 3 g w + u
        |T / P| <= 2 g w + g w + u + |E| <= 6 g w + 2 u

    A row of P adds up to 1, a column to at most n_q.
    """
    inputs, (dout, dlse) = inputs_of(case), cotangents_of(case)
    q, k, v = (inputs[x] for x in "qkv")
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    z, n_q, n_k = 1 / (1 - case.dropout), case.seqlen_q, case.seqlen_k
    of = {name: _largest(direction.get(name, np.zeros(1))) for name in INPUTS}
    limits = bounds(case, q, k, v, dout, dlse)
    rel = limits.out / (2 * z * max(_largest(v), 1e-300))
    terms = 2 * (case.head_dim + case.head_dim_v) + n_k + 20
    d = case.head_dim
    x_dot = scale * d * (of["q"] * _largest(k) + _largest(q) * of["k"])
    bent = 0.0
    if case.softcap is not None:
        s = scale * d * _largest(q) * _largest(k)
        terms += 2 * (d + 12) * s / case.softcap
        bent = 1 / case.softcap
    r = rel + terms * EPS
    w = x_dot + of["bias"] + of["sink"]
    g = 2 * z * case.head_dim_v * _largest(dout) * _largest(v)
    g += _largest(dlse)
    u = z * case.head_dim_v * _largest(dout) * of["v"]
    t = 6 * g * w + 2 * u
    t_x = t + 2 * bent * g * x_dot
    rows = q[..., 0].size
    both = 2 * 5 * r  # two results
    return Bounds(
        out_dot=both * z * (2 * w * _largest(v) + of["v"]),
        lse_dot=both * w,
        q=both * scale * (t_x * _largest(k) + 2 * g * of["k"]),
        k=both * scale * (t_x * _largest(q) + 2 * g * of["q"]) * n_q,
        v=both * 2 * w * z * _largest(dout) * n_q,
        bias=(both + 2 * rows * n_k * EPS) * t * rows * n_k,
        sink=(both + 2 * rows * EPS) * 2 * t * rows,
    )


def _largest(array):
    return abs(array).max(initial=0.0)
