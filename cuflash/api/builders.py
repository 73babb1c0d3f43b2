"""Arguments made from what users have: offsets, segment ids, rotary tables."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ShapeError, ValueRangeError, type_name
from cuflash.request import checks
from cuflash.request.validate.shapes import DTYPES

__all__ = ["cu_seqlens", "rotary_tables", "segment_ids"]


def cu_seqlens(lengths: Any) -> Any:
    """The offsets of packed sequences, `cu_seqlens_q` or `cu_seqlens_k`.

    Parameters
    ----------
    lengths : array or sequence of int, (sequences,)
        The tokens of each sequence.

    Returns
    -------
    array of int32, (sequences + 1,)
        0, then the sums of the first lengths: the offset of each sequence's
        first token, then the end of the last. A CuPy array for a CuPy array,
        else a NumPy array.

    Raises
    ------
    DTypeError, ShapeError
        If `lengths` does not hold integers along one axis.
    ValueRangeError
        If a length is negative or their sum exceeds int32; not checked on a
        CUDA device.

    See Also
    --------
    forward : takes them.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.cu_seqlens([3, 5, 2])
    array([ 0,  3,  8, 10], dtype=int32)
    """
    if isinstance(lengths, (list, tuple)):
        lengths = np.asarray(lengths, None if lengths else np.int32)
    xp = _library("lengths", lengths)
    if lengths.dtype.kind not in "iu":
        raise DTypeError(
            f"lengths has dtype {lengths.dtype}, expected an integer dtype: "
            "convert lengths to int32"
        )
    if lengths.ndim != 1:
        raise ShapeError(
            f"lengths has shape {lengths.shape}, expected (sequences,)"
        )
    sums = lengths.cumsum(dtype=np.int64)
    if xp is np and lengths.size:
        low, high = int(lengths.min()), int(sums[-1])
        if low < 0 or high >= 2**31:
            raise ValueRangeError(
                f"lengths has {low} at least and {high} in all, expected 0 to "
                f"{2**31 - 1}: offsets are int32"
            )
    offsets = xp.zeros(len(lengths) + 1, np.int32)
    offsets[1:] = sums
    return offsets


def segment_ids(mask: Any) -> Any:
    """The segment ids of padded sequences: 1 for a token, 0 for padding.

    Pass them as `segment_ids_q` and `segment_ids_k`, each of its own tokens:
    tokens then see only tokens, and tiles of padding are skipped. What a
    query of padding returns has no meaning.

    Parameters
    ----------
    mask : array of bool or integers, (batch, seqlen) or (seqlen,)
        True, or not 0, where there is a token.

    Returns
    -------
    array of int32, like `mask`

    Raises
    ------
    DTypeError
        If `mask` has another dtype or is no array.

    See Also
    --------
    forward : takes them.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> cuflash.segment_ids(np.array([[True, True, False]]))
    array([[1, 1, 0]], dtype=int32)
    """
    _library("mask", mask)
    if mask.dtype.kind not in "biu":
        raise DTypeError(
            f"mask has dtype {mask.dtype}, expected bool or an integer dtype: "
            "True, or not 0, where there is a token"
        )
    return (mask != 0).astype(np.int32)


def rotary_tables(
    positions: Any,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: Any = np.float32,
) -> tuple[Any, Any]:
    r"""The cos and sin of a rotary position embedding.

    Parameters
    ----------
    positions : array, (num_positions,), or int
        The position of each row, or how many rows 0, 1, 2, ... there are.
    rotary_dim : int
        The columns that are rotated: even, at most head_dim.
    base : float, optional
        Angles fall from 1 to about ``1 / base`` a position.
    dtype : dtype, optional
        float32 by default; float64 arrays need float64.

    Returns
    -------
    cos, sin : array, (num_positions, rotary_dim / 2)
        Of position * base ** (-2 i / rotary_dim) for pair i, computed in
        float64. CuPy arrays for a CuPy array, else NumPy arrays.

    Raises
    ------
    DTypeError, ShapeError, ValueRangeError
        If an argument has another type, rank or range.

    See Also
    --------
    apply_rotary, forward_kvcache : take them.

    Examples
    --------
    >>> import cuflash
    >>> cos, sin = cuflash.rotary_tables(2048, 64)
    >>> cos.shape, cos.dtype
    ((2048, 32), dtype('float32'))
    """
    rotary_dim = checks.whole("rotary_dim", rotary_dim, 2, 2**31 - 1)
    if rotary_dim % 2:
        raise ValueRangeError(
            f"rotary_dim is {rotary_dim}, expected an even number: columns "
            "are rotated in pairs"
        )
    base = checks.real("base", base)
    if base <= 0:
        raise ValueRangeError(f"base is {base}, expected more than 0")
    if np.dtype(dtype).name not in DTYPES:
        raise DTypeError(
            f"dtype is {np.dtype(dtype).name}, expected float32, float64 or "
            "the dtype of the arrays to rotate"
        )
    if isinstance(positions, (int, np.integer)):
        positions = np.arange(checks.length("positions", positions))
    elif isinstance(positions, (list, tuple)):
        positions = np.asarray(positions)
    xp = _library("positions", positions)
    if positions.ndim != 1 or positions.dtype.kind not in "iuf":
        raise ShapeError(
            f"positions has shape {positions.shape} and dtype "
            f"{positions.dtype}, expected numbers (num_positions,)"
        )
    frequencies = base ** (xp.arange(0, rotary_dim, 2) / -rotary_dim)
    angles = positions.astype(np.float64)[:, None] * frequencies
    return xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)


def _library(name: str, array: Any) -> Any:
    """The module of an array: NumPy, or CuPy."""
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")  # imported if the user has CuPy arrays
    if isinstance(array, getattr(cupy, "ndarray", ())):
        return cupy
    raise DTypeError(
        f"{name} is of type {type_name(array)}, expected a NumPy or CuPy array"
    )
