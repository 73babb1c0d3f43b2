"""jvp by the kernels: tangents of out and lse."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import strategies
from helpers import calls
from helpers.backends import BACKENDS, CUPY, EMULATED, on_kernels
from helpers.checks import check_jvp
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_bitwise,
    assert_elements,
    assert_finite,
)
from helpers.data import LAYOUTS, Case, inputs
from helpers.derivatives import (
    EVERYTHING,
    FAMILIES,
    GROUPED,
    INPUTS,
    KINDS,
    ON,
    PACKED,
    assert_near,
    call_jvp,
    exact_jvp,
    moving,
    tangents,
)
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES, lse_dtype
from helpers.heads import heads_first, heads_last

NAMES = "out", "lse", "out_dot", "lse_dot"
each_kind = pytest.mark.parametrize("kind", KINDS)
each_family = pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64"]
)
# Of a warp 32 queries, not 16; and key tiles after the first, whose mean of W
# is not their reference.
WIDE = {"float16": {"block_q": 128, "block_k": 16}}
two_kinds_of_calls = pytest.mark.parametrize(
    "fields", [GROUPED, EVERYTHING], ids=["grouped", "everything"]
)


def by_name(results):
    return dict(zip(NAMES, results, strict=True))


# Values ---------------------------------------------------------------------


@st.composite
def cases(draw, backend, kind):
    """Draw a call, and blocks of the jvp kernels of its dtype.

    Those with an 8 are simt's, which has them for all but 16-bit types. Wide
    heads have others.
    """
    case = draw(strategies.optional_cases(backend, longest=100, **KINDS[kind]))
    blocks = [(16, 8), (8, 16), (16, 16), (32, 16), (16, 32)]
    if "16" in case.dtype:
        blocks = [(64, 16), (32, 32)]
    if max(case.head_dim, case.head_dim_v) > 128:
        blocks = []
    block_q, block_k = draw(st.sampled_from([(None, None), *blocks]))
    return replace(case, block_q=block_q, block_k=block_k)


@on_each_backend(cases, each={"kind": KINDS}, backends=[EMULATED, CUPY])
def test_is_the_references(backend, case):
    direction = tangents(case)
    got = by_name(check_jvp(backend, case, direction))
    for name, want in by_name(call_jvp(case, direction)).items():
        assert got[name].dtype == want.dtype
        assert got[name].shape == want.shape


@on_kernels
@each_kind
def test_errors_are_a_few_roundings(backend, kind):
    case = Case(on=ON, **KINDS[kind], **GROUPED, **WIDE.get(kind, {}))
    direction = tangents(case)
    got = by_name(call_jvp(case, direction, backend))
    assert_near(got, exact_jvp(case, direction), case)
    plain = by_name(call_jvp(case, {}))
    assert_near(got, {x: plain[x] for x in ("out", "lse")}, case)


@on_kernels
@each_family
@pytest.mark.parametrize("name", INPUTS)
def test_one_input_moves(backend, dtype, name):
    case = Case(dtype, on=ON, **EVERYTHING, **WIDE.get(dtype, {}))
    direction = tangents(case, [name])
    got = by_name(call_jvp(case, direction, backend))
    assert_near(got, exact_jvp(case, direction), case)


@on_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(backend, family):
    case = Case(**FAMILIES[family], **PACKED)
    end_q = case.offsets[0][-1]
    q, k, v, _ = (x[0] for x in inputs(case))
    directions = {
        x: y if x == "sink" else y[:, 0]
        for x, y in tangents(case, count=2).items()
    }
    given = {"q": q, "k": k, "v": v}
    got = by_name(call_jvp(case, directions, backend, **given))
    want = by_name(call_jvp(case, directions, **given))
    lse = want.pop("lse")
    assert_near(got, want, case)
    assert_elements(got["lse"] == -np.inf, lse == -np.inf, "got")
    directions["sink"][:] = np.nan  # read by no token without a sequence
    *_, out_dot, lse_dot = call_jvp(case, directions, backend, **given)
    assert_all(out_dot[:, end_q:], 0, "out_dot[:, end_q:]")
    assert_all(lse_dot[..., end_q:], 0, "lse_dot[..., end_q:]")
    assert_all(out_dot[:, :end_q], np.nan, "out_dot[:, :end_q]")


@on_kernels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_keys_have_in_common_costs_no_accuracy(backend, dtype):
    """A part of k's tangent, 16 times the rest, that cancels in out_dot.

    Roundings of as large numbers as without it; of all 4480 elements the
    root mean square varies by a few per cent.
    """
    case = Case(dtype, 1, 70, 90, 2, 1, 32, 32, on=ON)
    errors = []
    for common in 0, 16:
        direction = tangents(case, "k")
        k = direction["k"].astype(np.float64)
        direction["k"] = (k + common * k[:, :1]).astype(direction["k"].dtype)
        *_, got, _ = call_jvp(case, direction, backend)
        error = got - exact_jvp(case, direction)["out_dot"]
        errors.append(np.sqrt((error**2).mean()))
    assert errors[1] < 1.25 * errors[0]


def plain_out_dot(case, direction):
    """Return out_dot of plain attention in the dtype, from W - b.

    Of a case with a window, where k moves.
    """
    group = case.num_heads_q // case.num_heads_kv
    q, k, v, _ = map(heads_first, inputs(case))
    k, v, k_dot = (
        np.repeat(x, group, axis=1)
        for x in (k, v, heads_first(direction["k"]))
    )
    scale = q.dtype.type(case.head_dim**-0.5)
    s, w = (q @ x.swapaxes(2, 3) * scale for x in (k, k_dot))
    left, right = case.window
    key = np.arange(case.seqlen_k)
    query = np.arange(case.seqlen_q)[:, None] + len(key) - case.seqlen_q
    s[..., (key < query - left) | (key > query + right)] = -np.inf
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    b = (p * w).sum(axis=-1, keepdims=True)
    return heads_last((p * (w - b)) @ v)


@pytest.mark.parametrize("common", [16, 1000])
@pytest.mark.parametrize("kind", ["fma", "simt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_keys_have_in_common_costs_digits_of_w_alone(
    backend, kind, common
):
    """As above in float32, where W itself loses as many digits.

    So errors are those of plain attention, which sums W's products in another
    order. They would be 1.4 to 2.3 times as large if P met the common part.
    Some rows see no key of their block's first tile, wherever that is.
    """
    case = Case("float32", 1, 70, 90, 2, 1, 32, 32, window=(40, 9), on=ON)
    if kind == "simt":
        case = replace(case, block_q=16, block_k=8)
    direction = tangents(case, "k")
    direction["k"] += np.float32(common) * direction["k"][:, :1]
    exact = exact_jvp(case, direction)["out_dot"]
    *_, got, _ = call_jvp(case, direction, backend)
    errors = [
        np.sqrt(((x - exact) ** 2).mean())
        for x in (got, plain_out_dot(case, direction))
    ]
    assert errors[0] < 1.25 * errors[1]


@on_kernels
@two_kinds_of_calls
@pytest.mark.parametrize("kind", ["float64", "tf32x3"])
def test_mma8_returns_forwards_bits(backend, kind, fields):
    """Its kernel of tangents reads out and lse of a forward call."""
    case = Case(on=ON, **KINDS[kind], **fields)
    out, lse, *_ = call_jvp(case, tangents(case), backend)
    want = calls.forward(backend, case, *inputs(case)[:3])
    for a, b in zip((out, lse), want, strict=True):
        assert_bitwise(a, b, kind)


# Directions -----------------------------------------------------------------


@on_kernels
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "tf32x3"])
@two_kinds_of_calls
def test_directions_are_calls_of_their_own(backend, kind, fields):
    """In tiles of as many keys; by default 16-bit types have others.

    NVRTC fuses other multiply-adds in fma's kernel of two directions, which
    is what float32 gets; g++ fuses the same.
    """
    same_bits = backend.name == "emulated" or kind != "float32"
    block_k = 32 if kind == "float16" else None
    case = Case(on=ON, block_k=block_k, **KINDS[kind], **fields)
    directions = tangents(case, count=3)
    *both, out_dot, lse_dot = call_jvp(case, directions, backend)
    for n in range(3):
        one = {name: x[n] for name, x in directions.items()}
        alone = call_jvp(case, one, backend)
        got = *both, out_dot[n], lse_dot[n]
        assert_near(by_name(got), by_name(alone), case)
        for a, b in zip(got, alone, strict=True) if same_bits else ():
            assert_bitwise(np.ascontiguousarray(a), b, str(n))


@on_kernels
@each_family
@pytest.mark.parametrize("count", [None, 0])
def test_nothing_moves(backend, dtype, count):
    case = Case(dtype, on=ON, **GROUPED)
    direction = {} if count is None else tangents(case, count=count)
    out, lse, *moved = call_jvp(case, direction, backend)
    plain = by_name(call_jvp(case, {}))
    got = {"out": out, "lse": lse}
    assert_near(got, {x: plain[x] for x in got}, case)
    lead = () if count is None else (0,)
    for x, tangent in zip((out, lse), moved, strict=True):
        assert tangent.shape == (*lead, *x.shape)
        assert_all(tangent, 0, "tangent")


@on_kernels
@pytest.mark.parametrize("rank", [2, 3])
def test_axes_may_be_left_out(backend, rank):
    case = Case("float64", 1, 9, 12, head_dim=8, head_dim_v=4, on=ON)
    at = (0, slice(None), 0) if rank == 2 else (0,)
    given = dict(zip("qkv", (x[at] for x in inputs(case)), strict=False))
    moves = tangents(case, "qkv", count=2)
    whole = call_jvp(case, moves, backend)
    several = (slice(None), *at)
    small = {name: x[several] for name, x in moves.items()}
    got = call_jvp(case, small, backend, **given)
    of_lse = (0,) * (4 - rank)
    want = (whole[0][at], whole[1][of_lse], whole[2][several],
            whole[3][(slice(None), *of_lse)])  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, np.ascontiguousarray(b), str(rank))


@pytest.mark.parametrize("family", ["mma", "fma"])
def test_lse_need_not_be_returned(family):
    case = Case(**FAMILIES[family], **GROUPED)
    q, k, v, _ = inputs(case)
    moves = [*tangents(case, "qkv").values()]
    with cuflash.emulator.active("sm_80"):
        whole = cuflash.jvp(q, k, v, *moves, return_lse=True)
        out, out_dot = cuflash.jvp(q, k, v, *moves)
    assert_bitwise(out, whole[0], "out")
    assert_bitwise(out_dot, whole[2], "out_dot")


# Strides --------------------------------------------------------------------


@on_kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_strides_change_no_bit(backend, dtype):
    case = Case(dtype, 2, 20, 26, 2, 1, 24, 12, on=ON)
    moves = tangents(case, "qkv", count=2)
    wanted = call_jvp(case, moves, backend)
    for name in LAYOUTS.keys() - {"broadcast"}:
        strided = {x: laid_out(name, y) for x, y in moves.items()}
        got = call_jvp(replace(case, layout=name), strided, backend)
        for a, b in zip(got, wanted, strict=True):
            assert_bitwise(a, b, name)


def laid_out(name, tangents):
    """Lay out (directions, batch, ...) like an array of as many batches."""
    batches = tangents.reshape(-1, *tangents.shape[2:])
    return LAYOUTS[name](batches).reshape(tangents.shape)


@on_kernels
def test_unaligned_tangents_of_options_are_copied(backend):
    fields = {**GROUPED, "arrays_of": ("bias", "sink")}
    case = Case("float32", on=ON, **fields)
    moves = tangents(case, count=2)
    wanted = call_jvp(case, moves, backend)
    moves = {x: off_by_one(y) for x, y in moves.items()}
    for a, b in zip(call_jvp(case, moves, backend), wanted, strict=True):
        assert_bitwise(a, b, "unaligned")


def off_by_one(array):
    """Return a copy, one byte off the alignment of its elements."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


# What no one sees -----------------------------------------------------------


@on_kernels
@each_kind
def test_rows_that_see_nothing(backend, kind):
    """Their tangents are exactly 0, whatever q and its tangent are."""
    case = Case(batch=1, seqlen_q=20, seqlen_k=12, num_heads_q=2,
                num_heads_kv=1, head_dim=8, head_dim_v=8, causal=True, on=ON,
                **KINDS[kind])  # fmt: skip
    direction = tangents(case, "qkv")
    direction["q"][:, :8] = np.nan
    q = inputs(case)[0]
    q[:, :8] = np.inf
    *_, out_dot, lse_dot = call_jvp(case, direction, backend, q=q)
    assert_all(out_dot[:, :8], 0, "out_dot[:, :8]")
    assert_all(lse_dot[..., :8], 0, "lse_dot[..., :8]")
    assert_finite(out_dot.astype("f4"), "out_dot")


@on_kernels
@each_family
@pytest.mark.parametrize("name", "qkv")
def test_nonfinite_tangents_reach_the_rows_that_read_them(
    backend, dtype, name
):
    case = Case(dtype, 2, 30, 30, 2, 1, 8, 8, causal=True, on=ON)
    for value in (np.nan, np.inf, -np.inf):
        direction = tangents(case, "qkv")
        direction[name][1, 17] = value
        *_, out_dot, lse_dot = call_jvp(case, direction, backend)
        assert_finite(out_dot[0], "out_dot[0]")
        assert_finite(lse_dot[0], "lse_dot[0]")
        token = np.arange(30)
        rows = token == 17 if name == "q" else token >= 17
        assert_elements(
            np.isfinite(out_dot[1]).all(axis=(1, 2)), ~rows, "out_dot"
        )
        of_lse = np.isfinite(lse_dot[1])
        assert_elements(of_lse, ~(rows & (name != "v")), "of_lse")


@on_kernels
@each_family
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_values_reach_the_rows_that_read_them(backend, dtype, value):
    case = Case(dtype, 2, 90, 90, 2, 1, 8, 8, window=(30, 5), on=ON)
    v = inputs(case)[2]
    v[1, 40] = value
    results = call_jvp(case, tangents(case, "qkv"), backend, v=v)
    token = np.arange(90)
    reads = (token >= 35) & (token <= 70)
    for x in results[0], results[2]:
        assert_finite(x[0].astype("f4"), "x")
        finite = np.isfinite(x[1].astype("f4"))
        assert_elements(finite, ~reads[:, None, None], "finite")


@on_kernels
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["window", "mask", "segment_ids"])
def test_what_is_masked_is_not_read(backend, family, name):
    """Tangents of a token that the first queries do not see.

    An infinity alone reaches the others with its sign, as weights are above 0.
    """
    hides = {
        "window": {"window": (3, 3)},
        "mask": {"arrays_of": ("mask",)},
        "segment_ids": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
    }
    case = Case(batch=1, seqlen_q=40, seqlen_k=40, head_dim=8, head_dim_v=8,
                **FAMILIES[family], **hides[name])  # fmt: skip
    direction = tangents(case, "qkv")
    found = []
    for value in np.nan, 0, 1e4:
        for x in "kv":
            direction[x][0, 30] = value
        found.append(call_jvp(case, direction, backend)[2])
        if np.isnan(value):
            *_, wanted, _ = call_jvp(case, direction)
    hidden = ~np.isnan(wanted)
    assert_elements(np.isnan(found[0]), ~hidden, "np.isnan(found[0])")
    assert hidden.any() and not hidden.all()
    assert_elements(found[1][hidden], found[2][hidden], "out_dot")
    direction["k"][0, 30], direction["v"][0, 30] = 0, -np.inf
    *_, out_dot, _ = call_jvp(case, direction, backend)
    assert_all(out_dot[~hidden], -np.inf, "out_dot", case)


@on_kernels
@each_family
@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0)])
def test_no_queries_and_no_keys(backend, dtype, seqlens):
    case = Case(dtype, 1, *seqlens, 2, 1, 8, 8, arrays_of=("sink",), on=ON)
    direction = tangents(case)
    results = call_jvp(case, direction, backend)
    assert_all(results[2], 0, "results[2]")
    moved = np.broadcast_to(direction["sink"][:, None], results[3][0].shape)
    assert_allclose(results[3][0], moved, "results[3][0]", rtol=2.0**-23)


@on_kernels
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # of one family
def test_a_sink_of_minus_infinity_has_no_weight(backend, dtype):
    case = Case(dtype, 1, 9, 6, 2, 1, 8, 8, causal=True, on=ON)
    none = np.full(2, -np.inf, lse_dtype(DTYPES[dtype]))
    direction = tangents(case, "qkv")
    got = call_jvp(
        case, {**direction, "sink": np.ones_like(none)}, backend, sink=none
    )
    for a, b in zip(got, call_jvp(case, direction, backend), strict=True):
        assert_bitwise(a, b, "sink")


# Plans ----------------------------------------------------------------------


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "d", "dv"),
    [("float32", 320, 272), ("bfloat16", 256, 192), ("float16", 40, 256)],
)
def test_wide_heads(backend, dtype, d, dv):
    case = Case(dtype, 1, 9, 13, head_dim=d, head_dim_v=dv, on=ON)
    direction = tangents(case)
    got = by_name(call_jvp(case, direction, backend))
    assert_near(got, exact_jvp(case, direction), case)
    assert list(direction) == [*moving(case)]


@each_family
@pytest.mark.parametrize("family", ["wgmma", "mma", "fma", "tf32x3", None])
def test_any_family_may_be_asked_for(dtype, family):
    """Those without kernels of tangents leave them to mma or simt."""
    case = Case(dtype, 1, 9, 13, on=ON)
    direction = tangents(case)
    given = dict(zip("qkv", inputs(case), strict=False))
    dots = {f"{x}_dot": y for x, y in direction.items()}
    with cuflash.emulator.active("sm_90a", family=family):
        got = cuflash.jvp(**given, **dots, return_lse=True)
    assert_near(by_name(got), exact_jvp(case, direction), case)
