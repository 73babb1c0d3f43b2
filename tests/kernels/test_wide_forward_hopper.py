"""sm90/forward_wide.cu: head dimensions above 256, forward, by wgmma."""

from dataclasses import replace

import pytest

from cuflash.plans.plan import device_of_arch, plan
from cuflash.plans.tiles import Tile
from helpers.backends import EMULATED, on_kernels
from helpers.checks import check_forward, check_packed
from helpers.data import Case, Emulation
from helpers.kernels import small_problem
from helpers.option_cases import ALL, sizes
from helpers.variants import VARIANTS, case_of
from helpers.variants import check_forward as check_variant

# Each block has several query tiles.
HOPPER = Emulation("sm_90a", num_sms=2)
CAUSAL = Case(
    "float16", **sizes(1, 130, 200, 2, 1, 300, 260, causal=True), on=HOPPER
)
on_emulator = pytest.mark.parametrize("backend", [EMULATED])


@on_kernels
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (64, 64), (65, 63), (129, 128), (70, 3)]
)
def test_edges_of_tiles(backend, seqlen_q, seqlen_k):
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    check_forward(backend, replace(CAUSAL, **lengths, batch=2))


@on_kernels
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_order_of_warps(backend, seed):
    check_forward(backend, replace(CAUSAL, on=replace(HOPPER, seed=seed)))


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [("bfloat16", (576, 512)), ("float16", (384, 448)), ("float16", (40, 384)),
     ("bfloat16", (320, 40))],
)  # fmt: skip
def test_head_dims(backend, dtype, head_dims):
    """Halves of O of 128 to 256 columns, the right one of padding alone."""
    d, dv = head_dims
    check_forward(
        backend, Case(dtype, **sizes(1, 70, 150, 4, 2, d, dv), on=HOPPER)
    )


@on_kernels
@pytest.mark.parametrize("values", ["rising", "punishing"])
def test_maxima_that_change(backend, values):
    """acc is rescaled for each key tile, or for none."""
    check_forward(backend, replace(CAUSAL, values=values, seqlen_k=400))


@on_kernels
@pytest.mark.parametrize("window", [(40, 20), (0, 0), (100, None)])
def test_windows(backend, window):
    check_forward(
        backend, replace(CAUSAL, causal=False, window=window, seqlen_k=300)
    )


@on_kernels
@pytest.mark.parametrize(
    ("array", "token", "value"),
    [("v", 150, "nan"), ("v", 150, "inf"), ("k", 150, "nan"), ("q", 7, "inf")],
)
def test_rows_are_recomputed(backend, array, token, value):
    """A masked NaN reaches no row, whichever half of O it was found in."""
    for column in (0, 259):
        spoiled = ((array, (0, token, 0, column), value),)
        check_forward(backend, replace(CAUSAL, spoiled=spoiled))


@on_kernels
def test_negative_scale(backend):
    check_forward(backend, replace(CAUSAL, scale=-0.1))


OPTIONS = {
    "scores": {
        "window": (90, 0), "softcap": 20.0, "dropout": 0.3,
        "arrays_of": ("alibi_slopes_of_batches", "bias", "sink"),
    },
    "segments": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
    "mask": {"arrays_of": ("mask",), "window": (60, 60), "causal": False},
    "all": ALL,
}  # fmt: skip


@on_kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, name):
    check_forward(backend, replace(CAUSAL, **OPTIONS[name]))


@on_kernels
def test_expressions(backend):
    """The tile's flags tell nothing here: each pair is asked."""
    case = case_of(head_dim=300, batch=1)
    check_variant(backend, case, VARIANTS["capped odd"])


@on_kernels
def test_packed_sequences(backend):
    """A sequence without queries, one without keys, unused tokens."""
    case = replace(
        CAUSAL, seqlen_q=160, seqlen_k=190, arrays_of=("sink",),
        offsets=((0, 70, 70, 90, 150), (0, 100, 120, 120, 180)),
    )  # fmt: skip
    check_packed(backend, case)


@on_emulator
@pytest.mark.parametrize(
    "tile", [Tile(64, 80, 16, num_stages=2), Tile(64, 64, 16, num_stages=3)]
)
def test_tiles(backend, tile):
    """Key tiles of two panels of P; other rings."""
    on = replace(HOPPER, forward_tile=tile)
    check_forward(backend, replace(CAUSAL, on=on))


@pytest.mark.parametrize(
    ("options", "family"),
    [({}, "sm90"), ({"causal": True}, "sm90"), ({"softcap": 9.0}, "sm90")],
)
def test_which_calls_run_it(options, family):
    problem = small_problem("forward", "float16", 512, **options)
    decided = plan(problem, device_of_arch("sm_90a"))
    assert decided.family == family
    assert decided.kernels[-1].file == "sm90/forward_wide.cu"
