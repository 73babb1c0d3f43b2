"""The checked arguments of `distributed.forward` and `backward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from cuflash.api import arrays as api_arrays
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ShapeError,
    ValueRangeError,
    in_words,
)
from cuflash.expressions.nodes import Node
from cuflash.request import checks
from cuflash.request.problem import Problem
from cuflash.request.validate import attention as validate

from . import functions
from .functions import Functions
from .group import Group
from .layouts import check_layout, check_length, offsets_of
from .schedule import Mask

_MISSING = {
    4: ...,
    3: (None,),
    2: (None, slice(None), None, slice(None)),
}
_MISSING_LSE = {4: ..., 3: (None,), 2: (None, None)}


@dataclass(frozen=True)
class Request:
    """A checked call of a rank.

    Attributes
    ----------
    group : Group
    arrays : mapping of str to array
        In full rank, in one array library.
    mask : Mask
        Of the whole group.
    ulysses : int
    options : mapping
        Further arguments of a block's call.
    functions : Functions or None
        The user's.
    rank : int
        Axes of q as the user passed it.
    finish : callable
        To be called when all of a call is queued.
    """

    group: Group
    arrays: Mapping[str, Any]
    mask: Mask
    ulysses: int
    options: Mapping[str, Any]
    functions: Functions | None
    rank: int
    finish: Callable[[], None]

    @property
    def ring_mask(self) -> Mask:
        """The mask of a ring of ranks with the same heads."""
        if self.ulysses == 1:
            return self.mask
        return replace(self.mask, size=self.group.size // self.ulysses)


def check(
    direction: str, arrays: Mapping[str, Any], *, group: Any, **options: Any
) -> Request:
    """Check a call on this rank, then that all ranks make the same."""
    if not isinstance(group, Group):
        raise DTypeError(
            f"group is {in_words(group)}, expected a Group: "
            "cuflash.distributed.group_from_environment() makes one"
        )
    try:
        own, arrays = functions.split(arrays)
        asked, options = functions.split(options)
        request, problem = _check(
            direction, arrays, group, own, asked, **options
        )
        words = _describe(problem, request)
        if request.functions is not None:
            words += f", {functions.fingerprint(asked | own)}"
    except CuflashError as error:
        group.refuse(error)
        raise
    group.agree(words)
    return request


def _describe(problem: Problem, request: Request) -> str:
    """A call as all ranks must make it, without what is left to defaults."""
    words: list[str] = [problem.direction]
    for field in fields(problem)[1:]:
        value = getattr(problem, field.name)
        if value != field.default and not isinstance(value, Node):
            words.append(f"{field.name} {value}")
    mask = request.mask
    words += [f"layout {mask.layout}", f"ulysses {request.ulysses}"]
    if mask.packed:
        for name, offsets in (("q", mask.offsets_q), ("k", mask.offsets_k)):
            words.append(f"cu_seqlens_{name} {list(offsets)}")
    return ", ".join(words)


def _check(
    direction: str,
    given: Mapping[str, Any],
    group: Group,
    own: dict[str, Any],
    asked: dict[str, Any],
    *,
    causal: Any,
    layout: Any,
    ulysses: Any,
    window: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    **options: Any,
) -> tuple[Request, Problem]:
    check_layout(layout)
    runner, opened = api_arrays.open_arrays("distributed", {**given, **own})
    alone = {**options, **asked, "causal": causal, "window": window}
    passed = {name: x for name, x in alone.items() if x is not None}
    call = getattr(validate, direction)(**opened, **passed)
    problem = call.problem
    ulysses = checks.whole("ulysses", ulysses, 1, group.size)
    if group.size % ulysses or problem.num_heads_kv % ulysses:
        raise ShapeError(
            f"ulysses is {ulysses}, expected a divisor of the group's size "
            f"{group.size} and of num_heads_kv {problem.num_heads_kv}: "
            "each rank gets as many key heads"
        )
    lengths = problem.seqlen_q, problem.seqlen_k
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    packed = any(x is not None for x in cu_seqlens)
    if packed:
        offsets = _packed(cu_seqlens, lengths, group.size, layout, call.rank)
    else:
        offsets = tuple((0, x * group.size) for x in lengths)
        for x, name in zip(offsets, "qk", strict=True):
            check_length(x[1], group.size, layout, f"the whole {name}")
    of_call = asked | {x: opened.pop(x) for x in own}
    found = functions.functions_of(of_call)
    if found is not None:
        found.check_numbers(packed, ulysses)
    mask = Mask(
        size=group.size,
        layout=layout,
        causal=bool(causal),
        window=checks.window("window", window),
        offsets_q=offsets[0],
        offsets_k=offsets[1],
        packed=packed,
        has_functions=found is not None,
        hidden=functions.hidden_of(
            of_call, problem.batch, problem.num_heads_q, problem.lse_dtype
        ),
    )
    views = {name: x[_view(name, call.rank)] for name, x in opened.items()}
    # The rank's own arrays do not tell what the whole mask leaves out.
    problem = replace(problem, causal=mask.causal, window=mask.window)
    request = Request(
        group, views, mask, ulysses, options,
        found and found.of_heads(group.rank % ulysses, ulysses, problem),
        call.rank, runner.finish,
    )  # fmt: skip
    return request, problem


def _view(name: str, rank: int) -> Any:
    return (_MISSING_LSE if "lse" in name else _MISSING)[rank]


def _packed(
    cu_seqlens: tuple[Any, Any],
    lengths: tuple[int, int],
    size: int,
    layout: str,
    rank: int,
) -> tuple[tuple[int, ...], ...]:
    """Checked offsets of the whole packed sequences."""
    if rank != 3:
        raise ShapeError(
            f"q has {rank} axes, expected 3 with cu_seqlens_q: (total_q, "
            "num_heads_q, head_dim)"
        )
    found = []
    for given, name, length in zip(cu_seqlens, "qk", lengths, strict=True):
        if given is None:
            raise ValueRangeError(
                f"cu_seqlens_{name} is missing, expected both cu_seqlens_q "
                "and cu_seqlens_k for packed sequences"
            )
        offsets = offsets_of(given, f"cu_seqlens_{name}")
        if offsets[-1] != length * size:
            raise ShapeError(
                f"cu_seqlens_{name} ends at {offsets[-1]}, expected "
                f"{length * size}: {name} has {length} tokens on each of "
                f"{size} ranks"
            )
        for number, (start, end) in enumerate(pairwise(offsets)):
            of = f"sequence {number} of cu_seqlens_{name}"
            check_length(end - start, size, layout, of)
        found.append(offsets)
    if len(found[0]) != len(found[1]):
        raise ShapeError(
            f"cu_seqlens_k has {len(found[1])} offsets, expected "
            f"{len(found[0])} as cu_seqlens_q"
        )
    return tuple(found)
