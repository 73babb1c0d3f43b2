"""From 33 rows of a key head on, by warpgroup MMAs: decode/forward_sm90.cu."""

from dataclasses import replace

import pytest

from helpers.backends import on_kernels
from helpers.checks import check_forward
from helpers.data import Case, Emulation

# 43 queries of three heads are 129 rows, one more than a tile has.
CASE = Case(
    "bfloat16", 1, 43, 600, 6, 2, 64, 64, seed=1,
    on=Emulation("sm_90a", num_sms=7, seed=1, family="decode_sm90"),
)  # fmt: skip


@on_kernels
@pytest.mark.parametrize("rows", [63, 66, 127, 128, 129])
def test_rows(backend, rows):
    """One below, at and above a tile of 64 or 128 rows."""
    check_forward(
        backend,
        replace(CASE, seqlen_q=rows, num_heads_q=2, causal=rows % 2 == 1),
    )


@on_kernels
@pytest.mark.parametrize("num_sms", [1, 7])
def test_groups(backend, num_sms):
    """Three heads a query, in one part and in parts."""
    on = replace(CASE.on, num_sms=num_sms)
    check_forward(backend, replace(CASE, causal=True, on=on))
