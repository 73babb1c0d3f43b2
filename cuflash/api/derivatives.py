"""The public functions `jvp` and `double_backward`: validate, then run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from cuflash.api import foreign_names
from cuflash.api.arrays import check_offsets, open_arrays
from cuflash.api.foreign_names import split_options
from cuflash.api.reads import look_at_functions
from cuflash.request.mod_tangents import parted_tangents
from cuflash.request.options import FORWARD
from cuflash.request.problem import strip, strip_lse
from cuflash.request.traced import in_slots
from cuflash.request.validate import derivatives as validate_derivatives

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import TracedOptions

__all__ = ["double_backward", "jvp"]


@foreign_names.our_names("cuflash.jvp", FORWARD)
def jvp(
    q: Any,
    k: Any,
    v: Any,
    q_dot: Any,
    k_dot: Any,
    v_dot: Any,
    *positional: NoReturn,
    bias_dot: Any = None,
    sink_dot: Any = None,
    mod_dots: Mapping[str, Any] | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    **options: Unpack[TracedOptions],
) -> tuple[Any, ...]:
    r"""`forward`, and its derivative along a direction.

    The Jacobian-vector product of `forward`: how out and lse change if q
    changes with the velocity `q_dot`, k with `k_dot`, and so on.

    Parameters
    ----------
    q, k, v : array
        As for `forward`.
    q_dot, k_dot, v_dot : array or None
        The tangents of `q`, `k` and `v`, with their shape and dtype. None is
        a tangent of 0 and costs nothing. Several directions at once: each
        tangent that is given has an additional first axis of one length, the
        number of directions. One call is then cheaper than one for each.
    bias_dot, sink_dot : array, optional
        The tangents of `bias` and `sink`, with their shape and dtype, after
        the same axis of directions.
    mod_dots : dict of arrays, optional
        The tangents of arrays of `mod_arrays` that `score_mod` reads, by
        name, with their shape and dtype, after the same axis of directions.
    scale, causal, **options
        As for `forward`. Slopes and scale do not move.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    precision : {None, "tf32x3"}, optional
        As for `forward`.
    return_lse : bool, optional
        Whether to return `lse` and `lse_dot` too.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        As `forward` returns it.
    lse : array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`. As `forward` returns it.
    out_dot : array
        The tangent of `out`, with its shape and dtype, after the axis of
        directions if the tangents have one.
    lse_dot : array
        Only with `return_lse`. The tangent of `lse`, likewise.

    Raises
    ------
    CuflashError
        In the same cases as `forward`; a ShapeError or DTypeError if a
        tangent does not match what it moves, and a ValueRangeError if there
        is one of a bias or sink that is not given.

    See Also
    --------
    double_backward : the gradient of `backward`.

    Notes
    -----
    With W the velocity of the scores, b = rowsum(P * W) is that of lse and
    (P * W) V + P V' - b out that of out: sums over keys, which one pass
    computes beside out and lse, with memory linear in seqlen [1]_. A query
    that sees no key has tangents of exactly 0. NaN or inf in a tangent
    spreads only to rows that see it.

    References
    ----------
    .. [1] ``docs/guide/derivatives.md``

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, q_dot = rng.standard_normal((4, 2, 16, 4, 8))
    >>> out, out_dot = cuflash.jvp(q, k, v, q_dot, None, None, causal=True)
    >>> h = 1e-6
    >>> ahead = cuflash.forward(q + h * q_dot, k, v, causal=True)
    >>> behind = cuflash.forward(q - h * q_dot, k, v, causal=True)
    >>> np.allclose(out_dot, (ahead - behind) / (2 * h))
    True
    """
    asked, of_options = split_options("cuflash.jvp", options, positional)
    tangents = {
        "q_dot": q_dot, "k_dot": k_dot, "v_dot": v_dot, "bias_dot": bias_dot,
        "sink_dot": sink_dot,
    }  # fmt: skip
    tangents |= parted_tangents(mod_dots, "mod_dots")
    given = {"q": q, "k": k, "v": v, **_there(tangents), **of_options}
    runner, arrays = open_arrays("jvp", given)
    call = validate_derivatives.jvp(
        **arrays,
        **asked,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        precision=precision,
        return_lse=return_lse,
    )
    check_offsets(call)
    look_at_functions(call, options.get("mask_mod"), asked, arrays)
    out, lse, out_dot, lse_dot = runner.jvp(call)
    runner.finish()
    out, out_dot = strip(out, call.rank), strip_each(out_dot, call)
    if not return_lse:
        return out, out_dot
    of_lse = strip_each(lse_dot, call, lse=True)
    return out, strip_lse(lse, call.rank), out_dot, of_lse


@foreign_names.our_names("cuflash.double_backward", FORWARD)
def double_backward(
    ddq: Any,
    ddk: Any,
    ddv: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *positional: NoReturn,
    ddbias: Any = None,
    ddsink: Any = None,
    ddmods: Mapping[str, Any] | None = None,
    dlse: Any = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    return_d2bias: bool = False,
    return_d2sink: bool = False,
    return_d2mod: tuple[str, ...] = (),
    return_ddlse: bool = False,
    **options: Unpack[TracedOptions],
) -> tuple[Any, ...]:
    r"""The gradients of `backward` with respect to its inputs.

    For a loss that depends on gradients: forces that are trained, gradient
    penalties, meta-learning.

    Parameters
    ----------
    ddq, ddk, ddv : array or None
        The gradients of the loss with respect to `backward`'s `dq`, `dk` and
        `dv`, with their shape and dtype, those of `q`, `k` and `v`. None is
        0 and costs nothing.
    dout, q, k, v, out, lse : array
        As given to `backward`.
    ddbias, ddsink : array, optional
        The gradients of the loss with respect to `dbias` and `dsink`, with
        the shape and dtype of `bias` and `sink`.
    ddmods : dict of arrays, optional
        The gradients of the loss with respect to `backward`'s `dmod`, by the
        names of arrays of `mod_arrays`, with their shape and dtype.
    dlse : array, optional
        As given to `backward`.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether to sum `d2q` in a fixed order, as `backward` sums `dq`.
    precision : {None, "tf32x3"}, optional
        As for `forward`.
    return_d2bias, return_d2sink : bool, optional
        Whether to return the gradients with respect to `bias` and `sink`
        too. As `backward`'s `return_dbias`, `return_d2bias` with a broadcast
        bias and `deterministic` is an UnsupportedError.
    return_d2mod : tuple of str, optional
        The arrays of `mod_arrays` with respect to which gradients are wanted.
    return_ddlse : bool, optional
        Whether to return the gradient with respect to `dlse` too, which may
        be None, that is 0.

    Returns
    -------
    d2q, d2k, d2v : array
        The gradients with respect to `q`, `k` and `v`, with their shapes and
        dtype. They include what reaches the loss by way of `out` and `lse`.
    ddout : array
        The gradient with respect to `dout`, with its shape and dtype.
    d2bias, d2sink : array
        Only with `return_d2bias` and `return_d2sink`. With the shape and
        dtype of `bias` and `sink`.
    d2mod : dict of arrays
        Only with `return_d2mod`, next: by name, with their arrays' shape and
        dtype.
    ddlse : array
        Only with `return_ddlse`, last. With the shape and dtype of `lse`.

    Raises
    ------
    CuflashError
        In the same cases as `backward`; a ShapeError or DTypeError if a
        cotangent does not match its input, and a ValueRangeError if a bias
        or sink is not given that another argument needs.

    See Also
    --------
    jvp : the derivative of `forward` along a direction.

    Notes
    -----
    `ddout` and `ddlse` are the tangents of out and lse in the direction
    (`ddq`, `ddk`, `ddv`). With these and one number more a row, a pass
    shaped like `backward` computes the other gradients, with memory linear
    in seqlen [1]_. A query that sees no key contributes exactly 0 to each.

    References
    ----------
    .. [1] ``docs/guide/derivatives.md``

    Examples
    --------
    The gradient of a penalty, half the squared length of dq:

    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 16, 8))
    >>> out, lse = cuflash.forward(q, k, v, return_lse=True)
    >>> dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse)
    >>> d2q, d2k, d2v, ddout = cuflash.double_backward(
    ...     dq, None, None, dout, q, k, v, out, lse
    ... )
    >>> d2q.shape, d2k.shape, d2v.shape, ddout.shape
    ((16, 8), (16, 8), (16, 8), (16, 8))
    """
    asked, of_options = split_options(
        "cuflash.double_backward", options, positional
    )
    cotangents = {
        "ddq": ddq, "ddk": ddk, "ddv": ddv, "ddbias": ddbias,
        "ddsink": ddsink, "dlse": dlse, **parted_tangents(ddmods, "ddmods"),
    }  # fmt: skip
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    given |= {**_there(cotangents), **of_options}
    runner, arrays = open_arrays("double_backward", given)
    call = validate_derivatives.double_backward(
        **arrays,
        **asked,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        deterministic=deterministic,
        precision=precision,
        return_d2bias=return_d2bias,
        return_d2sink=return_d2sink,
        return_d2mod=return_d2mod,
        return_ddlse=return_ddlse,
    )
    check_offsets(call)
    look_at_functions(call, options.get("mask_mod"), asked, arrays)
    results = runner.double_backward(call)
    runner.finish()
    stripped = [strip(x, call.rank) for x in results[:4]]
    others = list(results[4:])
    if return_ddlse:
        others[-1] = strip_lse(others[-1], call.rank)
    names = in_slots(return_d2mod, arrays)
    first = len(others) - return_ddlse - len(names)
    if names:
        own = slice(first, first + len(names))
        others[own] = [dict(zip(names, others[own], strict=True))]
    return *stripped, *others


def _there(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if x is not None}


def strip_each(array: Any, call: Any, lse: bool = False) -> Any:
    """Drop axes that the user left out, and that of one direction."""
    if not call.signature.several:
        return (strip_lse if lse else strip)(array[0], call.rank)
    rank = call.rank
    if rank == 4:
        return array
    if rank == 3:
        return array[:, 0]
    return array[:, 0, 0] if lse else array[:, 0, :, 0]
