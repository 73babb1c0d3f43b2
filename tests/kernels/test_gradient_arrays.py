"""dq=, dk= and dv=: arrays of the user that receive the gradients."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from helpers import calls
from helpers.backends import on_backends
from helpers.compare import (
    assert_all,
    assert_arrays_equal,
    assert_bitwise,
)
from helpers.data import LAYOUTS, Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.option_cases import KINDS
from helpers.packed import packed_inputs

NAMES = "dq", "dk", "dv"


def odd_batches(array):
    """Rows of the first batch are aligned, those of the second are not."""
    of_batch = array[0].size + 1
    memory = np.full(of_batch * len(array), np.nan, array.dtype)
    inner = np.ascontiguousarray(array[0]).strides
    strides = of_batch * array.itemsize, *inner
    return np.ndarray(array.shape, array.dtype, memory, strides=strides)


OWN_LAYOUTS = LAYOUTS | {"odd_batches": odd_batches}
WRITABLE_LAYOUTS = [name for name in LAYOUTS if name != "broadcast"]
ALL_KINDS = {
    **KINDS,
    "wgmma": {"dtype": "bfloat16", "on": Emulation("sm_90a")},
}
on_all_kinds = pytest.mark.parametrize("kind", ALL_KINDS)


def operands(case):
    """Return dout, q, k, v, out, lse."""
    q, k, v, dout = inputs(case)
    return dout, q, k, v, *calls.states(case, q, k, v)


def poisoned(array, layout="contiguous"):
    """Return an array alike, of NaN, with the strides of a layout."""
    return OWN_LAYOUTS[layout](np.full_like(array, np.nan, order="C"))


def check_targets(backend, case, given, targets):
    """Check that gradients in `targets` have the bits of new arrays.

    targets : names to NumPy arrays.
    """
    new = dict(zip(NAMES, calls.backward(backend, case, *given), strict=True))
    placed = {name: backend.place(x) for name, x in targets.items()}
    own = calls.backward(backend, case, *given, **placed)
    for name, got in zip(NAMES, own, strict=True):
        assert_bitwise(got, new[name], name)
        if name in placed:
            assert_bitwise(backend.fetch(placed[name]), new[name], name)


@on_each_backend(
    strategies.cases,
    each={"layout": WRITABLE_LAYOUTS},
    longest=70,
    archs=strategies.FAMILIES,
)
def test_they_receive_the_gradients(backend, case):
    case = replace(case, deterministic=True)
    given = operands(case)
    targets = {
        name: poisoned(x, case.layout)
        for name, x in zip(NAMES, given[1:4], strict=True)
    }
    check_targets(backend, case, given, targets)


@on_backends
@on_all_kinds
@pytest.mark.parametrize(
    "layout", ["misaligned", "every_other_token", "odd_batches"]
)
def test_of_each_family(backend, kind, layout):
    """Each alone, too: the others are new arrays."""
    case = Case(batch=2, seqlen_q=40, seqlen_k=50, num_heads_q=2, causal=True,
                deterministic=True, **ALL_KINDS[kind])  # fmt: skip
    given = operands(case)
    targets = {
        name: poisoned(x, layout)
        for name, x in zip(NAMES, given[1:4], strict=True)
    }
    check_targets(backend, case, given, targets)
    for name, x in targets.items():
        check_targets(backend, case, given, {name: poisoned(x, layout)})


@on_backends
@on_all_kinds
def test_tokens_of_no_sequence_get_zeros(backend, kind):
    """Packed sequences: every element is written."""
    case = Case(seqlen_q=60, seqlen_k=70, offsets=((0, 20, 50), (0, 30, 55)),
                deterministic=True, **ALL_KINDS[kind])  # fmt: skip
    _, arrays = packed_inputs(case)
    q, k, v, dout = arrays
    given = dout, q, k, v, *calls.states(case, q, k, v)
    targets = {
        name: poisoned(x) for name, x in zip(NAMES, (q, k, v), strict=True)
    }
    check_targets(backend, case, given, targets)


@on_backends
@pytest.mark.parametrize("sizes", [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_zeros_without_pairs(backend, sizes):
    seqlen_q, seqlen_k, batch = sizes
    case = Case("float16", batch, seqlen_q, seqlen_k)
    given = operands(case)
    targets = [backend.place(poisoned(x)) for x in given[1:4]]
    calls.backward(
        backend, case, *given, **dict(zip(NAMES, targets, strict=True))
    )
    for x in targets:
        assert_all(backend.fetch(x), 0, "backend.fetch(x)")


@on_backends
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gaps_are_left_alone(backend, dtype):
    case = Case(dtype, seqlen_q=70, seqlen_k=70, num_heads_q=2,
                num_heads_kv=2)  # fmt: skip
    batch, tokens, heads, d = 1, 70, 2, 16
    shape = 3, batch, 2 * tokens, heads, 2 * d
    stores = np.full(shape, np.nan, dtype)
    gaps = np.ones(shape, bool)
    gaps[:, :, ::2, :, :d] = False
    stores = backend.place(stores)
    views = (store[:, ::2, :, :d] for store in stores)
    calls.backward(
        backend, case, *operands(case),
        **dict(zip(NAMES, views, strict=True)),
    )  # fmt: skip
    assert_arrays_equal(np.isnan(backend.fetch(stores)), gaps, "stores")


@on_backends
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_they_are_returned(backend, rank):
    """Those that were given; the others are new, of the inputs' rank."""
    at = {4: (), 3: (0,), 2: (0, slice(None), 0)}[rank]
    at_lse = (0,) * (4 - rank)
    case = Case("float32")
    *arrays, lse = operands(case)
    given = [backend.place(x[at]) for x in arrays]
    given.append(backend.place(lse[at_lse]))
    dq, dv = (backend.place(poisoned(arrays[i][at])) for i in (1, 3))
    with backend.running(case):
        got = cuflash.backward(*given, dq=dq, dv=dv)
    assert got[0] is dq and got[2] is dv
    assert got[1].shape == given[2].shape
    assert_all(np.isnan(backend.fetch(dq)), False, "dq")
