"""vmap of attention: which calls join batch, and how. For any array library.

The mapped axis joins batch where elements of a batch are independent of each
other's index. Packed sequences have no batch axis, dropout depends on the
index in a batch, and the gradient of an option without that axis is summed
over the batch: their calls run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.request.options import TABLE
from cuflash.request.traced import is_named

Names = tuple[str, ...]

_ARRAYS = {x.name: x.array for x in TABLE if x.array}

# The rank with a batch axis. Without one, a batch shares the array.
_RANK = {name: len(x.axes) for name, x in _ARRAYS.items() if "batch" in x.axes}

# Options that have none, and those among them that pack sequences.
_WHOLE = {x.name for x in TABLE} - _RANK.keys()
_PACKS = {name for name, x in _ARRAYS.items() if not x.axes}

# What readouts choose.
_RANK |= {"queries": 2, "chosen": 2}
_WHOLE |= {"keys", "heads"}


def is_folded(
    inputs: Names, mapped: Sequence[bool], of_batch: bool, wrt: Names
) -> bool:
    """Whether the mapped axis can join batch.

    Parameters
    ----------
    inputs : tuple of str
        The names of the operands; a tangent has the name of what it moves.
    mapped : sequence of bool
        Which of them have the mapped axis.
    of_batch : bool
        Whether weights depend on the index in a batch, as with dropout.
    wrt : tuple of str
        The arrays that are differentiated.
    """
    own = {x for x, is_mapped in zip(inputs, mapped, strict=True) if is_mapped}
    by_index = of_batch or not _PACKS.isdisjoint(inputs)
    return not by_index and not any(map(_is_whole, (*own, *wrt)))


def _is_whole(name: str) -> bool:
    """Whether an operand has no batch axis."""
    return name in _WHOLE or is_named(name)


@dataclass(frozen=True)
class Fold:
    """Joins the mapped axis and batch.

    Attributes
    ----------
    size, batch : int
        The lengths of the two axes.
    wrt : tuple of str
        The arrays that are differentiated.
    broadcast_to : callable
        The library's function.
    """

    size: int
    batch: int
    wrt: Names
    broadcast_to: Callable[[Any, tuple[int, ...]], Any]

    def joined(self, name: str, x: Any, is_mapped: bool) -> Any:
        """An operand for ``size * batch`` sequences."""
        if _is_whole(name):
            return x
        if not is_mapped:
            if self._is_shared(name, x):
                return x
            x = self.broadcast_to(x, (self.size, *x.shape))
        if name in _RANK:
            if x.ndim == _RANK[name]:  # has no batch axis
                x = x[:, None]
            shape = (self.size, self.batch, *x.shape[2:])
            x = self.broadcast_to(x, shape)
        return x.reshape(self.size * self.batch, *x.shape[2:])

    def _is_shared(self, name: str, x: Any) -> bool:
        """Whether an operand serves any number of sequences as it is."""
        if name not in _RANK or name in self.wrt:
            return False
        if x.ndim < _RANK[name]:
            return True
        option = _ARRAYS.get(name)
        return option is not None and option.broadcasts and x.shape[0] == 1

    def split(self, x: Any, batch: int) -> Any:
        """A result by mapped index; summed for an array with batch 1."""
        x = x.reshape(self.size, self.batch, *x.shape[1:])
        if batch != self.batch:
            x = x.sum(axis=1, keepdims=True)
        return x
