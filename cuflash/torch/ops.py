"""The operators of torch.library: what compiled and traced calls run.

`attention` in eager mode calls the same code without the dispatcher, which
takes less time. An operator is opaque to torch's compilers: they see tensors
of the right shapes, by the fake kernels (`fakes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuflash.expressions.serial import dumps
from cuflash.request import options

from . import random
from .functions import Functions
from .repeated import plain_request
from .request import Request

# In the schemas' order. The gradients of the first ones are offered.
TENSORS = tuple(dict.fromkeys((*options.DIFFERENTIABLE, *options.ARRAYS)))
_POSITIONAL = (*TENSORS, "seed_drawn")
_OPTIONAL = ", ".join(f"Tensor? {name}=None" for name in TENSORS)
NUMBERS = tuple(x for x in options.UNTRACED if x not in TENSORS)


def in_schema(name: str) -> str:
    """An option that is no tensor, in a schema."""
    if name == "window":
        return "SymInt? window_left=None, SymInt? window_right=None"
    kind = "float" if "float" in options.BY_NAME[name].hint else "SymInt"
    return f"{kind}? {name}=None"


# seed_drawn, on the CPU, takes the place of seed.
_NUMBERS = (
    "Tensor? seed_drawn=None, *, float? scale=None, bool causal=False, "
    "SymInt? block_q=None, SymInt? block_k=None, str? precision=None, "
    "SymInt? num_splits=None, bool deterministic=False, "
    f"{', '.join(map(in_schema, NUMBERS))}"
)
SCHEMA = f"{_OPTIONAL}, {_NUMBERS}"
WANTED = ", ".join(f"bool return_d{x}=False" for x in options.DIFFERENTIABLE)
GRADIENTS = ", ".join(f"Tensor d{x}" for x in options.DIFFERENTIABLE)
NUM_SAVED = 7  # dout, dlse, q, k, v, out, lse

LIBRARY = torch.library.Library("cuflash", "FRAGMENT")
# dropout_seed consists of one new_seed. TorchScript would compute it once for
# all calls if it had no input.
LIBRARY.define(
    "dropout_seed(Tensor q) -> Tensor", tags=torch.Tag.nondeterministic_seeded
)
LIBRARY.define(
    "new_seed(int number, *, Device device) -> Tensor",
    tags=torch.Tag.nondeterministic_seeded,
)
LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> "
    "(Tensor out, Tensor lse)"
)
LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, "
    f"Tensor v, Tensor out, Tensor lse, {SCHEMA}, "
    f"{WANTED}) -> (Tensor dq, Tensor dk, Tensor dv, {GRADIENTS})"
)
# Calls without options: compiled code passes every argument that there is,
# and twenty more take as long as the rest of a call.
_PLAIN = "*, float? scale=None, bool causal=False, bool deterministic=False"
LIBRARY.define(
    f"plain_attention(Tensor q, Tensor k, Tensor v, {_PLAIN}) -> "
    "(Tensor out, Tensor lse)"
)
LIBRARY.define(
    "plain_attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, "
    f"Tensor v, Tensor out, Tensor lse, {_PLAIN}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)"
)
OPERATORS = torch.ops.cuflash
_NO_FUNCTIONS: tuple[Any, ...] = ([], [], dumps(()))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    given: dict[str, Any] | None,
    functions: tuple[Any, ...] | None = None,
    return_max_score: bool = False,
    **numbers: Any,
) -> Any:
    """Call the operator; `given` are the options of `attention`.

    `functions` are the arrays, the numbers and the graphs of a user's.
    """
    if functions is None and not (given or return_max_score) and (
        numbers["block_q"] is numbers["block_k"] is numbers["precision"]
        is numbers["num_splits"] is None
    ):  # fmt: skip
        plain = {x: numbers[x] for x in ("scale", "causal", "deterministic")}
        out, lse = OPERATORS.plain_attention(q, k, v, **plain)
        return (out, lse) if return_lse else out
    tensors: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name == "window":
            numbers["window_left"], numbers["window_right"] = value
        elif name == "seed":  # int64 in a schema
            numbers["seed"] = value - 2**64 if value >= 2**63 else value
        elif name in TENSORS:
            tensors[name] = value
        else:
            numbers[name] = value
    if numbers.get("dropout") and "seed" not in numbers:
        tensors["seed_drawn"] = OPERATORS.dropout_seed(q)
    if return_max_score:
        out, lse, largest = OPERATORS.function_attention_max(
            q, k, v, *(functions or _NO_FUNCTIONS), **tensors, **numbers
        )
        return (out, lse, largest) if return_lse else (out, largest)
    if functions is not None:
        out, lse = OPERATORS.function_attention(
            q, k, v, *functions, **tensors, **numbers
        )
        return (out, lse) if return_lse else out
    out, lse = OPERATORS.attention(q, k, v, **tensors, **numbers)
    return (out, lse) if return_lse else out


# Kernels -----------------------------------------------------------------


def request(
    tensors: tuple[Any, ...],
    numbers: dict[str, Any],
    functions: Functions | None = None,
    return_max_score: bool = False,
) -> Request:
    """The request of an operator's arguments after q, k and v or lse."""
    # Trailing arguments may be missing, or given by name.
    numbers = {**numbers, **dict(zip(_POSITIONAL, tensors, strict=False))}
    given = {
        name: numbers[name]
        for name in (*TENSORS, *NUMBERS)
        if numbers.get(name) is not None
    }
    left, right = numbers.get("window_left"), numbers.get("window_right")
    if left is not None or right is not None:
        given["window"] = (left, right)
    if numbers.get("seed_drawn") is not None:
        given["seed"] = int(numbers["seed_drawn"])
    if "seed" in given:
        given["seed"] %= 2**64
    return Request(
        numbers.get("scale"),
        numbers.get("causal", False),
        numbers.get("block_q"),
        numbers.get("block_k"),
        numbers.get("precision"),
        numbers.get("num_splits"),
        numbers.get("deterministic", False),
        given,
        functions,
        return_max_score=return_max_score,
    )


def run(q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any) -> Any:
    """The kernel of attention."""
    return request(tensors, numbers).forward(q, k, v, True)


def run_backward(*tensors: Any, **numbers: Any) -> Any:
    """The kernel of attention_backward."""
    asked = request(tensors[NUM_SAVED:], numbers)
    wanted = tuple(
        x for x in options.DIFFERENTIABLE if numbers.get(f"return_d{x}")
    )
    gradients = asked.backward(asked.tensors, wanted, *tensors[:NUM_SAVED])
    dq = gradients[0]
    return tuple(dq.new_empty(0) if x is None else x for x in gradients)


def run_plain(q: Any, k: Any, v: Any, **numbers: Any) -> Any:
    """The kernel of plain_attention."""
    return plain_request(**numbers).forward(q, k, v, True)


def run_plain_backward(*tensors: Any, **numbers: Any) -> Any:
    """The kernel of plain_attention_backward."""
    return plain_request(**numbers).backward({}, (), *tensors)[:3]


KERNELS: dict[str, Callable[..., Any]] = {
    "attention": run,
    "attention_backward": run_backward,
    "plain_attention": run_plain,
    "plain_attention_backward": run_plain_backward,
}
for _name, _kernel in KERNELS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
LIBRARY.impl("new_seed", random.new_seed, "CompositeExplicitAutograd")
LIBRARY.impl("dropout_seed", random.dropout_seed, "CompositeImplicitAutograd")
