"""Backward on Hopper where a block has all keys of a head: OWNED_DQ.

Two blocks have two heads each. Lengths end before, at and after tiles.
"""

from dataclasses import replace

import pytest

from cuflash.plans.plan import device_of_arch, plan
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import check_gradients
from helpers.compare import assert_arrays_equal, assert_gradients_match
from helpers.data import Case, Emulation, inputs
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=3, num_sms=2)
CASE = Case("bfloat16", 1, 257, 257, 4, 4, 64, 64, on=ON)
CAUSAL = replace(CASE, causal=True)


def filling(backend, case):
    """The case; for a GPU with as many heads as it has multiprocessors."""
    if backend.name == "emulated":
        return case
    import cupy

    num_sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    return replace(case, batch=num_sms // case.num_heads_q)


@on_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_gradients(backend, head_dim, causal):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    case = replace(CASE, **dims, causal=causal)
    check_gradients(backend, filling(backend, case))


@on_kernels
@pytest.mark.parametrize("lengths", [(257, 384), (256, 256), (384, 255)])
def test_lengths(backend, lengths):
    """With one mask or the other: more queries than keys own no dQ."""
    for causal in {False, lengths[0] <= lengths[1]}:
        check_gradients(
            backend,
            replace(
                CASE, seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal
            ),
        )


@on_kernels
def test_strides_and_padded_columns(backend):
    """Also one key tile, whose parts are no sums, of several query tiles."""
    dims = {"head_dim": 60, "head_dim_v": 52, "layout": "unlike"}
    check_gradients(
        backend, replace(CAUSAL, **dims, seqlen_q=200, seqlen_k=250)
    )
    wider = {"head_dim": 100, "head_dim_v": 72, "layout": "unlike"}
    check_gradients(backend, replace(CASE, **wider, seqlen_k=128))


@on_kernels
@pytest.mark.parametrize(
    "spoiled",
    [
        (("k", (0, 200, 1, 3), "nan"), ("v", (0, 250, 3, 0), "inf")),
        (("q", (0, 130, 0, 3), "nan"), ("dout", (0, 7, 2, 9), "nan")),
    ],
)
def test_rows_are_recomputed(backend, spoiled):
    """A masked NaN reaches no row, of either head of a block."""
    case = replace(CAUSAL, spoiled=spoiled)
    q, k, v, dout = inputs(case)
    grads = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case, kinds=False)


@on_kernels
def test_deterministic_is_the_same_call(backend):
    """Additions have one order anyway."""
    case = filling(backend, CAUSAL)
    arrays = inputs(case)
    plain = calls.gradients(backend, case, *arrays)
    fixed = replace(case, deterministic=True)
    for got, want in zip(
        calls.gradients(backend, fixed, *arrays), plain, strict=True
    ):
        assert_arrays_equal(got, want, "gradient")


@pytest.mark.parametrize(
    ("owns", "changes"),
    [
        (True, {}),
        (True, {"causal": False}),
        (True, {"deterministic": True}),
        (True, {"seqlen_q": 100, "seqlen_k": 128}),
        (True, {"seqlen_q": 385}),
        # Two iterations in succession would be of the same query tile.
        (False, {"seqlen_q": 128}),
        # Some queries see no key tile.
        (False, {"seqlen_k": 500}),
        # L2 does not hold as many heads as SMs.
        (False, {"seqlen_q": 1024, "seqlen_k": 1024, "causal": False}),
        # With longer keys little is gained, or L2 holds less, than measured.
        (False, {"seqlen_k": 513}),
        (False, {"seqlen_k": 1024}),
        (False, {"seqlen_k": 8192, "causal": False}),
        # Seven SMs have a head, the others have none or two.
        (False, {"batch": 1, "num_heads_q": 7, "num_heads_kv": 7}),
        (False, {"num_heads_kv": 12}),
        (False, {"window": (30, 0)}),
    ],
)
def test_which_calls_have_whole_heads(owns, changes):
    heads = {"num_heads_q": 24, "num_heads_kv": 24}
    dims = {"head_dim": 64, "head_dim_v": 64, "batch": 18}
    lengths = {"seqlen_q": 512, "seqlen_k": 512, "causal": True}
    problem = small_problem(
        "backward", "bfloat16", **{**heads, **dims, **lengths, **changes}
    )
    kernels = plan(problem, device_of_arch("sm_90a")).kernels
    found = {dict(x.constants).get("OWNED_DQ") for x in kernels}
    assert (True in found) == owns
