"""The public functions `weights`, `weight_sums` and `entropy`.

Numbers inside the softmax, without its matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

from cuflash import settings
from cuflash.api import chosen, foreign_names, lse_of_call
from cuflash.api.arrays import check_offsets, open_arrays
from cuflash.api.foreign_names import split_options
from cuflash.request import traced
from cuflash.request.options import FORWARD
from cuflash.request.problem import Call, strip_lse
from cuflash.request.validate import chosen as validate_chosen
from cuflash.request.validate import readouts as validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import (
        Array,
        NumPyArray,
        ReadoutOptions,
        WeightsOptions,
        WeightSumsOptions,
    )

__all__ = ["checked", "entropy", "weight_sums", "weights"]


@overload
def weights(
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[WeightsOptions],
) -> NumPyArray: ...


@overload
def weights(
    q: Array,
    k: Array,
    lse: Array,
    **options: Unpack[WeightsOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.weights", FORWARD)
def weights(
    q: Any,
    k: Any,
    lse: Any,
    *positional: NoReturn,
    queries: Any = None,
    keys: Any = None,
    heads: Any = None,
    dtype: Any = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    r"""The weights of some queries: rows of the softmax.

    Parameters
    ----------
    q, k : array
        As given to `forward`.
    lse : array, (batch, num_heads_q, seqlen_q)
        As `forward` returned it, with ``return_lse=True``.
    queries : slice or indices, (n,) or (batch, n), optional
        Which queries: integers as a sequence or an array; with an axis of
        batch, each batch element has its own. All by default. Negative ones
        count from the end. With packed sequences they are tokens of `q`.
    keys : slice or indices, (n,), optional
        Which keys: columns of the result. All by default.
    heads : slice or indices, (n,), optional
        Which query heads. All by default.
    dtype : dtype, optional
        Of the result: that of `lse`, which is the default, or that of `q`.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    precision : {None, "tf32x3"}, optional
        As for `forward`; preferably the value that `forward` was given.

    Returns
    -------
    weights : array, (batch, heads, queries, keys)
        exp(score - lse), numbers without a unit: 0 for a key that the query
        does not see. A row adds up to 1; to less with a `sink`, and to the
        share of these keys if `lse` covers more than these, as after
        `merge_states`. They are weights before `dropout`.

    Raises
    ------
    ShapeError, DTypeError, UnsupportedError
        In the same cases as `backward`; if `dtype` is another one, or what
        chooses is neither a slice nor integers.
    ValueRangeError
        If an index is out of range. On a CUDA device, the host does not read
        an array of indices: one that is out of range gives weights of 0, an
        error only with ``CUFLASH_CHECK=1``. Then a ValueRangeError too if
        `lse` is of another call: if the weights of a row would add up to more
        than 1.

    See Also
    --------
    weight_sums : the sum over queries.
    weights_backward : the gradients.

    Notes
    -----
    The result is as large as what is chosen: with all queries and keys it is
    the matrix that `forward` avoids. Each weight is recomputed from `lse`, as
    `backward` does it [1]_.

    References
    ----------
    .. [1] ``docs/guide/readouts.md``

    Examples
    --------
    Where the last query looks, in each head:

    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 16, 4, 8))
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> last = cuflash.weights(q, k, lse, queries=[-1], causal=True)
    >>> last.shape
    (2, 4, 1, 16)
    >>> bool(np.allclose(last.sum(axis=-1), 1))
    True
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, dtype=dtype,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse}
    choices = {"queries": queries, "keys": keys, "heads": heads}
    runner, call, _ = checked(
        "weights", given, choices, options, positional, asked
    )
    found = runner.readout(call)
    runner.finish()
    return found[(0,) * (4 - call.rank)]


@overload
def weight_sums(
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[WeightSumsOptions],
) -> NumPyArray: ...


@overload
def weight_sums(
    q: Array,
    k: Array,
    lse: Array,
    **options: Unpack[WeightSumsOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.weight_sums", FORWARD)
def weight_sums(
    q: Any,
    k: Any,
    lse: Any,
    *positional: NoReturn,
    queries: Any = None,
    row_weights: Any = None,
    reduce: str = "sum",
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    r"""How much weight each key gets from all queries, or from some.

    Parameters
    ----------
    q, k : array
        As given to `forward`.
    lse : array, (batch, num_heads_q, seqlen_q)
        As `forward` returned it, with ``return_lse=True``.
    queries : slice, indices or flags, optional
        Which queries count: a slice, integers (n,) or (batch, n), of which
        negative ones count from the end and repeated ones count once, or bool
        (seqlen_q,) or (batch, seqlen_q). All by default. With packed
        sequences they are tokens of `q`.
    row_weights : array, optional
        Broadcastable to the shape of `lse`, in its dtype: what each row of
        weights is multiplied by. 1 by default.
    reduce : {"sum", "max"}, optional
        Whether a key gets the sum over queries, or the largest.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    precision : {None, "tf32x3"}, optional
        As for `forward`; preferably the value that `forward` was given.

    Returns
    -------
    sums : array, (batch, num_heads_q, seqlen_k)
        :math:`\sum_i r_i P_{ij}` or :math:`\max_i r_i P_{ij}`, in the dtype
        of `lse`: r are the row weights and P the `weights`, before `dropout`.
        0 for a key that no such query sees. Bitwise reproducible.

    Raises
    ------
    ShapeError, DTypeError, UnsupportedError
        In the same cases as `backward`; if `row_weights` or `queries` does
        not match `lse`.
    ValueRangeError
        In the same cases as `weights`; if `reduce` is neither of the two. On
        a CUDA device an index out of range chooses nothing.

    See Also
    --------
    weights : each weight of some queries.
    weight_sums_backward : the gradients.

    Notes
    -----
    One pass over the tiles that `forward` visits, with memory linear in
    seqlen [1]_. Caches of keys and values that keep what got the most weight
    rank keys by these sums [2]_.

    References
    ----------
    .. [1] ``docs/guide/readouts.md``
    .. [2] Z. Zhang and others, "H2O: Heavy-Hitter Oracle for Efficient
       Generative Inference of Large Language Models", arXiv:2306.14048.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 16, 4, 8))
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> sums = cuflash.weight_sums(q, k, lse, causal=True)
    >>> sums.shape
    (2, 4, 16)
    >>> bool(np.allclose(sums.sum(axis=-1), 16))  # 16 rows of 1
    True
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, reduce=reduce,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse, "row_weights": row_weights}
    choices = {"queries": queries}
    runner, call, _ = checked(
        "weight_sums", given, choices, options, positional, asked
    )
    sums = runner.readout(call)
    runner.finish()
    return strip_lse(sums, call.rank)


@overload
def entropy(
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[ReadoutOptions],
) -> NumPyArray: ...


@overload
def entropy(
    q: Array,
    k: Array,
    lse: Array,
    **options: Unpack[ReadoutOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.entropy", FORWARD)
def entropy(
    q: Any,
    k: Any,
    lse: Any,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    r"""The entropy of each query's weights.

    Parameters
    ----------
    q, k : array
        As given to `forward`.
    lse : array, (batch, num_heads_q, seqlen_q)
        As `forward` returned it, with ``return_lse=True``.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    precision : {None, "tf32x3"}, optional
        As for `forward`; preferably the value that `forward` was given.

    Returns
    -------
    entropy : array, (batch, num_heads_q, seqlen_q)
        :math:`H_i = -\sum_j P_{ij} \log P_{ij}` over the visible keys, in
        nats (divide by log 2 for bits), in the dtype of `lse`; P are the
        `weights`, before `dropout`. From 0 where one key has all weight to
        the logarithm of the number of visible keys; 0 where there is none. A
        `sink` adds no term of its own.

    Raises
    ------
    CuflashError
        In the same cases as `backward`; with ``CUFLASH_CHECK=1`` a
        ValueRangeError if `lse` is of another call (see `weights`).

    See Also
    --------
    entropy_backward : the gradients.

    Notes
    -----
    :math:`H_i = \sum_j P_{ij} (lse_i - x_{ij})` with scores x needs no
    logarithm of a weight: one that underflows adds exactly 0 [1]_.

    References
    ----------
    .. [1] ``docs/guide/readouts.md``

    Examples
    --------
    Equal scores: the logarithm of the number of keys.

    >>> import numpy as np
    >>> import cuflash
    >>> q, k = np.zeros((2, 4, 8))
    >>> out, lse = cuflash.forward(q, k, k, return_lse=True)
    >>> np.exp(cuflash.entropy(q, k, lse)).round(6)
    array([4., 4., 4., 4.])
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse}
    runner, call, _ = checked("entropy", given, {}, options, positional, asked)
    found = runner.readout(call)
    runner.finish()
    return strip_lse(found, call.rank)


def checked(
    name: str,
    given: dict[str, Any],
    choices: dict[str, Any],
    options: Any,
    positional: tuple[Any, ...],
    asked: dict[str, Any],
) -> tuple[Any, Call, list[str]]:
    """The runner, the checked call, and the names in its `return_dmod`.

    Parameters
    ----------
    name : str
        Of the call.
    given, choices : dict
        Its arrays, and what it chooses, by argument name.
    options, positional
        As the user passed them.
    asked : dict
        What is no array.
    """
    numbers, of_options = split_options(f"cuflash.{name}", options, positional)
    given = {x: y for x, y in given.items() if y is not None}
    on_host, on_device = validate_chosen.split(choices)
    runner, arrays = open_arrays(name, {**given, **of_options, **on_device})
    chooses = {x: arrays[x] for x in on_device}
    checks = settings.read("CUFLASH_CHECK") == "1"
    if checks:
        validate_chosen.check(chooses, arrays)
    if not name.startswith("weight_sums"):
        chooses |= chosen.indices(on_host, arrays)
    elif choices["queries"] is not None:
        queries = chooses.get("queries", choices["queries"])
        chooses = {"chosen": chosen.flags(queries, arrays["q"])}
    call = validate.readout(
        name,
        {x: arrays[x] for x in given},
        chooses,
        numbers | {x: arrays[x] for x in of_options},
        **asked,
    )
    check_offsets(call)
    if checks:
        scalars = {x: asked[x] for x in ("scale", "causal", "precision")}
        lse_of_call.check(call, scalars, options)
    return (
        runner,
        call,
        traced.in_slots(numbers.get("return_dmod", ()), arrays),
    )
