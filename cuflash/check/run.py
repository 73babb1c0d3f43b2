"""Runs a call where its arrays are: on a GPU, emulated, or by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from cuflash.api.attention import backward, forward
from cuflash.api.derivatives import double_backward, jvp
from cuflash.api.kvcache import forward_kvcache
from cuflash.api.merging import merge_states
from cuflash.api.readout import entropy, weight_sums, weights
from cuflash.api.rotary import apply_rotary
from cuflash.check import data, options
from cuflash.check.calls import Call


class Place(Protocol):
    """Where calls run; its name stands for a family that is not asked for."""

    @property
    def name(self) -> str: ...

    def put(self, array: np.ndarray) -> Any:
        """A copy of an array there."""

    def get(self, array: Any) -> np.ndarray:
        """A copy of an array from there; waits for it."""

    def by(self, call: Call) -> AbstractContextManager[Any]:
        """A context in which the call's family is asked for."""

    def poison(self) -> None:
        """Fill memory that the next results may get with NaN."""


Put = Callable[[np.ndarray], Any]


def run(call: Call, place: Place) -> dict[str, np.ndarray]:
    """The results of a call by name, as `expected.expected` names them."""
    given, arrays = placed(call, place)
    with place.by(call):
        place.poison()
        found = launch(call, arrays, given)
        return {x: place.get(y) for x, y in found.items()}


def placed(call: Call, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's options and arrays, results among them, there."""
    kind = data.NUMPY[call.dtype]
    given = options.of_call(call.options, call.shape, kind)
    given = {x: _put(y, place.put) for x, y in given.items()}
    if call.kind == "tf32x3" and call.direction not in ("kvcache", "rotary"):
        given["precision"] = "tf32x3"
    if call.num_splits:
        given["num_splits"] = call.num_splits
    inputs = data.inputs(call)
    arrays = {x: place.put(y) for x, y in inputs.items()}
    if call.direction == "kvcache":
        arrays |= {x: place.put(y) for x, y in data.cache(call).items()}
    if call.direction == "rotary":
        tables = data.rotary_tables(call)
        arrays |= dict(
            zip(("cos", "sin"), map(place.put, tables), strict=True)
        )
    nothing = {"dq": "q", "dk": "k", "dv": "v", "into": "dout"}
    for name, like in nothing.items():
        # All bits 1 are NaN in every dtype.
        poison = np.full(inputs[like].nbytes, 0xFF, np.uint8).view(kind)
        arrays[name] = place.put(poison.reshape(inputs[like].shape))
    return given, arrays


def _put(value: Any, put: Put) -> Any:
    if isinstance(value, np.ndarray):
        return put(value)
    if isinstance(value, Mapping):
        return {x: _put(y, put) for x, y in value.items()}
    return value


def launch(
    call: Call, arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of a call on arrays that `placed` made."""
    return _OF[call.direction](call, arrays, given)


def _forward(call: Call, a: Any, given: Any) -> dict[str, Any]:
    out, lse = forward(
        a["q"], a["k"], a["v"], out=a["into"], return_lse=True, **given
    )
    return {"out": out, "lse": lse}


def _backward(call: Call, a: Any, given: Any) -> dict[str, Any]:
    found = _forward(call, a, given)
    asked = options.gradients(given)
    gradients = backward(
        a["dout"], a["q"], a["k"], a["v"], found["out"], found["lse"],
        dq=a["dq"], dk=a["dk"], dv=a["dv"],
        deterministic=call.deterministic, **given, **asked,
    )  # fmt: skip
    return found | options.by_name(asked, gradients)


_MOVED = "q", "k", "v", "q_dot", "k_dot", "v_dot"


def _jvp(call: Call, a: Any, given: Any) -> dict[str, Any]:
    found = jvp(*(a[x] for x in _MOVED), return_lse=True, **given)
    names = "out", "lse", "out_dot", "lse_dot"
    return dict(zip(names, found, strict=True))


def _double_backward(call: Call, a: Any, given: Any) -> dict[str, Any]:
    out, lse = _forward(call, a, given).values()
    moved = (a[x] for x in _MOVED[3:])
    found = double_backward(
        *moved, a["dout"], a["q"], a["k"], a["v"], out, lse, **given
    )
    return dict(zip(("d2q", "d2k", "d2v", "ddout"), found, strict=True))


_OF_CACHES = (
    "k_cache", "v_cache", "k_new", "v_new", "cache_seqlens", "page_table",
    "cache_batch_idx", "k_scale", "v_scale",
)  # fmt: skip


def _kvcache(call: Call, a: Any, given: Any) -> dict[str, Any]:
    caches = {x: a[x] for x in _OF_CACHES if x in a}
    out, lse = forward_kvcache(
        a["q"], **caches, out=a["into"], return_lse=True, **given
    )
    return {"out": out, "lse": lse}


def _readouts(call: Call, a: Any, given: Any) -> dict[str, Any]:
    lse = _forward(call, a, given)["lse"]
    calls = {
        "weights": weights,
        "weight_sums": weight_sums,
        "entropy": entropy,
    }
    found: Any = calls.items()
    return {x: read(a["q"], a["k"], lse, **given) for x, read in found}


def _merge(call: Call, a: Any, given: Any) -> dict[str, Any]:
    half = call.shape.seqlen_k // 2
    parts: list[Any] = []
    for keys in (slice(None, half), slice(half, None)):
        parts += forward(
            a["q"], a["k"][:, keys], a["v"][:, keys], return_lse=True, **given
        )
    out, lse = merge_states(*parts)
    return {"out": out, "lse": lse}


def _rotary(call: Call, a: Any, given: Any) -> dict[str, Any]:
    return {"out": apply_rotary(a["q"], a["cos"], a["sin"])}


_OF: dict[str, Callable[[Call, Any, Any], dict[str, Any]]] = {
    "forward": _forward,
    "backward": _backward,
    "jvp": _jvp,
    "double_backward": _double_backward,
    "kvcache": _kvcache,
    "readouts": _readouts,
    "merge": _merge,
    "rotary": _rotary,
}
