"""A user's score_mod and mask_mod in each family of kernels.

Hopper's own have test_expressions_hopper.py.
"""

import numpy as np
import pytest

import cuflash
from helpers import expected
from helpers.backends import on_kernels, on_kernels_of
from helpers.compare import assert_allclose, assert_forward_matches
from helpers.data import Emulation, inputs
from helpers.variants import (
    REACH,
    VARIANTS,
    case_of,
    check_forward,
    check_gradients,
    sequences,
    shape_of,
)

FAMILIES = {
    "sm80": {"dtype": "bfloat16"},
    "fma": {"dtype": "float32"},
    "mma8_float32": {"dtype": "float32", "precision": "tf32x3"},
    "mma8_float64": {"dtype": "float64"},
    "simt": {"dtype": "float32"},
}


def case_on(family, seqlen_q=100, seqlen_k=None, **more):
    """A case whose kernels are a family's where it is emulated."""
    asked = None if family.startswith("mma8") else family
    # simt has all variants, and its tiles are small.
    seqlen_k = seqlen_k or (120 if family == "simt" else 170)
    on = Emulation("sm_80", num_sms=2, seed=1, family=asked)
    return case_of(seqlen_q, seqlen_k, 32, **FAMILIES[family], on=on, **more)


EACH = [(x, y) for x in FAMILIES for y in ("relative", "capped odd")]
EACH += [("simt", x) for x in VARIANTS if (("simt", x) not in EACH)]
EACH += [("fma", "documents"), ("sm80", "windows"), ("fma", "late")]


@on_kernels
@pytest.mark.parametrize(("family", "name"), EACH)
def test_forward(backend, family, name):
    check_forward(backend, case_on(family), VARIANTS[name])


@on_kernels
@pytest.mark.parametrize(("family", "name"), EACH)
def test_gradients(backend, family, name):
    differs = name in ("decay", "documents", "windows")  # by batch
    case = case_on(family, batch=1 + differs)
    check_gradients(backend, case, VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("name", ["relative", "documents", "windows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decoding(backend, dtype, name):
    family = {"bfloat16": "decode", "float32": "decode_simt"}[dtype]
    on = Emulation("sm_80", num_sms=2, seed=1, family=family)
    case = case_of(2, 600, 32, dtype=dtype, on=on)
    check_forward(backend, case, VARIANTS[name])


@on_kernels_of(family=[*FAMILIES])
def test_key_tiles_add_to_dq_in_order(backend, family):
    case = case_on(family, deterministic=True, causal=True)
    check_gradients(backend, case, VARIANTS["windows"])


# Gradients of arrays --------------------------------------------------------


def table_gradient(dbias, columns):
    """The gradient of the table of "relative" from that of its bias."""
    batch, heads, queries, keys = dbias.shape
    _, h, q, k = np.ogrid[:batch, :heads, :queries, :keys]
    column = q - k + REACH
    column = np.where(column < 0, column + columns, column)
    inside = (column >= 0) & (column < columns)
    sums = np.zeros((heads, columns + 1))
    np.add.at(
        sums, np.broadcast_arrays(h, np.where(inside, column, columns)), dbias
    )
    return sums[:, :-1]


@on_kernels_of(family=[*FAMILIES])
def test_gradients_of_arrays(backend, family):
    case = case_on(family, causal=family != "fma")
    (found,), want = check_gradients(
        backend, case, VARIANTS["relative"], return_dmod=("table",)
    )
    dtable = table_gradient(want[3].ref, 2 * REACH)
    # A sum of hundreds of dS, in which P, dP and delta have been rounded to
    # the dtype: each by its unit roundoff.
    unit = {"bfloat16": 2.0**-9, "float32": 2.0**-20, "float64": 2.0**-20}
    bound = 4 * unit[case.dtype] * np.abs(dtable).max()
    got = backend.fetch(found["table"])
    assert_allclose(got, dtable, "dtable", atol=bound)


@on_kernels
def test_gradient_of_an_array_with_one_axis(backend):
    """No pair reads it, as it is constant in a batch; each adds to it."""
    case = case_on("fma")
    (found,), want = check_gradients(
        backend, case, VARIANTS["decay"], return_dmod=("rate",)
    )
    _, h, _, k = np.ogrid[tuple(map(slice, shape_of(case)))]
    terms = want[3].ref * -(h + 1.0) * (case.seqlen_k - k)
    drate = terms.sum((1, 2, 3))
    # dS is a difference of float32 numbers, each rounded a few times.
    bound = 2.0**-18 * np.abs(terms).sum((1, 2, 3)).max()
    got = backend.fetch(found["rate"])
    assert_allclose(got, drate, "drate", atol=bound)


# Numbers --------------------------------------------------------------------


def capped_at(score, b, h, q_idx, kv_idx, *, cap):
    return cap * np.tanh(score / cap)


@on_kernels
def test_a_number_is_read_at_each_call(backend):
    case = case_on("simt", seqlen_q=20, seqlen_k=20)
    q, k, v, _ = (backend.place(x) for x in inputs(case))
    with backend.running(case):
        for cap in (2.0, 0.5):
            found = cuflash.forward(
                q, k, v, score_mod=capped_at, mod_arrays={"cap": cap}
            )
            same = cuflash.forward(q, k, v, softcap=cap)
            found, same = map(backend.fetch, (found, same))
            assert_allclose(found, same, "out", atol=2.0**-18)


# Packed sequences -----------------------------------------------------------

OFFSETS = (0, 40, 40, 140, 157), (0, 60, 65, 155, 170)


def alike(b, h, q_idx, kv_idx, *, ids):
    return (q_idx >= kv_idx - 30) & (ids[b, q_idx] == ids[b, kv_idx])


def shifted(score, b, h, q_idx, kv_idx, *, rate, seqlen_k):
    return score + rate[b, h] * (kv_idx - seqlen_k)


@on_kernels_of(family=[*FAMILIES])
def test_packed_sequences_are_batches(backend, family):
    case = case_on(family, 160, 170, batch=1)
    q, k, v, _ = inputs(case)
    rng = np.random.default_rng(2)
    mods = {
        "ids": np.arange(170) // 25 + np.zeros((4, 1), np.int64),
        "rate": 0.1 * rng.standard_normal((4, 4), np.float32),
    }
    offsets = {
        f"cu_seqlens_{x}": np.array(y, np.int32)
        for x, y in zip("qk", OFFSETS, strict=True)
    }
    functions = {
        "score_mod": shifted, "mask_mod": alike, "precision": case.precision,
    }  # fmt: skip

    placed = {x: backend.place(y) for x, y in (mods | offsets).items()}
    options = {x: placed.pop(x) for x in offsets}
    with backend.running(case):
        got = cuflash.forward(
            *(backend.place(x[0]) for x in (q, k, v)), **functions, **options,
            mod_arrays=placed, return_lse=True,
        )  # fmt: skip
    out, lse = map(backend.fetch, got)
    for s, (i, j) in enumerate(zip(*map(sequences, OFFSETS), strict=True)):
        if i.start == i.stop:
            continue
        b, h, x, y = np.ogrid[:1, :4, : i.stop - i.start, : j.stop - j.start]
        own = {name: a[s : s + 1] for name, a in mods.items()}
        bias = shifted(
            0, b, h, x, y, rate=own["rate"].astype(np.float64),
            seqlen_k=y.size,
        )  # fmt: skip
        mask = alike(b, h, x, y, ids=own["ids"])
        shape = 1, 4, x.size, y.size
        want = expected.forward(
            q[:, i], k[:, j], v[:, j], bias=np.broadcast_to(bias, shape),
            mask=np.broadcast_to(mask, shape),
        )  # fmt: skip
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)
