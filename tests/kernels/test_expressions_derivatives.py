"""jvp and double_backward with a user's score and mask."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers.backends import BACKENDS, on_kernels
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import assert_near, tangents
from helpers.expression_derivatives import MOVING, Call

ON = Emulation("sm_80", seed=3, num_sms=2)
CASE = Case(
    batch=2, seqlen_q=37, seqlen_k=51, num_heads_q=4, num_heads_kv=2,
    head_dim=24, head_dim_v=12, layout="unlike", seed=3, on=ON,
)  # fmt: skip
FAMILIES = {
    "sm80": {"dtype": "bfloat16"},
    "fma": {"dtype": "float32"},
    "mma8_float32": {"dtype": "float32", "precision": "tf32x3"},
    "mma8_float64": {"dtype": "float64"},
    "roles": {"dtype": "float64", "head_dim": 64, "head_dim_v": 64},
    "simt": {"dtype": "float32", "on": replace(ON, family="simt")},
    "Hopper": {"dtype": "float16", "on": replace(ON, arch="sm_90a")},
}
# With what comes before f, and masks beside.
OPTIONS = {
    "softcap": 2.0, "causal": True, "dropout": 0.25,
    "arrays_of": ("alibi_slopes", "bias", "sink"),
}  # fmt: skip
each_family = pytest.mark.parametrize("family", FAMILIES)
each_options = pytest.mark.parametrize(
    "options", [{}, OPTIONS], ids=["alone", "with others"]
)


def call_of(family, moving=None, **options):
    case = replace(CASE, **FAMILIES[family] | options)
    return Call(case) if moving is None else Call(case, moving)


def check_jvp(backend, call):
    assert_near(call.jvp(backend), call.expected_jvp(), call.case)


def check_double_backward(backend, call, **more):
    got = call.double_backward(backend, **more)
    assert_near(got, call.expected_double_backward(), call.case)


@pytest.mark.parametrize("backend", BACKENDS)
@each_family
@each_options
def test_jvp(backend, family, options):
    check_jvp(backend, call_of(family, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@each_family
@each_options
def test_double_backward(backend, family, options):
    check_double_backward(backend, call_of(family, **options))


@on_kernels
@pytest.mark.parametrize("moving", [("q",), ("v",), ("table",), ("gain",)])
def test_one_that_moves(backend, moving):
    call = call_of("fma", moving)
    check_jvp(backend, call)
    check_double_backward(backend, call)


@on_kernels
@pytest.mark.parametrize(
    ("moving", "options"),
    [(("q", "k", "v", *MOVING), {"scale": -0.3}), (("gain",), {}),
     (("q", "table"), {"causal": True, "head_dim_v": 128})],
)  # fmt: skip
def test_jvp_of_a_score_alone_on_hopper(backend, moving, options):
    """By wgmma: tiles of 128 queries, of which some are past the end."""
    case = {"seqlen_q": 150, "seqlen_k": 170, "head_dim": 64, **options}
    case = {"head_dim_v": 64, "layout": "contiguous"} | case
    call = call_of("Hopper", moving, **case)
    del call.functions["mask_mod"]
    check_jvp(backend, call)


def capped(score, b, h, q_idx, kv_idx):
    return 0.5 * score + 3.0 * np.tanh(score / 4)


@on_kernels
@pytest.mark.parametrize("scale", [0.05, 0.125, -0.6])
def test_jvp_of_small_and_large_scores_on_hopper(backend, scale):
    """A warp's tanh is a polynomial, or not; at -0.6 scores reach 20."""
    case = replace(
        CASE, **FAMILIES["Hopper"], seqlen_q=193, head_dim=64, head_dim_v=64,
        layout="contiguous", scale=scale,
    )  # fmt: skip
    check_jvp(backend, Call(case, ("q", "k", "v"), capped))


@on_kernels
@pytest.mark.parametrize("family", ["sm80", "fma", "simt"])
def test_sums_in_order(backend, family):
    """d2mod has the same bits in each run, in whatever order blocks run."""
    call = call_of(family)
    check_double_backward(backend, call, deterministic=True)
    first, other = (
        Call(replace(call.case, on=replace(call.case.on, seed=seed)))
        .double_backward(backend, deterministic=True)
        for seed in (3, 4)
    )  # fmt: skip
    for name in ("q", *MOVING):
        assert_bitwise(first[name], other[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["sm80", "fma", "mma8_float64"])
def test_directions(backend, family):
    """Three at once, in blocks of two and one, are those alone."""
    call = call_of(family)
    alone, several = [], call_of(family)
    for factor in (1.0, -2.0, 0.5):
        own = call_of(family)
        for moves in own.direction, own.dots:
            for name, x in moves.items():
                moves[name] = (x * factor).astype(x.dtype)
        alone.append(own)
    for name in ("direction", "dots"):
        each = [getattr(x, name) for x in alone]
        stacked = {x: np.stack([y[x] for y in each]) for x in each[0]}
        setattr(several, name, stacked)
    got = several.jvp(backend)
    assert got["lse_dot"].shape == (3, *got["lse"].shape)
    for i, own in enumerate(alone):
        want = own.expected_jvp()
        found = {x: got[x][i] for x in ("out_dot", "lse_dot")}
        assert_near(found, {x: want[x] for x in found}, call.case)


def shifted(score, b, h, q_idx, kv_idx, *, rate, seqlen_k):
    return score * (1 + rate[b, h] * (kv_idx - seqlen_k) / 64)


def packed_derivatives(place, arrays, rates, **more):
    """Return out_dot, d2q and d2rate of q, k, v, dout and tangents of three.

    out and lse are float64's, so that all have the same.
    """
    q, k, v, dout, *dots = arrays
    mods, moved = ({"rate": place(x)} for x in rates)
    wide = [x.astype(float) for x in (q, k, v)]
    own = {x: y for x, y in more.items() if x.startswith("cu")}
    of_rates = {"score_mod": shifted, "mod_arrays": {"rate": rates[0] * 1.0}}
    out, lse = cuflash.forward(*wide, **of_rates, **own, return_lse=True)
    results = out.astype(q.dtype), lse.astype(rates.dtype)
    given = [*map(place, (q, k, v))]
    placed = {x: place(y) for x, y in own.items()}
    functions = {"score_mod": shifted, "mod_arrays": mods, **placed}
    dots = [*map(place, dots)]
    _, out_dot = cuflash.jvp(*given, *dots, **functions, mod_dots=moved)
    d2q, _, _, _, d2mod = cuflash.double_backward(
        *dots, place(dout), *given, *map(place, results), **functions,
        ddmods=moved, return_d2mod=("rate",),
    )  # fmt: skip
    return out_dot, d2q, d2mod["rate"]


@on_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_packed_sequences_are_batches(backend, dtype):
    """Of lengths about a tile's: each has its own rate, and direction."""
    ends = np.cumsum([0, 31, 32, 33, 1]).astype(np.int32)
    case = replace(CASE, batch=1, seqlen_q=97, seqlen_k=97, dtype=dtype,
                   layout="contiguous")  # fmt: skip
    arrays = [x[0] for x in (*inputs(case), *tangents(case).values())]
    rates = np.random.default_rng(4).standard_normal((2, 4, 4))
    rates = rates.astype(np.float64 if dtype == "float64" else np.float32)
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    with backend.running(case):
        got = packed_derivatives(backend.place, arrays, rates, **offsets)
    own = zip(ends, ends[1:], np.split(rates, 4, axis=1), strict=False)
    alone = [
        packed_derivatives(
            lambda x: x.astype(float), [x[i:j] for x in arrays], rate
        )
        for i, j, rate in own
    ]
    want = [np.concatenate(x) for x in zip(*alone, strict=True)]
    names = "out_dot", "d2q", "d2rate"
    found = map(backend.fetch, got)
    assert_near(
        dict(zip(names, found, strict=True)),
        dict(zip(names, want, strict=True)), case,
    )  # fmt: skip
