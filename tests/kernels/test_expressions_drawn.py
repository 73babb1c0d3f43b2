"""Drawn score_mod and mask_mod in each family of kernels.

Their meaning is that of a softcap, a bias and a mask, with the bounds of
those. Lengths are at the ends of tiles.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from helpers.backends import NumpyBackend, on_kernels
from helpers.compare import Expected, assert_allclose, assert_matches
from helpers.data import Case, Emulation, inputs
from helpers.drawn import num_examples
from helpers.drawn_variants import GRADIENTS, DrawnVariant, calls, variants
from helpers.variants import check_forward, check_gradients, options_of

pytestmark = pytest.mark.drawn


def on(arch, family=None):
    return Emulation(arch, num_sms=2, seed=1, family=family)


FAMILIES = {
    "simt": ("float32", on("sm_80", "simt"), {}),
    "fma": ("float32", on("sm_80", "fma"), {}),
    "sm80": ("bfloat16", on("sm_80", "sm80"), {}),
    "mma8_float32": ("float32", on("sm_80"), {"precision": "tf32x3"}),
    "mma8_float64": ("float64", on("sm_80"), {}),
    "sm90": ("bfloat16", on("sm_90a"), {"head_dim": 64}),
    "decode": ("bfloat16", on("sm_80", "decode"), {"longest_q": 2}),
    "decode_simt": ("float32", on("sm_80", "decode_simt"), {"longest_q": 2}),
}
BOTH_WAYS = [x for x in FAMILIES if not x.startswith("decode")]


def drawn_for(family):
    dtype, emulation, more = FAMILIES[family]
    return calls(dtype, emulation, **more)


def on_drawn(families, draw):
    """Run a test on the calls of each family: test(backend, case, variant)."""

    def decorate(check):
        def test(backend, family):
            def on_call(call):
                check(backend, *call)

            on_call.__name__ = check.__name__
            which = check.__module__, check.__name__, backend.name, family
            on_call._hypothesis_internal_add_digest = repr(which).encode()
            run = given(call=draw(family))(on_call)
            settings(max_examples=num_examples(backend))(run)()

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(check, name))
        return on_kernels(pytest.mark.parametrize("family", families)(test))

    return decorate


@on_drawn(FAMILIES, drawn_for)
def test_forward(backend, case, variant):
    check_forward(backend, case, variant)


@on_drawn(BOTH_WAYS, drawn_for)
def test_gradients(backend, case, variant):
    """With those of arrays, where order may be any."""
    if "bias" in case.arrays_of:  # its gradient has tests of its own
        case = replace(case, arrays_of=())
    has_arrays = variant.added and not case.deterministic
    more = {"return_dmod": GRADIENTS} if has_arrays else {}
    if "sink" in case.arrays_of:
        more |= case.asked()
    rest, want = check_gradients(backend, case, variant, **more)
    if has_arrays:
        assert_gradients_of_arrays(backend, case, variant, rest[-1], want)


def assert_gradients_of_arrays(backend, case, variant, dmods, want):
    totals, errors = variant.gradients(want[3])
    for name in GRADIENTS:
        got = backend.fetch(dmods[name]).astype(np.float64)
        wanted = Expected(totals[name], totals[name], errors[name], 0)
        assert_matches(got, wanted, f"d{name}", case)


# Packed sequences: against NumPy arrays' own path, in float64 --------------


# Of results, a few roundings of P, dP and delta.
UNIT = {"bfloat16": 2.0**-6, "float32": 2.0**-17, "float64": 2.0**-40}


@st.composite
def packed_calls(draw, family):
    dtype, emulation, more = FAMILIES[family]
    lengths = st.lists(
        st.sampled_from([0, 1, 15, 16, 17, 33, 64, 65]), min_size=1, max_size=4
    )
    queries, keys = draw(lengths), draw(lengths)
    count = min(len(queries), len(keys))
    offsets = tuple(
        tuple(map(int, np.cumsum([0, *x[:count]]))) for x in (queries, keys)
    )
    head_dim = more.get("head_dim", 32)
    case = Case(
        dtype, 1, offsets[0][-1], offsets[1][-1], 4, 2, head_dim, head_dim,
        precision=more.get("precision"), seed=draw(st.integers(0, 2**16)),
        on=emulation, causal=draw(st.booleans()), offsets=offsets,
    )  # fmt: skip
    return case, draw(variants())


def packed_results(backend, arrays, case, variant, precision):
    """Return out, dq, dk and dv of packed arrays."""
    options = options_of(backend, case, variant) | {"precision": precision}
    q, k, v, dout = (backend.place(x[0]) for x in arrays)
    with backend.running(case):
        out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
        results = cuflash.backward(dout, q, k, v, out, lse, **options)
    return [backend.fetch(x).astype(np.float64) for x in (out, *results)]


@on_drawn(BOTH_WAYS, packed_calls)
def test_packed(backend, case, variant):
    arrays = inputs(case)
    wide = [x.astype(np.float64) for x in arrays]
    got = packed_results(backend, arrays, case, variant, case.precision)
    want = packed_results(NumpyBackend(), wide, case, variant, None)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        bound = 4 * UNIT[case.dtype] * (1 + np.abs(b).max(initial=0.0))
        assert_allclose(a, b, name, atol=bound)


def test_a_variant_means_itself():
    """What is compared is not trivial: the functions hide and add."""
    variant = DrawnVariant("table[h, kv_idx]", "q_idx >= kv_idx", seed=3)
    meaning = variant.meaning((1, 2, 5, 6))
    assert meaning["bias"].shape == (1, 2, 5, 6)
    assert meaning["mask"].sum() == 2 * 15
    assert np.ptp(meaning["bias"]) > 0
