"""Directions of a call's inputs, their derivatives, and bounds of errors."""

import numpy as np

from .derivative_rounding import bounds, largest
from .reference_cases import EPS
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


def derivative_bounds(case, direction):
    """Return the bounds of float64 results: `derivative_rounding.bounds`."""
    inputs, (dout, dlse) = inputs_of(case), cotangents_of(case)
    slopes = largest(case.option_arrays().get("alibi_slopes"))
    return bounds(
        inputs,
        direction,
        dout,
        dlse,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        unit=EPS,
        softcap=case.softcap,
        dropout=case.dropout,
        added=largest(inputs.get("bias"))
        + largest(inputs.get("sink"))
        + slopes * (case.seqlen_q + case.seqlen_k),
    )
