"""Validation of user arguments, which happens only here.

The checks use only ``.shape``, ``.dtype``, ``.strides`` and the address of an
array, so they work for NumPy and CuPy, and CuPy is not imported. Results are
cached by these and the options: validating a repeated call is one look-up.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from typing import Any, Literal

import numpy as np

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
    type_name,
)
from cuflash.request import checks, hints
from cuflash.request.options import (
    ARRAYS,
    Numbers,
    Sizes,
    broadcast_strides,
    broadcasts,
    check,
    check_integers,
    numbers_of,
)
from cuflash.request.problem import (
    ALIGNMENT,
    MAX_SPLITS,
    Call,
    Layout,
    Problem,
    Rotary,
    Signature,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")
PRECISIONS = ("tf32x3",)
MAX_HEAD_DIM = 512

# Kernels count tokens, heads and batches in int32 and round lengths up to
# whole tiles. No tile has more than 1024 tokens.
MAX_LENGTH = 2**31 - 1 - 1024

# Keeps position + length + window bound within int32, where the position may
# be past the end as above.
MAX_LENGTH_OF_OPTIONS = 2**30 - 1 - 1024

# Kernels for types below float64 keep scale * log2(e) in float32, whose
# largest number is 3.4e38.
MAX_SCALE = 1e38

# DLPack's device types (DLDeviceType in dlpack.h).
_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged

_AXES = ("batch", "seqlen", "heads", "head_dim")
_AXES_LSE = ("batch", "heads", "seqlen")
_LAYOUTS = {
    4: "(batch, seqlen, heads, head_dim)",
    3: "(seqlen, heads, head_dim)",
    2: "(seqlen, head_dim)",
}
_LAYOUTS_LSE = {
    4: "(batch, heads, seqlen)",
    3: "(heads, seqlen)",
    2: "(seqlen,)",
}


# Which device ------------------------------------------------------------


def device_of(
    call: str = "forward", /, **arrays: Any
) -> Literal["cpu", "cuda"]:
    """The kind of device that holds the arrays, the same for all of them.

    Parameters
    ----------
    call : str
        Whose arguments they are; see `hints`.
    **arrays
        The arguments by name, as the user passed them.

    Returns
    -------
    str
        ``"cpu"`` if all are NumPy arrays, ``"cuda"`` if all are on a CUDA
        device.

    Raises
    ------
    DTypeError
        If an argument is not an array, or NumPy and CUDA arrays are mixed.
    UnsupportedError
        If an array is on another kind of device, or requires grad, or is a
        view of torch that negates or conjugates.
    """
    cupy = sys.modules.get("cupy")  # imported if the user has CuPy arrays
    kinds = set(map(type, arrays.values()))
    if kinds == {np.ndarray}:
        return "cpu"
    if kinds == {getattr(cupy, "ndarray", None)}:
        return "cuda"
    places = {
        name: _place(call, name, array) for name, array in arrays.items()
    }
    first, expected = next(iter(places.items()))
    for name, place in places.items():
        if place != expected:
            where = {"cpu": "NumPy array", "cuda": "CUDA array"}
            each = ", ".join(
                f"{other} {type_name(array)}"
                for other, array in arrays.items()
            )
            raise DTypeError(
                f"{name} is a {where[place]}, expected a {where[expected]} "
                f"as {first} is: a call runs on one device and moves no "
                f"array ({each})"
            )
    return expected


def writable(name: str, array: Any, receives: str = "the result") -> None:
    """Raise ValueRangeError if an array, as the user passed it, is read-only.

    Parameters
    ----------
    name : str
    array
    receives : str
        What is written to it, for the message.
    """
    if isinstance(array, np.ndarray):
        read_only, shape = not array.flags.writeable, array.shape
    elif type(array) is getattr(sys.modules.get("cupy"), "ndarray", None):
        return  # CuPy has no read-only arrays
    else:
        try:
            interface = array.__cuda_array_interface__
            read_only, shape = interface["data"][1], interface["shape"]
        except Exception:  # no interface, or none for its dtype: assume yes
            return
    if read_only:
        raise ValueRangeError(
            f"{name} is read-only ({type_name(array)} {tuple(shape)}), "
            f"expected a writable array: it receives {receives}"
        )


def _place(call: str, name: str, array: Any) -> Literal["cpu", "cuda"]:
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedError(
                f"{name} is a {type_name(array)}, expected a plain array: "
                f"its mask would be ignored (pass {name}.filled(0), and hide "
                "keys with mask)"
            )
        return "cpu"
    cupy = sys.modules.get("cupy")
    if isinstance(array, getattr(cupy, "ndarray", ())):
        return "cuda"
    if getattr(array, "requires_grad", False):
        raise UnsupportedError(
            f"{name} is a {type_name(array)} that requires grad, expected "
            f"one that does not: {hints.requiring_grad(call, name)}"
        )
    _check_no_lazy_bits(name, array)
    if isinstance(array, _tracers()):
        raise UnsupportedError(
            f"{name} is a JAX tracer ({type_name(array)}), expected an array "
            f"with data: {hints.tracer(call)}"
        )
    # Look on the type first: on an instance the attribute may be computed.
    if hasattr(type(array), "__dlpack_device__"):
        device_type = int(array.__dlpack_device__()[0])
        if device_type in _DLPACK_CUDA:
            return "cuda"
        on_cpu = device_type == _DLPACK_CPU
        where = (
            "on the CPU" if on_cpu else f"on DLPack device type {device_type}"
        )
        advice = hints.on_the_cpu(call, name, array) if on_cpu else ""
        raise UnsupportedError(
            f"{name} is a {type_name(array)} {where}, expected a NumPy "
            f"array or an array on a CUDA device{advice}"
        )
    if getattr(array, "__cuda_array_interface__", None) is not None:
        return "cuda"
    if isinstance(array, (list, tuple)):
        raise DTypeError(
            f"{name} is of type {type_name(array)}, expected an array: pass "
            f"np.asarray({name}), or of arrays on a CUDA device "
            f"cupy.asarray({name})"
        )
    if isinstance(array, float):
        raise DTypeError(
            f"{name} is {in_words(array)}, expected an array: pass one of its "
            f"shape, such as np.full(shape, {array})"
        )
    raise DTypeError(
        f"{name} is of type {type_name(array)}, expected an array: NumPy, "
        "CuPy, or any with DLPack or __cuda_array_interface__ on a CUDA "
        "device"
    )


def _check_no_lazy_bits(name: str, array: Any) -> None:
    """Refuse views of torch that negate or conjugate: memory does not."""
    for word, bit in (("negates", "neg"), ("conjugates", "conj")):
        has_bit = getattr(array, f"is_{bit}", None)  # torch's tensors only
        if callable(has_bit) and has_bit():
            raise UnsupportedError(
                f"{name} is a {type_name(array)} view that {word} what is in "
                "memory, expected one of the numbers themselves: DLPack and "
                "__cuda_array_interface__ pass on memory alone (pass "
                f"{name}.resolve_{bit}())"
            )


def _tracers() -> Any:
    """JAX's class of tracers, if the user imported JAX."""
    core = getattr(sys.modules.get("jax"), "core", None)
    return getattr(core, "Tracer", ())


def integers_on_host(name: str, array: np.ndarray) -> np.ndarray:
    """An array of integers as int32, positions as int64 where they are wide.

    Raises
    ------
    ValueRangeError
        If a number does not fit.
    """
    dtype = array.dtype
    if dtype == np.int32 or dtype.kind not in "iu":  # checked later
        return array
    wide = np.int64 if name == "positions" else np.int32
    low, high = np.iinfo(wide).min, np.iinfo(wide).max
    if not np.can_cast(dtype, wide) and array.size:
        for value in (int(array.min()), int(array.max())):
            if not low <= value <= high:
                raise ValueRangeError(
                    f"{name} holds {value}, expected {low} to {high}: kernels "
                    f"read {name} as {np.dtype(wide).name}"
                )
    return array.astype(wide)


def check_one_device(seen: tuple[tuple, ...]) -> None:
    """Check that the arrays of `describe` are on one device."""
    first, *_, expected = seen[0]
    for name, *_, got in seen:
        if got != expected:
            raise ValueRangeError(
                f"{name} is on CUDA device {got}, expected device "
                f"{expected} as {first} is: a call runs on one device and "
                "moves no array"
            )


# The calls ---------------------------------------------------------------


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
    out: Any = None,
    **options: Any,
) -> Call:
    """Check the arguments of `cuflash.forward`; see there.

    `options` holds only the options that the user passed.
    """
    given = {"q": q, "k": k, "v": v}
    asked = split_options(options)
    arrays = given if out is None else {**given, "out": out}
    signature = attention(
        "forward",
        describe(arrays),
        scale_of(scale),
        checks.flag("causal", causal),
        block_of("block_q", block_q),
        block_of("block_k", block_k),
        precision_of(precision),
        *asked[:2],
        num_splits=splits_of(num_splits),
        return_lse=checks.flag("return_lse", return_lse),
    )
    if out is not None:
        _check_apart({"out": out}, {**given, **asked[2]})
    return Call(signature, given, out, *asked[2:])


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
    written = {"dq": dq, "dk": dk, "dv": dv}
    written = {name: x for name, x in written.items() if x is not None}
    asked = split_options(options)
    signature = attention(
        "backward",
        describe({**given, **written}),
        scale_of(scale),
        checks.flag("causal", causal),
        block_of("block_q", block_q),
        block_of("block_k", block_k),
        precision_of(precision),
        *asked[:2],
        deterministic=checks.flag("deterministic", deterministic),
    )
    if written:
        _check_apart(written, {**given, **asked[2]})
    return Call(signature, given, None, *asked[2:], given_gradients=written)


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


def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    positions: Any = None,
    interleaved: Any = False,
    inverse: Any = False,
    out: Any = None,
) -> Call:
    """Check the arguments of `cuflash.apply_rotary`; see there."""
    given = {"x": x}
    tables = {"cos": cos, "sin": sin}
    if positions is not None:
        tables["positions"] = positions
    arrays = given if out is None else {**given, "out": out}
    signature = _rotary(
        describe(arrays),
        describe(tables),
        checks.flag("interleaved", interleaved),
        checks.flag("inverse", inverse),
    )
    if out is not None:
        read = tables if _is_same(x, out) else {**given, **tables}
        _check_apart({"out": out}, read)
    return Call(signature, given, out, tables)


NO_OPTIONS: tuple[Numbers, tuple[()], dict[str, Any], int] = ((), (), {}, 0)


def split_options(
    options: dict[str, Any],
) -> tuple[Numbers, tuple[tuple, ...], dict[str, Any], int]:
    """Split options: scalars, array descriptions, arrays and the seed."""
    if not options:
        return NO_OPTIONS
    scalars, seed = numbers_of(options)
    arrays = {name: options[name] for name in ARRAYS if name in options}
    return scalars, describe(arrays), arrays, seed


def describe(arrays: dict[str, Any]) -> tuple[tuple, ...]:
    """Describe each array without its data: the cache key of a call.

    A description is (name, shape, strides, dtype, offset, device).
    """
    if isinstance(next(iter(arrays.values()), None), np.ndarray):
        return tuple(
            [
                (
                    name,
                    x.shape,
                    x.strides,
                    x.dtype,
                    address(x) % ALIGNMENT,
                    None,
                )
                for name, x in arrays.items()
            ]
        )
    # On CuPy, x.data answers faster than x itself.
    return tuple([
        (name, x.shape, x.strides, x.dtype,
         (memory := x.data).ptr % ALIGNMENT, memory.device_id)
        for name, x in arrays.items()
    ])  # fmt: skip


# Shapes and dtypes -------------------------------------------------------

# Typed, because 1 == 1.0 == True.
remembered = functools.lru_cache(maxsize=4096, typed=True)


@remembered
def attention(
    direction: Literal["forward", "backward", "jvp", "double_backward"],
    seen: tuple[tuple, ...],
    scale: float | None,
    causal: bool,
    block_q: int | None,
    block_k: int | None,
    precision: Literal["tf32x3"] | None,
    asked: Numbers,
    seen_options: tuple[tuple, ...],
    *,
    deterministic: bool = False,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Signature:
    """Check a forward or backward call; nothing here depends on the data.

    Or a jvp call but for its tangents, or a double_backward call.
    """
    check_one_device(seen + seen_options)
    numbers_asked = dict(asked)
    arrays = Arrays(seen)
    arrays.check_same("k", ("batch", "head_dim"), "q")
    arrays.check_same("v", ("batch", "seqlen", "heads"), "k")
    arrays.check_groups()
    arrays.check_lengths("q")
    arrays.check_lengths("k")
    arrays.check_head_dim("q")
    arrays.check_head_dim("v")
    for name in ("out", "dout"):
        if name in arrays.shapes:
            arrays.check_same(name, ("batch", "seqlen", "heads"), "q")
            arrays.check_same(name, ("head_dim",), "v")
    for name in ("lse", "dlse"):
        if name in arrays.shapes:
            arrays.check_same(name, _AXES_LSE, "q")
    for name in ("dq", "dk", "dv"):
        if name in arrays.shapes:
            arrays.check_same(name, _AXES, name[1:])
    batch, seqlen_q, num_heads_q, head_dim = arrays.full["q"]
    _, seqlen_k, num_heads_kv, head_dim_v = arrays.full["v"]
    scale = default_scale(scale, head_dim, arrays.dtype)
    if precision and arrays.dtype != "float32":
        raise UnsupportedError(
            f"precision is {precision!r}, which is for float32 arrays, got "
            f"{arrays.dtype}: leave it out, or convert q, k and v to float32"
        )
    options = _check_options(arrays, asked, seen_options)
    shapes = {name: tuple(shape) for name, shape, *_ in seen_options}
    causal, window = bounds_that_mask(
        causal,
        numbers_asked.get("window", (None, None)),
        seqlen_q,
        seqlen_k,
        "cu_seqlens_q" in options,
    )
    problem = Problem(
        direction=direction,
        dtype=arrays.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        deterministic=deterministic,
        precision=precision,
        num_splits=num_splits,
        dlse="dlse" in arrays.shapes,
        **{**numbers_asked, "window": window},
        **_arrays_there(options, shapes),
    )
    return Signature(
        problem, arrays.rank, arrays.layouts(), return_lse, options,
        shapes.get("bias", ()),
    )  # fmt: skip


def default_scale(scale: float | None, head_dim: int, dtype: str) -> float:
    """The scale, checked against the range of scores, or its default."""
    if scale is None:
        return head_dim**-0.5
    if dtype != "float64" and abs(scale) > MAX_SCALE:
        raise ValueRangeError(
            f"scale is {scale}, expected at most {MAX_SCALE} in magnitude: "
            f"scores of {dtype} arrays are float32"
        )
    return scale


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
        "float64" if arrays.dtype == "float64" else "float32",
    )  # fmt: skip
    return check(seen, sizes)


def _arrays_there(
    options: dict[str, Layout], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of a `Problem` that describe its array options.

    `shapes` are the shapes that the user passed: a bias with all its axes
    does not count as broadcast here, whatever its strides.
    """
    has: dict[str, Any] = {
        name: name in options for name in ("alibi_slopes", "mask", "sink")
    }
    has["segment_ids"] = "segment_ids_q" in options
    if "bias" in options:
        layout = options["bias"]
        has["bias"] = layout.dtype.name
        given = math.prod(shapes["bias"])
        has["bias_is_broadcast"] = given < math.prod(layout.shape)
    if "cu_seqlens_q" in options:
        has["num_sequences"] = options["cu_seqlens_q"].shape[0] - 1
    return has


def bounds_that_mask(
    causal: bool,
    window: tuple[int | None, int | None],
    seqlen_q: int,
    seqlen_k: int,
    packed: bool,
) -> tuple[bool, tuple[int | None, int | None]]:
    """Normalise causal and window: see `problem.Problem`.

    The last query is at the position of the last key, so it reaches the first
    key with left = seqlen_k - 1. The first query reaches the last key with
    right = seqlen_q - 1. Larger bounds mask nothing.
    """
    left, right = window
    if causal or right == 0:
        causal, right = True, None
    if not packed:
        left = None if left is None or left >= seqlen_k - 1 else left
        right = None if right is None or right >= seqlen_q - 1 else right
    return causal, (left, right)


@remembered
def _merge(seen: tuple[tuple, ...]) -> Signature:
    """Check a merge_states call."""
    check_one_device(seen)
    arrays = Arrays(seen)
    for name in arrays.shapes:
        arrays.check_same(name, arrays.axes_of(name), "out_a")
    arrays.check_lengths("out_a")
    arrays.check_head_dim("out_a")
    batch, seqlen_q, num_heads, head_dim_v = arrays.full["out_a"]
    problem = Problem(
        direction="merge",
        dtype=arrays.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=0,
        num_heads_q=num_heads,
        num_heads_kv=num_heads,
        head_dim=head_dim_v,
        head_dim_v=head_dim_v,
        scale=1.0,
        num_states=len(seen) // 2,
    )
    return Signature(problem, arrays.rank, arrays.layouts())


@remembered
def _rotary(
    seen: tuple[tuple, ...],
    tables: tuple[tuple, ...],
    interleaved: bool,
    inverse: bool,
) -> Signature:
    """Check an apply_rotary call."""
    check_one_device(seen + tables)
    arrays = Arrays(seen)
    if "out" in arrays.shapes:
        arrays.check_same("out", _AXES, "x")
    arrays.check_lengths("x")
    arrays.check_head_dim("x")
    batch, seqlen, num_heads, head_dim = arrays.full["x"]
    dtypes = {name: np.dtype(x).name for name, _, _, x, *_ in tables}
    layouts = _check_tables(arrays, tables)
    num_positions, num_pairs = layouts["cos"].shape
    if "positions" not in layouts and seqlen > num_positions:
        raise ShapeError(
            f"cos has {num_positions} rows, expected at least {seqlen}, x's "
            "seqlen: without positions, tokens are at 0, 1, 2, ..."
        )
    problem = Problem(
        direction="rotary",
        dtype=arrays.dtype,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=0,
        num_heads_q=num_heads,
        num_heads_kv=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        scale=1.0,
        rotary=Rotary(
            2 * num_pairs,
            num_positions,
            dtypes["cos"],
            _index_of(layouts.get("positions")),
            interleaved,
            inverse,
        ),
    )
    return Signature(problem, arrays.rank, arrays.layouts(), options=layouts)


def _check_tables(
    arrays: Arrays, tables: tuple[tuple, ...]
) -> dict[str, Layout]:
    """The layouts of cos and sin, and of positions, (batch, seqlen)."""
    layouts = check_cos_and_sin(arrays, tables[:2])
    for name, shape, strides, dtype, offset, _ in tables[2:]:
        check_integers(name, dtype)
        full = arrays.full["x"][:2]
        _check_positions_shape(tuple(shape), full, arrays.rank)
        strides = broadcast_strides(tuple(shape), tuple(strides), full)
        layouts[name] = Layout(full, strides, dtype, offset)
    return layouts


def _index_of(positions: Layout | None) -> Literal["int32", "int64"] | None:
    """The dtype in which kernels read positions; see `layouts.by_element`."""
    if positions is None:
        return None
    return "int32" if positions.dtype.name == "int32" else "int64"


def check_cos_and_sin(
    arrays: Arrays, tables: tuple[tuple, ...]
) -> dict[str, Layout]:
    """The layouts of two tables that rotate the first array."""
    layouts: dict[str, Layout] = {}
    own = "float64" if arrays.dtype == "float64" else "float32"
    floats = tuple(dict.fromkeys((own, arrays.dtype)))
    x = arrays.first
    for name, shape, strides, dtype, offset, _ in tables:
        why = f" as {x} has dtype {arrays.dtype}"
        _check_table_dtype(name, dtype, floats, why)
        _check_table_shape(name, tuple(shape), x, arrays.shapes[x])
        layouts[name] = Layout(tuple(shape), tuple(strides), dtype, offset)
    (first, cos), (second, sin) = layouts.items()
    if sin.dtype.name != cos.dtype.name:
        raise DTypeError(
            f"{second} has dtype {sin.dtype.name}, expected "
            f"{cos.dtype.name} as {first}"
        )
    if sin.shape != cos.shape:
        raise ShapeError(
            f"{second} has shape {sin.shape}, expected {cos.shape} as "
            f"{first} ({_LAYOUT_OF_TABLES})"
        )
    return layouts


_LAYOUT_OF_TABLES = "layout is (num_positions, rotary_dim / 2)"


def _check_table_dtype(
    name: str, dtype: Any, expected: tuple[str, ...], why: str
) -> None:
    got = np.dtype(dtype).name
    if got not in expected:
        raise DTypeError(
            f"{name} has dtype {got}, expected {' or '.join(expected)}{why}"
        )


def _check_table_shape(
    name: str, shape: tuple[int, ...], x: str, full: tuple[int, ...]
) -> None:
    if len(shape) != 2:
        one = len(shape) == 3 and shape[0] == 1
        raise ShapeError(
            f"{name} has {axes_in_words(len(shape))}, expected 2 "
            f"({name} {shape}; {_LAYOUT_OF_TABLES})"
            f"{f': pass {name}[0]' if one else ''}"
        )
    if 2 * shape[1] > full[-1]:
        twice = shape[1] % 2 == 0 and shape[1] <= full[-1]
        advice = (
            f"; if it holds each angle twice, as in Transformers, pass "
            f"{name}[..., :{shape[1] // 2}]"
        )
        raise ShapeError(
            f"{name} has {shape[1]} columns, expected at most "
            f"{full[-1] // 2}: rotary_dim is twice as many, and at most "
            f"{x}'s head_dim {full[-1]} ({x} {full}, {name} {shape})"
            f"{advice if twice else ''}"
        )


def _check_positions_shape(
    shape: tuple[int, ...], full: tuple[int, ...], rank: int
) -> None:
    words = "(batch, seqlen)" if rank == 4 else "(seqlen,)"
    full = full if rank == 4 else full[1:]
    if not broadcasts(shape, full):
        raise ShapeError(
            f"positions has shape {shape}, expected one that broadcasts to "
            f"{full} as in x (layout is {words})"
        )


class Arrays:
    """A call's arrays without their data, and the checks on them.

    Attributes
    ----------
    dtype : str
    rank : int
        The rank of the first array; see `rank_of` for the others.
    shapes, full : dict
        The shape of each array, as passed and in full rank.
    """

    def __init__(self, seen: tuple[tuple, ...]) -> None:
        self.seen = seen
        self.shapes = {name: tuple(shape) for name, shape, *_ in seen}
        dtypes = {name: np.dtype(x).name for name, _, _, x, *_ in seen}
        self.first = first = next(iter(self.shapes))
        self.dtype = dtypes[first]
        self.rank = len(self.shapes[first])
        self.check_first()
        self.full = {}
        for name, shape in self.shapes.items():
            self.check_dtype(name, dtypes[name])
            self._check_rank(name)
            self.full[name] = self._full(name, shape)

    def rank_of(self, name: str) -> int:
        """The rank that an array must have."""
        return self.rank - _is_lse(name)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The names of an array's axes in full rank."""
        return _AXES_LSE if _is_lse(name) else _AXES

    def check_first(self) -> None:
        """Check the dtype and the rank of the first array."""
        if self.dtype not in DTYPES:
            raise DTypeError(
                f"{self.first} has dtype {self.dtype}, expected "
                f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
            )
        if self.rank not in _LAYOUTS:
            raise ShapeError(
                f"{self.first} has {axes_in_words(self.rank)}, expected 2, 3 "
                f"or 4 ({self.first} {self.shapes[self.first]}; layout is "
                f"{_LAYOUTS[2]}, {_LAYOUTS[3]} or {_LAYOUTS[4]})"
            )

    def check_dtype(self, name: str, got: str) -> None:
        """Check an array's dtype against that of the first."""
        if not _is_lse(name):
            if got != self.dtype:
                raise DTypeError(
                    f"{name} has dtype {got}, expected {self.dtype} as in "
                    f"{self.first}: arrays of one call have one dtype"
                )
            return
        expected = "float64" if self.dtype == "float64" else "float32"
        if got != expected:
            raise DTypeError(
                f"{name} has dtype {got}, expected {expected} as "
                f"{self.first} has dtype {self.dtype}: lse is float32, and "
                "float64 for float64 arrays"
            )

    def _check_rank(self, name: str) -> None:
        got = len(self.shapes[name])
        expected = self.rank_of(name)
        if got != expected:
            raise ShapeError(
                f"{name} has {axes_in_words(got)}, expected {expected} as "
                f"{self.first} has {self.rank} "
                f"{self.words(self.first, name)}{self._other_array(name)}"
            )

    def _other_array(self, name: str) -> str:
        """Advice where another array was passed as `name`."""
        if _is_lse(name) and self.shapes[name] == self.shapes[self.first]:
            return f": pass {name} as forward returns it with return_lse=True"
        batch = self.shapes[self.first][:1]
        is_lse = self.rank == 4 and self.shapes[name][:1] == batch
        if name == "out" and "dout" in self.shapes and is_lse:
            return ": the order is dout, q, k, v, out, lse"
        return ""

    def _full(self, name: str, shape: tuple) -> tuple:
        """A shape, or strides, in full rank; inserted axes have 1."""
        if not _is_lse(name):
            return in_full_rank(shape)
        return (1,) * (3 - len(shape)) + shape

    def layouts(self) -> dict[str, Layout]:
        """The layout of each array, in full rank."""
        return {
            name: Layout(
                self.full[name], self._full(name, strides), dtype, offset
            )
            for name, _, strides, dtype, offset, _ in self.seen
        }

    def check_same(self, name: str, axes: tuple[str, ...], other: str) -> None:
        """Check that `name` and `other` have the same size on each axis."""
        names, names_of_other = self.axes_of(name), self.axes_of(other)
        for axis in axes:
            got = self.full[name][names.index(axis)]
            expected = self.full[other][names_of_other.index(axis)]
            if got != expected:
                raise ShapeError(
                    f"{name} has {axis} {got}, expected {expected} as in "
                    f"{other} {self.words(other, name)}"
                    f"{self._turned(name, other)}"
                )

    def _turned(self, name: str, other: str) -> str:
        """Advice for an lse whose last two axes are those of `other`."""
        if not _is_lse(name) or self.rank == 2:
            return ""
        batch, seqlen, heads, _ = self.full[other]
        if self.full[name] != (batch, seqlen, heads):
            return ""
        return f": pass {name}.swapaxes(-1, -2)"

    def check_groups(self, k: str = "k") -> None:
        """Check that each key head serves the same number of query heads."""
        num_heads_q, num_heads_kv = self.full["q"][2], self.full[k][2]
        if num_heads_q % num_heads_kv if num_heads_kv else num_heads_q:
            raise ShapeError(
                f"q has heads {num_heads_q}, expected a multiple of {k}'s "
                f"{num_heads_kv}: each key head serves a group of query "
                f"heads of the same size {self.words('q', k)}"
                f"{self._heads_first(k)}"
            )

    def _heads_first(self, k: str) -> str:
        """Advice for q and k, or k alone, with heads before seqlen."""
        if self.rank == 2:
            return ""
        (_, seqlen_q, heads_q, _), (_, heads_k, _, _) = (
            self.full[name] for name in ("q", k)
        )
        axes = f"({self.rank - 3}, {self.rank - 2})"
        cure = "pass heads after tokens"
        if heads_k and seqlen_q and seqlen_q % heads_k == 0:
            return f": {cure}, q.swapaxes{axes} and so on, if they are before"
        if heads_k and heads_q and heads_q % heads_k == 0:
            return f": {cure}, {k}.swapaxes{axes}, if they are before"
        return ""

    def check_lengths(self, name: str) -> None:
        """Check that tokens, heads and batches can be counted in int32."""
        axes = self.axes_of(name)[:3]
        sizes = dict(zip(axes, self.full[name], strict=False))
        batch, _, heads = axes
        sizes[f"{batch} * {heads}"] = sizes[batch] * sizes[heads]
        for what, size in sizes.items():
            if size > MAX_LENGTH:
                raise UnsupportedError(
                    f"{name} has {what} {size}, expected at most "
                    f"{MAX_LENGTH}: kernels count in 32-bit integers, up to "
                    "the end of the last tile, which may be 1024 past the "
                    f"array's {self.words(name)}"
                )

    def check_head_dim(self, name: str) -> None:
        """Check that some kernel supports the head dimension."""
        head_dim = self.shapes[name][-1]
        if head_dim < 1:
            raise ShapeError(
                f"{name} has head_dim 0, expected at least 1 "
                f"{self.words(name)}"
            )
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name} has head_dim {head_dim}, expected at most "
                f"{MAX_HEAD_DIM}: no kernel supports wider rows "
                f"{self.words(name)}"
            )

    def words(self, *names: str) -> str:
        """The shapes of some arrays and the meaning of their axes."""
        known = sorted(names, key=list(self.shapes).index)
        shapes = ", ".join(f"{name} {self.shapes[name]}" for name in known)
        layouts = [f"layout is {_LAYOUTS[self.rank]}"]
        layouts += [
            f"of {name} {_LAYOUTS_LSE[self.rank]}"
            for name in known
            if _is_lse(name)
        ]
        return f"({shapes}; {', '.join(layouts)})"


def in_full_rank(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, or strides, of q, k or v in full rank; new axes have 1."""
    if len(sizes) == 4:
        return sizes
    return (1, *sizes) if len(sizes) == 3 else (1, sizes[0], 1, sizes[1])


def _is_lse(name: str) -> bool:
    return name.startswith(("lse", "dlse"))


# Offsets of packed sequences ----------------------------------------------


def offsets(call: Call) -> None:
    """Raise ValueRangeError if the offsets of packed sequences are invalid.

    It reads the offsets, so it waits for the device.
    """
    p = call.problem
    if p.num_sequences is None:
        return
    for name, total, longest in (
        ("cu_seqlens_q", p.seqlen_q, p.max_seqlen_q),
        ("cu_seqlens_k", p.seqlen_k, p.max_seqlen_k),
    ):
        values = on_host(call.options[name])
        check_offsets(name, values.tolist(), total, longest)


def on_host(array: Any) -> np.ndarray:
    """An array's values; waits for its device."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def check_offsets(
    name: str, values: list[int], total: int, longest: int | None
) -> None:
    """Raise ValueRangeError if offsets are invalid; `total` tokens exist."""
    before = 0
    for index, value in enumerate(values):
        if index == 0:
            expected = None
            if value:
                expected = "0 (of lengths, pass cuflash.cu_seqlens(lengths))"
        elif value < before:
            expected = f"at least {before}, the one before"
        elif value > total:
            expected = f"at most {total}, the number of tokens"
        elif longest is not None and value - before > longest:
            expected = (
                f"at most {before + longest}: no sequence is longer than "
                f"max_seqlen_{name[-1]}"
            )
        else:
            expected = None
        if expected:
            raise ValueRangeError(
                f"{name}[{index}] is {value}, expected {expected}"
            )
        before = value


def positions(call: Call) -> None:
    """Raise ValueRangeError if a position is not a row of cos and sin.

    It reads the positions, so it waits for the device.
    """
    given, rotary = call.options.get("positions"), call.problem.rotary
    if given is None or rotary is None:
        return
    values = on_host(given)
    bad = (values < 0) | (values >= rotary.num_positions)
    if bad.any():
        index = np.unravel_index(bad.argmax(), bad.shape)
        at = ", ".join(map(str, index))
        raise ValueRangeError(
            f"positions[{at}] is {values[index]}, expected 0 to less than "
            f"{rotary.num_positions}, the rows of cos"
        )


# Memory that is written to -----------------------------------------------


def _check_apart(written: dict[str, Any], read: dict[str, Any]) -> None:
    """Check that results share no memory with inputs or each other.

    Otherwise kernels would overwrite an input that other rows still read.
    Nor may elements of one result overlap.
    """
    others = {name: (*_bounds(x), x) for name, x in read.items()}
    for name, out in written.items():
        first, end = _bounds(out)
        for other, (other_first, other_end, x) in others.items():
            if first >= other_end or other_first >= end:
                continue
            if np.shares_memory(_addresses(out), _addresses(x)):
                raise shares_memory(name, other, both=other in written)
        check_elements_apart(name, out.shape, out.strides, out.dtype.itemsize)
        others[name] = first, end, out


def shares_memory(
    written: str, name: str, both: bool = False
) -> ValueRangeError:
    """The error for an array that shares memory with one that is written.

    `both`: the other is written too.
    """
    why = "both are" if both else f"{name} is read while {written} is"
    return ValueRangeError(
        f"{written} shares memory with {name}, expected separate memory: "
        f"{why} written"
    )


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same elements at the same addresses."""
    return (
        address(a) == address(b)
        and a.strides == b.strides
        and a.shape == b.shape
    )


@remembered
def check_elements_apart(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    """Elements are disjoint if each stride covers the span of smaller ones."""
    span = itemsize
    axes = sorted(
        (abs(stride), size)
        for stride, size in zip(strides, shape, strict=True)
        if size > 1
    )
    for stride, size in axes:
        if stride < span and 0 not in shape:
            raise ValueRangeError(
                f"{name} has elements that share memory with each other "
                f"(shape {shape}, strides {strides} bytes), expected a "
                "separate address for each"
            )
        span += stride * (size - 1)


def _bounds(array: Any) -> tuple[int, int]:
    """The address of an array's lowest byte, and one past its highest."""
    first = address(array)
    low, high = span(array.shape, array.strides, array.dtype.itemsize)
    return first + low, first + high


def span(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """The bytes [low, high) of an array, from its first element's address."""
    low = high = 0
    for stride, size in zip(strides, shape, strict=True):
        if stride < 0:
            low += stride * (size - 1)
        else:
            high += stride * (size - 1)
    return low, high + itemsize


def address(array: Any) -> int:
    """The address of an array's first element."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr  # CuPy's


class _Addresses:
    """An array's addresses, for np.shares_memory; the data are not read."""

    def __init__(
        self,
        first: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (first, True),
            "typestr": f"|V{itemsize}",
            "shape": tuple(shape),
            "strides": tuple(strides),
        }


def _addresses(array: Any) -> np.ndarray:
    return addresses(
        address(array), array.shape, array.strides, array.dtype.itemsize
    )


def addresses(
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
) -> np.ndarray:
    """An array with these addresses, for np.shares_memory alone."""
    return np.asarray(_Addresses(first, shape, strides, itemsize))


# Options -----------------------------------------------------------------


def scale_of(scale: Any) -> float | None:
    """Check `scale`: a finite number, or None."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise DTypeError(
            f"scale is {in_words(scale)}, expected a real number, or None for "
            f"head_dim ** -0.5{_scale_as_number(scale)}"
        )
    try:
        value = float(scale)
    except OverflowError:  # an int beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise ValueRangeError(
            f"scale is {scale}, expected a finite number: it multiplies "
            "every score"
        )
    return value


def _scale_as_number(scale: Any) -> str:
    """What to do with a scale that is an array."""
    if not hasattr(scale, "shape"):
        return ""
    scaled = "pass scale=1 and q * scale"
    if math.prod(scale.shape) == 1:
        return f": pass scale.item(); if it has a gradient, {scaled}"
    return f": {scaled}"


def precision_of(precision: Any) -> Literal["tf32x3"] | None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueRangeError(
            f"precision is {in_words(precision)}, expected "
            f"{' or '.join(map(repr, PRECISIONS))}, or None for the "
            "precision of the dtype"
        )
    return precision


def splits_of(num_splits: Any) -> int | None:
    """Check `num_splits`: an int in range, or None."""
    if num_splits is None:
        return None
    if isinstance(num_splits, bool) or not isinstance(
        num_splits, numbers.Integral
    ):
        raise DTypeError(
            f"num_splits is {in_words(num_splits)}, expected an int, or None "
            "for the fastest number"
        )
    value = int(num_splits)
    if not 1 <= value <= MAX_SPLITS:
        raise ValueRangeError(
            f"num_splits is {value}, expected 1 to {MAX_SPLITS}: it counts the"
            " parts into which the keys of a head are cut"
        )
    return value


def block_of(name: str, block: Any) -> int | None:
    if block is None:
        return None
    if isinstance(block, bool) or not isinstance(block, numbers.Integral):
        raise DTypeError(
            f"{name} is {in_words(block)}, expected an int, or None for the "
            "tuned size"
        )
    value = int(block)
    if value < 1:
        raise ValueRangeError(
            f"{name} is {value}, expected at least 1: it counts the tokens "
            "of a tile"
        )
    return value


# Helpers for messages ----------------------------------------------------


def axes_in_words(count: int) -> str:
    return f"{count} axis" if count == 1 else f"{count} axes"
