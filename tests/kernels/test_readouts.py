"""weights, weight_sums, entropy and their gradients, by each family."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import cuflash
import strategies
from helpers import readouts
from helpers.backends import (
    CUPY,
    EMULATED,
    EmulatedBackend,
    NumpyBackend,
    on_kernels,
)
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_bitwise,
    assert_finite,
    assert_matches,
)
from helpers.data import Case
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES, PRECISION
from helpers.option_cases import FEW, KINDS, on_kinds

SHAPE = {
    "batch": 2, "seqlen_q": 113, "seqlen_k": 203, "num_heads_q": 4,
    "num_heads_kv": 2, "head_dim": 40, "head_dim_v": 40, "seed": 3,
    "layout": "unlike",
}  # fmt: skip
SETS = {
    **FEW,
    # Many tiles, most of them without a masked pair; the longest heads.
    "causal": {"causal": True, "block_q": 32, "block_k": 32},
    "wide": {"batch": 1, "num_heads_q": 2, "head_dim": 256},
    # One sequence without queries, one without keys, tokens of none.
    "packed": {
        "batch": 1, "seqlen_q": 150, "seqlen_k": 170, "causal": True,
        "offsets": ((0, 70, 70, 90, 140), (0, 100, 130, 130, 160)),
    },
}  # fmt: skip

OF_EACH = "all", "packed"
OTHERS = [x for x in SETS if x not in OF_EACH]


def in_turns(names):
    """Each call of each kind: with `OF_EACH`, and one of `OTHERS` in turn.

    What computes scores is the kind's, whatever is made of them.
    """
    numbered = product(enumerate(names), enumerate(KINDS))
    return pytest.mark.parametrize(
        ("name", "kind", "options"),
        [
            (name, kind, x)
            for (i, name), (j, kind) in numbered
            for x in (*OF_EACH, OTHERS[(i + j + 2) % len(OTHERS)])
        ],
    )


def case_of(kind, options, **more):
    return Case(**{**SHAPE, **SETS[options], **KINDS[kind], **more})


def check(backend, case, name):
    got = readouts.call(backend, case, name)
    assert_matches(got, readouts.expected(case, name), name, case)


def check_gradients(backend, case, name):
    got = readouts.call_gradients(backend, case, name)
    wanted = readouts.expected_gradients(case, name)
    names = "dq", "dk", "dlse", "drow_weights"
    for which, *pair in zip(names[: len(wanted)], got, wanted, strict=True):
        assert_matches(*pair, which, case)


@on_kernels
@in_turns(readouts.CALLS)
def test_is_that_of_the_matrix(backend, kind, name, options):
    check(backend, case_of(kind, options), name)


@on_kernels
@in_turns(readouts.GRADIENTS)
def test_gradients_are_those_of_the_matrix(backend, kind, name, options):
    check_gradients(backend, case_of(kind, options), name)


WIDEST = {"batch": 1, "seqlen_q": 17, "seqlen_k": 33, "head_dim": 512}


@on_kernels
@pytest.mark.parametrize("kind", ["mma", "fma", "dmma"])
def test_gradients_of_the_widest_heads(backend, kind):
    check_gradients(backend, case_of(kind, "wide", **WIDEST), "entropy")


def test_double_rows_of_the_widest_heads_do_not_fit_an_sm75():
    case = case_of("simt64", "wide", **WIDEST)
    with pytest.raises(cuflash.UnsupportedError, match="133632 bytes of"):
        check_gradients(EmulatedBackend(), case, "entropy")


def drawn(backend, **options):
    """Draw calls whose rounding errors are of first order."""
    tame = {"values": ["normal"], **options}
    return strategies.optional_cases(backend, **tame) | (
        strategies.packed_cases(backend, **tame)
    )


on_drawn_calls = on_each_backend(
    drawn, backends=[EMULATED, CUPY], each={"dtype": DTYPES}
)


def any_of(names, case):
    """Return the case with tiles as they are chosen, and a call."""
    case = replace(case, block_q=None, block_k=None)
    return case, [*names][case.seed % len(names)]


@on_drawn_calls
def test_drawn_calls(backend, case):
    check(backend, *any_of(readouts.CALLS, case))


@on_drawn_calls
def test_gradients_of_drawn_calls(backend, case):
    check_gradients(backend, *any_of(readouts.GRADIENTS, case))


@on_kernels
@pytest.mark.parametrize("name", ["sums", "entropy"])
def test_are_the_same_bits_in_any_order_of_warps(backend, name):
    case = case_of("mma", "causal")
    first = readouts.call(backend, case, name)
    other = replace(case, on=replace(case.on, seed=5, resident=2))
    assert_bitwise(readouts.call(backend, other, name), first, name)
    first, again = (
        readouts.call_gradients(backend, x, name) for x in (case, other)
    )
    for x, y in zip(first, again, strict=True):
        assert_bitwise(y, x, name)


# Rows and keys that are not finite, large scores, functions ------------------


class Calls:
    """Calls of a family on q, k and lse, by NumPy's forward."""

    def __init__(self, backend, kind, **options):
        self.backend, self.case = backend, Case(**KINDS[kind])
        rng, self.dtype = np.random.default_rng(0), DTYPES[self.case.dtype]
        shapes = (2, 70, 4, 16), (2, 90, 2, 16)
        arrays = (rng.standard_normal(x).astype(self.dtype) for x in shapes)
        self.q, self.k = arrays
        self.options = {"precision": self.case.precision, **options}
        self.find_lse()

    def find_lse(self):
        _, self.lse = cuflash.forward(
            self.q, self.k, self.k, return_lse=True, **self.options
        )

    def __call__(self, function, *first, on=None, **more):
        backend = on or self.backend
        given = (*first, self.q, self.k, self.lse)
        with backend.running(self.case):
            found = function(
                *(backend.place(x) for x in given), **self.options, **more
            )
        if isinstance(found, tuple):
            return [backend.fetch(x) for x in found]
        return backend.fetch(found)


@on_kernels
@on_kinds
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_rows_that_are_not_chosen_spread_no_nan(backend, kind, reduce):
    calls = Calls(backend, kind)
    calls.q[:, 2] = np.nan
    asked = {"queries": [0, 1, 5, 69], "reduce": reduce}
    assert_finite(calls(cuflash.weight_sums, **asked), reduce)
    one = np.ones((2, 4, 90), calls.lse.dtype)
    dq, dk, _ = calls(cuflash.weight_sums_backward, one, **asked)
    assert_finite(dk, f"dk of {reduce}")
    assert_all(dq[:, 2], 0, f"dq of {reduce}")


@on_kernels
@on_kinds
def test_masked_keys_spread_no_nan(backend, kind):
    calls = Calls(backend, kind, causal=True)
    calls.k[:, 89] = np.nan  # the last query alone sees it
    got = calls(cuflash.entropy)
    assert_finite(got[..., :-1], "entropy")
    assert_all(np.isnan(got[..., -1]), True, "entropy of NaN")
    got = calls(cuflash.weights, queries=[5, 68])
    assert_finite(got, "weights")
    dq, *_ = calls(cuflash.entropy_backward, np.ones_like(calls.lse))
    assert_finite(dq[:, :-1], "dq")


@on_kernels
@on_kinds
def test_weights_of_large_scores(backend, kind):
    """All scores of a head are 2048 and less than 64 more.

    Half an ulp of 2112 in lse, and in the score, exact here; then a sum.
    """
    calls = Calls(backend, kind, scale=1.0, block_q=32, block_k=32)
    calls.q, calls.k = np.rint(calls.q), np.rint(calls.k)
    calls.q[..., 0], calls.k[..., 0] = 32, 64
    calls.options["block_q"] = calls.options["block_k"] = None
    calls.find_lse()
    for function in (cuflash.weight_sums, cuflash.entropy):
        want = calls(function, on=NumpyBackend())
        unit = 2112 * PRECISION[calls.lse.dtype.name].sum_unit
        assert_allclose(
            calls(function), want, function.__name__, rtol=unit, atol=90 * unit
        )


@on_kernels
@on_kinds
def test_users_functions(backend, kind):
    mods = {
        "score_mod": lambda s, b, h, i, j: s * 0.5 + h,
        "mask_mod": lambda b, h, i, j: (i + j) % 2 == 0,
    }
    calls = Calls(backend, kind, **mods)
    unit = PRECISION[calls.case.dtype]
    for function in (cuflash.weights, cuflash.weight_sums, cuflash.entropy):
        want = calls(function, on=NumpyBackend())
        # Scores below 16, slopes and sums of 90 terms.
        error = (32 + 90) * unit.sum_unit
        assert_allclose(
            calls(function), want, function.__name__, rtol=error, atol=error
        )
    one = np.ones_like(calls.lse)
    got, want = (
        calls(cuflash.entropy_backward, one, on=x)
        for x in (backend, NumpyBackend())
    )
    for a, b in zip(got, want, strict=True):
        size = np.abs(np.asarray(b, np.float64)).max()
        error = 4 * (unit.unit + 122 * unit.sum_unit)
        assert_allclose(a, b, "gradient", rtol=error, atol=error * size)
