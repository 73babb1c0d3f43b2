"""`score_mod` and `mask_mod` of `cuflash.jax`, by symbols and by jaxprs."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="tests of JAX's functions")

from jax.test_util import check_grads  # noqa: E402
from jax_data import assert_same, inputs, normal, on_cpu  # noqa: E402
from jax_machines import by_the_driver  # noqa: E402
from scipy import special  # noqa: E402

import cuflash.jax  # noqa: E402
from cuflash.errors import (  # noqa: E402
    ExpressionError,
    ValueRangeError,
)
from cuflash.jax import attention  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = pytest.mark.slow

jnp = jax.numpy
Q = np.zeros((1, 4, 2, 8), np.float32)
SMALL = {
    "batch": 2,
    "seqlen_q": 3,
    "seqlen_k": 4,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "head_dim": 2,
    "head_dim_v": 2,
}
IDS = np.array([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)

REFUSED = {
    "where": (lambda s, b, h, i, j: jnp.where(i > j, s, 0), "write NumPy's"),
    "exp": (lambda s, b, h, i, j: jnp.exp(s), "write NumPy's"),
    "lax": (lambda s, b, h, i, j: jax.lax.max(s, 0.0), "write NumPy's"),
    "array": (lambda s, b, h, i, j: s + jnp.zeros(4)[j], "by mod_arrays"),
    "number": (lambda s, b, h, i, j: s * jnp.float32(2), "x.item()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_name_the_line_and_the_cure(name):
    function, cure = REFUSED[name]
    line = function.__code__.co_firstlineno
    with pytest.raises(ExpressionError) as caught:
        cuflash.forward(Q, Q, Q, score_mod=function)
    said = str(caught.value)
    assert said.startswith(f"{__file__}, line {line}: ") and cure in said, said


# ---- Functions with NumPy's names, and the same with JAX's ----


def np_score(s, b, h, i, j, *, table, rate):
    return np.tanh(s) + table[h, i - j + 4] * rate * s


def jax_score(s, b, h, i, j, *, table, rate):
    row = jnp.log(jnp.exp(table))[h]  # before the call
    return jnp.tanh(s) + row[i - j + 4] * rate * s


def np_mask(b, h, i, j, *, ids):
    return (i >= j) | (ids[b, i] == ids[b, j])


def jax_mask(b, h, i, j, *, ids):
    return jnp.where(i >= j, True, ids[b, i] == ids[b, j])


PAIRS = {"numpy": (np_score, np_mask), "jax": (jax_score, jax_mask)}


def case(dtype):
    given = {n: on_cpu(x) for n, x in inputs(dtype, **SMALL).items()}
    return given, on_cpu(normal(2, 9, dtype=dtype, seed=4))


def call_of(name):
    score, mask = PAIRS[name]

    def call(q, k, v, table, rate=0.5):
        arrays = {"table": table, "ids": jnp.asarray(IDS), "rate": rate}
        return attention(
            q, k, v, score_mod=score, mask_mod=mask, mod_arrays=arrays,
            return_lse=True, deterministic=True,
        )  # fmt: skip

    return call


def options_of(table):
    arrays = {"table": np.asarray(table), "ids": IDS, "rate": 0.5}
    return {"score_mod": np_score, "mask_mod": np_mask, "mod_arrays": arrays}


def test_values_and_gradients_are_those_of_numpy():
    given, table = case("float32")
    got, pull = jax.vjp(call_of("numpy"), *given.values(), table)
    arrays = [*map(np.asarray, given.values())]
    options = options_of(table)
    wanted = cuflash.forward(*arrays, return_lse=True, **options)
    douts = [normal(*x.shape, seed=7) for x in wanted]
    *gradients, dmod = cuflash.backward(
        douts[0], *arrays, *wanted, dlse=douts[1], return_dmod=("table",),
        **options,
    )  # fmt: skip
    found = (*got, *pull(tuple(douts)))
    for x, y in zip(found, (*wanted, *gradients, dmod["table"]), strict=True):
        assert_same(x, y)


@needs_compiler
def test_the_kernels_have_the_same_bits():
    given, table = case("float32")
    wanted = call_of("numpy")(*given.values(), table)
    with by_the_driver("sm_80"):
        got, pull = jax.vjp(call_of("numpy"), *given.values(), table)
        gradients = pull(got)
        arrays = [*map(np.asarray, given.values())]
        out, lse = map(np.asarray, got)
        *expected, dmod = cuflash.backward(
            out, *arrays, out, lse, dlse=lse, return_dmod=("table",),
            deterministic=True, **options_of(table),
        )  # fmt: skip
    for x, y in zip(got, wanted, strict=True):
        # Five sums of products of numbers up to 10, and exp.
        assert_allclose(x, y, "result", atol=40 * 2.0**-24 * 10)
    for x, y in zip(gradients[:3], expected, strict=True):
        assert_same(x, y)
    assert_same(gradients[3], dmod["table"])


@needs_compiler
def test_tangents_and_second_gradients_are_those_of_the_kernels():
    given, table = case("float32")
    point = (*given.values(), table)
    moved = tuple(on_cpu(normal(*x.shape, seed=8)) for x in point)
    arrays = [*map(np.asarray, given.values())]
    dots = dict(zip(("q", "k", "v"), map(np.asarray, moved), strict=False))

    def gradients(*x):
        return jax.vjp(call_of("numpy"), *x)[1](douts)

    with by_the_driver("sm_80"):
        douts, tangents = jax.jvp(call_of("numpy"), point, moved)
        *wanted, out_dot, lse_dot = cuflash.jvp(
            *arrays, **{f"{n}_dot": x for n, x in dots.items()},
            mod_dots={"table": np.asarray(moved[3])}, return_lse=True,
            **options_of(table),
        )  # fmt: skip
        found = jax.jit(lambda *x: jax.vjp(gradients, *x)[1](moved))(*point)
        dout, dlse = map(np.asarray, douts)
        *seconds, d2mod = cuflash.double_backward(
            *dots.values(), dout, *arrays, *wanted, dlse=dlse,
            ddmods={"table": np.asarray(moved[3])}, return_d2mod=("table",),
            deterministic=True, **options_of(table),
        )  # fmt: skip
    for x, y in zip(tangents, (out_dot, lse_dot), strict=True):
        assert_same(x, y)
    for x, y in zip(found[:3], seconds[:3], strict=True):
        assert_same(x, y)
    assert_same(found[3], d2mod["table"])


@pytest.mark.parametrize("name", PAIRS)
def test_check_grads(name):
    """Finite differences, of all four orders of modes; a learned number."""
    with jax.enable_x64(True):
        given, table = case("float64")
        check_grads(
            call_of(name), (*given.values(), table, jnp.asarray(0.5)),
            order=2, modes=["fwd", "rev"],
        )  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_vmap_of_gradients(name):
    with jax.enable_x64(True):
        given, table = case("float64")
        several = jnp.stack([given["q"], given["q"][::-1]])

        def gradients(q):
            return jax.grad(
                lambda q, t: call_of(name)(q, given["k"], given["v"], t)[
                    0
                ].sum(),
                (0, 1),
            )(q, table)

        got = jax.vmap(gradients)(several)
        for i, q in enumerate(several):
            for x, y in zip(got, gradients(q), strict=True):
                # Sums of 24 terms up to 10, in another order.
                assert_allclose(x[i], y, "x", atol=24 * 10 * 2.0**-53)


@pytest.mark.parametrize("name", ["weights", "weight_sums", "entropy"])
def test_readouts_take_functions(name):
    given, table = case("float32")
    q, k, _ = given.values()
    _, lse = call_of("jax")(*given.values(), table)
    arrays = {"table": table, "ids": jnp.asarray(IDS), "rate": 0.5}
    read = getattr(cuflash.jax, name)

    def call(q, table):
        return read(
            q, k, lse, score_mod=jax_score, mask_mod=jax_mask,
            mod_arrays=arrays | {"table": table},
        )  # fmt: skip

    wanted = getattr(cuflash, name)(
        *map(np.asarray, (q, k, lse)), **options_of(table)
    )
    # Weights below 1, of scores with ten roundings below 20.
    got = call(q, table)
    assert_allclose(got, wanted, "got", atol=4 * 10 * 20 * 2.0**-24)
    d = np.cos(np.arange(wanted.size)).reshape(wanted.shape).astype("f")
    dq, _, _, dmod = getattr(cuflash, f"{name}_backward")(
        d, *map(np.asarray, (q, k, lse)), return_dmod=("table",),
        **options_of(table),
    )  # fmt: skip
    _, vjp = jax.vjp(jax.jit(call), q, table)
    # Sums of 24 such terms.
    bound = {"atol": 24 * 4 * 10 * 20 * 2.0**-24}
    for x, y in zip(vjp(jnp.asarray(d)), (dq, dmod["table"]), strict=True):
        assert_allclose(x, y, name, **bound)
    alone = jax.vmap(jax.grad(lambda t: call(q, t).sum()))
    got = alone(jnp.stack([table, 2 * table]))
    for x, t in zip(got, (table, 2 * table), strict=True):
        y = jax.grad(lambda t: call(q, t).sum())(t)
        assert_allclose(x, y, name, **bound)


@pytest.mark.parametrize("has_score", [False, True])
def test_arrays_that_only_a_mask_reads_have_zero_derivatives(has_score):
    given, table = case("float32")
    score = {"score_mod": lambda s, b, h, i, j: s * table[h, i - j + 4]}

    def call(q, limit):
        out = attention(
            q, given["k"], given["v"],
            mask_mod=lambda b, h, i, j: (i >= j) | (limit[h] > 0),
            **(score if has_score else {}),
        )  # fmt: skip
        return (out**2).sum()

    point = given["q"], jnp.asarray([-1.0, 1.0])
    both = jax.grad(call, (0, 1))
    dq, dlimit = both(*point)
    assert_same(dq, jax.grad(call)(*point))
    zeros = (
        dlimit,
        jax.jacfwd(call, 1)(*point),
        *jax.jacfwd(both, 1)(*point),
        *jax.jacrev(jax.jacfwd(call, (0, 1)), 1)(*point),
        *jax.jacfwd(jax.jacfwd(call, (0, 1)), 1)(*point),
    )
    for x in zeros:
        assert_same(x, np.zeros_like(x))


# ---- What a jaxpr may hold ----


# NumPy's: JAX's would start its threads before tests run.
EIGHT_BITS = np.arange(0, 100, 25, np.int8)
WEIGHTS = np.linspace(-1, 1, 5).astype(np.float32)

# With JAX's functions, and the same with NumPy's.
SAME = {
    "floor": (
        lambda s, b, h, i, j: s + (i - j) // 2 + (i - 2 * j) % 3,
        lambda s, b, h, i, j: s + jnp.floor_divide(i - j, 2)
        + jnp.remainder(i - 2 * j, 3) + 0 * jnp.sin(s),
    ),
    "truncated": (
        lambda s, b, h, i, j: s + (i - 2 * j).astype(int) * 0
        + np.sign(i - 2 * j) * (abs(i - 2 * j) // 2),
        lambda s, b, h, i, j: s + jax.lax.div(i - 2 * j, jnp.int32(2)),
    ),
    "clipped": (
        lambda s, b, h, i, j: np.clip(s, -0.5, 0.5) + np.maximum(s, 0),
        lambda s, b, h, i, j: jnp.clip(s, -0.5, 0.5) + jax.nn.relu(s),
    ),
    "cond": (
        lambda s, b, h, i, j: np.where(i > j, 2 * s, s - 1),
        lambda s, b, h, i, j: jax.lax.cond(
            i > j, lambda x: 2 * x, lambda x: x - 1, s
        ),
    ),
    "powers": (
        lambda s, b, h, i, j: s**3 + 1 / (1 + np.exp(-s)),
        lambda s, b, h, i, j: s**3 + jax.nn.sigmoid(s),
    ),
    "gelu": (
        lambda s, b, h, i, j: 0.5 * s * special.erfc(-s / np.sqrt(2))
        + special.erf(0.25 * (i - j)),
        lambda s, b, h, i, j: jax.nn.gelu(s, approximate=False)
        + jax.lax.erf(0.25 * (i - j)),
    ),
    "half to even": (
        lambda s, b, h, i, j: s + np.rint((i - j) * 0.5),
        lambda s, b, h, i, j: s + jnp.round((i - j) * 0.5),
    ),
    "half away": (
        lambda s, b, h, i, j: s
        + np.sign(i - j) * np.floor(abs(i - j) * 0.5 + 0.5),
        lambda s, b, h, i, j: s + jax.lax.round((i - j) * 0.5),
    ),
    "series": (
        lambda s, b, h, i, j: sum(
            float(w) * np.cos(n * s) for n, w in enumerate(WEIGHTS)
        ),
        lambda s, b, h, i, j: (
            jnp.asarray(WEIGHTS) * jnp.cos(jnp.arange(5) * s)
        ).sum(),
    ),
    "narrow integers": (
        lambda s, b, h, i, j: s + 25 * np.clip(j, 1, 2) + (i > j),
        lambda s, b, h, i, j: s
        + jnp.clip(jnp.asarray(EIGHT_BITS)[j], 25, 50).astype(jnp.int16)
        + (i > j).astype(jnp.uint8).astype(jnp.float32),
    ),
    "closure": (
        lambda s, b, h, i, j, *, w: s + w[np.minimum(j, 3)],
        lambda s, b, h, i, j: s + jnp.asarray(WEIGHTS)[jnp.minimum(j, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_jaxpr_computes_the_same(name):
    given, _ = case("float32")
    arrays = [*map(np.asarray, given.values())]
    with_numpy, with_jax = SAME[name]
    options = {"mod_arrays": {"w": WEIGHTS}} if name == "closure" else {}
    wanted = cuflash.forward(*arrays, score_mod=with_numpy, **options)
    got = jax.jit(lambda *x: attention(*x, score_mod=with_jax))(*arrays)
    # Scores below 20 and of ten roundings; weights differ by as much.
    assert_allclose(got, wanted, "out", atol=20 * 10 * 2.0**-24 * 4)


def test_an_index_outside_is_moved_inside_as_by_jax():
    given, _ = case("float32")
    table = jnp.asarray([1.0, -2.0])

    def score(s, b, h, i, j, *, at):
        return s + jnp.where(True, table[j - 1 + 0 * at], s)

    got = attention(*given.values(), score_mod=score, mod_arrays={"at": 0})
    bias = np.asarray(table)[np.clip([-1, 0, 1, 2], -2, 1)]
    wanted = attention(*given.values(), bias=jnp.asarray(bias)[None])
    assert_allclose(got, wanted, "out", atol=40 * 2.0**-24)


def test_a_tracer_from_outside_has_gradients():
    with jax.enable_x64(True):
        given, table = case("float64")

        def call(q, table):
            table = jnp.asarray(table)
            return attention(
                q, given["k"], given["v"],
                score_mod=lambda s, b, h, i, j: s + table[h, i - j + 4],
            )  # fmt: skip

        check_grads(call, (given["q"], table), order=2, modes=["fwd", "rev"])
        jax.jit(jax.grad(lambda t: call(given["q"], t).sum()))(table)


def looped(s, b, h, i, j):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.cos(x), s)


def unsigned(s, b, h, i, j):
    return s + jnp.right_shift(jnp.abs(i).astype(jnp.uint32), 1)


def narrow(s, b, h, i, j):
    return s + jnp.abs(100 * i).astype(jnp.int8)


def narrow_sum(s, b, h, i, j):
    return s + (jnp.asarray(EIGHT_BITS)[j] + jnp.asarray(EIGHT_BITS)[j])


def of_scipy(s, b, h, i, j):
    return jax.scipy.special.erfinv(s)


def with_if(s, b, h, i, j):
    return jnp.exp(s) if i > j else s


def mixed(s, b, h, i, j, *, table):
    return s + np.asarray(table)[i]


def of_numpy(s, b, h, i, j):
    return jnp.exp(s) * IDS[b, i]


@jax.custom_jvp
def stepped(x):
    return jnp.round(4 * x) / 4


stepped.defjvp(lambda point, moved: (stepped(*point), *moved))


def straight_through(s, b, h, i, j):
    return stepped(s)


BAD = {
    "own derivative": (straight_through, "stepped has a derivative of its"),
    "loop": (looped, "scan has no rule: write a loop of Python"),
    "unsigned": (unsigned, "to uint32, which wraps: convert to jnp.int32"),
    "narrow": (narrow, "to int8, which wraps: convert to jnp.int32"),
    "narrow sum": (narrow_sum, "add of int8, which wraps: convert it first"),
    "inverse": (of_scipy, "erf_inv has no rule: write it with arithmetic"),
    "if": (with_if, "write np.where"),
    "NumPy's": (of_numpy, "an index of JAX's, jnp.asarray"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_line_and_the_cure(name):
    function, words = BAD[name]
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(ExpressionError, match=words) as caught:
        attention(Q, Q, Q, score_mod=function)
    assert f"{__file__}, line {line}" in str(caught.value)


def test_a_derivative_of_its_own_does_not_count_in_a_mask():
    given, _ = case("float32")
    got = attention(
        **given,
        score_mod=lambda s, b, h, i, j: s + jnp.round(stepped(j * 0.5)),
        mask_mod=lambda b, h, i, j: stepped(j * 0.5) <= i,
    )
    bias = jnp.round(jnp.arange(4) * 0.5)[None]
    mask = np.arange(4) * 0.5 <= np.arange(3)[:, None]
    wanted = attention(**given, bias=bias, mask=mask[None])
    assert_allclose(got, wanted, "out", atol=40 * 2.0**-24)


@pytest.mark.parametrize("name", ["relu", "relu6", "softplus"])
def test_slopes_at_kinks_are_those_of_jax(name):
    function = getattr(jax.nn, name)
    with jax.enable_x64(True):
        given, _ = case("float64")
        k, v = given["k"][:, :, :1], given["v"][:, :, :1]
        q = jnp.zeros_like(given["q"])

        def ours(q, shift):
            return attention(
                q, k, v,
                score_mod=lambda s, b, h, i, j: function(s + shift[j]) * j,
            ).sum()  # fmt: skip

        def theirs(q, shift):
            s = jnp.einsum("bihd,bjgd->bhij", q, k) * 2**-0.5
            p = jax.nn.softmax(function(s + shift) * jnp.arange(4), -1)
            return jnp.einsum("bhij,bjgd->bihd", p, v).sum()

        shift = jnp.asarray([0.0, 0.0, 6.0, -1.0])
        for x, y in zip(
            *(jax.grad(f, (0, 1))(q, shift) for f in (ours, theirs)),
            strict=True,
        ):
            # Sums of 24 terms below 100.
            assert_allclose(x, y, "gradient", atol=24 * 100 * 2.0**-53)


@pytest.mark.parametrize("x", [0.0, 2.5])
def test_the_second_derivative_of_sinc(x):
    """Of one query and two keys, whose scores are sinc(x) and 0."""

    def ours(x):
        one = jnp.ones((1, 1, 1))
        values = jnp.asarray([1.0, -1.0]).reshape(2, 1, 1)
        return attention(
            0 * one, jnp.ones((2, 1, 1)), values,
            score_mod=lambda s, b, h, i, j: jnp.sinc(s + x) * (1 - j),
        ).sum()  # fmt: skip

    def theirs(x):
        return jnp.tanh(jnp.sinc(x) / 2)

    got, wanted = (jax.grad(jax.grad(f))(x) for f in (ours, theirs))
    # Ten roundings of numbers below 10.
    assert_allclose(got, wanted, "got", atol=10 * 10 * 2.0**-24)


@needs_compiler
def test_integers_of_numpys_have_32_bits_as_jax_holds_them():
    ids = np.array([7, 5, 6, 4])

    def descends(b, h, i, j, *, ids):
        return ids[i] >= ids[j]

    given, _ = case("float32")
    options = {"mask_mod": descends, "mod_arrays": {"ids": ids}}
    wanted = cuflash.forward(*map(np.asarray, given.values()), **options)
    with by_the_driver("sm_80"):
        got = attention(*given.values(), **options)
    # Three sums of numbers up to 10, and exp.
    assert_allclose(got, wanted, "out", atol=30 * 10 * 2.0**-24)
    options["mod_arrays"] = {"ids": ids + 2**40}
    with pytest.raises(ValueRangeError, match="numbers that int32 does not"):
        attention(*given.values(), **options)


def test_derivatives_by_xla_of_what_graphs_alone_have():
    """Second tangents: of erf, and of ints that are cut to 32 bits."""
    with jax.enable_x64(True):
        given, _ = case("float64")

        def call(q, with_jax):
            fun = jax.scipy.special if with_jax else special
            cut = (lambda x: x) if with_jax else lambda x: x.astype(np.int32)

            def score(s, b, h, i, j):
                return fun.erf(s) - fun.erfc(0.3 * s) * cut(i * j * 3)

            return attention(q, given["k"], given["v"], score_mod=score).sum()

        got, wanted = (
            jax.jvp(
                lambda q, x=x: jax.jvp(
                    lambda q: call(q, x), (q,), (given["q"],)
                )[1],
                (given["q"],), (given["q"],),
            )[1]
            for x in (False, True)
        )  # fmt: skip
        # Two ways to the same sum of 24 terms of at most 200.
        assert_allclose(got, wanted, "got", atol=24 * 200 * 2.0**-50)


def test_errors_of_mod_arrays():
    def mask(b, h, i, j, *, n):
        return jnp.where(j < n, True, False)

    with pytest.raises(ExpressionError, match="'m', which neither function"):
        attention(Q, Q, Q, mask_mod=mask, mod_arrays={"n": 3, "m": 4})
    with pytest.raises(ExpressionError, match="'n' is not in mod_arrays"):
        attention(Q, Q, Q, mask_mod=mask)
