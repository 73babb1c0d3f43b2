"""Full backward whose last key tiles are divided: TAIL_PARTS."""

from dataclasses import replace

import pytest

from cuflash.plans import sm90
from helpers.backends import EmulatedBackend
from helpers.checks import check_gradients
from helpers.data import Case, Emulation
from helpers.host_compiler import needs_compiler

ON = Emulation("sm_90a", seed=3, num_sms=4)
# Six key tiles: two have parts, or with eight SMs all have.
CASE = Case("bfloat16", 1, 200, 257, 4, 2, 64, 64, on=ON)


@needs_compiler
@pytest.mark.parametrize("num_sms", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(num_sms, head_dim, monkeypatch):
    monkeypatch.setattr(sm90, "_tail_parts", lambda *_: 3)
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    on = replace(ON, num_sms=num_sms)
    check_gradients(EmulatedBackend(), replace(CASE, **dims, on=on))
