"""Options in calls of their own: odd values, strides, tiles, gradients."""

import contextlib

import numpy as np
import pytest

import cuflash
import strategies
from cuflash import emulator
from cuflash.errors import UnsupportedError
from cuflash.plans.plan import device_of_arch, plan
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.backends import on_each_kind_with_options, on_kernels
from helpers.checks import check_forward, check_gradients_of_forward
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.dtypes import DTYPES
from helpers.kernels import small_problem
from helpers.option_cases import FAMILIES, KINDS, on_wide_kinds


@on_each_kind_with_options
def test_a_sink_of_minus_infinity_is_none(backend, dtype, on):
    """Also in the 24 of 40 rows that see no key: -inf is all they have."""
    case = Case(dtype, 1, 40, 16, 2, 2, causal=True, on=on)
    q, k, v, dout = inputs(case)
    placed = [backend.place(x) for x in (q, k, v)]
    sink = backend.place(np.full(2, -np.inf, np.float32))
    with backend.running(case):
        got = cuflash.forward(*placed, causal=True, sink=sink, return_lse=True)
        *_, dsink = cuflash.backward(
            backend.place(dout), *placed, *got, causal=True, sink=sink,
            return_dsink=True,
        )  # fmt: skip
    got = [backend.fetch(x) for x in got]
    assert_forward_matches(got, expected.forward(q, k, v, causal=True), case)
    assert_all(backend.fetch(dsink), 0, "dsink", case)


@on_each_kind_with_options
def test_visible_nan_spreads_by_scores(backend, dtype, on):
    """NaN and infinities, whose own products the kernels add one by one."""
    spoiled = (
        ("q", (0, 20, 1, 3), "inf"),
        ("k", (0, 30, 0, 5), "nan"),
        ("dout", (0, 10, 0, 2), "-inf"),
    )
    case = Case(
        dtype, 1, 40, 50, 2, 1, causal=True, softcap=2.0, seed=1,
        arrays_of=("alibi_slopes", "bias"), spoiled=spoiled,
        on=on,
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    got = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case, kinds=False)


@on_each_kind_with_options
def test_the_gradient_of_a_bias_of_each_pair(backend, dtype, on):
    """In tiles that the mask cuts and in whole ones, of several heads."""
    case = Case(dtype, 2, 70, 150, 2, 2, causal=True, arrays_of=("bias",),
                seed=1, on=on)  # fmt: skip
    assert case.options()["bias"].shape == (2, 2, 70, 150)
    check_gradients_of_forward(backend, case)


SEEING = [
    {"softcap": 5.0, "causal": True, "seqlen_q": 50, "seqlen_k": 50},
    {"arrays_of": ("segment_ids_q", "segment_ids_k"),
     "seqlen_q": 150, "seqlen_k": 150},
]  # fmt: skip


@on_kernels
@pytest.mark.parametrize("changes", SEEING)
def test_what_is_seen_of_v_spreads(backend, changes):
    """An infinity, to all rows that see its key and to no other."""
    case = Case("bfloat16", spoiled=(("v", (0, 9), "inf"),), **changes)
    check_forward(backend, case)


@on_each_kind_with_options
def test_options_by_any_strides(backend, dtype, on):
    """Transposed, reversed and, of bias, at no multiple of its size."""
    case = Case(dtype, 2, 33, 44, 2, 2, on=on,
                arrays_of=("bias", "mask", "sink"))  # fmt: skip
    given = case.options()
    full = (2, 2, 33, 44)
    bias = np.broadcast_to(given["bias"], full).astype(given["bias"].dtype)
    memory = np.zeros(bias.nbytes + 1, np.uint8)
    askew = np.ndarray(full, bias.dtype, memory, offset=1)
    askew[...] = bias
    other = {
        "bias": askew,
        "mask": np.asfortranarray(np.broadcast_to(given["mask"], full)),
        "sink": given["sink"][::-1].copy()[::-1],
    }
    q, k, v, _ = (backend.place(x) for x in inputs(case))
    given = {"bias": bias, "mask": given["mask"], "sink": given["sink"]}
    results = []
    with backend.running(case):
        for options in (given, other):
            placed = {n: backend.place(x) for n, x in options.items()}
            results.append(cuflash.forward(q, k, v, **placed))
    assert_bitwise(*map(backend.fetch, results), "out")


@on_each_kind_with_options
def test_a_bias_that_was_broadcast_before(backend, dtype, on):
    """Its elements share memory, and each has a gradient of its own."""
    case = Case(dtype, 1, 33, 44, 2, 2, deterministic=True, on=on)
    row = np.arange(33).astype(DTYPES[dtype])[:, None] / 8
    views = np.broadcast_to(row, (1, 2, 33, 44))
    q, k, v, dout = (backend.place(x) for x in inputs(case))
    results = []
    for bias in (views, views.copy()):
        bias = backend.place(bias)
        with backend.running(case):
            out, lse = cuflash.forward(q, k, v, bias=bias, return_lse=True)
            *_, dbias = cuflash.backward(
                dout, q, k, v, out, lse, bias=bias, return_dbias=True,
                deterministic=True,
            )  # fmt: skip
        results.append(backend.fetch(dbias))
    assert_bitwise(*results, "dbias")


@pytest.mark.parametrize(
    "device", [contextlib.nullcontext(), emulator.active("sm_80")]
)
def test_a_broadcast_bias_has_no_deterministic_gradient(device):
    """On NumPy arrays neither, whose sums have an order."""
    q = np.zeros((1, 4, 1, 8), np.float32)
    bias, lse = np.zeros(4, np.float32), np.zeros((1, 1, 4), np.float32)
    no_order = pytest.raises(UnsupportedError, match="in no fixed order")
    with device, no_order:
        cuflash.backward(
            q, q, q, q, q, lse, bias=bias, return_dbias=True,
            deterministic=True,
        )  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_register_tiles_take_options(direction, arch):
    problem = small_problem(direction, "float32", mask=True, dropout=0.5)
    assert plan(problem, device_of_arch(arch)).family == "fma"
    assert plan(problem, device_of_arch(arch), "simt").family == "simt"


@on_kernels
def test_dropout_of_many_pairs(backend):
    """A lane has 64, and their bits are of two words."""
    on = Emulation(forward_tile=Tile(128, 64, 4, ptxas_level=3))
    case = Case("float32", 1, 50, 90, dropout=0.5, seed=1, on=on)
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("name", ["window", "segments", "all"])
@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout"])
def test_nonfinite_inputs(backend, name, spoiled):
    """Reaches those that see it: some in its tile do, some do not."""
    spoiled = ((spoiled, (0, 17, 0, 3), "nan"),)
    case = FAMILIES["fma"].case("small", name, spoiled=spoiled)
    check_forward(backend, case)
    got = check_gradients_of_forward(backend, case)
    assert np.isnan(got[1]).any()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["dmma", "tf32x3"])
def test_the_tiles_are_some_that_kernels_can_take(kind, direction):
    case = Case(**KINDS[kind])
    tile = getattr(case.on, f"{direction}_tile")
    assert tile in strategies.tiles(case, direction, case.on.arch)


@on_kernels
@on_wide_kinds
def test_tiles_between_others_are_skipped(backend, kind):
    """Of three documents the first and the last are one."""
    case = Case(seqlen_q=150, seqlen_k=150, num_heads_q=2, **KINDS[kind])
    q, k, v, dout = inputs(case)
    ids = np.repeat(np.int32([[0, 1, 0]]), 50, axis=1)
    options = {"segment_ids_q": ids, "segment_ids_k": ids}
    placed = {name: backend.place(x) for name, x in options.items()}
    out, lse = calls.forward(backend, case, q, k, v, **placed)
    want = expected.forward(q, k, v, **options)
    assert_forward_matches((out, lse), want, case)
    arrays = dout, q, k, v, out, lse
    got = calls.backward(backend, case, *arrays, **placed)
    want = expected.backward(dout, q, k, v, **options)
    assert_gradients_match(got, want, case)
