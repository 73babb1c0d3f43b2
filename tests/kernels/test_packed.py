"""Packed sequences on kernels: each is computed as if alone."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.errors import ValueRangeError
from cuflash.request.validate import host_values
from helpers import calls
from helpers.backends import (
    BACKENDS,
    CUPY,
    EMULATED,
    on_each_kind_with_options,
    on_kernels,
)
from helpers.checks import check_packed
from helpers.compare import assert_all, assert_bitwise
from helpers.data import Case, Emulation, lse_gradient
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.packed import (
    assert_packed_forward,
    assert_packed_gradients,
    many_sequences,
    packed_inputs,
)


def check_forward(backend, case):
    (q, k, v, _), given = packed_inputs(case)
    got = calls.forward(backend, case, *given[:3])
    assert_packed_forward(got, q, k, v, case)


@on_each_backend(strategies.packed_cases, each={"dtype": DTYPES})
def test_forward(backend, case):
    check_forward(backend, case)


@on_each_backend(strategies.packed_cases, each={"dtype": DTYPES})
def test_backward(backend, case):
    """With the NumPy path's out and lse."""
    (q, k, v, dout), given = packed_inputs(case)
    out, lse = cuflash.forward(*given[:3], **case.meaning(), return_lse=True)
    got = calls.backward(backend, case, given[3], *given[:3], out, lse)
    assert_packed_gradients(got, dout, q, k, v, case)


@on_each_kind_with_options
def test_many_short_ones(backend, dtype, on):
    """More than a warp searches in two rounds on a GPU, one here."""
    count = 90 if backend.name == "emulated" else 3000
    rng = np.random.default_rng(0)
    offsets = [np.r_[0, np.cumsum(rng.integers(0, 4, count))] for _ in "qk"]
    of_q, of_k = (tuple(map(int, x)) for x in offsets)
    check_packed(backend, Case(dtype, 1, of_q[-1], of_k[-1], causal=True,
                             on=on,
                             offsets=(of_q, of_k)))  # fmt: skip


@on_each_kind_with_options
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_long_among_short_ones(backend, dtype, on, place):
    """At any position; grouped heads, several tiles."""
    lengths = [3, 1, 20]
    lengths.insert(place, 170)
    offsets = tuple(map(int, np.r_[0, np.cumsum(lengths)]))
    check_packed(backend, Case(dtype, 1, 194, 194, 4, 2, 40, 40, causal=True,
                             deterministic=True, on=on,
                             offsets=(offsets, offsets)))  # fmt: skip


@on_each_kind_with_options
def test_blocks_begin_with_a_sequence(backend, dtype, on):
    """With its first key tile, for which the others wait to add to dq.

    Not with the second tile of the first, though its queries end there.
    """
    on = replace(on, num_sms=1, resident=1)
    check_packed(backend, Case(dtype, 1, 11, 301, 4, 2, 40, 40, causal=True,
                             deterministic=True, on=on,
                             offsets=((0, 5, 11), (0, 300, 301))))  # fmt: skip


# Of short sequences, of longer ones and of none.
AFTER_MANY = many_sequences((70, 40), (9, 140), (20, 30))
SPOILED = tuple(
    (name, (0, i), value)
    for name, value, tokens in (
        ("q", "nan", (3, 40, 100)), ("dout", "inf", (3, 50, 130)),
        ("k", "nan", (1, 170, 250)), ("v", "inf", (1, 120, 250)),
    )
    for i in tokens
)  # fmt: skip


@on_each_kind_with_options
def test_other_sequences_do_not_spread(backend, dtype, on):
    """Nor do the tokens after the last sequence."""
    check_packed(backend, Case(
        dtype, 1, 140, 255, 4, 2, 40, 24, causal=True, layout="unlike",
        spoiled=SPOILED, on=on, offsets=AFTER_MANY,
    ))  # fmt: skip


@on_each_kind_with_options
@pytest.mark.parametrize(
    "offsets",
    [((0, 30, 30, 75), (0, 40, 45, 80)), ((0,), (0,))],
    ids=["several", "none"],
)
def test_slopes_of_sequences(backend, dtype, on, offsets):
    """No sequence has those of the tokens of none."""
    check_packed(backend, Case(
        dtype, 1, 80, 83, 4, 2, 40, 24, causal=True, offsets=offsets,
        arrays_of=("alibi_slopes_of_batches",), on=on, seed=1,
    ))  # fmt: skip


@on_kernels
def test_no_sequences_have_no_slopes(backend):
    """float32 slopes are converted to float64, also none of them."""
    case = Case(
        "float64", seqlen_q=5, seqlen_k=7, offsets=((0,), (0,)),
        arrays_of=("alibi_slopes_of_batches",),
    )  # fmt: skip
    check_packed(backend, case)


@on_each_kind_with_options
def test_equal_slopes_of_sequences_are_shared_ones(backend, dtype, on):
    """Bit for bit, by any strides."""
    case = Case(
        dtype, 1, 80, 80, 2, 1, on=on,
        offsets=((0, 30, 30, 75), (0, 40, 45, 80)),
    )  # fmt: skip
    _, (q, k, v, dout) = packed_inputs(case)
    shared = np.float32([0.5, 0.125])
    wide = np.full((3, 4), np.nan, np.float32)
    wide[:, ::2] = shared
    results = []
    for slopes in (backend.place(shared), backend.place(wide)[:, ::2]):
        given = {"alibi_slopes": slopes}
        out, lse = calls.forward(backend, case, q, k, v, **given)
        grads = calls.backward(backend, case, dout, q, k, v, out, lse, **given)
        # dq is summed in no fixed order.
        results.append((out, lse, *grads[1:]))
    for a, b in zip(*results, strict=True):
        assert_bitwise(b, a, "of sequences")


@pytest.fixture
def unread_offsets(monkeypatch):
    """As on a GPU, where only kernels read them."""
    monkeypatch.setattr(host_values, "offsets", lambda call: None)


BAD = [
    ((1, 5, 40), (0, 5, 40), "cu_seqlens_q[0] is 1"),
    ((0, 5, 40), (0, 30, 20), "cu_seqlens_k[2] is 20"),
    ((0, 41, 40), (0, 5, 40), "cu_seqlens_q[1] is 41"),
    ((0, 5, 41), (0, 5, 40), "cu_seqlens_q[2] is 41"),
    ((0, 5, 40), (0, -5, 40), "cu_seqlens_k[1] is -5"),
    ((0, 5, -2000), (0, 5, 40), "cu_seqlens_q[2] is -2000"),
    ((0, 5, 40), (0, 2**31 - 1, -(2**31)), "cu_seqlens_k[1] is 2147483647"),
]


@on_each_kind_with_options
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.usefixtures("unread_offsets")
def test_bad_offsets_give_zeros(backend, dtype, on, bad):
    assert_all_zeros(backend, Case(
        dtype, 1, 40, 40, arrays_of=("sink",), offsets=bad[:2],
        on=on,
    ))  # fmt: skip


@on_each_kind_with_options
@pytest.mark.usefixtures("unread_offsets")
def test_bad_offsets_give_zeros_for_any_values(backend, dtype, on):
    """Keys and queries never meet, as 0 * NaN would be NaN."""
    spoiled = [(x, (0, 9), "nan") for x in ("q", "k", "v", "dout")]
    assert_all_zeros(backend, Case(
        dtype, 1, 40, 40, spoiled=tuple(spoiled), offsets=BAD[0][:2],
        on=on,
    ))  # fmt: skip


def assert_all_zeros(backend, case):
    _, (q, k, v, dout) = packed_inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out, 0, "out", case)
    assert_all(lse, -np.inf, "lse", case)
    for gradient in calls.backward(backend, case, dout, q, k, v, out, lse):
        assert_all(gradient, 0, "gradient", case)


@pytest.mark.parametrize("backend", [EMULATED, CUPY])
@pytest.mark.parametrize("bad", BAD)
def test_bad_offsets_are_named_with_check(backend, bad, monkeypatch):
    """Offsets in NumPy arrays always are."""
    if backend.name == "cupy":
        monkeypatch.setenv("CUFLASH_CHECK", "1")
    case = Case(seqlen_q=40, seqlen_k=40, offsets=bad[:2])
    with pytest.raises(ValueRangeError) as caught:
        calls.forward(backend, case, *packed_inputs(case)[1][:3])
    assert str(caught.value).startswith(bad[2])


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_longer_than_was_said_is_named(backend, name, monkeypatch):
    if backend.name == "cupy":
        monkeypatch.setenv("CUFLASH_CHECK", "1")
    case = Case(seqlen_q=40, seqlen_k=40, offsets=((0, 9, 40), (0, 9, 40)))
    _, (q, k, v, _) = packed_inputs(case)
    calls.forward(backend, case, q, k, v, **{name: 31})
    with pytest.raises(ValueRangeError, match=f"longer than {name}"):
        calls.forward(backend, case, q, k, v, **{name: 30})


@on_kernels
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.usefixtures("unread_offsets")
def test_longer_than_was_said_gives_zeros(backend, name):
    case = Case(seqlen_q=40, seqlen_k=40, offsets=((0, 9, 40), (0, 9, 40)))
    _, (q, k, v, _) = packed_inputs(case)
    some, _ = calls.forward(backend, case, q, k, v, **{name: 31})
    none, _ = calls.forward(backend, case, q, k, v, **{name: 30})
    assert_all(some != 0, True, "some != 0", case)
    assert_all(none, 0, "none", case)


@on_kernels
def test_offsets_by_any_strides(backend):
    case = Case("bfloat16", 1, 40, 40, offsets=((0, 9, 40), (0, 7, 33)))
    _, (q, k, v, _) = packed_inputs(case)
    want = calls.forward(backend, case, q, k, v)
    apart = {
        f"cu_seqlens_{x}": backend.place(np.repeat(np.int32(offsets), 2)[::2])
        for x, offsets in zip("qk", case.offsets, strict=True)
    }
    placed = [backend.place(x) for x in (q, k, v)]
    with backend.running(case):
        got = cuflash.forward(*placed, **apart, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(backend.fetch(a), b, "strided")


# ---- Hopper's kernels ----

# Of 0 and 1, of part of a tile, of several; queries without keys, keys
# without queries.
OFFSETS = tuple(
    tuple(map(int, np.r_[0, np.cumsum(lengths)]))
    for lengths in (
        (3, 0, 1, 300, 130, 0, 64, 2, 200, 0),
        (3, 5, 0, 200, 260, 0, 64, 9, 200, 1),
    )
)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "wide": {"causal": True, "head_dim": 200, "head_dim_v": 160},
    "all": {
        "causal": True,
        "head_dim": 128,
        "head_dim_v": 128,
        "window": (60, 60),
        "softcap": 30.0,
        "arrays_of": ("alibi_slopes", "sink"),
    },
}


def hopper_case(**changes):
    """Two grouped heads; some tokens belong to no sequence."""
    fields = {
        "dtype": "bfloat16", "seqlen_q": OFFSETS[0][-1] + 7,
        "seqlen_k": OFFSETS[1][-1] + 3, "num_heads_q": 2, "head_dim": 64,
        "head_dim_v": 64, "seed": 3, "offsets": OFFSETS,
        "on": Emulation("sm_90a", num_sms=2, seed=1, resident=2),
    }  # fmt: skip
    return Case(**fields | changes)


@on_kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_on_hopper(backend, name):
    check_packed(backend, hopper_case(**OPTIONS[name]))


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_on_hopper(backend, head_dim):
    """Dropout uses the sequence's index; a block takes several sequences."""
    check_packed(backend, hopper_case(
        dropout=0.25, head_dim=head_dim, head_dim_v=head_dim
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize(
    "fields",
    [{}, {"softcap": 30.0}, {"head_dim": 200, "head_dim_v": 160}],
    ids=["by_mma", "capped", "wide"],
)
def test_slopes_of_sequences_on_hopper(backend, fields):
    """The fourth's rows are recomputed, the third's are not."""
    offsets = (0, 20, 20, 120, 190, 200), (0, 10, 20, 110, 230, 240)
    spoiled = tuple(
        (x, (0, 192 if x in ("q", "dout") else 232), "nan")
        for x in ("q", "k", "v", "dout")
    )
    check_packed(backend, hopper_case(
        seqlen_q=205, seqlen_k=245, offsets=offsets, spoiled=spoiled,
        arrays_of=("alibi_slopes_of_batches",), **fields,
    ))  # fmt: skip


@on_kernels
def test_many_short_ones_on_hopper(backend):
    """Also with more blocks than tiles: some blocks get none."""
    lengths = np.random.default_rng(0).integers(0, 3, 70)
    of_q = tuple(map(int, np.r_[0, np.cumsum(lengths)]))
    of_k = tuple(map(int, np.r_[0, np.cumsum(lengths[::-1])]))
    on = Emulation("sm_90a", num_sms=150, seed=2)
    check_packed(backend, hopper_case(
        seqlen_q=of_q[-1], seqlen_k=of_k[-1], offsets=(of_q, of_k), on=on,
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize("name", ["causal", "all"])
def test_neighbours_of_many_do_not_spread_on_hopper(backend, name):
    """Rows that are computed anew: arrays apart, dlse."""
    options = {"arrays_of": ("sink",)} | OPTIONS[name] | {"dropout": 0.25}
    case = hopper_case(
        seqlen_q=140, seqlen_k=255, num_heads_q=4, num_heads_kv=2,
        offsets=AFTER_MANY, layout="unlike", spoiled=SPOILED,
        **{"head_dim_v": 40} | options,
    )  # fmt: skip
    check_packed(backend, case, lse_gradient(case))


@on_kernels
@pytest.mark.parametrize("name", ["plain", "wide"])
def test_neighbours_do_not_spread_on_hopper(backend, name):
    """What stands in a tile before and behind a sequence's tokens.

    Of the fourth all keys are sound, and its last tile has one that is not.
    """
    spoiled = tuple(
        (x, (0, i, 0, 5), value)
        for x, value in (
            ("q", "nan"), ("k", "inf"), ("v", "nan"), ("dout", "inf")
        )
        for i in (2, 3, 210, 302, 303, 700)
    )  # fmt: skip
    check_packed(backend, hopper_case(spoiled=spoiled, **OPTIONS[name]))


@on_kernels
@pytest.mark.parametrize("bad", BAD[:2])
@pytest.mark.usefixtures("unread_offsets")
def test_bad_offsets_give_zeros_on_hopper(backend, bad):
    case = hopper_case(
        seqlen_q=40, seqlen_k=40, offsets=bad[:2], **OPTIONS["all"]
    )
    assert_all_zeros(backend, case)
