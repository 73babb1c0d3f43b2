"""checkpoint, scan and jit of `cuflash.jax.attention`; how often it runs."""

from unittest import mock

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

from jax_data import assert_same, inputs, split  # noqa: E402

from cuflash.api import attention as api_attention  # noqa: E402
from cuflash.jax import attention  # noqa: E402

pytestmark = pytest.mark.slow


def total(arrays, **static):
    return (attention(**arrays, **static) ** 2).sum()


def test_checkpoint_runs_forward_again(monkeypatch):
    arrays, _ = split(inputs())
    expected = jax.grad(total)(arrays)
    counted = mock.Mock(side_effect=api_attention.forward)
    monkeypatch.setattr(api_attention, "forward", counted)
    got = jax.jit(jax.grad(jax.checkpoint(total)))(arrays)
    jax.tree.map(assert_same, got, expected)
    # Without a use of the first run's result XLA drops that run.
    assert counted.call_count == 1


def test_scan_over_layers():
    given = inputs(seqlen_k=5, num_heads_kv=4, head_dim_v=8)
    arrays, _ = split(given)
    k, v = arrays["k"], arrays["v"]

    def layer(x, scale):
        return attention(x * scale, k, v, causal=True), None

    def stacked(x):
        scales = jax.numpy.array([1.0, 2.0], jax.numpy.float32)
        return jax.lax.scan(layer, x, scales)[0].sum()

    def unrolled(x):
        return layer(layer(x, 1.0)[0], 2.0)[0].sum()

    q = arrays["q"]
    assert_same(jax.grad(stacked)(q), jax.grad(unrolled)(q))


def test_equal_calls_are_traced_once():
    traces = 0

    @jax.jit
    def call(arrays):
        nonlocal traces
        traces += 1
        return total(arrays, causal=True)

    for seed in range(3):
        call({n: x * seed for n, x in split(inputs())[0].items()})
    assert traces == 1


def test_with_jit_disabled():
    arrays, _ = split(inputs())
    expected = jax.grad(total)(arrays)
    with jax.disable_jit():
        got = jax.jit(jax.grad(total))(arrays)
    jax.tree.map(assert_same, got, expected)


def test_static_arguments_of_jit():
    arrays, _ = split(inputs())
    call = jax.jit(attention, static_argnames=("causal", "window"))
    got = call(**arrays, causal=True, window=(1, 0))
    assert_same(got, attention(**arrays, causal=True, window=[1, 0]))


def test_lse_is_computed_only_if_it_is_needed():
    def results(function):
        arrays, _ = split(inputs())
        jaxpr = jax.make_jaxpr(function)(arrays)
        return [
            len(eqn.outvars)
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "cuflash_attention"
        ]

    assert results(lambda x: attention(**x)) == [1]
    assert results(lambda x: attention(**x, return_lse=True)) == [2]
    assert results(jax.grad(total)) == [2]


def test_forward_and_gradients_are_one_call_each():
    text = str(jax.make_jaxpr(jax.value_and_grad(total))(inputs()))
    assert text.count("cuflash_attention[") == 1
    assert text.count("cuflash_attention_gradients[") == 1
    assert "tangent" not in text
