"""Run by mpiexec: each rank compares its results with the whole sequence's.

mpiexec -n 2 python tests/helpers/mpi_ranks.py
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import numpy as np  # noqa: E402

import cuflash  # noqa: E402
from cuflash import distributed  # noqa: E402
from helpers.backends import NumpyBackend  # noqa: E402
from helpers.data import Case  # noqa: E402
from helpers.ranks import Shared  # noqa: E402

PLAIN = Case(
    "float32", 2, 64, 64, 8, 4, 16, 16, causal=True, seed=1, deterministic=True
)
OFFSETS = (0, 16, 64, 64)
CASES = [
    PLAIN,
    replace(PLAIN, dtype="bfloat16", window=(20, None)),
    replace(PLAIN, batch=1, offsets=(OFFSETS, OFFSETS)),
]


def check(group):
    """Every strategy, layout and case; the first rank compares."""
    for case in CASES:
        for layout in ("zigzag", "contiguous"):
            for ulysses in {1, 2, group.size}:
                shared = Shared(case, group.size, layout, ulysses)
                own = shared.run(NumpyBackend(), group)
                each = group._communicator.gather(own)
                if group.rank == 0:
                    shared.check(shared.joined(each))


def check_differing(group):
    """Ranks that make different calls all raise."""
    q = np.zeros((1, 8, 2, 4))
    try:
        distributed.forward(q, q, q, group=group, causal=group.rank == 0)
    except cuflash.ValueRangeError as error:
        assert "make different calls" in str(error)
    else:
        raise AssertionError("no error")


def check_silent(communicator):
    """A rank that does not call is not waited for longer than the timeout."""
    group = distributed.MpiGroup(communicator, timeout=0.5)
    if group.rank == 0:
        q = np.zeros((1, 8, 2, 4))
        try:
            distributed.forward(q, q, q, group=group)
        except cuflash.GroupError as error:
            assert "rank 0 waited 0.5 s" in str(error)
        else:
            raise AssertionError("no error")
    communicator.Barrier()


def main():
    group = distributed.group_from_environment(timeout=60.0)
    assert isinstance(group, distributed.MpiGroup)
    check(group)
    check_differing(group)
    check_silent(group._communicator.Dup())
    print("rank", group.rank, "of", group.size, "is done", flush=True)


if __name__ == "__main__":
    main()
