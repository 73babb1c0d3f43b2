"""The bounds of derivatives in docs/guide/accuracy.md hold and are not loose.

They are reached, within a factor of ten, by inputs whose sums lose all terms
but one, as in test_error_bounds.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import strategies
from cuflash.check.bounds import ARITHMETIC, derivative_bounds
from helpers import derivative_error_bounds as bounds
from helpers.backends import BACKENDS, CUPY, EMULATED, NUMPY, on_kernels
from helpers.calls import forward
from helpers.compare import assert_at_most
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import call_double_backward, call_jvp, tangents
from helpers.drawn import on_each_backend
from helpers.heads import heads_first, sum_groups

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63,
    reason="exact results of float64 need a longer type",
)
KINDS = {
    "fma": {"dtype": "float32"},
    "tf32x3": {"dtype": "float32", "precision": "tf32x3"},
    "dmma": {"dtype": "float64"},
    "simt": {"dtype": "float64", "on": Emulation("sm_75")},
}
HEADS, TERMS = 8, 128  # TERMS: of most sums
TILE = 32  # keys, few enough that a kernel adds most of them up at once
HEAD_DIM = 32  # one for all, since each is a kernel to compile


def results_of(backend, case, q, k, v, dout, direction):
    """Return the results of both calls, by name, heads first.

    direction : tangents of q, k and v; double_backward's are cotangents.
    """
    moves = dict(zip("qkv", direction, strict=True))
    given = {"q": q, "k": k, "v": v}
    *_, out_dot, lse_dot = call_jvp(case, moves, backend, **given)
    out, lse = forward(backend, case, q, k, v)
    given |= {"dout": dout, "out": out, "lse": lse, "dlse": None}
    second = call_double_backward(case, moves, backend, **given)
    found = {f"d2{x}": heads_first(second[x]) for x in "qkv"}
    found |= {"out_dot": heads_first(out_dot), "lse_dot": lse_dot}
    return found | {
        "ddout": heads_first(second["out"]),
        "ddlse": second["lse"],
    }


def is_relative(backend, case):
    """Whether jvp's kernel subtracts a reference from W: not mma8's."""
    if backend.name == "numpy":
        return True
    if case.dtype == "float64":
        return backend.name == "emulated" and case.on == KINDS["simt"]["on"]
    return case.precision is None


def exact_and_bounds(case, relative, *arrays):
    """Return the exact results by name, each with its bound."""
    *arrays, direction = arrays
    q, k, v, dout, *direction = (
        heads_first(x, case.num_heads_q).astype(np.longdouble)
        for x in (*arrays, *direction)
    )
    scale = case.scale or q.shape[-1] ** -0.5
    x = bounds.exact_derivatives(
        dout, q, k, v, direction, scale=scale, causal=case.causal
    )
    arithmetic = ARITHMETIC[case.precision or case.dtype]
    group = case.num_heads_q // case.num_heads_kv
    most = derivative_bounds(x, arithmetic, group, relative)
    pairs = [*zip(bounds.results(x), most, strict=True)]
    for n in (3, 4):
        pairs[n] = [sum_groups(y, case.num_heads_kv) for y in pairs[n]]
    names = "out_dot", "lse_dot", "d2q", "d2k", "d2v"
    found = dict(zip(names, pairs, strict=True))
    return found | {"ddout": found["out_dot"], "ddlse": found["lse_dot"]}


def errors_and_bounds(backend, case, *arrays):
    """Return, by name, the errors of both calls' results and their bounds."""
    wanted = exact_and_bounds(case, is_relative(backend, case), *arrays)
    return {
        name: (np.abs(got - wanted[name][0]), wanted[name][1])
        for name, got in results_of(backend, case, *arrays).items()
    }


def assert_bounded(backend, case, *arrays):
    found = errors_and_bounds(backend, case, *arrays)
    for name, (error, most) in found.items():
        assert_at_most(error, most, name, case)


def arrays_of(case):
    """Return q, k, v, dout and the direction of a case."""
    return *inputs(case), tuple(tangents(case, "qkv").values())


# They hold -------------------------------------------------------------------


class Call(NamedTuple):
    """A case; factors of q and of all tangents, and what all keys share."""

    case: Case
    q: float
    moves: float
    k_dot: float
    v: float


@st.composite
def calls(draw, backend, kind):
    """Draw shapes and magnitudes; every query sees a key."""
    seqlen_k = draw(st.integers(1, 140))
    group = draw(st.sampled_from([1, 3]))
    emulated = backend.name == "emulated"
    dims = st.sampled_from([7, HEAD_DIM]) if emulated else st.integers(1, 72)
    case = Case(
        batch=1, seqlen_q=draw(st.integers(1, seqlen_k)), seqlen_k=seqlen_k,
        num_heads_q=group, num_heads_kv=1, head_dim=draw(dims),
        head_dim_v=draw(dims), causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, -0.3])),
        seed=draw(st.integers(0, 2**32 - 1)),
        values=draw(st.sampled_from(strategies.VALUES)), **KINDS[kind],
    )  # fmt: skip
    powers = [st.integers(-6, n) for n in (1, 10, 10, 10)]
    return Call(case, *(2.0 ** draw(x) for x in powers))


def check(backend, call):
    q, k, v, dout, direction = arrays_of(call.case)
    real = q.dtype.type
    q_dot, k_dot, v_dot = (x * real(call.moves) for x in direction)
    direction = q_dot, k_dot + real(call.k_dot), v_dot
    q, v = q * real(call.q), v + real(call.v)
    assert_bounded(backend, call.case, q, k, v, dout, direction)


@on_each_backend(calls, each={"kind": KINDS}, backends=[EMULATED, CUPY])
def test_bounds_hold(backend, case):
    check(backend, case)


@on_each_backend(calls, each={"kind": ["fma", "dmma"]}, backends=[NUMPY])
def test_bounds_hold_on_numpy(backend, case):
    check(backend, case)


@on_kernels
def test_bounds_hold_of_wide_heads(backend):
    """simt's tiles have 4 keys here."""
    case = Case("float64", 1, 19, 50, 1, 1, 96, 96, on=Emulation("sm_75"))
    assert_bounded(backend, case, *arrays_of(case))


@pytest.mark.parametrize("common", [16, 1000])
@pytest.mark.parametrize("kind", ["fma", "simt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_keys_share_costs_nothing(backend, kind, common):
    """W is one number a row and cancels: only its own roundings count.

    They are few, with a head_dim of 1. Values of one sign and weights that
    are equal would let each sum over the keys err in one direction.
    """
    case = Case(
        batch=1, seqlen_q=40, seqlen_k=130, num_heads_q=2, num_heads_kv=2,
        head_dim=1, head_dim_v=HEAD_DIM, **KINDS[kind],
    )  # fmt: skip
    q, k, v, dout, _ = arrays_of(case)
    v[:] = abs(v[:, :1])
    direction = 0 * q, np.full_like(k, common), 0 * v
    assert_bounded(backend, case, q, 0 * k, v, dout, direction)


@on_kernels
def test_parts_at_their_worst(backend):
    """Numbers with the largest possible low parts, all of one sign."""
    case = Case("float32", 1, 60, 70, 1, 1, 32, 32, precision="tf32x3")
    *arrays, direction = arrays_of(case)
    arrays, direction = (
        [
            np.ldexp(np.float32(1 + 2.0**-11 - 2.0**-23), np.frexp(x)[1])
            for x in some
        ]
        for some in (arrays, direction)
    )
    arrays[0] *= np.float32(2.0**-6)
    assert_bounded(backend, case, *arrays, direction)


@pytest.mark.parametrize(("keys", "d"), [(130, 32), (5, 8), (60, 80)])
def test_one_number_bounds_a_whole_array(keys, d):
    """The page's formulas of lse_dot and out_dot."""
    case = Case("float64", seqlen_q=keys, seqlen_k=keys, head_dim=d)
    q, k, v, dout, direction = arrays_of(case)
    q, k, v, dout, *direction = map(heads_first, (q, k, v, dout, *direction))
    x = bounds.exact_derivatives(
        dout, q, k, v, direction, scale=d**-0.5, causal=False
    )
    u, n, t = 2.0**-53, keys, -(-keys // (4 if d > 64 else 16))
    a, w = (
        d**-0.5 * sum(abs(y) @ abs(z).swapaxes(2, 3) for y, z in some).max()
        for some in ([(q, k)], [(x.q_dot, k), (q, x.k_dot)])
    )
    ends, size, v_dot = (abs(y).max() for y in (x.lse, v, x.v_dot))
    apart = (x.highest - x.lowest).max()
    lse_dot = 2 * d * a + 24 * a + 2 * n + 12 * t + 10 * ends + 12
    lse_dot = apart * lse_dot + w * (2 * d + 3)
    out_dot = 6 * d * a + 72 * a + 7 * n + 36 * t + 20 * ends + 36
    out_dot = apart * out_dot + w * (4 * d + 4)
    of_v = 2 * d * a + 24 * a + 3 * n + 12 * t + 10 * ends + 11
    most = derivative_bounds(x, ARITHMETIC["float64"])
    assert most[1].max() <= u * lse_dot
    assert most[0].max() <= u * (size * out_dot + v_dot * of_v)


# Inputs that reach them ------------------------------------------------------


def one_and_many(unit, array):
    """Fill with u, except for one token of each head."""
    array[:] = unit
    for head in range(HEADS):
        array[:, array.shape[1] // HEADS * head, head] = 1


def signs(array):
    """Fill the first column with alternating 1 and -1."""
    array[..., 0] = 1
    array[:, 1::2, :, 0] = -1


def lost_in_lse_dot(u, q, k, v, dout, q_dot, k_dot, v_dot):
    """One key, whose W is a sum."""
    q_dot[:], k[:] = 2.0**-12, u * 2.0**12
    q_dot[..., 0] = k[..., 0] = 1


def lost_in_out_dot(u, q, k, v, dout, q_dot, k_dot, v_dot):
    one_and_many(u, v_dot)


def lost_in_d2q(u, q, k, v, dout, q_dot, k_dot, v_dot):
    """All P are equal, W is 0; dP and the signs of k_dot alternate."""
    signs(v)
    dout[..., 0] = 1
    one_and_many(u, k_dot)
    k_dot[:, 1::2] *= -1


def lost_in_d2k(u, q, k, v, dout, q_dot, k_dot, v_dot):
    """P is 1 / 2, W is 0; dP is 1 and -1."""
    signs(v)
    dout[..., 0] = 1
    one_and_many(u, q_dot)


def lost_in_d2v(u, q, k, v, dout, q_dot, k_dot, v_dot):
    """P is 1 / 2; W is 1 and -1."""
    signs(k)
    q_dot[..., 0] = 1
    one_and_many(u, dout)


@pytest.mark.parametrize(
    ("fill", "seqlen_q", "seqlen_k"),
    [
        (lost_in_lse_dot, 1, 1),
        (lost_in_out_dot, 1, TERMS),
        (lost_in_d2q, 1, TILE),
        (lost_in_d2k, TERMS, 2),
        (lost_in_d2v, TERMS, 2),
    ],
    ids=["lse_dot", "out_dot", "d2q", "d2k", "d2v"],
)
@pytest.mark.parametrize("kind", ["fma", "dmma", "simt"])
@pytest.mark.parametrize("backend", [EMULATED])
def test_bounds_are_reached(backend, kind, fill, seqlen_q, seqlen_k):
    """Emulated only: BLAS and tensor cores sum in unknown orders."""
    case = Case(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=HEADS,
        num_heads_kv=HEADS, head_dim=HEAD_DIM, scale=1.0, **KINDS[kind],
    )  # fmt: skip
    *arrays, direction = arrays_of(case)
    for x in (*arrays, *direction):
        x[:] = 0
    fill(ARITHMETIC[case.dtype].unit, *arrays, *direction)
    found = errors_and_bounds(backend, case, *arrays, direction)
    name = fill.__name__.removeprefix("lost_in_")
    error, most = found[name]
    assert_at_most(error, most, name, case)
    assert (10 * error >= most).any()
