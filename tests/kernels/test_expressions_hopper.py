"""A user's score_mod and mask_mod in Hopper's kernels.

Compared with a bias, a softcap and a boolean mask that mean the same.
"""

import numpy as np
import pytest

import cuflash
from cuflash.plans.tiles import Tile
from helpers import expected
from helpers.backends import on_kernels
from helpers.compare import (
    assert_allclose,
    assert_forward_matches,
    assert_matches,
)
from helpers.data import Emulation, inputs
from helpers.variants import (
    REACH,
    VARIANTS,
    Variant,
    case_of,
    check_forward,
    check_gradients,
    sequences,
    shape_of,
)


@on_kernels
@pytest.mark.parametrize("name", VARIANTS)
def test_forward(backend, name):
    check_forward(backend, case_of(), VARIANTS[name])


@on_kernels
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("relative", 64), ("relative", 128), ("capped", 64), ("decay", 64),
     ("causal", 64), ("causal", 128), ("documents", 128), ("windows", 64),
     ("late", 64), ("capped odd", 128), ("capped odd", 256),
     ("windows", 256)],
)  # fmt: skip
def test_gradients(backend, name, head_dim):
    differs = name in ("decay", "documents", "windows")  # by batch
    case = case_of(head_dim=head_dim, batch=1 + differs)
    check_gradients(backend, case, VARIANTS[name])


@on_kernels
def test_forward_of_wide_heads(backend):
    case = case_of(head_dim=256, batch=1)
    check_forward(backend, case, VARIANTS["capped odd"])


MORE = {
    "bias": ("windows", {"arrays_of": ("bias",)}),
    "slopes": ("relative", {"arrays_of": ("alibi_slopes",), "causal": True}),
    "mask": ("windows", {"arrays_of": ("mask",)}),
    "segments": (
        "capped odd", {"arrays_of": ("segment_ids_k", "segment_ids_q")}
    ),
    "window": ("windows", {"window": (50, 60)}),
    "dropout": ("capped odd", {"dropout": 0.25}),
    "sink": ("windows", {"arrays_of": ("sink",)}),
}  # fmt: skip


@on_kernels
@pytest.mark.parametrize("more", MORE)
def test_with_other_options(backend, more):
    name, options = MORE[more]
    dtype = "float16" if more == "bias" else "bfloat16"
    case = case_of(batch=1, dtype=dtype, **options)
    check_forward(backend, case, VARIANTS[name])
    check_gradients(backend, case, VARIANTS[name], **case.asked())


def _bent(score, b, h, q_idx, kv_idx, *, table):
    return score * 0.5 * (2 + table[h, q_idx - kv_idx + 2 * REACH])


def scattered(gradient, place, length):
    """The sum of a gradient of pairs at each place of each head's row."""
    heads = gradient.shape[1]
    sums = np.zeros((heads, length))
    for h in range(heads):
        np.add.at(sums[h], place, gradient[:, h].sum(axis=0))
    return sums


@on_kernels
@pytest.mark.parametrize(
    ("head_dim", "more"),
    [(64, {}), (128, {"causal": True, "dropout": 0.2}), (256, {})],
)
def test_gradient_of_a_table(backend, head_dim, more):
    """Once it is added, whose gradient is a bias's; it reaches all pairs."""
    case = case_of(150, 170, head_dim, **more)
    shape = shape_of(case)
    place = np.subtract.outer(np.arange(150), np.arange(170)) + 2 * REACH
    rng = np.random.default_rng(8)
    table = rng.standard_normal((4, 400)).astype(np.float32)

    def score(score, b, h, q_idx, kv_idx, *, table):
        return score + table[h, q_idx - kv_idx + 2 * REACH]

    def bias(table, shape):
        return np.broadcast_to(table[:, place], shape)

    variant = Variant(score, None, lambda _: {"table": table}, bias)
    (dmod,), (_, _, _, dbias) = check_gradients(
        backend, case, variant, return_dmod=("table",)
    )
    want = scattered(dbias.ref, place, table.shape[1])
    got = backend.fetch(dmod["table"])
    assert shape[1] == 4
    assert_allclose(got, want, "dtable", atol=0.01 * np.abs(want).max())


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_a_table_and_a_bias(backend, head_dim):
    """The table multiplies scores to which a bias has been added."""
    case = case_of(150, 170, head_dim, batch=1)
    shape = shape_of(case)
    place = np.subtract.outer(np.arange(150), np.arange(170)) + 2 * REACH
    rng = np.random.default_rng(8)
    table = rng.uniform(-1, 1, (4, 400)).astype(np.float32)
    bias = rng.standard_normal(shape).astype(np.float32)
    q, k, v, dout = inputs(case)
    arrays = q, k, v
    # In float64, by definition.
    f = [x.astype(np.float64) for x in (q, k, v, dout)]
    q, k, v, g = (x.transpose(0, 2, 1, 3) for x in f)
    k, v = (x.repeat(2, axis=1) for x in (k, v))
    x = head_dim**-0.5 * q @ k.swapaxes(-1, -2) + bias
    factor = 0.5 * (2 + table[:, place])
    s = x * factor
    lse = np.log(np.exp(s).sum(axis=-1))
    p = np.exp(s - lse[..., None])
    out = (p @ v).transpose(0, 2, 1, 3).astype(dout.dtype)
    with backend.running(case):
        placed = {
            "score_mod": _bent, "mod_arrays": {"table": backend.place(table)},
            "bias": backend.place(bias),
        }  # fmt: skip
        arrays = [backend.place(x) for x in arrays]
        state = backend.place(out), backend.place(lse.astype(np.float32))
        if head_dim == 64:  # 128's kernel is the same but for that
            state = cuflash.forward(*arrays, **placed, return_lse=True)
        dq, _, _, dbias, dmod = cuflash.backward(
            backend.place(dout), *arrays, *state, **placed,
            return_dbias=True, return_dmod=("table",),
        )  # fmt: skip
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    want = {
        "dbias": ds * factor,
        "dtable": scattered(ds * x * 0.5, place, 400),
        "dq": (head_dim**-0.5 * (ds * factor) @ k).transpose(0, 2, 1, 3),
    }
    found = {"dbias": dbias, "dtable": dmod["table"], "dq": dq}
    for name, expected_ in want.items():
        most = np.abs(expected_).max()
        got = backend.fetch(found[name]).astype(np.float64)
        assert_allclose(got, expected_, name, atol=0.02 * most)


@on_kernels
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("relative", 64), ("causal", 64), ("causal", 128), ("capped odd", 64)],
)
def test_deterministic(backend, name, head_dim):
    case = case_of(head_dim=head_dim, deterministic=True, batch=1)
    check_gradients(backend, case, VARIANTS[name])


@on_kernels
def test_packed_scores(backend):
    """b is the sequence, and lengths are its own."""
    more = {"causal": True}
    offsets = (0, 70, 70, 200), (0, 200, 210, 330)
    case = case_of(batch=1, offsets=offsets, **more)
    q, k, v, dout = inputs(case)
    rate = np.array([0.01, 0.02, 0.03], np.float32)
    decay = VARIANTS["decay"].bias
    given = [backend.place(x[0]) for x in (q, k, v, dout)]
    options = {
        **{f"cu_seqlens_{x}": backend.place(np.array(o, np.int32))
           for x, o in zip("qk", offsets, strict=True)},
        "score_mod": VARIANTS["decay"].score,
        "mod_arrays": {"rate": backend.place(rate)},
        **more,
    }  # fmt: skip
    with backend.running(case):
        out, lse = cuflash.forward(*given[:3], **options, return_lse=True)
        grads = cuflash.backward(given[3], *given[:3], out, lse, **options)
    out, lse, *grads = map(backend.fetch, (out, lse, *grads))
    for n, (i, j) in enumerate(zip(*map(sequences, offsets), strict=True)):
        shape = 1, 4, i.stop - i.start, j.stop - j.start
        bias = decay(rate[n : n + 1].astype(np.float64), shape)
        own = q[:, i], k[:, j], v[:, j]
        want = expected.forward(*own, bias=bias, **more)
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)
        want = expected.backward(dout[:, i], *own, bias=bias, **more)
        slices = zip(grads, (i, j, j), ("dq", "dk", "dv"), want, strict=False)
        for gradient, tokens, name, wanted in slices:
            assert_matches(gradient[None, tokens], wanted, name, case)


@on_kernels
def test_packed_masks(backend):
    """Another family runs them."""
    offsets = (0, 70, 70, 200), (0, 200, 210, 330)
    case = case_of(batch=1, offsets=offsets)
    q, k, v, _ = inputs(case)
    given = [backend.place(x[0]) for x in (q, k, v)]
    lengths = {
        f"cu_seqlens_{x}": backend.place(np.array(o, np.int32))
        for x, o in zip("qk", offsets, strict=True)
    }
    with backend.running(case):
        out, lse = cuflash.forward(
            *given, **lengths, mask_mod=VARIANTS["odd"].mask, return_lse=True
        )
    out, lse = backend.fetch(out), backend.fetch(lse)
    for i, j in zip(*map(sequences, offsets), strict=True):
        shape = 1, 4, i.stop - i.start, j.stop - j.start
        meaning = VARIANTS["odd"].meaning(shape)
        want = expected.forward(q[:, i], k[:, j], v[:, j], **meaning)
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)


# Of heads: references of that many pairs take longer than kernels.
ONE_GROUP = {"num_heads_q": 2, "num_heads_kv": 1}


@on_kernels
@pytest.mark.parametrize("name", ["late", "windows"])
def test_more_key_tiles_than_lanes(backend, name):
    """65 tiles, which the producer examines 32 at a time."""
    tile = Tile(128, 64, 12, num_stages=2)
    case = case_of(
        140, 4150, 16, batch=1, **ONE_GROUP,
        on=Emulation("sm_90a", num_sms=1, forward_tile=tile),
    )  # fmt: skip
    check_forward(backend, case, VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("name", ["late", "windows"])
def test_more_query_tiles_than_lanes(backend, name):
    case = case_of(3000, 70, 16, batch=1, **ONE_GROUP)
    check_gradients(backend, case, VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("head_dim", [64])
def test_numbers_that_are_not_finite(backend, head_dim):
    """At masked pairs a score may be anything, and hide what it hides."""

    def score(score, b, h, q_idx, kv_idx):
        return np.log(np.where(q_idx >= kv_idx, np.exp(score), -1.0 * score))

    def hidden(score, b, h, q_idx, kv_idx):
        return np.where(q_idx >= kv_idx, score, -np.inf)

    causal = VARIANTS["causal"].mask
    case = case_of(head_dim=head_dim, batch=1)
    check_forward(backend, case, Variant(score, causal, sees=causal))
    check_forward(backend, case, Variant(hidden, sees=causal))
    check_gradients(backend, case, Variant(score, causal, sees=causal))
    check_gradients(backend, case, Variant(hidden, sees=causal))
