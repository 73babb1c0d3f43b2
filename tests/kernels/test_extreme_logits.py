"""Scores from -1e30 to 1e30, ties, subnormals, rows that see no key."""

import numpy as np
import pytest
from hypothesis import strategies as st

import strategies
from cuflash.plans.tiles import Tile
from helpers import calls, expected, extreme
from helpers.backends import (
    on_backends,
    on_each_emulated_kind,
    on_each_kind,
    on_kernels,
)
from helpers.compare import (
    assert_all,
    assert_finite,
    assert_forward_matches,
    assert_gradients_match,
    assert_within,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES


@st.composite
def extremes(
    draw, backend, dtype, families, keys, causal=False, archs=("sm_80",)
):
    """Draw a case of exact scores; head_dim is the number of keys."""
    seqlen_k = draw(st.sampled_from(keys))
    case = Case(
        dtype,
        seqlen_q=draw(st.integers(1, 70)),
        seqlen_k=seqlen_k,
        head_dim=seqlen_k,
        scale=1.0,
        causal=causal and draw(st.booleans()),
        values=draw(st.sampled_from(families)).__name__,
        seed=draw(strategies.SEEDS),
    )
    return draw(strategies.on_backend(case, backend, archs))


@on_each_backend(
    extremes,
    each={"dtype": DTYPES},
    families=extreme.FAMILIES,
    keys=[1, 40, 200],
    causal=True,
    archs=strategies.FAMILIES,
    # The maximum of half of the columns made infinities of weights in
    # float16 alone, which l did not show.
    examples=[
        Case(
            "float16", seqlen_q=70, seqlen_k=40, head_dim=40, scale=1.0,
            values="one_large", on=Emulation("sm_90a"),
        )
    ],
)  # fmt: skip
def test_forward(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning(), exact_scores=True)
    assert_forward_matches(got, want, case)


@on_each_kind
@pytest.mark.parametrize(
    "changes",
    [{}, {"scale": -1.0}, {"dropout": 0.25}],
    ids=["plain", "negative", "dropout"],
)
def test_one_in_millions_beside_a_sink(backend, dtype, on, changes):
    """What rounding its exponent adds to acc and l is no part of a sink."""
    fields = {"scale": 1.0, "arrays_of": ("sink",), **changes}
    case = Case(
        dtype, seqlen_q=20, seqlen_k=40, head_dim=40, values="one_in_millions",
        on=on, **fields,
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    q *= q.dtype.type(case.scale)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning(), exact_scores=True)
    assert_forward_matches(got, want, case)


@on_each_backend(
    extremes,
    each={"dtype": DTYPES},
    families=extreme.WITH_ONE_MAXIMUM,
    keys=[2, 40],
    archs=strategies.FAMILIES,
)
def test_backward(backend, case):
    q, k, v, dout = inputs(case)
    grads = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(
        dout, q, k, v, **case.meaning(), exact_scores=True
    )
    assert_gradients_match(grads, want, case)


@st.composite
def subnormals(draw, backend, dtype, archs):
    case = Case(
        dtype,
        seqlen_q=draw(st.integers(1, 70)),
        seqlen_k=draw(st.integers(1, 140)),
        scale=1.0,
        values="subnormal",
        seed=draw(strategies.SEEDS),
    )
    return draw(strategies.on_backend(case, backend, archs))


@on_each_backend(subnormals, each={"dtype": DTYPES}, archs=strategies.FAMILIES)
def test_subnormal_inputs(backend, case):
    """Everything is below the smallest normal number of the dtype."""
    q, k, v, dout = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)
    grads = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_k", [0, 1, 70])
def test_rows_that_see_nothing(backend, dtype, seqlen_k):
    """Bottom-right aligned: the first seqlen_q - seqlen_k rows see no key."""
    case = Case(dtype, seqlen_q=150, seqlen_k=seqlen_k, causal=True)
    q, k, v, dout = inputs(case)
    blind = case.seqlen_q - seqlen_k
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out[:, :blind], 0, "out[:, :blind]", case)
    assert_finite(out, "out", case)
    assert_all(lse[..., :blind], -np.inf, "lse[..., :blind]", case)
    assert_finite(lse[..., blind:], "lse[..., blind:]", case)
    dq, dk, dv = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert_all(dq[:, :blind], 0, "dq[:, :blind]", case)
    for x in (dq, dk, dv):
        assert_finite(x, "x")


@on_each_emulated_kind
def test_each_row_has_its_own_maximum(backend, dtype, on):
    """The maximum is at another key per row, larger by 1, by 40 or by 300."""
    case = Case(dtype, 1, 200, 200, head_dim=64, head_dim_v=64, scale=1.0,
                on=on)  # fmt: skip
    q, k, v, _ = inputs(case)
    k[...] = np.sign(k)
    above = 2.0 ** np.resize(np.repeat([0, 3, -5], 4), 200)
    q[0, :, 0] = k[0, np.arange(200) * 37 % 200, 0] * above[:, None]
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning(), exact_scores=True)
    assert_forward_matches(got, want, case)


# The second one times log2(e) is half a step from the nearest float32.
@pytest.mark.parametrize("top", [0, 24.125])
@on_each_emulated_kind
def test_many_weights_alike(backend, dtype, on, top):
    """Rounded one after the other, all would be rounded to one side.

    A lane sums 1,024 of 4,096 weights: at least 8 of a tile, then at most 128
    tiles. A sum of n numbers alike is off by at most n / 2 roundings, half a
    step each; the logarithm and the last sum by two steps of lse; exponents
    by half a step of a score, and of the largest.
    """
    case = Case(dtype, 1, 20, 4096, head_dim=8, scale=1.0, on=on)
    q, k, v, _ = inputs(case)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0], k[:, -1, :, 0] = 1, top - 0.2, top
    _, lse = calls.forward(backend, case, q, k, v)
    scores = k[0, :, 0, 0].astype(np.float64)
    want = np.log(np.exp(scores).sum())
    step = np.finfo(lse.dtype).eps
    bound = step * ((8 + 128) / 4 + 2 * want + top)
    assert_within(lse, want, bound, "lse", case)


@on_kernels
def test_weights_alike_of_rows_that_see_no_last_tile(backend):
    """Those of 1,024 keys or less, of tiles of 128.

    A sum of a lane's weights of a tile, or of its tiles, is of 64 at most.
    """
    on = Emulation("sm_90a", forward_tile=Tile(128, 128, 12, num_stages=2))
    case = Case("bfloat16", 1, 20, 1034, causal=True, scale=1.0, on=on)
    q, k, v, _ = inputs(case)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0], k[:, 0, :, 0] = 1, -0.2, 0
    _, lse = calls.forward(backend, case, q, k, v)
    weight = np.exp(k[0, 1, 0, 0].astype(np.float64))
    want = np.log(1 + weight * np.arange(1014, 1034))
    step = np.finfo(lse.dtype).eps
    bound = step * (64 / 4 + 2 * want.max())
    assert_within(lse, want, bound, "lse", case)
