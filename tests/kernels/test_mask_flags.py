"""What prepare/tile_flags.cu finds of a user's mask, and the tiles' order."""

from dataclasses import dataclass

import numpy as np
import pytest

from cuflash import emulator
from cuflash.backends.emulator.machine import Machine
from cuflash.expressions.trace import ArrayKind, Given, record
from cuflash.launch.structs import (
    BackwardWgmmaExpressionArguments,
    ForwardWgmmaExpressionArguments,
)
from cuflash.plans.plan import device_of_arch, plan
from helpers.compare import assert_all
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem
from helpers.small_kernels import read_only

pytestmark = needs_compiler

ARGUMENTS = {
    "forward": ForwardWgmmaExpressionArguments,
    "backward": BackwardWgmmaExpressionArguments,
}
BATCH, SEQLENS, HEADS = 2, (700, 590), 4
NONE, PARTLY, ALL = range(3)


def _prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 300) | (q_idx + 2 >= kv_idx)


def _thirds(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 != 0


def _late(b, h, q_idx, kv_idx):
    return ((kv_idx >= 300) & (q_idx >= 400)) | (q_idx < 5)


def _of_batch(b, h, q_idx, kv_idx):
    return q_idx // (100 + 50 * b) == kv_idx // (100 + 50 * b)


def _of_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100 * (h + 1))


def _documents(b, h, q_idx, kv_idx, *, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


@dataclass(frozen=True)
class Found:
    """The kernels' results, and the pairs that are visible."""

    flags: np.ndarray  # batch, heads, query tiles, key tiles
    bits: np.ndarray | None  # the same, and what a tile has
    order: np.ndarray
    pairs: np.ndarray  # batch, head, query, key
    tile: object


def _ids():
    rng = np.random.default_rng(3)
    return np.sort(rng.integers(0, 6, (BATCH, max(SEQLENS)), np.int32))


def run(direction, mask, causal):
    """Run the kernels of flags and order."""
    has_ids = mask is _documents
    ids = _ids()
    kinds = (ArrayKind("int32", 2, (1,)),) if has_ids else ()
    given = Given(tuple(("ids", x) for x in kinds))
    graph, _ = record(mask, "mask_mod", given)
    problem = small_problem(
        direction, "bfloat16", batch=BATCH, seqlen_q=SEQLENS[0],
        seqlen_k=SEQLENS[1], num_heads_q=HEADS, num_heads_kv=HEADS // 2,
        causal=causal, mask_mod=graph, mod_arrays=kinds,
    )  # fmt: skip
    decided = plan(problem, device_of_arch("sm_90a"), "sm90")
    arguments = np.zeros((), ARGUMENTS[direction])
    shape = (BATCH, *SEQLENS, HEADS, HEADS // 2, 64, 64)
    arguments["arrays"]["shape"] = shape
    if decided.work_items is not None:
        arguments["work_items"] = tuple(decided.work_items)
    with emulator.active("sm_90a") as emulated:
        machine = Machine(emulated)
        if has_ids:
            arguments["mod_arrays"][0] = machine.address_of(read_only(ids))
            arguments["expression"]["sizes"][:2] = ids.shape
            arguments["expression"]["strides"][:2] = ids.shape[1], 1
        workspace = {
            x.name: machine.empty(-(-x.nbytes // 4), np.int32)
            for x in decided.workspace
        }
        for name, buffer in workspace.items():
            own = name in (arguments.dtype.names or ())
            struct = arguments if own else arguments["arrays"]
            struct[name] = machine.address_of(buffer, written=True)
        for launch in decided.launches[:2]:
            machine.run((launch,), arguments)
    b, h, q, k = np.ogrid[:BATCH, :HEADS, : SEQLENS[0], : SEQLENS[1]]
    pairs = mask(b, h, q, k, **({"ids": ids} if has_ids else {}))
    pairs = np.broadcast_to(pairs, (BATCH, HEADS, *SEQLENS)).copy()
    if causal:
        pairs &= q + SEQLENS[1] - SEQLENS[0] >= k
    tile = decided.tile
    heads = HEADS if direction == "forward" else HEADS // 2
    of = (
        BATCH if "b" in graph.depends else 1,
        heads if "h" in graph.depends else 1,
        -(-SEQLENS[0] // tile.block_q),
        -(-SEQLENS[1] // tile.block_k),
    )
    bits = workspace.get("mask_bits")
    return Found(
        workspace["tile_flags"].view(np.uint8)[: np.prod(of)].reshape(of),
        None if bits is None else bits.view(np.uint32).reshape(*of, -1),
        workspace["tile_order"], pairs, tile,
    )  # fmt: skip


def tiles_of(found, direction):
    """Each flag's place, and the pairs of its tile."""
    group = HEADS // 2 if direction == "backward" else 1
    shared = found.flags.shape[1] == 1
    for place in np.ndindex(found.flags.shape):
        b, h, i, j = place
        q, k = i * found.tile.block_q, j * found.tile.block_k
        heads = slice(0, 1) if shared else slice(h * group, (h + 1) * group)
        yield (
            place,
            found.pairs[
                b,
                heads,
                q : q + found.tile.block_q,
                k : k + found.tile.block_k,
            ],
        )


def unpacked(bits, direction, tile):
    """A tile's bits as pairs: those of an accumulator's elements."""
    rows, columns = tile.block_q, tile.block_k
    if direction == "backward":
        rows, columns = columns, rows
    words = -(-columns // 64)
    pairs = bits.reshape(rows // 16, words, 8, 4, 1) >> np.arange(
        32, dtype=np.uint32
    )
    # of 16 rows, word, row % 8, quad lane, j, half, b
    pairs = (pairs & 1).reshape(rows // 16, words, 8, 4, 8, 2, 2)
    pairs = pairs.transpose(0, 5, 2, 1, 4, 3, 6).reshape(rows, words * 64)
    pairs = pairs[:, :columns].astype(bool)
    return pairs if direction == "forward" else pairs.T


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    "mask", [_prefix, _thirds, _late, _of_batch, _of_head, _documents]
)
@pytest.mark.parametrize("direction", ARGUMENTS, ids="{}-emulated".format)
def test_flags_bits_and_order(direction, mask, causal):
    found = run(direction, mask, causal)
    assert (found.bits is None) == (mask is _of_head)
    for place, pairs in tiles_of(found, direction):
        flag = found.flags[place] & 3
        assert flag == PARTLY or pairs.any() == (flag == ALL), place
        assert (flag == PARTLY) >= (pairs.any() and not pairs.all()) or (
            causal and flag == ALL
        ), place
        if direction == "forward":
            for i in range(0, pairs.shape[1], 64):
                hidden = found.flags[place] >> (2 + i // 64) & 1
                assert not (hidden and pairs[:, i : i + 64].any()), place
        if found.bits is not None and flag == PARTLY:
            own = unpacked(found.bits[place], direction, found.tile)
            _, rows, columns = pairs.shape
            assert_all(own[:rows, :columns], pairs[0], f"bits of {place}")
            assert own.sum() == pairs.sum(), place
    visited = (found.flags & 3) != NONE
    lengths = visited.sum(axis=(1, 2 if direction == "backward" else 3))
    lengths = np.maximum(lengths.repeat(BATCH // len(lengths), axis=0), 1)
    want = np.argsort(-lengths.ravel(), kind="stable")
    assert_all(found.order, want, "order")
