"""The arguments of `cuflash.forward` and `cuflash.backward`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cuflash.errors import UnsupportedError
from cuflash.request import checks, mod_tangents, traced
from cuflash.request.options import ARRAYS, BY_NAME, TABLE
from cuflash.request.problem import Call, Layout, Signature
from cuflash.request.validate.descriptions import (
    describe,
    layout_of,
    remembered,
)
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.functions import as_options
from cuflash.request.validate.memory import check_apart
from cuflash.request.validate.option_arrays import Sizes, check
from cuflash.request.validate.scalars import (
    Numbers,
    Scalars,
    bounds_that_mask,
    default_scale,
    numbers_of,
    scalars_of,
    splits_of,
)
from cuflash.request.validate.shapes import (
    AXES,
    AXES_LSE,
    MAX_LENGTH_OF_OPTIONS,
    Arrays,
)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any = None,
    causal: Any = False,
    block_q: Any = None,
    block_k: Any = None,
    precision: Any = None,
    num_splits: Any = None,
    return_lse: Any = False,
    return_max_score: Any = False,
    out: Any = None,
    **options: Any,
) -> Call:
    """Check the arguments of `cuflash.forward`; see there.

    `options` holds only the options that the user passed.
    """
    given = {"q": q, "k": k, "v": v}
    asked = split_options(options)
    arrays = given if out is None else {**given, "out": out}
    signature = signature_of(
        "forward",
        describe(arrays),
        scalars_of(scale, causal, block_q, block_k, precision),
        *asked[:2],
        num_splits=None if num_splits is None else splits_of(num_splits),
        return_lse=checks.flag("return_lse", return_lse),
        return_max_score=checks.flag("return_max_score", return_max_score),
    )
    if out is not None:
        check_apart({"out": out}, {**given, **asked.arrays})
    return Call(signature, given, out, *asked[2:4], mod_numbers=asked.numbers)


def backward(
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
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **options: Any,
) -> Call:
    """Check the arguments of `cuflash.backward`; see there.

    `options` holds only the options that the user passed.
    """
    # q comes first: the others are compared with it.
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    written: dict[str, Any] = {}
    if not (dq is dk is dv is None):
        written = {"dq": dq, "dk": dk, "dv": dv}
        written = {name: x for name, x in written.items() if x is not None}
    asked = split_options(options)
    signature = signature_of(
        "backward",
        describe(given | written),
        scalars_of(scale, causal, block_q, block_k, precision),
        *asked[:2],
        deterministic=checks.flag("deterministic", deterministic),
    )
    if written:
        check_apart(written, {**given, **asked.arrays})
    return Call(
        signature, given, None, *asked[2:4], given_gradients=written,
        mod_numbers=asked.numbers,
    )  # fmt: skip


class Asked(NamedTuple):
    """The options of a call.

    Attributes
    ----------
    scalars : tuple of (str, object)
        Fields of its problem.
    seen : tuple of tuple
        Its arrays without their data: `descriptions.describe`.
    arrays : dict
        Its arrays, those of `mod_arrays` by slot.
    seed : int
    numbers : tuple
        Those of `mod_arrays`.
    mods : tuple of str
        The names of these arrays, by slot.
    """

    scalars: Numbers = ()
    seen: tuple[tuple, ...] = ()
    arrays: dict[str, Any] = {}
    seed: int = 0
    numbers: tuple[Any, ...] = ()
    mods: tuple[str, ...] = ()

    def moved(self, tangents: dict[str, Any], argument: str) -> dict[str, str]:
        """Name tangents of `mod_arrays` by slots; return what they were.

        argument : that they were given as.
        """
        has_score = any(name == "score_mod" for name, _ in self.scalars)
        return mod_tangents.moved(tangents, argument, self.mods, has_score)


NO_OPTIONS = Asked()


def split_options(options: dict[str, Any]) -> Asked:
    """Check what no shape decides of a call's options."""
    if not options:
        return NO_OPTIONS
    scalars, seed = numbers_of(options)
    arrays = {name: options[name] for name in ARRAYS if name in options}
    functions = traced.recorded(options)
    if functions.fields:
        scalars = *scalars, *functions.fields
        for i, name in enumerate(functions.names):
            arrays[traced.slot(i)] = options[name]
    _, names, values = functions
    return Asked(scalars, describe(arrays), arrays, seed, values, names)


@remembered
def signature_of(
    direction: str,
    seen: tuple[tuple, ...],
    scalars: Scalars,
    asked: Numbers,
    seen_options: tuple[tuple, ...],
    *,
    deterministic: bool = False,
    num_splits: int | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
) -> Signature:
    """Check a forward or backward call; nothing here depends on the data.

    Or a jvp call but for its tangents, or a double_backward call; or a call
    of READOUTS, which has no v, but for its choices.
    """
    check_one_device(seen + seen_options)
    scale, causal, block_q, block_k, precision = scalars
    numbers_asked = dict(asked)
    arrays = Arrays(seen)
    arrays.check_same("k", ("batch", "head_dim"), "q")
    v = "v" if "v" in arrays.shapes else "k"
    if v == "v":
        arrays.check_same("v", ("batch", "seqlen", "heads"), "k")
    arrays.check_sizes("k", v)
    for name in ("out", "dout"):
        if name in arrays.shapes:
            arrays.check_like_out(name, "v")
    for name in ("lse", "dlse", "dentropy"):
        if name in arrays.shapes:
            arrays.check_same(name, AXES_LSE, "q")
    if "dsums" in arrays.shapes:
        arrays.check_same("dsums", ("batch", "heads"), "q")
        arrays.check_same("dsums", ("seqlen",), "k")
    for name in ("dq", "dk", "dv"):
        if name in arrays.shapes:
            arrays.check_same(name, AXES, name[1:])
    scale = default_scale(scale, arrays.full["q"][3], arrays.dtype)
    if precision and arrays.dtype != "float32":
        raise UnsupportedError(
            f"precision is {precision!r}, which is for float32 arrays, got "
            f"{arrays.dtype}: leave it out, or convert q, k and v to float32"
        )
    mods = {x[0]: layout_of(x) for x in seen_options if x[0] not in BY_NAME}
    seen_options = tuple(x for x in seen_options if x[0] not in mods)
    options = _check_options(arrays, asked, seen_options)
    shapes = {name: tuple(shape) for name, shape, *_ in seen_options}
    bias_shape = shapes.get("bias", ())
    causal, numbers_asked = as_options(
        numbers_asked,
        causal,
        arrays.full["q"][1],
        arrays.full["k"][1],
        packed="cu_seqlens_q" in options,
        adds="bias" in options or "alibi_slopes" in options,
    )
    causal, window = bounds_that_mask(
        causal,
        numbers_asked.get("window", (None, None)),
        arrays.full["q"][1],
        arrays.full["k"][1],
        "cu_seqlens_q" in options,
    )
    problem = arrays.problem(
        direction,
        "q",
        v,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        deterministic=deterministic,
        precision=precision,
        num_splits=num_splits,
        dlse="dlse" in arrays.shapes,
        return_max_score=return_max_score,
        **{**numbers_asked, "window": window},
        **fields_of(options, bias_shape),
    )
    return Signature(
        problem, arrays.rank, arrays.layouts(), return_lse,
        {**options, **mods}, bias_shape,
    )  # fmt: skip


def _check_options(
    arrays: Arrays, asked: Numbers, seen: tuple[tuple, ...]
) -> dict[str, Layout]:
    """The layouts of the array options."""
    if not seen and not asked:
        return {}
    batch, seqlen_q, num_heads_q, _ = arrays.full["q"]
    seqlen_k = arrays.full["k"][1]
    for name, seqlen in (("q", seqlen_q), ("k", seqlen_k)):
        if seqlen > MAX_LENGTH_OF_OPTIONS:
            raise UnsupportedError(
                f"{name} has seqlen {seqlen}, expected at most "
                f"{MAX_LENGTH_OF_OPTIONS} in a call with masks or score "
                "modifications: kernels compute the ends of a window in "
                "32 bits"
            )
    sizes = Sizes(
        batch, seqlen_q, seqlen_k, num_heads_q, arrays.rank, arrays.dtype,
        arrays.lse_dtype,
    )  # fmt: skip
    return check(seen, sizes)


# The field of a `Problem` that tells of an array option.
_FIELDS = {row.name: row.part_of for row in TABLE if row.array}


def fields_of(
    options: dict[str, Layout], bias_shape: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The fields of a `Problem` that describe its array options.

    `bias_shape` is the shape that the user passed: a bias with all its axes
    does not count as broadcast here, whatever its strides.
    """
    has: dict[str, Any] = {_FIELDS[name]: True for name in options}
    if has.pop("cu_seqlens", False):
        has["num_sequences"] = options["cu_seqlens_q"].shape[0] - 1
    if "bias" in has:
        layout = options["bias"]
        has["bias"] = layout.dtype.name
        given = math.prod(bias_shape)
        has["bias_is_broadcast"] = given < math.prod(layout.shape)
    return has
