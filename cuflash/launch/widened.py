"""16-bit calls where tensor cores lack the dtype: float32 calls on copies.

CUDA cores multiply there, by register tiles of float32 alone. A 16-bit number
is a float32, and results are rounded once, as a kernel of the dtype would:
errors are the same. bfloat16 on sm_75 is the only such case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from cuflash.backends.base import Backend, Target
from cuflash.launch import copies
from cuflash.launch.recipe import remembered
from cuflash.plans import plan
from cuflash.plans.plan import FamilyName
from cuflash.request import layouts
from cuflash.request.problem import Call, Layout, Signature
from cuflash.request.readout import READOUT_GRADIENTS

_Result = TypeVar("_Result")

# What has the dtype of q.
_INPUTS = ("q", "k", "v", "out", "dout")
_MOVED = ("q", "k", "v")

# By direction the results that have it, by their places; the user may give
# arrays for those of forward and backward.
_RESULTS: dict[str, dict[int, str]] = {
    "forward": {0: "out"},
    "backward": {0: "dq", 1: "dk", 2: "dv"},
    "jvp": {0: "out", 2: "out_dot"},
    "double_backward": {0: "d2q", 1: "d2k", 2: "d2v", 3: "ddout"},
    **dict.fromkeys(READOUT_GRADIENTS, {0: "dq", 1: "dk"}),
}


def on_copies(
    run: Callable[[Call, Backend], _Result],
) -> Callable[[Call, Backend], _Result]:
    """Let a function that runs calls run some of them on float32 copies."""

    @functools.wraps(run)
    def runs(call: Call, backend: Backend) -> _Result:
        target = backend.target
        signature = in_float32(call.signature, target, target.family)
        if signature is None:
            return run(call, backend)
        with backend.current():
            results = run(_copied(call, signature, backend), backend)
            return _rounded(call, results, backend)

    return runs


@remembered
def in_float32(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Signature | None:
    """The signature of the call on float32 copies, None without these."""
    p = signature.problem
    sizes = p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.num_heads_kv
    if 0 in sizes or not plan.in_float32(p, target.device(), wanted):
        return None
    results = _RESULTS.get(p.direction, {}).values()
    return replace(
        signature,
        problem=replace(p, dtype="float32"),
        layouts={
            name: _converted(x) if name in _INPUTS else x
            for name, x in signature.layouts.items()
            if name not in results
        },
        tangents={
            name: _converted(x) if name in _MOVED else x
            for name, x in signature.tangents.items()
        },
        several=True,
    )


def _converted(layout: Layout) -> Layout:
    return layouts.converted(layout, "float32")


def _copied(call: Call, signature: Signature, backend: Backend) -> Call:
    """The call on copies; each tangent has an axis of directions."""
    given, moved = signature.layouts, signature.tangents
    return replace(
        call,
        signature=signature,
        given={
            name: copies.copied(given[name], call.arrays[name], backend)
            if name in _INPUTS
            else x
            for name, x in call.given.items()
        },
        given_out=None,
        given_gradients={},
        tangents={
            name: copies.copied(moved[name], x, backend)
            if name in _MOVED
            else x
            for name, x in call.directions.items()
        },
    )


def _rounded(call: Call, results: _Result, backend: Backend) -> _Result:
    """The results in the call's dtype, in the user's arrays if given."""
    places = _RESULTS.get(call.problem.direction)
    if places is None:
        return results
    dtype = call.signature.layouts["q"].dtype
    given = {"out": call.out, **call.gradients}
    found = list(cast("tuple[Any, ...]", results))
    for place, name in places.items():
        target = given.get(name)
        if target is None:
            target = backend.empty(found[place].shape, dtype)
        backend.copy(target, found[place])
        found[place] = target
    return cast(_Result, tuple(found))
