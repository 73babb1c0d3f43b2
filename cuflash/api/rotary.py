"""`apply_rotary`: rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

from cuflash.api import foreign_names
from cuflash.request.problem import strip
from cuflash.request.validate import rotary as validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import Array, NumPyArray, RotaryOptions

from cuflash.api.arrays import OUT, open_arrays, reads_values


@overload
def apply_rotary(
    x: NumPyArray,
    cos: NumPyArray,
    sin: NumPyArray,
    **options: Unpack[RotaryOptions],
) -> NumPyArray: ...


@overload
def apply_rotary(
    x: Array,
    cos: Array,
    sin: Array,
    **options: Unpack[RotaryOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.apply_rotary")
def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    *positional: NoReturn,
    positions: Any = None,
    interleaved: bool = False,
    inverse: bool = False,
    out: Any = None,
    **unknown: NoReturn,
) -> Any:
    """Rotary position embedding: rotate queries or keys by their positions.

    Parameters
    ----------
    x : array, (batch, seqlen, heads, head_dim)
        Queries or keys, in any dtype and strides that `forward` supports;
        3-D or 2-D as there, so packed sequences are (total, heads,
        head_dim).
    cos, sin : array, (num_positions, rotary_dim / 2)
        The rows of a position's angles, as `rotary_tables` makes them.
        float32 (float64 for float64 `x`), or the dtype of `x`. `rotary_dim`
        is at most `head_dim`; columns of `x` from `rotary_dim` on are
        returned unchanged.
    positions : array, (batch, seqlen) or broadcastable, optional
        Integers: each token's row of `cos` and `sin`. 0, 1, 2, ...
        along seqlen by default. A position outside the tables raises a
        ValueRangeError for NumPy arrays. On a CUDA device the host does not
        read positions: the rotated columns of such a token are NaN, without
        an error. ``CUFLASH_CHECK=1`` raises the error there too; each call
        then waits for the device.
    interleaved : bool, optional
        Whether pair i is the columns (2i, 2i + 1), else
        (i, i + rotary_dim / 2).
    inverse : bool, optional
        Whether to rotate back. The inverse of a rotation is its transpose,
        so ``apply_rotary(dout, ..., inverse=True)`` is the gradient with
        respect to `x`.
    out : array, optional
        Receives the result. Like `x`; it may be `x` itself, and shares no
        other memory with the inputs.

    Returns
    -------
    array, like `x`
        A CuPy array for arrays on a CUDA device, a NumPy array for NumPy
        arrays; `out` itself if it was given.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward

    Notes
    -----
    Each pair (a, b) becomes (a cos - b sin, a sin + b cos) [1]_, in float32
    (float64 for float64 arrays). The score of a rotated query and a rotated
    key depends on their distance, not on their positions.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position
       Embedding", arXiv:2104.09864, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> x = np.random.default_rng(0).standard_normal((2, 16, 4, 8))
    >>> cos, sin = cuflash.rotary_tables(16, 8, dtype=x.dtype)
    >>> rotated = cuflash.apply_rotary(x, cos, sin)
    >>> back = cuflash.apply_rotary(rotated, cos, sin, inverse=True)
    >>> np.allclose(back, x)
    True
    """
    if unknown or positional:
        foreign_names.refuse("cuflash.apply_rotary", unknown, positional)
    given = {"x": x, "cos": cos, "sin": sin}
    if positions is not None:
        given["positions"] = positions
    if out is not None:
        given["out"] = out
    runner, arrays = open_arrays("apply_rotary", given, OUT)
    call = validate.apply_rotary(
        **arrays, interleaved=interleaved, inverse=inverse
    )
    if reads_values(call.options.get("positions")):
        validate.positions(call)
    result = runner.apply_rotary(call)
    runner.finish()
    return strip(result, call.rank) if out is None else out
