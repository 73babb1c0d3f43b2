r"""Sequences of several lengths, end to end in one array.

``cu_seqlens`` are the offsets of a packed axis: sequence b has the tokens
[cu_seqlens[b], cu_seqlens[b + 1]). Each sequence attends only to itself, as
in a separate call; tokens past the last offset belong to no sequence
([PK] Krell et al. 2021, arXiv:2107.02027, where a mask separates sequences).

Example
-------
Two sequences of 2 and 3 tokens in arrays of 6: the last token belongs to
none.

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.packed import packed_attention, spans
>>> offsets = [0, 2, 5]
>>> for span in spans(offsets, offsets, 6, 6):
...     print(span)
Span(number=0, queries=slice(0, 2, None), keys=slice(0, 2, None))
Span(number=1, queries=slice(2, 5, None), keys=slice(2, 5, None))
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
>>> out, lse = packed_attention(q, k, v, offsets, offsets, causal=True)
>>> alone, _ = attention(q[2:5], k[2:5], v[2:5], causal=True)
>>> np.array_equal(out[2:5], alone)
True
>>> print(out[5], lse[5])
[0. 0. 0. 0.] -inf
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .attention import attention, attention_vjp
from .double_backward import SecondGradients, double_backward
from .expressions import HeadIndices
from .jvp import Tangents, jvp
from .options import Options


class Span(NamedTuple):
    """One sequence: its index, its queries and its keys."""

    number: int
    queries: slice
    keys: slice


def first_bad(
    cu_seqlens: np.ndarray, total: int, longest: int | None = None
) -> int | None:
    """Return the index of the first invalid offset, None if all are valid.

    Valid offsets start at 0, do not decrease and do not exceed `total`; no
    sequence is longer than `longest`.
    """
    offsets = np.asarray(cu_seqlens, np.int64)
    before = np.concatenate([[0], offsets[:-1]])
    bad = (offsets < before) | (offsets > total)
    if longest is not None:
        bad |= offsets - before > longest
    bad[:1] |= offsets[:1] != 0
    return int(bad.argmax()) if bad.any() else None


def spans(
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    total_q: int,
    total_k: int,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Iterator[Span]:
    """Yield each sequence; none if an offset of either is invalid.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : ndarray of int, (batch + 1,)
    total_q, total_k : int
        Tokens of the packed axes.
    max_seqlen_q, max_seqlen_k : int, optional
        See `first_bad`.
    """
    bad_q = first_bad(cu_seqlens_q, total_q, max_seqlen_q)
    bad_k = first_bad(cu_seqlens_k, total_k, max_seqlen_k)
    if bad_q is not None or bad_k is not None:
        return
    q, k = (np.asarray(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    for b in range(len(q) - 1):
        yield Span(b, slice(q[b], q[b + 1]), slice(k[b], k[b + 1]))


def packed_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention of each sequence; see `attention.attention`.

    Parameters
    ----------
    q : array_like, (..., total_q, head_dim)
    k, v : array_like, (..., total_k, head_dim) and (..., head_dim_v)
    cu_seqlens_q, cu_seqlens_k : ndarray of int, (batch + 1,)
    **options
        As in `attention`, the same for all sequences, except that
        alibi_slopes may have an axis of sequences before all others. To
        score_mod and mask_mod, b is the sequence's index, and queries and
        keys have their indices within it.

    Returns
    -------
    out, lse : ndarray
        0 and -inf for tokens of no sequence.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    totals = q.shape[-2], k.shape[-2]
    for b, rows, keys in spans(cu_seqlens_q, cu_seqlens_k, *totals):
        out[..., rows, :], lse[..., rows] = attention(
            q[..., rows, :],
            k[..., keys, :],
            v[..., keys, :],
            **_of_sequence(options, b, q.shape[:-2]),
        )
    return out, lse


def packed_attention_vjp(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute the gradients; see `attention.attention_vjp`.

    Returns
    -------
    dq, dk, dv : ndarray
        0 for tokens of no sequence; then dsink if there is a sink, and dmod
        if return_dmod names arrays, summed over all sequences.
    """
    dout, q, k, v = (np.asarray(x, np.float64) for x in (dout, q, k, v))
    gradients: list[Any] = [np.zeros(x.shape) for x in (q, k, v)]
    if options.get("sink") is not None:
        gradients.append(np.zeros(np.shape(options["sink"])))
    dmod = Options(**options).zeros_of_mod()
    totals = q.shape[-2], k.shape[-2]
    for b, rows, keys in spans(cu_seqlens_q, cu_seqlens_k, *totals):
        parts: Any = attention_vjp(
            dout[..., rows, :],
            *(q[..., rows, :], k[..., keys, :], v[..., keys, :]),
            dlse=None if dlse is None else dlse[..., rows],
            **_of_sequence(options, b, q.shape[:-2]),
        )
        q_index, k_index = (..., rows, slice(None)), (..., keys, slice(None))
        indices: list[Any] = [q_index, k_index, k_index, ...]
        for x, part, index in zip(gradients, parts, indices, strict=False):
            x[index] += part
        for name, total in dmod.items():
            total += parts[-1][name]
    return (*gradients, dmod) if dmod else tuple(gradients)


def packed_jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    q_dot: np.ndarray | None = None,
    k_dot: np.ndarray | None = None,
    v_dot: np.ndarray | None = None,
    *,
    sink_dot: np.ndarray | None = None,
    **options: Any,
) -> Tangents:
    """Compute out, lse and their tangents; see `jvp.jvp`.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As in `packed_attention`.
    q_dot, k_dot, v_dot, sink_dot : array_like, optional
        Tangents, with the shapes of what they move: one direction.

    Returns
    -------
    Tangents
        Tangents are 0 for tokens of no sequence.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    results = Tangents(
        np.zeros((*q.shape[:-1], v.shape[-1])),
        np.full(q.shape[:-1], -np.inf),
        np.zeros((*q.shape[:-1], v.shape[-1])),
        np.zeros(q.shape[:-1]),
    )
    totals = q.shape[-2], k.shape[-2]
    for b, rows, keys in spans(cu_seqlens_q, cu_seqlens_k, *totals):
        parts = jvp(
            *(q[..., rows, :], k[..., keys, :], v[..., keys, :]),
            *(_own(q_dot, rows), _own(k_dot, keys), _own(v_dot, keys)),
            sink_dot=sink_dot,
            **_of_sequence(options, b, q.shape[:-2]),
        )
        columns, row = (..., rows, slice(None)), (..., rows)
        for result, part, index in zip(
            results, parts, (columns, row, columns, row), strict=True
        ):
            result[index] = part
    return results


def packed_double_backward(
    ddq: np.ndarray | None,
    ddk: np.ndarray | None,
    ddv: np.ndarray | None,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    ddsink: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **options: Any,
) -> SecondGradients:
    """Compute gradients of the gradients; see `double_backward`.

    Parameters
    ----------
    ddq, ddk, ddv, dout, q, k, v, out, lse, ddsink, dlse
        As in `double_backward.double_backward`.
    cu_seqlens_q, cu_seqlens_k, **options
        As in `packed_attention`.

    Returns
    -------
    SecondGradients
        0 for tokens of no sequence; d2sink and d2mod are summed over all
        sequences.
    """
    dout, q, k, v, out, lse = (
        np.asarray(x, np.float64) for x in (dout, q, k, v, out, lse)
    )
    sink, arrays = options.get("sink"), options.get("mod_arrays") or {}
    wanted = options.get("return_dmod", ())
    d2mod = {x: np.zeros(np.shape(arrays[x])) for x in wanted}
    results = SecondGradients(
        d2q=np.zeros(q.shape),
        d2k=np.zeros(k.shape),
        d2v=np.zeros(v.shape),
        ddout=np.zeros(dout.shape),
        d2bias=None,
        d2sink=None if sink is None else np.zeros(np.shape(sink)),
        ddlse=np.zeros(lse.shape),
        d2mod=d2mod or None,
    )
    totals = q.shape[-2], k.shape[-2]
    for b, rows, keys in spans(cu_seqlens_q, cu_seqlens_k, *totals):
        parts = double_backward(
            *(_own(ddq, rows), _own(ddk, keys), _own(ddv, keys)),
            *(dout[..., rows, :], q[..., rows, :]),
            *(k[..., keys, :], v[..., keys, :]),
            *(out[..., rows, :], lse[..., rows]),
            ddsink=ddsink,
            dlse=None if dlse is None else dlse[..., rows],
            **_of_sequence(options, b, q.shape[:-2]),
        )
        queries, of_keys = (..., rows, slice(None)), (..., keys, slice(None))
        indices: tuple[Any, ...] = (
            *(queries, of_keys, of_keys, queries), ..., ..., (..., rows),
        )  # fmt: skip
        pairs = zip(results[:-1], parts[:-1], indices, strict=True)
        for result, part, index in pairs:
            if result is not None:
                result[index] += part
        for name, part in (parts.d2mod or {}).items():
            d2mod[name] += part
    return results


def _own(array: np.ndarray | None, tokens: slice) -> np.ndarray | None:
    return None if array is None else np.asarray(array)[..., tokens, :]


def _of_sequence(
    options: dict[str, Any], number: int, leading: tuple[int, ...]
) -> dict[str, Any]:
    """Return options with the sequence's slopes, and its index as the batch.

    Slopes are of each sequence if they have an axis more than the leading
    axes of q. The batch is that of dropout, score_mod and mask_mod.
    """
    own = dict(options)
    slopes, dropout = options.get("alibi_slopes"), options.get("dropout")
    if slopes is not None and np.ndim(slopes) > len(leading):
        own["alibi_slopes"] = np.asarray(slopes)[number]
    if dropout is not None:
        own["dropout"] = dropout._replace(batch=number)
    if options.keys() & {"score_mod", "mask_mod"}:
        heads = options.get("head_indices") or HeadIndices.of(leading)
        own["head_indices"] = heads._replace(batch=number)
    return own
