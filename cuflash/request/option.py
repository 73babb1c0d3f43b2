"""What a row of the option table says: see options.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuflash.request.problem import Problem, Signature


@dataclass(frozen=True)
class Array:
    """The dtypes and shapes that an array option accepts.

    Attributes
    ----------
    dtypes : tuple of str
        Names; ``"q"`` and ``"lse"`` stand for the dtypes of q and lse.
    why : str
        The reason for these dtypes, for messages.
    axes : tuple of str
        Fields of `Sizes`. If empty, the array has one axis of any length.
    words : str
        The axes, for messages.
    broadcasts : bool
        Whether axes may be 1 or left out. If False, only the first of
        several axes, batch, may be left out.
    integers : bool
        Whether other integer dtypes are accepted, and converted.
    by_sequence : bool
        Whether packed sequences take the place of batch: the axis has their
        number, and may be left out too.
    """

    dtypes: tuple[str, ...]
    why: str
    axes: tuple[str, ...]
    words: str
    broadcasts: bool = False
    integers: bool = False
    by_sequence: bool = False


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes
    ----------
    name : str
        The name of the argument of `cuflash.backward` and, unless
        `of_gradients`, of `cuflash.forward`.
    array : Array or None
        The accepted arrays, for an array option. The argument structs have a
        pointer with the option's name.
    check : callable or None
        (name, value) to the checked value, for any other option.
    default : object
        The argument's default, which means that the option is absent.
    nothing : object
        The checked value that means that the option is absent.
    part_of : str
        Its name in `Problem.options`, which two options may share. If empty,
        the problem's field with the option's name tells.
    acts : str
        What it does, for decisions that several options share: ``"tiles"``,
        hide whole tiles of pairs; ``"pairs"``, hide pairs alone; ``"bends"``,
        map scores; ``"adds"``, move them; ``"drops"`` weights; ``"rows"``,
        act on each row as a whole.
    flag : str
        The kernel constant that is true if a call has the option.
    stride : str
        The field of `OptionNumbers` that holds an array's strides.
    numbers : callable or None
        Maps a signature to further fields of `OptionNumbers`, which calls
        without the option fill in too.
    needs : tuple of str
        Other options that it requires: ValueRangeError without them.
    not_with : tuple of str
        Other options that exclude it: UnsupportedError.
    no_order : tuple of str
        Families in which key tiles cannot add to dq in a fixed order with
        it: with ``deterministic=True`` they sum integers, in any order.
    of_gradients : bool
        Whether only `cuflash.backward` has it.
    moves : bool
        Whether the array has tangents and a gradient.
    with_caches : bool
        Whether `cuflash.forward_kvcache` has it too.
    traced : bool
        Whether it is a function of the user's or belongs to one: bridges do
        not have it so far.
    hint : str
        The type of the argument, for signatures; an array option's is that
        of the call's arrays.
    """

    name: str
    array: Array | None = None
    check: Callable[[str, Any], Any] | None = None
    default: Any = None
    nothing: Any = None
    part_of: str = ""
    acts: str = ""
    flag: str = ""
    stride: str = ""
    numbers: Callable[[Signature], dict[str, Any]] | None = None
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    no_order: tuple[str, ...] = ()
    of_gradients: bool = False
    moves: bool = False
    with_caches: bool = False
    traced: bool = False
    hint: str = ""

    def is_in(self, problem: Problem) -> bool:
        """Whether a problem has the option."""
        if self.part_of:
            return self.part_of in problem.options
        return bool(getattr(problem, self.name))
