"""JAX's functions in a score_mod: an error that names NumPy's."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="tests of JAX's functions")

import cuflash  # noqa: E402
from cuflash.errors import ExpressionError  # noqa: E402

pytestmark = pytest.mark.slow

jnp = jax.numpy
Q = np.zeros((1, 4, 2, 8), np.float32)

REFUSED = {
    "where": (lambda s, b, h, i, j: jnp.where(i > j, s, 0), "write NumPy's"),
    "exp": (lambda s, b, h, i, j: jnp.exp(s), "write NumPy's"),
    "lax": (lambda s, b, h, i, j: jax.lax.max(s, 0.0), "write NumPy's"),
    "array": (lambda s, b, h, i, j: s + jnp.zeros(4)[j], "by mod_arrays"),
    "number": (lambda s, b, h, i, j: s * jnp.float32(2), "x.item()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_line_and_the_cure(name):
    function, cure = REFUSED[name]
    line = function.__code__.co_firstlineno
    with pytest.raises(ExpressionError) as caught:
        cuflash.forward(Q, Q, Q, score_mod=function)
    said = str(caught.value)
    assert said.startswith(f"{__file__}, line {line}: ") and cure in said, said
