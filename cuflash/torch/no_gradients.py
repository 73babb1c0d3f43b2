"""Calls over caches whose inputs require grad: they run, backward raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuflash.errors import UnsupportedError

from .checks import check_no_tangents
from .ops import LIBRARY

# Compiled code holds it in its backward pass, to which `dout` ties it: it
# raises where that runs, not where it is compiled.
LIBRARY.define(
    "no_gradients(Tensor dout, Tensor[] inputs, str names) -> Tensor[]"
)


class WithoutGradients(torch.autograd.Function):
    """What `run` returns, of inputs that require grad."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], Any], names: str, *inputs: Any
    ) -> Any:
        ctx.names = names
        ctx.save_for_backward(*inputs)
        return run()

    @staticmethod
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        inputs = ctx.saved_tensors
        found = torch.ops.cuflash.no_gradients(dout, inputs, ctx.names)
        return None, None, *found


def run(tensors: dict[str, Any], call: Callable[[], Any]) -> Any:
    """What `call` returns; backward raises if a tensor requires grad.

    Parameters
    ----------
    tensors : dict
        The tensors of a call of `forward_kvcache`, by name.
    call : callable
        Makes the call and returns tensors.

    Raises
    ------
    UnsupportedError
        If a tensor that the call writes to requires grad, or one has a
        tangent.
    """
    check_no_tangents(tensors, "attention over caches has no gradients")
    if not torch.is_grad_enabled():
        return call()
    needing = {name: x for name, x in tensors.items() if x.requires_grad}
    if not needing:
        return call()
    written = ["k_cache", "v_cache"] if "k_new" in tensors else []
    for name in (*written, "out"):
        if name in needing:
            raise UnsupportedError(
                f"{name} requires grad and is written in place, expected a "
                f"tensor that does not (pass {name}.detach())"
            )
    names = ", ".join(needing)
    if "out" in tensors:
        raise UnsupportedError(
            f"out is given where {names} requires grad, expected "
            "no out: a tensor that is written in place takes no part in "
            "autograd (leave out away, or call this under torch.no_grad())"
        )
    return WithoutGradients.apply(call, names, *needing.values())


def _raise(dout: Any, inputs: Any, names: str) -> Any:
    raise UnsupportedError(
        f"attention over caches has no gradients, but {names} require grad "
        "and the backward pass came to its out: expected a loss that does "
        "not depend on it (call forward_kvcache, or flash-attn's functions "
        "of caches and pages, under torch.no_grad())"
    )


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("no_gradients", _raise, _device)


@torch.library.register_fake("cuflash::no_gradients", lib=LIBRARY)
def _(dout: Any, inputs: Any, names: str) -> Any:
    return [torch.empty_like(x) for x in inputs]
