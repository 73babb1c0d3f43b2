"""Validation of the arguments of `jvp` and `double_backward`.

The arrays that `forward` and `backward` have, and the options, are checked as
there; this module checks tangents and cotangents against what they move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from cuflash.errors import DTypeError, ShapeError
from cuflash.request import checks
from cuflash.request.layouts import broadcast_strides
from cuflash.request.mod_tangents import check_moves, name_of_moved
from cuflash.request.options import DIFFERENTIABLE, MOVED
from cuflash.request.problem import Call, Layout, Signature, Tangents
from cuflash.request.validate.attention import signature_of, split_options
from cuflash.request.validate.descriptions import describe, remembered
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.scalars import scalars_of
from cuflash.request.validate.shapes import in_full_rank

# The argument names of tangents and cotangents, by what they move.
TANGENTS = {x: f"{x}_dot" for x in MOVED}
COTANGENTS = {x: f"dd{x}" for x in MOVED}


def jvp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any = None,
    causal: Any = False,
    block_q: Any = None,
    block_k: Any = None,
    precision: Any = None,
    return_lse: Any = False,
    **others: Any,
) -> Call:
    """Check the arguments of `cuflash.jvp`; see there.

    `others` holds only the tangents and the options that the user passed.
    """
    given = {"q": q, "k": k, "v": v}
    moved, options = _tangents_of(others, TANGENTS, "mod_dots")
    asked = split_options(options)
    names = TANGENTS | asked.moved(moved, "mod_dots")
    signature = _signature(
        "jvp",
        _describe(moved, names),
        (),
        describe(given),
        scalars_of(scale, causal, block_q, block_k, precision),
        *asked[:2],
        return_lse=checks.flag("return_lse", return_lse),
    )
    return Call(
        signature, given, None, *asked[2:4], tangents=moved,
        mod_numbers=asked.numbers,
    )  # fmt: skip


def double_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: Any = None,
    causal: Any = False,
    block_q: Any = None,
    block_k: Any = None,
    deterministic: Any = False,
    precision: Any = None,
    dlse: Any = None,
    return_ddlse: Any = False,
    **others: Any,
) -> Call:
    """Check the arguments of `cuflash.double_backward`; see there.

    `others` holds only the cotangents, the options and the flags that ask for
    their second gradients, such as return_d2bias, that the user passed.
    """
    # q comes first: the others are compared with it.
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    flags = {x: others.pop(f"return_d2{x}", False) for x in DIFFERENTIABLE}
    of_arrays = others.pop("return_d2mod", ())
    moved, options = _tangents_of(others, COTANGENTS, "ddmods")
    wanted = {
        f"return_d{x}": _wanted(x, flag, options) for x, flag in flags.items()
    }
    wanted["return_ddlse"] = checks.flag("return_ddlse", return_ddlse)
    if of_arrays != ():
        options["return_d2mod"] = of_arrays
    asked = split_options(options)
    names = COTANGENTS | asked.moved(moved, "ddmods")
    signature = _signature(
        "double_backward",
        _describe(moved, names),
        tuple(wanted.items()),
        describe(given),
        scalars_of(scale, causal, block_q, block_k, precision),
        *asked[:2],
        deterministic=checks.flag("deterministic", deterministic),
    )
    return Call(
        signature, given, None, *asked[2:4], tangents=moved,
        mod_numbers=asked.numbers,
    )  # fmt: skip


def _tangents_of(
    others: Mapping[str, Any], names: Mapping[str, str], of_arrays: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments: tangents by what they move, and options.

    of_arrays : the argument of tangents of mod_arrays; these are among the
        first by the names that errors call them.
    """
    mark = f"{of_arrays}["
    options = {
        x: y
        for x, y in others.items()
        if x not in names.values() and not x.startswith(mark)
    }
    moved = {x: others[name] for x, name in names.items() if name in others}
    for what in DIFFERENTIABLE:
        if what in moved:
            _check_there(names[what], what, options)
    moved |= {x: y for x, y in others.items() if x.startswith(mark)}
    return moved, options


def _wanted(what: str, flag: Any, options: Mapping[str, Any]) -> bool:
    """Check a flag that asks for the second gradient of an option."""
    name = f"return_d2{what}"
    wanted = checks.flag(name, flag)
    if wanted:
        _check_there(name, what, options)
    return wanted


def _check_there(name: str, what: str, options: Mapping[str, Any]) -> None:
    checks.check_partner(name, what, options, "it has no effect alone")


def _describe(
    moved: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[tuple, ...]:
    """Describe tangents: what each moves, then as `describe`."""
    seen = describe({names[x]: y for x, y in moved.items()})
    return tuple(zip(moved, seen, strict=True))


@remembered
def _signature(
    direction: Literal["jvp", "double_backward"],
    seen_tangents: tuple[tuple, ...],
    wanted: tuple[tuple[str, bool], ...],
    *call: Any,
    **said: bool,
) -> Signature:
    """Check a call; nothing here depends on the data.

    `call` and `said` are the other arguments of `signature_of`.
    """
    signature = signature_of(direction, *call, **said)
    seen, _, _, seen_options = call
    tangents = tuple(x for _, x in seen_tangents)
    check_one_device(seen[:1] + tangents)
    given = {name: rest for name, *rest in seen + seen_options}
    lead = _lead(direction, given, seen_tangents)
    for what, one in seen_tangents:
        _check(one, what, given[what], lead, tangents[0][0])
    layouts = {
        what: _layout(signature, what, one, bool(lead))
        for what, one in seen_tangents
    }
    moved = Tangents(tuple(layouts), lead[0] if lead else 1)
    fields: dict[str, Any] = dict(wanted)
    problem = replace(signature.problem, tangents=moved, **fields)
    return replace(
        signature, problem=problem, tangents=layouts, several=bool(lead)
    )


def _lead(
    direction: str,
    given: Mapping[str, list],
    seen_tangents: tuple[tuple, ...],
) -> tuple[int, ...]:
    """The axis of directions, by the first tangent; () without one."""
    if direction != "jvp" or not seen_tangents:
        return ()
    what, (_, shape, *_) = seen_tangents[0]
    return shape[:1] if len(shape) == len(given[what][0]) + 1 else ()


def _check(
    seen: tuple, what: str, given: list, lead: tuple[int, ...], first: str
) -> None:
    """Check a tangent's dtype and shape against what it moves."""
    name, shape, _, dtype, *_ = seen
    own, got = tuple(given[0]), tuple(shape)
    moved = name_of_moved(what, name)
    expected_dtype = np.dtype(given[2]).name
    check_moves(name, what, expected_dtype)
    if np.dtype(dtype).name != expected_dtype:
        raise DTypeError(
            f"{name} has dtype {np.dtype(dtype).name}, expected "
            f"{expected_dtype} as {moved}: each has the dtype of what it moves"
        )
    if got == (*lead, *own):
        return
    also = ""
    if name == first and not name.startswith("dd") and not lead:
        also = f", or {('n', *own)} for n directions at once".replace("'", "")
    elif lead:
        also = f", for each of {lead[0]} directions"
        also += "" if name == first else f" as {first} has"
    elif name != first and not name.startswith("dd"):
        also = f": {first} has one direction"
    raise ShapeError(
        f"{name} has shape {got}, expected {(*lead, *own)} as {moved} has "
        f"{own}{also}"
    )


def _layout(
    signature: Signature, what: str, seen: tuple, several: bool
) -> Layout:
    """A tangent's layout in full rank, after an axis of directions."""
    _, shape, strides, dtype, offset, _ = seen
    shape, strides = tuple(shape), tuple(strides)
    if not several:
        shape, strides = (1, *shape), (0, *strides)
    if what in "qkv":
        full = in_full_rank(shape[1:])
        own = in_full_rank(strides[1:])
    else:
        full = signature.options[what].shape
        own = broadcast_strides(shape[1:], strides[1:], full)
    return Layout((shape[0], *full), (strides[0], *own), dtype, offset)
