"""Masks and score steps in Hopper's forward kernel, which lists tiles."""

import pytest

from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.compare import assert_forward_matches
from helpers.data import Case, Emulation, inputs

SEGMENTS = ("segment_ids_k", "segment_ids_q")
OPTIONS = {
    "window": {"window": (40, 30)},
    "left": {"window": (40, None)},
    "segments": {"arrays_of": SEGMENTS},
    "softcap": {"softcap": 5.0},
    "slopes": {"arrays_of": ("alibi_slopes",)},
    "sink": {"arrays_of": ("sink",), "scale": -0.3},
    "all": {
        "window": (60, 60),
        "softcap": 30.0,
        "arrays_of": ("alibi_slopes_of_batches", *SEGMENTS, "sink"),
    },
}

# Batches and grouped heads; one place for Q; many key tiles of few queries.
SHAPES = [
    (2, 300, 333, 2, 1, 64, 64),
    (1, 333, 200, 2, 2, 160, 200),
    (1, 130, 650, 1, 1, 128, 128),
]


def check(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward(backend, shape, causal, name):
    on = Emulation("sm_90a", num_sms=2, seed=1)
    check(backend, Case("bfloat16", *shape, causal, seed=4, on=on,
                        **OPTIONS[name]))  # fmt: skip


@on_kernels
@pytest.mark.parametrize("name", ["window", "segments"])
def test_what_is_hidden_spreads_nowhere(backend, name):
    spoiled = (("v", (0, 9), "nan"), ("k", (0, 50), "inf"))
    check(backend, Case("float16", seqlen_q=200, seqlen_k=200, head_dim=40,
                        on=Emulation("sm_90a", num_sms=1), spoiled=spoiled,
                        **OPTIONS[name]))  # fmt: skip
