"""Derivatives on NumPy arrays, by tiles and by the reference."""

import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import strategies
from cuflash.reference.dropout import Dropout
from cuflash.reference.packed import packed_double_backward, packed_jvp
from helpers.backends import NumpyBackend
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_bitwise,
    assert_elements,
    assert_finite,
    assert_matches,
)
from helpers.data import Case, inputs
from helpers.derivatives import (
    EVERYTHING,
    GROUPED,
    INPUTS,
    assert_near,
    bounds_of,
    call_double_backward,
    call_jvp,
    expected_double_backward,
    expected_jvp,
    tangents,
)
from helpers.dtypes import DTYPES, lse_dtype
from helpers.flagged import by_reference
from helpers.heads import heads_first, sum_groups

names_of_tangents = st.sets(st.sampled_from(INPUTS))
# Some block sizes of the kernels, for any dtype and head dimension.
blocks = st.sampled_from([(None, None), (16, 8), (8, 16)])
two_kinds_of_calls = pytest.mark.parametrize("fields", [GROUPED, EVERYTHING])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


by_both = pytest.mark.parametrize("tiles", [True, False])


def computed(tiles):
    """Compute by tiles, or all by the reference."""
    return nullcontext() if tiles else by_reference()


def assert_jvp(case, direction, results):
    for name, got, want in zip(
        ("out_dot", "lse_dot"), results[2:], expected_jvp(case, direction),
        strict=True,
    ):  # fmt: skip
        assert_matches(got, want, name, case)


# Values ---------------------------------------------------------------------

drawn = st.tuples(
    strategies.optional_cases(NumpyBackend()),
    blocks.map(lambda x: dict(zip(("block_q", "block_k"), x, strict=True))),
)


@given(st.data())
def test_tangents_are_the_references(data):
    case, sizes = data.draw(drawn)
    direction = tangents(case, data.draw(names_of_tangents))
    results = call_jvp(case, direction, **sizes)
    assert_jvp(case, direction, results)
    q, k, v, _ = inputs(case)
    forward = cuflash.forward(q, k, v, **case.call(), return_lse=True)
    for got, want in zip(results, forward, strict=False):
        assert got.dtype == want.dtype and got.shape == want.shape


def test_a_bias_of_all_keys_moves_alone():
    bias, bias_dot = np.zeros((4, 1)), np.arange(4.0)[:, None]
    q, k, v = np.ones((3, 4, 2))
    results = cuflash.jvp(
        q, k, v, None, None, None, bias=bias, bias_dot=bias_dot,
        return_lse=True,
    )  # fmt: skip
    assert_allclose(results[-1], bias_dot[:, 0], "results[-1]", rtol=4e-16)
    assert_allclose(results[2], 0, "results[2]", rtol=1e-07, atol=1e-15)


@given(st.data())
def test_second_gradients_are_the_references(data):
    case, sizes = data.draw(drawn)
    direction = tangents(case, data.draw(names_of_tangents))
    got = call_double_backward(case, direction, **sizes)
    want = expected_double_backward(case, direction)
    assert list(got) == list(want)
    for name, expected in want.items():
        assert_matches(got[name], expected, name, case)


def results_of(case, direction):
    """Return tangents and second gradients by name."""
    _, _, out_dot, lse_dot = call_jvp(case, direction)
    second = call_double_backward(case, direction)
    return {"out_dot": out_dot, "lse_dot": lse_dot, **second}


@each_dtype
@two_kinds_of_calls
def test_tiles_and_reference_agree(dtype, fields):
    """Where the reference computes half of the rows, which are anywhere."""
    case = Case(dtype, **fields)
    got = results_of(case, tangents(case))
    with by_reference(0.5):
        want = results_of(case, tangents(case))
    assert_near(got, want, case)


@pytest.mark.parametrize("name", INPUTS)
@by_both
def test_one_input_moves(name, tiles):
    case = Case("float32", **EVERYTHING)
    direction = tangents(case, [name])
    with computed(tiles):
        got = results_of(case, direction)
    out_dot, lse_dot = expected_jvp(case, direction)
    want = {"out_dot": out_dot, "lse_dot": lse_dot}
    want |= expected_double_backward(case, direction)
    assert_near(got, {x: y.ref for x, y in want.items()}, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype):
    case = Case(dtype, **GROUPED)
    direction = tangents(case, "qkv")
    wide = {f"{x}_dot": y.astype(np.float32) for x, y in direction.items()}
    for name, x in zip("qkv", inputs(case), strict=False):
        wide[name] = x.astype(np.float32)
    got, want = call_jvp(case, direction), call_jvp(case, direction, **wide)
    for name, a, b in zip(("out", "lse", "out_dot", "lse_dot"), got, want,
                          strict=True):  # fmt: skip
        assert_bitwise(a, b.astype(a.dtype), name)


def test_results_have_the_dtypes_of_their_arrays():
    case = Case("float16", **EVERYTHING)
    results = call_jvp(case, tangents(case))
    wide = lse_dtype(DTYPES["float16"])
    assert [x.dtype for x in results] == [np.float16, wide] * 2
    got = call_double_backward(case, tangents(case))
    dtypes = {name: x.dtype for name, x in got.items()}
    assert dtypes.pop("lse") == dtypes.pop("sink") == wide
    assert set(dtypes.values()) == {np.dtype(np.float16)}


# Directions -----------------------------------------------------------------


@two_kinds_of_calls
@by_both
def test_directions_are_calls_of_their_own(fields, tiles):
    case = Case("float32", **fields)
    directions = tangents(case, count=3)
    with computed(tiles):
        *both, out_dot, lse_dot = call_jvp(case, directions)
        for n in range(3):
            one = {name: x[n] for name, x in directions.items()}
            alone = call_jvp(case, one)
            got = *both, out_dot[n], lse_dot[n]
            for a, b in zip(got, alone, strict=True):
                assert_bitwise(np.ascontiguousarray(a), b, str(n))


def test_no_directions():
    case = Case("float32", **GROUPED)
    out, lse, out_dot, lse_dot = call_jvp(case, tangents(case, count=0))
    assert out_dot.shape == (0, *out.shape)
    assert lse_dot.shape == (0, *lse.shape)
    assert_bitwise(out, call_jvp(case, {})[0], "out")


@two_kinds_of_calls
def test_none_is_zero(fields):
    case = Case("float64", **fields)
    zeros = {x: np.zeros_like(y) for x, y in tangents(case).items()}
    for moves in ({}, zeros):
        *_, out_dot, lse_dot = call_jvp(case, moves)
        assert_all(out_dot, 0, "out_dot")
        assert_all(lse_dot, 0, "lse_dot")
        for x in call_double_backward(case, moves).values():
            assert_all(x, 0, "x")


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_may_be_left_out(rank):
    case = Case("float64", seqlen_q=9, seqlen_k=12, head_dim=8, head_dim_v=4)
    at = (0, slice(None), 0) if rank == 2 else (0,)
    several = (slice(None), *at)
    q, k, v, _ = inputs(case)
    moves = tangents(case, "qkv", count=2)
    whole = cuflash.jvp(q, k, v, *moves.values(), return_lse=True)
    small = [x[several] for x in moves.values()]
    got = cuflash.jvp(q[at], k[at], v[at], *small, return_lse=True)
    of_lse = (0,) if rank == 3 else (0, 0)
    want = (whole[0][at], whole[1][of_lse], whole[2][several],
            whole[3][(slice(None), *of_lse)])  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, np.ascontiguousarray(b), str(rank))


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_may_be_left_out_of_second_gradients(rank):
    case = Case("float64", seqlen_q=9, seqlen_k=12, head_dim=8, head_dim_v=4)
    at = (0, slice(None), 0) if rank == 2 else (0,)
    moves = tangents(case, "qkv").values()
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    given = [*moves, dout, q, k, v, out]
    whole = cuflash.double_backward(*given, lse, return_ddlse=True)
    of_lse = lse[(0,) * (4 - rank)]
    small = [x[at] for x in given]
    got = cuflash.double_backward(*small, of_lse, return_ddlse=True)
    want = *(x[at] for x in whole[:4]), whole[4][(0,) * (4 - rank)]
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, np.ascontiguousarray(b), str(rank))


@pytest.mark.parametrize("layout", ["axes_reversed", "broadcast"])
def test_strides_change_no_bit(layout):
    case = Case("float32", **GROUPED | {"layout": layout})
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    moves, given = [q, k, v], [dout, q, k, v, out, lse]
    results = []
    for copy in (False, True):
        a, b = ([x.copy() if copy else x for x in y] for y in (moves, given))
        jvp = cuflash.jvp(*b[1:4], *a, causal=True)
        second = cuflash.double_backward(*a, *b, causal=True)
        results.append((*jvp, *second))
    for a, b in zip(*results, strict=True):
        assert_bitwise(np.ascontiguousarray(a), b, layout)


# What no GPU runs is refused here, too --------------------------------------


@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
def test_blocks_that_no_kernel_has(direction):
    q = np.zeros((1, 4, 1, 8), np.float32)
    given = [q] * 6 if direction == "jvp" else [*[q] * 8, q[:, None, :, 0, 0]]
    with pytest.raises(cuflash.ValueRangeError, match=f"any {direction} "):
        getattr(cuflash, direction)(*given, block_q=7)


# What no one sees -----------------------------------------------------------


@each_dtype
def test_rows_that_see_nothing(dtype):
    """Their tangents are exactly 0, whatever q and its tangent are."""
    case = Case(dtype, 1, 20, 12, 2, 1, 8, 8, causal=True)
    direction = tangents(case, "qkv")
    results = call_jvp(case, direction), call_double_backward(case, direction)
    direction["q"][:, :8] = np.nan
    q = inputs(case)[0]
    q[:, :8] = np.inf
    got = call_jvp(case, direction, q=q)
    assert_all(got[2][:, :8], 0, "got[2][:, :8]")
    assert_all(got[3][..., :8], 0, "got[3][..., :8]")
    for a, b in zip(got, results[0], strict=True):
        assert_allclose(*wide(a, b), name="wide(a, b)", rtol=2.0**-6)
    second = call_double_backward(case, direction, q=q)
    assert_all(second["q"][:, :8], 0, "q")
    assert_all(second["out"][:, :8], 0, "out")
    assert_all(second["lse"][..., :8], 0, "lse")
    for x in second.values():
        assert_finite(wide(x), "wide(x)")


def wide(*arrays):
    found = [np.asarray(x, np.float64) for x in arrays]
    return found if len(found) > 1 else found[0]


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_tangents_reach_the_rows_that_read_them(name, value):
    case = Case("float32", 2, 30, 30, 2, 1, 8, 8, causal=True)
    direction = tangents(case, "qkv")
    direction[name][1, 17] = value
    *_, out_dot, lse_dot = call_jvp(case, direction)
    assert_finite(out_dot[0], "out_dot[0]")
    assert_finite(lse_dot[0], "lse_dot[0]")
    token = np.arange(30)
    rows = token == 17 if name == "q" else token >= 17
    finite = np.isfinite(out_dot[1]).all(axis=(1, 2))
    assert_elements(finite, ~rows, "finite")
    reaches_lse = rows & (name != "v")
    assert_elements(
        np.isfinite(lse_dot[1]), ~reaches_lse, "np.isfinite(lse_dot[1])"
    )


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0)])
def test_no_queries_and_no_keys(seqlens):
    case = Case("float32", 1, *seqlens, 2, 1, 8, 8, arrays_of=("sink",))
    direction = tangents(case)
    results = call_jvp(case, direction)
    assert_all(results[2], 0, "results[2]")
    moved = np.broadcast_to(direction["sink"][:, None], results[3][0].shape)
    assert_allclose(results[3][0], moved, "results[3][0]", rtol=2.0**-23)
    got = call_double_backward(case, direction)
    for name, want in expected_double_backward(case, direction).items():
        assert_matches(got[name], want, name, case)


@by_both
def test_a_sink_of_minus_infinity_has_no_weight(tiles):
    case = Case("float32", 1, 9, 6, 2, 1, 8, 8, causal=True)
    none = np.full(2, -np.inf, np.float32)
    moves = {"sink": none, "ddsink": np.ones_like(none)}
    direction = tangents(case, "qkv")
    with computed(tiles):
        got = call_double_backward(
            case, direction, **moves, return_d2sink=True
        )
        want = call_double_backward(case, direction)
    assert_all(got.pop("sink"), 0, "sink")
    for name, x in want.items():
        assert_bitwise(got[name], x, name)


@pytest.mark.parametrize("name", ["dout", "out", "dlse"])
def test_a_nan_reaches_the_keys_that_its_row_sees(name):
    case = Case("float32", 1, 12, 12, 1, 1, 8, 8, causal=True)
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    given = {"dout": dout, "out": out}
    if name == "dlse":
        given[name] = np.ones_like(lse)
    given[name][(0, 0, 5) if name == "dlse" else (0, 5)] = np.nan
    *_, d2k, _, _ = cuflash.double_backward(
        *tangents(case, "qkv").values(), q=q, k=k, v=v, lse=lse, causal=True,
        **given,
    )  # fmt: skip
    seen = np.arange(12) <= 5
    assert_elements(np.isnan(d2k).all(axis=(0, 2, 3)), seen, "d2k")


# Large numbers --------------------------------------------------------------


def test_rounded_lse_costs_no_digits():
    """Two keys of score 1000: lse has an ulp of 2^-14, P is 1 / 2.

    b is W = 1 times the sum of P, which is 1 but for a few roundings.
    """
    q = np.array([[1000.0]], np.float32)
    k = np.ones((2, 1), np.float32)
    out, lse = cuflash.forward(q, k, k, scale=1.0, return_lse=True)
    *_, ddlse = cuflash.double_backward(
        np.ones_like(q), None, None, out, q, k, k, out, lse, scale=1.0,
        return_ddlse=True,
    )  # fmt: skip
    assert abs(ddlse - 1).max() < 2.0**-20


def test_products_beyond_float32_with_results_within():
    """The sums of T K are about 2^128; the scale makes them 2^115."""
    case = Case("float32", 1, 6, 9, 1, 1, 4, 4, scale=2.0**-13)
    q, k, v, dout = (x.clip(-1, 1) for x in inputs(case))
    ddq, v, dout = (x * np.float32(2.0**39) for x in (q, v, dout))
    k = k * np.float32(2.0**13)
    given = {"scale": case.scale}
    out, lse = cuflash.forward(q, k, v, **given, return_lse=True)
    got = cuflash.double_backward(
        ddq, None, None, dout, q, k, v, out, lse, **given
    )
    for x in got:
        assert_finite(x, "x")


# Packed sequences -----------------------------------------------------------

OFFSETS = (0, 6, 6, 20), (0, 9, 14, 30)
PACKED = Case(
    "float64", 1, 22, 31, 4, 2, 8, 8, causal=True, offsets=OFFSETS,
    arrays_of=("sink",), dropout=0.25,
)  # fmt: skip


def of_reference():
    """Return the arrays of `PACKED` and what the reference needs of it."""
    arrays = [x[0] for x in inputs(PACKED)]
    moves = tangents(PACKED)
    first = {x: y if x == "sink" else y[0] for x, y in moves.items()}
    options = {
        "sink": PACKED.options()["sink"],
        "causal": True,
        "dropout": Dropout(0.25, PACKED.seed, 0, np.arange(4)),
        "heads_first": True,
    }
    return arrays, first, options


def by_heads(arrays):
    """Return (tokens, heads, d) with as many heads as q, heads first."""
    return [heads_first(x[None], 4)[0] for x in arrays]


def test_packed_sequences_have_tangents_of_their_own():
    (q, k, v, _), moves, options = of_reference()
    dots = {f"{name}_dot": x for name, x in moves.items()}
    got = cuflash.jvp(q, k, v, **dots, **PACKED.meaning(), return_lse=True)
    qkv = by_heads([moves[x] for x in "qkv"])
    want = packed_jvp(
        *by_heads((q, k, v)), *OFFSETS, *qkv, sink_dot=moves["sink"], **options
    )
    bound = bounds_of(PACKED, moves)
    assert_allclose(
        got[2], want.out_dot.swapaxes(0, 1), "got[2]", atol=bound.out_dot
    )
    assert_allclose(got[3], want.lse_dot, "got[3]", atol=bound.lse_dot)
    assert_all(got[2][20:], 0, "got[2][20:]")
    assert_all(got[3][:, 20:], 0, "got[3][:, 20:]")
    assert_all(got[1][:, 20:], -np.inf, "got[1][:, 20:]")


def test_packed_sequences_have_second_gradients_of_their_own():
    (q, k, v, dout), moves, options = of_reference()
    out, lse = cuflash.forward(q, k, v, **PACKED.meaning(), return_lse=True)
    given = dout, q, k, v, out
    got = cuflash.double_backward(
        *(moves[x] for x in "qkv"), *given, lse, ddsink=moves["sink"],
        return_d2sink=True, **PACKED.meaning(),
    )  # fmt: skip
    want = packed_double_backward(
        *by_heads([moves[x] for x in "qkv"]), *by_heads(given), lse, *OFFSETS,
        ddsink=moves["sink"], **options,
    )  # fmt: skip
    bound = bounds_of(PACKED, moves)
    for x, exact, name in zip(got, want[:4], "q k v out_dot".split(),
                              strict=False):  # fmt: skip
        if name in "kv":
            exact = sum_groups(exact[None], 2)[0]
        assert_allclose(
            x, exact.swapaxes(0, 1), name, atol=getattr(bound, name)
        )
    assert_allclose(got[4], want.d2sink, "got[4]", atol=bound.sink)


# Memory ---------------------------------------------------------------------


@pytest.mark.parametrize("call", [call_jvp, call_double_backward])
def test_memory_is_linear(call):
    """4096 tokens: arrays are 256 KiB, tiles 512 KiB, a matrix is 64 MiB.

    No call holds more than 20 of each at a time.
    """
    case = Case("float32", 1, 4096, 4096, head_dim=16, head_dim_v=16)
    direction = tangents(case, "qkv")
    tracemalloc.start()
    call(case, direction)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * (256 + 512) * 2**10
