"""Each option, alone and with others, in each family of kernels.

What is tested: helpers/options.py and helpers/option_cases.py.
"""

from dataclasses import replace

import numpy as np
import pytest

import strategies
from cuflash.request import options
from helpers import calls, expected
from helpers.apart import Apart
from helpers.backends import on_kernels
from helpers.checks import (
    check_forward,
    check_gradients,
    check_gradients_of_forward,
    check_packed,
)
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_finite,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES
from helpers.option_cases import (
    FAMILIES,
    KINDS,
    on_deterministic_families,
    on_families,
    on_kinds,
    on_wide_kinds,
)
from helpers.options import TABLE, completed, fields_of, is_in

# The table ------------------------------------------------------------------

of_each_option = pytest.mark.parametrize("name", TABLE)
INDEPENDENT = [name for name, data in TABLE.items() if not data.comes_with]
of_each_effect = pytest.mark.parametrize(
    "name", [name for name in INDEPENDENT if TABLE[name].effect]
)


def test_each_option_has_test_data():
    assert list(TABLE) == [option.name for option in options.TABLE]


@of_each_option
def test_an_option_is_tested_alone_or_with_another(name):
    """Here, but for users' functions: test_expressions*.py."""
    if options.BY_NAME[name].traced:
        return
    data = TABLE[name]
    assert bool(data.alone) != bool(data.comes_with)
    assert data.comes_with in {"", *INDEPENDENT}
    if data.effect:
        assert bool(data.draw) != bool(data.makes)


@of_each_effect
def test_each_family_has_it(name):
    for made in FAMILIES.values():
        assert any(is_in(name, made.case(*pair)) for pair in made.pairs)


@of_each_effect
def test_its_terms_change_the_reference(name):
    fields = next(iter(TABLE[name].alone.values()))
    case = Case(seqlen_q=50, seqlen_k=50, seed=1, **fields)
    q, k, v, dout = inputs(case)
    plain = expected.backward(dout, q, k, v)
    got = expected.backward(dout, q, k, v, **case.meaning())
    assert not np.array_equal(got[1].ref, plain[1].ref)
    assert not np.array_equal(got[1].low, plain[1].low)


def test_packed_sequences_are_drawn_with_each_that_they_support():
    drawn = completed(set().union(*strategies.FEW_PACKED_OPTIONS))
    for option in options.TABLE:
        supported = "cu_seqlens_q" not in option.not_with
        if supported and TABLE[option.name].effect:
            assert option.name in drawn


# Drawn ----------------------------------------------------------------------

# A key tile that no query tile sees: its keys were not waited for.
UNSEEN = [
    Case("float16", seqlen_q=1, seqlen_k=1,
         arrays_of=("segment_ids_k", "segment_ids_q")),
    Case("bfloat16", seqlen_q=5, seqlen_k=190, window=(3, 0)),
]  # fmt: skip
# Weights down to 1e-167: the squares of their errors are no float64.
TINY_WEIGHTS = [
    Case("float64", seqlen_q=1, seqlen_k=61, scale=1.0, values="large_row",
         seed=5),
]  # fmt: skip

# Every row has the same out, and the same roundings of it and of P: what they
# move delta by adds up over all queries in dk.
ONE_KEY = [
    Case("float16", batch=2, seqlen_q=122, seqlen_k=1, num_heads_q=2,
         head_dim=8, dropout=0.25, values="aligned", seed=2958853076),
]  # fmt: skip
# The keys of a row have weights within a unit of the dtype, which are rounded
# alike; their values do not cancel.
ALIKE = [
    Case(dropout=0.25, dtype="bfloat16", seqlen_q=24, seqlen_k=65, head_dim=8,
         head_dim_v=8, causal=True, layout="padded_rows", values="rising",
         seed=1019166420, on=Emulation("sm_100", 4132794853, resident=1)),
    Case(dropout=0.25, dtype="bfloat16", batch=2, seqlen_q=5, seqlen_k=177,
         head_dim=32, head_dim_v=32, values="rising", seed=882994083),
]  # fmt: skip

# Integer sums of dq in rows whose keys have little weight beside a sink, or
# whose winner dropout drops: dq is of the size of the grid's steps.
IDS = ("segment_ids_k", "segment_ids_q")
SMALL_ROWS = [
    Case(softcap=30000.0, dtype="float16", batch=2, seqlen_q=166, seqlen_k=2,
         head_dim=40, head_dim_v=40, deterministic=True, layout="padded_rows",
         values="large_column", seed=3650601029, on=Emulation("sm_90a"),
         arrays_of=("alibi_slopes_of_batches", "mask", *IDS, "sink")),
    Case(softcap=30000.0, dtype="float16", seqlen_q=200, seqlen_k=2,
         num_heads_q=2, head_dim=40, head_dim_v=40, deterministic=True,
         layout="axes_reversed", seed=1599188077, on=Emulation("sm_90a"),
         arrays_of=("alibi_slopes_of_batches", "mask", *IDS, "sink")),
    Case(softcap=30000.0, dropout=0.5, dtype="bfloat16", seqlen_q=51,
         seqlen_k=136, num_heads_q=2, num_heads_kv=2, head_dim=40,
         head_dim_v=40, scale=0.25, deterministic=True, values="peaked",
         seed=109800082, on=Emulation("sm_90a"), arrays_of=IDS),
]  # fmt: skip


@on_each_backend(
    strategies.optional_cases, each={"dtype": DTYPES}, examples=ALIKE
)
def test_forward(backend, case):
    check_forward(backend, case)


@on_each_backend(
    strategies.optional_cases,
    each={"dtype": DTYPES},
    examples=UNSEEN + TINY_WEIGHTS + SMALL_ROWS,
)
def test_backward(backend, case):
    """With the NumPy path's out and lse."""
    check_gradients(backend, case)


@on_each_backend(strategies.optional_cases, examples=ONE_KEY)
def test_backward_of_forward(backend, case):
    check_gradients_of_forward(backend, case)


# The family -----------------------------------------------------------------


@on_families
def test_forward_of(backend, family, shape, name):
    check_forward(Apart(backend), FAMILIES[family].case(shape, name))


@on_families
def test_gradients_of(backend, family, shape, name):
    check_gradients(Apart(backend), FAMILIES[family].case(shape, name))


@on_deterministic_families
def test_deterministic(backend, family, shape, name):
    """Key tiles add to dq in an order, though not all of them do."""
    made = FAMILIES[family]
    case = made.case(shape, name, deterministic=True)
    arrays = inputs(case)
    if case.offsets:
        arrays = [x[0] for x in arrays]
        first = calls.gradients(backend, case, *arrays)
    else:
        first = check_gradients(backend, case)
    for seed in range(2, 2 + made.repeats):
        other = replace(case, on=replace(case.on, seed=seed))
        again = calls.gradients(backend, other, *arrays)
        for x, a, b in zip("qkv", again, first, strict=False):
            assert_bitwise(a, b, f"d{x}")


@on_kernels
@on_wide_kinds
@pytest.mark.parametrize(
    "names", strategies.FEW_PACKED_OPTIONS, ids=lambda x: "-".join(sorted(x))
)
def test_packed_sequences(backend, kind, names):
    """One without queries, one without keys, tokens of none."""
    case = Case(
        seqlen_q=150, seqlen_k=170, num_heads_q=4, num_heads_kv=2,
        causal=True, offsets=((0, 70, 70, 90, 140), (0, 100, 130, 130, 160)),
        **fields_of(names), **KINDS[kind],
    )  # fmt: skip
    check_packed(backend, case)


HIDING = [name for name, data in TABLE.items() if data.hides]


@on_kernels
@on_kinds
@pytest.mark.parametrize("name", HIDING)
def test_masked_nan_does_not_spread(backend, kind, name):
    """NaN in a key and its value, and in a query and its dout.

    Beside capped scores with a bias, whose gradient has no slope of the cap.
    """
    spoiled = tuple((x, (0, 9), "nan") for x in ("q", "k", "v", "dout"))
    hides = {"arrays_of": (), **TABLE[name].hides}
    hides["arrays_of"] = "bias", *hides["arrays_of"]
    case = Case(seqlen_q=50, seqlen_k=50, spoiled=spoiled, softcap=2.0,
                seed=11, **hides, **KINDS[kind])  # fmt: skip
    check_forward(backend, case)
    check_gradients_of_forward(backend, case)


@on_kernels
@on_kinds
@pytest.mark.parametrize("name", HIDING)
def test_masked_scores_are_no_maximum(backend, kind, name):
    """Beside the hidden key's score all others would have no weight."""
    case = Case(seqlen_q=50, seqlen_k=50, spoiled=(("k", (0, 9), "1e4"),),
                **TABLE[name].hides, **KINDS[kind])  # fmt: skip
    check_forward(backend, case)


@on_kernels
@on_kinds
@pytest.mark.parametrize("scale", [None, 0.0])
def test_rows_without_keys_have_the_sink(backend, kind, scale):
    """Of 40 queries 24 see none of 16 keys."""
    case = Case(seqlen_q=40, causal=True, arrays_of=("sink",), scale=scale,
                **KINDS[kind])  # fmt: skip
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out[:, :24], 0, "out[:, :24]", case)
    assert_all(lse[:, :, :24], case.options()["sink"], "lse[:, :, :24]", case)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert_all(got[0][:, :24], 0, "got[0][:, :24]", case)
    assert_finite(got[0], "got[0]", case)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)
