"""vjp: forward, and backward with the same options."""

import inspect
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.api import vjp as api_vjp
from helpers.compare import assert_arrays_equal

rng = np.random.default_rng(0)
Q, K, V = rng.standard_normal((3, 2, 8, 2, 8), dtype=np.float32)
DOUT = np.ones_like(Q)
IDS = np.repeat(np.arange(2, dtype=np.int32), 4)[None].repeat(2, 0)
OFFSETS = np.array([0, 3, 8], np.int32)
BIAS = rng.standard_normal((2, 8, 8), dtype=np.float32)
SINK = np.array([0.5, -0.5], np.float32)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert_arrays_equal(a, b, "a")


def test_the_options_are_those_of_forward_and_backward():
    own = inspect.signature(cuflash.vjp).parameters
    forward = inspect.signature(cuflash.forward).parameters
    assert {x: str(p) for x, p in own.items()} == {
        x: str(p)
        for x, p in forward.items()
        if x not in ("out", "return_max_score")
    }
    backward = set(inspect.signature(cuflash.backward).parameters)
    later = set(inspect.signature(cuflash.vjp(Q, K, V)[1]).parameters)
    assert backward - later - set(own) == {"out", "lse"}


OPTIONS = [
    {},
    {"causal": True, "scale": 0.3},
    {"window": (2, 1), "softcap": 3.0, "dropout": 0.3, "seed": 7},
    {"segment_ids_q": IDS, "segment_ids_k": IDS},
    {
        "mask": IDS[:, None, :, None] == IDS[:, None, None],
        "alibi_slopes": SINK,
    },
]


@pytest.mark.parametrize("given", OPTIONS)
def test_gradients_are_those_of_backward_with_the_same_options(given):
    out, lse, vjp = cuflash.vjp(Q, K, V, **given, return_lse=True)
    same((out, lse), cuflash.forward(Q, K, V, **given, return_lse=True))
    want = cuflash.backward(DOUT, Q, K, V, out, lse, dlse=lse, **given)
    for _ in range(2):
        got = vjp(DOUT, dlse=lse)
        same((got.dq, got.dk, got.dv), want)
        assert got.dbias is got.dsink is None
        same(got, want)


def test_packed_sequences():
    packed = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    out, vjp = cuflash.vjp(Q[0], K[0], V[0], **packed)
    one, own = cuflash.vjp(Q[0, :3], K[0, :3], V[0, :3])
    same((out[:3], vjp(DOUT[0]).dq[:3]), (one, own(DOUT[0, :3]).dq))


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_bias_and_a_sink_have_gradients(with_bias):
    given = {"sink": SINK} | ({"bias": BIAS} if with_bias else {})
    out, vjp = cuflash.vjp(Q, K, V, **given)
    got = vjp(DOUT)
    assert (got.dbias is not None) == with_bias
    assert got.dsink.shape == SINK.shape
    named = got.dq, got.dk, got.dv, got.dbias, got.dsink
    same(got, [x for x in named if x is not None])
    without = vjp(DOUT, return_dbias=False, return_dsink=False)
    same(without, [*got][:3])


def test_a_function_of_the_users_and_its_arrays():
    def score(score, b, h, q_idx, kv_idx, *, table, rate):
        return score * rate[h] + table[q_idx - kv_idx]

    def mask(b, h, q_idx, kv_idx, *, rate):
        return (q_idx >= kv_idx) | (rate[h] > 0)

    arrays = {"table": BIAS[0, 0], "rate": SINK}
    given = {"score_mod": score, "mask_mod": mask, "mod_arrays": arrays}
    out, lse, vjp = cuflash.vjp(Q, K, V, **given, return_lse=True)
    same((out, lse), cuflash.forward(Q, K, V, **given, return_lse=True))
    names = {"return_dmod": ("table", "rate")}
    *want, dmod = cuflash.backward(DOUT, Q, K, V, out, lse, **given, **names)
    got = vjp(DOUT)
    assert got.dmod is None
    same(got, want)
    *again, found = got = vjp(DOUT, **names)
    same(again, want)
    assert found is got.dmod
    assert found.keys() == dmod.keys()
    same(found.values(), dmod.values())


def named(function, *others):
    """A value for each argument that has a default, but for some."""
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.default is not x.empty]
    return {x: f"a {x}" for x in names if x not in others}


def test_each_option_is_handed_on(monkeypatch):
    """Those, too, of which calls on NumPy arrays take no notice."""
    calls = mock.Mock()
    calls.forward.return_value = "out", "lse"
    calls.backward.return_value = (
        "dq", "dk", "dv", "dbias", "dsink", "dmod",
    )  # fmt: skip
    monkeypatch.setattr(api_vjp, "forward", calls.forward)
    monkeypatch.setattr(api_vjp, "backward", calls.backward)
    given = named(cuflash.vjp, "return_lse") | {"mod_arrays": {"a": 1}}
    _, vjp = cuflash.vjp(*"qkv", **given)
    calls.forward.assert_called_once_with(*"qkv", **given, return_lse=True)
    later = named(vjp)
    vjp("dout", **later)
    for name in ("block_q", "block_k", "num_splits"):
        del given[name]
    calls.backward.assert_called_once_with(
        "dout", *"qkv", "out", "lse", **given, **later
    )


def test_results_go_into_arrays_of_the_caller():
    _, vjp = cuflash.vjp(Q, K, V)
    given = {"dq": np.empty_like(Q), "dv": np.empty_like(V)}
    got = vjp(DOUT, **given, deterministic=True)
    assert got.dq is given["dq"] and got.dv is given["dv"]
    same(got, vjp(DOUT))


def test_an_option_that_only_backward_has_is_named():
    with pytest.raises(TypeError, match="deterministic"):
        cuflash.vjp(Q, K, V, deterministic=True)
