"""Forward mode over forward mode, and third derivatives, by XLA in blocks."""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    inputs,
    normal,
    on_cpu,
    options,
    packed,
    split,
)
from jax_dense import dense  # noqa: E402

from cuflash.jax import attention, blocks  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = {
    "batch": 1,
    "seqlen_q": 2,
    "seqlen_k": 3,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "head_dim": 2,
    "head_dim_v": 2,
}


def sums_of(function, others):
    """Weighted sums of out and lse, each row's with a weight of its own."""

    def call(wrt):
        out, lse = function(**wrt, **others, return_lse=True)
        lse = jnp.where(lse == -np.inf, 0, lse)  # of rows that see no key
        weights = jnp.linspace(-1, 1, out.size).reshape(out.shape)
        return (out * weights).sum() + jnp.tanh(lse).sum()

    return call


def along(function, tangents):
    return lambda x: jax.jvp(function, (x,), (tangents,))[1]


CASES = [*options(), "packed", "packed dropout", "packed and padding"]


@pytest.mark.parametrize("rows", ["one block", "blocks"])
@pytest.mark.parametrize("name", CASES)
def test_forward_twice_is_forward_over_reverse(name, rows, monkeypatch):
    """The same second derivative, by XLA and by `double_backward`."""
    if rows == "blocks":
        monkeypatch.setattr(blocks, "_MOST", 100)  # two rows of 5
    with jax.enable_x64(True):
        chosen = options("float64").get(name, {})
        if name == "packed dropout":
            chosen = {"dropout": 0.4, "seed": 2**64 - 5, "causal": True}
        given = (packed if "packed" in name else inputs)("float64")
        if name == "packed and padding":
            chosen = {"sink": normal(4, dtype="float64")}
            given["cu_seqlens_q"] = np.array([0, 1, 3], np.int32)
            given["cu_seqlens_k"] = np.array([0, 2, 5], np.int32)
        arrays, others = split(given | chosen)
        wrt = {n: arrays.pop(n) for n in DIFFERENTIABLE if n in arrays}
        u, w = (
            {n: normal(*x.shape, dtype="float64", seed=i)
             for n, x in wrt.items()}
            for i in (5, 6)
        )  # fmt: skip
        call = sums_of(attention, arrays | others)
        got = jax.jit(along(along(call, u), w))(wrt)
        gradients = along(jax.grad(call), w)(wrt)
        wanted = sum((gradients[n] * u[n]).sum() for n in u)
    # Sums of 400 terms below 50.
    assert_allclose(got, wanted, "got", atol=400 * 50 * 2.0**-53)


def total(function):
    def scalar(*given):
        out = function(*given)
        weights = np.linspace(-1, 1, out.size).reshape(out.shape)
        return (out**2 * weights).sum()

    return scalar


def laplacian(function, n):
    """As folx and others take it: two tangents a direction, all at once."""

    def call(q, *others):
        def second(e):
            return along(along(lambda q: function(q, *others), e), e)(q)

        return jax.vmap(second)(np.eye(q.size).reshape(-1, *q.shape)).sum(0)

    return call


TRANSFORMS = {
    "jacfwd twice": lambda f, n: jax.jacfwd(jax.jacfwd(f, n), n),
    "laplacian": laplacian,
    "gradient of a laplacian": lambda f, n: jax.grad(
        lambda *x: (laplacian(f, n)(*x) ** 2).sum(), n
    ),
    "forward, three times": lambda f, n: jax.jacfwd(
        jax.jacfwd(jax.jacfwd(total(f), n), n), n
    ),
    "reverse, three times": lambda f, n: jax.jacrev(
        jax.jacrev(jax.grad(total(f), n), n), n
    ),
    "a hessian, forward": lambda f, n: jax.jacfwd(jax.hessian(total(f), n), n),
    "a hessian, in reverse": lambda f, n: jax.jacrev(
        jax.hessian(total(f), n), n
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    with jax.enable_x64(True):
        given = [on_cpu(x) for x in inputs("float64", **SMALL).values()]
        wrt = (0, 1, 2) if "twice" in transform else (0, 2)
        got, wanted = (
            jax.jit(TRANSFORMS[transform](function, wrt))(*given)
            for function in (attention, dense)
        )
    # Some thousand operations on numbers up to 10.
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert_allclose(x, y, "result", atol=1000 * 10 * 2.0**-53)


@pytest.mark.parametrize("name", ["causal", "bias", "sink", "softcap"])
def test_check_grads(name):
    """Finite differences, of all four orders of modes."""
    with jax.enable_x64(True):
        chosen = options("float64")[name]
        if name == "bias":
            chosen = {"bias": normal(2, 3, dtype="float64")}
        if name == "sink":
            chosen = {"sink": normal(2, dtype="float64")}
        arrays, others = split(inputs("float64", **SMALL) | chosen)
        check_grads(
            lambda x: attention(**x, **others, return_lse=True),
            (arrays,), order=2, modes=["fwd", "rev"],
        )  # fmt: skip


def second_in_q(q, *others):
    return along(along(lambda q: attention(q, *others), q), q)(q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_types_are_rounded_once(dtype):
    given = [on_cpu(x) for x in inputs(dtype).values()]
    got = second_in_q(*given)
    assert got.dtype == given[0].dtype
    with jax.enable_x64(True):
        wide = (x.astype("float64") for x in given)
        wanted = np.asarray(second_in_q(*wide))
    # One rounding of the result, and those of 60 operations in float32.
    eps = {"bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    most = abs(wanted).max()
    # Terms of its sums: squares of tangents of scores, less their means.
    q, k, v = (abs(np.asarray(x, "d")).max() for x in given)
    terms = (2 * 8**0.5 * q * k) ** 2 * v
    error = abs(np.asarray(got, "d") - wanted).max()
    assert error <= eps * most + 60 * 2.0**-24 * terms


def test_shard_map():
    from jax.sharding import PartitionSpec as P

    given = [on_cpu(x) for x in inputs().values()]
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("data",))
    split_over = jax.shard_map(
        second_in_q, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    # The same operations; XLA may fuse them in another way: 60 roundings.
    wanted = second_in_q(*given)
    got = jax.jit(split_over)(*given)
    assert_allclose(got, wanted, "got", atol=60 * 2.0**-24 * 4)
