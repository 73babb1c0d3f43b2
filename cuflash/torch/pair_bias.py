"""Attention with a bias of pairs, as models of proteins call it."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from cuflash.errors import DTypeError, ShapeError, in_words

from .attention import attention
from .checks import check_tensors

_AXES = "(batch, rows, heads, seqlen, head_dim)"


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Any:
    """Attention of each row of a pair representation, with a common bias.

    The signature of cuEquivariance's `triangle_attention`. Differentiable in
    `q`, `k`, `v` and `bias`, twice and in forward mode.

    Parameters
    ----------
    q : Tensor, (batch, rows, heads, seqlen_q, head_dim)
        float16, bfloat16, float32 or float64; any head_dim up to 512.
        Without the first axis for a batch of 1, and so `k`, `v`, `bias` and
        `mask`.
    k, v : Tensor, (batch, rows, heads, seqlen_k, head_dim)
    bias : Tensor, (batch, 1, heads, seqlen_q, seqlen_k)
        Added to the scores of all rows, as float32 (float64 for float64).
    mask : Tensor, (batch, rows, 1, 1, seqlen_k), optional
        Nonzero or True where a key is seen.
    scale : float, optional
        Multiplies q k^T; by default head_dim ** -0.5.
    return_aux : bool, optional
        Whether to return lse too.

    Returns
    -------
    out : Tensor, (batch, rows, heads, seqlen_q, head_dim)
        A transposed (batch, rows, seqlen_q, heads, head_dim).
    lse : Tensor, (batch, rows, heads, seqlen_q, 1)
        Only with `return_aux`, with a third result that is None: the largest
        scores, which cuEquivariance returns for its own backward pass.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    CuflashError
        In the other cases in which `attention` raises.

    See Also
    --------
    attention : with any other bias, mask or layout.

    Notes
    -----
    A row whose keys are all masked has out 0 and no gradient; cuEquivariance
    returns the mean of v there. Under
    `torch.use_deterministic_algorithms` the bias's gradient, a sum over rows,
    has the same bits in every run.

    Examples
    --------
    >>> import torch
    >>> from cuflash.torch import triangle_attention
    >>> q, k, v = torch.randn(3, 1, 16, 4, 16, 8)
    >>> bias = torch.randn(1, 1, 4, 16, 16, requires_grad=True)
    >>> triangle_attention(q, k, v, bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([1, 1, 4, 16, 16])
    """
    given = {"q": q, "k": k, "v": v, "bias": bias}
    if mask is not None:
        given["mask"] = mask
    check_tensors(given)
    has_batch = q.ndim != 4
    if not has_batch:
        given = {name: x.unsqueeze(0) for name, x in given.items()}
    _check_triangle(given)
    out, lse = _of_batches(scale, given)
    out, lse = (x if has_batch else x.squeeze(0) for x in (out, lse))
    return (out, lse, None) if return_aux else out


def _check_triangle(given: dict[str, torch.Tensor]) -> None:
    batch, rows, heads, seqlen_q, head_dim = _sizes(given["q"])
    seqlen_k = given["k"].shape[3] if given["k"].ndim == 5 else 0
    expected = {
        "k": (batch, rows, heads, seqlen_k, head_dim),
        "v": (batch, rows, heads, seqlen_k, head_dim),
        "bias": (batch, 1, heads, seqlen_q, seqlen_k),
        "mask": (batch, rows, 1, 1, seqlen_k),
    }
    for name, x in given.items():
        if name in expected and tuple(x.shape) != expected[name]:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, expected"
                f" {expected[name]}: q has {tuple(given['q'].shape)}, which"
                f" is {_AXES}"
            )


def _sizes(q: torch.Tensor) -> tuple[int, ...]:
    if q.ndim != 5:
        raise ShapeError(
            f"q has {q.ndim} axes, expected 5, or 4 without batch: {_AXES}"
        )
    return tuple(q.shape)


def _of_batches(
    scale: float | None, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """out and lse."""
    batch, rows = given["q"].shape[:2]
    if not batch:
        empty = {name: x.flatten(0, 1) for name, x in given.items()}
        results = _of_batch(scale, **empty)
        return tuple([x.unflatten(0, (0, rows)) for x in results])
    each = [
        _of_batch(scale, **{name: x[i] for name, x in given.items()})
        for i in range(batch)
    ]
    return tuple([
        x[0].unsqueeze(0) if batch == 1 else torch.stack(x)
        for x in zip(*each, strict=True)
    ])  # fmt: skip


def _of_batch(
    scale: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of one element; rows are `attention`'s batch."""
    out, lse = _attend(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
        None if mask is None else mask != 0, scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse.unsqueeze(-1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> Any:
    """`attention` with a bias that the batch may share, and its lse."""
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    options: dict[str, Any] = {} if mask is None else {"mask": mask}
    bias = bias.to(wide)
    if bias.requires_grad and torch.are_deterministic_algorithms_enabled():
        # Gradients of a function's arrays are summed in one order or as
        # integers; of a bias that is broadcast, in any.
        options["score_mod"] = _plus_bias
        options["mod_arrays"] = {"bias": bias.squeeze(0)}
    else:
        options["bias"] = bias
    return attention(q, k, v, scale=scale, return_lse=True, **options)


def _plus_bias(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, bias: Any
) -> Any:
    return score + bias[h, q_idx, kv_idx]


def attention_pair_bias(
    s: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    mask: torch.Tensor | None,
    num_heads: int,
    w_proj_z: torch.Tensor | None,
    w_proj_g: torch.Tensor,
    w_proj_o: torch.Tensor,
    w_ln_z: torch.Tensor | None = None,
    b_ln_z: torch.Tensor | None = None,
    b_proj_z: torch.Tensor | None = None,
    b_proj_g: torch.Tensor | None = None,
    b_proj_o: torch.Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = True,
    is_cached_z_proj: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated attention with a bias projected from a pair representation.

    The signature of cuEquivariance's `attention_pair_bias` up to 0.10. The
    pair representation is normalised and projected to a bias of each head;
    `attention` adds it to its scores; a gate of `s` multiplies the result,
    which is projected. Differentiable in all tensors but `mask`.

    Parameters
    ----------
    s : Tensor, (batch * multiplicity, seqlen_q, width)
        What the gate is computed from.
    q : Tensor, (batch * multiplicity, heads, seqlen_q, head_dim)
    k, v : Tensor, (batch * multiplicity, heads, seqlen_k, head_dim)
    z : Tensor, (batch, seqlen_q, seqlen_k, width_z)
        The pair representation. With `is_cached_z_proj`, what an earlier
        call returned: (batch, heads, seqlen_q, seqlen_k).
    mask : Tensor, (batch or batch * multiplicity, seqlen_k), or None
        Nonzero where a key is seen.
    num_heads : int
    w_proj_z, b_proj_z : Tensor, (heads, width_z) and (heads,)
        Of the projection of `z`.
    w_proj_g, b_proj_g : Tensor, (columns, width) and (columns,)
        Of the gate; columns is heads * head_dim.
    w_proj_o, b_proj_o : Tensor, (width, columns) and (width,)
        Of the result.
    w_ln_z, b_ln_z : Tensor, (width_z,)
        Of the layer norm of `z`; without weight, `z` is normalised alone.
    inf : float, optional
        Ignored: masked keys have a weight of exactly 0.
    eps : float, optional
        Of the layer norm.
    attn_scale : float, optional
        By default head_dim ** -0.5.
    return_z_proj : bool, optional
        Whether to return the bias, for calls with `is_cached_z_proj`.
    is_cached_z_proj : bool, optional

    Returns
    -------
    out : Tensor, (batch * multiplicity, seqlen_q, width)
    z_proj : Tensor, (batch, heads, seqlen_q, seqlen_k), or None
        None without `return_z_proj`.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    DTypeError
        If `num_heads` is no integer.
    CuflashError
        In the other cases in which `attention` raises.

    Notes
    -----
    A query that sees no key has out 0 before the gate.

    Examples
    --------
    >>> import torch
    >>> from cuflash.torch import attention_pair_bias
    >>> s, z = torch.randn(1, 16, 32), torch.randn(1, 16, 16, 8)
    >>> q, k, v = torch.randn(3, 1, 4, 16, 8)
    >>> w_z, w_g, w_o = (torch.randn(x) for x in ((4, 8), (32, 32), (32, 32)))
    >>> out, bias = attention_pair_bias(s, q, k, v, z, None, 4, w_z, w_g, w_o)
    >>> out.shape, bias.shape
    (torch.Size([1, 16, 32]), torch.Size([1, 4, 16, 16]))
    """
    given = {"s": s, "q": q, "k": k, "v": v, "z": z}
    check_tensors(given)
    bias = z if is_cached_z_proj else _projected(
        z, w_proj_z, b_proj_z, w_ln_z, b_ln_z, eps
    )  # fmt: skip
    multiplicity = _check_pairs(q, k, bias, mask, num_heads)
    seen = None
    if mask is not None:
        seen = (mask != 0)[:, None, None]
        if mask.shape[0] != q.shape[0]:
            seen = seen.repeat_interleave(multiplicity, 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = [
        _attend(
            q[rows], k[rows], v[rows], bias[i : i + 1],
            None if seen is None else seen[rows], attn_scale,
        )[0]
        for i, rows in enumerate(_runs(q.shape[0], multiplicity))
    ]  # fmt: skip
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    linear = torch.nn.functional.linear
    gate = torch.sigmoid(linear(s, w_proj_g, b_proj_g))
    out = linear(gate * out.flatten(2), w_proj_o, b_proj_o)
    return out, bias if return_z_proj else None


def _projected(
    z: torch.Tensor,
    w_proj: torch.Tensor | None,
    b_proj: torch.Tensor | None,
    w_ln: torch.Tensor | None,
    b_ln: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The bias, (batch, heads, seqlen_q, seqlen_k), of `z`."""
    if w_proj is None:
        raise DTypeError(
            "w_proj_z is None, expected a Tensor unless is_cached_z_proj=True"
        )
    functional = torch.nn.functional
    normed = functional.layer_norm(z, z.shape[-1:], w_ln, b_ln, eps)
    return functional.linear(normed, w_proj, b_proj).permute(0, 3, 1, 2)


def _check_pairs(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    num_heads: int,
) -> int:
    """Check shapes; returns the elements of the batch that share a bias."""
    if isinstance(num_heads, bool) or not isinstance(
        num_heads, numbers.Integral
    ):
        raise DTypeError(
            f"num_heads is {in_words(num_heads)}, expected an int"
        )
    if q.ndim != 4 or q.shape[1] != num_heads:
        raise ShapeError(
            f"q has shape {tuple(q.shape)}, expected (batch, {num_heads},"
            f" seqlen_q, head_dim): num_heads is {num_heads}"
        )
    seqlen_k = k.shape[2] if k.ndim == 4 else 0
    expected = num_heads, q.shape[2], seqlen_k
    if bias.ndim != 4 or tuple(bias.shape[1:]) != expected:
        raise ShapeError(
            f"z gives a bias of shape {tuple(bias.shape)}, expected (batch,"
            f" {', '.join(map(str, expected))}): heads, seqlen_q, seqlen_k"
        )
    batch = bias.shape[0]
    multiplicity, rest = divmod(q.shape[0], max(batch, 1))
    if rest or (multiplicity == 0) != (batch == 0):
        raise ShapeError(
            f"q has batch {q.shape[0]}, expected a multiple of that of z,"
            f" {batch}"
        )
    _check_mask(mask, batch, q.shape[0], seqlen_k)
    return multiplicity


def _check_mask(
    mask: torch.Tensor | None, batch: int, rows: int, seqlen_k: int
) -> None:
    if mask is None:
        return
    if tuple(mask.shape) not in ((batch, seqlen_k), (rows, seqlen_k)):
        raise ShapeError(
            f"mask has shape {tuple(mask.shape)}, expected"
            f" {(batch, seqlen_k)}, a row for each element of z, or"
            f" {(rows, seqlen_k)}, one for each of q"
        )


def _runs(count: int, length: int) -> list[slice]:
    """Of an empty batch, one that is empty."""
    length = max(length, 1)
    return [slice(i, i + length) for i in range(0, max(count, 1), length)]
