"""The public functions: validate, then run where the arrays are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from . import (
    folders,
    foreign_names,
    options,
    settings,
    validate,
    validate_kvcache,
)
from .backends import emulator
from .errors import CuflashError, DTypeError, UnsupportedError
from .problem import MOST_STATES, strip, strip_lse

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .array_types import (
        Array,
        BackwardOptions,
        ForwardOptions,
        KVCacheOptions,
        NumPyArray,
        RotaryOptions,
    )
    from .backends.base import Runner

__all__ = [
    "apply_rotary",
    "backward",
    "forward",
    "forward_kvcache",
    "merge_states",
]


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> NumPyArray: ...


@overload
def forward(
    q: NumPyArray,
    k: NumPyArray,
    v: NumPyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Any, Any]: ...


@overload
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[ForwardOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.forward")
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
    out: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    segment_ids_q: Any = None,
    segment_ids_k: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **unknown: NoReturn,
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
        Values. `head_dim` and `head_dim_v` are 1 to 512.
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
        infinity is treated as NaN. float32 only, and head dimensions up to
        256. It has no effect on NumPy arrays.
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
        If head_dim or head_dim_v is above 512, or above 256 and too large
        for the GPU's shared memory (only float64 below sm_80); if another
        size does not fit in 32 bits; if `precision` or `num_splits` does not
        support the dtype or the head dimensions; if a bias, a mask or segment
        ids are given with packed sequences; if an array is a masked array,
        requires grad or belongs to another library on the CPU; if the GPU is
        too old, or CuPy is not installed for CUDA arrays.
    CompileError
        If a kernel does not compile, or NVRTC is not installed.

    See Also
    --------
    backward : the gradients.
    merge_states : attention over the union of two sets of keys.

    Notes
    -----
    A query that sees no key has out 0 and lse -inf. Only masks decide which
    keys are visible: a key with score -inf is visible and has weight 0. NaN
    or inf in an input spreads only to rows that see it. Results are bitwise
    reproducible from run to run.

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
    """
    if unknown or positional:
        raise foreign_names.unexpected("cuflash.forward", unknown, positional)
    given = {"q": q, "k": k, "v": v}
    if out is not None:
        given["out"] = out
    # Fast path: no options given.
    no_options = (
        window is softcap is alibi_slopes is bias is mask is sink
        is segment_ids_q is segment_ids_k is seed is cu_seqlens_q
        is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None
        and type(dropout) is float and not dropout
    )  # fmt: skip
    asked: dict[str, Any] = {}
    if not no_options:
        asked, given = option_arguments(
            {
                "window": window,
                "softcap": softcap,
                "alibi_slopes": alibi_slopes,
                "bias": bias,
                "mask": mask,
                "sink": sink,
                "segment_ids_q": segment_ids_q,
                "segment_ids_k": segment_ids_k,
                "dropout": dropout,
                "seed": seed,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_k": max_seqlen_k,
            },
            given,
        )
    runner, arrays = open_arrays("forward", given, _OUT)
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
    )
    check_offsets(call)
    result, lse = runner.forward(call)
    runner.finish()
    result = strip(result, call.rank) if out is None else out
    return (result, strip_lse(lse, call.rank)) if return_lse else result


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
    **options: Unpack[BackwardOptions],
) -> tuple[Any, ...]: ...


@foreign_names.our_names("cuflash.backward")
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
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    segment_ids_q: Any = None,
    segment_ids_k: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    **unknown: NoReturn,
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
    scale, causal, window, softcap, alibi_slopes, bias, mask, sink
    segment_ids_q, segment_ids_k, dropout, seed
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to `forward`.
    block_q, block_k : int, optional
        Tile sizes: queries and keys per tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether to sum `dq` in a fixed order, which makes it bitwise
        reproducible. `dk` and `dv` always are.
    precision : {None, "tf32x3"}, optional
        As for `forward`; preferably the value that `forward` was given.
    dlse : array, (batch, num_heads_q, seqlen_q), optional
        The gradient of the loss with respect to `lse`, in the dtype of
        `lse`; needed if the loss depends on `lse`, as after `merge_states`.
    dq, dk, dv : array, optional
        Each receives the gradient of that name. It has the shape and dtype
        given below, is on the device of the inputs and shares no memory with
        them or with another of the three. Any strides.
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
        Only with `return_dsink`, last. With the shape and dtype of `sink`.

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
    if unknown or positional:
        raise foreign_names.unexpected("cuflash.backward", unknown, positional)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    optional = {"dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
    given |= {name: x for name, x in optional.items() if x is not None}
    # Fast path: no options given.
    no_options = (
        window is softcap is alibi_slopes is bias is mask is sink
        is segment_ids_q is segment_ids_k is seed is cu_seqlens_q
        is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None
        and type(dropout) is float and not dropout
        and return_dbias is return_dsink is False
    )  # fmt: skip
    asked: dict[str, Any] = {}
    if not no_options:
        asked, given = option_arguments(
            {
                "window": window,
                "softcap": softcap,
                "alibi_slopes": alibi_slopes,
                "bias": bias,
                "mask": mask,
                "sink": sink,
                "segment_ids_q": segment_ids_q,
                "segment_ids_k": segment_ids_k,
                "dropout": dropout,
                "seed": seed,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_k": max_seqlen_k,
                "return_dbias": return_dbias,
                "return_dsink": return_dsink,
            },
            given,
        )
    runner, arrays = open_arrays("backward", given, _GRADIENTS)
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
    check_offsets(call)
    new_dq, new_dk, new_dv, *others = runner.backward(call)
    runner.finish()
    return (
        strip(new_dq, call.rank) if dq is None else dq,
        strip(new_dk, call.rank) if dk is None else dk,
        strip(new_dv, call.rank) if dv is None else dv,
        *others,
    )


@overload
def forward_kvcache(
    q: NumPyArray,
    k_cache: NumPyArray,
    v_cache: NumPyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[KVCacheOptions],
) -> NumPyArray: ...


@overload
def forward_kvcache(
    q: NumPyArray,
    k_cache: NumPyArray,
    v_cache: NumPyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[KVCacheOptions],
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def forward_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[KVCacheOptions],
) -> tuple[Any, Any]: ...


@overload
def forward_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[KVCacheOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.forward_kvcache")
def forward_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *positional: NoReturn,
    k_new: Any = None,
    v_new: Any = None,
    cache_seqlens: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    num_splits: int | None = None,
    out: Any = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Any:
    """Attention over a cache of keys and values: decoding, chunked prefill.

    New tokens, if any, are appended to the caches in place. Then each query
    attends to the ``n = cache_seqlens + seqlen_new`` tokens that its sequence
    has after that.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        Queries: float16, bfloat16 (ml_dtypes), float32 or float64. Arrays as
        in `forward`, and as there the batch axis may be left out, of `q`, the
        caches, `k_new`, `v_new`, `page_table` and `out`, or batch and heads.
        With `cu_seqlens_q`, (total_q, num_heads_q, head_dim): the queries of
        all sequences, end to end.
    k_cache : array, (batch, capacity, num_heads_kv, head_dim)
        Token t of sequence b is in row t of slot b. With `cache_batch_idx`
        there may be any number of slots. With `page_table`, (num_pages,
        page_size, num_heads_kv, head_dim): row ``t % page_size`` of page
        ``page_table[b, t // page_size]``; the capacity is then page_size *
        max_pages. In the dtype of `q`, or float8_e4m3fn (ml_dtypes), or its
        bytes as uint8, for arrays of a library without float8, such as CuPy.
    v_cache : array, (batch, capacity, num_heads_kv, head_dim_v)
        Like `k_cache`. `num_heads_q` is a multiple of `num_heads_kv`.
    k_new, v_new : array, (batch, seqlen_new, num_heads_kv, head_dim), optional
        Keys and values of new tokens, in the dtype of `q`; `v_new` with
        head_dim_v. They are written to the caches at `cache_seqlens`, which
        they require. With `cu_seqlens_q` they may be packed alike,
        (total_q, num_heads_kv, head_dim). Tokens of different sequences must
        not be written to the same row.
    cache_seqlens : int or array, (batch,), optional
        Integers: the tokens of each sequence before the call; the capacity by
        default. An array is not changed.
    page_table : array, (batch, max_pages), optional
        Integers: the pages of each sequence, in order. Pages may have any
        size, and are fast from 16 tokens on. Entries beyond a sequence's last
        token are ignored.
    cache_batch_idx : array, (batch,), optional
        Integers: the slot of each sequence; b for sequence b by default. Not
        with `page_table`.
    cache_leftpad : array, (batch,), optional
        Integers: how many tokens at the start of each slot belong to no
        sequence and are not visible. Not with `page_table`.
    cu_seqlens_q : array, (batch + 1,), optional
        Integers: the offset of each sequence's first query in a packed `q`,
        then the end of the last.
    max_seqlen_q : int, optional
        An upper bound on the queries of a sequence, with `cu_seqlens_q`;
        total_q by default. A longer sequence makes the offsets invalid.
    rotary_cos, rotary_sin : array, (num_positions, rotary_dim / 2), optional
        As `cos` and `sin` of `apply_rotary`: rotate `q` and `k_new`, which
        they require. New keys are rotated by their positions in the sequence.
        Queries are too, from `cache_seqlens` on, if `causal` or `window` is
        given; otherwise all of them by position `cache_seqlens`, as
        flash-attn does.
    rotary_interleaved : bool, optional
        As `interleaved` of `apply_rotary`.
    k_scale, v_scale : array, (num_heads_kv,) or (num_pages, num_heads_kv)
        float32, required with float8 caches and only with them: a value is
        stored * scale. The second shape is for a `page_table`. New values are
        divided by their scale; what exceeds float8's largest number, 448,
        becomes 448 with its sign.
    scale, causal, window, softcap
        As in `forward`, with seqlen_k = n: masks are aligned at the end, so
        the last query is at the position of the last token.
    alibi_slopes : array, (num_heads_q,) or (batch, num_heads_q), optional
        As in `forward`, with seqlen_k = n.
    sink : array, (num_heads_q,), optional
        In the dtype of lse; as in `forward`.
    num_splits : int, optional
        As in `forward`: into how many parts the keys of a head are cut.
    out : array, optional
        Receives the result. It shares no memory with the other arrays.
    return_lse : bool, optional
        Whether to return `lse` too.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        In the dtype of `q`; (total_q, num_heads_q, head_dim_v) for a packed
        `q`. As in `forward`.
    lse : array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`; (num_heads_q, total_q) for a packed `q`.
        float32 (float64 for float64 `q`).

    Raises
    ------
    ShapeError
        If the ranks or sizes of the arrays do not match, or seqlen_new
        exceeds the capacity.
    DTypeError
        If an argument has the wrong type or dtype, or NumPy and CUDA arrays
        are mixed.
    ValueRangeError
        If an argument lacks another that it requires; if a number is out of
        range; if lengths, offsets, pages or slots that are checked are
        invalid (see Notes); if a cache that is written, or `out`, is
        read-only or shares memory with another array.
    UnsupportedError
        If `cache_batch_idx` or `cache_leftpad` is given with `page_table`;
        otherwise as in `forward`.
    CompileError
        As in `forward`.

    See Also
    --------
    forward : attention without a cache.
    apply_rotary : rotary position embedding.

    Notes
    -----
    The caches are written only where new tokens are appended. A sequence
    with n = 0 has out 0 and lse -inf (with a sink, the sink), and so has a
    query of no sequence. Rotary positions and n count from the start of the
    cache, also with `cache_leftpad`; a query that sees no token has out 0.

    Lengths are invalid if they are negative or n exceeds the capacity; pages
    and slots if they are outside the caches, for a token that exists;
    `cache_leftpad` if it is negative; offsets as in `forward`; positions if
    `rotary_cos` has no row for them. With NumPy arrays all of these raise a
    ValueRangeError, and nothing is written. On a CUDA device the host reads
    none of these arrays: nothing outside the caches is read or written, and
    the results of a sequence with an invalid entry are unspecified; those of
    all sequences, if offsets are invalid. Setting the environment variable
    ``CUFLASH_CHECK=1`` raises the error there too; each call then waits for
    the device. A `cache_seqlens` that is an int is always checked.

    Flash-Decoding [1]_ cuts the keys of few queries into parts that run at
    the same time. Paged caches are those of [2]_.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for
       long-context inference", 2023.
    .. [2] W. Kwon et al., "Efficient Memory Management for Large Language
       Model Serving with PagedAttention", arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 16, 4, 8))
    >>> k_cache, v_cache = np.zeros((2, 1, 32, 4, 8))
    >>> for i in range(16):
    ...     new = np.s_[:, i : i + 1]
    ...     out = cuflash.forward_kvcache(
    ...         q[new], k_cache, v_cache, k_new=k[new], v_new=v[new],
    ...         cache_seqlens=i,
    ...     )
    >>> np.allclose(out, cuflash.forward(q, k, v, causal=True)[:, -1:])
    True
    """
    if unknown or positional:
        raise foreign_names.unexpected(
            "cuflash.forward_kvcache", unknown, positional
        )
    given = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_new": k_new,
        "v_new": v_new,
        "cache_seqlens": cache_seqlens,
        "page_table": page_table,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "cu_seqlens_q": cu_seqlens_q,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
        "out": out,
    }
    cache_seqlens = validate_kvcache.length_or_array(cache_seqlens)
    if validate_kvcache.is_int(cache_seqlens):
        given["cache_seqlens"] = None
    given = {name: x for name, x in given.items() if x is not None}
    writes = k_new is not None or v_new is not None
    written = _CACHES if writes else _OUT
    runner, arrays = open_arrays("forward_kvcache", given, written)
    rank = arrays["q"].ndim
    arrays = validate_kvcache.with_batch(arrays)
    if "cache_seqlens" not in given:
        arrays["cache_seqlens"] = cache_seqlens
    call = validate_kvcache.forward_kvcache(
        **arrays,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    if _reads_values(q):
        validate_kvcache.values(call)
    result, lse = runner.forward_kvcache(call)
    runner.finish()
    result = strip(result, rank) if out is None else out
    return (result, strip_lse(lse, rank)) if return_lse else result


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
        raise foreign_names.unexpected(
            "cuflash.apply_rotary", unknown, positional
        )
    given = {"x": x, "cos": cos, "sin": sin}
    if positions is not None:
        given["positions"] = positions
    if out is not None:
        given["out"] = out
    runner, arrays = open_arrays("apply_rotary", given, _OUT)
    call = validate.apply_rotary(
        **arrays, interleaved=interleaved, inverse=inverse
    )
    if _reads_values(call.options.get("positions")):
        validate.positions(call)
    result = runner.apply_rotary(call)
    runner.finish()
    return strip(result, call.rank) if out is None else out


def option_arguments(
    given: dict[str, Any], arrays: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options: (scalar options, `arrays` plus the option arrays)."""
    asked = options.passed(given)
    option_arrays = {x: asked.pop(x) for x in options.ARRAYS if x in asked}
    return asked, {**arrays, **option_arrays}


def check_offsets(call: Any) -> None:
    """Check offsets on the host; on a device only if CUFLASH_CHECK is 1."""
    if _reads_values(call.options.get("cu_seqlens_q")):
        validate.offsets(call)


def _reads_values(array: Any) -> bool:
    """Whether the host checks the values of an array, which may be None."""
    if array is None:
        return False
    on_host = isinstance(array, np.ndarray)
    return on_host or settings.read("CUFLASH_CHECK") == "1"


# What a call writes to arrays of the user.
_OUT = {"out": "the result"}
_GRADIENTS = {x: f"the gradient of {x[1:]}" for x in ("dq", "dk", "dv")}
_CACHES = {**_OUT, "k_cache": "k_new", "v_cache": "v_new"}


def open_arrays(
    call: str,
    given: dict[str, Any],
    written: Mapping[str, str] | None = None,
) -> tuple[Runner, dict[str, Any]]:
    """The runner for the arrays' device, and the arrays in its library.

    `call` names the call, for messages (`hints`). `written` tells which
    arrays, if given, must be writable, and for what. Call the runner's
    `finish` when all of a call is queued.
    """
    settings.check()
    device = validate.device_of(call, **given)
    for name, receives in (written or {}).items():
        if name in given:
            validate.writable(name, given[name], receives)
    if device == "cpu":
        arrays = {name: np.asarray(x) for name, x in given.items()}
        for name in options.INDICES.intersection(arrays):
            arrays[name] = validate.integers_on_host(name, arrays[name])
        emulated = emulator.current()
        if emulated:
            return _kernels()(emulated.backend()), arrays
        from .backends import numpy

        return numpy, arrays
    cupy = on_cuda()
    arrays = {
        name: x if type(x) is cupy.Array else _to_cupy(cupy, name, x)
        for name, x in given.items()
    }
    first = next(iter(arrays.values()))
    lent = [(x, arrays[n]) for n, x in given.items() if x is not arrays[n]]
    finish = functools.partial(cupy.give_back, lent) if lent else None
    return _kernels()(cupy.backend_of(first), finish), arrays


# Imported by the first call that needs them, to keep `import cuflash` fast.
# Cached: an import statement takes 0.6 us.


@functools.cache
def _kernels() -> Callable[..., Runner]:
    """The class that runs calls on a backend."""
    from .runner import Kernels

    return Kernels


@functools.cache
def on_cuda() -> ModuleType:
    """The backend for CUDA arrays; UnsupportedError if CuPy is missing."""
    try:
        from .backends import cupy
    except ImportError as error:
        if (error.name or "").startswith("cuflash"):
            raise
        raise UnsupportedError(
            "arrays on a CUDA device need CuPy, which could not be "
            'imported: pip install "cuflash[cuda13]", or "cuflash[cuda12]" '
            "for a CUDA 12 driver"
        ) from error
    except OSError as error:
        raise UnsupportedError(folders.why_no_cupy(error)) from error
    return cupy


def _to_cupy(cupy: ModuleType, name: str, array: Any) -> Any:
    try:
        return cupy.to_cupy(array)
    except CuflashError:
        raise
    except (BufferError, TypeError, ValueError) as error:
        kind = type(array)
        raise DTypeError(
            f"{name} is of type {kind.__module__}.{kind.__qualname__}, "
            f"which CuPy cannot read: {error}"
        ) from error
