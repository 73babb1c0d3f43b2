"""Inputs of the reference, its schedules, and their tolerances."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cuflash.reference import backward, forward
from cuflash.reference.dropout import Dropout

from . import punishing
from .compare import assert_allclose

EPS = 2.0**-53  # largest relative error of one float64 rounding


@dataclass(frozen=True)
class ReferenceCase:
    """One call with any leading axes; arrays come from the seed."""

    lead: tuple[int, ...] = ()
    seqlen_q: int = 7
    seqlen_k: int = 7
    head_dim: int = 4
    head_dim_v: int = 4
    causal: bool = False
    scale: float | None = None
    block_q: int = 3
    block_k: int = 2
    seed: int = 0
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    arrays_of: tuple[str, ...] = ()  # names of `option_arrays`
    dropout: float = 0.0
    values: str = "normal"  # or a kind of punishing.KINDS

    def meaning(self):
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            **self.option_arrays(),
            "dropout": self.dropped(),
            "heads_first": True,
        }

    def option_arrays(self):
        """Return the names in `OPTION_ARRAYS` that the case has."""
        rng = np.random.default_rng(self.seed + 1)
        made = {name: make(rng, self) for name, make in OPTION_ARRAYS.items()}
        return {name: made[name] for name in made if name in self.arrays_of}

    def dropped(self):
        if not self.dropout:
            return None
        batch, head = np.indices((1, 1, *self.lead)[-2:])
        shape = self.lead or (1,)
        at = [
            x.reshape(shape) if self.lead else x[0, 0] for x in (batch, head)
        ]
        return Dropout(self.dropout, self.seed, *at)

    def blocks(self):
        return {"block_q": self.block_q, "block_k": self.block_k}

    def arrays(self):
        """Return q, k, v and dout, of one kind in all leading axes."""
        rng = np.random.default_rng(self.seed)
        n, m, d, e = sizes = (
            self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim_v
        )  # fmt: skip
        shapes = (n, d), (m, d), (m, e), (n, e)
        if self.values == "normal":
            return [rng.standard_normal((*self.lead, *x)) for x in shapes]
        scale = d**-0.5 if self.scale is None else self.scale
        head = punishing.Head(*sizes, scale, "float64")
        kind = getattr(punishing, self.values)
        made = [kind(rng, head) for _ in np.ndindex(self.lead)]
        return [
            np.reshape(x, (*self.lead, *shape))
            for x, shape in zip(zip(*made, strict=True), shapes, strict=True)
        ]


def _bias(rng, case):
    """A bias shared by all leading axes but the last, and by all queries."""
    return rng.standard_normal((*case.lead[-1:], 1, case.seqlen_k))


def _mask(rng, case):
    return rng.random((*case.lead, case.seqlen_q, case.seqlen_k)) < 0.8


def _ids(name):
    def make(rng, case):
        seqlen = getattr(case, name)
        return rng.integers(0, 3, (*case.lead[:1], *case.lead[1:2], seqlen))

    return make


OPTION_ARRAYS = {
    "alibi_slopes": lambda rng, case: rng.random(case.lead),
    "bias": _bias,
    "mask": _mask,
    "sink": lambda rng, case: rng.standard_normal(case.lead[-1:]),
    "segment_ids_q": _ids("seqlen_q"),
    "segment_ids_k": _ids("seqlen_k"),
}


def forward_results(case, q, k, v):
    """Yield (name, (out, lse)) of every schedule of the forward pass."""
    yield "row_by_row", forward.row_by_row(q, k, v, **case.meaning())
    for schedule in (
        forward.query_outer,
        forward.key_outer,
        forward.split_keys,
    ):
        result = schedule(q, k, v, **case.meaning(), **case.blocks())
        yield schedule.__name__, result


def backward_results(case, *operands, dlse=None):
    """Yield (name, (dq, dk, dv)) of every schedule of the backward pass."""
    given = {**case.meaning(), "dlse": dlse}
    yield "row_by_row", backward.row_by_row(*operands, **given)
    for schedule in (
        backward.query_outer,
        backward.key_outer,
        backward.two_pass,
    ):
        yield schedule.__name__, schedule(*operands, **given, **case.blocks())


class Bounds(NamedTuple):
    """Largest difference of two correct float64 results, for each."""

    out: float
    lse: float
    delta: float
    dq: float
    dk: float
    dv: float
    dbias: float
    dsink: float

    def gradients(self, case):
        """Return the gradients that a case has."""
        asked = [x for x in ("bias", "sink") if x in case.arrays_of]
        return [getattr(self, f"d{x}") for x in ("q", "k", "v", *asked)]


def bounds(case, q, k, v, dout, dlse=None):
    """Derive the largest difference of two orders of summation.

    A sum of n products is off by at most n EPS times the sum of their
    absolute values. So a score is off by (head_dim + 2) EPS S, with S the
    largest scale * |q| |k|^T; each subtraction of a maximum, and the
    rescalings of all tiles together, whose exponents add up to at most the
    range of scores, add 2 * 2 EPS S. P and l carry that twice (numerator
    and denominator) and one EPS for each of at most seqlen_k additions, as
    many rescalings and products, and 8 for exp, division and the rest:
    `rel`. A weight below 1e-308 loses its digits: less than EPS in all.
    dP and D are at most G = max |dout| |v|^T, relative error of both below
    rel + 2 head_dim_v EPS; D less dlse is at most G + max |dlse|, G from here
    on, and has one rounding more; rows of P sum to 1, columns to seqlen_q. Two
    results differ by twice the error of one.

    What is added to scores adds its size to S, and at most 6 roundings more:
    the slope of a softcap is at most 1. That slope, 1 - t^2, is off by
    2 t (1 - t^2) < 1 times the error of a score over the cap. A sink is one
    key more. Dropout makes what remains of P and dP larger by its factor.
    An element of dbias is a sum over at most all pairs, one of dsink over
    at most all rows.
    """
    scale = q.shape[-1] ** -0.5 if case.scale is None else abs(case.scale)
    added = case.option_arrays()
    s = scale * _largest(abs(q) @ abs(k).swapaxes(-1, -2))
    s += _largest(added.get("bias", np.zeros(1)))
    s += _largest(added.get("sink", np.zeros(1)))
    slope = _largest(added.get("alibi_slopes", np.zeros(1)))
    s += slope * (q.shape[-2] + k.shape[-2])
    dropped = 1 / (1 - case.dropout)
    g = dropped * _largest(abs(dout) @ abs(v).swapaxes(-1, -2))
    if dlse is not None:
        g += _largest(dlse)
    n_q, n_k = q.shape[-2], k.shape[-2]
    rel = (2 * (q.shape[-1] + 12) * s + 3 * n_k + 11) * EPS
    rel_ds = 2 * (2 * rel + (2 * v.shape[-1] + 5) * EPS)
    rel_ds_bias, rows = rel_ds, q[..., 0].size
    pairs = rows * n_k
    if case.softcap is not None:
        rel_ds += (2 * (q.shape[-1] + 12) * s / case.softcap + 4) * EPS
    many_q = n_q * (1 + n_q * EPS)
    return Bounds(
        out=2 * rel * dropped * _largest(v),
        lse=2 * (rel + EPS * (s + np.log(n_k + 1))),
        delta=2 * rel_ds * g,
        dq=2 * (rel_ds + n_k * EPS) * g * scale * _largest(k),
        dk=2 * (rel_ds + n_q * EPS) * g * scale * _largest(q) * many_q,
        dbias=2 * (rel_ds_bias + pairs * EPS) * g * pairs,
        dsink=2 * (rel_ds_bias + pairs * EPS) * g * rows,
        dv=2 * (rel + n_q * EPS) * dropped * _largest(dout) * many_q,
    )


def _largest(array):
    return abs(array).max(initial=0.0)


def assert_close(got, expected, bound, name=""):
    """Assert equal shapes, NaN and inf at the same indices, then the bound."""
    assert_allclose(got, expected, "got", atol=bound, case=name)
