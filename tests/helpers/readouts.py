r"""Weights, their sums and entropies: calls, and what to expect of them.

The matrices are written out, in float64, with the options by `terms_of`: P,
log P, and the slopes of scores. Errors are of first order (rounding.py): of a
weight

    3 w + P row + f         its own, and that of the lse which stands for m
    log P: 3 delta + row    absolute; P times it is 3 score_error + P row

and errors of a sum are the sum of those of its terms, and n e of their
magnitudes for n additions, whatever their signs. So `low` is not needed.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

import cuflash
from cuflash.reference.scores import reduce_to_shape

from .compare import Expected
from .data import inputs
from .dtypes import DTYPES, PRECISION, lse_dtype
from .heads import heads_first, heads_last, sum_groups
from .options import terms_of
from .packed import sequences_of
from .rounding import Rounding, turned

# By name: the call, and more of its arguments.
CALLS = {
    "weights": (cuflash.weights, {}),
    "weights16": (cuflash.weights, {}),  # in the dtype of q
    "sums": (cuflash.weight_sums, {}),
    "maxima": (cuflash.weight_sums, {"reduce": "max"}),
    "entropy": (cuflash.entropy, {}),
}
GRADIENTS = {
    "weights": (cuflash.weights_backward, {}),
    "sums": (cuflash.weight_sums_backward, {"return_drow_weights": True}),
    "maxima": (
        cuflash.weight_sums_backward,
        {"reduce": "max", "return_drow_weights": True},
    ),
    "entropy": (cuflash.entropy_backward, {}),
}


def is_packed(case):
    return case.offsets is not None


@dataclass(frozen=True)
class Chosen:
    """What a case's calls choose: by its seed.

    queries : (n,), or (batch, n); some twice, some from the end.
    keys, heads : (n,)
    flags : of queries, (seqlen_q,) or (batch, seqlen_q).
    row_weights : broadcastable to lse.
    """

    queries: np.ndarray
    keys: np.ndarray
    heads: np.ndarray
    flags: np.ndarray
    row_weights: np.ndarray

    @classmethod
    def of(cls, case):
        rng = np.random.default_rng([case.seed, 11])
        by_batch = not is_packed(case) and rng.random() < 0.5
        lead = (case.batch,) if by_batch else ()

        def some(length, lead=()):
            if not length:
                return np.zeros((*lead, 0), np.int64)
            count = int(rng.integers(1, 7))
            return rng.integers(-length, length, (*lead, count))

        rows = (1, case.seqlen_q) if rng.random() < 0.5 else (
            case.num_heads_q, case.seqlen_q)  # fmt: skip
        return cls(
            some(case.seqlen_q, lead),
            some(case.seqlen_k),
            some(case.num_heads_q),
            rng.random((*lead, case.seqlen_q)) < 0.7,
            rng.standard_normal(rows).astype(lse_dtype(DTYPES[case.dtype])),
        )

    def arguments(self, name, case):
        """Return the arguments of a call."""
        if name.startswith("weights"):
            own = {"queries": self.queries, "keys": self.keys}
            more = {"dtype": case.dtype} if name == "weights16" else {}
            return {**own, "heads": self.heads, **more}
        if name == "entropy":
            return {}
        return {"queries": self.flags, "row_weights": self.row_weights}

    def pick(self, x):
        """Return the chosen ones of weights, (batch, heads, rows, keys)."""
        queries = np.broadcast_to(
            self.queries, (len(x), self.queries.shape[-1])
        )
        of_batches = [
            y[self.heads][:, rows][..., self.keys]
            for y, rows in zip(x, queries, strict=True)
        ]
        return np.stack(of_batches)

    def put(self, chosen, shape):
        """Return the sums of chosen numbers at their pairs."""
        whole = np.zeros(shape)
        queries = np.broadcast_to(
            self.queries, (shape[0], self.queries.shape[-1])
        )
        for y, rows, own in zip(whole, queries, chosen, strict=True):
            for head, of_head in zip(self.heads, own, strict=True):
                np.add.at(y[head], (rows[:, None], self.keys), of_head)
        return whole


# Calls ----------------------------------------------------------------------


def operands(backend, case):
    """Return q, k and lse as calls take them, lse of NumPy arrays' forward.

    No kernel of the forward pass has to be compiled.
    """
    q, k, _, _ = (x[0] if is_packed(case) else x for x in inputs(case))
    options = without_dropout(case).call() | {"block_q": None, "block_k": None}
    _, lse = cuflash.forward(q, k, k, **options, return_lse=True)
    return [backend.place(x) for x in (q, k, lse)]


def call(backend, case, name, **changed):
    """Return a readout of a case as a NumPy array in full rank."""
    function, more = CALLS[name]
    q, k, lse = operands(backend, case)
    asked = case.call() | Chosen.of(case).arguments(name, case) | more
    backend.poison()
    with backend.running(case):
        found = function(q, k, lse, **_placed(backend, asked | changed))
    found = backend.fetch(found)
    return found[None] if is_packed(case) else found


def cotangent(case, name):
    """Return the gradient of a loss with respect to a readout."""
    rng = np.random.default_rng([case.seed, 13])
    c, dtype = case, lse_dtype(DTYPES[case.dtype])
    if name == "weights":
        chosen = Chosen.of(case)
        shape = (c.batch, len(chosen.heads), chosen.queries.shape[-1],
                 len(chosen.keys))  # fmt: skip
    else:
        last = c.seqlen_q if name == "entropy" else c.seqlen_k
        shape = c.batch, c.num_heads_q, last
    found = rng.standard_normal(shape).astype(dtype)
    if name == "maxima":  # a key whose row rounding decides has none
        found[~_is_sure(case)] = 0
    return found


def call_gradients(backend, case, name, **changed):
    """Return the gradients of a readout as NumPy arrays in full rank."""
    function, more = GRADIENTS[name]
    q, k, lse = operands(backend, case)
    given = cotangent(case, name)
    given = backend.place(given[0] if is_packed(case) else given)
    asked = case.call() | Chosen.of(case).arguments(name, case) | more
    asked["deterministic"] = case.deterministic
    backend.poison()
    with backend.running(case):
        found = function(given, q, k, lse, **_placed(backend, asked | changed))
    found = [backend.fetch(x) for x in found]
    if is_packed(case):
        found[:3] = [x[None] for x in found[:3]]
    return found


def _placed(backend, asked):
    return {
        name: backend.place(x) if isinstance(x, np.ndarray) else x
        for name, x in asked.items()
    }


def without_dropout(case):
    return replace(case, dropout=0.0)


# What to expect -------------------------------------------------------------


@dataclass
class Matrices:
    """Of all pairs, (batch, heads, queries, keys).

    p, log_p, slope : log P is 0 where P is.
    of_p, of_log, of_slope : their errors; of_log times P.
    see : which query sees which key.
    """

    p: np.ndarray
    log_p: np.ndarray
    slope: np.ndarray
    of_p: np.ndarray
    of_log: np.ndarray
    of_slope: np.ndarray
    see: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=2)
    def of(cls, case):
        """Return those of a case; 0 between packed sequences."""
        case = without_dropout(case)
        q, k, _, _ = inputs(case)
        if not is_packed(case):
            return _matrices(case, q, k, case.meaning())
        shape = 1, case.num_heads_q, case.seqlen_q, case.seqlen_k
        fields = cls.__dataclass_fields__
        whole = cls(**{x: np.zeros(shape, bool if x == "see" else float)
                       for x in fields})  # fmt: skip
        for i, j, options in sequences_of(case):
            own = _matrices(case, q[:, i], k[:, j], options)
            for name in fields:
                getattr(whole, name)[..., i, j] = getattr(own, name)
        return whole


def _matrices(case, q, k, options):
    options = dict(options)
    scale = options.pop("scale", None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    terms = terms_of(q, k, **options)
    heads = q.shape[2]
    wide = [heads_first(x, heads).astype(np.float64) for x in (q, k)]
    with np.errstate(all="ignore"):
        products = wide[0] @ turned(wide[1]) * scale
        s = terms.score(products)
        p, of_sink = terms.softmax(s)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        if terms.sink is not None:
            m = np.maximum(m, terms.sink)
        m = np.where(m == -np.inf, 0, m)
        sink = -np.inf if terms.sink is None else terms.sink
        total = np.exp(s - m).sum(axis=-1, keepdims=True) + np.exp(sink - m)
        lse = m + np.log(total)
        r = Rounding(
            None, q, k, np.zeros_like(k[..., :1]), lse[..., 0], terms,
            scale=scale, exact_scores=False, **case.sums(),
        )  # fmt: skip
        floor = PRECISION[lse_dtype(q.dtype).name].floor
        cut = p * (np.abs(r.moved_s) + np.abs(r.moved_lse))
        ones = np.ones(p.shape)
        return Matrices(
            p,
            np.where(p > 0, s - lse, 0),
            r.slope * ones,
            3 * r.w + p * r.row + cut + floor * terms.see,
            3 * r.score_error + p * r.row + cut,
            r.slope_error * ones,
            terms.see & (ones > 0),
        )


def expected(case, name):
    """Return what to expect of a readout, in full rank."""
    x, chosen = Matrices.of(case), Chosen.of(case)
    e = PRECISION[case.dtype].sum_unit
    if name.startswith("weights"):
        p, of_p = chosen.pick(x.p), chosen.pick(x.of_p)
        if name == "weights16":
            unit, floor, _ = PRECISION[case.dtype]
            of_p = of_p + unit * p + floor
        return Expected(p, p, of_p, 0)
    if name == "entropy":
        terms = x.p * x.log_p
        error = x.of_p * np.abs(x.log_p) + x.of_log
        error += e * terms.shape[-1] * np.abs(terms)
        found = 0 - terms.sum(axis=-1)
        return Expected(found, found, error.sum(axis=-1), 0)
    r, counts = _rows(case, chosen, x.p.shape)
    counts = x.see & counts
    terms, error = np.where(counts, r * x.p, 0), np.abs(r) * x.of_p * counts
    if name == "maxima":
        found = np.where(counts, terms, -np.inf).max(axis=-2, initial=-np.inf)
        found = np.where(counts.any(axis=-2), found, 0)
        error = error.max(axis=-2, initial=0) + e * np.abs(found)
        return Expected(found, found, error, 0)
    error += e * terms.shape[-2] * np.abs(terms)
    found = terms.sum(axis=-2)
    return Expected(found, found, error.sum(axis=-2), 0)


def expected_gradients(case, name):
    """Return what to expect of dq, dk and dlse, and of drow_weights."""
    x, chosen = Matrices.of(case), Chosen.of(case)
    d = cotangent(case, name).astype(np.float64)
    r, of_g, terms = np.ones((1, 1, 1, 1)), 0.0, None
    if name == "weights":
        g = chosen.put(d, x.p.shape)
        terms = chosen.put(np.abs(d), x.p.shape)
    elif name == "entropy":
        r, g, of_g = d[..., None], -x.log_p - 1, x.of_log
    else:
        r, counts = _rows(case, chosen, x.p.shape)
        g = np.where(counts & x.see, d[:, :, None], 0)
        if name == "maxima":
            g = np.where(_is_largest(case, x, chosen), g, 0)
    found = _gradients(case, x, r, g * x.see, of_g, terms)
    if name not in ("sums", "maxima"):
        return found
    e = PRECISION[case.dtype].sum_unit
    rows, error = x.p * g, x.of_p * np.abs(g)
    count = rows.size / max(chosen.row_weights.size, 1)
    error += e * count * np.abs(rows)
    shape = chosen.row_weights.shape
    rows, error = (
        reduce_to_shape(y.sum(axis=-1), shape) for y in (rows, error)
    )
    return *found, Expected(rows, rows, error, 0)


def _gradients(case, x, r, g, of_g, terms=None):
    """Of dX = P r g; of_g: the error of g, times P.

    terms : magnitudes of what g is a sum of, each of which kernels round, as
        dX, alone; by default g's.
    """
    u, f, e = PRECISION[case.dtype]
    q, k, _, _ = inputs(case)
    heads, heads_kv = case.num_heads_q, case.num_heads_kv
    q, k = (heads_first(y, heads).astype(np.float64) for y in (q, k))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    dx = x.p * r * g
    error = x.of_p * np.abs(r * g) + np.abs(r) * of_g + 4 * e * np.abs(dx)
    ds = dx * x.slope
    of_ds = error * np.abs(x.slope) + np.abs(dx) * x.of_slope
    stored = ds if terms is None else x.p * r * terms * x.slope
    of_ds += (u + 2 * e) * np.abs(stored) + f * x.see
    sizes = of_ds + e * ds.shape[-1] * np.abs(ds)
    dq, of_dq = scale * ds @ k, np.abs(scale) * sizes @ np.abs(k)
    sizes = of_ds + e * ds.shape[-2] * heads / heads_kv * np.abs(ds)
    dk, of_dk = turned(ds) @ q, turned(sizes) @ np.abs(q)
    dk, of_dk = (abs(scale) * sum_groups(y, heads_kv) for y in (dk, of_dk))
    dk *= np.sign(scale)
    dlse = 0 - dx.sum(axis=-1)
    of_dlse = (error + e * dx.shape[-1] * np.abs(dx)).sum(axis=-1)
    return (
        _rounded(heads_last(dq), heads_last(of_dq), u, f),
        _rounded(heads_last(dk), heads_last(of_dk), u, f),
        _rounded(dlse, of_dlse, e, 0),
    )


def _rounded(x, error, u, f):
    return Expected(x, x, error + u * np.abs(x) + f, 0)


def _rows(case, chosen, shape):
    """Return row weights and flags, (batch, heads, seqlen_q, 1)."""
    flags = chosen.flags
    flags = flags[:, None] if flags.ndim == 2 else flags
    rows = (*shape[:3],)
    return tuple(
        np.broadcast_to(y, rows)[..., None]
        for y in (chosen.row_weights.astype(np.float64), flags)
    )


def _is_largest(case, x, chosen):
    """Which pairs have their key's largest weight, first of equal ones."""
    r, counts = _rows(case, chosen, x.p.shape)
    terms = np.where(x.see & counts, r * x.p, -np.inf)
    if not terms.shape[-2]:
        return np.zeros(terms.shape, bool)
    row = terms.argmax(axis=-2)[..., None, :]
    return np.arange(terms.shape[-2])[:, None] == row


def _is_sure(case):
    """Which keys have a largest weight that no rounding can exceed."""
    x, chosen = Matrices.of(case), Chosen.of(case)
    r, counts = _rows(case, chosen, x.p.shape)
    counts, error = x.see & counts, np.abs(r) * x.of_p
    largest = _is_largest(case, x, chosen)
    lowest = np.where(largest & counts, r * x.p - error, np.inf)
    others = np.where(~largest & counts, r * x.p + error, -np.inf)
    axis = {"axis": -2, "initial": np.inf}
    return lowest.min(**axis) > others.max(axis=-2, initial=-np.inf)
