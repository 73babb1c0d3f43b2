"""The operators of readouts with score_mod or mask_mod, and of gradients.

They take what those of `readout_ops` do, and what those of `function_ops` do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from cuflash.request.readout import COTANGENTS, READOUTS

from . import readout_ops
from .function_ops import FUNCTIONS
from .functions import Functions
from .ops import LIBRARY, OPERATORS
from .readout_ops import GRADIENTS, POSITIONAL, inputs_of

# The numbers and the graphs of functions.
Program = tuple[Any, str]

for _name, _cotangent in COTANGENTS.items():
    _inputs = (
        f"Tensor q, Tensor k, Tensor lse, {FUNCTIONS}, {readout_ops.SCHEMA}"
    )
    LIBRARY.define(f"function_{_name}({_inputs}) -> Tensor")
    LIBRARY.define(
        f"function_{_name}_backward(Tensor {_cotangent}, {_inputs}, "
        "bool return_drow_weights=False, int[] of_read=[]) -> "
        f"({GRADIENTS}, Tensor[] dread)"
    )


def call(
    name: str,
    tensors: Sequence[Any],
    numbers: dict[str, Any],
    program: Program | None,
) -> Any:
    """Call the operator of a readout, or of its gradients.

    Parameters
    ----------
    name : str
    tensors : sequence of Tensor or None
        Those of the operator without functions, then what functions read.
    numbers : dict
    program : tuple or None
        None: there are no functions.

    Returns
    -------
    Tensor, or tuple
        A tuple of gradients; the last are those of `of_read`.
    """
    if program is None:
        return getattr(OPERATORS, name)(*tensors, **numbers)
    first, others, read = parted(name, tensors)
    found = getattr(OPERATORS, f"function_{name}")(
        *first, read, *program, *others, **numbers
    )
    return found if name in READOUTS else (*found[:-1], *found[-1])


def parted(
    name: str, tensors: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], list[Any]]:
    """A call's tensors: inputs, those that it may lack, what is read."""
    count = len(inputs_of(name))
    end = count + len(POSITIONAL)
    return tensors[:count], tensors[count:end], [*tensors[end:]]


def places_of(program: Program, read: Sequence[Any]) -> list[int]:
    """The places of what has gradients."""
    functions = Functions.of_program(read, *program)
    names = [*functions.arrays]
    return [names.index(x) for x in functions.graphs.moved]


# Kernels ---------------------------------------------------------------------


def _run(
    name: str, *tensors: Any, of_read: Sequence[int] = (), **numbers: Any
) -> Any:
    count = len(inputs_of(name))
    own = Functions.of_program(*tensors[count : count + 3])
    tensors = *tensors[:count], *tensors[count + 3 :]
    found = readout_ops.run(name, tensors, numbers, own, of_read)
    return found if name in READOUTS else (*found[:4], [*found[4:]])


def _fake(
    name: str, q: Any, k: Any, lse: Any, *rest: Any, **numbers: Any
) -> Any:
    return readout_ops.fake(name, q, k, lse, *rest[3:], **numbers)


def _fake_backward(
    *tensors: Any, of_read: Sequence[int] = (), **numbers: Any
) -> Any:
    first, read, others = tensors[:4], tensors[4], tensors[7:]
    found = readout_ops.fake_backward(*first, *others, **numbers)
    return *found, [read[i].new_empty(read[i].shape) for i in of_read]


for _name in READOUTS:
    for _each, _fake_kernel in (
        (_name, functools.partial(_fake, _name)),
        (f"{_name}_backward", _fake_backward),
    ):
        for _device in ("CPU", "CUDA"):
            LIBRARY.impl(
                f"function_{_each}", functools.partial(_run, _each), _device
            )
        torch.library.register_fake(
            f"cuflash::function_{_each}", _fake_kernel, lib=LIBRARY
        )
