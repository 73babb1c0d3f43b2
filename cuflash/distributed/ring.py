"""Attention of a rank's queries to the keys of all ranks, step by step.

The steps are those of `schedule`. Keys and values arrive in `SLOTS` buffers:
those of the next steps travel while a step computes. In the backward pass a
rank sends the gradients of another rank's keys back to it, where they are
summed; they travel while the next step computes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cuflash.api import attention as api_attention

from .accumulate import Merged, Sums
from .array_gradients import ArrayGradients
from .functions import Functions
from .group import Group, Message, Pending
from .layouts import shifted
from .machine import Host
from .rearrange import contiguous
from .schedule import Block, Mask, blocks, chunk_ranges, needed_keys

# Two would do if copies could always begin at once. But where a kernel holds
# all SMs of a GPU, a copy by NCCL begins when that kernel ends: it must have
# been ready by then, so its buffer is of the step before the last.
SLOTS = 3

_ALIGNMENT = 256  # bytes, as of memory that CuPy allocates


@dataclass
class Ring:
    """The ranks that compute with each other's keys, and their mask.

    Attributes
    ----------
    group : Group
    mask : Mask
        Of sequences that the group's ranks share.
    machine : Host
    options : mapping
        Further arguments of `cuflash.forward` and `cuflash.backward`.
    functions : Functions or None
        The user's.
    """

    group: Group
    mask: Mask
    machine: Host
    options: Mapping[str, Any] = field(default_factory=dict)
    functions: Functions | None = None

    def blocks(self, step: int) -> tuple[Block, ...]:
        """The blocks that this rank computes in a step."""
        return blocks(self.mask, self.group.rank, self.source(step))

    def source(self, step: int) -> int:
        """The rank whose keys this one needs in a step."""
        return (self.group.rank - step) % self.group.size

    def target(self, step: int) -> int:
        """The rank that needs this one's keys in a step."""
        return (self.group.rank + step) % self.group.size

    def needed(self, step: int) -> tuple[range, ...]:
        """The keys of `source` that this rank needs."""
        return needed_keys(self.mask, self.group.rank, self.source(step))

    def given(self, step: int) -> tuple[range, ...]:
        """The keys of this rank that `target` needs."""
        return needed_keys(self.mask, self.target(step), self.group.rank)

    def of_queries(self) -> tuple[tuple[range, ...], list[range]]:
        """The chunks of this rank's queries, and those of each block."""
        steps = range(self.group.size)
        expected = [x.queries for step in steps for x in self.blocks(step)]
        return chunk_ranges(self.mask, self.mask.offsets_q), expected

    def of_keys(self) -> tuple[tuple[range, ...], list[range]]:
        """The chunks of this rank's keys, and those that gradients are of."""
        steps = range(1, self.group.size)
        expected = [x.keys for x in self.blocks(0)]
        expected += [x for step in steps for x in self.given(step)]
        return chunk_ranges(self.mask, self.mask.offsets_k), expected

    def arguments(self, block: Block) -> dict[str, Any]:
        """The arguments of a block's call, without its arrays."""
        found = {
            **self.options, "causal": block.causal, "window": block.window
        }  # fmt: skip
        if block.window == (None, None):
            del found["window"]
        if self.functions is not None:
            found |= self.functions.arguments(block, self.mask)
        if block.cu_seqlens_q:
            for name, offsets in (
                ("q", block.cu_seqlens_q), ("k", block.cu_seqlens_k)
            ):  # fmt: skip
                found[f"cu_seqlens_{name}"] = self.machine.offsets(offsets)
                longest = max(b - a for a, b in pairwise(offsets))
                found[f"max_seqlen_{name}"] = longest
        return found


def forward(ring: Ring, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Out and lse of a rank's queries, in chunk order and full rank."""
    merged: Merged | None = None
    for step, keys in Travel(ring, (k, v)).steps():
        for block in ring.blocks(step):
            rows = slice(block.queries.start, block.queries.stop)
            given = (q[:, rows], *keys.of(block.keys))
            results = _call(
                api_attention.forward, ring, block, *given, return_lse=True
            )
            merged = merged or _merged(ring, q, v)
            merged.merge(block.queries, *results)
    merged = merged or _merged(ring, q, v)
    return merged.result(), merged.lse


def _merged(ring: Ring, q: Any, v: Any) -> Merged:
    """Made after the first launch, which then does not wait for it."""
    shape = (*q.shape[:-1], v.shape[-1])
    return Merged(ring.machine, shape, q.dtype, *ring.of_queries())


def backward(
    ring: Ring, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
    dlse: Any = None, *, dmod: ArrayGradients | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """dq, dk and dv of a rank's queries and keys, in chunk order.

    `dmod` gets the gradients of arrays.
    """
    dq = Sums(ring.machine, q.shape, q.dtype, *ring.of_queries())
    dk, dv = _sums(ring, (k, v), *ring.of_keys())
    returns = Returns(ring, dk, dv)
    for step, keys in Travel(ring, (k, v)).steps():
        here = {range(k.shape[1]): (dk, dv)}
        if step:
            here = returns.new(step, keys)
        for block in ring.blocks(step):
            rows = slice(block.queries.start, block.queries.stop)
            gradients = _call(
                api_attention.backward, ring, block,
                dout[:, rows], q[:, rows], *keys.of(block.keys),
                out[:, rows], lse[..., rows],
                dlse=None if dlse is None else dlse[..., rows],
            )  # fmt: skip
            if dmod is not None:
                dmod.add(gradients[3])
            dq.add(block.queries, gradients[0])
            for keys_of, sums in here.items():
                if _holds(keys_of, block.keys):
                    at = shifted(block.keys, -keys_of.start)
                    for total, x in zip(sums, gradients[1:3], strict=True):
                        total.add(at, x)
        returns.receive()
        if step:
            returns.send(step, here)
    returns.receive()
    return dq.result(), dk.result(), dv.result()


def _sums(
    ring: Ring, like: tuple[Any, Any], ranges: Any, expected: list[range]
) -> tuple[Sums, Sums]:
    k, v = (
        Sums(ring.machine, x.shape, x.dtype, ranges, expected) for x in like
    )
    return k, v


class Keys:
    """Some keys and values of a rank: arrays by their ranges of tokens."""

    def __init__(self, parts: dict[range, tuple[Any, Any]]) -> None:
        self.parts = parts

    def of(self, keys: range) -> tuple[Any, Any]:
        """Views of the keys and the values of a block."""
        for held, pair in self.parts.items():
            if _holds(held, keys):
                at = slice(keys.start - held.start, keys.stop - held.start)
                k, v = pair
                return k[:, at], v[:, at]
        raise KeyError(keys)


class Travel:
    """Sends a rank's keys and values, and receives those of the others.

    On all ranks the exchanges of steps have one order, as NCCL demands: the
    keys of the first `SLOTS` steps; then, after each step, its gradients, if
    any, and the keys of `SLOTS` steps later.
    """

    def __init__(self, ring: Ring, own: tuple[Any, Any]) -> None:
        self.ring, self.own = ring, own
        self.size = ring.group.size
        self.contiguous: dict[range, tuple[Any, Any]] = {}
        self.slots: list[tuple[Any, ...]] = []
        self.coming: deque[tuple[Keys, Pending]] = deque()

    def steps(self) -> Iterator[tuple[int, Keys]]:
        """Yield each step and its keys, which then may be overwritten."""
        k, v = self.own
        own = Keys({range(k.shape[1]): (k, v)})
        group = self.ring.group
        if group.shares_device:
            yield 0, own
            self._prepare()
            self._begin(group.mark())
        else:
            self._prepare()
            now = group.mark()
            if group.launches_first:
                yield 0, own
                self._begin(now)
            else:
                self._begin(now)
                yield 0, own
        for step in range(1, self.size):
            keys, pending = self.coming.popleft()
            pending.wait()
            yield step, keys
            if step + SLOTS < self.size:
                # What computes with the slot is queued: it is free at this
                # moment of the stream.
                self._start(step + SLOTS, self.ring.group.mark())

    def _prepare(self) -> None:
        """Make what the exchanges read and write."""
        given = {x for i in range(1, self.size) for x in self.ring.given(i)}
        for keys in sorted(given, key=len, reverse=True):
            self._own_part(keys)
        self.slots = self._new_slots()

    def _begin(self, now: Any) -> None:
        """Start the exchanges of the first steps."""
        for step in range(1, min(SLOTS + 1, self.size)):
            self._start(step, now)

    def _new_slots(self) -> list[tuple[Any, ...]]:
        """Memory for the keys and values of every SLOTS-th step, in one."""
        tokens = [
            max(
                sum(map(len, self.ring.needed(step)))
                for step in range(index + 1, self.size, SLOTS)
            )
            for index in range(min(SLOTS, self.size - 1))
        ]
        k, v = (self._side_by_side(tokens, x) for x in self.own)
        return list(zip(k, v, strict=True))

    def _side_by_side(self, tokens: list[int], like: Any) -> list[Any]:
        """Memory for so many tokens each; all starts are aligned."""
        row = like.shape[0] * math.prod(like.shape[2:])
        unit = _ALIGNMENT // like.dtype.itemsize
        sizes = [-(-count * row // unit) * unit for count in tokens]
        memory = self.ring.machine.empty((sum(sizes),), like.dtype)
        ends = itertools.accumulate(sizes, initial=0)
        return [memory[start:stop] for start, stop in pairwise(ends)]

    def _start(self, step: int, after: Any) -> None:
        ring, slot = self.ring, self.slots[(step - 1) % SLOTS]
        parts: dict[range, tuple[Any, Any]] = {}
        receives: list[Message] = []
        used = 0  # tokens
        for keys in ring.needed(step):
            pair = [
                _part(memory, x, used, len(keys))
                for memory, x in zip(slot, self.own, strict=True)
            ]
            used += len(keys)
            parts[keys] = pair[0], pair[1]
            receives += [(x, ring.source(step)) for x in pair]
        sends = [
            (x, ring.target(step))
            for keys in ring.given(step)
            for x in self._own_part(keys)
        ]
        pending = ring.group.exchange(sends, receives, after)
        self.coming.append((Keys(parts), pending))

    def _own_part(self, keys: range) -> tuple[Any, Any]:
        """Contiguous keys and values to send."""
        if keys not in self.contiguous:
            k, v = self._first_of_part(keys) or (
                self.ring.group.sendable(
                    contiguous(x[:, keys.start : keys.stop])
                )
                for x in self.own
            )
            self.contiguous[keys] = k, v
        return self.contiguous[keys]

    def _first_of_part(self, keys: range) -> tuple[Any, Any] | None:
        """The first keys of an array that is sent, if they are contiguous."""
        if self.own[0].shape[0] == 1:
            for held, (k, v) in self.contiguous.items():
                if held.start == keys.start and _holds(held, keys):
                    return k[:, : len(keys)], v[:, : len(keys)]
        return None


def _part(memory: Any, like: Any, start: int, count: int) -> Any:
    """An array of `count` tokens, after `start` tokens, in a slot."""
    batch, _, *rest = like.shape
    row = batch * math.prod(rest)
    flat = memory[start * row : (start + count) * row]
    return flat.reshape((batch, count, *rest))


class Returns:
    """Sends gradients of other ranks' keys, and adds those of its own."""

    def __init__(self, ring: Ring, dk: Sums, dv: Sums) -> None:
        self.ring, self.own = ring, (dk, dv)
        self.coming: deque[Any] = deque()

    def new(self, step: int, keys: Keys) -> dict[range, tuple[Sums, Sums]]:
        """Sums for the gradients of the keys of a step."""
        found = {}
        for held, pair in keys.parts.items():
            expected = [
                shifted(x.keys, -held.start)
                for x in self.ring.blocks(step)
                if _holds(held, x.keys)
            ]
            ranges = [range(len(held))]
            found[held] = _sums(self.ring, pair, ranges, expected)
        return found

    def send(self, step: int, sums: dict[range, tuple[Sums, Sums]]) -> None:
        """Send a step's gradients; start to receive those of own keys."""
        ring = self.ring
        sends = [
            (contiguous(total.result()), ring.source(step))
            for pair in sums.values()
            for total in pair
        ]
        receives, arrays = [], {}
        for keys in ring.given(step):
            pair = tuple(
                ring.machine.empty(
                    (x.shape[0], len(keys), *x.shape[2:]), x.dtype
                )
                for x in self.own
            )
            arrays[keys] = pair
            receives += [(x, ring.target(step)) for x in pair]
        pending = ring.group.exchange(sends, receives)
        self.coming.append((pending, arrays, sends))

    def receive(self) -> None:
        """Add what was sent before the last step."""
        while self.coming:
            pending, arrays, _ = self.coming.popleft()
            pending.wait()
            for keys, pair in arrays.items():
                for total, x in zip(self.own, pair, strict=True):
                    total.add(keys, x)


def _call(
    function: Callable[..., Any], ring: Ring, block: Block, *given: Any,
    **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Call attention on a block, whose packed sequences have no batch."""
    arguments = {**ring.arguments(block), **more}
    if not block.cu_seqlens_q:
        return function(*given, **arguments)
    if arguments.get("dlse") is not None:
        arguments["dlse"] = arguments["dlse"][0]
    found = function(*(x[0] for x in given), **arguments)
    return tuple(x if isinstance(x, dict) else x[None] for x in found)


def _holds(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
