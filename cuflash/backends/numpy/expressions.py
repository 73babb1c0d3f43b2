"""A user's own score_mod and mask_mod on NumPy arrays, tile by tile.

The reference calls functions, so that a recorded one becomes a function
again: `Replayed`. Tiles take a shorter way. They evaluate the graph on their
index arrays, rows (queries, 1) and columns (1, keys), so that only what
depends on both is computed for all pairs; and they skip the keys that
intervals show to be masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cuflash.expressions import derivative, nodes
from cuflash.expressions.evaluate import (
    Buffers,
    ModArrays,
    Place,
    Values,
)
from cuflash.expressions.functions import FUNCTIONS
from cuflash.expressions.intervals import ALL, NONE, Extremes, Intervals
from cuflash.expressions.nodes import Node
from cuflash.reference.expressions import Dual, HeadIndices
from cuflash.reference.options import Options, Tile
from cuflash.reference.scores import reduce_to_shape
from cuflash.request.mod_tangents import slots_of
from cuflash.request.problem import Call
from cuflash.request.traced import slot

GRAIN = 64  # keys whose visibility intervals decide together
FEW_KEYS = 128  # are tested sooner than intervals decide

_B, _H, _QUERY, _KEY = map(nodes.index, nodes.INDICES)
_LENGTHS = tuple(map(nodes.index, nodes.LENGTHS))


class Recorded:
    """A call's functions and what they read.

    Attributes
    ----------
    score, mask : Node or None
    arrays, numbers : tuple
        By slot.
    sums : dict of int to ndarray of float64
        The gradients of arrays, by slot: tiles add to them.
    dots : list of dict of int to ndarray
        The tangents of arrays in each direction, by slot.
    """

    def __init__(self, call: Call) -> None:
        p = call.problem
        self.score, self.mask = p.score_mod, p.mask_mod
        names = map(slot, range(len(p.mod_arrays)))
        self.arrays = tuple(call.options[x] for x in names)
        self.numbers = call.mod_numbers
        self.given = ModArrays(self.arrays, self.numbers)
        self.buffers = Buffers()
        self.sums = {x: np.zeros(self.arrays[x].shape) for x in p.return_dmod}
        moving = {slot(x): x for x in slots_of(call.tangents)}
        count = p.tangents.count if p.tangents else 0
        self.dots = [
            {x: call.directions[name][i] for name, x in moving.items()}
            for i in range(count)
        ]
        self.extremes = Extremes(self.arrays)
        self.visibility: dict[tuple, np.ndarray] = {}
        if call.kept is not None and self.mask is not None:
            of_mask = self.mask, p.lse_dtype
            self.visibility = call.kept.put(of_mask, self.visibility)

    def options(self, heads: HeadIndices) -> dict[str, Any]:
        """What stands for the functions among the reference's options."""
        found = self.functions() | {"head_indices": heads}
        return found | {"return_dmod": tuple(map(slot, self.sums))}

    def functions(self) -> dict[str, Any]:
        """The same for calls that number heads themselves."""
        arrays = dict(zip(map(slot, range(8)), self.arrays, strict=False))
        numbers = {f"number{i}": x for i, x in enumerate(self.numbers)}
        found: dict[str, Any] = {"mod_arrays": arrays | numbers}
        for name, root in ("score_mod", self.score), ("mask_mod", self.mask):
            if root is not None:
                found[name] = Replayed(self, root)
        return found


class Replayed:
    """A recorded function, to be called as the user's is."""

    def __init__(self, recorded: Recorded, root: Node) -> None:
        self.recorded, self.root = recorded, root

    def __call__(
        self, *given: Dual, seqlen_q: Dual, seqlen_k: Dual, **arrays: Any
    ) -> Dual:
        *score, b, h, query, key = given
        leaves = _B, _H, _QUERY, _KEY, *_LENGTHS, nodes.SCORE
        values = b, h, query, key, seqlen_q, seqlen_k, *score
        known: dict[Node, Dual] = dict(zip(leaves, values, strict=False))
        for node in nodes.in_order([self.root]):
            args = tuple(known.get(x) for x in node.args)
            if node in known:
                continue
            if node.is_constant:
                known[node] = Dual(node.value)
            elif node.op == "number":
                known[node] = arrays[f"number{node.value}"]
            elif node.op == "size":
                number, axis = node.value
                known[node] = Dual(arrays[slot(number)].shape[axis])
            elif node.op == "gather":
                known[node] = arrays[slot(node.value[0])][args]
            else:
                known[node] = _called(node.op, *args)
        return known[self.root]

    def dots(self, number: int) -> dict[str, np.ndarray]:
        """Return the tangents of arrays in a direction, for the reference."""
        known = self.recorded.dots
        found = known[number] if known else {}
        return {slot(x): y for x, y in found.items()}

    def add(self, gradients: dict[str, np.ndarray]) -> None:
        """Add gradients of arrays, by their names in `Recorded.options`."""
        for number, total in self.recorded.sums.items():
            total += gradients[slot(number)]


def gradients(call: Call, score: Replayed | None) -> list[np.ndarray]:
    """Return those of return_dmod, like their arrays; 0 without a score."""
    found = []
    for number in call.problem.return_dmod:
        array = call.options[slot(number)]
        total = np.zeros(array.shape)
        if score is not None:
            total = score.recorded.sums[number]
        with np.errstate(over="ignore"):
            found.append(total.astype(array.dtype.newbyteorder("=")))
    return found


def _called(name: str, *args: Any) -> Dual:
    """Return an operation of `expressions.functions` on the reference's."""
    if name in ("to_int", "to_real"):
        return args[0].astype(int if name == "to_int" else float)
    function = np.where if name == "where" else getattr(np, name)
    return function(*args)


class Expressions:
    """The functions of some heads of a part.

    Parameters
    ----------
    options : Options
        Those of the heads.
    seqlen_q, seqlen_k : int
    real : dtype
        Of scores.
    """

    def __init__(
        self, options: Options, seqlen_q: int, seqlen_k: int, real: np.dtype
    ) -> None:
        function = options.score_mod or options.mask_mod
        assert isinstance(function, Replayed)
        self.recorded, self.real = function.recorded, real
        self.lengths = seqlen_q, seqlen_k
        heads = options.head_indices or HeadIndices()
        b, h = (np.asarray(x)[..., None, None] for x in heads)
        self._heads = {_B: b, _H: h}
        leaves: dict[Node, Any] = dict(
            zip(_LENGTHS, map(np.int32, self.lengths), strict=True)
        )
        roots = [x for x in (self.score, self.recorded.mask) if x is not None]
        leaves |= self._heads
        of_heads = [x for x in nodes.in_order(roots) if x.of_head]
        values = Values(leaves, self.recorded.given, real).of(*of_heads)
        self._leaves = leaves | dict(zip(of_heads, values, strict=True))

    @property
    def score(self) -> Node | None:
        return self.recorded.score

    @property
    def masks(self) -> bool:
        """Whether there is a mask_mod."""
        return self.recorded.mask is not None

    # Masks

    def runs(
        self, rows: slice, keys: slice, block_k: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Cut keys into tiles, without those that no query can see.

        Yields
        ------
        start, stop : int
        tested : bool
            Whether pairs may be masked.
        """
        grain = min(GRAIN, block_k)
        if keys.stop - keys.start <= min(FEW_KEYS, block_k):
            if keys.start < keys.stop:
                yield keys.start, keys.stop, True
            return
        flags = self._flags(rows, grain)
        first, end = keys.start // grain, -(-keys.stop // grain)
        most = block_k // grain
        number = first
        while number < end:
            if flags[number] == NONE:
                number += 1
                continue
            last = number
            while last < min(end, number + most) and flags[last] != NONE:
                last += 1
            start = max(keys.start, number * grain)
            stop = min(keys.stop, last * grain)
            yield start, stop, bool((flags[number:last] != ALL).any())
            number = last

    def visible(self, tile: Tile) -> np.ndarray:
        """Return the tile's pairs, broadcastable to all."""
        assert self.recorded.mask is not None
        values = Values(self.leaves(tile), self.recorded.given, self.real)
        return np.asarray(*values.of(self.recorded.mask))

    def _flags(self, rows: slice, grain: int) -> np.ndarray:
        """Return the visibility of grains of keys, for some queries."""
        mask = self.recorded.mask
        assert mask is not None
        place = (
            *(rows.start, rows.stop, grain, *self.lengths),
            self._heads[_B].tobytes() if "b" in mask.depends else b"",
            self._heads[_H].tobytes() if "h" in mask.depends else b"",
        )
        known = self.recorded.visibility
        if place not in known:
            starts = np.arange(0, self.lengths[1], grain)
            stops = np.minimum(starts + grain, self.lengths[1])
            leaves = {x: (y, y) for x, y in self._heads.items()}
            leaves |= zip(_LENGTHS, map(_twice, self.lengths), strict=True)
            leaves[_QUERY] = np.array(rows.start), np.array(rows.stop - 1)
            leaves[_KEY] = starts, stops - 1
            numbers, extremes = self.recorded.numbers, self.recorded.extremes
            of = Intervals(leaves, numbers, self.real, extremes)
            found = np.atleast_2d(of.visibility(mask))
            heads = tuple(range(found.ndim - 1))
            every = (found == ALL).all(axis=heads)
            some = (found != NONE).any(axis=heads)
            flags = every.astype(np.int8) + some
            known[place] = np.broadcast_to(flags, starts.shape)
        return known[place]

    # Scores

    def scored(self, x: np.ndarray, tile: Tile) -> np.ndarray:
        """Return f(x), an array of its own, or x itself."""
        assert self.score is not None
        (s,) = self._values(x, tile).of(self.score)
        return _whole(s, x)

    def differentiated(
        self, x: np.ndarray, tile: Tile, visible: np.ndarray | None
    ) -> tuple[np.ndarray, Slopes]:
        """Return f(x), to be overwritten, and its derivatives."""
        assert self.score is not None
        slots = tuple(self.recorded.sums)
        slope = derivative.slope(self.score)
        gathers = derivative.of_gathers(self.score, slots) if slots else {}
        indices = [x for gather in gathers for x in gather.args]
        values = self._values(x, tile)
        s, of_score, *others = values.of(
            self.score, slope, *gathers.values(), *indices
        )
        of_gathers = [
            self._gathered(values, gather, by)
            for gather, by in zip(gathers, others, strict=False)
        ]
        s = _whole(s, x)
        if any(y is s for y in (of_score, *others)):
            s = s.copy()
        return s, Slopes(of_score, of_gathers, visible)

    def _gathered(self, values: Values, gather: Node, by: Any) -> Gathered:
        total = self.recorded.sums[gather.value[0]]
        block = values.block(gather, total)
        if block is not None:
            return Gathered(block, None, by)
        return Gathered(total.reshape(-1), values.place(gather), by)

    # Directions

    def moved(
        self,
        x: np.ndarray,
        tile: Tile,
        w: Any,
        number: int,
        visible: np.ndarray | None,
    ) -> np.ndarray:
        """Return W, of the tangent W_X of x in a direction."""
        assert self.score is not None
        dots = self.recorded.dots[number]
        of_score = derivative.differential(self.score, tuple(dots))
        (found,) = self._differentials(x, tile, w, dots, [of_score])
        return _visible(found, x, visible)

    def curved(
        self,
        x: np.ndarray,
        tile: Tile,
        w: Any,
        visible: np.ndarray | None,
    ) -> Curved:
        """Return the derivatives that a second gradient needs, at a tile."""
        assert self.score is not None
        dots, slots = self.recorded.dots[0], tuple(self.recorded.sums)
        slope = derivative.slope(self.score)
        gathers = derivative.of_gathers(self.score, slots) if slots else {}
        graphs = [slope, *gathers.values()]
        moved = [derivative.differential(y, tuple(dots)) for y in graphs]
        values = Values(
            self.leaves(tile) | {nodes.SCORE: x}, self.recorded.given,
            self.real,
        )  # fmt: skip
        of_score, *others = values.of(*graphs)
        values.of(*(y for gather in gathers for y in gather.args))
        bend, *bends = self._differentials(x, tile, w, dots, moved)
        pairs = [
            tuple(self._gathered(values, gather, y) for y in both)
            for gather, *both in zip(gathers, others, bends, strict=True)
        ]
        return Curved(of_score, bend, pairs, visible)

    def _differentials(
        self,
        x: np.ndarray,
        tile: Tile,
        w: Any,
        dots: dict[int, np.ndarray],
        moved: list[derivative.Differential],
    ) -> list[Any]:
        """Return each one's value."""
        recorded = self.recorded
        leaves = self.leaves(tile) | {nodes.SCORE: x}
        values = Values(leaves, recorded.given, self.real)
        gathers = dict.fromkeys(y for d in moved for y in d.by_gathers)
        indices = dict.fromkeys(y for gather in gathers for y in gather.args)
        known = dict(zip(indices, values.of(*indices), strict=True))
        arrays = (dots.get(i, y) for i, y in enumerate(recorded.arrays))
        given = ModArrays(tuple(arrays), recorded.numbers)
        # Those of a head are among the leaves, with what the arrays hold.
        known = {x: y for x, y in leaves.items() if x not in gathers} | known
        read = Values(known, given, self.real).of(*gathers)
        of_dots = dict(zip(gathers, read, strict=True))
        found = []
        for d in moved:
            by_score, *by = values.of(d.by_score, *d.by_gathers.values())
            total = 0.0 if w is None else _product_if(by_score, w)
            for gather, y in zip(d.by_gathers, by, strict=True):
                total = total + _product_if(y, of_dots[gather])
            found.append(total)
        return found

    def leaves(self, tile: Tile) -> dict[Node, Any]:
        """What all but scores follow from, of a tile."""
        query = np.arange(*tile[:2], dtype=np.int32)
        key = np.arange(*tile[2:], dtype=np.int32)
        return self._leaves | {_QUERY: query[:, None], _KEY: key[None]}

    def _values(self, x: np.ndarray, tile: Tile) -> Values:
        """Values of a tile; their memory is the next tile's, too."""
        recorded, leaves = self.recorded, self.leaves(tile)
        leaves[nodes.SCORE] = x
        return Values(leaves, recorded.given, self.real, recorded.buffers)


def _whole(s: Any, x: np.ndarray) -> np.ndarray:
    """Return a score of each pair, in memory of its own."""
    if np.shape(s) == x.shape:
        return s
    return np.broadcast_to(s, x.shape).astype(x.dtype)


def _twice(number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array(number), np.array(number)


class Gathered(NamedTuple):
    """A gather of a tile whose array has a gradient.

    Attributes
    ----------
    total : ndarray of float64
        The sum of the gradient: a block of it, or all in C order.
    place : Place or None
        None: the block is what the gather reads.
    slope : ndarray or float
        f_a.
    """

    total: np.ndarray
    place: Place | None
    slope: Any

    def add(self, ds: np.ndarray, visible: np.ndarray | None) -> None:
        """Add f_a dS to the sums, by the place that pairs read."""
        terms = _times(ds, self.slope, visible)
        if self.place is None:
            self.total[...] += reduce_to_shape(terms, self.total.shape)
            return
        first, rest, inside = self.place
        shape = np.broadcast_shapes(rest.shape, inside.shape)
        terms = reduce_to_shape(terms, shape)
        rest = np.broadcast_to(rest, shape)
        if not inside.all():
            inside = np.broadcast_to(inside, shape)
            rest, terms = rest[inside], terms[inside]
        _add_at(self.total[first:], rest.ravel(), terms.ravel())


class Slopes(NamedTuple):
    """The derivatives of score_mod at a tile.

    Attributes
    ----------
    slope : ndarray or float
        f_s.
    gathers : list of Gathered
    visible : ndarray of bool or None
    """

    slope: Any
    gathers: list[Gathered]
    visible: np.ndarray | None

    def through(self, ds: np.ndarray) -> np.ndarray:
        """Add dS to the gradients of arrays; return f_s dS."""
        for gather in self.gathers:
            gather.add(ds, self.visible)
        return _times(ds, self.slope, self.visible)


class Curved(NamedTuple):
    """What second gradients need of score_mod at a tile.

    Attributes
    ----------
    slope, bend : ndarray or float
        f_s, and its tangent.
    gathers : list of (Gathered, Gathered)
        Of f_a, and of its tangent.
    visible : ndarray of bool or None
    """

    slope: Any
    bend: Any
    gathers: list[tuple[Gathered, ...]]
    visible: np.ndarray | None

    def through(
        self, ds: np.ndarray, t: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add to the gradients of arrays; return f_s dS, f_s T + f_s' dS."""
        for of_t, of_ds in self.gathers:
            of_t.add(t, self.visible)
            of_ds.add(ds, self.visible)
        moved = _times(t, self.slope, self.visible)
        moved = moved + _times(ds, self.bend, self.visible)
        return _times(ds, self.slope, self.visible), moved


def _product_if(a: Any, b: Any) -> Any:
    """Return a b, 0 where a is: what does not count may be NaN."""
    return FUNCTIONS["product_if"].evaluate(a, b)


def _visible(w: Any, x: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return tangents of all pairs, 0 where masked."""
    w = np.broadcast_to(np.asarray(w, x.dtype), x.shape)
    if visible is None or np.isfinite(np.sum(w)):
        return w
    return np.where(visible, w, np.zeros((), x.dtype))


def _times(
    ds: np.ndarray, slope: Any, visible: np.ndarray | None
) -> np.ndarray:
    """Return dS times a slope: 0 at masked pairs, whatever their slope."""
    if np.ndim(slope) == 0 and slope == 1:
        return ds
    product = ds * slope
    if visible is not None and not np.isfinite(np.sum(slope)):
        np.copyto(product, 0, where=~visible)
    return product


def _add_at(total: np.ndarray, place: np.ndarray, terms: np.ndarray) -> None:
    """total[place] += terms, where places may repeat."""
    if not place.size:
        return
    first = int(place.min())
    span = int(place.max()) - first + 1
    if span > 8 * place.size:
        np.add.at(total, place, terms)
        return
    total[first : first + span] += np.bincount(
        place - first, weights=terms, minlength=span
    )
