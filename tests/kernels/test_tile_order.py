"""The order in which Hopper's blocks take tiles with segment ids."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import emulator
from cuflash.backends.emulator.machine import Machine
from cuflash.launch.structs import (
    BackwardWgmmaOptionsArguments,
    ForwardWgmmaOptionsArguments,
)
from cuflash.plans.plan import device_of_arch, legal_tiles, plan
from cuflash.plans.steps import ORDER_BYTES
from helpers.compare import (
    assert_all,
    assert_at_most,
    assert_bitwise,
)
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem
from helpers.small_kernels import read_only

pytestmark = needs_compiler

ARGUMENTS = {
    "forward": ForwardWgmmaOptionsArguments,
    "backward": BackwardWgmmaOptionsArguments,
}
ANY = 1 << 29  # the bound that stands for none


@dataclass(frozen=True)
class Ids:
    """A call's segment ids and masks."""

    direction: str
    of_q: np.ndarray
    of_k: np.ndarray
    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def problem(self):
        """With two groups of two heads, on which nothing here depends."""
        (batch, seqlen_q), (_, seqlen_k) = self.of_q.shape, self.of_k.shape
        return small_problem(
            self.direction, "bfloat16", batch=batch, seqlen_q=seqlen_q,
            seqlen_k=seqlen_k, num_heads_q=4, num_heads_kv=2,
            causal=self.causal, segment_ids=True,
            window=self.window or (None, None),
        )  # fmt: skip

    def sees(self):
        """Whether the mask and the window let a query see a key."""
        i = np.arange(self.of_q.shape[1])[:, None]
        j = np.arange(self.of_k.shape[1])
        left, right = self.window or (ANY, ANY)
        past = i + self.of_k.shape[1] - self.of_q.shape[1] - j
        return (past <= left) & (past >= (0 if self.causal else -right))


def starts(length, block):
    return np.arange(0, length, block)


def visited(ids, tile):
    """Return how many tiles each tile visits, for all batches."""
    q_starts = starts(ids.of_q.shape[1], tile.block_q)
    k_starts = starts(ids.of_k.shape[1], tile.block_k)
    sees = np.logical_or.reduceat(
        np.logical_or.reduceat(ids.sees(), q_starts, axis=0), k_starts, axis=1
    )

    def ranges(array, starts):
        return [
            f.reduceat(array, starts, axis=1) for f in (np.minimum, np.maximum)
        ]

    q_low, q_high = ranges(ids.of_q, q_starts)
    k_low, k_high = ranges(ids.of_k, k_starts)
    meets = (q_low[:, :, None] <= k_high[:, None]) & (
        k_low[:, None] <= q_high[:, :, None]
    )
    other = 2 if ids.direction == "forward" else 1
    return np.maximum((sees & meets).sum(axis=other), 1).ravel()


def planned(ids):
    """Return a plan with tiles of unusual sizes."""
    problem, device = ids.problem, device_of_arch("sm_90a")
    tile = min(
        legal_tiles(problem, device, "sm90"),
        key=lambda x: (x.block_q * x.block_k, x.num_warps, x.num_stages),
    )
    return plan(problem, device, "sm90", tile)


def computed_order(ids, threads=None):
    """Run the kernel; memory before the order must not change."""
    decided, problem = planned(ids), ids.problem
    ranges, order = decided.launches[:2]
    assert order.kernel.entry == "segment_order"
    if threads is not None:
        shared = ORDER_BYTES * threads
        constants = {
            **dict(order.kernel.constants),
            "NUM_THREADS": threads,
            "SHARED_BYTES": shared,
        }
        order = replace(order, kernel=replace(
            order.kernel, constants=tuple(constants.items()),
            threads=threads, shared_bytes=shared,
        ))  # fmt: skip
    arguments = np.zeros((), ARGUMENTS[ids.direction])
    shape = (problem.batch, problem.seqlen_q, problem.seqlen_k, 4, 2, 64, 64)
    arguments["arrays"]["shape"] = shape
    options = arguments["options"]
    options["window_left"], options["window_right"] = ids.window or (0, 0)
    if ids.causal:
        options["window_right"] = 0
    if decided.work_items is not None:
        arguments["work_items"] = tuple(decided.work_items)
    with emulator.active("sm_90a") as emulated:
        machine = Machine(emulated)
        workspace = {
            x.name: machine.empty(x.nbytes // 4, np.int32)
            for x in decided.workspace
        }
        for name, array in (("q", ids.of_q), ("k", ids.of_k)):
            arguments[f"segment_ids_{name}"] = machine.address_of(
                read_only(array)
            )
            options[f"ids_{name}_stride"] = array.shape[1], 1
        for name, buffer in workspace.items():
            address = machine.address_of(buffer, written=True)
            in_options = name in (arguments.dtype.names or ())
            struct = arguments if in_options else arguments["arrays"]
            struct[name] = address
        machine.run((ranges,), arguments)
        before = {name: x.copy() for name, x in workspace.items()}
        machine.run((order,), arguments)
    found = workspace.pop("tile_order")
    assert_all(before["tile_order"], -1, "tile_order")
    assert found.size == len(visited(ids, decided.tile))
    for name, buffer in workspace.items():
        assert_bitwise(buffer, before[name], name)
    return found, decided.tile


@st.composite
def drawn_ids(draw, direction):
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 1500))
    of_q = rng.integers(0, draw(st.integers(1, 12)), shape, np.int32)
    # As many tokens, of the same documents, or others.
    of_k = of_q
    if draw(st.booleans()):
        shape = shape[0], draw(st.integers(1, 1500))
        of_k = rng.integers(0, draw(st.integers(1, 12)), shape, np.int32)
    if draw(st.integers(0, 4)):
        of_q, of_k = np.sort(of_q), np.sort(of_k)
    bounds = st.integers(0, 400)
    return Ids(
        direction, of_q.copy(), of_k.copy(), draw(st.booleans()),
        draw(st.none() | st.tuples(bounds, bounds)),
    )  # fmt: skip


both_directions = pytest.mark.parametrize(
    "direction", ARGUMENTS, ids="{}-emulated".format
)
# All are run by the same few kernels.
more = settings(max_examples=3 * settings().max_examples)


@both_directions
@more
@given(data=st.data())
def test_longest_first(direction, data):
    ids = data.draw(drawn_ids(direction))
    order, tile = computed_order(ids)
    lengths = visited(ids, tile)
    assert_all(np.sort(order), np.arange(len(lengths)), "np.sort(order)")
    assert_at_most(np.diff(lengths[order]), 0, "np.diff(lengths[order])")
    assert_all(order, np.argsort(-lengths, kind="stable"), "order")


def documents(direction, batch, num_tiles):
    """With the causal mask; the last tiles have one token."""
    tile = planned(Ids(direction, *np.zeros((2, 1, 9), np.int32), True)).tile
    block = tile.block_q if direction == "forward" else tile.block_k
    tokens = (num_tiles - 1) * block + 1
    rng = np.random.default_rng(batch)
    ids = np.sort(rng.integers(0, 5, (batch, tokens), np.int32))
    return Ids(direction, ids, ids.copy(), causal=True)


@both_directions
@pytest.mark.parametrize(("batch", "num_tiles"), [(2, 16), (1, 32)])
def test_a_tile_for_each_thread(direction, batch, num_tiles):
    ids = documents(direction, batch, num_tiles)
    order, tile = computed_order(ids, threads=32)
    lengths = visited(ids, tile)
    assert len(lengths) == 32
    assert_all(order, np.argsort(-lengths, kind="stable"), "order")


@both_directions
@pytest.mark.parametrize(("batch", "num_tiles"), [(3, 11), (1, 70)])
def test_more_tiles_than_threads(direction, batch, num_tiles):
    """They keep their natural order: late queries come first."""
    ids = documents(direction, batch, num_tiles)
    order, _ = computed_order(ids, threads=32)
    want = np.arange(batch * num_tiles).reshape(batch, num_tiles)
    if direction == "forward":
        want = want[:, ::-1]
    assert_all(order, want.ravel(), "order")


@both_directions
@pytest.mark.parametrize("num_ranges", [4 * 32, 4 * 32 + 1])
def test_capacity_for_ranges(direction, num_ranges):
    """Of two tiles the one that visits all others comes first if they fit.

    By their numbers it comes last.
    """
    tile = planned(Ids(direction, *np.zeros((2, 1, 9), np.int32))).tile
    blocks = tile.block_q, tile.block_k
    own, other = blocks if direction == "forward" else blocks[::-1]
    visits, hidden = (0, 1) if direction == "forward" else (1, 0)
    of_two = np.repeat(np.int32([visits, hidden]), own)[None]
    of_all = np.zeros((1, (num_ranges - 2) * other), np.int32)
    pair = (of_two, of_all) if direction == "forward" else (of_all, of_two)
    order, _ = computed_order(Ids(direction, *pair), threads=32)
    fits = num_ranges <= 4 * 32
    assert list(order) == ([visits, hidden] if fits else [hidden, visits])
