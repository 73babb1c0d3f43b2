"""NumPy arrays for calls of cuflash.jax, and the calls on JAX's CPU arrays."""

import contextlib

import jax
import numpy as np

import cuflash
import cuflash.jax
from helpers.compare import assert_arrays_equal
from helpers.dtypes import DTYPES, lse_dtype

SIZES = {
    "batch": 2,
    "seqlen_q": 5,
    "seqlen_k": 7,
    "num_heads_q": 4,
    "num_heads_kv": 2,
    "head_dim": 8,
    "head_dim_v": 6,
}
DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


def normal(*shape, dtype="float32", seed=0):
    """Return random numbers of a dtype."""
    rng = np.random.default_rng((seed, *shape))
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def inputs(dtype="float32", **sizes):
    """Return q, k and v of `SIZES`, or of others, by name."""
    n = SIZES | sizes
    q = n["batch"], n["seqlen_q"], n["num_heads_q"], n["head_dim"]
    k = n["batch"], n["seqlen_k"], n["num_heads_kv"], n["head_dim"]
    v = (*k[:-1], n["head_dim_v"])
    return {
        name: normal(*shape, dtype=dtype, seed=seed)
        for seed, (name, shape) in enumerate({"q": q, "k": k, "v": v}.items())
    }


def ids(*shape):
    return np.random.default_rng(shape).integers(3, size=shape, dtype="int32")


def options(dtype="float32"):
    """Return the options of calls by name, with arrays for `SIZES`."""
    sums = lse_dtype(DTYPES[dtype]).name
    pairs = normal(2, 4, 5, 7) > -0.5
    return {
        "none": {},
        "causal": {"causal": True},
        "scale": {"scale": 0.3},
        "window": {"window": (2, 1)},
        "softcap": {"softcap": 3.0},
        "slopes": {"alibi_slopes": normal(4)},
        "slopes of each": {"alibi_slopes": normal(2, 4)},
        "bias": {"bias": normal(2, 4, 5, 7, dtype=dtype)},
        "bias of all": {"bias": normal(5, 7, dtype=sums)},
        "bias of keys": {"bias": normal(2, 1, 1, 7, dtype=dtype)},
        "mask": {"mask": pairs},
        "mask of all": {"mask": pairs[:1]},
        "sink": {"sink": normal(4, dtype=sums)},
        "ids": {"segment_ids_q": ids(2, 5), "segment_ids_k": ids(2, 7)},
        "ids of all": {"segment_ids_q": ids(5), "segment_ids_k": ids(7)},
        "dropout": {"dropout": 0.4, "seed": 2**40 + 3},
    }


def packed(dtype="float32"):
    """Return q, k and v of two sequences end to end, and their offsets."""
    given = {name: x[0] for name, x in inputs(dtype, batch=1).items()}
    for name, ends in (("q", [0, 2, 5]), ("k", [0, 4, 7])):
        given[f"cu_seqlens_{name}"] = np.array(ends, np.int32)
    return given


def on_cpu(x):
    """A JAX array on the CPU, where calls on it run."""
    return jax.device_put(x, jax.devices("cpu")[0])


def split(given):
    """Return a call's arrays, on the CPU, and its other arguments."""
    arrays = {
        n: on_cpu(x) for n, x in given.items() if isinstance(x, np.ndarray)
    }
    return arrays, {n: x for n, x in given.items() if n not in arrays}


def float64_if(dtype):
    """A context in which JAX has float64, for arrays of that dtype."""
    return (
        jax.enable_x64(True)
        if dtype == "float64"
        else contextlib.nullcontext()
    )


def loss(wrt, others, **static):
    """The sum of weighted out and lse, as a function of the arrays `wrt`.

    Returns the function, and out, lse and their weights as NumPy arrays.
    """
    given = {**wrt, **others}
    out, lse = cuflash.forward(
        **{n: np.asarray(x) for n, x in given.items()},
        return_lse=True,
        **{n: x for n, x in static.items() if n != "deterministic"},
    )
    dout = normal(*out.shape, dtype=out.dtype.name, seed=8)
    dlse = normal(*lse.shape, dtype=lse.dtype.name, seed=9)

    def function(wrt):
        got = cuflash.jax.attention(**wrt, **others, return_lse=True, **static)
        # lse is -inf of rows that see no key.
        lse = jax.numpy.where(got[1] == -np.inf, 0, got[1])
        return (got[0] * dout).sum() + (lse * dlse).sum()

    return function, (out, lse, dout, np.where(lse == -np.inf, 0, dlse))


def expected_gradients(given, of, static):
    """The gradients of `loss`, by `cuflash.backward`, by name."""
    out, lse, dout, dlse = of
    wanted = {f"return_d{n}": n in given for n in ("bias", "sink")}
    gradients = cuflash.backward(
        dout, given["q"], given["k"], given["v"], out, lse,
        **{n: x for n, x in given.items() if n not in "qkv"},
        **static, dlse=dlse, **wanted,
    )  # fmt: skip
    names = [n for n in DIFFERENTIABLE if n in given]
    return dict(zip(names, gradients, strict=True))


def assert_same(got, expected):
    """The same numbers, bit for bit."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert_arrays_equal(got, expected, "got")
