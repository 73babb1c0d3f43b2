"""A user's score and mask, of whole sequences that ranks compute in blocks.

A block counts its queries, keys and heads from 0, and so does a call with it.
Its functions are therefore the user's, of indices to which numbers are added:
further `mod_arrays` of the call, so that all blocks share their kernels.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.expressions import nodes
from cuflash.expressions.intervals import NONE, Extremes, Intervals
from cuflash.expressions.nodes import Node
from cuflash.expressions.text import text
from cuflash.request import traced
from cuflash.request.options import TRACED
from cuflash.request.problem import Problem

from .schedule import Block, Mask

# The numbers that are added to indices, and those in place of lengths.
_NUMBERS = {x: f"cuflash_{x}" for x in (*nodes.INDICES, *nodes.LENGTHS)}


@dataclass(frozen=True)
class Functions:
    """The functions of a call, and what they read.

    Attributes
    ----------
    placed : mapping of str to callable
        Functions of a block's indices, by role.
    keywords : frozenset of str
        The names of their keyword arguments.
    arrays : mapping of str to object
        `mod_arrays`: whole, on each rank.
    graphs : mapping of str to Node
        By role.
    first_head : int
        Of the whole call's heads, the first that this rank computes.
    gradients : tuple of str
        The arrays whose gradients are asked for.
    """

    placed: Mapping[str, Callable[..., Any]]
    keywords: frozenset[str]
    arrays: Mapping[str, Any]
    graphs: Mapping[str, Node]
    first_head: int = 0
    gradients: tuple[str, ...] = ()

    def of_heads(self, part: int, parts: int, problem: Problem) -> Functions:
        """Those of a part of a call's heads."""
        first = part * (problem.num_heads_q // parts)
        return replace(self, first_head=first)

    @property
    def depends(self) -> frozenset[str]:
        """The indices that they depend on."""
        return frozenset().union(*(x.depends for x in self.graphs.values()))

    def check_numbers(self, packed: bool, ulysses: int) -> None:
        """Raise, on all ranks, if blocks leave no room for the numbers."""
        reserved = sorted(self.arrays.keys() & set(_NUMBERS.values()))
        if reserved:
            raise ValueRangeError(
                f"mod_arrays has {reserved[0]!r}, which a block's call needs:"
                " give it another name"
            )
        moved = {"b": packed, "h": ulysses > 1, "q_idx": True, "kv_idx": True}
        depends = self.depends
        added = [x for x in nodes.INDICES if x in depends and moved[x]]
        added += [x for x in nodes.LENGTHS if x in self.keywords]
        own = sum(not hasattr(x, "shape") for x in self.arrays.values())
        most = traced.MOST - len(added)
        if own > most:
            raise UnsupportedError(
                f"mod_arrays has {own} numbers, expected at most {most}: a"
                f" block's call adds {len(added)} ({', '.join(added)}); put"
                " some of them into an array"
            )

    def arguments(self, block: Block, mask: Mask) -> dict[str, Any]:
        """The arguments of a block's call."""
        depends = self.depends
        lengths = [
            offsets[block.sequence + 1] - offsets[block.sequence]
            for offsets in (mask.offsets_q, mask.offsets_k)
        ]
        added = {
            "b": block.sequence if mask.packed else 0,
            "h": self.first_head,
            "q_idx": block.positions[0],
            "kv_idx": block.positions[1],
        }
        numbers = {
            _NUMBERS[x]: y
            for x, y in added.items()
            if x in depends and not (x in "bh" and y == 0)
        }
        numbers |= {
            _NUMBERS[x]: y
            for x, y in zip(nodes.LENGTHS, lengths, strict=True)
            if x in self.keywords
        }
        found = {**self.placed, "mod_arrays": {**self.arrays, **numbers}}
        if self.gradients:
            found["return_dmod"] = self.gradients
        return found


def functions_of(asked: Mapping[str, Any]) -> Functions | None:
    """The functions among a call's options, None without any.

    asked : numbers of `mod_arrays`, and arrays by the names of `traced.named`.
    """
    recorded = traced.recorded(asked)
    if not recorded.fields:
        return None
    graphs = {x: y for x, y in recorded.fields if isinstance(y, Node)}
    arrays = dict(asked.get("mod_arrays", {}))
    arrays |= {traced.name_of(x): asked[x] for x in recorded.names}
    keywords = {x: _keywords(asked[x]) for x in graphs}
    placed = {x: _placed(asked[x], own) for x, own in keywords.items()}
    return Functions(
        placed, frozenset().union(*keywords.values()), arrays, graphs,
        gradients=tuple(asked.get("return_dmod", ())),
    )  # fmt: skip


def fingerprint(asked: Mapping[str, Any]) -> str:
    """What ranks compare of their functions: texts, shapes and numbers."""
    recorded = traced.recorded(asked)
    fields = dict(recorded.fields)
    shapes = {traced.name_of(x): tuple(asked[x].shape) for x in recorded.names}
    kinds = fields.get("mod_arrays", ())
    own = text(fields.get("score_mod"), fields.get("mask_mod"), kinds)
    digest = hashlib.sha256(own.encode()).hexdigest()[:16]
    numbers = dict(asked.get("mod_arrays", {}))
    return f"functions {digest} of {shapes} and {numbers}"


def split(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's arguments: those of functions, and the others."""

    def is_own(name: str) -> bool:
        return name in TRACED or traced.is_named(name)

    return (
        {x: y for x, y in given.items() if is_own(x)},
        {x: y for x, y in given.items() if not is_own(x)},
    )


def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's keyword arguments; "" stands for any."""
    found = []
    for x in inspect.signature(function).parameters.values():
        if x.kind == x.KEYWORD_ONLY:
            found.append(x.name)
        elif x.kind == x.VAR_KEYWORD:
            found.append("")
    return tuple(found)


def _placed(
    function: Callable[..., Any], own: tuple[str, ...]
) -> Callable[..., Any]:
    """A function of a block's indices."""
    numbers, indices = _NUMBERS, nodes.INDICES

    def of_block(*given: Any, **arrays: Any) -> Any:
        count = len(given) - len(indices)
        placed = [
            x + arrays[numbers[name]] if numbers[name] in arrays else x
            for name, x in zip(indices, given[count:], strict=True)
        ]
        known = {numbers.get(x, x) for x in numbers}
        named = {
            x: y
            for x, y in arrays.items()
            if x in own or ("" in own and x not in known)
        }
        for name in nodes.LENGTHS:
            if name in own:
                named[name] = arrays[numbers[name]]
        return function(*given[:count], *placed, **named)

    return of_block


# Which blocks a mask leaves -------------------------------------------------


class Kind(NamedTuple):
    """An array of `mod_arrays` without its elements."""

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int


class Hidden(NamedTuple):
    """What all ranks know of a mask without reading its arrays.

    Attributes
    ----------
    mask : Node
    numbers : tuple
        That it reads, by slot.
    arrays : tuple of Kind
    batch, num_heads : int
        Of the whole call.
    real : str
        The dtype of its real numbers: that of lse.
    """

    mask: Node
    numbers: tuple[Any, ...]
    arrays: tuple[Kind, ...]
    batch: int
    num_heads: int
    real: str = "float32"

    def hides(self, block: Block, mask: Mask) -> bool:
        """Whether no pair of a block is visible, as far as intervals tell."""
        at = block.sequence
        lengths = (
            (offsets[at + 1] - offsets[at],) * 2
            for offsets in (mask.offsets_q, mask.offsets_k)
        )
        b = (at, at) if mask.packed else (0, self.batch - 1)
        q, k = block.positions
        ends = {
            "b": b,
            "h": (0, self.num_heads - 1),
            "q_idx": (q, q + len(block.queries) - 1),
            "kv_idx": (k, k + len(block.keys) - 1),
            **dict(zip(nodes.LENGTHS, lengths, strict=True)),
        }
        leaves = {nodes.index(x): _arrays(y) for x, y in ends.items()}
        unread = _Unread(self.arrays)
        real = np.dtype(self.real).type
        of = Intervals(leaves, self.numbers, real, unread)
        return bool((of.visibility(self.mask) == NONE).all())


def hidden_of(
    asked: Mapping[str, Any], batch: int, num_heads: int, real: str
) -> Hidden | None:
    """What schedules take from a mask, None without one."""
    recorded = traced.recorded(asked)
    mask = dict(recorded.fields).get("mask_mod")
    if mask is None:
        return None
    arrays = [asked[x] for x in recorded.names]
    kinds = [Kind(tuple(x.shape), x.dtype, int(x.size)) for x in arrays]
    return Hidden(mask, recorded.numbers, tuple(kinds), batch, num_heads, real)


def _arrays(ends: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    low, high = ends
    return np.array(low), np.array(high)


class _Unread(Extremes):
    """Arrays of which nothing is known: they may be on a device."""

    def of(self, slot: int, indices: Any) -> tuple[Any, Any]:
        return self._unknown(self._arrays[slot])
