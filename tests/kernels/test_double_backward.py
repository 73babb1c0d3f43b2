"""double_backward by the kernels: the gradients of backward."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import strategies
from helpers.backends import CUPY, EMULATED, on_kernels
from helpers.checks import check_double_backward
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_finite,
)
from helpers.data import LAYOUTS, Case, Emulation, inputs, lse_gradient
from helpers.derivatives import (
    BLOCKS,
    EVERYTHING,
    FAMILIES,
    GROUPED,
    INPUTS,
    KINDS,
    NUMPY,
    ON,
    PACKED,
    assert_near,
    call_double_backward,
    exact_double_backward,
    tangents,
)
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES

each_kind = pytest.mark.parametrize("kind", KINDS)
two_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


# Values ---------------------------------------------------------------------


@st.composite
def cases(draw, backend, kind):
    """Draw a call, and blocks of its kernels: simt's, or the family's own."""
    case = draw(strategies.optional_cases(backend, longest=100, **KINDS[kind]))
    arch = case.on.arch if case.on else "sm_80"
    legal = strategies.tiles(case, "double_backward", arch)
    own = {(x.block_q, x.block_k) for x in legal} & {(32, 64), (64, 32)}
    block_q, block_k = draw(st.sampled_from([*BLOCKS, *sorted(own)]))
    return replace(case, block_q=block_q, block_k=block_k)


@on_each_backend(cases, each={"kind": KINDS}, backends=[EMULATED, CUPY])
def test_is_the_references(backend, case):
    direction = tangents(case)
    got, _ = check_double_backward(backend, case, direction)
    for name, want in call_double_backward(case, direction).items():
        assert got[name].dtype == want.dtype
        assert got[name].shape == want.shape


@on_kernels
@each_kind
def test_errors_are_a_few_roundings(backend, kind):
    case = Case(on=ON, **KINDS[kind], **GROUPED)
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)


@on_kernels
@pytest.mark.parametrize("head_dims", [(64, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_warps_share_columns(backend, head_dims, arch):
    """Those of large heads, in float32: other warps have other columns."""
    d, dv = head_dims
    fields = {**EVERYTHING, "head_dim": d, "head_dim_v": dv}
    case = Case("float32", on=Emulation(arch), **fields)
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)


@on_kernels
@two_dtypes
@pytest.mark.parametrize("name", [*INPUTS, None])
def test_one_input_moves(backend, name, dtype):
    case = Case(dtype, on=ON, **EVERYTHING)
    direction = tangents(case, [name])
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)


@on_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(backend, family):
    case = Case(**FAMILIES[family], **PACKED)
    end_q, end_k = (x[-1] for x in case.offsets)
    q, k, v, dout = (x[0] for x in inputs(case))
    out, lse = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse,
             "dlse": lse_gradient(case)[0]}  # fmt: skip
    direction = {
        x: y if x == "sink" else y[0] for x, y in tangents(case).items()
    }
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (backend, NUMPY)
    )
    assert_near(got, want, case)
    for x in (got["q"], got["out"], got["lse"].T):
        assert_all(x[end_q:], 0, "x[end_q:]")
    assert_all(got["k"][end_k:], 0, "k")
    assert_all(got["v"][end_k:], 0, "v")


@on_kernels
def test_a_gradient_of_lse_counts(backend):
    """Without dlse the results differ; with 0 they do not."""
    fields = EVERYTHING | {"arrays_of": ("mask", "sink")}
    case = Case("float32", on=ON, deterministic=True, **fields)
    direction = tangents(case)
    results = [
        call_double_backward(case, direction, backend, dlse=dlse)
        for dlse in (None, np.zeros_like(lse_gradient(case)))
    ]
    for name in ("q", "k", "v", "out", "sink", "lse"):
        assert_bitwise(results[0][name], results[1][name], name)
    other = call_double_backward(case, direction, backend)
    assert abs(other["q"] - results[0]["q"]).max() > 0.1


@on_kernels
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("axes", [(0,), (1, 2)])
def test_gradients_of_broadcast_biases(backend, dtype, axes):
    case = Case(dtype, **{**GROUPED, "arrays_of": ("bias",)}, on=ON)
    shape = [1 if axis in axes else n for axis, n in enumerate((2, 6, 37, 51))]
    rng = np.random.default_rng(0)
    bias, ddbias = rng.standard_normal((2, *shape)).astype(DTYPES[dtype])
    q, k, v, _ = inputs(case)
    options = {**case.meaning(), "bias": bias}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    given = {"bias": bias, "out": out, "lse": lse}
    direction = tangents(case, "qkv") | {"bias": ddbias}
    got, want = (
        call_double_backward(case, direction, x, **given)["bias"]
        for x in (backend, NUMPY)
    )
    assert got.shape == want.shape and got.dtype == want.dtype
    assert_near({"bias": got}, {"bias": want}, case)


# Shapes and strides ---------------------------------------------------------


@on_kernels
@pytest.mark.parametrize("rank", [2, 3])
def test_axes_may_be_left_out(backend, rank):
    case = Case("float64", 1, 9, 12, head_dim=8, head_dim_v=4, on=ON)
    at = (0, slice(None), 0) if rank == 2 else (0,)
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    direction, of_lse = tangents(case, "qkv"), (0,) * (4 - rank)
    whole = call_double_backward(case, direction, backend, dlse=None)
    small = {name: x[at] for name, x in given.items()}
    got = call_double_backward(
        case, {name: x[at] for name, x in direction.items()}, backend,
        **small, lse=lse[of_lse], dlse=None,
    )  # fmt: skip
    for name, x in whole.items():
        want = x[of_lse if name == "lse" else at]
        assert_bitwise(got[name], np.ascontiguousarray(want), name)


@on_kernels
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_strides_change_no_bit(backend, dtype):
    case = Case(dtype, 2, 20, 26, 2, 1, 24, 12, deterministic=True, on=ON)
    direction = tangents(case, "qkv")
    q, k, v, _ = inputs(case)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    wanted = call_double_backward(case, direction, backend)
    for name in LAYOUTS.keys() - {"broadcast"}:
        lay_out = LAYOUTS[name]
        strided = {x: lay_out(y) for x, y in direction.items()}
        rows = {"out": lay_out(out), "lse": np.asfortranarray(lse)}
        other = replace(case, layout=name)
        got = call_double_backward(other, strided, backend, **rows)
        for x, want in wanted.items():
            assert_bitwise(got[x], want, f"{name} {x}")


@on_kernels
@pytest.mark.parametrize("kind", ["float32", "float64", "tf32x3"])
def test_results_are_the_same_bits_again(backend, kind):
    """Another order of warps; no sum but that of a broadcast bias moves."""
    fields = EVERYTHING | {"arrays_of": ("mask", "sink")}
    case = Case(on=ON, deterministic=True, **KINDS[kind], **fields)
    first = call_double_backward(case, tangents(case), backend)
    case = replace(case, on=replace(ON, seed=9, resident=1))
    again = call_double_backward(case, tangents(case), backend)
    for name, x in first.items():
        assert_bitwise(again[name], x, name)


@on_kernels
@two_dtypes
@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0)])
def test_no_queries_and_no_keys(backend, seqlens, dtype):
    case = Case(dtype, 1, *seqlens, 2, 1, 8, 8, arrays_of=("sink",), on=ON)
    check_double_backward(backend, case, tangents(case))


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "d", "dv"),
    [("float32", 320, 272), ("bfloat16", 256, 192), ("float16", 40, 256)],
)
def test_wide_heads(backend, dtype, d, dv):
    case = Case(dtype, 1, 9, 13, head_dim=d, head_dim_v=dv, on=ON)
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)


# What no one sees -----------------------------------------------------------


@on_kernels
@each_kind
def test_rows_that_see_nothing(backend, kind):
    """They contribute exactly 0, whatever q and its cotangent are."""
    case = Case(batch=1, seqlen_q=20, seqlen_k=12, num_heads_q=2,
                num_heads_kv=1, head_dim=8, head_dim_v=8, causal=True, on=ON,
                **KINDS[kind])  # fmt: skip
    direction = tangents(case, "qkv")
    direction["q"][:, :8] = np.nan
    q = inputs(case)[0]
    q[:, :8] = np.inf
    got = call_double_backward(case, direction, backend, q=q)
    assert_all(got["q"][:, :8], 0, "q")
    assert_all(got["out"][:, :8], 0, "out")
    assert_all(got["lse"][..., :8], 0, "lse")
    for x in got.values():
        assert_finite(x.astype("f4"), "x")


@on_kernels
@two_dtypes
@pytest.mark.parametrize("name", ["dout", "out", "dlse", "q", "k", "v"])
def test_a_nan_reaches_what_reads_it(backend, name, dtype):
    """The last are cotangents. As on NumPy arrays; but some kernels do not
    need out for ddout.
    """
    case = Case(dtype, 1, 40, 40, 1, 1, 8, 8, causal=True,
                window=(9, 0), on=ON)  # fmt: skip
    direction, given = tangents(case, "qkv"), {}
    if name in direction:
        direction[name][0, 20] = np.nan
    else:
        q, k, v, dout = inputs(case)
        out, _ = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
        given[name] = {"dout": dout, "out": out}.get(name, lse_gradient(case))
        given[name][(0, 0, 20) if name == "dlse" else (0, 20)] = np.nan
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (backend, NUMPY)
    )
    if name == "out" and dtype == "float32":
        assert_finite(got.pop("out"), "out")
    assert_near(got, {x: want[x] for x in got}, case)
    assert not all(np.isfinite(y).all() for y in got.values())


@on_kernels
@pytest.mark.parametrize("name", [None, "q", "k", "dout", "ddq", "ddk"])
def test_tiles_of_16_bits(backend, name):
    """One that no query sees, one seen whole, others cut; in these a NaN.

    A warp computes d2q in two slices of columns.
    """
    case = Case("float16", 1, 70, 150, 2, 1, 72, 12, window=(47, 50),
                block_q=64, block_k=32, on=ON)  # fmt: skip
    direction = tangents(case)
    q, k, _, dout = inputs(case)
    given = {"q": q, "k": k, "dout": dout}
    moved = {"ddq": direction["q"], "ddk": direction["k"]}
    if name is None:
        got = call_double_backward(case, direction, backend)
        return assert_near(got, exact_double_backward(case, direction), case)
    (given | moved)[name][0, 43] = np.nan
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (backend, NUMPY)
    )
    assert_near(got, want, case)
    assert not np.isnan(want["k"]).all()


@on_kernels
@two_dtypes
def test_a_sink_of_minus_infinity_has_no_weight(backend, dtype):
    case = Case(dtype, 1, 9, 6, 2, 1, 8, 8, causal=True,
                deterministic=True, on=ON)  # fmt: skip
    none = np.full(2, -np.inf, dtype)
    moves = {"sink": none, "ddsink": np.ones_like(none)}
    direction = tangents(case, "qkv")
    got = call_double_backward(
        case, direction, backend, **moves, return_d2sink=True
    )
    assert_all(got.pop("sink"), 0, "sink")
    for name, x in call_double_backward(case, direction, backend).items():
        assert_bitwise(got[name], x, name)
