"""The gradients of `weights`, `weight_sums` and `entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from cuflash.api import foreign_names
from cuflash.api.attention import by_name
from cuflash.api.readout import checked
from cuflash.request.options import READOUT_BACKWARD
from cuflash.request.problem import Call, strip, strip_lse

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import (
        Array,
        EntropyGradientOptions,
        NumPyArray,
        WeightsGradientOptions,
        WeightSumsGradientOptions,
    )

__all__ = ["entropy_backward", "weight_sums_backward", "weights_backward"]


@overload
def weights_backward(
    dweights: NumPyArray,
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[WeightsGradientOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def weights_backward(
    dweights: Array,
    q: Array,
    k: Array,
    lse: Array,
    **options: Unpack[WeightsGradientOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def weights_backward(
    dweights: Array,
    q: Array,
    k: Array,
    lse: Array,
    *,
    return_dmod: tuple[str, ...],
    **options: Unpack[WeightsGradientOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.weights_backward", READOUT_BACKWARD)
def weights_backward(
    dweights: Any,
    q: Any,
    k: Any,
    lse: Any,
    *positional: NoReturn,
    queries: Any = None,
    keys: Any = None,
    heads: Any = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    r"""The gradients of `weights` with respect to `q`, `k` and `lse`.

    Parameters
    ----------
    dweights : array, (batch, heads, queries, keys)
        The gradient of the loss with respect to the result of `weights`, in
        the dtype of `lse` or of `q`. Where a key is masked it has no effect.
    q, k, lse, queries, keys, heads
        As given to `weights`.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether `dmod` is bitwise reproducible, as of `backward`. `dq` and `dk`
        always are.
    precision : {None, "tf32x3"}, optional
        As for `forward`.
    return_dmod : tuple of str, optional
        The arrays of `mod_arrays` whose gradients are wanted.

    Returns
    -------
    dq, dk : array
        With the shapes and the dtype of `q` and `k`; 0 for queries, and heads
        of `k`, that were not chosen.
    dlse : array, (batch, num_heads_q, seqlen_q)
        The gradient with respect to `lse`, an input of its own here: pass it
        as `dlse` to `backward` to reach `q`, `k`, and a bias or sink.
    dmod : dict of arrays
        Only with `return_dmod`, last: the gradient of each array by its name,
        where `lse` does not move; `backward` adds what comes by `dlse`.

    Raises
    ------
    CuflashError
        In the same cases as `weights`; a ShapeError or DTypeError if
        `dweights` does not match.

    See Also
    --------
    weights

    Notes
    -----
    With dX = P * dW: dq = scale dX' K, dk = scale dX'^T Q, and dlse =
    -rowsum(dX), where dX' is dX times the slope of a softcap or score_mod
    [1]_, and those of arrays a of `mod_arrays` are sums of dX dx/da. The
    gradient with respect to a bias is not computed.

    References
    ----------
    .. [1] ``docs/guide/readouts.md``

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> out, lse = cuflash.forward(q, k, v, return_lse=True)
    >>> dweights = rng.standard_normal((2, 16))
    >>> dq, dk, dlse = cuflash.weights_backward(
    ...     dweights, q, k, lse, queries=[3, 5]
    ... )
    >>> dq.shape, dk.shape, dlse.shape
    ((16, 8), (16, 8), (16,))
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse, "dweights": dweights}
    choices = {"queries": queries, "keys": keys, "heads": heads}
    runner, call, names = checked(
        "weights_backward", given, choices, options, positional, asked
    )
    return _stripped(runner, call, names)


@overload
def weight_sums_backward(
    dsums: NumPyArray,
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    *,
    return_drow_weights: Literal[False] = False,
    **options: Unpack[WeightSumsGradientOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def weight_sums_backward(
    dsums: NumPyArray,
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    *,
    return_drow_weights: Literal[True],
    **options: Unpack[WeightSumsGradientOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def weight_sums_backward(
    dsums: Array,
    q: Array,
    k: Array,
    lse: Array,
    *,
    return_drow_weights: bool = False,
    return_dmod: tuple[str, ...] = (),
    **options: Unpack[WeightSumsGradientOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.weight_sums_backward", READOUT_BACKWARD)
def weight_sums_backward(
    dsums: Any,
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
    deterministic: bool = False,
    precision: str | None = None,
    return_drow_weights: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    r"""The gradients of `weight_sums` with respect to `q`, `k` and `lse`.

    Parameters
    ----------
    dsums : array, (batch, num_heads_q, seqlen_k)
        The gradient of the loss with respect to the result of `weight_sums`,
        in the dtype of `lse`.
    q, k, lse, queries, row_weights, reduce
        As given to `weight_sums`.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether `dmod` is bitwise reproducible, as of `backward`. `dq` and `dk`
        always are.
    precision : {None, "tf32x3"}, optional
        As for `forward`.
    return_drow_weights : bool, optional
        Whether to return the gradient of `row_weights` too.
    return_dmod : tuple of str, optional
        The arrays of `mod_arrays` whose gradients are wanted.

    Returns
    -------
    dq, dk : array
        With the shapes and the dtype of `q` and `k`.
    dlse : array, (batch, num_heads_q, seqlen_q)
        The gradient with respect to `lse`, an input of its own here: pass it
        as `dlse` to `backward` to reach `q`, `k`, and a bias or sink.
    drow_weights : array
        Only with `return_drow_weights`. With the shape and dtype of
        `row_weights`: summed over its broadcast axes.
    dmod : dict of arrays
        Only with `return_dmod`, last: the gradient of each array by its name,
        where `lse` does not move; `backward` adds what comes by `dlse`.

    Raises
    ------
    CuflashError
        In the same cases as `weight_sums`; a ShapeError or DTypeError if
        `dsums` does not match, a ValueRangeError if there are no
        `row_weights` whose gradient is wanted.

    See Also
    --------
    weight_sums

    Notes
    -----
    With dX_ij = P_ij r_i dsums_j the gradients are those of
    `weights_backward`. With ``reduce="max"`` the gradient of a key reaches
    the query alone that has its largest weight: the first of equal ones.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> out, lse = cuflash.forward(q, k, v, return_lse=True)
    >>> dsums = rng.standard_normal(16)
    >>> dq, dk, dlse = cuflash.weight_sums_backward(dsums, q, k, lse)
    >>> dq.shape, dk.shape, dlse.shape
    ((16, 8), (16, 8), (16,))
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic, reduce=reduce,
        return_drow_weights=return_drow_weights,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse, "dsums": dsums}
    given["row_weights"] = row_weights
    choices = {"queries": queries}
    runner, call, names = checked(
        "weight_sums_backward", given, choices, options, positional, asked
    )
    return _stripped(runner, call, names)


@overload
def entropy_backward(
    dentropy: NumPyArray,
    q: NumPyArray,
    k: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[EntropyGradientOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def entropy_backward(
    dentropy: Array,
    q: Array,
    k: Array,
    lse: Array,
    **options: Unpack[EntropyGradientOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def entropy_backward(
    dentropy: Array,
    q: Array,
    k: Array,
    lse: Array,
    *,
    return_dmod: tuple[str, ...],
    **options: Unpack[EntropyGradientOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.entropy_backward", READOUT_BACKWARD)
def entropy_backward(
    dentropy: Any,
    q: Any,
    k: Any,
    lse: Any,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    r"""The gradients of `entropy` with respect to `q`, `k` and `lse`.

    Parameters
    ----------
    dentropy : array, (batch, num_heads_q, seqlen_q)
        The gradient of the loss with respect to the result of `entropy`, in
        the dtype of `lse`.
    q, k, lse
        As given to `entropy`.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether `dmod` is bitwise reproducible, as of `backward`. `dq` and `dk`
        always are.
    precision : {None, "tf32x3"}, optional
        As for `forward`.
    return_dmod : tuple of str, optional
        The arrays of `mod_arrays` whose gradients are wanted.

    Returns
    -------
    dq, dk : array
        With the shapes and the dtype of `q` and `k`.
    dlse : array, (batch, num_heads_q, seqlen_q)
        The gradient with respect to `lse`, an input of its own here: pass it
        as `dlse` to `backward` to reach `q`, `k`, and a bias or sink.
    dmod : dict of arrays
        Only with `return_dmod`, last: the gradient of each array by its name,
        where `lse` does not move; `backward` adds what comes by `dlse`.

    Raises
    ------
    CuflashError
        In the same cases as `entropy`; a ShapeError or DTypeError if
        `dentropy` does not match.

    See Also
    --------
    entropy

    Notes
    -----
    With dX_ij = P_ij (lse_i - x_ij - 1) dentropy_i the gradients are those of
    `weights_backward`. What the loss is through `lse` comes back as `dlse`,
    and where `lse` is that of the same scores, ``backward`` adds it.

    Examples
    --------
    A loss of entropies alone: `backward` with dout 0 adds what `dlse` holds.

    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> out, lse = cuflash.forward(q, k, v, return_lse=True)
    >>> dq, dk, dlse = cuflash.entropy_backward(np.ones(16), q, k, lse)
    >>> more_dq, more_dk, _ = cuflash.backward(
    ...     np.zeros_like(out), q, k, v, out, lse, dlse=dlse
    ... )
    >>> dq, dk = dq + more_dq, dk + more_dk
    >>> dq.shape, dk.shape
    ((16, 8), (16, 8))
    """
    asked = dict(
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip
    given = {"q": q, "k": k, "lse": lse, "dentropy": dentropy}
    runner, call, names = checked(
        "entropy_backward", given, {}, options, positional, asked
    )
    return _stripped(runner, call, names)


def _stripped(runner: Any, call: Call, names: list[str]) -> tuple[Any, ...]:
    """Gradients, without the axes that q lacks; of arrays by their names."""
    dq, dk, dlse, *others = runner.readout_backward(call)
    runner.finish()
    rank = call.rank
    return (
        *(strip(dq, rank), strip(dk, rank), strip_lse(dlse, rank)),
        *by_name(names, others),
    )
