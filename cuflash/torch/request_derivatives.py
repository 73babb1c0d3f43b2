"""Derivatives of a `Request` on real tensors, without autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cuflash.api import derivatives as api_derivatives
from cuflash.api.derivatives import strip_each
from cuflash.launch.runner import Kernels
from cuflash.request import mod_tangents, traced
from cuflash.request.problem import strip, strip_lse
from cuflash.request.validate import derivatives as validate_derivatives
from cuflash.request.validate.derivatives import COTANGENTS, TANGENTS

from . import request as requests
from .request import Request, Results

Tensors = dict[str, torch.Tensor]

# What may be left out of a call, but has no default.
ON_CPU = {
    "jvp": functools.partial(
        api_derivatives.jvp, q_dot=None, k_dot=None, v_dot=None
    ),
    "double_backward": functools.partial(
        api_derivatives.double_backward, ddq=None, ddk=None, ddv=None
    ),
}


def jvp(
    request: Request, given: Tensors, tangents: Tensors, tensors: Tensors
) -> Results:
    """The tangents of out and lse.

    Parameters
    ----------
    request : Request
    given : dict
        q, k and v.
    tangents : dict
        By what they move. Each may have an axis of directions before the
        others, and so have the results.
    tensors : dict
        The options' tensors.
    """
    moved = mod_tangents.tangents_named(tangents, TANGENTS, "mod_dots")
    own = (*request.common, "return_lse", True)
    backend = requests.backend_of(given["q"])
    if backend is None:
        run = ON_CPU["jvp"]
        return request.on_cpu(run, {**given, **moved}, tensors, own)[2:]
    call = request.call(
        validate_derivatives.jvp, {**given, **moved}, tensors, own
    )
    call.given = given
    call.tangents = traced.by_slots(tangents, tensors)
    _, _, out_dot, lse_dot = Kernels(backend).jvp(call)
    return strip_each(out_dot, call), strip_each(lse_dot, call, lse=True)


def double_backward(
    request: Request,
    given: Tensors,
    cotangents: Tensors,
    tensors: Tensors,
    wanted: tuple[str, ...],
) -> Results:
    """d2q, d2k, d2v and ddout; then those that are wanted.

    Parameters
    ----------
    request : Request
    given : dict
        dout, q, k, v, out, lse and, if there is one, dlse.
    cotangents : dict
        By what they move.
    tensors : dict
        The options' tensors.
    wanted : tuple of str
        Which of DIFFERENTIABLE, of the arrays and "lse", in this order.
    """
    moved = mod_tangents.tangents_named(cotangents, COTANGENTS, "ddmods")
    own: tuple[Any, ...] = (
        *request.common, "deterministic", request.deterministic,
    )  # fmt: skip
    read = tuple([x for x in wanted if traced.is_slot(x)])
    if read:
        own = (*own, *mod_tangents.gradients_of(read, "return_d2mod"))
    for name in wanted:
        if name in read:
            continue
        flag = "return_ddlse" if name == "lse" else f"return_d2{name}"
        own = (*own, flag, True)
    backend = requests.backend_of(given["q"])
    if backend is None:
        run = ON_CPU["double_backward"]
        return request.on_cpu(run, {**given, **moved}, tensors, own)
    check = validate_derivatives.double_backward
    call = request.call(check, {**given, **moved}, tensors, own)
    call.given = given
    call.tangents = traced.by_slots(cotangents, tensors)
    results = Kernels(backend).double_backward(call)
    others = (
        strip_lse(x, call.rank) if name == "lse" else x
        for name, x in zip(wanted, results[4:], strict=True)
    )
    return (*(strip(x, call.rank) for x in results[:4]), *others)
