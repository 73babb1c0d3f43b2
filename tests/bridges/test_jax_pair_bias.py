"""triangle_attention and attention_pair_bias of `cuflash.jax`."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_data import normal  # noqa: E402

import cuflash  # noqa: E402
from cuflash.jax import attention_pair_bias, triangle_attention  # noqa: E402
from helpers.compare import assert_allclose, assert_bitwise  # noqa: E402

pytestmark = pytest.mark.slow

# Sums of up to 7 terms of float64, of numbers up to 10, in any order.
BOUND = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def triangle_inputs(batch=2):
    lead = (batch, 3, 2)
    shapes = (*lead, 5, 6), (*lead, 7, 6), (*lead, 7, 6), (batch, 1, 2, 5, 7)
    return [
        jnp.asarray(normal(*shape, dtype="float64", seed=i))
        for i, shape in enumerate(shapes)
    ]


def some_mask(*shape):
    mask = normal(*shape, dtype="float64", seed=9) > -0.5
    mask[..., 0] = True
    return mask


def dense(q, k, v, bias, mask):
    s = q @ k.swapaxes(-1, -2) * 6**-0.5 + bias
    s = jnp.where(mask, s, -jnp.inf)
    lse = jax.scipy.special.logsumexp(s, -1, keepdims=True)
    return jax.nn.softmax(s, -1) @ v, lse


@pytest.mark.parametrize("deterministic", [False, True])
def test_triangles_are_those_of_the_matrix(deterministic):
    inputs, mask = triangle_inputs(), some_mask(2, 3, 1, 1, 7)

    def ours(*inputs):
        out, lse, _ = triangle_attention(
            *inputs, mask.astype(np.int8), None, deterministic=deterministic
        )
        return out, lse

    def loss(call):
        return lambda *inputs: sum(jnp.cos(x).sum() for x in call(*inputs))

    def theirs(*inputs):
        return dense(*inputs, mask)

    of_all = range(4)
    got = *ours(*inputs), *jax.jit(jax.grad(loss(ours), of_all))(*inputs)
    want = *theirs(*inputs), *jax.grad(loss(theirs), of_all)(*inputs)
    for x, y in zip(got, want, strict=True):
        assert_allclose(np.asarray(x), np.asarray(y), "result", **BOUND)


def test_derivatives_of_triangles():
    def out(*inputs):
        return triangle_attention(*inputs, None, 0.3)[0]

    check_grads(out, triangle_inputs(1), 1, modes=["fwd"])
    check_grads(out, triangle_inputs(1), 2, modes=["rev"])


def pair_inputs(multiplicity):
    rows, heads, width_z = 2 * multiplicity, 2, 3
    shapes = {
        "s": (rows, 5, 4), "q": (rows, heads, 5, 6), "k": (rows, heads, 7, 6),
        "v": (rows, heads, 7, 6), "z": (2, 5, 7, width_z),
        "w_proj_z": (heads, width_z), "w_proj_g": (12, 4),
        "w_proj_o": (4, 12), "w_ln_z": (width_z,), "b_ln_z": (width_z,),
        "b_proj_z": (heads,), "b_proj_g": (12,), "b_proj_o": (4,),
    }  # fmt: skip
    return {
        name: normal(*shape, dtype="float64", seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("multiplicity", [1, 2])
def test_pairs_are_those_of_torch(multiplicity):
    torch = pytest.importorskip("torch", reason="its function is compared")
    from cuflash.torch import attention_pair_bias as by_torch

    given, mask = pair_inputs(multiplicity), some_mask(2, 7)
    got = attention_pair_bias(
        **{x: jnp.asarray(y) for x, y in given.items()}, mask=mask, num_heads=2
    )
    tensors = {x: torch.from_numpy(y) for x, y in given.items()}
    want = by_torch(**tensors, mask=torch.from_numpy(mask), num_heads=2)
    for x, y in zip(got, want, strict=True):
        assert_allclose(np.asarray(x), y.numpy(), "result", **BOUND)


def test_a_cached_projection():
    given = {x: jnp.asarray(y) for x, y in pair_inputs(1).items()}
    out, bias = attention_pair_bias(**given, mask=None, num_heads=2)
    given |= {"z": bias, "w_proj_z": None}
    again, none = attention_pair_bias(
        **given, mask=None, num_heads=2, is_cached_z_proj=True,
        return_z_proj=False,
    )  # fmt: skip
    assert_bitwise(np.asarray(again), np.asarray(out), "out")
    assert none is None


def test_an_empty_batch():
    def loss(q, k, v, bias):
        out, lse, _ = triangle_attention(q, k, v, bias, None, None)
        assert lse.shape == (*q.shape[:-1], 1)
        return out.sum()

    inputs = [x[:0] for x in triangle_inputs()]
    gradients = jax.grad(loss, range(4))(*inputs)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    given = {
        x: jnp.asarray(y if "w_" in x or "b_" in x else y[:0])
        for x, y in pair_inputs(1).items()
    }
    for mask in (None, np.ones((0, 7), bool)):
        out, bias = attention_pair_bias(**given, mask=mask, num_heads=2)
        assert out.shape == (0, 5, 4) and bias.shape == (0, 2, 5, 7)


def test_wrong_shapes():
    q, k, v, bias = triangle_inputs()
    with pytest.raises(cuflash.ShapeError, match="bias has shape .2, 2, 5, 7"):
        triangle_attention(q, k, v, bias[:, 0], None, None)
    with pytest.raises(cuflash.ShapeError, match="q has 4 axes, expected 5"):
        triangle_attention(q[0], k, v, bias, None, None)
    given = {x: jnp.asarray(y) for x, y in pair_inputs(1).items()}
    with pytest.raises(cuflash.ShapeError, match="num_heads is 3"):
        attention_pair_bias(**given, mask=None, num_heads=3)
    given = {x: jnp.asarray(y) for x, y in pair_inputs(3).items()}
    words = r"mask has shape \(3, 7\), expected \(2, 7\) or \(6, 7\)"
    with pytest.raises(cuflash.ShapeError, match=words):
        attention_pair_bias(**given, mask=np.ones((3, 7)), num_heads=2)
    given["b_proj_g"] = given["b_proj_g"][:1]
    with pytest.raises(cuflash.ShapeError, match="b_proj_g has shape .1,"):
        attention_pair_bias(**given, mask=None, num_heads=2)
