"""The gradient of a loss that depends on lse too: dlse."""

import numpy as np
import pytest
from hypothesis import assume, given

from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.backward import delta
from cuflash.reference.packed import packed_attention_vjp, spans
from cuflash.reference.tile_state import TileState, merge_vjp
from helpers.compare import assert_all, assert_allclose, assert_arrays_equal
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    backward_results,
    bounds,
)
from reference_strategies import optional_cases


def inputs(case):
    """Return q, k, v, dout and dlse."""
    rng = np.random.default_rng(case.seed + 3)
    arrays = case.arrays()
    return *arrays, rng.standard_normal(arrays[0].shape[:-1])


@given(optional_cases())
def test_every_schedule_equals_the_vjp(case):
    q, k, v, dout, dlse = inputs(case)
    out, lse = attention(q, k, v, **case.meaning())
    expected = attention_vjp(dout, q, k, v, dlse=dlse, **case.meaning())
    limits = bounds(case, q, k, v, dout, dlse).gradients(case)
    operands = dout, q, k, v, out, lse
    for name, got in backward_results(case, *operands, dlse=dlse):
        for a, b, bound in zip(got, expected, limits, strict=True):
            assert_close(a, b, bound, name)


ARGUMENTS = ("q", "k", "v", "bias", "sink")


@given(optional_cases())
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradient_is_the_finite_difference(name, case):
    """As in test_reference_options.py; lse is rounded too."""
    q, k, v, dout, dlse = inputs(case)
    given = {"q": q, "k": k, "v": v, **case.meaning()}
    assume(given.get(name) is not None and given[name].size)
    rng = np.random.default_rng(case.seed + 2)
    direction = rng.standard_normal(given[name].shape)
    direction /= np.linalg.norm(direction)

    def loss(step):
        moved = {**given, name: given[name] + step * direction}
        out, lse = attention(**moved)
        has_keys = lse > -np.inf
        return (dout * out).sum() + (dlse[has_keys] * lse[has_keys]).sum()

    def slope(h):
        return (loss(h) - loss(-h)) / (2 * h)

    asked = [x for x in ARGUMENTS if given.get(x) is not None]
    gradients = attention_vjp(dout, q, k, v, dlse=dlse, **case.meaning())
    got = (gradients[asked.index(name)] * direction).sum()
    h, bound = 1e-4, bounds(case, q, k, v, dout, dlse)
    once, twice = slope(h), slope(2 * h)
    rounding = (bound.out + dout.size * EPS) * abs(dout).sum()
    rounding += (bound.lse + dlse.size * EPS) * abs(dlse).sum()
    atol = abs(twice - once) + rounding * 10 / h
    assert_allclose(got, once, "got", atol=atol)


def test_d_is_less_by_dlse():
    dout, out = np.random.default_rng(0).standard_normal((2, 5, 4))
    dlse = np.arange(5.0)
    assert_arrays_equal(
        delta(dout, out, dlse),
        delta(dout, out) - dlse,
        "delta(dout, out, dlse)",
    )


def test_sequences_have_their_own():
    offsets = [0, 3, 3, 8], [0, 4, 5, 9]
    case = ReferenceCase((2,), 9, 10, causal=True)
    q, k, v, dout, dlse = inputs(case)
    given = {"causal": True, "heads_first": True}
    dq, dk, dv = packed_attention_vjp(
        dout, q, k, v, *offsets, dlse=dlse, **given
    )
    for _, i, j in spans(*offsets, 9, 10):
        alone = attention_vjp(
            dout[:, i], q[:, i], k[:, j], v[:, j], dlse=dlse[:, i], **given
        )
        for got, one in zip(
            (dq[:, i], dk[:, j], dv[:, j]), alone, strict=True
        ):
            assert_arrays_equal(got, one, "got")
    assert_all(dq[:, 8], 0, "dq[:, 8]")


def test_a_merge_is_trained_through():
    """Gradients of two halves of the keys, by merge_states' derivative."""
    case = ReferenceCase(seqlen_q=6, seqlen_k=9)
    q, k, v, dout, dlse = inputs(case)
    halves = [(k[:4], v[:4]), (k[4:], v[4:])]
    states = [attention(q, *half) for half in halves]
    merged = TileState.of_result(*states[0]).merge(
        TileState.of_result(*states[1])
    )
    of_states = merge_vjp(dout, dlse, states, *merged.finalize())
    parts = [
        attention_vjp(dout_x, q, *half, dlse=dlse_x)
        for half, (dout_x, dlse_x) in zip(halves, of_states, strict=True)
    ]
    got = (
        parts[0][0] + parts[1][0],
        *(np.concatenate([a, b]) for a, b in zip(*parts, strict=True)),
    )
    expected = attention_vjp(dout, q, k, v, dlse=dlse)
    limits = bounds(case, q, k, v, dout, dlse).gradients(case)
    # Twice: the halves' errors, and those of the whole.
    for a, b, bound in zip((got[0], *got[2:]), expected, limits, strict=True):
        assert_close(a, b, 2 * bound)
