"""Masks and score modifications in the kernels for float32 and float64."""

from dataclasses import replace

import numpy as np
import pytest

import strategies
from cuflash.tiles import Tile
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import (
    check_forward,
    check_gradients,
    check_gradients_of_forward,
    check_packed,
)
from helpers.compare import (
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.options import fields_of


def small(backward_warps):
    """Small tiles: many are skipped, partly masked, or tested by pair."""
    return Emulation(
        forward_tile=Tile(32, 16, 2, ptxas_level=3),
        backward_tile=Tile(32, 32, backward_warps, 1, 1, 2, 2, 3),
        resident=3,
    )


KINDS = {
    "dmma": {"dtype": "float64", "on": small(backward_warps=4)},
    "tf32x3": {"dtype": "float32", "precision": "tf32x3",
               "on": small(backward_warps=2)},
    "simt": {"dtype": "float64", "on": Emulation("sm_75")},
}  # fmt: skip

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["dmma", "tf32x3"])
def test_the_tiles_are_some_that_kernels_can_take(kind, direction):
    case = Case(**KINDS[kind])
    tile = getattr(case.on, f"{direction}_tile")
    assert tile in strategies.tiles(case, direction, case.on.arch)


@on_kernels
@each_kind
@pytest.mark.parametrize("options", strategies.FEW_OPTIONS, ids="-".join)
def test_several_tiles(backend, kind, options):
    """Lengths at which tiles are skipped, and grouped heads.

    The bias is that of all heads, the mask that of all batches.
    """
    case = Case(
        batch=2, seqlen_q=113, seqlen_k=203, num_heads_q=4, num_heads_kv=2,
        head_dim=40, head_dim_v=24, causal="softcap" in options, seed=23,
        **fields_of(options), **KINDS[kind],
    )  # fmt: skip
    check_forward(backend, case)
    check_gradients(backend, case)


@on_kernels
@each_kind
def test_tiles_between_others_are_skipped(backend, kind):
    """Of three documents, the first and the last have one id."""
    case = Case(seqlen_q=150, seqlen_k=150, num_heads_q=2, **KINDS[kind])
    q, k, v, dout = inputs(case)
    ids = np.repeat(np.int32([[0, 1, 0]]), 50, axis=1)
    options = {"segment_ids_q": ids, "segment_ids_k": ids}
    placed = {name: backend.place(x) for name, x in options.items()}
    out, lse = calls.forward(backend, case, q, k, v, **placed)
    want = expected.forward(q, k, v, **options)
    assert_forward_matches((out, lse), want, case)
    arrays = dout, q, k, v, out, lse
    got = calls.backward(backend, case, *arrays, **placed)
    want = expected.backward(dout, q, k, v, **options)
    assert_gradients_match(got, want, case)


IN_TURNS = {
    "window": {"window": (20, 20)},
    "segments": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
    "packed": {"offsets": ((0, 10, 60, 150), (0, 50, 60, 150))},
}


@on_kernels
@each_kind
@pytest.mark.parametrize("name", IN_TURNS)
def test_deterministic(backend, kind, name):
    """Key tiles add to dq in order, although some are skipped."""
    case = Case(
        seqlen_q=150, seqlen_k=150, num_heads_q=2, deterministic=True,
        **IN_TURNS[name], **KINDS[kind],
    )  # fmt: skip
    arrays = inputs(case)
    if case.offsets:
        arrays = [x[0] for x in arrays]
    first = calls.both(backend, case, *arrays)
    for seed in (1, 2):
        other = replace(case, on=replace(case.on, seed=seed))
        again = calls.both(backend, other, *arrays)
        for x, a, b in zip("qkv", again, first, strict=True):
            assert_bitwise(a, b, f"d{x}")


@on_kernels
@each_kind
@pytest.mark.parametrize(
    "options", strategies.FEW_PACKED_OPTIONS, ids=lambda x: "-".join(sorted(x))
)
def test_packed_sequences(backend, kind, options):
    """A sequence without queries, one without keys, unused tokens."""
    fields = {**fields_of(options), **KINDS[kind]}
    case = Case(
        seqlen_q=150, seqlen_k=170, num_heads_q=4, num_heads_kv=2,
        causal=True, offsets=((0, 70, 70, 90, 140), (0, 100, 130, 130, 160)),
        **fields,
    )  # fmt: skip
    check_packed(backend, case)


HIDING = {
    "window": {"window": (3, 3)},
    "mask": {"arrays_of": ("mask",)},
    "segments": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
}


@on_kernels
@each_kind
@pytest.mark.parametrize("name", HIDING)
def test_masked_nan_does_not_spread(backend, kind, name):
    """NaN in a key and its value, and in a query and its dout."""
    spoiled = tuple((x, (0, 9), "nan") for x in ("q", "k", "v", "dout"))
    case = Case(seqlen_q=50, seqlen_k=50, spoiled=spoiled,
                **HIDING[name], **KINDS[kind])  # fmt: skip
    check_forward(backend, case)
    check_gradients_of_forward(backend, case)


@on_kernels
@each_kind
def test_rows_without_keys_have_the_sink(backend, kind):
    """24 of 40 queries see none of the 16 keys."""
    case = Case(seqlen_q=40, causal=True, arrays_of=("sink",), **KINDS[kind])
    q, k, v, _ = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert not out[:, :24].any()
    assert (lse[:, :, :24] == case.options()["sink"]).all()
    check_gradients(backend, case)
