"""Compares one large random call on the GPU with plain attention on the GPU.

For every shape, a few key heads with all their query heads are computed by
plain attention, in float64 (`ref`) and in the dtype (`low`). As everywhere
(CONTRIBUTING.md, "Error"),

    max|got - ref| <= max(factor * max|low - ref|, tiny)

with factor 2 for out and 3 for gradients. `tiny` is one unit in the last
place of the largest element of ref: a result whose last bit is rounded to the
other side has a smaller error.

lse has no `low`; its bound is one like that of tests/helpers/rounding.py that
needs no matrix: partial sums of q_i k_j are at most |q_i| |k_j|, by Cauchy's
inequality. With e = 2^-23, float32's epsilon,

    e ((sqrt(d) + 8) |scale| |q_i| max_j |k_j| + sqrt(seqlen_k) + 4 + 2 |lse|)

for a dot product of d terms, its scaling and the subtraction of m, the sum of
seqlen_k weights, and its logarithm.
"""

from __future__ import annotations

from collections.abc import Iterator

import cupy
import ml_dtypes
import numpy as np

import cuflash
from bench_parts.checks import poison
from bench_parts.runners import DTYPES
from dense_attention import attend

from .shapes import Shape

FACTORS = {"out": 2, "dq": 3, "dk": 3, "dv": 3}
STEP = 2.0**-23  # of float32, relative
# Most (query, key) pairs and key heads that are checked.
MOST_PAIRS, MOST_KEY_HEADS = 1 << 29, 8

Arrays = dict[str, cupy.ndarray]


class WrongResult(Exception):
    """A result beyond its bound."""


def check(shape: Shape) -> dict[str, float]:
    """Call cuflash; return each result's largest error / bound.

    Raises
    ------
    WrongResult
        If one is above 1, or a result is not finite where it must be.
    """
    inputs = make_inputs(shape)
    got = results(shape, inputs)
    for name, array in got.items():
        # lse is -inf in rows that see no key: they are compared below.
        bad = cupy.isnan(array) if name == "lse" else ~cupy.isfinite(array)
        if bad.any():
            raise WrongResult(f"{name} has NaN or inf")
    errors = {name: Errors() for name in FACTORS}
    ratios = {"lse": 0.0}
    for batch, head in chosen(shape):
        ref = of_group(shape, inputs, batch, head, np.float64)
        low = of_group(shape, inputs, batch, head, np.float32)
        ours = parts_of_group(shape, got, batch, head)
        for name, found in errors.items():
            found.add(ours[name], ref[name], low[name])
        q, k = (parts_of_group(shape, inputs, batch, head)[x] for x in "qk")
        bound = lse_bound(shape, q, k, ref["lse"])
        ratios["lse"] = max(
            ratios["lse"], lse_error(ours["lse"], ref["lse"], bound)
        )
    step = float(ml_dtypes.finfo(DTYPES[shape.dtype]).eps)
    for name, found in errors.items():
        ratios[name] = found.over_bound(FACTORS[name], step)
    for name, ratio in ratios.items():
        if not ratio <= 1:
            raise WrongResult(f"{name} is off by {ratio:.3g} of its bound")
    return ratios


def make_inputs(shape: Shape) -> Arrays:
    """Draw standard normal q, k, v and dout."""
    random = cupy.random.default_rng(shape.seed)
    drawn = cupy.float64 if shape.dtype == "float64" else cupy.float32
    return {
        name: random.standard_normal(sizes, drawn).astype(
            DTYPES[shape.dtype], copy=False
        )
        for name, sizes in shape.shapes.items()
    }


def results(shape: Shape, inputs: Arrays) -> Arrays:
    """Return out, lse, dq, dk and dv, in memory filled with NaN before."""
    q, k, v, dout = inputs.values()
    options = {
        "scale": shape.scale,
        "causal": shape.causal,
        "precision": shape.precision,
    }
    poison(max(x.nbytes for x in inputs.values()))
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    dq, dk, dv = cuflash.backward(
        dout, q, k, v, out, lse, **options, deterministic=shape.deterministic
    )
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def chosen(shape: Shape) -> Iterator[tuple[int, int]]:
    """Choose (batch, key head) pairs, always including the last one."""
    pairs = shape.group_size * shape.seqlen_q * shape.seqlen_k
    there = shape.batch * shape.num_heads_kv
    count = min(max(MOST_PAIRS // pairs, 1), MOST_KEY_HEADS, there)
    rng = np.random.default_rng(shape.seed)
    others = rng.permutation(there - 1)[: count - 1]
    for index in (there - 1, *others):
        yield divmod(int(index), shape.num_heads_kv)


def parts_of_group(
    shape: Shape, arrays: Arrays, batch: int, head: int
) -> Arrays:
    """Extract a key head, and the query heads that read it, from arrays.

    Arrays of queries become (tokens, group, columns), lse (group, tokens).
    """
    group = slice(head * shape.group_size, (head + 1) * shape.group_size)
    where = {
        "lse": np.s_[batch, group],
        **dict.fromkeys(("q", "dout", "out", "dq"), np.s_[batch, :, group]),
        **dict.fromkeys(("k", "v", "dk", "dv"), np.s_[batch, :, head]),
    }
    return {name: x[where[name]] for name, x in arrays.items()}


def of_group(
    shape: Shape, inputs: Arrays, batch: int, head: int, wide: type
) -> Arrays:
    """Compute a key head's results in float64, or as plain code does."""
    dtype = DTYPES[shape.dtype]

    def stored(x):
        return x if wide == np.float64 else x.astype(dtype).astype(wide)

    cut = parts_of_group(shape, inputs, batch, head)
    q, k, v, dout = (cut[x].astype(wide) for x in ("q", "k", "v", "dout"))
    each = [
        attend(
            q[:, i], k, v, dout[:, i],
            scale=shape.scale, causal=shape.causal, stored=stored,
        )
        for i in range(shape.group_size)
    ]  # fmt: skip
    return {
        "out": stored(cupy.stack([x.out for x in each], axis=1)),
        "lse": cupy.stack([x.lse for x in each]),
        "dq": stored(cupy.stack([x.dq for x in each], axis=1)),
        "dk": stored(sum(x.dk for x in each)),
        "dv": stored(sum(x.dv for x in each)),
    }


class Errors:
    """The largest error of a result and of `low`, and largest element."""

    def __init__(self) -> None:
        self.ours = self.low = self.element = 0.0

    def add(
        self, got: cupy.ndarray, ref: cupy.ndarray, low: cupy.ndarray
    ) -> None:
        self.ours = max(self.ours, largest(got.astype(ref.dtype) - ref))
        self.low = max(self.low, largest(low - ref))
        self.element = max(self.element, largest(ref))

    def over_bound(self, factor: float, step: float) -> float:
        """Return the largest error / bound; 0 if all are exact."""
        bound = max(factor * self.low, step * self.element)
        return self.ours / bound if self.ours else 0.0


def largest(array: cupy.ndarray) -> float:
    return float(cupy.abs(array).max())


def lse_bound(
    shape: Shape, q: cupy.ndarray, k: cupy.ndarray, lse: cupy.ndarray
) -> cupy.ndarray:
    """Return the bound of each row's lse, (group, tokens)."""
    q, k = (cupy.linalg.norm(x.astype(cupy.float64), axis=-1) for x in (q, k))
    scores = abs(shape.scale) * q.T * k.max()
    sums = np.sqrt(shape.seqlen_k) + 4
    finite = cupy.where(lse == -cupy.inf, 0, lse)
    return STEP * (
        (np.sqrt(shape.head_dim) + 8) * scores + sums + 2 * cupy.abs(finite)
    )


def lse_error(
    got: cupy.ndarray, ref: cupy.ndarray, bound: cupy.ndarray
) -> float:
    """Return the largest error / bound; inf for a wrong -inf."""
    blind = ref == -cupy.inf
    if ((got == -cupy.inf) != blind).any():
        return float("inf")
    return largest((cupy.where(blind, 0, got - ref)) / bound)
