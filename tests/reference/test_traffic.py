"""Schedules on counted memory: right results, counts as in closed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import roofline, traffic
from cuflash.reference.attention import (
    attention,
    attention_vjp,
    gradient_steps,
)
from cuflash.reference.traffic import Count, Memory, Sizes
from helpers.compare import assert_arrays_equal
from helpers.reference_cases import ReferenceCase, assert_close, bounds

TILED_FORWARD = ["query_outer", "key_outer", "split_keys"]
TILED_BACKWARD = ["query_outer", "key_outer", "two_pass"]
VECTORS = ["m", "l", "lse", "partial_lse", "delta"]
WHOLE = ["materialised", "row_by_row"]


@st.composite
def sizes(draw):
    """Draw sizes with tiles that divide the lengths, and others."""
    block_q, block_k = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        seqlen_q = block_q * draw(st.integers(1, 3))
        seqlen_k = block_k * draw(st.integers(1, 3))
    else:
        seqlen_q, seqlen_k = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    return Sizes(
        seqlen_q,
        seqlen_k,
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        block_q=block_q,
        block_k=block_k,
        num_splits=draw(st.integers(1, 4)),
    )


def alike(tokens=12, head_dim=4, block=3):
    """Return sizes with equal tiles of queries and keys."""
    return Sizes(tokens, tokens, head_dim, head_dim, block, block)


def case_of(z):
    return ReferenceCase(
        (), z.seqlen_q, z.seqlen_k, z.head_dim, z.head_dim_v, scale=0.5
    )


def keywords(z, name):
    if name in WHOLE:
        return {"scale": 0.5}
    splits = {"num_splits": z.num_splits} if name == "split_keys" else {}
    blocks = {"block_q": z.block_q, "block_k": z.block_k}
    return {"scale": 0.5, **blocks, **splits}


def run_forward(name, z):
    q, k, v, _ = case_of(z).arrays()
    schedule = getattr(traffic, f"forward_{name}")
    return schedule(q, k, v, **keywords(z, name))


def run_backward(name, z):
    q, k, v, dout = case_of(z).arrays()
    out, lse = attention(q, k, v, scale=0.5)
    saved = {
        "materialised": [gradient_steps(dout, q, k, v, scale=0.5).p],
        "row_by_row": [],
    }.get(name, [lse])
    schedule = getattr(traffic, f"backward_{name}")
    return schedule(dout, q, k, v, out, *saved, **keywords(z, name))


def closed_form(direction, name, z):
    return getattr(traffic, f"{direction}_{name}_counts")(z)


def counted(direction, name, z):
    run = run_forward if direction == "forward" else run_backward
    return traffic.counts_of(run(name, z))


@pytest.mark.parametrize("name", WHOLE + TILED_FORWARD)
@given(z=sizes())
def test_forward_is_attention(name, z):
    q, k, v, dout = case_of(z).arrays()
    out, lse = attention(q, k, v, scale=0.5)
    bound = bounds(case_of(z), q, k, v, dout)
    slow = run_forward(name, z)
    assert_close(slow["out"].array, out, bound.out)
    if name == "key_outer":
        got = slow["m"].array + np.log(slow["l"].array)
        assert_close(got, lse, bound.lse)
    elif name not in WHOLE:
        assert_close(slow["lse"].array, lse, bound.lse)


@pytest.mark.parametrize("name", WHOLE + TILED_BACKWARD)
@given(z=sizes())
def test_backward_is_the_vjp(name, z):
    q, k, v, dout = case_of(z).arrays()
    bound = bounds(case_of(z), q, k, v, dout)
    slow = run_backward(name, z)
    expected = attention_vjp(dout, q, k, v, scale=0.5)
    for which, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        got = slow[which].array
        assert_close(got, gradient, getattr(bound, which), which)


@pytest.mark.parametrize("name", WHOLE + TILED_FORWARD)
@given(z=sizes())
def test_forward_counts_are_the_closed_form(name, z):
    expected = closed_form("forward", name, z)
    assert counted("forward", name, z) == expected


@pytest.mark.parametrize("name", WHOLE + TILED_BACKWARD)
@given(z=sizes())
def test_backward_counts_are_the_closed_form(name, z):
    expected = closed_form("backward", name, z)
    assert counted("backward", name, z) == expected


@pytest.mark.parametrize(
    "direction, squares, accesses",
    [("forward", ("s", "p"), 4), ("backward", ("p", "dp", "ds"), 7)],
)
def test_materialised_accesses_of_square_matrices(
    direction, squares, accesses
):
    z = alike(tokens=6)
    counts = counted(direction, "materialised", z)
    of_squares = {name: counts[name] for name in squares}
    assert traffic.total(of_squares) == accesses * 6**2


def test_query_outer_of_single_tokens_is_the_documents_table():
    # [000], "Cost comparison", in rows: Q n, KV n^2, O stored n. It also
    # counts n loads of O, which starts as zeros and needs none.
    n, d = 6, 4
    counts = counted("forward", "query_outer", alike(n, d, block=1))
    assert counts["q"] == Count(n * d, 0)
    assert counts["k"] == counts["v"] == Count(n**2 * d, 0)
    assert counts["out"] == Count(0, n * d)


def test_key_outer_of_single_tokens_is_the_documents_table():
    # [000], "Cost comparison", in rows: Q n^2, KV n, O n^2 both ways.
    n, d = 6, 4
    counts = counted("forward", "key_outer", alike(n, d, block=1))
    assert counts["q"] == Count(n**2 * d, 0)
    assert counts["k"] == counts["v"] == Count(n * d, 0)
    assert counts["out"] == Count(n**2 * d, n**2 * d)


@pytest.mark.parametrize(
    "direction, name, coefficient",
    [
        ("forward", "query_outer", 2),
        ("forward", "key_outer", 3),
        ("forward", "split_keys", 2),
        ("backward", "query_outer", 6),
        ("backward", "key_outer", 4),
        ("backward", "two_pass", 4),
    ],
)
def test_leading_terms(direction, name, coefficient):
    def matrix_accesses(tiles):
        z = alike(24, 5, block=24 // tiles)
        counts = closed_form(direction, name, z)
        return sum(sum(counts[x]) for x in counts if x not in VECTORS)

    # What is not in proportion to n falls out of the difference.
    grown = matrix_accesses(tiles=8) - matrix_accesses(tiles=4)
    assert grown == coefficient * 4 * 24 * 5


@given(z=sizes())
def test_forward_query_outer_with_tiles_alike_is_the_cheaper(z):
    z = alike(12, z.head_dim, z.block_q)
    query, key = (
        traffic.total(closed_form("forward", name, z))
        for name in ("query_outer", "key_outer")
    )
    assert query < key


@pytest.mark.parametrize("inner", [False, True], ids=["003", "reloads"])
def test_inner_loops_of_backward(inner):
    z = alike(tokens=12, head_dim=4, block=3)
    t_d, tiles = 12 * 4, 4
    query = traffic.inner_loop_query_outer(z, reload=inner)
    key = traffic.inner_loop_key_outer(z, reload=inner)
    assert query == (6 if inner else 4) * tiles * t_d
    assert key == (4 if inner else 3) * tiles * t_d


@given(z=sizes())
def test_inner_loop_of_query_outer_loads_k_v_and_updates_dk_dv(z):
    counts = counted("backward", "query_outer", z)
    inner = {name: counts[name] for name in ("k", "v", "dk", "dv")}
    assert traffic.total(inner) == traffic.inner_loop_query_outer(z)
    reloads = counts["dk"].loads + counts["dv"].loads
    without = traffic.inner_loop_query_outer(z, reload=False)
    assert traffic.total(inner) - reloads == without


@given(z=sizes())
def test_inner_loop_of_key_outer_loads_q_dout_and_updates_dq(z):
    counts = counted("backward", "key_outer", z)
    before = z.out  # dO is loaded once more to make delta
    inner = {name: counts[name] for name in ("q", "dout", "dq")}
    matrices = traffic.total(inner) - before
    assert matrices == traffic.inner_loop_key_outer(z)
    without = traffic.inner_loop_key_outer(z, reload=False)
    assert matrices - counts["dq"].loads == without


@given(st.integers(2, 6), st.integers(3, 8), st.integers(1, 4))
def test_backward_key_outer_with_tiles_alike_is_the_cheaper(
    n, head_dim, block
):
    # The difference is 2 T (n (d - 1) - d), above 0 from n = 2, d = 3 on.
    z = alike(n * block, head_dim, block)
    query, key = (
        traffic.total(closed_form("backward", name, z))
        for name in ("query_outer", "key_outer")
    )
    assert query - key == 2 * n * block * (n * (head_dim - 1) - head_dim)
    assert key < query


@pytest.mark.parametrize("memory", [1024, 2048, 4096])
def test_keys_stream_in_inverse_proportion_to_fast_memory(memory):
    # [003], eq. 50: tiles of M / 4d queries, so K and V are loaded
    # T / (M / 4d) times: 8 T^2 d^2 / M elements.
    t, d = 1024, 8
    z = Sizes(t, t, d, d, *roofline.forward_tiles(memory, d))
    counts = closed_form("forward", "query_outer", z)
    assert counts["k"].loads + counts["v"].loads == 8 * t**2 * d**2 // memory


def test_memory_counts_elements():
    memory = Memory(np.zeros((4, 3)))
    memory.load(slice(0, 2))
    memory.store(slice(1, 2), 5.0)
    assert (memory.loads, memory.stores) == (6, 3)
    assert_arrays_equal(memory.array[:, 0], [0, 5, 0, 0], "memory.array[:, 0]")


def test_a_loaded_tile_is_a_copy():
    memory = Memory([1.0, 2.0])
    memory.load()[:] = 7
    assert_arrays_equal(memory.array, [1, 2], "memory.array")
