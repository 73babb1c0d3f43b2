"""jvp of 16-bit calls without options on Hopper: sm90/jvp.cu."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans import sm90_jvp
from cuflash.plans.kernel import Launch
from cuflash.plans.plan import device_of_arch, plan
from helpers.apart import Apart
from helpers.backends import EMULATED, on_kernels
from helpers.checks import check_jvp
from helpers.compare import (
    assert_bitwise,
    assert_elements,
    assert_matches,
)
from helpers.data import Case, Emulation
from helpers.derivatives import (
    assert_near,
    call_jvp,
    exact_jvp,
    expected_jvp,
    tangents,
)
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=5)
PLAIN = Case("bfloat16", 2, 150, 200, 4, 2, 64, 64, layout="unlike", on=ON)
# One group: a launch takes half of the time.
SMALL = replace(PLAIN, num_heads_q=2, num_heads_kv=1)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_plain_calls_have_a_kernel_of_their_own(head_dim):
    problem = small_problem("jvp", "bfloat16", head_dim)
    files = [x.file for x in plan(problem, device_of_arch("sm_90a")).kernels]
    assert files == ["sm90/jvp.cu", "simt/jvp.cu"]


@on_kernels
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "causal"),
    [(64, 64, False), (128, 128, True), (40, 72, True), (96, 64, False)],
)
def test_is_the_references(backend, head_dim, head_dim_v, causal):
    case = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v,
                   causal=causal)  # fmt: skip
    check_jvp(Apart(backend), case, tangents(case))


@on_kernels
@pytest.mark.parametrize("moving", ["q", "k", "v", "qv"])
def test_some_inputs_move(backend, moving):
    case = replace(SMALL, dtype="float16", causal=True)
    check_jvp(backend, case, tangents(case, moving))


@on_kernels
@pytest.mark.parametrize("scale", [None, -(2.0**-5)])
def test_what_keys_have_in_common_costs_no_accuracy(backend, scale):
    """As in test_jvp.py, of 38,400 elements."""
    case = replace(SMALL, dtype="float16", causal=True, scale=scale)
    errors = []
    for common in 0, 16:
        direction = tangents(case, "k")
        k = direction["k"].astype(np.float64)
        direction["k"] = (k + common * k[:, :1]).astype(np.float16)
        *_, got, _ = call_jvp(case, direction, backend)
        error = got - exact_jvp(case, direction)["out_dot"]
        errors.append(np.sqrt((error**2).mean()))
    assert errors[1] < 1.25 * errors[0]


@on_kernels
@pytest.mark.parametrize("seqlens", [(1, 300), (300, 40), (129, 64)])
def test_lengths_that_no_tile_divides(backend, seqlens):
    """With fewer keys than queries, the first rows see none."""
    case = replace(PLAIN, seqlen_q=seqlens[0], seqlen_k=seqlens[1],
                   causal=True)  # fmt: skip
    check_jvp(backend, case, tangents(case))


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_finite_rows_are_not_flagged(backend, head_dim, monkeypatch):
    """Of any direction: nothing is missing without the recomputing kernel."""
    monkeypatch.setattr(
        sm90_jvp, "recompute_launch", lambda kernel, *_: Launch(kernel, 0)
    )
    case = replace(SMALL, seqlen_q=83, head_dim=head_dim, head_dim_v=head_dim)
    three = tangents(case, count=3)
    *_, out_dot, _ = call_jvp(case, three, backend)
    for n in range(3):
        one = {name: x[n] for name, x in three.items()}
        want, _ = expected_jvp(case, one)
        assert_matches(out_dot[n], want, "out_dot", case)


@on_kernels
@pytest.mark.parametrize("batch", [1, 2])
def test_directions(backend, batch):
    """A direction counts as a batch, whatever the strides are."""
    case = replace(SMALL, batch=batch, block_k=64)
    directions = tangents(case, "qkv", count=3)
    k = directions["k"]
    directions["k"] = np.moveaxis(np.moveaxis(k, 0, 1).copy(), 1, 0)
    *_, out_dot, lse_dot = call_jvp(case, directions, backend)
    for n in range(3):
        own = {name: x[n] for name, x in directions.items()}
        wanted = call_jvp(case, own, backend)
        for got, want in zip((out_dot, lse_dot), wanted[-2:], strict=True):
            assert_bitwise(np.ascontiguousarray(got[n]), want, str(n))


@on_kernels
@pytest.mark.parametrize(
    ("head_dim", "causal"), [(64, True), (64, False), (32, True), (128, True)]
)
def test_two_directions_are_the_references(backend, head_dim, causal):
    """In tiles of their own."""
    case = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim,
                   causal=causal)  # fmt: skip
    two = tangents(case, count=2)
    *_, out_dot, lse_dot = call_jvp(case, two, backend)
    for n in range(2):
        one = {name: x[n] for name, x in two.items()}
        for name, got, want in zip(("out_dot", "lse_dot"),
                                   (out_dot[n], lse_dot[n]),
                                   expected_jvp(case, one),
                                   strict=True):  # fmt: skip
            assert_matches(got, want, name, case)


@on_kernels
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_nan_of_a_masked_key_is_not_read(backend, name):
    """Its tiles hold rows that do not see it: simt/jvp.cu computes those."""
    case = replace(SMALL, head_dim=40, head_dim_v=72, causal=True)
    direction = tangents(case, "qkv")
    direction[name][0, 120, :, -1] = direction[name][1, 197, :, -1] = np.nan
    *_, out_dot, lse_dot = call_jvp(case, direction, Apart(backend))
    *_, wanted, of_lse = call_jvp(case, direction)
    got = {"out_dot": out_dot, "lse_dot": lse_dot}
    assert_near(got, {"out_dot": wanted, "lse_dot": of_lse}, case)
    assert np.isnan(wanted).any() and not np.isnan(wanted).all()


@on_kernels
@pytest.mark.parametrize("size", ["1.25", "1.5"])
def test_equal_scores_far_below_0(backend, size):
    """-2^39 times `size`: their exponents are rounded by more than 2^10.

    So 2 to the power of what remains is 0 or infinite. Of these queries alone
    simt/jvp.cu computes rows: not the first ones of its tiles, the last ones.
    """
    of_k = str(-float(size) * 2**18)
    far = [("q", (0, i), str(2.0**18)) for i in (20, 60, 149)]
    spoiled = ("q", (0,), "0"), *far, ("k", (0,), of_k)
    case = replace(SMALL, batch=1, causal=True, spoiled=spoiled)
    check_jvp(backend, case, tangents(case, "v"))


@on_kernels
@pytest.mark.parametrize("nth", [0, 1])
def test_a_nan_of_a_masked_key_is_in_one_direction(backend, nth):
    case = replace(SMALL, batch=1, causal=True)
    two = tangents(case, "qkv", count=2)
    wanted = call_jvp(case, two, backend)
    two["v"][nth, 0, 120] = np.nan
    got = call_jvp(case, two, backend)
    assert_bitwise(got[2][1 - nth], wanted[2][1 - nth], "the other")
    reads = np.arange(150) + 50 >= 120
    finite = np.isfinite(got[2][nth, 0].astype("f4"))
    assert_elements(finite, ~reads[:, None, None], "finite")
