"""Which plans sum the keys of a query in two levels."""

import pytest

from cuflash.build import nvrtc
from cuflash.plans.plan import device_of_arch, plan
from cuflash.plans.steps import LONGEST_RUN
from helpers.kernels import small_problem

HOPPER = device_of_arch("sm_90a")
LONG = 2 * LONGEST_RUN


def planned(family="sm90", **changes):
    fields = {"seqlen_q": LONG, "seqlen_k": LONG, **changes}
    return plan(small_problem("forward", "float16", **fields), HOPPER, family)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize(
    ("changes", "is_long"),
    [({}, True), ({"seqlen_k": LONGEST_RUN}, False),
     ({"seqlen_k": LONGEST_RUN + 1}, True), ({"window": (4000, 0)}, False),
     ({"num_sequences": 9, "max_seqlen_k": 4000}, False)],
)  # fmt: skip
def test_runs_are_as_long_as_may_be(family, changes, is_long):
    decided = planned(family, **changes)
    tiles = dict(decided.kernels[-1].constants)["RUN_TILES"]
    keys = tiles * decided.tile.block_k
    assert LONGEST_RUN / 2 < keys <= LONGEST_RUN if is_long else keys == 0


def test_runs_of_wide_heads_are_longer():
    few = {"head_dim": 256, "seqlen_k": 4 * LONGEST_RUN}
    many = {**few, "seqlen_k": 4 * LONGEST_RUN + 1}
    tiles = [dict(planned(**x).kernels[-1].constants)["RUN_TILES"]
             for x in (few, many)]  # fmt: skip
    keys = tiles[1] * planned(**many).tile.block_k
    assert tiles[0] == 0 and 2 * LONGEST_RUN < keys <= 4 * LONGEST_RUN


def test_runs_are_shorter_on_sm_75():
    """Its tensor cores add 4 products at a time, and lose as much each time.

    Of so many keys the next one would be summed in two levels.
    """
    for keys, is_long in ((LONGEST_RUN // 4, False), (LONG // 4, True)):
        problem = small_problem("forward", "float16", seqlen_k=keys)
        decided = plan(problem, device_of_arch("sm_75"), "sm80")
        tiles = dict(decided.kernels[-1].constants)["RUN_TILES"]
        expected = LONGEST_RUN // 4 if is_long else 0
        assert tiles * decided.tile.block_k == expected


def test_parts_of_keys_are_short_enough():
    """However many heads there are, so that parts do not pay."""
    heads = {"num_heads_q": 4096, "num_heads_kv": 4096}
    decided = planned("decode", seqlen_q=1, seqlen_k=2**20, **heads)
    warps = decided.tile.num_warps
    assert decided.num_splits == 2**20 // (LONGEST_RUN * warps)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_their_kernels_do_not_spill(head_dim):
    kernel = planned(head_dim=head_dim, seqlen_k=4 * LONG).kernels[-1]
    assert dict(kernel.constants)["RUN_TILES"]
    report = nvrtc.report(kernel, "sm_90a")
    assert report.spill_bytes == 0 and not report.warnings
