"""sm90/forward_key_parts.cuh: keys of the last query tiles, divided."""

from dataclasses import replace

import pytest

from cuflash.plans import sm90_key_parts
from cuflash.plans.plan import device_of_arch, plan
from cuflash.plans.tiles import Tile
from helpers import visibility as probe
from helpers.backends import on_kernels
from helpers.checks import check_forward
from helpers.data import Case, Emulation
from helpers.kernels import small_problem
from helpers.option_cases import sizes

TILE = Tile(128, 64, 12, num_stages=2, ptxas_level=3)
ON = Emulation("sm_90a", num_sms=3, seed=1, forward_tile=TILE)
# Eight query tiles: three blocks share the keys of the last two.
CASE = Case("bfloat16", **sizes(2, 200, 1100, 2, 1, 32, 32), on=ON)
LENGTHS = 1089, 1151, 1152, 1216, 2113


@pytest.fixture
def divides(monkeypatch):
    """Heads of these dimensions too, where six key tiles are saved."""
    monkeypatch.setattr(sm90_key_parts, "_COST", {32: 6, 64: 6, 128: 6})


@on_kernels
@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_each_key_counts_once(divides, backend, batch, seqlen_k):
    """One tile left, or two; shares that end within and at a tile's end."""
    seen = probe.pairs(1, seqlen_k)
    arrays = probe.arrays("bfloat16", batch, 1, seqlen_k)
    with backend.running(CASE):
        probe.check_forward(backend, seen, *arrays)


@on_kernels
@pytest.mark.parametrize("values", ["rising", "punishing"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_parts_of_unlike_maxima(divides, backend, head_dim, values):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    check_forward(backend, replace(CASE, values=values, **dims))


@on_kernels
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_below_the_usual(divides, backend, scale):
    check_forward(backend, replace(CASE, scale=scale))


@on_kernels
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_infinities(divides, backend, name):
    """Of the last sequence, whose tiles are divided."""
    spoiled = ((name, (1, 150, 0, 3), "inf"), (name, (1, 3, 0, 0), "nan"))
    check_forward(backend, replace(CASE, spoiled=spoiled))


@pytest.mark.parametrize(
    ("divided", "changes"),
    [
        (88, {}),
        (0, {"seqlen_k": 1024}),
        (0, {"num_heads_q": 33, "num_heads_kv": 33, "batch": 2}),
        (0, {"num_heads_q": 1, "num_heads_kv": 1}),
        (0, {"causal": True}),
        (0, {"sink": True}),
        (0, {"return_max_score": True}),
        (0, {"seqlen_k": 32769}),
    ],
)
def test_which_calls_divide_keys(divided, changes):
    """1,408 query tiles are ten rounds of 132, and 88."""
    lengths = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096}
    heads = {"num_heads_q": 16, "num_heads_kv": 16, "causal": False}
    dims = {"head_dim": 128, "head_dim_v": 128}
    case = {**lengths, **heads, **dims, **changes}
    problem = small_problem("forward", "bfloat16", **case)
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    tile = Tile(192, 80, 16, num_stages=3, ptxas_level=3)
    main, *merge = plan(problem, device, "sm90", tile).launches
    rows = sum(x.blocks * x.kernel.threads // 32 for x in merge)
    assert rows == divided * 192
    assert dict(main.kernel.constants)["KEY_PARTS"] == (divided > 0)
