"""`tile_mask`: flags of tiles, and an object that stands for a mask_mod."""

import pickle
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import DTypeError, ExpressionError, ValueRangeError
from cuflash.api import tile_mask as api
from cuflash.backends.numpy import tile_flags
from helpers.compare import assert_arrays_equal

SIZES = {"batch": 2, "num_heads": 3, "seqlen_q": 37, "seqlen_k": 50}
BLOCKS = {"block_q": 8, "block_k": 16}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx, *, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


def windows(b, h, q_idx, kv_idx, *, window):
    return abs(q_idx - kv_idx) < window[h]


def striped(b, h, q_idx, kv_idx, *, step):
    return (q_idx + kv_idx) % step == 0


def scattered(b, h, q_idx, kv_idx, *, table):
    """Intervals know nothing of a gather of two ranges."""
    return table[q_idx, kv_idx] > 0.5


def ends(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
    return q_idx + seqlen_k - seqlen_q >= kv_idx


def nothing(b, h, q_idx, kv_idx):
    return False


rng = np.random.default_rng(0)
IDS = np.sort(rng.integers(0, 4, (2, 50)))
TABLE = np.zeros((37, 50), ml_dtypes.bfloat16)
TABLE[:8, :16] = 1
TABLE[20, 30] = 1
MASKS = [
    (causal, {}, (1, 1)),
    (documents, {"ids": IDS}, (2, 1)),
    (windows, {"window": np.array([1, 9, 60])}, (1, 3)),
    (striped, {"step": 7}, (1, 1)),
    (scattered, {"table": TABLE}, (1, 1)),
    (ends, {}, (1, 1)),
    (nothing, {}, (1, 1)),
]


def of_pairs(visible):
    """Flags of (..., queries, keys) pairs, a tile at a time."""
    rows = range(0, visible.shape[-2], 8)
    columns = range(0, visible.shape[-1], 16)
    tiles = [
        [visible[..., i : i + 8, j : j + 16] for j in columns] for i in rows
    ]
    found = [
        [0 + x.all((-2, -1)) + x.any((-2, -1)) for x in row] for row in tiles
    ]
    return np.moveaxis(np.array(found, np.uint8), (0, 1), (-2, -1))


@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("function, arrays, heads", MASKS)
def test_flags_are_those_of_the_pairs(
    function, arrays, heads, most, monkeypatch
):
    monkeypatch.setattr(tile_flags, "MOST_PAIRS", most)
    indices = np.ogrid[:2, :3, :37, :50]
    known = {"seqlen_q": 37, "seqlen_k": 50} if function is ends else {}
    visible = function(*indices, **arrays, **known)
    visible = np.broadcast_to(visible, (*np.shape(visible)[:2], 37, 50))
    tiles = cuflash.tile_mask(function, mod_arrays=arrays, **SIZES, **BLOCKS)
    assert tiles.flags.shape == (*heads, 5, 4)
    assert tiles.flags.dtype == np.uint8
    want = of_pairs(np.asarray(visible))
    assert_arrays_equal(tiles.flags, np.broadcast_to(want, (*heads, 5, 4)), "")
    assert tiles.visited == pytest.approx(np.mean(want > 0))


def test_tiles_of_one_pair_are_the_mask():
    tiles = cuflash.tile_mask(
        causal, seqlen_q=5, seqlen_k=7, block_q=1, block_k=1
    )
    assert_arrays_equal(tiles.flags[0, 0] == 2, np.tri(5, 7, dtype=bool), "")
    assert not tiles.flags.flags.writeable


def test_sequences_without_tokens():
    tiles = cuflash.tile_mask(causal, seqlen_q=0, seqlen_k=300)
    assert tiles.flags.shape == (1, 1, 0, 3) and tiles.visited == 0


def test_decided_tiles_are_not_tested(monkeypatch):
    def fails(*_):
        raise AssertionError("a pair was tested")

    monkeypatch.setattr(tile_flags, "_visible", fails)
    cuflash.tile_mask(nothing, seqlen_q=99, seqlen_k=99)
    with pytest.raises(AssertionError):
        cuflash.tile_mask(causal, seqlen_q=99, seqlen_k=99)


def test_it_stands_for_its_function_and_arrays():
    q, k, v = rng.standard_normal((3, 2, 50, 3, 8))
    sizes = {**SIZES, "seqlen_q": 50}
    tiles = cuflash.tile_mask(documents, mod_arrays={"ids": IDS}, **sizes)
    out, lse = cuflash.forward(q, k, v, mask_mod=tiles, return_lse=True)
    alone = {"mask_mod": documents, "mod_arrays": {"ids": IDS}}
    want = cuflash.forward(q, k, v, **alone)
    assert_arrays_equal(out, want, "out")
    gradients = [
        cuflash.backward(q, q, k, v, out, lse, **options)
        for options in ({"mask_mod": tiles}, alone)
    ]
    for got, wanted in zip(*gradients, strict=True):
        assert_arrays_equal(got, wanted, "")
    again = cuflash.tile_mask(tiles, **sizes)
    assert_arrays_equal(again.flags, tiles.flags, "flags")


def test_arrays_beside_its_own():
    def scaled(score, b, h, q_idx, kv_idx, *, ids, factor):
        return score * factor + ids[b, q_idx]

    q, k, v = rng.standard_normal((3, 2, 50, 3, 8))
    tiles = cuflash.tile_mask(documents, mod_arrays={"ids": IDS}, **SIZES)
    options = {"score_mod": scaled, "mask_mod": tiles}
    cuflash.forward(q, k, v, **options, mod_arrays={"factor": 2.0})
    both = {"factor": 2.0, "ids": IDS}
    cuflash.forward(q, k, v, **options, mod_arrays=both)
    other = {"factor": 2.0, "ids": IDS.copy()}
    with pytest.raises(ValueRangeError, match="'ids', and so has mask_mod"):
        cuflash.forward(q, k, v, **options, mod_arrays=other)
    with pytest.raises(DTypeError, match="mod_arrays is"):
        cuflash.forward(q, k, v, **options, mod_arrays=[IDS])


def test_arrays_on_a_device_are_copied(monkeypatch):
    class Tensor:
        def __init__(self, array):
            self.array = array
            self.shape, self.dtype = array.shape, array.dtype
            self.strides = array.strides

        def __dlpack_device__(self):
            return 2, 0

    copied = SimpleNamespace(
        to_cupy=lambda x: SimpleNamespace(get=lambda: x.array)
    )
    monkeypatch.setattr(api, "on_cuda", lambda: copied)
    ids = Tensor(IDS)
    tiles = cuflash.tile_mask(documents, mod_arrays={"ids": ids}, **SIZES)
    host = cuflash.tile_mask(documents, mod_arrays={"ids": IDS}, **SIZES)
    assert tiles.mod_arrays["ids"] is ids
    assert_arrays_equal(tiles.flags, host.flags, "flags")


@pytest.mark.parametrize(
    "error, words, changed",
    [
        (ValueRangeError, "block_q is 0, expected", {"block_q": 0}),
        (DTypeError, "seqlen_k is", {"seqlen_k": 5.0}),
        (ExpressionError, "'ids' is not in mod_arrays", {}),
        (ExpressionError, "neither function names", {"mask_mod": causal}),
        (ExpressionError, "arguments are unknown", {"mask_mod": 3}),
        (ExpressionError, "an array of pairs as mask", {"mask_mod": IDS}),
    ],
)
def test_errors(error, words, changed):
    arrays = {"other": IDS} if words.startswith("neither") else {}
    given = {"mask_mod": documents, **SIZES, "mod_arrays": arrays, **changed}
    with pytest.raises(error, match=words):
        cuflash.tile_mask(given.pop("mask_mod"), **given)


def test_a_copy_keeps_nothing():
    tiles = cuflash.tile_mask(causal, seqlen_q=300, seqlen_k=300)
    tiles._kept.put("flags", 1)
    copied = pickle.loads(pickle.dumps(tiles))
    assert len(copied._kept) == 0 and len(tiles._kept) == 1
    assert_arrays_equal(copied.flags, tiles.flags, "flags")


def test_its_words():
    tiles = cuflash.tile_mask(causal, seqlen_q=300, seqlen_k=300)
    assert repr(tiles) == (
        "<TileMask of causal: 66.7% of tiles of 128 x 128 pairs are visited>"
    )
    assert tiles(0, 0, 3, 3)
