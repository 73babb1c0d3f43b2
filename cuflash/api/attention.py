"""`forward` and `backward`: validate, then run where the arrays are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from cuflash.api import foreign_names
from cuflash.api.arrays import GRADIENTS, OUT, check_offsets, open_arrays
from cuflash.api.foreign_names import split_options
from cuflash.api.reads import look_at_functions
from cuflash.request import traced
from cuflash.request.options import BACKWARD, FORWARD
from cuflash.request.problem import strip, strip_lse
from cuflash.request.validate import attention as validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import (
        Array,
        BackwardOptions,
        ForwardOptions,
        NumPyArray,
    )


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[False] = False,
    return_max_score: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> NumPyArray: ...


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[True],
    return_max_score: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[False] = False,
    return_max_score: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[True],
    return_max_score: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_score: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> tuple[Any, Any]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    return_max_score: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Any, Any]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_score: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[ForwardOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.forward", FORWARD)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    out: Any = None,
    **options: Any,
) -> Any:
    """Exact attention, softmax(scale * Q K^T) V, without the score matrix.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        Queries: float16, bfloat16 (ml_dtypes), float32 or float64. A NumPy
        array, or an array on a CUDA device: CuPy's, or any other that
        supports DLPack or ``__cuda_array_interface__``. Any strides. The
        batch axis may be left out (3-D), or both batch and heads (2-D).
    k : array, (batch, seqlen_k, num_heads_kv, head_dim)
        Keys. `num_heads_q` is a multiple of `num_heads_kv`; query head h
        reads key head ``h // (num_heads_q // num_heads_kv)``.
    v : array, (batch, seqlen_k, num_heads_kv, head_dim_v)
        Values. `head_dim` is 1 to 576, `head_dim_v` 1 to 512.
    scale : float, optional
        Multiplies Q K^T; ``head_dim ** -0.5`` by default.
    causal : bool, optional
        Whether query i sees only the keys
        ``j <= i + seqlen_k - seqlen_q``: the last query sees every key.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
        They affect speed and rounding only. For NumPy arrays, pass sizes
        that a kernel supports on some GPU.
    precision : {None, "tf32x3"}, optional
        "tf32x3" runs float32 matmuls on the tensor cores, with each operand
        split into two parts of 11 bits. Errors stay those of float32, but an
        infinity is treated as NaN. float32 only. It has no effect on NumPy
        arrays, and on heads above 256 for which shared memory is too small.
    num_splits : int, optional
        Into how many parts, up to 128, the keys of a head are cut: few
        queries of many keys then occupy the whole GPU. By default as many as
        are fastest. With it given, a sequence has the same bits whatever
        stands beside it in the batch. More than 1 is not supported with
        packed sequences, `precision`, `block_q` and `block_k`. It has no
        effect on NumPy arrays.
    return_lse : bool, optional
        Whether to return `lse` too, which `backward` and `merge_states`
        need.
    return_max_score : bool, optional
        Whether to return `max_score` too, after `lse` if both are wanted.
    out : array, optional
        Receives the result. It has the shape and dtype given below, is on
        the device of the inputs and shares no memory with them.
    window : (left, right), optional
        Query i sees only the keys from ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``, both included; None means no
        bound. With `causal`, both conditions apply.
    softcap : float, optional
        Scaled scores s become ``softcap * tanh(s / softcap)``.
    alibi_slopes : array, (num_heads_q,) or (batch, num_heads_q), optional
        float32, or the dtype of `lse`. ``slope * abs(i + seqlen_k - seqlen_q
        - j)`` is subtracted from the score of query i and key j. With packed
        sequences (num_heads_q,) or (sequences, num_heads_q).
    bias : array, optional
        Added to the scores, after softcap and ALiBi. Has the dtype of `q` or
        of `lse`; broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k).
    mask : array of bool, optional
        True where a query sees a key. Broadcastable like `bias`.
    sink : array, (num_heads_q,), optional
        A logit per head, in the dtype of `lse`, that takes part in each
        row's softmax like the score of a key without a value.
    segment_ids_q, segment_ids_k : array, optional
        Integers, (batch, seqlen_q) and (batch, seqlen_k), or without batch.
        A query sees only keys with its own id. Ids and offsets may have any
        integer dtype; on a GPU only the last 32 bits of 64 count.
    dropout : float, optional
        The probability with which a weight is set to 0; the others are
        divided by ``1 - dropout``. `lse` does not include dropout.
    seed : int, optional
        Below 2**64; required with `dropout`. Whether a weight is kept
        depends only on the seed, the batch, the head, i and j.
    cu_seqlens_q, cu_seqlens_k : array, (sequences + 1,), optional
        Integers. Packed sequences: `q` (total_q, num_heads_q, head_dim), `k`
        and `v` hold the sequences end to end, and these arrays hold the
        offset of each sequence's first token, then the end of the last.
        Tokens after that end belong to no sequence. Offsets are invalid if
        they do not start at 0, decrease, exceed the number of tokens, or
        make a sequence longer than `max_seqlen_q` or `max_seqlen_k`. With
        NumPy arrays, invalid offsets raise a ValueRangeError. On a CUDA
        device the host does not read them: invalid offsets set all of out
        and all gradients to 0 and lse to -inf, without an error. Setting
        the environment variable ``CUFLASH_CHECK=1`` raises the error there
        too; each call then waits for the device.
    max_seqlen_q, max_seqlen_k : int, optional
        An upper bound on the sequence lengths; a longer sequence makes the
        offsets invalid. It determines the tile sizes, so pass it if one
        sequence is much longer than the mean.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx, *, ...)`` returns the score
        that takes the place of `score`, which is ``scale * q.k`` after
        softcap, ALiBi and bias. It is called once, with symbols, and becomes
        part of the kernels (``docs/guide/expressions.md``). Its keyword
        arguments are names of `mod_arrays`; `seqlen_q` and `seqlen_k` are
        known too. With packed sequences b is the sequence, and indices count
        within it.
    mask_mod : callable, optional
        ``mask_mod(b, h, q_idx, kv_idx, *, ...)`` returns whether the pair is
        visible; all other masks hold too. Tiles that it hides are skipped. A
        `TileMask` stands for its function and arrays.
    mod_arrays : dict, optional
        Arrays (bool, integers or floating-point numbers, up to 4 axes, any
        strides) and numbers that the two functions read, by name. An index
        from -n to -1 counts from the end; outside the array there is 0.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        In the dtype of `q`; a CuPy array for arrays on a CUDA device, a
        NumPy array for NumPy arrays; `out` itself if it was given. Axes that
        `q` leaves out are left out here.
    lse : array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`. log(sum(exp(scores))) over the visible keys,
        after scale and options, natural logarithm; float32 (float64 for
        float64 inputs).
    max_score : array, (batch, num_heads_q, seqlen_q)
        Only with `return_max_score`. max(scores) over the visible keys, as
        the softmax takes them: after scale and options, before dropout. A
        sink is no key. -inf for a query that sees no key; inf with a score
        of inf, else NaN with a score of NaN, as `lse`. In the dtype of
        `lse`. It has no gradient.

    Raises
    ------
    ShapeError
        If the ranks or sizes of the arrays do not match.
    DTypeError
        If an argument has the wrong type or dtype, or NumPy and CUDA arrays
        are mixed.
    ValueRangeError
        If `scale`, `block_q`, `block_k`, `precision`, `num_splits` or an
        option is out of range, an option lacks another that it requires,
        offsets that are checked are invalid, `out` is read-only or shares
        memory with an input, or the arrays are on several CUDA devices.
    UnsupportedError
        If head_dim is above 576 or head_dim_v above 512, or one is above 256
        and too large for the GPU's shared memory (only float64 below sm_80);
        if another size does not fit in 32 bits; if `precision` or
        `num_splits` does not support the dtype or the head dimensions; if a
        bias, a mask or segment ids are given with packed sequences; if an
        array is a masked array, requires grad or belongs to another library
        on the CPU; if the GPU is too old, or CuPy is not installed for CUDA
        arrays.
    CompileError
        If a kernel does not compile, or NVRTC is not installed.

    See Also
    --------
    backward : the gradients.
    merge_states : attention over the union of two sets of keys.
    tile_mask : which tiles a `mask_mod` leaves.

    Notes
    -----
    A query that sees no key has out 0 and lse -inf (with a sink, the sink).
    Only masks decide which keys are visible: a key with score -inf is visible
    and has weight 0. NaN or inf in an input spreads only to rows that see it.
    Results are bitwise reproducible from run to run.

    Scores are float32 (float64 for float64 inputs), also for NumPy arrays. A
    row with a score that overflows has out NaN and lse inf; a row whose
    scores all overflow to -inf has out 0 and lse -inf
    (``docs/guide/accuracy.md``).

    On a CUDA device the call is queued on CuPy's current stream and returns
    without waiting.

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention",
       arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2", arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 16, 4, 8), dtype=np.float32)
    >>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 16, 4, 8), (2, 4, 16))

    QK-clip (Kimi K2, arXiv:2507.20534): after an optimizer step, heads whose
    largest score exceeds a threshold get smaller projections of queries and
    keys, each by the root of what is too much.

    >>> out, top = cuflash.forward(q, k, v, return_max_score=True)
    >>> top = top.max(axis=(0, 2))  # of each head
    >>> factor = 2.0 / np.maximum(top, 2.0)  # with 2 as the threshold
    >>> q_clipped = q * np.sqrt(factor)[:, None]
    >>> k_clipped = k * np.sqrt(factor)[:, None]
    >>> _, top = cuflash.forward(
    ...     q_clipped, k_clipped, v, return_max_score=True
    ... )
    >>> bool(top.max() <= 2.0 + 1e-5)
    True
    """
    given = {"q": q, "k": k, "v": v}
    if out is not None:
        given["out"] = out
    asked: dict[str, Any] = {}
    if options or positional:
        asked, arrays = split_options("cuflash.forward", options, positional)
        given |= arrays
    runner, arrays = open_arrays("forward", given, OUT)
    call = validate.forward(
        **arrays,
        **asked,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        precision=precision,
        num_splits=num_splits,
        return_lse=return_lse,
        return_max_score=return_max_score,
    )
    if options:
        check_offsets(call)
        look_at_functions(call, options.get("mask_mod"), asked, arrays)
    result, lse, *others = runner.forward(call)
    runner.finish()
    rank = call.rank
    result = strip(result, rank) if out is None else out
    rows = (lse, *others) if return_lse else others
    if not rows:
        return result
    return result, *(strip_lse(x, rank) for x in rows)


@overload
def backward(
    dout: NumPyArray,
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    out: NumPyArray,
    lse: NumPyArray,
    **options: Unpack[BackwardOptions],
) -> tuple[NumPyArray, NumPyArray, NumPyArray]: ...


@overload
def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    **options: Unpack[BackwardOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dmod: tuple[str, ...] = (),
    **options: Unpack[BackwardOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.backward", BACKWARD)
def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    dlse: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    r"""The gradients of `forward` with respect to `q`, `k` and `v`.

    Parameters
    ----------
    dout : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        The gradient of the loss with respect to `out`, in the dtype of `q`.
    q, k, v : array
        As given to `forward`.
    out, lse : array
        As `forward` returned them, with ``return_lse=True``.
    scale, causal, **options
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether to sum `dq` in a fixed order, which makes it bitwise
        reproducible, and so that `dmod` is. `dk` and `dv` always are.
    precision : {None, "tf32x3"}, optional
        As for `forward`; preferably the value that `forward` was given.
    dlse : array, (batch, num_heads_q, seqlen_q), optional
        The gradient of the loss with respect to `lse`, in the dtype of
        `lse`; needed if the loss depends on `lse`, as after `merge_states`.
    dq, dk, dv : array, optional
        Each receives the gradient of that name. It has the shape and dtype
        given below, is on the device of the inputs and shares no memory with
        them or with another of the three. Any strides.
    return_dmod : tuple of str, optional
        The arrays of `mod_arrays` whose gradients are wanted.
    return_dbias, return_dsink : bool, optional
        Whether to return the gradients of `bias` and `sink` too. A GPU sums
        the gradient of a broadcast bias in no fixed order, so `return_dbias`
        with a broadcast bias and `deterministic` is an UnsupportedError, for
        NumPy arrays too.

    Returns
    -------
    dq, dk, dv : array
        With the shapes and the dtype of `q`, `k` and `v`; CuPy arrays for
        arrays on a CUDA device, NumPy arrays for NumPy arrays; the arrays
        `dq`, `dk` and `dv` themselves if they were given. `dk` and `dv` are
        summed over the query heads that share a key head.
    dbias : array
        Only with `return_dbias`, after `dv`. With the shape and dtype of
        `bias`: summed over its broadcast axes.
    dsink : array
        Only with `return_dsink`, next. With the shape and dtype of `sink`.
    dmod : dict of arrays
        Only with `return_dmod`, last: the gradient of each array by its name,
        with the array's shape and dtype.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward
    vjp : both, with the options given once.

    Notes
    -----
    P is recomputed tile by tile as exp(S - lse), and D = rowsum(dO * O)
    replaces rowsum(P * dP) [1]_. With `dlse`, D = rowsum(dO * O) - dlse,
    because d lse_i / d S_ij = P_ij: dS = P * (dP - D) in both cases. A query
    that sees no key contributes exactly 0 to every gradient. A query with
    lse inf (one of its scores overflowed) has dq NaN and makes dk and dv NaN
    for every key that it sees.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2", arXiv:2307.08691, Algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 16, 8))
    >>> out, lse = cuflash.forward(q, k, v, return_lse=True)
    >>> dout = np.ones_like(out)
    >>> dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse)
    >>> dq.shape, dk.shape, dv.shape
    ((16, 8), (16, 8), (16, 8))
    """
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if not (dlse is dq is dk is dv is None):
        optional = {"dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
        given |= {name: x for name, x in optional.items() if x is not None}
    asked: dict[str, Any] = {}
    if options or positional:
        asked, arrays = split_options("cuflash.backward", options, positional)
        given |= arrays
    runner, arrays = open_arrays("backward", given, GRADIENTS)
    call = validate.backward(
        **arrays,
        **asked,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        deterministic=deterministic,
        precision=precision,
    )
    wanted: list[str] = []
    if options:
        check_offsets(call)
        look_at_functions(call, options.get("mask_mod"), asked, arrays)
        wanted = traced.in_slots(asked.get("return_dmod", ()), arrays)
    new_dq, new_dk, new_dv, *others = runner.backward(call)
    runner.finish()
    rank = call.rank
    return (
        strip(new_dq, rank) if dq is None else dq,
        strip(new_dk, rank) if dk is None else dk,
        strip(new_dv, rank) if dv is None else dv,
        *by_name(wanted, others),
    )


def by_name(wanted: list[str], others: list[Any]) -> tuple[Any, ...]:
    """Gradients, the last of which, of `mod_arrays`, become one dict."""
    if not wanted:
        return tuple(others)
    count = len(wanted)
    of_arrays = dict(zip(wanted, others[-count:], strict=True))
    return *others[:-count], of_arrays
