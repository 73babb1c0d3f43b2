"""Operations per element moved: the block product, and attention."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import intensity, roofline, traffic
from cuflash.reference.traffic import Sizes
from helpers.compare import assert_arrays_equal

sizes = st.integers(1, 6)
N = 64


def product(m, n, k, **blocks):
    """Multiply small integers, so that every sum is exact."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (m, k)), rng.integers(-9, 10, (k, n))
    return a @ b, intensity.block_product(a, b, **blocks)


@given(sizes, sizes, sizes, sizes, sizes, sizes)
def test_block_product_and_its_counts(m, n, k, block_m, block_n, block_k):
    blocks = {"block_m": block_m, "block_n": block_n}
    expected, slow = product(m, n, k, block_k=block_k, **blocks)
    assert_arrays_equal(slow["c"].array, expected, "c")
    counts = intensity.block_product_counts(m, n, k, **blocks)
    assert traffic.counts_of(slow) == counts


@pytest.mark.parametrize("block, loads", [(1, 16), (2, 8)])
def test_block_products_of_the_documents_machine(block, loads):
    # [000], problems 2 and 3: nothing reused, and everything loaded once.
    _, slow = product(2, 2, 2, block_m=block, block_n=block, block_k=1)
    counts = traffic.counts_of(slow)
    assert counts["a"].loads + counts["b"].loads == loads
    assert counts["c"].stores == 4


def of_block_product(block):
    blocks = {"block_m": block, "block_n": block}
    counts = intensity.block_product_counts(N, N, N, **blocks)
    return intensity.of(intensity.product_flops(N, N, N), counts)


def test_intensity_of_inner_blocked_and_outer_products():
    for block in (1, 4, 16):
        expected = 2 * N**3 / (2 * N**3 / block + N**2)
        assert of_block_product(block) == expected < block
    assert of_block_product(N) == 2 * N / 3


def attention_intensity(direction, name):
    """Return the intensity per d and per B, for T far above both."""
    t, d, block = 2**24, 2**8, 2**6
    z = Sizes(t, t, d, d, block, block)
    counts = getattr(traffic, f"{direction}_{name}_counts")(z)
    value = intensity.of(getattr(intensity, f"{direction}_flops")(z), counts)
    return value / d, value / block


@pytest.mark.parametrize(
    "direction, name, times",
    [("forward", "query_outer", 2), ("forward", "key_outer", 4 / 3),
     ("backward", "query_outer", 5 / 3), ("backward", "key_outer", 5 / 2)],
)  # fmt: skip
def test_tiled_intensity_grows_with_the_tile(direction, name, times):
    _, per_block = attention_intensity(direction, name)
    # Vectors, at most 4 for each of 2 matrices of d columns or more, and
    # what is moved once, against T / B tiles.
    assert per_block == pytest.approx(times, rel=2 / 2**8 + 2**-16)
    assert per_block < times


def test_materialised_intensity_is_head_dim():
    per_head_dim, _ = attention_intensity("forward", "materialised")
    assert per_head_dim == pytest.approx(1, rel=2**8 / 2**24 + 2**-50)


def test_operations_are_those_of_the_roofline():
    p = {"dtype": "float16", "batch": 1, "causal": False, "num_heads_q": 1,
         "num_heads_kv": 1, "seqlen_q": 6, "seqlen_k": 5, "head_dim": 3,
         "head_dim_v": 2}  # fmt: skip
    z = Sizes(6, 5, 3, 2)
    for direction in ("forward", "backward"):
        problem = type("Problem", (), {**p, "direction": direction})
        got = getattr(intensity, f"{direction}_flops")(z)
        assert got == roofline.flops(problem)


def test_nothing_moved_has_no_intensity():
    blocks = {"block_m": 1, "block_n": 1}
    counts = intensity.block_product_counts(0, 0, 0, **blocks)
    assert intensity.of(0, counts) == 0
