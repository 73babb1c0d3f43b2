"""Masks and score modifications in the kernels for float32."""

import numpy as np
import pytest

from cuflash.plan import device_of_arch, plan
from cuflash.tiles import Tile
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import (
    check_forward,
    check_gradients,
    check_gradients_of_forward,
)
from helpers.compare import assert_bitwise, assert_gradients_match
from helpers.data import Case, Emulation, inputs
from helpers.kernels import small_problem

SEGMENTS = ("segment_ids_k", "segment_ids_q")
OPTIONS = {
    "window": {"window": (40, 30)},
    "left": {"window": (40, None)},
    "segments": {"arrays_of": SEGMENTS},
    "mask": {"arrays_of": ("mask",)},
    "softcap": {"softcap": 5.0},
    "slopes": {"arrays_of": ("alibi_slopes",), "scale": -0.3},
    "bias": {"arrays_of": ("bias",)},
    "sink": {"arrays_of": ("sink",), "scale": -0.05},
    "dropout": {"dropout": 0.25},
    "all": {
        "window": (60, 60),
        "softcap": 30.0,
        "dropout": 0.5,
        "arrays_of": (
            "alibi_slopes_of_batches", "bias", "mask", *SEGMENTS, "sink"
        ),
    },
}  # fmt: skip

# Batches and grouped heads, tiles as they are tuned; small tiles, and lanes
# with few pairs of them.
SHAPES = {
    "tuned": (2, 150, 190, 4, 2, 40, 24, True),
    "small": (1, 70, 100, 2, 1, 64, 64, False),
}
MACHINES = {
    "tuned": Emulation(num_sms=2, seed=1, resident=2),
    "small": Emulation(
        num_sms=2, resident=2, forward_tile=Tile(16, 48, 2, ptxas_level=3),
        backward_tile=Tile(16, 32, 4, 1, 1, 2, 2, 3),
    ),
}  # fmt: skip
on_shapes = pytest.mark.parametrize("shape", SHAPES)


def option_case(name, shape, **more):
    return Case("float32", *SHAPES[shape], seed=85, on=MACHINES[shape],
                **OPTIONS[name], **more)  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_register_tiles_take_options(direction, arch):
    problem = small_problem(direction, "float32", mask=True, dropout=0.5)
    assert plan(problem, device_of_arch(arch)).family == "fma"
    assert plan(problem, device_of_arch(arch), "simt").family == "simt"
    assert plan(problem, device_of_arch("sm_75")).family == "simt"


@on_kernels
@on_shapes
@pytest.mark.parametrize("name", OPTIONS)
def test_forward(backend, shape, name):
    check_forward(backend, option_case(name, shape))


@on_kernels
def test_dropout_of_many_pairs(backend):
    """A lane has 64 pairs, whose bits fill two words."""
    on = Emulation(forward_tile=Tile(128, 64, 4, ptxas_level=3))
    case = Case("float32", 1, 50, 90, dropout=0.5, seed=1, on=on)
    check_forward(backend, case)


@on_kernels
@on_shapes
@pytest.mark.parametrize("name", OPTIONS)
def test_backward(backend, shape, name):
    check_gradients(backend, option_case(name, shape))


@on_kernels
@pytest.mark.parametrize("name", ["window", "left", "segments", "mask"])
def test_deterministic_backward(backend, name):
    """The key tiles that visit a query tile are not all consecutive."""
    case = option_case(name, "tuned", deterministic=True)
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    first = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(first, want, case)
    again = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert_bitwise(again[0], first[0], "dq")


@on_kernels
@pytest.mark.parametrize("name", ["window", "segments", "all"])
@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout"])
def test_nonfinite_inputs(backend, name, spoiled):
    """Reaches the rows that see it; some rows of its tile do not."""
    spoiled = ((spoiled, (0, 17, 0, 3), "nan"),)
    case = option_case(name, "small", spoiled=spoiled)
    check_forward(backend, case)
    got = check_gradients_of_forward(backend, case)
    assert np.isnan(got[1]).any()
