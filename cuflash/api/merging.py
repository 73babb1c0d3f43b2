"""`merge_states`: attention over the union of sets of keys."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NoReturn, overload

from cuflash.api import foreign_names
from cuflash.request.problem import MOST_STATES, strip, strip_lse
from cuflash.request.validate import merging as validate

if TYPE_CHECKING:
    from cuflash.api.types import Array, NumPyArray

from cuflash.api.arrays import open_arrays


@overload
def merge_states(
    out_a: NumPyArray, lse_a: NumPyArray, *more: NumPyArray
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def merge_states(
    out_a: Array, lse_a: Array, *more: Array
) -> tuple[Any, Any]: ...


@foreign_names.our_names("cuflash.merge_states")
def merge_states(
    out_a: Any, lse_a: Any, *more: Any, **unknown: NoReturn
) -> tuple[Any, Any]:
    """Merge the results of attention over disjoint sets of keys.

    Parameters
    ----------
    out_a : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        The result of `forward` over one set of keys; 3-D or 2-D as there.
    lse_a : array, (batch, num_heads_q, seqlen_q)
        Its lse, float32 (float64 for float64 `out_a`).
    *more : array
        ``out_b, lse_b, out_c, lse_c, ...``: for the same queries, the
        results over other sets of keys, any number of pairs.

    Returns
    -------
    out, lse : array
        As `forward` returns them over all the keys: CuPy arrays for arrays
        on a CUDA device, NumPy arrays for NumPy arrays.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward

    Notes
    -----
    lse = log(sum_i exp(lse_i)) and out = sum_i exp(lse_i - lse) * out_i
    [1]_. A row with lse -inf sees no key and its out is ignored: where one
    other row is left, it is returned unchanged; where none is, out is 0 and
    lse -inf. A row with lse inf makes out NaN and lse inf.

    On a CUDA device up to 240 pairs are merged by one kernel; of more, each
    240 are merged first, and their results rounded to the dtype of `out_a`.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for
       softmax", arXiv:1805.02867, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> thirds = [
    ...     cuflash.forward(q, k[i : i + 6], v[i : i + 6], return_lse=True)
    ...     for i in range(0, 16, 6)
    ... ]
    >>> a, b, c = thirds
    >>> out, lse = cuflash.merge_states(*a, *b, *c)
    >>> np.allclose(out, cuflash.forward(q, k, v))
    True
    """
    if unknown:
        raise foreign_names.unexpected("cuflash.merge_states", unknown)
    states = validate.states_of((out_a, lse_a, *more))
    runner, arrays = open_arrays("merge_states", states)
    call = validate.merge_states(**arrays)
    if call.problem.num_states > MOST_STATES:
        given = tuple(arrays.values())
        size = 2 * MOST_STATES
        groups = (given[i : i + size] for i in range(0, len(given), size))
        merged = merge_states(
            *itertools.chain(*(merge_states(*x) for x in groups))
        )
        runner.finish()
        return merged
    out, lse = runner.merge_states(call)
    runner.finish()
    return strip(out, call.rank), strip_lse(lse, call.rank)
