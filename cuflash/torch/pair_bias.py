"""Attention with a bias of pairs, as models of proteins call it."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.request import pair_bias

from .attention import attention
from .checks import check_tensors


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
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    pair_bias.check_triangle(shapes, "5, or 4 without batch")
    out, lse = _of_batches(scale, given)
    out, lse = (x if has_batch else x.squeeze(0) for x in (out, lse))
    return (out, lse, None) if return_aux else out


def _of_batches(
    scale: float | None, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """out and lse."""
    batch, rows = given["q"].shape[:2]
    if not batch:
        empty = {name: x.flatten(0, 1) for name, x in given.items()}
        results = _of_batch(scale, **empty)
        return tuple([x.unflatten(0, (0, rows)) for x in results])
    if batch == 1:
        # Its gradients are views; those of x[0] are zeros with a copy inside.
        only = {name: x.squeeze(0) for name, x in given.items()}
        return tuple([x.unsqueeze(0) for x in _of_batch(scale, **only)])
    each = [
        _of_batch(scale, **dict(zip(given, tensors, strict=True)))
        for tensors in zip(*(x.unbind(0) for x in given.values()), strict=True)
    ]
    return tuple(map(torch.stack, zip(*each, strict=True)))


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
    pair_bias.check_projection(w_proj_z, is_cached_z_proj)
    bias = z
    if w_proj_z is not None and not is_cached_z_proj:
        bias = _projected(z, w_proj_z, b_proj_z, w_ln_z, b_ln_z, eps)
    shapes = {"q": q, "k": k, "bias": bias}
    shapes |= {} if mask is None else {"mask": mask}
    multiplicity = pair_bias.multiplicity_of(
        {name: tuple(x.shape) for name, x in shapes.items()}, num_heads
    )
    gate = {"s": s, "w_proj_g": w_proj_g, "w_proj_o": w_proj_o}
    others = {"b_proj_g": b_proj_g, "b_proj_o": b_proj_o}
    gate |= {name: x for name, x in others.items() if x is not None}
    check_tensors(gate)
    pair_bias.check_gate(
        tuple(q.shape), {name: tuple(x.shape) for name, x in gate.items()}
    )
    lead = bias.shape[0], multiplicity
    seen = mask
    if mask is not None:
        own = mask.shape[0] == q.shape[0]
        seen = (mask.unflatten(0, lead) if own else mask[:, None])[
            :, :, None, None
        ].expand(*lead, 1, 1, -1)
    q, k, v = (x.unflatten(0, lead) for x in (q, k, v))
    out = triangle_attention(q, k, v, bias[:, None], seen, attn_scale)
    out = out.flatten(0, 1).transpose(1, 2)
    linear = torch.nn.functional.linear
    factor = torch.sigmoid(linear(s, w_proj_g, b_proj_g))
    out = linear(factor * out.flatten(2), w_proj_o, b_proj_o)
    return out, bias if return_z_proj else None


def _projected(
    z: torch.Tensor,
    w_proj: torch.Tensor,
    b_proj: torch.Tensor | None,
    w_ln: torch.Tensor | None,
    b_ln: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The bias, (batch, heads, seqlen_q, seqlen_k), of `z`."""
    functional = torch.nn.functional
    normed = functional.layer_norm(z, z.shape[-1:], w_ln, b_ln, eps)
    return functional.linear(normed, w_proj, b_proj).permute(0, 3, 1, 2)
