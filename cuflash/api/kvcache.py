"""`forward_kvcache`: attention over a cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from cuflash.api import foreign_names
from cuflash.api.arrays import CACHES, OUT, open_arrays, reads_values
from cuflash.api.foreign_names import split_options
from cuflash.api.reads import look_at_functions
from cuflash.request.options import KVCACHE
from cuflash.request.problem import strip, strip_lse
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import kvcache_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import Array, KVCacheOptions, NumPyArray


@overload
def forward_kvcache(
    q: NumPyArray,
    k_cache: NumPyArray,
    v_cache: NumPyArray | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[KVCacheOptions],
) -> NumPyArray: ...


@overload
def forward_kvcache(
    q: NumPyArray,
    k_cache: NumPyArray,
    v_cache: NumPyArray | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[KVCacheOptions],
) -> tuple[NumPyArray, NumPyArray]: ...


@overload
def forward_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[KVCacheOptions],
) -> tuple[Any, Any]: ...


@overload
def forward_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[KVCacheOptions],
) -> Any: ...


@foreign_names.our_names("cuflash.forward_kvcache", KVCACHE)
def forward_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any = None,
    *positional: NoReturn,
    head_dim_v: int | None = None,
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
    num_splits: int | None = None,
    out: Any = None,
    return_lse: bool = False,
    **options: Any,
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
    v_cache : array, (batch, capacity, num_heads_kv, head_dim_v), optional
        Like `k_cache`. `num_heads_q` is a multiple of `num_heads_kv`. If it
        is a view of k_cache's first columns, or None, a token's value is the
        beginning of its key, as in latent attention: `k_new` needs no
        `v_new`, and Hopper's kernel for 16-bit rows above 256 columns reads
        both at once. Rotated columns of `k_new` are rotated as values too.
    head_dim_v : int, optional
        Required without `v_cache`: values are ``k_cache[..., :head_dim_v]``,
        and `k_scale` is their scale too.
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
    scale, causal, **options
        As in `forward`, with seqlen_k = n: masks are aligned at the end, so
        the last query is at the position of the last token. `score_mod` and
        `mask_mod` get the number of the sequence, the query's among those of
        the call, and the token's in its sequence, whatever its page, from
        the first after `cache_leftpad` on.
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
    with n = 0, and a query of no sequence, have out and lse of a query that
    sees no key in `forward`. Rotary positions and n count from the start of
    the cache, also with `cache_leftpad`; a query that sees no token has out
    0.

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
        "out": out,
    }
    asked: dict[str, Any] = {}
    if options or positional:
        asked, arrays = split_options(
            "cuflash.forward_kvcache", options, positional
        )
        given |= arrays
    cache_seqlens = validate_kvcache.length_or_array(cache_seqlens)
    if validate_kvcache.is_int(cache_seqlens):
        given["cache_seqlens"] = None
    given = {name: x for name, x in given.items() if x is not None}
    writes = k_new is not None or v_new is not None
    written = CACHES if writes else OUT
    runner, arrays = open_arrays("forward_kvcache", given, written)
    rank = arrays["q"].ndim
    arrays = validate_kvcache.with_values(arrays, head_dim_v)
    arrays = validate_kvcache.with_batch(arrays)
    if "cache_seqlens" not in given:
        arrays["cache_seqlens"] = cache_seqlens
    call = validate_kvcache.forward_kvcache(
        **arrays,
        **asked,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        scale=scale,
        causal=causal,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    if reads_values(q):
        kvcache_values.values(call)
    look_at_functions(call, None, asked, arrays)
    result, lse = runner.forward_kvcache(call)
    runner.finish()
    result = strip(result, rank) if out is None else out
    return (result, strip_lse(lse, rank)) if return_lse else result
