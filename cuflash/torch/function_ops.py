"""The operators of calls with score_mod or mask_mod, and their gradients.

One returns the largest scores too, also of calls without functions. Beside
tensors they take the functions' graphs as text (`serial`): a compiled program
keeps all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cuflash.errors import UnsupportedError
from cuflash.request import options

from . import ops
from .fakes import fake_forward
from .functions import Functions, named_at
from .op_gradients import NO_SECOND_DERIVATIVES
from .ops import GRADIENTS, LIBRARY, NUM_SAVED, SCHEMA, WANTED
from .request import Request
from .tracing import refuse_tangents

FUNCTIONS = "Tensor[] read, Scalar[] values, str graphs"
_NAME, _BACKWARD = "function_attention", "function_attention_backward"
_MAX = "function_attention_max"

_INPUTS = f"Tensor q, Tensor k, Tensor v, {FUNCTIONS}, {SCHEMA}"
LIBRARY.define(f"{_NAME}({_INPUTS}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"{_MAX}({_INPUTS}) -> (Tensor out, Tensor lse, Tensor max_score)"
)
# `of_read`: whose gradients are wanted, by their places.
LIBRARY.define(
    f"{_BACKWARD}(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {FUNCTIONS}, {SCHEMA}, {WANTED}, "
    "int[] of_read=[]) -> (Tensor dq, Tensor dk, Tensor dv, "
    f"{GRADIENTS}, Tensor[] dread)"
)


def _request(
    read: Any, values: Any, graphs: str, tensors: Any, numbers: dict[str, Any],
    return_max_score: bool = False,
) -> Request:  # fmt: skip
    """The request of an operator's arguments after q, k and v or lse."""
    own = Functions.of_program(read, values, graphs)
    return ops.request(tensors, numbers, own, return_max_score)


def _run(
    name: str, q: Any, k: Any, v: Any, read: Any, values: Any, graphs: str,
    *tensors: Any, **numbers: Any,
) -> Any:  # fmt: skip
    asked = _request(read, values, graphs, tensors, numbers, name == _MAX)
    return asked.forward(q, k, v, True)


def _run_backward(*tensors: Any, of_read: Any = (), **numbers: Any) -> Any:
    saved, others = tensors[:NUM_SAVED], tensors[NUM_SAVED:]
    asked = _request(others[0], others[1], others[2], others[3:], numbers)
    of_options = tuple(
        x for x in options.DIFFERENTIABLE if numbers.get(f"return_d{x}")
    )
    names = [*map(named_at, of_read)]
    wanted = (*of_options, *names)
    found = asked.backward(asked.tensors, wanted, *saved)
    by_name = dict(zip(asked.moved, found[3:], strict=True))
    dq = found[0]
    gradients = (by_name.get(x) for x in options.DIFFERENTIABLE)
    return (
        *found[:3], *(dq.new_empty(0) if x is None else x for x in gradients),
        [by_name[x] for x in names],
    )  # fmt: skip


def _fake(name: str, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    out, lse = fake_forward(q, v)
    return (out, lse, lse.new_empty(lse.shape)) if name == _MAX else (out, lse)


def _fake_backward(*tensors: Any, of_read: Any = (), **numbers: Any) -> Any:
    q, k, v = tensors[2:5]
    read = tensors[NUM_SAVED]
    others = zip(ops.TENSORS, tensors[NUM_SAVED + 3 :], strict=False)
    given = {**numbers, **dict(others)}
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        *(
            given[x].new_empty(given[x].shape)
            if given.get(f"return_d{x}")
            else q.new_empty(0)
            for x in options.DIFFERENTIABLE
        ),
        [read[i].new_empty(read[i].shape) for i in of_read],
    )


class _Traced(torch.autograd.Function):
    """out and lse, and their gradients by the other operator.

    And max_score, of the operator that has it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        values: Any,
        graphs: str,
        numbers: Any,
        count: int,
        *each: Any,
    ) -> Any:
        q, k, v, *others = each
        read, tensors = others[:count], others[count:]
        out, lse, *more = _below(name, q, k, v, read, values, graphs, *tensors,
                                 **numbers)  # fmt: skip
        ctx.mark_non_differentiable(*more)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.set_materialize_grads(False)
        ctx.asked = values, graphs, dict(numbers), count
        return out, lse, *more

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        values, graphs, numbers, count = ctx.asked
        q, k, v, out, lse, *others = ctx.saved_tensors
        numbers.pop("num_splits", None)
        needs = ctx.needs_input_grad[8:]
        of_options = dict(
            zip(options.DIFFERENTIABLE, needs[count:], strict=False)
        )
        flags = {f"return_d{x}": True for x, y in of_options.items() if y}
        places = [i for i, x in enumerate(needs[:count]) if x]
        *found, of_read = getattr(torch.ops.cuflash, _BACKWARD)(
            dout, dlse, q, k, v, out, lse, others[:count], values, graphs,
            *others[count:], **numbers, **flags, of_read=places,
        )  # fmt: skip
        by_place = dict(zip(places, of_read, strict=True))
        of_tensors = [
            x if f"return_d{name}" in flags else None
            for name, x in zip(options.DIFFERENTIABLE, found[3:], strict=True)
        ]
        rest = [None] * len(needs)
        grads = [*map(by_place.get, range(count)), *of_tensors, *rest]
        return (None,) * 5 + (*found[:3], *grads[: len(needs)])


class _Once(torch.autograd.Function):
    """Gradients by the operator, which have none themselves."""

    @staticmethod
    def forward(
        ctx: Any, functions: Any, numbers: Any, count: int, *each: Any
    ) -> Any:
        saved, others = each[:NUM_SAVED], each[NUM_SAVED:]
        *found, of_read = _below(
            _BACKWARD, *saved, others[:count], *functions, *others[count:],
            **numbers,
        )  # fmt: skip
        return (*found, *of_read)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(NO_SECOND_DERIVATIVES)


def _autograd_of_gradients(*tensors: Any, **numbers: Any) -> Any:
    saved, read = tensors[:NUM_SAVED], tensors[NUM_SAVED]
    functions, others = tensors[NUM_SAVED + 1 :][:2], tensors[NUM_SAVED + 3 :]
    each = (*saved, *read, *others)
    refuse_tangents(each)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*each):
        found = _Once.apply(functions, numbers, len(read), *each)
        count = 3 + len(options.DIFFERENTIABLE)
        return (*found[:count], [*found[count:]])
    return _below(_BACKWARD, *tensors, **numbers)


def _below(name: str, *args: Any, **numbers: Any) -> Any:
    """Call an operator's next kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.cuflash, name).default(*args, **numbers)


def _autograd(
    name: str, q: Any, k: Any, v: Any, read: Any, values: Any, graphs: str,
    *tensors: Any, **numbers: Any,
) -> Any:  # fmt: skip
    each = (q, k, v, *read, *tensors)
    refuse_tangents(each)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*each):
        return _Traced.apply(name, values, graphs, numbers, len(read), *each)
    return _below(name, q, k, v, read, values, graphs, *tensors, **numbers)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    _NAME: (partial(_run, _NAME), partial(_fake, _NAME)),
    _MAX: (partial(_run, _MAX), partial(_fake, _MAX)),
    _BACKWARD: (_run_backward, _fake_backward),
}
for _name, (_kernel, _fake_kernel) in _KERNELS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cuflash::{_name}", _fake_kernel, lib=LIBRARY)
for _name in (_NAME, _MAX):
    LIBRARY.impl(_name, partial(_autograd, _name), "Autograd")
LIBRARY.impl(_BACKWARD, _autograd_of_gradients, "Autograd")
