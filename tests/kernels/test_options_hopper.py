"""Masks and score modifications in Hopper's kernels."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import (
    check_forward,
    check_gradients,
    check_gradients_of_forward,
)
from helpers.compare import (
    assert_arrays_equal,
    assert_bitwise,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.dtypes import DTYPES
from helpers.option_cases import FAMILIES
from helpers.options import option_arrays

SEGMENTS = ("segment_ids_k", "segment_ids_q")
OPTIONS = FAMILIES["wgmma"].sets


@on_kernels
@pytest.mark.parametrize("v", ["1", "huge", "-huge"])
@pytest.mark.parametrize(
    ("dtype", "k"), [("bfloat16", "-1"), ("float16", "-.5")]
)
@pytest.mark.parametrize("name", ["small softcap", "slopes"])
def test_weights_above_1(backend, name, dtype, k, v):
    """Relative to the last key tile's scores of -4 or -2; others are not.

    They leave a maximum as it is. A sum of 300 times the huge value is a
    number, and one of 300 times such a weight none.
    """
    huge = "3e35" if dtype == "bfloat16" else "6e4"
    of_v = () if v == "1" else (("v", (0,), v.replace("huge", huge)),)
    spoiled = (
        *of_v,
        ("q", (0,), "0.5"),
        *(("k", (0, i), k) for i in range(256, 300)),
    )
    check_forward(backend, Case(
        dtype, 1, 70, 300, head_dim=64, head_dim_v=64, spoiled=spoiled,
        on=Emulation("sm_90a", num_sms=1), **OPTIONS[name],
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize("key", [3, 11])
@pytest.mark.parametrize("query", [1, 9])
def test_one_score_of_a_warp_is_not_small(backend, query, key):
    """It is 16, with a cap of 30, and has most of its row's weight."""
    spoiled = (
        ("q", (0,), "0.01"),
        ("q", (0, query), "2"),
        ("k", (0,), "0.01"),
        ("k", (0, key), "1"),
    )
    check_forward(backend, Case(
        "bfloat16", 1, 70, 300, head_dim=64, head_dim_v=64, softcap=30.0,
        on=Emulation("sm_90a", num_sms=1), spoiled=spoiled,
    ))  # fmt: skip


@on_kernels
def test_large_scores_below_0_do_not_fit_poly3(backend):
    """All are -16, with a cap of 30.

    A warpgroup without queries skips four of five key tiles, which is as many
    as there are stages, while it holds the last head's.
    """
    check_forward(backend, Case(
        "bfloat16", 1, 70, 520, 2, head_dim=64, head_dim_v=64, softcap=30.0,
        on=Emulation("sm_90a", num_sms=1),
        spoiled=(("q", (0,), "2"), ("k", (0,), "-1")),
    ))  # fmt: skip


@on_kernels
def test_gradients_of_large_scores_below_0(backend):
    """All are -16, with a cap of 1/4: exp of the ratio overflows.

    Those of the second batch are so small that a polynomial caps them.
    """
    check_gradients(backend, Case(
        "bfloat16", 2, 70, 140, head_dim=64, head_dim_v=64, softcap=0.25,
        on=Emulation("sm_90a", num_sms=1),
        spoiled=(("q", (0,), "2"), ("k", (0,), "-1"), ("q", (1,), "0.01")),
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 200])
@pytest.mark.parametrize("name", ["window", "left", "segments", "few"])
def test_tiles_that_do_not_see_the_first_keys(backend, name, head_dim):
    """Of one block; the last has a warpgroup without queries."""
    case = Case(
        "bfloat16", 1, 440, 500, 2, 1, head_dim, head_dim, seed=1,
        on=Emulation("sm_90a", num_sms=1, seed=2), **OPTIONS[name],
    )  # fmt: skip
    check_forward(backend, case)


def full_case(names, head_dim, seqlen_k, **more):
    """Two grouped heads, with a bias and a mask of full shape."""
    case = Case(
        "bfloat16", 1, 150, seqlen_k, 2, 1, head_dim, head_dim, seed=19,
        on=Emulation("sm_90a", num_sms=2, seed=1, resident=2),
        arrays_of=names, **more,
    )  # fmt: skip
    for name in {"bias", "mask"} & set(names):
        assert option_arrays(case)[name].shape == (1, 2, 150, seqlen_k)
    return case


@on_kernels
@pytest.mark.parametrize("names", [("bias",), ("bias", "alibi_slopes")])
def test_biases_in_chunks(backend, names):
    """Of each batch, head, tile and row its own.

    The last ones of the array are of a warp that has six queries.
    """
    case = replace(full_case(names, 64, 328), batch=2, dtype="float16")
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_pairs_in_chunks(backend, name):
    """By 16 bytes but the last 4 keys; else from an odd place, or with gaps.

    Every other element of rows that begin at multiples of 16 bytes.
    """
    case = replace(full_case((name,), 64, 404), seqlen_q=70, dtype="float16")
    array, (q, k, v, _) = case.options()[name], inputs(case)
    want = calls.forward(backend, case, q, k, v)[0]
    size = array.itemsize
    memory = np.full(2 * 70 * 832 * size + 32, 255, np.uint8)  # NaN
    start = -memory.ctypes.data % 16
    for offset, step in (0, 1), (1, 1), (0, 2):
        view = np.ndarray(
            array.shape, array.dtype, memory, start + offset * size,
            [size * x for x in (0, 70 * 832, 832, step)],
        )  # fmt: skip
        view[...] = array
        placed = {name: backend.place(view)}
        got, _ = calls.forward(
            backend, replace(case, arrays_of=()), q, k, v, **placed
        )
        assert_bitwise(got, want, f"out, by {offset, step}")


@on_kernels
@pytest.mark.parametrize("seqlen_k", [200, 203])
@pytest.mark.parametrize(
    ("names", "head_dim"),
    [(("bias",), 64), (("bias",), 256), (("mask",), 128), (("mask",), 256),
     (("bias", "mask"), 128), (("bias", "mask"), 192)],
)  # fmt: skip
def test_backward_of_all_pairs(backend, names, head_dim, seqlen_k):
    """Read four or eight keys at a time, except in rows of 203."""
    check_gradients(backend, full_case(names, head_dim, seqlen_k))


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_dbias(backend, head_dim):
    case = full_case(
        ("bias", "mask"), head_dim, 200, causal=True, deterministic=True
    )
    check_gradients(backend, case)


@on_kernels
@pytest.mark.parametrize("array", ["q", "k", "dout"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_masked_nan_does_not_spread(backend, head_dim, array):
    """NaN of one head; the other head's mask must not matter."""
    spoiled = ((array, (0, 9, 0), "nan"), (array, (0, 140, 0), "inf"))
    check_gradients(backend, full_case(
        ("bias", "mask"), head_dim, 200, dropout=0.25, spoiled=spoiled,
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masked_nan_does_not_reach_dbias(backend, head_dim):
    """Although a softcap shares a division between two keys of a query.

    Rows of dv of the second batch are computed again, with its own bias.
    """
    spoiled = (
        ("k", (0, 9), "nan"), ("v", (0, 150), "inf"),
        ("dout", (1, 40), "nan"),
    )  # fmt: skip
    case = full_case(
        ("bias", "mask"), head_dim, 200, softcap=5.0, spoiled=spoiled
    )
    check_gradients(backend, replace(case, batch=2))


@on_kernels
@pytest.mark.parametrize(
    ("head_dim", "more", "dtype"),
    [(64, {}, "float32"), (64, {}, "bfloat16"), (128, {}, "float32"),
     (128, {"softcap": 5.0, "dropout": 0.1}, "bfloat16"),
     (256, {"softcap": 5.0, "dropout": 0.1}, "float32")],
)  # fmt: skip
def test_bias_without_its_gradient(backend, head_dim, more, dtype):
    """The bias may have another dtype than q."""
    case = full_case((), head_dim, 203, **more)
    q, k, v, dout = inputs(case)
    bias = option_arrays(full_case(("bias",), head_dim, 203))["bias"]
    options = {**case.meaning(), "bias": bias.astype(DTYPES[dtype])}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    placed = [backend.place(x) for x in (dout, q, k, v, out, lse)]
    options["bias"] = backend.place(options["bias"])
    with backend.running(case):
        got = cuflash.backward(*placed, **options)
    options["bias"] = bias
    want = expected.backward(dout, q, k, v, **options)[:3]
    assert_gradients_match([backend.fetch(x) for x in got], want, case)


@on_kernels
@pytest.mark.parametrize(
    "name", ["window", "segments", "small softcap", "few", "all"]
)
def test_masked_values_do_not_spread(backend, name):
    spoiled = (("v", (0, 9), "nan"), ("k", (0, 50), "inf"))
    case = FAMILIES["wgmma"].case("grouped", name, spoiled=spoiled)
    check_forward(backend, case)


# All arrays of the last ones, two in turn of the others.
SPOILED = [
    ("window", 40), ("segments", 120), ("softcap", 120), ("softcap", 200),
    ("small softcap", 120), ("mask", 120), ("all", 40),
    ("few", 40), ("few", 120), ("few", 200),
]  # fmt: skip
ARRAYS = "k", "v", "q", "dout"


@on_kernels
@pytest.mark.parametrize(
    ("name", "head_dim", "array"),
    [
        (*of, x)
        for i, of in enumerate(SPOILED)
        for j, x in enumerate(ARRAYS)
        if of[0] == "few" or i % 2 == j // 2
    ],
)
def test_masked_gradients_do_not_spread(backend, array, head_dim, name):
    spoiled = ((array, (0, 9), "nan"), (array, (0, 150), "inf"))
    check_gradients(backend, Case(
        "float16", seqlen_q=200, seqlen_k=200, head_dim=head_dim,
        head_dim_v=head_dim, causal=True, on=Emulation("sm_90a", num_sms=1),
        spoiled=spoiled, **OPTIONS[name],
    ))  # fmt: skip


@on_kernels
def test_more_query_tiles_than_lanes(backend):
    """47 tiles; the last segment begins after the 32nd."""
    case = Case(
        "float16", 1, 3000, 70, head_dim=16, seed=1, softcap=11.5,
        on=Emulation("sm_90a", num_sms=1), arrays_of=SEGMENTS,
    )  # fmt: skip
    check_gradients(backend, case)


@on_kernels
def test_more_key_tiles_than_lanes(backend):
    """65 tiles; the first queries see none of the last 33."""
    tile = Tile(128, 64, 12, num_stages=2)
    case = Case(
        "float16", 1, 400, 4150, head_dim=16, seed=4, arrays_of=SEGMENTS,
        on=Emulation("sm_90a", num_sms=1, forward_tile=tile),
    )  # fmt: skip
    check_forward(backend, case)


@on_kernels
def test_queries_of_segments_without_a_key(backend):
    """The first and the last tile; each visits a key tile all the same."""
    case = Case(
        "float16", 1, 800, 3, head_dim=16, seed=0, arrays_of=SEGMENTS,
        on=Emulation("sm_90a", num_sms=1),
    )  # fmt: skip
    arrays = option_arrays(case)
    of_q, of_k = (arrays[f"segment_ids_{x}"][0] for x in "qk")
    assert not {of_q[0], of_q[191], of_q[-1]} & set(of_k)
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize(
    "options", [{"window": (600, 0)}, {"arrays_of": SEGMENTS}], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_key_tiles_of_a_step_each(backend, head_dim, options):
    """Six per block: the next tile's keys load while gradients are stored."""
    check_gradients(backend, Case(
        "bfloat16", 1, 60, 700, 1, 1, head_dim, head_dim, seed=4,
        on=Emulation("sm_90a", num_sms=1, seed=1), **options,
    ))  # fmt: skip


@on_kernels
@pytest.mark.parametrize(
    "options",
    [
        {"window": (200, 0)},
        {"window": (None, 10)},
        {"window": (9, None)},
        {"arrays_of": SEGMENTS},
    ],
    ids=str,
)
def test_many_query_tiles(backend, options):
    """Balanced rounds: equal and shorter tiles, in sections of heads."""
    case = Case(
        "float16", 2, 600, 620, 3, head_dim=16, seed=3,
        on=Emulation("sm_90a", num_sms=3, l2_bytes=1), **options,
    )  # fmt: skip
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("seqlen_k", [16, 48, 64])
def test_one_key_tile_each(backend, seqlen_k):
    """Of a block's query tiles, the next has nothing of the last one's mask.

    Nor of its bias; of each batch, head and row these are others.
    """
    case = full_case(("bias", "mask"), 64, seqlen_k, dropout=0.25)
    case = replace(case, batch=2, on=replace(case.on, num_sms=1))
    check_forward(backend, case)


@on_kernels
def test_segment_ids_in_sections_of_heads(backend):
    """Sections of five and three query heads, of five and four key heads."""
    case = Case(
        "float16", 2, 200, 210, 18, 9, head_dim=16, seed=3, causal=True,
        on=Emulation("sm_90a", num_sms=3, l2_bytes=1), arrays_of=SEGMENTS,
    )  # fmt: skip
    check_gradients_of_forward(backend, case)


@on_kernels
def test_huge_scores_of_steps(backend):
    """lse is subtracted before anything is rounded."""
    case = Case(
        "float16", 1, 70, 140, head_dim=64, head_dim_v=64, scale=64.0,
        on=Emulation("sm_90a", num_sms=1), arrays_of=("alibi_slopes",),
    )  # fmt: skip
    check_gradients(backend, case)


@on_kernels
def test_huge_slopes_beside_a_softcap(backend):
    """Below 0, they add thousands to capped scores, and to lse."""
    of_family = FAMILIES["wgmma"].case("grouped", "small softcap, slopes")
    case = replace(of_family, batch=1, arrays_of=())
    slopes, (q, k, v, dout) = np.float32([-20, -9, 15, -0.25]), inputs(case)
    given = {"alibi_slopes": slopes, "softcap": case.softcap}
    states = cuflash.forward(q, k, v, causal=True, **given, return_lse=True)
    got = calls.backward(
        backend, case, dout, q, k, v, *states,
        alibi_slopes=backend.place(slopes),
    )  # fmt: skip
    want = expected.backward(dout, q, k, v, causal=True, **given)
    assert_gradients_match(got, want, case)


@on_kernels
def test_keys_that_are_all_far(backend):
    """All scores are -100 or less; weights are relative to their maximum.

    A key tile ends one key after the first query of a warpgroup.
    """
    case = Case(
        "float16", 1, 516, 130, 4, 4, 64, 64, seed=2,
        on=Emulation("sm_90a", num_sms=1), arrays_of=("alibi_slopes",),
    )  # fmt: skip
    assert option_arrays(case)["alibi_slopes"].max() >= 0.25
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slopes_of_many_bits(backend, dtype):
    """Slope / scale has many bits; so flat that many keys add to lse."""
    case = Case(
        dtype, 1, 70, 500, 2, 2, 64, 64, seed=0, scale=0.11,
        on=Emulation("sm_90a", num_sms=1), arrays_of=("alibi_slopes",),
    )  # fmt: skip
    assert option_arrays(case)["alibi_slopes"].max() <= 2**-6
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("scale", [-0.3, 1e-7])
def test_slopes_that_are_no_product(backend, scale):
    """Slopes of either sign, or not representable in float16."""
    case = Case(
        "float16", 1, 150, 300, 2, 1, 64, 64, seed=5, scale=scale,
        on=Emulation("sm_90a", num_sms=1), arrays_of=("alibi_slopes",),
    )  # fmt: skip
    assert (option_arrays(case)["alibi_slopes"] / 1e-7).max() > 65504
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 160])
def test_bias_in_chunks(backend, head_dim):
    """Chunks of eight keys, if all rows begin with one; aligned to less."""
    for seqlen_k in (264, 265, 266, 268):
        case = Case(
            "float16", 1, 20, seqlen_k, 1, 1, head_dim, head_dim, seed=1,
            on=Emulation("sm_90a", num_sms=1), arrays_of=("bias",),
        )  # fmt: skip
        assert option_arrays(case)["bias"].shape[2:] == (20, seqlen_k)
        check_forward(backend, case)


@on_kernels
def test_masks_of_any_length(backend):
    """Chunks of 16 keys, if all rows begin with one; aligned to less."""
    for seqlen_k in (32, 33, 34, 36, 40):
        case = replace(full_case(("mask",), 64, seqlen_k), seqlen_q=5)
        assert option_arrays(case)["mask"].shape == (1, 2, 5, seqlen_k)
        check_forward(backend, case)


@on_kernels
def test_gradients_of_pairs_of_any_length(backend):
    """Rows of biases and masks, aligned to a chunk or to less."""
    for seqlen_k in (32, 33, 34, 36, 40):
        case = replace(full_case(("bias", "mask"), 64, seqlen_k), seqlen_q=64)
        assert option_arrays(case)["bias"].shape == (1, 2, 64, seqlen_k)
        check_gradients(backend, case)


@on_kernels
def test_bias_without_chunks(backend):
    """One bias per head, aligned as chunks are."""
    case = Case(
        "float16", 1, 70, 264, 2, 2, 64, 64, seed=7,
        on=Emulation("sm_90a", num_sms=1), arrays_of=("bias",),
    )  # fmt: skip
    assert option_arrays(case)["bias"].shape == (1, 2, 1, 1)
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 200])
@pytest.mark.parametrize("name", ["window", "segments", "few", "all"])
def test_key_tiles_that_nobody_sees(backend, name, head_dim):
    case = Case(
        "float16", 1, 2, 800, 2, 1, head_dim, head_dim, seed=0,
        on=Emulation("sm_90a", num_sms=1), **OPTIONS[name],
    )  # fmt: skip
    check_gradients(backend, case)


@on_kernels
@pytest.mark.parametrize("head_dim", [40, 200])
@pytest.mark.parametrize("array", ["q", "k", "dout"])
@pytest.mark.parametrize("name", ["window", "segments"])
def test_masked_gradients_of_batches(backend, array, head_dim, name):
    """With slopes and grouped heads, and no other mask."""
    options = dict(OPTIONS[name])
    arrays = *options.pop("arrays_of", ()), "alibi_slopes"
    spoiled = ((array, (0, 9), "nan"), (array, (0, 140), "inf"))
    check_gradients(backend, Case(
        "float16", 2, 170, 200, 2, 1, head_dim, head_dim, seed=25,
        spoiled=spoiled, on=Emulation("sm_90a", num_sms=1), arrays_of=arrays,
        **options,
    ))  # fmt: skip


@on_kernels
def test_slopes_that_overflow(backend):
    """Over the scale, times a distance; the scores are numbers.

    The keys that are seen stand in one tile, behind them some that are not.
    """
    case = Case(
        "bfloat16", 1, 70, 300, head_dim=64, head_dim_v=64, scale=2.0**-10,
        on=Emulation("sm_90a", forward_tile=Tile(128, 128, 12, num_stages=2)),
    )  # fmt: skip
    mask = np.isin(np.arange(300), range(90, 100))
    options = {"mask": mask, "alibi_slopes": np.float32([2.0**117])}
    q, k, v, _ = inputs(case)
    placed = {name: backend.place(x) for name, x in options.items()}
    out, _ = calls.forward(backend, case, q, k, v, **placed)
    assert_arrays_equal(out, np.broadcast_to(v[:, 99], out.shape), "out")


@on_kernels
def test_a_row_of_minus_infinity_beside_a_sink(backend):
    check_forward(backend, Case(
        "bfloat16", 1, 70, 100, head_dim=40,
        arrays_of=("sink",), on=Emulation("sm_90a"),
        spoiled=(("q", (0, 7), "-inf"), ("k", (0,), "1")),
    ))  # fmt: skip
