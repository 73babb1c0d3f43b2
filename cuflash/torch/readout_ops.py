"""The operators of `weights`, `weight_sums`, `entropy` and their gradients.

All calls go by these: eager ones too, whose host time is not that of a call
in each layer. Gradients have none of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from cuflash.api import lse_of_call
from cuflash.api import readout as api_readout
from cuflash.api import readout_gradients as api_gradients
from cuflash.api.arrays import open_arrays
from cuflash.errors import UnsupportedError
from cuflash.launch.runner import Kernels
from cuflash.request.mod_tangents import gradients_of
from cuflash.request.problem import Call, strip, strip_lse
from cuflash.request.readout import COTANGENTS, READOUTS, cotangent_of
from cuflash.request.traced import slot
from cuflash.request.validate import chosen
from cuflash.request.validate import readouts as validate

from . import ops, request
from .dtypes import NUMPY
from .functions import Functions, named_at
from .ops import LIBRARY

# Tensors after q, k and lse, in the schemas' order.
CHOICES = "queries", "keys", "heads"
POSITIONAL = ("row_weights", *CHOICES, *ops.TENSORS)
_TENSORS = ", ".join(f"Tensor? {name}=None" for name in POSITIONAL)
_NUMBERS = (
    "*, float? scale=None, bool causal=False, SymInt? block_q=None, "
    "SymInt? block_k=None, str? precision=None, bool deterministic=False, "
    "ScalarType? dtype=None, str reduce='sum', "
    f"{', '.join(map(ops.in_schema, ops.NUMBERS))}"
)
SCHEMA = f"{_TENSORS}, {_NUMBERS}"
GRADIENTS = "Tensor dq, Tensor dk, Tensor dlse, Tensor drow_weights"

for _name, _cotangent in COTANGENTS.items():
    _inputs = f"Tensor q, Tensor k, Tensor lse, {SCHEMA}"
    LIBRARY.define(f"{_name}({_inputs}) -> Tensor")
    LIBRARY.define(
        f"{_name}_backward(Tensor {_cotangent}, {_inputs}, "
        f"bool return_drow_weights=False) -> ({GRADIENTS})"
    )


def named(tensors: Any) -> dict[str, Any]:
    """The tensors of an operator after q, k and lse that there are."""
    given = zip(POSITIONAL, tensors, strict=False)
    return {name: x for name, x in given if x is not None}


def inputs_of(name: str) -> tuple[str, ...]:
    """The first tensors of an operator, which it always has."""
    inputs = "q", "k", "lse"
    return inputs if name in READOUTS else (cotangent_of(name), *inputs)


# Kernels -----------------------------------------------------------------


def _run(name: str, *tensors: Any, **numbers: Any) -> Any:
    """The kernel of a readout, or of its gradients."""
    return run(name, tensors, numbers)


def run(
    name: str,
    tensors: Sequence[Any],
    numbers: dict[str, Any],
    functions: Functions | None = None,
    of_read: Sequence[int] = (),
) -> Any:
    """The result, or gradients: four, then those of what functions read.

    Parameters
    ----------
    name : str
        Of a readout, or of its gradients.
    tensors, numbers
        The operator's arguments.
    functions : Functions or None
    of_read : sequence of int
        The places of the arrays whose gradients are wanted.
    """
    inputs = inputs_of(name)
    given = dict(zip(inputs, tensors, strict=False))
    others = named(tensors[len(inputs) :])
    options = {x: others.pop(x) for x in ops.TENSORS if x in others}
    asked = ops.request((), {**numbers, **options}, functions)
    own = (*asked.common, *_own_numbers(name, numbers))
    if of_read:
        own = (*own, *gradients_of([*map(named_at, of_read)]))
    backend = request.backend_of(given["q"])
    if backend is None:
        module = api_gradients if "_back" in name else api_readout
        run = getattr(module, name)
        found = asked.on_cpu(run, {**given, **others}, asked.tensors, own)
        return _of_schema(found, name, given["q"], numbers)
    if "queries" in others and name.startswith("weight_sums"):
        queries = others.pop("queries")
        others["chosen"] = _flags(queries, given["q"])
    call = asked.call(
        validate.by_name(name), given, {**asked.tensors, **others}, own
    )
    if request.reads_values():
        _check_values(name, call, own, asked.scalars, functions)
    kernels = Kernels(backend)
    if not name.endswith("_backward"):
        result = kernels.readout(call)
        if name == "weights":
            return result[(0,) * (4 - call.rank)]
        return strip_lse(result, call.rank)
    dq, dk, dlse, *rest = kernels.readout_backward(call)
    rank = call.rank
    found = strip(dq, rank), strip(dk, rank), strip_lse(dlse, rank), *rest
    return _of_schema(found, name, dq, numbers)


def _own_numbers(name: str, numbers: dict[str, Any]) -> tuple[Any, ...]:
    """Names and values that not all calls have, alternating."""
    own: tuple[Any, ...] = ()
    if name == "weights" and numbers.get("dtype") is not None:
        own = "dtype", NUMPY[numbers["dtype"]].name
    if name.startswith("weight_sums"):
        own = "reduce", numbers.get("reduce", "sum")
    if name.endswith("_backward"):
        own = (*own, "deterministic", numbers.get("deterministic", False))
    if numbers.get("return_drow_weights"):
        own = (*own, "return_drow_weights", True)
    return own


def _of_schema(
    found: tuple[Any, ...], name: str, like: Any, numbers: dict[str, Any]
) -> Any:
    """Results as the schema has them."""
    if not name.endswith("_backward"):
        return found[0]
    if numbers.get("return_drow_weights"):
        return found
    return *found[:3], like.new_empty(0), *found[3:]


def _flags(queries: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Which queries count; an index out of range is no query."""
    if queries.dtype is torch.bool or queries.is_floating_point():
        return queries  # which `validate` refuses
    length = chosen.length_of("queries", {"q": q})
    if request.reads_values():
        values = queries.cpu().numpy()
        chosen.check({"queries": values}, {"q": q})
    x = queries.long()
    x = torch.where(x < 0, x + length, x)
    x = torch.where((x >= 0) & (x < length), x, length)
    flags = x.new_zeros((*x.shape[:-1], length + 1), dtype=torch.bool)
    return flags.scatter(-1, x, True)[..., :length]


def _check_values(
    name: str,
    call: Call,
    own: tuple[Any, ...],
    scalars: tuple[Any, ...],
    functions: Functions | None,
) -> None:
    """With CUFLASH_CHECK=1: indices, and whether lse is of these scores."""
    arrays = {**call.given, **call.options}
    values = {x: arrays[x].cpu().numpy() for x in CHOICES if x in arrays}
    chosen.check(values, call.given)
    detached = {x: y.detach() for x, y in arrays.items()}
    _, theirs = open_arrays(name, detached)
    asked = dict(zip(own[::2], own[1::2], strict=True))
    options = dict(zip(scalars[::2], scalars[1::2], strict=True))
    options |= {x: theirs[x] for x in ops.TENSORS if x in theirs}
    if functions is not None:
        places = enumerate(functions.arrays)
        options |= functions.as_options(
            {n: theirs[slot(i)] for i, n in places}
        )
    lse_of_call.check(
        Call(call.signature, {x: theirs[x] for x in call.given}, None, {
            x: theirs[x] for x in call.options
        }),
        {x: asked[x] for x in ("scale", "causal", "precision")},
        options,
    )  # fmt: skip


# Second derivatives -------------------------------------------------------


def no_second(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"second derivatives of cuflash.torch.{name} are not supported: call "
        "backward() or torch.autograd.grad() without create_graph"
    )


def raise_no_second(name: str, ctx: Any, *_: Any) -> NoReturn:
    """The autograd of an operator of gradients."""
    raise no_second(name)


# Results without numbers ---------------------------------------------------


def fake(
    name: str, q: Any, k: Any, lse: Any, *rest: Any, **numbers: Any
) -> Any:
    if name == "entropy":
        return lse.new_empty(lse.shape)
    num_keys = k.shape[0] if k.ndim == 2 else k.shape[-3]
    if name == "weight_sums":
        return lse.new_empty((*lse.shape[:-1], num_keys))
    others = named(rest)
    rows = (
        others["queries"].shape[-1] if "queries" in others else lse.shape[-1]
    )
    if "keys" in others:
        num_keys = others["keys"].shape[0]
    heads = lse.shape[-2:-1]
    if "heads" in others and len(heads):
        heads = others["heads"].shape
    shape = (*lse.shape[:-2], *heads, rows, num_keys)
    return lse.new_empty(shape, dtype=numbers.get("dtype") or lse.dtype)


def fake_backward(*tensors: Any, **numbers: Any) -> Any:
    _, q, k, lse, *rest = tensors
    found = [x.new_empty(x.shape) for x in (q, k, lse)]
    rows = q.new_empty(0)
    if numbers.get("return_drow_weights"):
        rows = rest[0].new_empty(rest[0].shape)
    return *found, rows


for _name in READOUTS:
    for _each, _fake_kernel in (
        (_name, functools.partial(fake, _name)),
        (f"{_name}_backward", fake_backward),
    ):
        for _device in ("CPU", "CUDA"):
            LIBRARY.impl(_each, functools.partial(_run, _each), _device)
        torch.library.register_fake(
            f"cuflash::{_each}", _fake_kernel, lib=LIBRARY
        )
