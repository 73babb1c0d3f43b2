"""Operations, bytes, time and tile sizes, against the document's numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import masks, roofline

DIRECTIONS = ["forward", "backward"]


def problem(direction="forward", **changes):
    """Return [003]'s example, T = 1024 and d = 64 in FP16, with changes."""
    fields = {
        "direction": direction,
        "dtype": "float16",
        "batch": 1,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "num_heads_q": 1,
        "num_heads_kv": 1,
        "head_dim": 64,
        "head_dim_v": 64,
        "causal": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a100_example_of_the_document():
    p = problem()
    moved = roofline.materialised_bytes(p)
    floor = roofline.time_floor(p, roofline.A100, moved=moved)
    # Rounded to hundredths of a microsecond.
    assert round(floor.arithmetic * 1e6, 2) == 0.86
    assert round(floor.traffic * 1e6, 2) == 4.11
    assert floor.memory_bound and floor.seconds == floor.traffic


def test_documents_traffic_takes_a_terabyte_for_2_to_the_40():
    moved = roofline.materialised_bytes(problem())
    assert round(moved / (2.04 * 2**40) * 1e6, 2) == 3.74


def test_without_square_matrices_the_example_is_bound_by_arithmetic():
    floor = roofline.time_floor(problem(), roofline.A100)
    assert not floor.memory_bound
    assert floor.seconds == floor.arithmetic


def test_forward_operations_are_4_t2_d_and_3_t2():
    p = problem()
    assert roofline.flops(p) == 4 * 1024**2 * 64
    assert roofline.elementwise_flops(p) == 3 * 1024**2


def test_backward_operations_are_8_t2_d_and_the_recomputed_scores():
    p = problem("backward")
    products = roofline.product_flops(p)
    recomputed = products.pop("S = Q K^T")
    t, d = 1024, 64
    assert sum(products.values()) == 8 * t**2 * d
    assert recomputed == 2 * t**2 * d
    assert roofline.elementwise_flops(p) == 2 * t**2 + 2 * t * d


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operations_grow_with_batch_and_query_heads_alone(direction):
    one = roofline.flops(problem(direction))
    many = problem(direction, batch=3, num_heads_q=8, num_heads_kv=2)
    assert roofline.flops(many) == 24 * one


@given(st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_visible_pairs_are_those_of_the_dense_mask(seqlen_q, seqlen_k, causal):
    p = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    dense = masks.visible(seqlen_q, seqlen_k, causal=causal)
    assert roofline.visible_pairs(p) == dense.sum()


@pytest.mark.parametrize(
    "tokens, elements, gigabytes, half_a_unit",
    [(512, 262e3, 0.0005, 0.5e-4), (2048, 4.2e6, 0.008, 0.5e-3),
     (8192, 67e6, 0.134, 0.5e-3), (32768, 1.07e9, 2.1, 0.5e-1),
     (131072, 17.2e9, 34, 0.5)],
)  # fmt: skip
def test_square_matrices_of_the_documents_table(
    tokens, elements, gigabytes, half_a_unit
):
    # [002], "The quadratic bottleneck": numbers of elements have two digits
    # or three, and so an error of 0.5 % at most; bytes that of their last.
    assert tokens**2 == pytest.approx(elements, rel=0.005)
    size = roofline.square_bytes(tokens) / 1e9
    assert size == pytest.approx(gigabytes, abs=half_a_unit)
    assert roofline.square_bytes(tokens, "float32") == 4 * tokens**2


def test_documents_levels_of_memory():
    # [002]: HBM 40-80 GB, about 20 MB of SRAM, and what they feed; [001]:
    # "nearly an order of magnitude" between them.
    hbm, sram = roofline.A100_HBM, roofline.A100_SRAM
    assert hbm.bandwidth == roofline.A100.bandwidth
    assert round(sram.size / 2**20) == 20
    assert 9 < sram.bandwidth / hbm.bandwidth < 10
    ridges = [roofline.ridge(m.of(roofline.A100)) for m in (hbm, sram)]
    assert [round(x) for x in ridges] == [153, 16]


def test_one_square_matrix_at_100_000_tokens_fits_but_not_four():
    of_one = roofline.square_bytes(131_072)
    assert of_one < roofline.A100_HBM.size < 4 * of_one


def test_operations_of_the_projections_gradients():
    # [000]'s quiz, in n and d: 6 n d^2 each.
    n, d = 1024, 64
    dw, dx = roofline.projection_vjp_flops(n, d, d).values()
    assert dw == dx == 6 * n * d**2
    products = roofline.product_flops(problem("backward"))
    of_rows = sum(products[x] for x in products if x[:2] in ("dQ", "dK", "dV"))
    assert of_rows == 6 * n**2 * d


@pytest.mark.parametrize("heads", [1, 4])
def test_folding_multiplies_the_operations_by_the_heads(heads):
    n, d = 1024, 64
    products, squares = roofline.folded_flops(n, heads * d, d).values()
    dw, _ = roofline.projection_vjp_flops(n, heads * d, d).values()
    assert products == dw
    assert squares == heads * 6 * n**2 * d  # of dQ, dK, dV: 6 n^2 d


SHAPES = {
    "batch": 2,
    "seqlen_q": 3,
    "seqlen_k": 5,
    "num_heads_q": 4,
    "num_heads_kv": 2,
    "head_dim": 7,
    "head_dim_v": 11,
}


@pytest.mark.parametrize(
    "dtype, item, lse",
    [("float16", 2, 4), ("bfloat16", 2, 4), ("float32", 4, 4),
     ("float64", 8, 8)],
)  # fmt: skip
def test_bytes_are_those_of_the_arrays(dtype, item, lse):
    q, k = item * 2 * 3 * 4 * 7, item * 2 * 5 * 2 * 7
    out, v = item * 2 * 3 * 4 * 11, item * 2 * 5 * 2 * 11
    rows = lse * 2 * 3 * 4
    forward = problem("forward", dtype=dtype, **SHAPES)
    backward = problem("backward", dtype=dtype, **SHAPES)
    assert roofline.bytes_moved(forward) == q + k + v + out + rows
    both_ways = 2 * (q + k + v) + 2 * out + rows
    assert roofline.bytes_moved(backward) == both_ways


def test_dtype_may_be_numpys():
    p = problem(dtype=np.dtype("float32"))
    assert roofline.bytes_moved(p) == 4 * (4 * 1024 * 64 + 1024)


@pytest.mark.parametrize(
    "direction, accesses", [("forward", 4), ("backward", 7)]
)
def test_materialised_bytes(direction, accesses):
    p = problem(direction, batch=2, num_heads_q=3)
    expected = accesses * 6 * 1024**2 * 2
    assert roofline.materialised_bytes(p) == expected


def test_arithmetic_and_traffic_balance_at_the_ridge():
    device = roofline.Device(peak_flops=1e12, bandwidth=1e9)
    p = problem()
    moved = round(roofline.flops(p) / roofline.ridge(device))
    # flops is 2^28, the ridge 1000: `moved` is off by half a byte at most.
    floor = roofline.time_floor(p, device, moved=moved)
    half_a_byte = 0.5 / moved
    intensity = roofline.arithmetic_intensity(p, moved=moved)
    assert floor.traffic == pytest.approx(floor.arithmetic, rel=half_a_byte)
    assert intensity == pytest.approx(1000, rel=half_a_byte)


def test_problem_that_moves_nothing_has_no_intensity():
    assert roofline.arithmetic_intensity(problem(batch=0)) == 0
    assert roofline.time_floor(problem(batch=0), roofline.A100).seconds == 0


def test_other_directions_are_refused():
    with pytest.raises(ValueError, match="got 'merge'"):
        roofline.flops(problem("merge"))


memories = st.integers(0, 2**16)
head_dims = st.integers(1, 256)


@pytest.mark.parametrize(
    "direction, blocks", [("forward", 4), ("backward", 8)]
)
@given(memory=memories, d=head_dims, d_v=head_dims)
def test_tiles_fit_and_no_longer_query_tile_does(
    direction, blocks, memory, d, d_v
):
    memory += blocks * max(d, d_v)
    tiles = getattr(roofline, f"{direction}_tiles")(memory, d, d_v)
    held = getattr(roofline, f"{direction}_blocks")(*tiles, d, d_v)
    assert len(held) == blocks
    assert blocks * max(held.values()) <= memory
    assert blocks * (tiles[0] + 1) * max(d, d_v) > memory
    assert 1 <= tiles[1] <= max(d, d_v)


def test_rows_of_the_documents_formulas():
    # [003], eq. 39 and 70: M / T and M / 2T. T = 1024, the A100's M.
    memory = 192 * 1024 // 2
    assert roofline.forward_rows(memory, 1024) == 96
    assert roofline.backward_rows(memory, 1024) == 48


def test_tiles_of_the_documents_formulas():
    # A100: 192 KiB a multiprocessor, float16; M / 4d = 384, M / 8d = 192.
    memory = 192 * 1024 // 2
    assert roofline.forward_tiles(memory, 64) == (384, 64)
    assert roofline.backward_tiles(memory, 64) == (192, 64)
    assert roofline.forward_tiles(memory, 256) == (96, 96)


def test_forward_tiles_are_too_large_for_the_backward_pass():
    # [003]: Dao et al. take M / 4 for both. The largest that may come of it
    # is 2 M, where all of the eight blocks are as large as the first.
    memory, d = 16 * 64 * 64, 64
    larger = roofline.forward_tiles(memory, d)
    held = sum(roofline.backward_blocks(*larger, d, d).values())
    assert larger == (256, 64) and held > memory
    memory = 4 * d * d
    larger = roofline.forward_tiles(memory, d)
    held = sum(roofline.backward_blocks(*larger, d, d).values())
    assert held == 2 * memory


@pytest.mark.parametrize(
    "direction, least", [("forward", 256), ("backward", 512)]
)
def test_memory_too_small_for_any_tile(direction, least):
    tiles = getattr(roofline, f"{direction}_tiles")
    assert tiles(least, 64) == (1, 1)
    with pytest.raises(ValueError, match=f"{least} elements, got {least - 1}"):
        tiles(least - 1, 64)
