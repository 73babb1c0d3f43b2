"""The public calls: attention over sequences that a group of ranks shares."""

from __future__ import annotations

from typing import Any, NoReturn

from cuflash.api import foreign_names
from cuflash.request.options import BACKWARD, FORWARD, TRACED
from cuflash.request.problem import strip, strip_lse

from . import arguments, ring
from .arguments import Request
from .array_gradients import ArrayGradients
from .group import Group
from .heads import LSE, ROWS, Heads
from .machine import machine_of

_FUNCTIONS = tuple(x for x in FORWARD if x in TRACED)
_WITH_GRADIENTS = tuple(x for x in BACKWARD if x in TRACED)


@foreign_names.our_names("cuflash.distributed.forward", _FUNCTIONS)
def forward(
    q: Any,
    k: Any,
    v: Any,
    *positional: NoReturn,
    group: Group,
    causal: bool = False,
    layout: str = "zigzag",
    ulysses: int = 1,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **options: Any,
) -> Any:
    """Exact attention over sequences that the ranks of a group share.

    Every rank calls it with its part of q, k and v, as `shard` cuts them, and
    gets its part of the result.

    Parameters
    ----------
    q, k, v : array
        This rank's tokens; otherwise as in `cuflash.forward`. All ranks hold
        as many.
    group : Group
        The ranks.
    causal, scale, window, softcap, precision
        As in `cuflash.forward`, for the whole sequences.
    score_mod, mask_mod, mod_arrays
        As in `cuflash.forward`: functions get the indices of whole sequences,
        and the arrays are whole, the same on all ranks.
    layout : {"zigzag", "contiguous"}, optional
        Which tokens a rank holds: see `shard`. With "zigzag" all ranks have
        the same work under a causal mask.
    ulysses : int, optional
        Ranks that exchange tokens for heads before they compute: a divisor
        of the group's size and of num_heads_kv. 1 is ring attention alone;
        the group's size is all-to-all alone, in which no keys travel.
    return_lse : bool, optional
        Whether to return `lse` too, which `backward` needs.
    cu_seqlens_q, cu_seqlens_k : sequence of int, (sequences + 1,), optional
        Offsets of packed sequences, of the *whole* sequences and the same on
        all ranks; each sequence is cut on its own, and `q` is (tokens of this
        rank, heads, head_dim). The host reads them: pass a list or a NumPy
        array, since it would wait for a CUDA array.

    Returns
    -------
    out, lse : array
        Of this rank's queries, as `cuflash.forward` returns them.

    Raises
    ------
    ShapeError
        If a sequence cannot be cut into equal chunks, or as `cuflash.forward`
        does.
    ValueRangeError
        On all ranks, if their shapes, dtypes or options differ.
    GroupError
        If a rank failed, or did not answer within the group's timeout.
    CuflashError
        In the same cases as `cuflash.forward`.

    See Also
    --------
    backward, shard, gather

    Notes
    -----
    In ring attention [1]_ a rank computes with the keys of one rank after the
    other while the next ones travel, and merges the results by their lse in
    float32. Each is rounded to the dtype of q first.

    Arrays with a bias, a mask, segment ids, a sink, slopes or dropout are not
    supported: write them as `score_mod` and `mask_mod`, which know positions.
    A block that `mask_mod` hides, whatever its arrays hold, is not computed,
    and keys that only such blocks need are not sent.

    On a GPU the call returns without waiting.

    References
    ----------
    .. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise
       Transformers for Near-Infinite Context", arXiv:2310.01889.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> from cuflash.distributed import forward, run_threads, shard, unshard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 32, 2, 8))
    >>> def of_rank(group):
    ...     own = [shard(x, group.rank, group.size) for x in (q, k, v)]
    ...     return forward(*own, group=group, causal=True)
    >>> out = unshard(run_threads(4, of_rank))
    >>> np.allclose(out, cuflash.forward(q, k, v, causal=True))
    True
    """
    asked, read = foreign_names.split_options(
        "cuflash.distributed.forward", options, positional
    )
    request = arguments.check(
        "forward",
        {"q": q, "k": k, "v": v, **read},
        group=group,
        causal=causal,
        layout=layout,
        ulysses=ulysses,
        window=window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scale=scale,
        softcap=softcap,
        precision=precision,
        **asked,
    )
    heads, own = _open(request)
    of_q, of_k = request.mask.offsets_q, request.mask.offsets_k
    given = [request.arrays[name] for name in "qkv"]
    spread = heads.spread(given, [of_q, of_k, of_k])
    results = ring.forward(own, *spread)
    out, lse = heads.collect(results, [of_q, of_q], [ROWS, LSE])
    request.finish()
    group.confirm()
    result = strip(out, request.rank)
    return (result, strip_lse(lse, request.rank)) if return_lse else result


@foreign_names.our_names("cuflash.distributed.backward", _WITH_GRADIENTS)
def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *positional: NoReturn,
    group: Group,
    causal: bool = False,
    layout: str = "zigzag",
    ulysses: int = 1,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    dlse: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The gradients of `forward`, of this rank's queries and keys.

    Parameters
    ----------
    dout, q, k, v, out, lse : array
        Of this rank; as in `cuflash.backward`.
    group, causal, layout, ulysses, scale, window, softcap, precision
    cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, mod_arrays
        As given to `forward`.
    deterministic, dlse, return_dmod
        As in `cuflash.backward`.

    Returns
    -------
    dq, dk, dv : array
        Like q, k and v.
    dmod : dict of str to array
        Only with `return_dmod`: the gradients of whole arrays, of all ranks'
        queries, the same on every rank.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    Notes
    -----
    A rank computes the gradients of the keys of one rank after the other and
    sends them back, in the dtype of k; their owner adds them in float32.
    Gradients of arrays are added in the dtype of lse, rank by rank.
    """
    asked, read = foreign_names.split_options(
        "cuflash.distributed.backward", options, positional
    )
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    request = arguments.check(
        "backward",
        {**given, **read},
        group=group,
        causal=causal,
        layout=layout,
        ulysses=ulysses,
        window=window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scale=scale,
        softcap=softcap,
        precision=precision,
        deterministic=deterministic,
        **asked,
    )
    heads, own = _open(request)
    of_q, of_k = request.mask.offsets_q, request.mask.offsets_k
    rows = [request.arrays[x] for x in ("dout", "q", "k", "v", "out")]
    spread = heads.spread(rows, [of_q, of_q, of_k, of_k, of_q])
    of_rows = [request.arrays[x] for x in ("lse", "dlse") if x in given]
    lses = heads.spread(of_rows, [of_q] * len(of_rows), LSE)
    dmod = _of_arrays(request, own)
    gradients = ring.backward(own, *spread, *lses, dmod=dmod)
    found = heads.collect(gradients, [of_q, of_k, of_k], [ROWS] * 3)
    results = tuple(strip(x, request.rank) for x in found)
    if dmod is not None:
        results = (*results, dmod.summed(group))
    request.finish()
    group.confirm()
    return results


def _of_arrays(request: Request, own: ring.Ring) -> ArrayGradients | None:
    """The sums of the gradients of arrays, if a call asks for some."""
    functions = request.functions
    if functions is None or not functions.gradients:
        return None
    arrays = {x: functions.arrays[x] for x in functions.gradients}
    wide = request.arrays["lse"].dtype
    return ArrayGradients(arrays, wide, own.machine)


def _open(request: Request) -> tuple[Heads, ring.Ring]:
    machine = machine_of(request.arrays["q"])
    heads = Heads(request.group, request.ulysses, request.mask, machine)
    options = {x: y for x, y in request.options.items() if y is not None}
    own = ring.Ring(
        heads.ring(), request.ring_mask, machine, options, request.functions
    )
    return heads, own
