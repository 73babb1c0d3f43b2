"""forward_kvcache: attention over a cache, against the reference."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.errors import UnsupportedError
from cuflash.plans import decode
from helpers import kvcache_calls as kv
from helpers.apart import Apart
from helpers.backends import BACKENDS, EMULATED
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_bitwise,
)
from helpers.data import LAYOUTS, Emulation
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.kvcache_calls import KVCase

on_backends = pytest.mark.parametrize("backend", BACKENDS)

# Over several pages, and tiles, with one query each.
CASE = KVCase(
    "bfloat16", (0, 7, 130), seqlen_new=3, seqlen_q=3, head_dim=64,
    head_dim_v=64, page_size=16, seed=1,
)  # fmt: skip
CONTIGUOUS = replace(CASE, page_size=None, spare=2)


@on_each_backend(
    strategies.kvcache_cases, backends=BACKENDS, each={"dtype": DTYPES}
)
def test_against_the_reference(backend, case):
    kv.check(backend, case)


@on_each_backend(strategies.kvcache_cases, backends=BACKENDS, float8=True)
def test_float8(backend, case):
    kv.check(backend, case)


@on_backends
@pytest.mark.parametrize("page_size", [None, 1, 2, 3, 16, 17, 64, 128, 256])
def test_page_sizes(backend, page_size):
    kv.check(backend, replace(CASE, page_size=page_size, causal=True))


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_give_the_bits_of_a_contiguous_cache(backend, dtype):
    case = replace(CASE, dtype=dtype, rotary_dim=32, causal=True)
    given = case.arguments()
    caches = {}
    for name in kv.CACHES:
        shape = case.batch, case.capacity, *given[name].shape[2:]
        caches[name] = np.full(shape, np.nan).astype(DTYPES[dtype])
        for b, n in enumerate(case.before):
            caches[name][b, :n] = given[name][case.index(given, b, 0, n)]
    paged, _ = kv.run(backend, case, case.arguments())
    table = given.pop("page_table")
    whole, _ = kv.run(backend, case, given | caches)
    assert table.size
    for name, a, b in zip(("out", "lse"), paged, whole, strict=True):
        assert_bitwise(a, b, name)


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (20, 1)},
    "window of one": {"window": (0, 0)},
    "softcap": {"softcap": 2.0, "scale": -0.3},
    "slopes": {"arrays_of": ("alibi_slopes",), "scale": -0.3},
    "slopes of batches": {"arrays_of": ("alibi_slopes_of_batches",)},
    "sink": {"arrays_of": ("sink",)},
    "scale": {"scale": -0.3},
    "all": {
        "causal": True, "window": (50, None), "softcap": 20.0, "scale": -0.3,
        "arrays_of": ("alibi_slopes_of_batches", "sink"),
    },
}  # fmt: skip


@on_backends
@pytest.mark.parametrize("name", OPTIONS)
def test_option(backend, name):
    kv.check(backend, replace(CASE, **OPTIONS[name]))


@on_backends
@pytest.mark.parametrize("ragged", [(3, 0, 2), (0, 0, 1), (1, 40, 7)])
@pytest.mark.parametrize("packed_new", [False, True])
def test_ragged_queries(backend, ragged, packed_new):
    """Among them a sequence without a query."""
    case = replace(CASE, ragged=ragged, unused=2, packed_new=packed_new,
                   causal=True, rotary_dim=64)  # fmt: skip
    kv.check(backend, case)


@on_backends
@pytest.mark.parametrize("rotary_dim", [0, 2, 32, 64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ordered", [{}, {"causal": True},
                                     {"window": (500, None)}])  # fmt: skip
def test_rotary(backend, rotary_dim, interleaved, ordered):
    """A window that masks nothing decides how queries are rotated, too."""
    kv.check(backend, replace(
        CASE, rotary_dim=rotary_dim, interleaved=interleaved, **ordered
    ))  # fmt: skip


@on_backends
@pytest.mark.parametrize("leftpad", [(0, 3, 9), (5, 10, 200)])
@pytest.mark.parametrize("slots", [False, True])
def test_slots_and_left_padding(backend, leftpad, slots):
    """Also more padding than tokens."""
    case = replace(CONTIGUOUS, leftpad=leftpad, slots=slots, rotary_dim=16)
    kv.check(backend, case)


@on_backends
@pytest.mark.parametrize("scales", ["head", "page"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("seed", [1, 8])
def test_scales(backend, scales, power_of_two, seed):
    """With seed 8, new values exceed float8's largest number."""
    kv.check(backend, replace(
        CASE, scales=scales, power_of_two=power_of_two, seed=seed,
        rotary_dim=32,
    ))  # fmt: skip


@on_backends
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("group_size", [1, 8])
def test_nan_of_a_float8_cache(backend, name, group_size):
    """Key 128 of 130 reaches the last two of three queries, nothing else."""
    case = replace(CASE, scales="head", causal=True, seqlen_new=None,
                   group_size=group_size)  # fmt: skip
    given = case.arguments()
    clean, _ = kv.run(backend, case, case.arguments())
    given[name][(*case.index(given, 2, 128, 129), slice(None), 5)] = np.nan
    (out, lse), _ = kv.run(backend, case, given)
    if name == "k_cache":
        clean[1][2, :, 1:] = np.nan
    columns = slice(None) if name == "k_cache" else 5
    clean[0][2, 1:, :, columns] = np.nan
    for got, want in zip((out, lse), clean, strict=True):
        assert_arrays_equal(
            got.astype(float), want.astype(float), "got.astype(float)"
        )


@on_backends
@pytest.mark.parametrize(("batch", "heads"), [(0, (4, 2)), (2, (0, 2)),
                                              (2, (0, 0))])  # fmt: skip
@pytest.mark.parametrize("seqlens", [2, [2, 2]])
def test_nothing_to_compute(backend, batch, heads, seqlens):
    q, cache = (
        backend.place(np.zeros((batch, n, h, 16), np.float16))
        for n, h in zip((1, 8), heads, strict=True)
    )
    if seqlens != 2:
        seqlens = backend.place(np.array(seqlens[:batch], np.int32))
    with backend.running(CASE):
        out = cuflash.forward_kvcache(q, cache, cache, cache_seqlens=seqlens)
    assert out.shape == q.shape


# Their elements along head_dim are not side by side.
APART = ("every_other_element", "axes_reversed")


@on_backends
@pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if x not in ("broadcast", *APART)]
)
def test_strides_of_the_caches(backend, layout):
    kv.check(backend, replace(CASE, layout=layout))


EVERYWHERE = replace(
    CASE, head_dim_v=40, rotary_dim=32, window=(40, None), softcap=20.0,
    arrays_of=("alibi_slopes_of_batches", "sink"), ragged=(2, 3, 3),
    packed_new=True, unused=1, num_splits=2,
)  # fmt: skip
PLACES = {
    # A warp's 16 keys are on two pages; page 1, and its scale, is of none.
    "pages": {
        "scales": "page", "power_of_two": False, "page_size": 24, "seed": 13,
    },
    "slots": {
        "page_size": None, "slots": True, "leftpad": (0, 5, 70),
        "scales": "head", "causal": True,
    },
    "own pages": {"page_size": 24, "head_dim_v": 72},
}  # fmt: skip


@on_backends
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("places", PLACES)
def test_each_array_has_strides_of_its_own(backend, dtype, places):
    """With all options; k_scale and v_scale, tables and lengths too."""
    case = replace(EVERYWHERE, dtype=dtype, **PLACES[places])
    if dtype != "bfloat16":
        case = replace(case, num_splits=None)
    backend = Apart(backend)
    kv.check(backend, case)
    backend.check_gaps()


@on_backends
@pytest.mark.parametrize("layout", APART)
def test_caches_are_not_copied(backend, layout):
    with pytest.raises(UnsupportedError, match="^k_cache has strides"):
        kv.check(backend, replace(CASE, layout=layout))


@pytest.mark.parametrize("backend", [EMULATED])
def test_places_of_balanced_parts_in_64_bits(backend, monkeypatch):
    """As of calls with too many tiles for 32; elsewhere these have 32."""
    monkeypatch.setattr(decode, "_MOST_PLACES", 0)
    kv.check(backend, replace(CASE, seed=2, before=(2, 100, 0, 300)))


@on_backends
@pytest.mark.parametrize("by_int", [False, True])
@pytest.mark.parametrize("before", [(0, 0), (9, 9)])
def test_lengths_that_are_equal(backend, before, by_int):
    kv.check(backend, replace(CONTIGUOUS, before=before, by_int=by_int))


@on_backends
@pytest.mark.parametrize("page_size", [None, 4])
def test_sequences_without_a_token(backend, page_size):
    """Whose out is 0 and lse -inf, or the sink, also where 0 * -inf is NaN."""
    case = replace(CASE, before=(0, 5, 0), seqlen_new=None,
                   page_size=page_size)  # fmt: skip
    out, lse = kv.check(backend, case)
    assert_all(out[0], 0, "out[0]", case)
    assert_all(lse[0], -np.inf, "lse[0]", case)
    kv.check(backend, replace(case, arrays_of=("sink",), scale=0.0))


@on_backends
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_new"])
def test_empty(backend, empty):
    changes = {"before": ()} if empty == "batch" else {empty: 0}
    kv.check(backend, replace(CONTIGUOUS, **changes))


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_is_the_last_row_of_forward(backend, dtype):
    """Token by token, from an empty cache."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 2, 20, 2, 16)).astype(DTYPES[dtype])
    caches = [backend.place(np.full_like(x, np.nan)) for x in (k, v)]
    with backend.running(CASE):
        for i in range(20):
            one = [backend.place(x[:, i : i + 1]) for x in (q, k, v)]
            got = cuflash.forward_kvcache(
                one[0], *caches, k_new=one[1], v_new=one[2], cache_seqlens=i
            )
        want = cuflash.forward(*map(backend.place, (q, k, v)), causal=True)
    u = 2.0 ** -{"float16": 8, "bfloat16": 5}.get(dtype, 18)
    got, want = (backend.fetch(x).astype(float)[:, -1] for x in (got, want))
    assert_allclose(got, want, "got", atol=u)


@on_backends
@pytest.mark.parametrize("num_splits", [1, 2, 128])
def test_parts(backend, num_splits):
    kv.check(backend, replace(CASE, before=(600, 3), num_splits=num_splits))


@on_backends
def test_out(backend):
    """Receives the result, and nothing around it changes."""
    case = replace(CASE, ragged=(2, 1, 3), unused=1)
    given = case.arguments()
    out = np.full((9, *given["q"].shape[1:-1], case.head_dim_v), np.nan)
    out = out.astype(given["q"].dtype)
    placed = backend.place(out)
    view = placed[1:8]
    (got, _), _ = kv.run(backend, case, given | {"out": view})
    want = kv.check(backend, case)[0]
    assert_bitwise(np.asarray(got), want, "out")
    whole = backend.fetch(placed)
    assert_bitwise(whole[1:8], want, "out")
    assert_all(whole[[0, 8]], np.nan, "whole[[0, 8]]", case)


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("before", [
    (900,), (0, 513, 0, 1, 64), (1,) * 33 + (255, 700), (300, 300),
])  # fmt: skip
def test_fewer_row_tiles_than_blocks(backend, before):
    """Each cut row tile is merged once, all from uniform weights."""
    case = KVCase(
        "bfloat16", before, seqlen_new=None, seqlen_q=3, num_heads_kv=1,
        group_size=6, seed=1, on=Emulation("sm_90a", num_sms=80),
    )  # fmt: skip
    given = case.arguments()
    given["q"][:] = 0
    tiles = np.arange(given["v_cache"].shape[1]) // 64
    given["v_cache"][:] = tiles[:, None, None]
    (out, lse), _ = kv.run(backend, case, given)
    with np.errstate(divide="ignore"):
        want = np.log(before)[:, None, None]
    assert_allclose(lse, want, "lse", 2**-20)
    mean = [tiles[:length].mean() if length else 0 for length in before]
    assert_allclose(out, np.reshape(mean, (-1, 1, 1, 1)), "out", 2**-8)
