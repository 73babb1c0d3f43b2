"""Attention over sequences that ranks share, for torch tensors.

`cuflash.distributed` computes with NumPy's arrays, or CuPy's on torch's
stream: tensors are shared with it, not copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from cuflash import distributed
from cuflash.api import arrays as api_arrays
from cuflash.api import foreign_names
from cuflash.errors import UnsupportedError
from cuflash.request.options import FUNCTIONS

from . import request
from .checks import check_tensors
from .dtypes import from_numpy, to_numpy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .types import Results, SharedOptions

_NAME = "cuflash.torch.distributed_attention"

_NO_SECOND_DERIVATIVES = (
    "second derivatives of cuflash.torch.distributed_attention are not"
    " supported: call backward() or torch.autograd.grad() without"
    " create_graph, or use cuflash.torch.attention on one device"
)


@overload
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[SharedOptions],
) -> torch.Tensor: ...
@overload
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[SharedOptions],
) -> Results: ...
@overload
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[SharedOptions],
) -> torch.Tensor | Results: ...
@foreign_names.our_names(_NAME, like=distributed.forward, without=FUNCTIONS)
def distributed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *positional: NoReturn,
    group: distributed.Group,
    deterministic: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | Results:
    """Attention over sequences that the ranks of a group share.

    Parameters
    ----------
    q, k, v : Tensor
        This rank's tokens, as `cuflash.distributed.shard` cuts them or
        `cuflash.distributed.positions` selects them.
    group : cuflash.distributed.Group
        `cuflash.distributed.group_from_environment()` makes one; its ranks
        are those of torch.distributed where torchrun started the processes.
    deterministic : bool, optional
        Whether to sum dq in a fixed order.
    return_lse, **options
        As in `cuflash.distributed.forward`.

    Returns
    -------
    out, lse : Tensor
        lse only with `return_lse`. Both have gradients. All ranks must run
        the backward pass together.

    Raises
    ------
    CuflashError
        As `cuflash.distributed.forward` does; UnsupportedError for second
        derivatives.
    """
    if options or positional:
        foreign_names.refuse(_NAME, options, positional)
    check_tensors({"q": q, "k": k, "v": v})
    options["group"] = group
    out, lse = _Attention.apply(options, deterministic, q, k, v)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Any, deterministic: bool, *tensors: torch.Tensor
    ) -> Any:
        with _on_stream_of(tensors[0]):
            results = distributed.forward(
                *map(_to_array, tensors), return_lse=True, **options
            )
            out, lse = map(_to_tensor, results)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = {**options, "deterministic": deterministic}
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(_NO_SECOND_DERIVATIVES)
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[3])
        with _on_stream_of(dout):
            gradients = distributed.backward(
                *map(_to_array, (dout, *saved)),
                dlse=None if dlse is None else _to_array(dlse),
                **ctx.options,
            )
            return None, None, *map(_to_tensor, gradients)


def _to_array(tensor: torch.Tensor) -> Any:
    """An array of NumPy or CuPy that shares a tensor's memory.

    Of a view that negates it holds a copy: memory has the other sign.
    """
    tensor = tensor.detach().resolve_neg()
    if request.backend_of(tensor) is None:
        return to_numpy(tensor)
    return api_arrays.on_cuda().to_cupy(tensor)


def _to_tensor(array: Any) -> torch.Tensor:
    if hasattr(array, "__cuda_array_interface__"):
        return torch.from_dlpack(array)
    return from_numpy(array)


@contextlib.contextmanager
def _on_stream_of(tensor: torch.Tensor) -> Iterator[None]:
    """Let CuPy use a tensor's device, and torch's current stream of it."""
    if request.backend_of(tensor) is None:
        yield
        return
    cuda = api_arrays.on_cuda().cupy.cuda
    stream = torch.cuda.current_stream(tensor.device)
    # The stream takes the device that is current.
    with cuda.Device(tensor.device.index):
        with cuda.Stream.from_external(stream):
            yield
