"""Deterministic dq on Hopper with segment ids or packed: integer sums.

Each row has a grid of its own. Whatever the sizes of keys and of rows, errors
stay within the bounds of other calls; and a packed sequence has the same bits
alone and among others.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.backends.emulator import machine
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.backends import EMULATED
from helpers.checks import check_packed
from helpers.compare import (
    assert_arrays_equal,
    assert_bitwise,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs, lse_gradient
from helpers.packed import assert_packed_gradients, packed_inputs

TILES = {
    64: Tile(128, 128, 12, 1, 2, 8, 1, 3),
    128: Tile(64, 128, 12, 1, 2, 4, 1, 3),
    256: Tile(64, 64, 16, 1, 2, 4, 1, 3),  # sm90/backward_wide.cu
}
on_emulator = pytest.mark.parametrize("backend", [EMULATED])
on_each_kernel = pytest.mark.parametrize("head_dim", TILES)


def case_of(head_dim, dtype="bfloat16", **fields):
    """Return a case of several key tiles, with grouped heads."""
    on = Emulation("sm_90a", num_sms=2, backward_tile=TILES[head_dim])
    shape = {"seqlen_q": 150, "seqlen_k": 300, "num_heads_q": 2}
    return Case(dtype, head_dim=head_dim, head_dim_v=head_dim, on=on,
                deterministic=True, **(shape | fields))  # fmt: skip


def gradients(backend, case, arrays, **other):
    """Return dq, dk and dv of a case as one packed sequence."""
    offsets = (0, case.seqlen_q), (0, case.seqlen_k)
    packed = replace(case, offsets=offsets, **other)
    got = calls.gradients(backend, packed, *(x[0] for x in arrays))
    return [x[None] for x in got]


def check(backend, case, arrays):
    """Check the gradients of q, k, v and dout; return those of q."""
    got = gradients(backend, case, arrays)
    q, k, v, dout = arrays
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)
    return got[0]


# Any order -------------------------------------------------------------------

IDS = "segment_ids_q", "segment_ids_k"
OPTIONS = {
    "segments": {"arrays_of": IDS},
    "window": {"arrays_of": IDS, "window": (90, 20), "head_dim": 256},
    "softcap": {"arrays_of": IDS, "softcap": 3.0, "head_dim": 128},
    "dropout": {"arrays_of": IDS, "dropout": 0.25, "causal": True,
                "head_dim": 128},
    "slopes": {"arrays_of": (*IDS, "alibi_slopes"), "causal": True},
}  # fmt: skip


def in_another_order(case):
    return replace(case, on=replace(case.on, seed=3, resident=5))


@on_emulator
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_order_has_the_same_bits(backend, options):
    """In the second sequence all is so small that grids are the finest."""
    case = case_of(**({"head_dim": 64, "batch": 2} | options))
    q, k, v, dout = inputs(case)
    for x in (k, v, dout):
        x[1] *= x.dtype.type(2.0**-36)
    got = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)
    other = in_another_order(case)
    again = calls.gradients(backend, other, q, k, v, dout)[0]
    assert_bitwise(again, got[0], "dq")


@on_emulator
@on_each_kernel
def test_wide_sums_in_any_order(backend, head_dim):
    """Two limbs: a key 2^16 times as large as others, in the second tile.

    And whatever memory holds before: sums of low limbs begin with 0.
    """
    case = case_of(head_dim, seqlen_q=70)
    q, k, v, dout = inputs(case)
    k[:, 200] *= 2.0**16
    q[...] = 0
    dq = check(backend, case, (q, k, v, dout))
    with mock.patch.object(machine, "UNWRITTEN", 0x5A):
        again = gradients(backend, in_another_order(case), (q, k, v, dout))
    assert_bitwise(again[0], dq, "dq")


@on_emulator
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_in_any_order(backend, causal):
    offsets = (0, 70, 70, 200), (0, 150, 160, 300)
    case = case_of(64, seqlen_q=200, causal=causal, offsets=offsets)
    check_packed(backend, case)
    arrays = packed_inputs(case)[1]
    dq = calls.both(backend, case, *arrays)[0]
    again = calls.both(backend, in_another_order(case), *arrays)[0]
    assert_bitwise(again, dq, "dq")


# Sequences -------------------------------------------------------------------


@on_emulator
@on_each_kernel
def test_a_sequence_has_the_same_bits_alone(backend, head_dim):
    """Not between others, which its last tiles reach into."""
    offsets = (0, 30, 110, 150), (0, 50, 210, 300)
    case = case_of(head_dim, causal=True, offsets=offsets)
    q, k, v, dout = packed_inputs(case)[1]
    k[:50] *= 8
    v[210:] *= 8
    out, lse = calls.states(case, q, k, v)
    among = calls.backward(backend, case, dout, q, k, v, out, lse)
    of_q, of_k = slice(30, 110), slice(50, 210)
    alone = calls.backward(
        backend, replace(case, offsets=((0, 80), (0, 160))), dout[of_q],
        q[of_q], k[of_k], v[of_k], out[of_q], lse[:, of_q],
    )  # fmt: skip
    parts = among[0][of_q], among[1][of_k], among[2][of_k]
    for name, x, y in zip(("dq", "dk", "dv"), parts, alone, strict=True):
        assert_bitwise(x, y, name)


@on_emulator
@on_each_kernel
def test_a_sequence_has_the_same_bits_in_a_batch(backend, head_dim):
    """With segment ids; the other sequence is far larger."""
    case = case_of(head_dim, batch=2, seqlen_k=150, causal=True)
    arrays = inputs(case)
    for array in arrays:
        array[0] *= 8
    ids = np.broadcast_to(np.arange(150, dtype=np.int32) // 60, (2, 150))
    named = {"segment_ids_q": ids, "segment_ids_k": ids}
    q, k, v, dout = arrays
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True, **named)
    with backend.running(case):
        both, alone = (
            cuflash.backward(
                *(x[batches] for x in (dout, q, k, v, out, lse)), causal=True,
                deterministic=True, **{n: x[batches] for n, x in named.items()}
            )
            for batches in (slice(0, 2), slice(1, 2))
        )  # fmt: skip
    for name, x, y in zip(("dq", "dk", "dv"), both, alone, strict=True):
        assert_bitwise(x[1:], y, name)


# Sizes -----------------------------------------------------------------------


def large_key(q, k, v, dout):
    k[:, 170] *= 1000


def large_value(q, k, v, dout):
    v[:, 170] *= 1000


def large_row(q, k, v, dout):
    dout[:, 40] *= 1000


def rows_of_all_sizes(q, k, v, dout):
    sizes = 2.0 ** (np.arange(dout.shape[1]) % 24 - 12)
    dout *= sizes[:, None, None].astype(dout.dtype)


def tiny_values(q, k, v, dout):
    v *= v.dtype.type(2.0**-10)


SIZES = [large_key, large_value, large_row, rows_of_all_sizes, tiny_values]


@on_emulator
@on_each_kernel
@pytest.mark.parametrize("change", SIZES)
def test_errors_of_extreme_sizes(backend, change, head_dim):
    case = case_of(head_dim, "float16")
    arrays = inputs(case)
    change(*arrays)
    check(backend, case, arrays)


@on_emulator
@on_each_kernel
def test_rows_as_large_as_their_bounds(backend, head_dim):
    """The integers of a row come near the end of their range."""
    case = case_of(head_dim, "float16", seqlen_q=100, values="attained")
    check(backend, case, inputs(case))


@on_emulator
def test_dropout_and_dlse_reach_the_bounds(backend):
    """Five times those of others: a row keeps both keys of its sequence.

    They are opposite, as their values are, so each adds its bound to dq. In
    every second sequence they are alike, and dlse of either sign is most of
    it. The second head's keys are 64 times as large.
    """
    count = 36
    offsets = tuple(range(0, 7 * count, 7)), tuple(range(0, 2 * count, 2))
    case = case_of(64, "float16", seqlen_q=7 * count, seqlen_k=2 * count,
                   dropout=0.8, offsets=offsets, layout="unlike",
                   num_heads_q=4, num_heads_kv=2)  # fmt: skip
    arrays = inputs(case)
    q, k, v, dout = arrays
    q[...] = 0
    for x in (k, v):
        x[:, 1::2] = -x[:, ::2]
    k[:, 3::4] = k[:, 2::4]
    k[:, :, 1] *= 64
    dout[...] = np.repeat(v[:, ::2], 7, axis=1).repeat(2, axis=2)
    dlse = 1024 * np.sign(lse_gradient(case))
    dlse[..., np.arange(7 * count) // 7 % 2 == 0] = 0
    given = [x[0] for x in (dout, q, k, v)]
    states = calls.states(case, *given[1:])
    got = calls.backward(backend, case, *given, *states, dlse=dlse[0])
    assert_packed_gradients(got, dout, q, k, v, case, dlse)


def few_keys():
    """Return a case, its arrays and dlse, on which alone dq depends.

    Three sequences of few keys: one has an lse of -2^23, one negative keys; in
    one the key of all weight is 2^-23 of the other. Then one of many keys.
    """
    case = case_of(64, "float16", seqlen_q=28, seqlen_k=105, dropout=0.8,
                   offsets=((0, 7, 14, 21, 28), (0, 1, 3, 5, 105)),
                   layout="unlike")  # fmt: skip
    q, k, v, dout = inputs(case)
    dlse = 1024 * np.sign(lse_gradient(case))
    dout[...], q[...] = 0, 0
    q[:, :7, :, :8], k[:, 0], dlse[..., :7] = -(2.0**15), 2.0**8, 1
    k[:, 1:3] = -abs(k[:, 1:2])
    q[:, 14:21, :, 0], k[:, 3:5, :, 0] = -1, [[0], [2.0**15]]
    k[:, 3, :, 1:] /= 2**8
    k[:, 4, :, 1:] = 0
    k[:, 5:] *= 64
    return case, (q, k, v, dout), dlse


@on_emulator
def test_bounds_of_few_keys(backend):
    case, (q, k, v, dout), dlse = few_keys()
    given = [x[0] for x in (dout, q, k, v)]
    states = calls.states(case, *given[1:])
    got = calls.backward(backend, case, *given, *states, dlse=dlse[0])
    assert_packed_gradients(got, dout, q, k, v, case, dlse, exact_scores=True)


@on_emulator
def test_few_keys_have_the_same_bits_alone(backend):
    """In two limbs; typical keys of the tile, the next one's, need one."""
    case, (q, k, v, dout), dlse = few_keys()
    dqs = []
    for offsets, i, j in (
        (case.offsets, slice(0, 28), slice(0, 105)),
        (((0, 7), (0, 2)), slice(14, 21), slice(3, 5)),
    ):
        part = replace(case, offsets=offsets)
        given = [dout[0, i], q[0, i], k[0, j], v[0, j]]
        states = calls.states(part, *given[1:])
        dqs.append(calls.backward(
            backend, part, *given, *states, dlse=dlse[0, :, i]
        )[0])  # fmt: skip
    assert_bitwise(dqs[0][14:21], dqs[1], "dq")


@on_emulator
@on_each_kernel
def test_small_rows_beside_large_keys_are_accurate(backend, head_dim):
    """Only the last query sees the large key and its value.

    The others' errors are those of a call without that key.
    """
    case = case_of(head_dim, "float16", causal=True)
    q, k, v, dout = inputs(case)
    k[:, -1] *= 1000
    v[:, -1] *= 1000
    dq = gradients(backend, case, (q, k, v, dout))[0]
    small = [x[:, :-1] for x in (dout, q, k, v)]
    want = expected.backward(*small, **case.meaning())[0]
    assert_matches(dq[:, :-1], want, "dq", case)


@on_emulator
@on_each_kernel
def test_a_float16_ds_may_overflow(backend, head_dim):
    """Where others have an infinity, the definition's dS is in float32.

    The last rows give the large key all weight or none: dq of the others is
    so small that its digits are those of the low limb.
    """
    case = case_of(head_dim, "float16", seqlen_k=200, scale=2.0**-10)
    q, k, v, dout = arrays = inputs(case)
    size = np.float16((64 / head_dim) ** 0.5)
    q *= 8 * size
    q[:, 100:] *= 8
    k /= 256
    k[:, 3] *= 2**14  # much of the weight in half of the rows
    v *= 256
    dout[:, 20:30] *= 256 * size
    check(backend, case, arrays)


# NaN and infinity ------------------------------------------------------------

SPOILED = {
    "k": ((0, 200, 0, 3), "nan"), "v": ((0, 10, 0, 0), "inf"),
    "dout": ((0, 149, 1, 2), "inf"), "q": ((0, 60, 0, 1), "nan"),
}  # fmt: skip


@on_emulator
@pytest.mark.parametrize(
    ("name", "causal"),
    [("k", False), ("v", True), ("dout", False), ("dout", True), ("q", True)],
)
@on_each_kernel
def test_nonfinite_inputs(backend, head_dim, name, causal):
    """The same rows as of other calls are NaN, no others."""
    spoiled = (name, *SPOILED[name])
    case = case_of(head_dim, causal=causal, spoiled=(spoiled,))
    arrays = inputs(case)
    dq = gradients(backend, case, arrays)[0]
    other = gradients(backend, case, arrays, deterministic=False)[0]
    kinds = [np.isfinite(x.astype(np.float32)) for x in (dq, other)]
    assert_arrays_equal(*kinds, name="kinds")
