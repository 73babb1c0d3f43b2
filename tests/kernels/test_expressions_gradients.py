"""Gradients of a user's arrays, whatever pairs of a tile share an element.

With ``deterministic=True`` they have the same bits in any order of additions.
"""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers.backends import on_kernels
from helpers.compare import assert_allclose, assert_bitwise
from helpers.data import Emulation, inputs
from helpers.variants import case_of

LENGTHS = 100, 170
FAMILIES = {
    "sm90": {"dtype": "bfloat16", "head_dim": 64},
    "sm90_wide": {"dtype": "float16", "head_dim": 256},
    "sm80": {"dtype": "bfloat16"},
    "fma": {"dtype": "float32"},
    "mma8_float32": {"dtype": "float32", "precision": "tf32x3"},
    "mma8_float64": {"dtype": "float64"},
    "simt": {"dtype": "float32"},
}
# Of the largest element: P, dP and dS have been rounded to the dtype.
ERRORS = {
    "bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-16,
    "float64": 2.0**-40,
}  # fmt: skip


def case_on(family, **more):
    asked = None if family.startswith(("mma8", "sm90")) else family
    arch = "sm_90a" if family.startswith("sm90") else "sm_80"
    on = Emulation(arch, num_sms=2, seed=1, family=asked)
    own = {"head_dim": 32, **FAMILIES[family]}
    return case_of(*LENGTHS, own.pop("head_dim"), **own, on=on, **more)


def of_all(score, b, h, q_idx, kv_idx, *, head, query, key, near, far, pair):
    distance = q_idx - kv_idx
    added = key[h, kv_idx] + near[distance + 169, h]
    clipped = far[np.clip(distance // 4, -5, 5)]
    both = pair[h % 2, (q_idx * kv_idx) % 13]
    score = (score + added) * (1 + 0.1 * query[b, q_idx // 2])
    return score * (1 + 0.1 * head[h]) + 0.5 * clipped - both


SHAPES = {
    "head": (4,), "query": (2, 50), "key": (4, 150), "near": (270, 4),
    "far": (11,), "pair": (2, 12),
}  # fmt: skip


def arrays_of(case):
    rng = np.random.default_rng(3)
    dtype = np.float64 if case.dtype == "float64" else np.float32
    return {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


def gradients_of(place, case, given, mods, score_mod, **more):
    """dmod of arrays that have out and lse too."""
    return cuflash.backward(
        *map(place, given), causal=case.causal, score_mod=score_mod,
        mod_arrays={name: place(x) for name, x in mods.items()},
        return_dmod=tuple(mods), **more,
    )[-1]  # fmt: skip


def given_of(case, mods, score_mod):
    """dout, q, k, v, out, lse: rounded, and in float64."""
    rounded = list(inputs(case))
    q, k, v, dout = (x.astype(np.float64) for x in rounded)
    out, lse = cuflash.forward(
        q, k, v, causal=case.causal, score_mod=score_mod, return_lse=True,
        mod_arrays={name: x.astype(np.float64) for name, x in mods.items()},
    )  # fmt: skip
    real = np.float64 if case.dtype == "float64" else np.float32
    dtype = rounded[0].dtype
    return [
        *(rounded[3], *rounded[:3], out.astype(dtype), lse.astype(real)),
    ], [dout, q, k, v, out, lse]


@on_kernels
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_way_to_share(backend, family, deterministic):
    case = case_on(family, causal=family not in ("fma", "sm90"))
    mods = arrays_of(case)
    given, exact = given_of(case, mods, of_all)
    want = gradients_of(
        np.asarray, case, exact,
        {name: x.astype(np.float64) for name, x in mods.items()}, of_all,
    )  # fmt: skip
    options = {"deterministic": deterministic, "precision": case.precision}
    with backend.running(case):
        got = gradients_of(backend.place, case, given, mods, of_all, **options)
        got = {name: backend.fetch(x) for name, x in got.items()}
    for name, x in want.items():
        error = ERRORS[case.dtype] * np.abs(x).max()
        assert_allclose(got[name], x, name, atol=error)
    if not deterministic:
        return
    for seed, resident in ((2, 1), (3, 3)):
        on = replace(case.on, seed=seed, resident=resident)
        with backend.running(replace(case, on=on)):
            again = gradients_of(
                backend.place, case, given, mods, of_all, **options
            )
            for name, x in again.items():
                assert_bitwise(backend.fetch(x), got[name], name)
