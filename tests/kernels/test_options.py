"""Masks and score modifications together, against the float64 reference."""

import contextlib

import numpy as np
import pytest

import cuflash
import strategies
from cuflash import emulator
from cuflash.errors import UnsupportedError
from helpers import calls, expected
from helpers.backends import (
    on_each_kind_with_options,
    on_kernels,
    on_kernels_of,
)
from helpers.checks import (
    check_forward,
    check_gradients,
    check_gradients_of_forward,
)
from helpers.compare import (
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.options import fields_of

# A key tile that no query tile sees: its keys were not waited for.
UNSEEN = [
    Case("float16", seqlen_q=1, seqlen_k=1,
         arrays_of=("segment_ids_k", "segment_ids_q")),
    Case("bfloat16", seqlen_q=5, seqlen_k=190, window=(3, 0)),
]  # fmt: skip


@on_each_backend(strategies.optional_cases, each={"dtype": DTYPES})
def test_forward(backend, case):
    check_forward(backend, case)


@on_each_backend(
    strategies.optional_cases, each={"dtype": DTYPES}, examples=UNSEEN
)
def test_backward(backend, case):
    """With the NumPy path's out and lse."""
    check_gradients(backend, case)


@on_each_backend(strategies.optional_cases)
def test_backward_of_forward(backend, case):
    check_gradients_of_forward(backend, case)


@on_kernels_of(dtype=DTYPES, options=strategies.FEW_OPTIONS)
def test_several_tiles(backend, dtype, options):
    """Lengths at which tiles are skipped, and grouped heads."""
    case = Case(
        dtype, 2, 113, 203, 4, 2, 40, 40, causal="softcap" in options, seed=3,
        **fields_of(options),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)


@on_each_kind_with_options
def test_a_sink_of_minus_infinity_is_none(backend, dtype, arch):
    """Also in the 24 of 40 rows that see no key, whose lse is then -inf."""
    on = Emulation(arch)
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
    assert not backend.fetch(dsink).any()


@on_each_kind_with_options
@pytest.mark.parametrize("scale", [None, 0.0])
def test_rows_without_keys_have_the_sink(backend, dtype, arch, scale):
    """24 of 40 queries see none of the 16 keys."""
    case = Case(dtype, seqlen_q=40, causal=True, arrays_of=("sink",),
                scale=scale, on=Emulation(arch))  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert not out[:, :24].any()
    assert (lse[:, :, :24] == case.options()["sink"]).all()
    dq, *_ = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert not dq[:, :24].any() and np.isfinite(dq).all()


HIDING = [
    {"window": (3, 3)},
    {"arrays_of": ("mask",)},
    {"arrays_of": ("segment_ids_q", "segment_ids_k")},
]


@on_each_kind_with_options
@pytest.mark.parametrize("changes", HIDING)
def test_masked_nan_does_not_spread(backend, dtype, arch, changes):
    """NaN in a key and its value, and in a query and its dout."""
    spoiled = [(x, (0, 9), "nan") for x in ("q", "k", "v", "dout")]
    case = Case(dtype, seqlen_q=50, seqlen_k=50, spoiled=tuple(spoiled),
                on=Emulation(arch), **changes)  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)


@on_each_kind_with_options
def test_visible_nan_spreads_by_scores(backend, dtype, arch):
    """NaN and infinities, whose terms kernels add one by one."""
    spoiled = (
        ("q", (0, 20, 1, 3), "inf"),
        ("k", (0, 30, 0, 5), "nan"),
        ("dout", (0, 10, 0, 2), "-inf"),
    )
    case = Case(
        dtype, 1, 40, 50, 2, 1, causal=True, softcap=2.0, seed=1,
        arrays_of=("alibi_slopes", "bias"), spoiled=spoiled,
        on=Emulation(arch),
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    got = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case, kinds=False)


@on_each_kind_with_options
def test_the_gradient_of_a_bias_of_each_pair(backend, dtype, arch):
    """In partly masked and full tiles, with several heads."""
    case = Case(dtype, 2, 70, 150, 2, 2, causal=True, arrays_of=("bias",),
                seed=1, on=Emulation(arch))  # fmt: skip
    assert case.options()["bias"].shape == (2, 2, 70, 150)
    check_gradients_of_forward(backend, case)


SEEING = [
    {"softcap": 5.0, "causal": True, "seqlen_q": 50, "seqlen_k": 50},
    {"arrays_of": ("segment_ids_q", "segment_ids_k"),
     "seqlen_q": 150, "seqlen_k": 150},
]  # fmt: skip


@on_kernels
@pytest.mark.parametrize("changes", SEEING)
def test_visible_nan_of_v_spreads(backend, changes):
    """An infinity reaches all rows that see its key, and no others."""
    case = Case("bfloat16", spoiled=(("v", (0, 9), "inf"),), **changes)
    check_forward(backend, case)


@on_each_kind_with_options
@pytest.mark.parametrize("changes", HIDING)
def test_masked_scores_are_no_maximum(backend, dtype, arch, changes):
    """Next to the masked key's score, all others would have weight 0."""
    case = Case(dtype, seqlen_q=50, seqlen_k=50, on=Emulation(arch),
                spoiled=(("k", (0, 9), "1e4"),), **changes)  # fmt: skip
    check_forward(backend, case)


@on_each_kind_with_options
def test_options_by_any_strides(backend, dtype, arch):
    """Transposed, reversed, and a bias misaligned to its element size."""
    case = Case(dtype, 2, 33, 44, 2, 2, on=Emulation(arch),
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
def test_a_bias_that_was_broadcast_before(backend, dtype, arch):
    """Its elements share memory, but each has its own gradient."""
    on = Emulation(arch)
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
    """Nor on NumPy arrays, although their order of sums is fixed."""
    q = np.zeros((1, 4, 1, 8), np.float32)
    bias, lse = np.zeros(4, np.float32), np.zeros((1, 1, 4), np.float32)
    no_order = pytest.raises(UnsupportedError, match="in no fixed order")
    with device, no_order:
        cuflash.backward(
            q, q, q, q, q, lse, bias=bias, return_dbias=True,
            deterministic=True,
        )  # fmt: skip
