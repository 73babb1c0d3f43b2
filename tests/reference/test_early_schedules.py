"""Schedules that the sources try first: right results, counted traffic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference import early_schedules, roofline, traffic
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.traffic import Count, Sizes, total
from helpers.reference_cases import ReferenceCase, assert_close, bounds

SCALE = 0.5
T, D = 12, 4
slots_of = st.integers(0, 4)


@st.composite
def sizes(draw):
    """Draw lengths and tiles, which need not divide them."""
    return Sizes(*(draw(st.integers(1, most)) for most in (7, 7, 3, 3, 4, 4)))


def alike(block, tokens=T, head_dim=D):
    """Return sizes with equal tiles of queries and keys."""
    return Sizes(tokens, tokens, head_dim, head_dim, block, block)


def case_of(z):
    return ReferenceCase(
        (), z.seqlen_q, z.seqlen_k, z.head_dim, z.head_dim_v, scale=SCALE
    )


def keywords(z, name):
    rows = {"scale": SCALE, "block_q": z.block_q}
    return rows if name == "row_blocks" else {**rows, "block_k": z.block_k}


def run_backward(name, z):
    q, k, v, dout = case_of(z).arrays()
    out, lse = attention(q, k, v, scale=SCALE)
    saved = {"row_blocks": [out], "without_delta": [lse]}.get(name, [out, lse])
    schedule = getattr(early_schedules, f"backward_{name}")
    return schedule(dout, q, k, v, *saved, **keywords(z, name))


def assert_out(z, slow):
    q, k, v, dout = case_of(z).arrays()
    out, _ = attention(q, k, v, scale=SCALE)
    assert_close(slow["out"].array, out, bounds(case_of(z), q, k, v, dout).out)


@given(sizes())
def test_forward_row_blocks(z):
    q, k, v, _ = case_of(z).arrays()
    slow = early_schedules.forward_row_blocks(
        q, k, v, **keywords(z, "row_blocks")
    )
    assert_out(z, slow)
    expected = early_schedules.forward_row_blocks_counts(z)
    assert traffic.counts_of(slow) == expected


@given(sizes(), slots_of)
def test_forward_output_slots(z, slots):
    q, k, v, _ = case_of(z).arrays()
    slow = early_schedules.forward_output_slots(
        q, k, v, slots=slots, **keywords(z, "output_slots")
    )
    assert_out(z, slow)
    expected = early_schedules.forward_output_slots_counts(z, slots)
    assert traffic.counts_of(slow) == expected


@pytest.mark.parametrize(
    "name", ["row_blocks", "key_outer_draft", "without_delta"]
)
@given(z=sizes())
def test_backward_drafts(name, z):
    q, k, v, dout = case_of(z).arrays()
    slow = run_backward(name, z)
    bound = bounds(case_of(z), q, k, v, dout)
    expected = attention_vjp(dout, q, k, v, scale=SCALE)
    for which, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        got = slow[which].array
        assert_close(got, gradient, getattr(bound, which), which)
    counts = getattr(early_schedules, f"backward_{name}_counts")(z)
    assert traffic.counts_of(slow) == counts


# ------------------------------------------------- the documents' statements


def test_each_output_slot_saves_n_minus_1_stores():
    # [000], in rows: n stores a query, n - 1 fewer for each slot more.
    n, z = T, alike(block=1)
    stores = [
        early_schedules.forward_output_slots_counts(z, slots)["out"].stores
        for slots in range(n + 1)
    ]
    assert stores[0] == n * n * D and stores[n] == n * D
    assert set(-np.diff(stores)) == {(n - 1) * D}


def test_without_slots_it_is_key_outer():
    z = alike(block=3)
    assert early_schedules.forward_output_slots_counts(
        z, 0
    ) == traffic.forward_key_outer_counts(z)


def test_all_slots_store_o_as_query_outer_but_load_q_again():
    z = alike(block=3)
    counts = early_schedules.forward_output_slots_counts(z, 4)
    inner = traffic.forward_query_outer_counts(z)
    assert counts["out"] == inner["out"] == Count(0, T * D)
    assert counts["q"].loads == 4 * inner["q"].loads
    assert 4 * counts["k"].loads == inner["k"].loads


@pytest.mark.parametrize("memory", [2048, 4096, 8192])
def test_row_blocks_move_t3_d_over_m(memory):
    # [003], eq. 39: K and V for each of T^2 / M blocks; eq. 70: K, V and dK,
    # dV both ways for 2 T^2 / M blocks.
    t, d = 1024, 8
    forward = Sizes(t, t, d, d, roofline.forward_rows(memory, t))
    backward = Sizes(t, t, d, d, roofline.backward_rows(memory, t))
    once = 2 * t * d  # Q and O
    counts = early_schedules.forward_row_blocks_counts(forward)
    assert total(counts) - once == 2 * t**3 * d // memory
    counts = early_schedules.backward_row_blocks_counts(backward)
    assert total(counts) - 2 * once == 12 * t**3 * d // memory


@pytest.mark.parametrize("times, less", [(2, False), (4, None), (8, True)])
def test_tiles_move_less_than_row_blocks_from_4_d_on(times, less):
    # [003] below eq. 45: 8 T^2 d^2 / M against 2 T^3 d / M.
    d, memory = 8, 2048
    t = times * d
    rows = Sizes(t, t, d, d, roofline.forward_rows(memory, t))
    tiles = Sizes(t, t, d, d, *roofline.forward_tiles(memory, d))
    of_rows = 2 * t * d * t * t / memory
    of_tiles = 2 * t * d * 4 * t * d / memory
    assert rows.block_q * t == tiles.block_q * 4 * d == memory
    assert (
        of_tiles == of_rows if less is None else (of_tiles < of_rows) == less
    )


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_draft_loads_o_for_every_key_tile(n):
    # [003], Algorithm 7: gamma T_c times. Its successor stores delta.
    d = 5
    z = alike(block=T // n, head_dim=d)
    draft = early_schedules.backward_key_outer_draft_counts(z)
    final = traffic.backward_key_outer_counts(z)
    assert draft["out"].loads == n * final["out"].loads
    more = total(draft) - total(final)
    assert more == (n - 2) * T * d - (n + 1) * T
    assert (more < 0) == (n <= 2)


def test_delta_halves_the_loads_of_k_and_v():
    # [000]: "K and V are loaded once instead of twice".
    z = alike(block=3)
    without = early_schedules.backward_without_delta_counts(z)
    with_it = traffic.backward_query_outer_counts(z)
    for name in ("k", "v"):
        assert without[name].loads == 2 * with_it[name].loads
    for name in ("dq", "dk", "dv"):
        assert without[name] == with_it[name]


def test_delta_saves_a_quarter_of_the_matrices():
    # 8 n T d and 6 n T d, n large: [000]'s factor of 2 is 4 / 3.
    z = alike(block=1, tokens=1000)
    matrices = [
        sum(total({x: counts[x]}) for x in ("k", "v", "dk", "dv"))
        for counts in (
            early_schedules.backward_without_delta_counts(z),
            traffic.backward_query_outer_counts(z),
        )
    ]
    assert matrices == [8 * 1000**2 * D, 6 * 1000**2 * D]
