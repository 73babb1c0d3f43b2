"""What `cuflash.jax` refuses, and what the messages say."""

import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import inputs, options, packed, split  # noqa: E402

import cuflash  # noqa: E402
from cuflash.errors import (  # noqa: E402
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.jax import attention  # noqa: E402
from helpers.compare import assert_all  # noqa: E402

pytestmark = pytest.mark.slow

Q, K, V = inputs().values()


def call(**changes):
    return attention(**inputs() | changes)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"k": K[:1]}, ShapeError, "k has batch 1, expected 2 as in q"),
        ({"k": K.astype("float16")}, DTypeError, "k has dtype float16"),
        ({"q": Q.astype("float64")}, DTypeError, "jax_enable_x64"),
        ({"q": [1.0]}, DTypeError, "q is of type list, expected a JAX"),
        ({"v": None}, DTypeError, "v is of type NoneType"),
        ({"q": np.ma.array(Q)}, UnsupportedError, "its mask would be"),
        ({"causal": 1}, DTypeError, "causal is 1 of type int"),
        ({"deterministic": 1}, DTypeError, "deterministic is 1"),
        ({"return_lse": 1}, DTypeError, "return_lse is 1"),
        ({"scale": np.inf}, ValueRangeError, "scale is inf"),
        ({"block_q": 7}, ValueRangeError, "block_q 7"),
        ({"precision": "tf32"}, ValueRangeError, "precision is 'tf32'"),
        ({"dropout": 0.5}, ValueRangeError, "seed is None"),
        ({"mask": Q}, DTypeError, "mask has dtype float32"),
        ({"sink": np.ones(3, "f")}, ShapeError, "sink has shape"),
    ],
)
def test_bad_arguments(changes, error, words):
    with pytest.raises(error, match=words):
        call(**changes)


@pytest.mark.parametrize("name", ["scale", "causal", "window", "dropout"])
def test_tracers_for_python_values(name):
    value = {"window": (1, 2)}.get(name, 1)
    with pytest.raises(UnsupportedError, match=f"{name} is a JAX tracer"):
        jax.jit(lambda x: call(**{name: x}))(value)


def test_arrays_for_python_values():
    with pytest.raises(DTypeError, match=r"pass scale.item\(\)"):
        call(scale=jax.numpy.float32(0.1))


def test_an_array_of_several_python_values():
    with pytest.raises(DTypeError, match=r"pass tuple\(window.tolist"):
        call(window=jax.numpy.array([3, 0]))


def test_arrays_of_others_name_what_makes_one_of_jax():
    with pytest.raises(DTypeError, match=r"pass jax.numpy.asarray\(q\)"):
        call(q=[1.0])


def test_a_key_for_a_seed():
    words = r"seed is a JAX array of key.*pass jax.random.bits\(seed\)"
    with pytest.raises(DTypeError, match=words):
        call(dropout=0.5, seed=jax.random.key(0))


@pytest.mark.parametrize("seed", [np.float32(1), np.arange(2)])
def test_bad_seeds(seed):
    with pytest.raises(DTypeError, match="seed has dtype"):
        call(dropout=0.5, seed=jax.numpy.asarray(seed))


def test_a_tangent_of_slopes():
    slopes = options()["slopes"]["alibi_slopes"]
    words = "alibi_slopes is differentiated, expected one of q, k"
    with pytest.raises(UnsupportedError, match=words):
        jax.jvp(lambda x: call(alibi_slopes=x), (slopes,), (slopes,))


def test_a_tangent_of_another_dtype_is_jaxs_error():
    with pytest.raises(TypeError, match="float16"):
        jax.jvp(lambda q: call(q=q), (Q,), (Q.astype("float16"),))


def test_derivatives_with_respect_to_slopes():
    slopes = options()["slopes"]["alibi_slopes"]
    gradient = jax.grad(lambda x: call(alibi_slopes=x).sum())
    with pytest.raises(UnsupportedError, match="no gradient of alibi_slopes"):
        gradient(slopes)
    stopped = jax.grad(
        lambda x: call(alibi_slopes=jax.lax.stop_gradient(x)).sum()
    )
    assert_all(stopped(slopes), 0, "stopped(slopes)")


def test_deterministic_gradient_of_a_broadcast_bias():
    bias = options()["bias of all"]["bias"]
    gradient = jax.grad(lambda x: call(bias=x, deterministic=True).sum())
    with pytest.raises(UnsupportedError, match="bias is broadcast"):
        gradient(bias)


def test_tracers_in_other_calls():
    with pytest.raises(UnsupportedError, match="write cuflash.jax.attention"):
        jax.jit(cuflash.forward)(Q, K, V)


def bad_offsets():
    given = packed() | {"cu_seqlens_q": np.array([0, 4, 2], np.int32)}
    return split(given)[0]


@pytest.mark.parametrize("transform", ["none", "grad", "vmap"])
def test_invalid_offsets_raise_before_the_call(transform):
    """One line, ours: not the error of a callback, in one of JAX's."""
    arrays = bad_offsets()

    def loss(q):
        return attention(**arrays | {"q": q}).sum()

    function, q = {
        "none": (loss, arrays["q"]),
        "grad": (jax.grad(loss), arrays["q"]),
        "vmap": (jax.vmap(loss), arrays["q"][None]),
    }[transform]
    words = r"cu_seqlens_q\[2\] is 2, expected at least 4"
    with pytest.raises(ValueRangeError, match=words):
        function(q)


def test_invalid_offsets_raise_in_jit_on_the_cpu():
    errors = (jax.errors.JaxRuntimeError, ValueError)  # by XLA's choice
    with pytest.raises(errors, match=r"cu_seqlens_q\[2\]"):
        jax.jit(attention)(**bad_offsets()).block_until_ready()


def run_without(module):
    text = f"import sys; sys.modules[{module!r}] = None; import cuflash.jax"
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True
    ).stderr.splitlines()[-1]


def test_without_jax():
    assert run_without("jax") == (
        "ImportError: cuflash.jax needs JAX, which is not installed: "
        'pip install "cuflash[jax]" (Python 3.11 or newer)'
    )


def test_with_an_old_jax():
    assert run_without("jax.experimental.buffer_callback") == (
        "ImportError: cuflash.jax needs JAX 0.10 or newer, found "
        f'{jax.__version__}: pip install "cuflash[jax]"'
    )
