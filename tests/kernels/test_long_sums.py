"""More keys than tensor cores sum in one go: common/long_sums.cuh."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.launch import recipe
from cuflash.plans import plan, steps
from cuflash.plans.tiles import Tile
from helpers.backends import EMULATED
from helpers.checks import check_forward
from helpers.compare import assert_all
from helpers.data import Case, Emulation
from helpers.option_cases import sizes

CASES = {
    "wgmma": Case("float16", **sizes(1, 70, 400, 2, 1, 64, 64, causal=True),
                  on=Emulation("sm_90a", num_sms=1)),
    "wgmma of one stage": Case("bfloat16", **sizes(1, 70, 400, 1, 1, 160, 200),
                               on=Emulation("sm_90a", num_sms=1)),
    "wgmma of wide heads": Case(
        "float16", **sizes(1, 70, 400, 2, 1, 260, 300, causal=True),
        on=Emulation("sm_90a", num_sms=1),
    ),
    "wgmma with options": Case(
        "bfloat16", **sizes(1, 70, 400, 1, 1, 64, 64), softcap=20.0,
        arrays_of=("sink",), on=Emulation("sm_90a", num_sms=1),
    ),
    "wgmma with a window": Case(
        "bfloat16", **sizes(1, 70, 400, 1, 1, 64, 64), window=(300, 300),
        on=Emulation("sm_90a", num_sms=1),
    ),
    "wgmma with segments": Case(
        "bfloat16", **sizes(1, 70, 400, 1, 1, 64, 64),
        arrays_of=("segment_ids",), on=Emulation("sm_90a", num_sms=1),
    ),
    # The first query sees nothing of the first four tiles of 16.
    "mma with a window": Case(
        "float16", **sizes(1, 70, 130, 1, 1, 64, 64, causal=True),
        window=(90, 0), block_q=64, block_k=16,
    ),
    # A lane has four rows.
    "mma": Case("float16", **sizes(1, 70, 130, 1, 1, 64, 64, causal=True),
                on=Emulation(forward_tile=Tile(64, 16, 2))),
    # All scores are -256: the first run's maximum, too.
    "mma far below 0": Case(
        "float16", **sizes(1, 70, 130, 1, 1, 64, 64, causal=True),
        block_q=64, block_k=16,
        spoiled=(("q", (0,), "2"), ("k", (0,), "-1")),
    ),
}  # fmt: skip


on_emulator = pytest.mark.parametrize("backend", [EMULATED])


@on_emulator
@pytest.mark.parametrize("family", CASES)
def test_runs_of_one_tile(backend, family):
    """Maxima of rows grow from run to run, and a block has several tiles."""
    case = replace(CASES[family], scale=2.0)
    with mock.patch.object(steps, "LONGEST_RUN", 16):
        check_forward(backend, case)


@on_emulator
@pytest.mark.parametrize(("family", "block_k"), [("wgmma", 128), ("mma", 64)])
def test_what_truncation_loses_within_a_run(backend, family, block_k):
    """1024 and -1024, 128 times each, and 768 times 2^-9 between them.

    Next to their sum, 2^17, all of 2^-9 is below a quarter of the last bit of
    a float. Runs of 128 keys are exact. Adding them rounds five times to 2^-7,
    a unit of 2^17, by half of it at most; float16 rounds the result once.
    """
    q = np.zeros((1, 70, 1, 64), np.float16)
    k, v = (np.zeros((1, 1024, 1, 64), np.float16) for _ in range(2))
    v[:] = 2.0**-9
    v[:, :128], v[:, -128:] = -1024, 1024
    got = {}
    for run in (1024, 128):
        with (
            mock.patch.object(steps, "LONGEST_RUN", run),
            mock.patch.object(recipe, "plan", plan.plan.__wrapped__),
            cuflash.emulator.active(family=family, truncates=True),
        ):
            placed = map(backend.place, (q, k, v))
            got[run] = cuflash.forward(*placed, block_k=block_k)
    exact = 768 * 2.0**-9 / 1024
    assert_all(got[1024], 0, "got[1024]")
    assert abs(got[128] - exact).max() <= 5 * 2.0**-8 / 1024 + 2.0**-11 * exact
