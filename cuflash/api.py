"""The public calls: check, then run on the device that holds the arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from . import folders, options, settings, validate
from .backends import emulator
from .errors import CuflashError, DTypeError, UnsupportedError

if TYPE_CHECKING:
    from .backends.base import Backend, Runner

__all__ = ["backward", "forward", "merge_states"]


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
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
) -> Any:
    """Exact attention, softmax(scale * Q K^T) V, without the score matrix.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        Queries: float16, bfloat16 (ml_dtypes), float32 or float64. A NumPy
        array, or one on a CUDA device: CuPy, or any with DLPack or
        ``__cuda_array_interface__``. Any strides. Also without batch (3-D)
        or without batch and heads (2-D).
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
        Queries and keys of a tile, in tokens; tuned by default. They change
        rounding and speed, not the meaning. For NumPy arrays, sizes that a
        kernel has on any GPU.
    precision : {None, "tf32x3"}, optional
        "tf32x3", for float32 and head dimensions up to 256 alone: products
        by the tensor cores, of operands in two parts of 11 bits. Errors stay
        those of float32, but an infinity counts as NaN. Changes nothing for
        NumPy arrays.
    return_lse : bool, optional
        Whether to return `lse` too, which `backward` and `merge_states`
        need.
    out : array, optional
        Receives the result. Shape and dtype as below, on the device of the
        inputs, sharing no memory with them.
    window : (left, right), optional
        Query i sees only the keys from ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``, both included; None for no
        bound. With `causal` too, both hold.
    softcap : float, optional
        Scaled scores s become ``softcap * tanh(s / softcap)``.
    alibi_slopes : array, (num_heads_q,) or (batch, num_heads_q), optional
        float32. ``slope * abs(i + seqlen_k - seqlen_q - j)`` is taken from
        the score of query i and key j.
    bias : array, optional
        Added to scores, after softcap and slopes. In the dtype of `q` or of
        `lse`, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k).
    mask : array of bool, optional
        Only pairs that are True are seen. Broadcastable alike.
    sink : array, (num_heads_q,), optional
        A logit, in the dtype of `lse`, that takes part in each row's
        softmax like a key, and has no value.
    segment_ids_q, segment_ids_k : array, optional
        int32, (batch, seqlen_q) and (batch, seqlen_k), or without batch.
        Only pairs of equal ids are seen.
    dropout : float, optional
        The probability with which a weight is set to 0; the others are
        divided by ``1 - dropout``. `lse` is without dropout.
    seed : int, optional
        Below 2**64; needed with `dropout`. Which weights are kept follows
        from it, the batch, the head, i and j alone.
    cu_seqlens_q, cu_seqlens_k : array, (sequences + 1,), optional
        int32. The sequences stand end to end in `q` (total_q, num_heads_q,
        head_dim), `k` and `v`; these are the offsets of their first tokens,
        then the end of the last. Tokens after that are of no sequence.
        Offsets are bad if the first is not 0, one is less than the one
        before or beyond the end, or a sequence is longer than `max_seqlen_q`
        or `max_seqlen_k` says. On NumPy arrays that is a ValueRangeError. On
        a CUDA device they are not read on the host: bad ones make the whole
        result 0, lse -inf and all gradients 0, without an error, unless the
        environment variable ``CUFLASH_CHECK=1`` is set, for which each call
        waits.
    max_seqlen_q, max_seqlen_k : int, optional
        No sequence is longer, or the offsets count as bad. Worth saying where
        one is much longer than the mean: tile sizes are chosen by it.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        In the dtype of `q`; CuPy for arrays on a CUDA device, NumPy for
        NumPy; `out` itself where it was given. Axes that `q` leaves out are
        left out here.
    lse : array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`. The natural logarithm of the sum of
        exp(scaled, visible scores), float32 (float64 for float64 inputs).

    Raises
    ------
    ShapeError
        If ranks or sizes do not fit each other.
    DTypeError
        If an argument has the wrong type or dtype, or NumPy and CUDA arrays
        are mixed.
    ValueRangeError
        If `scale`, `block_q`, `block_k`, `precision` or an option cannot be
        used, an option lacks one that it needs, offsets that are looked at
        are bad, `out` is read-only or shares memory with an input, or the
        arrays are on several CUDA devices.
    UnsupportedError
        If head_dim or head_dim_v is above 512, or above 256 and more than
        the GPU has shared memory for (float64 below sm_80 alone), another
        size does not fit 32 bits, `precision` is not for the dtype or such
        head dimensions, a bias, a mask or segment ids are given with packed
        sequences, an array is masked, takes part in automatic
        differentiation or is another library's on the CPU, the GPU is too
        old, or CUDA arrays come without CuPy installed.
    CompileError
        If a kernel does not compile, or NVRTC is not installed.

    See Also
    --------
    backward : the gradients.
    merge_states : attention over the union of two sets of keys.

    Notes
    -----
    A query that sees no key has out 0 and lse -inf; only the mask decides
    what is seen, so a key of score -inf is, with weight 0. NaN or inf in an
    input spreads only to rows that see it. Bitwise reproducible from run to
    run.

    Scores are float32 (float64 for float64 inputs), also for NumPy arrays. A
    row with a score past the largest number has out NaN and lse inf; one
    whose scores are all below the lowest has out 0 and lse -inf
    (``docs/guide/accuracy.md``).

    On a CUDA device the call is queued on CuPy's current stream and does
    not wait for it.

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
        asked, given = _asked(
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
    runner, arrays = _open(given, written=out)
    call = validate.forward(
        **arrays,
        **asked,
        scale=scale,
        causal=causal,
        block_q=block_q,
        block_k=block_k,
        precision=precision,
        return_lse=return_lse,
    )
    _check_offsets(call)
    result, lse = runner.forward(call)
    result = _strip(result, call.rank) if out is None else out
    return (result, _strip_lse(lse, call.rank)) if return_lse else result


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    deterministic: bool = False,
    precision: str | None = None,
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
    scale, causal, window, softcap, alibi_slopes, bias, mask, sink, \
    segment_ids_q, segment_ids_k, dropout, seed, cu_seqlens_q, \
    cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to `forward`.
    block_q, block_k : int, optional
        Queries and keys of a tile, in tokens; tuned by default.
    deterministic : bool, optional
        Whether `dq` is summed in a fixed order too, and so is bitwise
        reproducible. `dk` and `dv` always are.
    precision : {None, "tf32x3"}, optional
        As of `forward`; preferably as given to it.
    return_dbias, return_dsink : bool, optional
        Whether to return the gradients of `bias` and `sink` too. That of a
        broadcast bias is summed in no fixed order on a GPU, and so is refused
        with `deterministic`, for NumPy arrays too.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes and the dtype of `q`, `k` and `v`; CuPy for arrays on
        a CUDA device, NumPy for NumPy. `dk` and `dv` are summed over the
        query heads that share a key head.
    dbias : array
        Only with `return_dbias`, after `dv`. Of the shape and dtype of
        `bias`: summed over the axes along which that was broadcast.
    dsink : array
        Only with `return_dsink`, last. Of the shape and dtype of `sink`.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward

    Notes
    -----
    P is recomputed tile by tile as exp(S - lse), and the rows' sums
    D = rowsum(dO * O) stand for rowsum(P * dP) [1]_. A query that sees no
    key contributes exactly 0 to every gradient. One whose lse is inf, as a
    score is past the largest number, has dq NaN and makes dk and dv of all
    keys that it sees NaN.

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
        asked, given = _asked(
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
    runner, arrays = _open(given)
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
    _check_offsets(call)
    dq, dk, dv, *others = runner.backward(call)
    rank = call.rank
    return (_strip(dq, rank), _strip(dk, rank), _strip(dv, rank), *others)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any
) -> tuple[Any, Any]:
    """Attention over two sets of keys from attention over each.

    Parameters
    ----------
    out_a, out_b : array, (batch, seqlen_q, num_heads_q, head_dim_v)
        What `forward` returned for the same queries over each set of keys;
        also 3-D or 2-D, as there.
    lse_a, lse_b : array, (batch, num_heads_q, seqlen_q)
        Their lse, float32 (float64 for float64 `out_a`).

    Returns
    -------
    out, lse : array
        As `forward` would return them over all the keys: CuPy for arrays on
        a CUDA device, NumPy for NumPy.

    Raises
    ------
    CuflashError
        In the same cases as `forward`.

    See Also
    --------
    forward

    Notes
    -----
    lse = log(exp(lse_a) + exp(lse_b)), and out is the mean of the two with
    weights exp(lse_a - lse) and exp(lse_b - lse) [1]_. A row with lse -inf
    has seen no key and leaves the other as it is, whatever its out holds; two
    such rows make one. A row with lse inf makes out NaN and lse inf.

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
    >>> a = cuflash.forward(q, k[:10], v[:10], return_lse=True)
    >>> b = cuflash.forward(q, k[10:], v[10:], return_lse=True)
    >>> out, lse = cuflash.merge_states(*a, *b)
    >>> np.allclose(out, cuflash.forward(q, k, v))
    True
    """
    runner, arrays = _open(
        {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    )
    call = validate.merge_states(**arrays)
    out, lse = runner.merge_states(call)
    return _strip(out, call.rank), _strip_lse(lse, call.rank)


def _asked(
    given: dict[str, Any], arrays: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers among the options; the arrays, with those of the call."""
    asked = options.passed(given)
    of_options = {x: asked.pop(x) for x in options.ARRAYS if x in asked}
    return asked, {**arrays, **of_options}


def _check_offsets(call: Any) -> None:
    """Look at offsets that lie on the host, and at others if asked to."""
    offsets = call.options.get("cu_seqlens_q")
    if offsets is None:
        return
    on_host = isinstance(offsets, np.ndarray)
    if on_host or settings.read("CUFLASH_CHECK") == "1":
        validate.offsets(call)


def _open(
    given: dict[str, Any], written: Any = None
) -> tuple[Runner, dict[str, Any]]:
    """What runs the call, and the arrays as it takes them."""
    settings.check()
    device = validate.device_of(**given)
    if written is not None:
        validate.writable(written)
    if device == "cpu":
        arrays = {name: np.asarray(x) for name, x in given.items()}
        emulated = emulator.current()
        if emulated:
            return _kernels()(emulated.backend()), arrays
        from .backends import numpy

        return numpy, arrays
    cupy = _on_cuda()
    arrays = {
        name: x if type(x) is cupy.Array else _to_cupy(cupy, name, x)
        for name, x in given.items()
    }
    first = next(iter(arrays.values()))
    return _kernels()(cupy.backend_of(first)), arrays


# These are imported by the first call that needs them, to keep the import of
# cuflash short. Cached: an import statement takes 0.6 us.


@functools.cache
def _kernels() -> Callable[[Backend], Runner]:
    """What makes a runner of a backend."""
    from .execute import Kernels

    return Kernels


@functools.cache
def _on_cuda() -> ModuleType:
    """What runs calls on CUDA arrays."""
    try:
        from .backends import cupy
    except ImportError as error:
        if (error.name or "").startswith("cuflash"):
            raise
        raise UnsupportedError(
            "arrays on a CUDA device need CuPy, which could not be "
            'imported: pip install "cuflash[cuda13]", or "cuflash[cuda12]" '
            "for a driver of CUDA 12"
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


def _strip(array: Any, rank: int) -> Any:
    """Take away the axes of (batch, seqlen, heads, d) that q lacks."""
    if rank == 4:
        return array
    return array[0] if rank == 3 else array[0, :, 0]


def _strip_lse(lse: Any, rank: int) -> Any:
    """Take away the axes of (batch, heads, seqlen) that q lacks."""
    if rank == 4:
        return lse
    return lse[0] if rank == 3 else lse[0, 0]
