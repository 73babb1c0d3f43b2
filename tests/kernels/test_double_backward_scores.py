"""double_backward with a user's score on Hopper: sm90/double_backward.cu."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.expressions import trace
from cuflash.plans import sm90_double_backward
from cuflash.plans.kernel import Launch
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import Tangents
from helpers.backends import EMULATED, on_kernels
from helpers.data import Case, Emulation
from helpers.derivatives import assert_near
from helpers.expression_derivatives import Call
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=5)
CASE = Case("float16", 1, 65, 130, 4, 2, 64, 64, on=ON)


def sloped(score, b, h, q_idx, kv_idx):
    return score - np.exp2(-(h + 1.0)) * (q_idx - kv_idx)


def squared(score, b, h, q_idx, kv_idx):
    return score + 0.02 * (h + 1) * score * score


def capped(score, b, h, q_idx, kv_idx):
    """Not divided by 20: that would be a softcap, which is an option."""
    return 20.0 * np.tanh(0.05 * score)


def far(score, b, h, q_idx, kv_idx):
    """Scores that are exact, of which lse loses digits."""
    return score + 3e5


def of_visible(score, b, h, q_idx, kv_idx):
    """f and its slope are NaN where a causal mask hides the pair."""
    near = np.log(1.0 + q_idx - kv_idx) * np.tanh(score)
    return score * np.sqrt(q_idx - kv_idx + 1.0) + near


def of_arrays(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
    """The same past the arrays' ends."""
    ends = np.sqrt(seqlen_q - q_idx - 0.5) + np.log(seqlen_k - kv_idx - 0.5)
    return score + 0.1 * ends * np.tanh(score)


def check(backend, score, moving=("q", "k", "v"), arrays=(), **more):
    call = Call(replace(CASE, **more), moving, score, **dict(arrays))
    got = call.double_backward(backend)
    assert_near(got, call.expected_double_backward(), call.case)


def _files(**more):
    problem = small_problem("double_backward", "bfloat16", 64, **more)
    return [x.file for x in plan(problem, device_of_arch("sm_90a")).kernels]


def test_a_score_has_a_kernel_of_its_own():
    """Unless its arrays move or have second gradients."""
    score, _ = trace.record(capped, "score_mod", trace.Given())
    assert _files(score_mod=score, causal=True) == [
        "prepare/lse_rests.cu",
        "prepare/second_rows.cu",
        "sm90/double_backward.cu",
        "finish/dq.cu",
        "simt/double_backward_dkdv.cu",
        "simt/double_backward_dq.cu",
    ]
    of = Tangents(("q", "mod_arrays[0]"))
    for more in {"return_dmod": (0,)}, {"tangents": of}, {"softcap": 2.0}:
        assert "sm80/double_backward.cu" in _files(score_mod=score, **more)


@on_kernels
@pytest.mark.parametrize(
    ("score", "more"),
    [
        (sloped, {"batch": 2, "seqlen_q": 64, "seqlen_k": 63}),
        (squared, {"causal": True, "scale": -0.125}),
        (squared, {"head_dim_v": 128, "deterministic": True}),
        (capped, {"head_dim": 128, "head_dim_v": 128, "causal": True}),
        (far, {"values": "halves", "causal": True}),
    ],
)  # fmt: skip
def test_is_the_references(backend, score, more):
    check(backend, score, **more)


@pytest.mark.parametrize("backend", [EMULATED])  # a GPU has no grid of 0
@pytest.mark.parametrize("score", [of_visible, of_arrays])
def test_scores_of_masked_pairs_are_not_read(backend, score, monkeypatch):
    """No tile is flagged: the kernels that compute these anew do not run."""
    monkeypatch.setattr(
        sm90_double_backward,
        "recompute_launch",
        lambda kernel, *_: Launch(kernel, 0),
    )
    more = {"seqlen_q": 129, "seqlen_k": 129, "causal": score is of_visible}
    check(backend, score, **more)


def near(score, b, h, q_idx, kv_idx, *, steps, factors):
    """It reads 0 past the ends of steps."""
    bent = factors[q_idx, kv_idx] * np.tanh(score)
    return score + steps[h, q_idx - kv_idx + 60] + bent


@on_kernels
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_read_arrays(backend, causal):
    rng = np.random.default_rng(3)
    sizes = {"steps": (4, 110), "factors": (65, 130)}
    arrays = {
        x: rng.uniform(-1, 1, size).astype(np.float32)
        for x, size in sizes.items()
    }
    check(backend, near, arrays=arrays, causal=causal)


@on_kernels
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_peaked_rows(backend, scale):
    """Scores up to about 20 and 40, in part beyond what caps them."""
    check(backend, capped, scale=scale)


@on_kernels
@pytest.mark.parametrize("moving", ["q", "k", "v"])
def test_one_input_moves(backend, moving):
    check(backend, squared, (moving,))


@on_kernels
def test_a_nan_of_a_masked_token_is_not_read(backend):
    """Kernels that have f, too, compute the flagged tiles anew."""
    spoiled = (("k", (0, 120, 1), "nan"), ("dout", (0, 60, 3), "nan"))
    check(backend, squared, causal=True, spoiled=spoiled)
