"""All warps of a warpgroup wait for a wgmma at the same instruction.

Otherwise the behaviour is undefined (PTX: wgmma.wait_group is `.aligned`).
Warps may take different paths where they may keep their row maxima. If the
compiler duplicates a wait on each path, only the machine code shows it. So it
is for barriers of which all threads are said to wait (compute-sanitizer's
synccheck), where each half of wide heads has code of its own.
"""

import struct

import pytest

from helpers.kernels import kernels
from helpers.machine_code import instructions

# Of sm_90: the low 12 bits of WARPGROUP, and what its DEPBAR has set.
OPCODE, DEPBAR = 0x9C5, 1 << 16
BARRIER = 0xB1D


def words(kernel):
    return struct.iter_unpack("<2Q", instructions(kernel, "sm_90a"))


def count_waits(**options):
    *_, kernel = kernels(
        "forward", "bfloat16", "sm_90a", 64, causal=False, **options
    )
    return sum(low & 0xFFF == OPCODE and high & DEPBAR != 0
               for low, high in words(kernel))  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"window": (30, 30)}, {"segment_ids": True}, {"mask": True},
     {"alibi_slopes": True}, {"bias": "bfloat16"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_each_path_waits_at_the_same_instruction(options):
    """With dropout there is one path."""
    assert count_waits(**options) == count_waits(**options, dropout=0.1) > 0


def test_a_softcap_waits_where_a_plain_call_does():
    assert count_waits(softcap=15.0) == count_waits() > 0


def test_both_halves_of_wide_heads_meet_at_one_barrier():
    """One of the block, one of the halves before rows are recomputed."""
    _, dq, *_ = kernels("backward", "bfloat16", "sm_90a", 320)
    assert sum(low & 0xFFF == BARRIER for low, _ in words(dq)) == 2
