"""vmap of `cuflash.jax.attention`: each element's results, and one call."""

from unittest import mock

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    assert_same,
    inputs,
    normal,
    options,
    packed,
    split,
)

from cuflash.api import attention as api_attention  # noqa: E402
from cuflash.jax import attention  # noqa: E402

pytestmark = pytest.mark.slow

SIZE = 3  # of the mapped axis
FOLDED = [name for name in options() if name not in ("sink", "dropout")]


def mapped(x, axis):
    """`SIZE` different arrays like x, along an axis."""
    if x.dtype.kind == "f":
        copies = [x * (1 + n) for n in range(SIZE)]
    else:
        copies = [np.roll(x, n, axis=-1) for n in range(SIZE)]
    return np.stack(copies, axis)


def assert_maps(function, arrays, moving, axis=0):
    """vmap along `axis` of the arrays `moving` is a loop over it."""
    arrays = {
        name: mapped(x, axis) if name in moving else x
        for name, x in arrays.items()
    }
    axes = {name: axis if name in moving else None for name in arrays}
    results = jax.vmap(function, in_axes=(axes,))(arrays)
    for index in range(SIZE):
        element = {
            name: np.take(x, index, axis) if name in moving else x
            for name, x in arrays.items()
        }
        expected = function(element)
        jax.tree.map(
            lambda got, one, n=index: assert_same(got[n], one),
            results,
            expected,
        )


def calls_of(name, monkeypatch):
    counted = mock.Mock(side_effect=getattr(api_attention, name))
    monkeypatch.setattr(api_attention, name, counted)
    return counted


def moves_of(name, moving):
    """The arrays of a call with an option to be mapped."""
    given = options()[name]
    arrays = {n for n, x in given.items() if isinstance(x, np.ndarray)}
    return {"options": arrays, "all": arrays | {*"qkv"}}.get(moving, {moving})


@pytest.mark.parametrize(
    "name, moving",
    [
        (name, moving)
        for name in options()
        for moving in ("q", "k", "v", "options", "all")
        if moves_of(name, moving)
    ],
)
def test_results(name, moving):
    arrays, static = split(inputs() | options()[name])
    moves = moves_of(name, moving)

    def function(arrays):
        return attention(**arrays, **static, return_lse=True)

    assert_maps(function, arrays, moves)


@pytest.mark.parametrize("axis", [1, 2, 3, 4])
def test_each_axis(axis):
    arrays, _ = split(inputs())
    assert_maps(lambda x: attention(**x), arrays, {"q", "k", "v"}, axis)


# The gradient of one bias of all is a sum of rounded parts, tested below.
@pytest.mark.parametrize("name", sorted({*options()} - {"bias of all"}))
@pytest.mark.parametrize("moving", ["q", "all"])
def test_gradients(name, moving):
    given = inputs() | options()[name]
    arrays, static = split(given)
    weights = normal(2, 5, 4, 6, seed=5)

    def gradients(arrays):
        wrt = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        return jax.grad(lambda wrt: total({**arrays, **wrt}))(wrt)

    def total(arrays):
        return (attention(**arrays, **static) * weights).sum()

    assert_maps(gradients, arrays, {*arrays} if moving == "all" else {"q"})


def test_the_gradient_of_one_bias_is_summed_over_batch():
    given = inputs() | options()["bias of all"]
    weights = normal(2, 5, 4, 6, seed=5)

    def total(q, bias, rows=slice(None)):
        call = {n: x[rows] for n, x in given.items() if n in ("k", "v")}
        out = attention(q[rows], **call, bias=bias)
        return (out * weights[rows]).sum()

    of_bias = jax.grad(total, argnums=1)
    q, bias = mapped(given["q"], 0), given["bias"]
    got = jax.vmap(of_bias, in_axes=(0, None))(q, bias)
    for index in range(SIZE):
        parts = (of_bias(q[index], bias, slice(n, n + 1)) for n in range(2))
        assert_same(got[index], sum(parts))


def test_the_mean_of_mapped_calls_is_differentiable():
    given = inputs()
    q = mapped(given.pop("q"), 0)

    def mean(q):
        return jax.vmap(lambda q: attention(q, **given))(q).mean()

    def part(q):
        out = attention(q, **given)
        return out.sum() / (SIZE * out.size)

    assert_same(jax.grad(mean)(q)[1], jax.grad(part)(q[1]))


def test_rows_of_a_jacobian():
    """vmap over cotangents alone."""
    given = inputs(batch=1, seqlen_q=2, num_heads_q=1, num_heads_kv=1)
    q = given.pop("q")
    rows = jax.jacrev(lambda q: attention(q, **given))(q)
    one = jax.grad(lambda q: attention(q, **given)[0, 1, 0, 2])(q)
    assert_same(rows[0, 1, 0, 2], one)


@pytest.mark.parametrize("name", FOLDED)
def test_the_mapped_axis_joins_batch(name, monkeypatch):
    arrays, static = split(inputs() | options()[name])
    counted = calls_of("forward", monkeypatch)
    q = mapped(arrays.pop("q"), 0)
    call = jax.vmap(lambda q: attention(q, **arrays, **static))
    jax.block_until_ready(call(q))
    (call,) = counted.mock_calls
    assert call.kwargs["q"].shape[0] == SIZE * q.shape[1]


def test_packed_sequences_run_one_by_one(monkeypatch):
    arrays, _ = split(packed())
    counted = calls_of("forward", monkeypatch)
    assert_maps(lambda x: attention(**x), arrays, {"q", "k"})
    assert counted.call_count == 2 * SIZE


def test_a_mapped_seed():
    given = inputs()
    seeds = np.arange(SIZE, dtype=np.uint32)

    def call(seed):
        return attention(**given, dropout=0.5, seed=seed)

    got = jax.vmap(call)(seeds)
    for index, seed in enumerate(seeds):
        assert_same(got[index], call(int(seed)))


def test_two_mapped_axes():
    given = inputs()
    q = mapped(mapped(given.pop("q"), 0), 0)
    call = jax.vmap(jax.vmap(lambda q: attention(q, **given)))
    assert_same(call(q)[2, 1], attention(q[2, 1], **given))
