"""The arguments of `cuflash.merge_states`."""

from __future__ import annotations

import functools
from typing import Any

from cuflash.errors import DTypeError, type_name
from cuflash.request.problem import Call, Signature
from cuflash.request.validate.descriptions import describe, remembered
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.shapes import MAX_HEAD_DIM_V, Arrays


def merge_states(**states: Any) -> Call:
    """Check the arguments of `cuflash.merge_states`, named by `states_of`."""
    return Call(_merge(describe(states)), states)


def states_of(states: tuple[Any, ...]) -> dict[str, Any]:
    """Name the arguments of `cuflash.merge_states`: out_a, lse_a, out_b, ...

    Raises
    ------
    DTypeError
        If they are not pairs of arrays.
    """
    cure = "expected out_a, lse_a, out_b, lse_b, ..."
    for index, x in enumerate(states):
        if isinstance(x, (tuple, list)) and any(
            hasattr(inner, "shape") for inner in x
        ):
            raise DTypeError(
                f"argument {index} is of type {type_name(x)}, {cure}, one "
                "argument for each array: write merge_states(*a, *b) for "
                "a, b = (out_a, lse_a), (out_b, lse_b)"
            )
    if len(states) % 2 or not states:
        raise DTypeError(
            f"merge_states got {len(states)} arrays, {cure}: each out is "
            "followed by its lse, which forward returns with return_lse=True"
        )
    return dict(zip(_state_names(len(states)), states, strict=True))


@functools.cache
def _state_names(count: int) -> tuple[str, ...]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    sides = (*letters, *(str(i) for i in range(27, count)))[: count // 2]
    return tuple(f"{x}_{side}" for side in sides for x in ("out", "lse"))


@remembered
def _merge(seen: tuple[tuple, ...]) -> Signature:
    """Check a merge_states call."""
    check_one_device(seen)
    arrays = Arrays(seen)
    for name in arrays.shapes:
        arrays.check_same(name, arrays.axes_of(name), "out_a")
    arrays.check_lengths("out_a")
    arrays.check_head_dim("out_a", MAX_HEAD_DIM_V)
    problem = arrays.problem(
        "merge", "out_a", "out_a",
        seqlen_k=0, scale=1.0, num_states=len(seen) // 2,
    )  # fmt: skip
    return Signature(problem, arrays.rank, arrays.layouts())
