"""All-to-all over heads: from a part of each sequence to a part of the heads.

Of n = R u ranks, u neighbours exchange tokens for heads: each then holds all
tokens of the u ranks, of 1 / u of the heads. Those tokens are what one of R
ranks would hold, so R ranks with the same heads form a ring. With R = 1 it is
DeepSpeed's Ulysses (arXiv:2309.14509); the product is USP (arXiv:2405.07719).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .group import Group, Subgroup
from .layouts import Part
from .machine import Host
from .rearrange import Source, arrange, contiguous
from .schedule import Mask, in_chunk_order

# Axes of tokens and heads: of q and of lse.
ROWS, LSE = (1, 2), (2, 1)


class Heads:
    """The exchange of a group's ranks among `ulysses` neighbours.

    Parameters
    ----------
    group : Group
    ulysses : int
        Divides the group's size.
    mask : Mask
        Of the whole group.
    machine : Host
    """

    def __init__(
        self, group: Group, ulysses: int, mask: Mask, machine: Host
    ) -> None:
        self.whole, self.mask, self.machine = group, mask, machine
        self.count = ulysses
        self.place, self.own = divmod(group.rank, ulysses)
        first = self.place * ulysses
        self.ranks = tuple(range(first, first + ulysses))
        self.group = Subgroup(group, self.ranks)

    def ring(self) -> Group:
        """The ranks with the same heads."""
        if self.count == 1:
            return self.whole
        ranks = range(self.own, self.whole.size, self.count)
        return Subgroup(self.whole, ranks)

    def _sources(self, offsets: tuple[int, ...]) -> list[Source]:
        """In chunk order: which neighbour has which tokens."""
        parts: list[tuple[Part, int]] = [
            (part, index)
            for index, rank in enumerate(self.ranks)
            for part in in_chunk_order(self.mask, offsets, rank)
        ]
        parts.sort(key=lambda x: (*x[0][:2], x[0].positions.start))
        return [(index, part.tokens) for part, index in parts]

    def spread(
        self,
        arrays: Sequence[Any],
        offsets: Sequence[tuple[int, ...]],
        axes: tuple[int, int] = ROWS,
    ) -> list[Any]:
        """Arrays of all neighbours' tokens, in chunk order, of own heads."""
        tokens, heads = axes
        received = self._exchange(
            [
                [_cut(x, self.count, i, heads) for x in arrays]
                for i in range(self.count)
            ]
        )
        return [
            self._in_order([x[i] for x in received], offsets[i], tokens)
            for i in range(len(arrays))
        ]

    def _in_order(
        self, parts: list[Any], offsets: tuple[int, ...], axis: int
    ) -> Any:
        if self.count == 1 and not self.mask.is_rearranged:
            return parts[0]
        return arrange(parts, self._sources(offsets), axis)

    def collect(
        self,
        arrays: Sequence[Any],
        offsets: Sequence[tuple[int, ...]],
        axes: Sequence[tuple[int, int]],
    ) -> list[Any]:
        """The inverse of `spread`: own tokens of all heads."""
        cut = [
            self._by_neighbour(x, of, tokens)
            for x, of, (tokens, _) in zip(arrays, offsets, axes, strict=True)
        ]
        received = self._exchange(
            [[x[i] for x in cut] for i in range(self.count)]
        )
        return [
            self._joined([x[i] for x in received], heads)
            for i, (_, heads) in enumerate(axes)
        ]

    def _by_neighbour(
        self, array: Any, offsets: tuple[int, ...], axis: int
    ) -> list[Any]:
        """For each neighbour its tokens, in the order of its array."""
        if self.count == 1 and not self.mask.is_rearranged:
            return [array]
        found: list[list[tuple[int, range]]] = [[] for _ in self.ranks]
        start = 0
        for index, tokens in self._sources(offsets):
            end = start + len(tokens)
            found[index].append((tokens.start, range(start, end)))
            start = end
        return [
            arrange(
                [array],
                [(0, x) for _, x in sorted(own, key=lambda pair: pair[0])],
                axis,
            )
            for own in found
        ]

    def _joined(self, parts: list[Any], axis: int) -> Any:
        if len(parts) == 1:
            return parts[0]
        sources = [(i, range(x.shape[axis])) for i, x in enumerate(parts)]
        return arrange(parts, sources, axis)

    def _exchange(self, given: list[list[Any]]) -> list[list[Any]]:
        """Lists of arrays for each neighbour, and lists of each.

        What a neighbour sends is like what it gets: all ranks hold as many
        tokens, and as many heads.
        """
        if self.count == 1:
            return given
        sends, receives = [], []
        received: list[list[Any]] = []
        for rank in range(self.count):
            if rank == self.own:
                received.append(given[rank])
                continue
            new = [self.machine.empty(x.shape, x.dtype) for x in given[rank]]
            sends += [(contiguous(x), rank) for x in given[rank]]
            receives += [(x, rank) for x in new]
            received.append(new)
        self.group.exchange(sends, receives).wait()
        return received


def _cut(array: Any, count: int, index: int, axis: int) -> Any:
    """One of `count` equal parts of an array along an axis."""
    length = array.shape[axis] // count
    at = (slice(None),) * axis
    return array[(*at, slice(index * length, (index + 1) * length))]
