"""Which tiles a user's mask hides, or leaves whole: prepare/tile_flags.cu."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from cuflash import emulator
from cuflash.backends.emulator.machine import Machine
from cuflash.launch import structs
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request import traced
from helpers.compare import assert_elements
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem
from helpers.small_kernels import read_only

pytestmark = needs_compiler

ARGUMENTS = {
    "forward": structs.ForwardExpressionArguments,
    "backward": structs.BackwardExpressionArguments,
}
NONE, PARTLY, ALL = range(3)
SHAPE = 2, 4, 150, 210  # batch, heads, queries, keys; groups of two heads


def sliding(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 60


def of_heads(b, h, q_idx, kv_idx):
    return kv_idx < 50 * h + 20


def of_batches(b, h, q_idx, kv_idx):
    return (q_idx // 64 + kv_idx // 64) % 2 == b


def of_ids(b, h, q_idx, kv_idx, *, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


def scattered(b, h, q_idx, kv_idx):
    """Intervals do not tell that few pairs are hidden, or visible."""
    return (q_idx * kv_idx) % 1009 != 500


@dataclass(frozen=True)
class Masked:
    """A call's mask."""

    mask: object
    direction: str = "forward"
    fields: dict = field(default_factory=dict)

    @property
    def ids(self):
        return np.arange(300).reshape(2, 150).repeat(2, axis=1) // 40

    def sees(self):
        """Return the mask, written out for all heads."""
        given = {"ids": self.ids} if self.mask is of_ids else {}
        indices = np.ogrid[tuple(map(slice, SHAPE))]
        return np.broadcast_to(self.mask(*indices, **given), SHAPE)

    def in_bounds(self):
        """Return which pairs the causal mask and the window leave."""
        i, j = np.ogrid[: SHAPE[2], : SHAPE[3]]
        past = i + SHAPE[3] - SHAPE[2] - j
        left, right = self.fields.get("window", (None, None))
        kept = np.full(past.shape, True)
        if self.fields.get("causal"):
            kept &= past >= 0
        if left is not None:
            kept &= past <= left
        if right is not None:
            kept &= past >= -right
        return kept


def planned(masked):
    options = {"mask_mod": masked.mask}
    if masked.mask is of_ids:
        options[traced.named("ids")] = masked.ids
    fields = dict(traced.recorded(options).fields)
    batch, heads, seqlen_q, seqlen_k = SHAPE
    problem = small_problem(
        masked.direction, "float32", batch=batch, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, num_heads_q=heads, num_heads_kv=2,
        **{"causal": False, **masked.fields, **fields},
    )  # fmt: skip
    return plan(problem, device_of_arch("sm_80"), "fma")


def computed(masked):
    """Run the kernel; return the flags and their tile."""
    decided = planned(masked)
    launch, buffer = decided.launches[0], decided.workspace[0]
    assert launch.kernel.entry == "tile_flags"
    assert buffer.name == "tile_flags"
    arguments = np.zeros((), ARGUMENTS[masked.direction])
    batch, heads, seqlen_q, seqlen_k = SHAPE
    arguments["arrays"]["shape"] = batch, seqlen_q, seqlen_k, heads, 2, 8, 8
    left, right = masked.fields.get("window", (None, None))
    options = arguments["options"]
    options["window_left"] = 1 << 29 if left is None else left
    options["window_right"] = 1 << 29 if right is None else right
    if masked.fields.get("causal"):
        options["window_right"] = 0
    with emulator.active("sm_80") as emulated:
        machine = Machine(emulated)
        ids = read_only(masked.ids)
        arguments["mod_arrays"][0] = machine.address_of(ids)
        arguments["expression"]["sizes"][:2] = ids.shape
        arguments["expression"]["strides"][:2] = ids.shape[1], 1
        flags = machine.empty(buffer.nbytes, np.uint8)
        arguments["tile_flags"] = machine.address_of(flags, written=True)
        machine.run((launch,), arguments)
    tile = decided.tile
    tiles = (-(-seqlen_q // tile.block_q), -(-seqlen_k // tile.block_k))
    mask = decided.problem.mask_mod
    groups = heads if masked.direction == "forward" else 2
    axes = (
        batch if "b" in mask.depends else 1,
        groups if "h" in mask.depends else 1,
    )
    # Other bits say which rows bounds hide: test_mask_flags.py.
    return (flags & 3).reshape(*axes, *tiles), tile


def over_tiles(reduce, pairs, tile):
    """Reduce a written-out mask to its tiles."""
    starts = (
        np.arange(0, length, block)
        for length, block in zip(
            pairs.shape[-2:], (tile.block_q, tile.block_k), strict=True
        )
    )
    for axis, first in zip((-2, -1), starts, strict=True):
        pairs = reduce.reduceat(pairs, first, axis=axis)
    return pairs


CASES = {
    "sliding": Masked(sliding),
    "of heads": Masked(of_heads),
    "of groups": Masked(of_heads, "backward"),
    "of batches": Masked(of_batches),
    "of ids": Masked(of_ids),
    "scattered": Masked(scattered, "backward"),
    "causal": Masked(of_batches, "backward", {"causal": True}),
    "window": Masked(of_ids, "forward", {"window": (70, 40)}),
}


@pytest.mark.parametrize("name", CASES)
def test_flags_agree_with_the_mask_written_out(name):
    masked = CASES[name]
    flags, tile = computed(masked)
    kept, sees = masked.in_bounds(), masked.sees()
    some = over_tiles(np.logical_or, sees & kept, tile)
    every = over_tiles(np.logical_and, sees | ~kept, tile)
    whole = over_tiles(np.logical_and, kept, tile)
    if masked.direction == "backward":  # a group's heads share a flag
        some, every = (
            f(x.reshape(x.shape[0], 2, 2, *x.shape[2:]), axis=2)
            for f, x in ((np.any, some), (np.all, every))
        )
    flags = np.broadcast_to(flags, some.shape)
    assert_elements(flags == NONE, ~some, "flags == NONE")
    assert not np.any((flags == ALL) & ~every)
    whole = some & every & whole
    assert_elements(flags[whole], np.full(whole.sum(), ALL), "whole tiles")


def test_a_mask_of_no_head_has_flags_for_one():
    assert computed(CASES["sliding"])[0].shape[:2] == (1, 1)
    assert computed(CASES["of groups"])[0].shape[:2] == (1, 2)


def test_packed_sequences_have_no_flags():
    fields = {"num_sequences": 2}
    problem = small_problem(
        "forward", "float32", batch=1, **fields,
        **dict(traced.recorded({"mask_mod": sliding}).fields),
    )  # fmt: skip
    decided = plan(problem, device_of_arch("sm_80"), "fma")
    assert "tile_flags" not in {x.name for x in decided.workspace}
