"""sm90/backward_passes.cu: head dimensions above 256, backward, by wgmma."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, plan
from cuflash.plans.tiles import Tile
from helpers import calls
from helpers.backends import EMULATED, on_kernels
from helpers.checks import (
    check_gradients,
    check_packed,
)
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.kernels import small_problem
from helpers.option_cases import ALL, sizes
from helpers.variants import VARIANTS, case_of
from helpers.variants import check_gradients as check_variant

HOPPER = Emulation("sm_90a")
CAUSAL = Case(
    "float16", **sizes(1, 130, 150, 2, 1, 300, 260, causal=True), on=HOPPER
)
on_emulator = pytest.mark.parametrize("backend", [EMULATED])


@on_kernels
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (64, 64), (65, 63), (63, 129), (70, 3)]
)
def test_edges_of_tiles(backend, seqlen_q, seqlen_k):
    """Also queries that see no key."""
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    check_gradients(backend, replace(CAUSAL, **lengths, batch=2))


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [
        ("bfloat16", (512, 512)),
        ("float16", (40, 448)),
        ("bfloat16", (320, 40)),
    ],
)
def test_head_dims(backend, dtype, head_dims):
    d, dv = head_dims
    check_gradients(
        backend, Case(dtype, **sizes(1, 70, 90, 4, 2, d, dv), on=HOPPER)
    )


@on_kernels
@pytest.mark.parametrize("window", [(40, 20), (0, 0), (None, 30)])
def test_windows(backend, window):
    """Keys that no query sees, too."""
    case = replace(CAUSAL, causal=False, window=window, seqlen_k=300)
    check_gradients(backend, case)


OPTIONS = {
    "scores": {
        "softcap": 20.0, "dropout": 0.3,
        "arrays_of": ("alibi_slopes", "bias", "sink"),
    },
    "segments": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
    "mask": {"arrays_of": ("mask",)},
    "all": ALL,
}  # fmt: skip


@on_kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, name):
    """dbias and dsink as well."""
    check_gradients(backend, replace(CAUSAL, **OPTIONS[name]))


@on_kernels
@pytest.mark.parametrize("values", ["rising", "punishing"])
def test_weights_of_one_key(backend, values):
    check_gradients(backend, replace(CAUSAL, values=values))


@on_kernels
@pytest.mark.parametrize("scale", [-0.1, 40.0])
def test_scales(backend, scale):
    """With the larger one, lse is too large for the fused exponent."""
    check_gradients(backend, replace(CAUSAL, scale=scale))


@on_kernels
def test_expressions(backend):
    check_variant(
        backend, case_of(head_dim=300, batch=1), VARIANTS["documents"]
    )


@on_kernels
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(backend, causal):
    """A sequence without queries, one without keys, unused tokens."""
    case = replace(
        CAUSAL, seqlen_q=160, seqlen_k=190, causal=causal,
        offsets=((0, 70, 70, 90, 150), (0, 100, 120, 120, 180)),
    )  # fmt: skip
    check_packed(backend, case)


@on_kernels
def test_masked_nan_does_not_spread(backend):
    """NaN in a query and its dout, in a key and its value."""
    late = CAUSAL.seqlen_k - 5  # the last five queries see it
    places = {"q": 3, "dout": 3, "k": late, "v": late}
    spoiled = tuple((x, (0, i, 0, 259), "nan") for x, i in places.items())
    case = replace(CAUSAL, spoiled=spoiled)
    got = check_gradients(backend, case)
    assert 0 < np.isnan(np.float32(got[0])).mean() < 0.2  # of dq


@on_emulator
@pytest.mark.parametrize("num_stages", [2, 3])
def test_gradients_are_the_same_in_every_run(backend, num_stages):
    """No two blocks add to the same element; other rings, other warps."""
    arrays = inputs(CAUSAL)
    first = calls.gradients(backend, CAUSAL, *arrays)
    tile = Tile(64, 64, 16, num_stages=num_stages, score_warps_q=4,
                ptxas_level=3)  # fmt: skip
    on = replace(HOPPER, backward_tile=tile, seed=num_stages)
    again = calls.gradients(backend, replace(CAUSAL, on=on), *arrays)
    for x, a, b in zip("qkv", again, first, strict=True):
        assert_bitwise(a, b, f"d{x}")


@pytest.mark.parametrize("changes", [{}, {"deterministic": True}])
def test_which_calls_run_it(changes):
    problem = small_problem("backward", "float16", 512, **changes)
    decided = plan(problem, device_of_arch("sm_90a"))
    assert decided.family == "sm90"
    files = [kernel.file for kernel in decided.kernels]
    assert files == ["prepare/row_stats.cu", *["sm90/backward_passes.cu"] * 3]
