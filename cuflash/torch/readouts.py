"""`weights`, `weight_sums` and `entropy` of torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from cuflash.api import foreign_names
from cuflash.api.foreign_names import split_options
from cuflash.errors import UnsupportedError
from cuflash.request import checks
from cuflash.request.layouts import broadcasts
from cuflash.request.options import FORWARD, TRACED
from cuflash.request.validate import chosen

from . import (
    autocast,
    compiled_functions,
    functions,
    readout_function_ops,
)
from .checks import check_no_tangents, check_tensors
from .functions import named_at
from .readout_gradients import Readout
from .readout_ops import POSITIONAL
from .tracing import TRANSFORMED, is_transformed

if TYPE_CHECKING:
    from collections.abc import Sequence

_TENSOR = "torch.Tensor | None"


@foreign_names.our_names("cuflash.torch.weights", FORWARD, _TENSOR)
def weights(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *positional: NoReturn,
    queries: torch.Tensor | Sequence[Any] | slice | None = None,
    keys: torch.Tensor | Sequence[int] | slice | None = None,
    heads: torch.Tensor | Sequence[int] | slice | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The weights of some queries, differentiable in `q`, `k` and `lse`.

    And in tensors that `score_mod` reads.

    Parameters
    ----------
    q, k : Tensor
        As given to `attention`.
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: not detached, a
        loss reaches `q`, `k`, a bias and a sink by way of it too.
    queries, keys, heads : slice, indices, or integer Tensor, optional
        As for `cuflash.weights`. On a CUDA device an index out of a tensor's
        range gives weights of 0, unless ``CUFLASH_CHECK=1``.
    dtype : torch.dtype, optional
        Of the result: that of `lse`, which is the default, or that of `q`.
    scale, causal, block_q, block_k, precision, **options
        As given to `attention`. `dropout` changes nothing.
    deterministic : bool, optional
        Whether gradients of what `score_mod` reads are bitwise reproducible;
        so they are under `torch.use_deterministic_algorithms`, too. Those of
        `q` and `k` always are.

    Returns
    -------
    weights : Tensor, (batch, heads, queries, keys)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.weights`. An UnsupportedError if a bias
        requires grad (pass ``bias.detach()``), in forward mode, and for
        second derivatives.

    See Also
    --------
    cuflash.weights : the same for CuPy and NumPy arrays, with all equations.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
    >>> _, lse = cuflash.torch.attention(q, k, v, return_lse=True)
    >>> last = cuflash.torch.weights(q, k, lse, queries=[-1])
    >>> last.shape
    torch.Size([2, 4, 1, 16])
    >>> (last[..., 3] ** 2).sum().backward()
    """
    return _call(
        "weights", q, k, lse,
        {"queries": queries, "keys": keys, "heads": heads},
        None, options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic, dtype=dtype,
    )  # fmt: skip


@foreign_names.our_names("cuflash.torch.weight_sums", FORWARD, _TENSOR)
def weight_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *positional: NoReturn,
    queries: torch.Tensor | Sequence[Any] | slice | None = None,
    row_weights: torch.Tensor | None = None,
    reduce: str = "sum",
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> torch.Tensor:
    """How much weight each key gets from all queries, or from some.

    Differentiable in `q`, `k`, `lse`, `row_weights` and tensors that
    `score_mod` reads.

    Parameters
    ----------
    q, k : Tensor
        As given to `attention`.
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: not detached, a
        loss reaches `q`, `k`, a bias and a sink by way of it too.
    queries : slice, indices, flags, or Tensor, optional
        As for `cuflash.weight_sums`. On a CUDA device an index out of a
        tensor's range chooses nothing, unless ``CUFLASH_CHECK=1``.
    row_weights : Tensor, optional
        Broadcastable to the shape of `lse`, in its dtype.
    reduce : {"sum", "max"}, optional
        Whether a key gets the sum over queries, or the largest.
    scale, causal, block_q, block_k, precision, **options
        As given to `attention`. `dropout` changes nothing.
    deterministic : bool, optional
        As for `weights`.

    Returns
    -------
    sums : Tensor, (batch, num_heads_q, seqlen_k)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.weight_sums`, and as `weights`.

    See Also
    --------
    cuflash.weight_sums : the same for CuPy and NumPy arrays.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8)
    >>> _, lse = cuflash.torch.attention(q, k, v, return_lse=True)
    >>> cuflash.torch.weight_sums(q, k, lse, queries=slice(-4, None)).shape
    torch.Size([2, 4, 16])
    """
    return _call(
        "weight_sums", q, k, lse, {"queries": queries}, row_weights,
        options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic, reduce=reduce,
    )  # fmt: skip


@foreign_names.our_names("cuflash.torch.entropy", FORWARD, _TENSOR)
def entropy(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The entropy of each query's weights, in nats.

    Differentiable in `q`, `k`, `lse` and tensors that `score_mod` reads.

    Parameters
    ----------
    q, k : Tensor
        As given to `attention`.
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: not detached, a
        loss reaches `q`, `k`, a bias and a sink by way of it too.
    scale, causal, block_q, block_k, precision, **options
        As given to `attention`. `dropout` changes nothing.
    deterministic : bool, optional
        As for `weights`.

    Returns
    -------
    entropy : Tensor, (batch, num_heads_q, seqlen_q)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.entropy`, and as `weights`.

    See Also
    --------
    cuflash.entropy : the same for CuPy and NumPy arrays.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
    >>> out, lse = cuflash.torch.attention(q, k, v, return_lse=True)
    >>> entropy = cuflash.torch.entropy(q, k, lse)
    >>> (out.sum() - 0.1 * entropy.mean()).backward()
    """
    return _call(
        "entropy", q, k, lse, {}, None, options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip


def _call(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    choices: dict[str, Any],
    row_weights: torch.Tensor | None,
    options: dict[str, Any],
    positional: tuple[Any, ...],
    **numbers: Any,
) -> torch.Tensor:
    """Check what no operator can, and call it."""
    call = f"cuflash.torch.{name}"
    given, arrays = split_options(call, options, positional)
    compiling = torch.compiler.is_compiling()
    if compiling and is_transformed(not TRACED.isdisjoint(given)):
        torch._dynamo.graph_break(msg=TRANSFORMED)
    program: Any = None
    read: list[torch.Tensor] = []
    if not TRACED.isdisjoint(given):
        program, read = _functions(given, arrays, q, compiling)
    inputs = {"q": q, "k": k, "lse": lse, **arrays}
    if row_weights is not None:
        inputs["row_weights"] = row_weights
    if not compiling:
        check_tensors(inputs)
        checks.flag("deterministic", numbers["deterministic"])
        moved = {named_at(i): x for i, x in enumerate(read)}
        check_no_tangents(inputs | moved, f"{call} has no forward mode")
    bias = arrays.get("bias")
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        raise UnsupportedError(
            f"bias requires grad, expected a tensor that does not: {call} is "
            "differentiable in q, k and lse, by which a bias that attention "
            "takes has a part of its gradient only (pass bias.detach())"
        )
    if autocast.is_on(q):
        q, k = autocast.to_its_dtype("q", q), autocast.to_its_dtype("k", k)
    if row_weights is not None and broadcasts(
        tuple(row_weights.shape), tuple(lse.shape)
    ):
        row_weights = row_weights.expand(lse.shape)
    if torch.are_deterministic_algorithms_enabled():
        numbers["deterministic"] = True
    if "window" in given:
        left, right = given.pop("window")
        numbers |= {"window_left": left, "window_right": right}
    given.pop("seed", None)
    if "dropout" in given:
        given["seed"] = 0  # weights are those before dropout
    tensors = _choices(name, choices, q, k)
    tensors |= arrays
    operands = (q, k, lse, row_weights, *map(tensors.get, POSITIONAL[1:]))
    numbers |= given
    if not compiling and torch._C._are_functorch_transforms_active():
        return Readout.apply(name, numbers, program, *operands, *read)
    return readout_function_ops.call(
        name, (*operands, *read), numbers, program
    )


def _functions(
    given: dict[str, Any],
    arrays: dict[str, Any],
    q: torch.Tensor,
    compiling: bool,
) -> tuple[Any, list[torch.Tensor]]:
    """The program of a call's functions, and what they read."""
    if compiling:
        found: Any = compiled_functions.taken(given, arrays, q)
    else:
        own = functions.taken(given, arrays, q)
        found = None if own is None else own.as_program()
    if found is None:
        return None, []
    read, values, graphs = found
    return (values, graphs), read


def _choices(
    name: str, choices: dict[str, Any], q: torch.Tensor, k: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Indices and flags on the device of q, of what the host knows."""
    if not torch.compiler.is_compiling():
        _, arrays = chosen.split(choices)
        check_tensors(arrays)
    found = {}
    for each, x in choices.items():
        if x is not None and not isinstance(x, torch.Tensor):
            length = chosen.length_of(each, {"q": q, "k": k})
            x = _indices(name, each, x, length).to(q.device)
        if x is not None:
            found[each] = x
    return found


def _indices(name: str, each: str, x: Any, length: int) -> torch.Tensor:
    if isinstance(x, slice):
        if not torch.compiler.is_compiling():
            chosen.host_indices(each, x, 0)  # says what is no slice of ints
        taken = range(length)[x]
        start, stop, step = taken.start, taken.stop, taken.step
        return torch.arange(start, stop, step, dtype=torch.int32)
    if torch.compiler.is_compiling():
        return torch.as_tensor(x)
    if name == "weight_sums":
        return torch.from_numpy(np.array(chosen.host_queries(x, length)))
    return torch.from_numpy(chosen.host_indices(each, x, length))
