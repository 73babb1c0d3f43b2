"""The operators of torch.library: what compiled and traced calls run.

`attention` in eager mode calls the same code without the dispatcher, which
takes less time. An operator is opaque to torch's compilers: they see tensors
of the right shapes, by the fake kernels here.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import UnsupportedError

from .gradients import NO_SECOND_DERIVATIVES, of_inputs
from .request import Request

# In the schemas' order. The gradients of the first two are offered.
TENSORS = (
    "bias", "sink", "alibi_slopes", "mask", "segment_ids_q", "segment_ids_k",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
_TENSORS = ", ".join(f"Tensor? {name}=None" for name in TENSORS)
# seed_drawn, on the CPU, takes the place of seed.
_NUMBERS = (
    "Tensor? seed_drawn=None, *, float? scale=None, bool causal=False, "
    "SymInt? block_q=None, SymInt? block_k=None, str? precision=None, "
    "SymInt? num_splits=None, bool deterministic=False, "
    "SymInt? window_left=None, SymInt? window_right=None, "
    "float? softcap=None, float? dropout=None, SymInt? seed=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
)

LIBRARY = torch.library.Library("cuflash", "FRAGMENT")
LIBRARY.define("draw_seed() -> Tensor", tags=torch.Tag.nondeterministic_seeded)
LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_NUMBERS}) -> "
    "(Tensor out, Tensor lse)"
)
LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, "
    f"Tensor v, Tensor out, Tensor lse, {_TENSORS}, {_NUMBERS}, "
    "bool return_dbias=False, bool return_dsink=False) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    given: dict[str, Any] | None,
    **numbers: Any,
) -> Any:
    """Call the operator; `given` are the options of `attention`."""
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
        tensors["seed_drawn"] = torch.ops.cuflash.draw_seed()
    out, lse = torch.ops.cuflash.attention(q, k, v, **tensors, **numbers)
    return (out, lse) if return_lse else out


# Kernels -----------------------------------------------------------------


def _request(tensors: tuple[Any, ...], numbers: dict[str, Any]) -> Request:
    """The request of an operator's arguments after q, k and v or lse."""
    # The dispatcher drops trailing arguments that are not given.
    seed_drawn = tensors[8] if len(tensors) > 8 else None
    given = {
        name: x
        for name, x in zip(TENSORS, tensors, strict=False)
        if x is not None
    }
    left, right = numbers.get("window_left"), numbers.get("window_right")
    if left is not None or right is not None:
        given["window"] = (left, right)
    seed = numbers.get("seed")
    if seed_drawn is not None:
        seed = int(seed_drawn)
    if seed is not None:
        given["seed"] = seed % 2**64
    for name in ("softcap", "dropout", "max_seqlen_q", "max_seqlen_k"):
        if numbers.get(name) is not None:
            given[name] = numbers[name]
    return Request(
        numbers.get("scale"),
        numbers.get("causal", False),
        numbers.get("block_q"),
        numbers.get("block_k"),
        numbers.get("precision"),
        numbers.get("num_splits"),
        numbers.get("deterministic", False),
        given,
    )


def _attention(q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any) -> Any:
    return _request(tensors, numbers).forward(q, k, v, True)


def _attention_backward(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *tensors: Any,
    return_dbias: bool = False,
    return_dsink: bool = False,
    **numbers: Any,
) -> Any:
    request = _request(tensors, numbers)
    gradients = of_inputs(
        request, request.tensors, return_dbias, return_dsink,
        dout, dlse, q, k, v, out, lse,
    )  # fmt: skip
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _draw_seed() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention, _device)
    LIBRARY.impl("attention_backward", _attention_backward, _device)
LIBRARY.impl("draw_seed", _draw_seed, "CompositeExplicitAutograd")


# Fake kernels ------------------------------------------------------------


@torch.library.register_fake("cuflash::attention", lib=LIBRARY)
def _(q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any) -> Any:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    heads_first = (*q.shape[:-3], *q.shape[-2:-4:-1])
    return out, q.new_empty(heads_first, dtype=lse_dtype(q.dtype))


@torch.library.register_fake("cuflash::attention_backward", lib=LIBRARY)
def _(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    bias: Any = None,
    sink: Any = None,
    *tensors: Any,
    return_dbias: bool = False,
    return_dsink: bool = False,
    **numbers: Any,
) -> Any:
    def like(x: Any, wanted: bool = True) -> Any:
        return x.new_empty(x.shape) if wanted else q.new_empty(0)

    return (
        like(q), like(k), like(v), like(bias, return_dbias),
        like(sink, return_dsink),
    )  # fmt: skip


@torch.library.register_fake("cuflash::draw_seed", lib=LIBRARY)
def _() -> Any:
    return torch.empty((), dtype=torch.int64, device="cpu")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


# Gradients ---------------------------------------------------------------


def _setup_context(
    ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple
) -> None:
    q, k, v, *tensors = inputs
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.numbers = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Any, dlse: Any) -> Any:
    numbers = {n: x for n, x in ctx.numbers.items() if n != "num_splits"}
    # The dispatcher drops trailing arguments that are not given.
    with_dbias, with_dsink = (*ctx.needs_input_grad, False, False)[3:5]
    gradients = torch.ops.cuflash.attention_backward(
        dout, dlse, *ctx.saved_tensors, **numbers,
        return_dbias=with_dbias, return_dsink=with_dsink,
    )  # fmt: skip
    dq, dk, dv, dbias, dsink = gradients
    return (
        dq, dk, dv, dbias if with_dbias else None,
        dsink if with_dsink else None, *(None,) * 7,
    )  # fmt: skip


def _second(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(NO_SECOND_DERIVATIVES)


torch.library.register_autograd(
    "cuflash::attention", _backward, setup_context=_setup_context, lib=LIBRARY
)
torch.library.register_autograd(
    "cuflash::attention_backward", _second, lib=LIBRARY
)
