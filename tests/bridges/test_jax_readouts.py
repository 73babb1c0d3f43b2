"""`weights`, `weight_sums` and `entropy` of JAX arrays."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
from jax_data import normal  # noqa: E402

import cuflash  # noqa: E402
import cuflash.jax  # noqa: E402
from helpers.compare import assert_allclose, assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

CHOICES = {
    "weights": {"queries": [-1, 2], "keys": slice(1, None), "heads": [1, 0]},
    "weight_sums": {"queries": [-1, 3], "reduce": "max"},
    "entropy": {},
}
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (2, None), "softcap": 3.0},
    "sink": {"sink": normal(4, dtype="float32", seed=5)},
    "mask": {"mask": normal(2, 1, 7, 9, dtype="float32", seed=6) > -1},
    "dropout": {"dropout": 0.5},
}
# A row has at most 9 terms, a gradient 63, of numbers up to 10, each with some
# ten roundings before: 63 * 10 * 10 * 2^-24 = 4e-4.
ROUNDING = {"rtol": 4e-4, "atol": 4e-4}
by_name = pytest.mark.parametrize("name", CHOICES)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Whose results are NumPy's bit by bit; a GPU's are not."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def arrays(dtype="float32", seed=0):
    """Return q, k and v."""
    shapes = (2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)
    return [
        jnp.asarray(normal(*shape, dtype=dtype, seed=seed + i))
        for i, shape in enumerate(shapes)
    ]


def lse_of(q, k, v, **options):
    options.pop("dropout", None)
    return cuflash.jax.attention(q, k, v, return_lse=True, **options)[1]


def on_numpy(name, *given, **options):
    options |= {"seed": 0} if "dropout" in options else {}
    return getattr(cuflash, name)(*map(np.asarray, given), **options)


def cotangent(result):
    x = np.cos(np.arange(result.size)).reshape(result.shape)
    return x.astype(result.dtype)


@pytest.mark.parametrize("option", OPTIONS)
@by_name
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_and_gradients_are_those_of_numpy(name, option, dtype):
    (q, k, v), given = arrays(dtype), OPTIONS[option]
    lse = lse_of(q, k, v, **given)
    given = given | CHOICES[name]
    call = functools.partial(getattr(cuflash.jax, name), **given)
    got, vjp = jax.vjp(jax.jit(call), q, k, lse)
    expected = on_numpy(name, q, k, lse, **given)
    assert_arrays_equal(np.asarray(got), expected, name)
    dresult = cotangent(expected)
    backward = f"{name}_backward"
    expected = on_numpy(backward, dresult, q, k, lse, **given)
    for x, y in zip(vjp(jnp.asarray(dresult)), expected, strict=True):
        assert_arrays_equal(np.asarray(x), y, "gradient")


def entropies(q, k, v, **options):
    """Return what dense math finds."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    logs = jax.nn.log_softmax(scores, axis=-1)
    return -(jnp.exp(logs) * logs).sum(-1)


def test_losses_reach_q_and_k_through_lse_too():
    q, k, v = arrays()

    def ours(q, k):
        return cuflash.jax.entropy(q, k, lse_of(q, k, v))

    got, pull = jax.vjp(ours, q, k)
    expected, dense = jax.vjp(lambda q, k: entropies(q, k, v), q, k)
    dresult = jnp.asarray(cotangent(got))
    assert_allclose(got, expected, "entropy", **ROUNDING)
    for x, y in zip(pull(dresult), dense(dresult), strict=True):
        assert_allclose(x, y, "gradient", **ROUNDING)


@pytest.mark.parametrize("option", ["causal", "sink"])
@by_name
def test_vmap_of_gradients(name, option):
    """By joining batch; of options that have no such axis too."""
    many = [jnp.stack(x) for x in zip(
        *(arrays(seed=10 * i) for i in range(3)), strict=True
    )]  # fmt: skip
    given = OPTIONS[option]

    def loss(q, k, v):
        call = getattr(cuflash.jax, name)
        lse = lse_of(q, k, v, **given)
        return (call(q, k, lse, **given, **CHOICES[name]) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    got = jax.vmap(gradients)(*many)
    alone = [gradients(*(x[i] for x in many)) for i in range(3)]
    for x, y in zip(got, zip(*alone, strict=True), strict=True):
        assert_allclose(x, jnp.stack(y), "gradient", **ROUNDING)


@pytest.mark.parametrize("name", ["weights", "weight_sums"])
def test_vmap_of_choices(name):
    (q, k, v), queries = arrays(), jnp.array([[0, 1], [2, -1]])
    lse = lse_of(q, k, v)

    def call(queries):
        return getattr(cuflash.jax, name)(q, k, lse, queries=queries)

    each = jnp.stack([call(x) for x in queries])
    assert_arrays_equal(jax.vmap(call)(queries), each, name)


def test_row_weights_that_broadcast():
    q, k, v = arrays()
    lse, rows = lse_of(q, k, v), jnp.arange(4.0)[:, None]

    def call(rows):
        return cuflash.jax.weight_sums(q, k, lse, row_weights=rows)

    got, vjp = jax.vjp(call, rows)
    full = cuflash.jax.weights(q, k, lse)
    expected, dense = jax.vjp(lambda r: (r[..., None] * full).sum(2), rows)
    dresult = jnp.asarray(cotangent(got))
    assert_allclose(got, expected, "sums", **ROUNDING)
    assert_allclose(*vjp(dresult), *dense(dresult), "drow", **ROUNDING)


@pytest.mark.parametrize("index", [(0,), (0, slice(None), 0)])
def test_axes_left_out(index):
    """As one sequence, or one head of it, among others."""
    q, k, v = arrays()
    k = jnp.repeat(k, 2, 2)
    lse = lse_of(q, k, jnp.repeat(v, 2, 2))
    part, rows = (q[index], k[index]), (0,) * len(index[::2])
    for name in CHOICES:
        call = getattr(cuflash.jax, name)
        got, full = call(*part, lse[rows]), call(q, k, lse)[rows]
        assert_arrays_equal(got, full, name)


def test_packed_sequences():
    q, k, v = (x[0] for x in arrays())
    given = {
        "cu_seqlens_q": jnp.array([0, 2, 7]),
        "cu_seqlens_k": jnp.array([0, 4, 9]),
    }
    lse = lse_of(q, k, v, **given)
    for name, more in CHOICES.items():
        got = getattr(cuflash.jax, name)(q, k, lse, **given, **more)
        on_host = {n: np.asarray(x) for n, x in given.items()}
        expected = on_numpy(name, q, k, lse, **on_host, **more)
        assert_arrays_equal(np.asarray(got), expected, name)


def test_bad_input():
    q, k, v = arrays()
    lse = lse_of(q, k, v)

    def of_bias(bias):
        return cuflash.jax.entropy(q, k, lse, bias=bias).sum()

    def loss(q):
        return cuflash.jax.entropy(q, k, lse).sum()

    with pytest.raises(cuflash.UnsupportedError, match="bias is diff"):
        jax.grad(of_bias)(jnp.zeros((7, 9)))
    with pytest.raises(cuflash.UnsupportedError, match="second derivatives"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    with pytest.raises(cuflash.ValueRangeError, match=r"queries\[0\] is 9"):
        cuflash.jax.weights(q, k, lse, queries=jnp.array([9]))
    with pytest.raises(cuflash.ShapeError, match="row_weights"):
        cuflash.jax.weight_sums(q, k, lse, row_weights=lse[..., :2])
