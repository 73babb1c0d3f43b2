"""Small calls that combine many features, one or two per family.

A faulty change of a kernel fails here after one or two compilations.
"""

import pytest

import strategies
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.apart import Apart
from helpers.backends import EMULATED
from helpers.compare import assert_forward_matches, assert_gradients_match
from helpers.data import SIMT, Case, Emulation, inputs


def hopper(stages, block_q=64, wide=False, **of_machine):
    """Return a Hopper backward tile on a small machine."""
    tile = Tile(
        block_q, 64 if wide else 128, 16 if wide else 12, num_stages=stages,
        score_warps_q=block_q // 16, ptxas_level=3,
    )  # fmt: skip
    return Emulation("sm_90a", backward_tile=tile, **of_machine)


# Several heads of a group, a ragged last tile on both sides, columns that are
# padding; tiles of which a mask hides none, some and all.
CASES = {
    "mma_masked": Case(
        "bfloat16", 2, 90, 130, 4, 2, 40, 72, causal=True, scale=-0.3,
        layout="unlike",
    ),
    "mma_whole": Case(
        "float16", 1, 130, 90, 3, 1, 72, 40, deterministic=True,
        on=Emulation(backward_tile=Tile(32, 32, 4, 1, 2, 2, 2)),
    ),
    "mma_panels": Case(
        "bfloat16", 1, 70, 100, 2, 1, 160, 136, causal=True,
    ),
    "fma_masked": Case(
        "float32", 2, 50, 170, 4, 2, 40, 24, causal=True, scale=-0.3,
        layout="unlike",
    ),
    "fma_whole": Case(
        "float32", 1, 170, 50, 3, 1, 24, 40, deterministic=True
    ),
    "float64_masked": Case(
        "float64", 2, 50, 130, 4, 2, 40, 24, causal=True, scale=-0.3,
        layout="unlike",
    ),
    "float64_whole": Case(
        "float64", 1, 130, 50, 3, 1, 24, 40, deterministic=True
    ),
    "tf32x3_masked": Case(
        "float32", 2, 50, 130, 4, 2, 40, 24, causal=True, scale=-0.3,
        layout="unlike", precision="tf32x3",
    ),
    "simt_masked": Case(
        "float32", 2, 50, 70, 4, 2, 40, 24, causal=True, scale=-0.3,
        dropout=0.25, layout="unlike", on=SIMT,
    ),
    "simt_whole": Case(
        "float64", 1, 70, 50, 3, 1, 24, 40, on=Emulation("sm_75")
    ),
    "wgmma_masked": Case(
        "bfloat16", 2, 200, 290, 4, 2, 128, 40, causal=True, scale=-0.3,
        layout="unlike",
        on=hopper(2, num_sms=3),
    ),
    "wgmma_whole": Case(
        "float16", 1, 200, 270, 3, 1, 128, 72, deterministic=True,
        on=hopper(2, num_sms=2),
    ),
    "wgmma_turns": Case(
        "bfloat16", 1, 330, 300, 2, 1, 64, 64, causal=True,
        deterministic=True, on=hopper(2, 128, num_sms=2),
    ),
    "wgmma_blind": Case(
        "float16", 1, 450, 200, 2, 2, 40, 64, causal=True,
        on=hopper(3, wide=True, num_sms=1),
    ),
    "wgmma_wide_masked": Case(
        "bfloat16", 2, 150, 160, 2, 1, 136, 200, causal=True,
        layout="unlike",
        on=hopper(2, wide=True, num_sms=3),
    ),
    "wgmma_wide_whole": Case(
        "float16", 1, 200, 170, 3, 1, 192, 160, scale=-0.3,
        deterministic=True, on=hopper(2, wide=True, num_sms=2),
    ),
    "wgmma_wide_turns": Case(
        "bfloat16", 1, 200, 230, 2, 1, 256, 256, causal=True,
        deterministic=True, on=hopper(2, wide=True, num_sms=2),
    ),
    # One query tile: the producers run several key tiles ahead.
    "wgmma_short": Case(
        "float16", 2, 20, 400, head_dim=72, head_dim_v=48,
        on=hopper(3, num_sms=1),
    ),
    "wgmma_wide_short": Case(
        "float16", 2, 20, 200, head_dim=48, head_dim_v=72, causal=True,
        deterministic=True, on=hopper(3, wide=True, num_sms=1),
    ),
    # Of tiles that the mask cuts, some of each beside what sees them. One key
    # head has none.
    "wgmma_nonfinite": Case(
        "bfloat16", 2, 200, 280, 4, 2, 40, 64, causal=True, scale=0.3,
        deterministic=True, layout="unlike",
        spoiled=(
            ("q", (1, 30, 3, 36), "nan"), ("k", (0, 260, 0, 5), "inf"),
            ("v", (0, 270, 0, 3), "nan"), ("dout", (0, 150, 2, 1), "-inf"),
            ("dout", (0, 170, 3, 7), "inf"), ("dout", (0, 170, 3, 39), "inf"),
        ),
        on=hopper(2, 128, num_sms=3, resident=3),
    ),
    "wgmma_wide_nonfinite": Case(
        "bfloat16", 2, 100, 130, 4, 2, 72, 136, causal=True, scale=0.3,
        layout="unlike",
        spoiled=(
            ("q", (1, 20, 3, 70), "nan"), ("k", (0, 120, 0, 5), "inf"),
            ("v", (0, 125, 0, 3), "nan"), ("dout", (0, 80, 2, 100), "-inf"),
        ),
        on=hopper(2, wide=True, num_sms=3, resident=3),
    ),
}  # fmt: skip


def of_hopper():
    return [case for case in CASES.values() if case.on.arch == "sm_90a"]


@pytest.mark.parametrize("case", of_hopper(), ids=repr)
def test_the_tile_is_one_that_the_kernels_can_take(case):
    assert case.on.backward_tile in strategies.tiles(
        case, "backward", case.on.arch
    )


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_much_at_once(backend, case):
    backend, (q, k, v, dout) = Apart(backend), inputs(case)
    kinds = not case.spoiled  # else a sum of two may be either
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case, kinds)
    grads = calls.backward(backend, case, dout, q, k, v, *got)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case, kinds)
    backend.check_gaps()
