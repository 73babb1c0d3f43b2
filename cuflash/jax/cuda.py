"""The lowerings for CUDA: XLA calls Python, which launches on its stream.

At lowering, the call is planned, its kernels are loaded and recorded, and
XLA is told what to allocate. At run time, a callback fills in addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from cuflash.backends.base import Backend
from cuflash.launch import attention as execute
from cuflash.launch.runner import Kernels
from cuflash.request import options
from cuflash.request.problem import Call
from cuflash.request.vmap import Names

from .abstract import Abstract, abstract
from .calls import (
    Asked,
    backward_call,
    forward_call,
    gradient_inputs,
    gradient_names,
    second_gradients_call,
    second_inputs,
    second_names,
    tangent_call,
    tangent_inputs,
)
from .machine import Cuda, Machine
from .primitives import attention_p, gradients_p, second_gradients_p, tangent_p
from .recording import Recording, record

Run = Callable[[Call, Backend], tuple[Any, ...]]


class Program:
    """A buffer callback that runs one call.

    Parameters
    ----------
    run : callable
        `execute.forward`, `execute.backward` or a method of `Kernels`.
    call : Call
        Its arrays are `Abstract`; their slots are the operands.
    inputs : mapping of str to Abstract
        The operands, a seed among them.
    machine : Machine
    """

    def __init__(
        self,
        run: Run,
        call: Call,
        inputs: Mapping[str, Abstract],
        machine: Machine,
    ) -> None:
        self._run, self._call, self._machine = run, call, machine
        self._num_inputs = len(inputs)
        self._seed = inputs.get("seed")
        self._recordings: dict[int, Recording] = {}
        self.recording = self._record(machine.first_device())

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """What XLA allocates for a call."""
        created = self.recording.created
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in created]

    @property
    def reads_nothing(self) -> bool:
        """Whether the host reads no data: then a graph can replay a call."""
        return self._seed is None

    def results(self, created: list[Any]) -> list[Any]:
        """The call's results among the arrays that XLA allocated."""
        found = self.recording.results
        return [created[x.slot - self._num_inputs] for x in found]

    def __call__(self, context: Any, created: Any, *operands: Any) -> None:
        buffers = (*operands, *created)
        index, addresses, queue = self._machine.open(context, buffers)
        recording = self._recordings.get(index) or self._record(index)
        seed = self._call.seed
        if self._seed is not None:
            read = queue.read(addresses[self._seed.slot], self._seed.nbytes)
            signed = self._seed.dtype.kind == "i"
            seed = int.from_bytes(read, "little", signed=signed) % 2**64
        recording.replay(addresses, seed, queue)

    def _record(self, index: int) -> Recording:
        backend = self._machine.backend(index)
        made = record(self._run, self._call, self._num_inputs, backend)
        first = next(iter(self._recordings.values()), made)
        sizes = [[x.nbytes for x in each.created] for each in (first, made)]
        if sizes[0] != sizes[1]:
            raise RuntimeError(
                f"device {index} needs other workspaces than the one that "
                "the call was lowered for: use GPUs of one kind"
            )
        return self._recordings.setdefault(index, made)


# ---- Lowering ----

_WIDE = (
    "q", "k", "v", "out", "dout", "q_dot", "k_dot", "v_dot", "ddq", "ddk",
    "ddv",
)  # fmt: skip


def _readable(name: str, array: Any) -> Any:
    """An array as kernels read it: rows of multiples of 16 bytes, or int32.

    Columns of 0 change no score, and add columns of 0 to results.
    """
    if name in options.INDICES:
        return array.astype(jnp.int32)
    if name not in _WIDE:
        return array
    missing = -array.shape[-1] % (16 // array.dtype.itemsize)
    widths = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
    return jnp.pad(array, widths) if missing else array


def _call_buffers(
    run: Run,
    check: Callable[[dict[str, Abstract]], Call],
    given: dict[str, Any],
    machine: Machine,
) -> list[Any]:
    """Run a call on traced arrays; its results are padded."""
    given = {name: _readable(name, x) for name, x in given.items()}
    if "alibi_slopes" in given:  # kernels read the dtype of lse
        wide = given["q"].dtype == jnp.float64
        slopes = given["alibi_slopes"]
        given["alibi_slopes"] = slopes.astype("float64" if wide else "float32")
    types = {
        name: abstract(x, slot) for slot, (name, x) in enumerate(given.items())
    }
    program = Program(run, check(types), types, machine)
    created = buffer_callback(
        program,
        program.types,
        command_buffer_compatible=program.reads_nothing,
    )(*given.values())
    return program.results(created)


def _as(array: Any, shape: tuple[int, ...]) -> Any:
    """A result without padded columns, and without batch if it is packed."""
    return array[..., : shape[-1]].reshape(shape)


def _with_scale(asked: Asked, head_dim: int) -> Asked:
    """The arguments with the scale of unpadded arrays."""
    given = dict(asked)
    given.setdefault("scale", head_dim**-0.5)
    return tuple(given.items())


def _forward(
    *operands: Any,
    names: Names,
    asked: Asked,
    return_lse: bool,
    machine: Machine,
) -> list[Any]:
    given = dict(zip(names, operands, strict=True))
    asked = _with_scale(asked, given["q"].shape[-1])
    check = functools.partial(forward_call, asked=asked, return_lse=return_lse)
    out, *lse = _call_buffers(execute.forward, check, given, machine)
    shape = (*given["q"].shape[:-1], given["v"].shape[-1])
    return [
        _as(out, shape),
        *(_as(x, x.shape[-len(shape) + 1 :]) for x in lse),
    ]


def _backward(
    *operands: Any,
    names: Names,
    asked: Asked,
    wrt: Names,
    has_dlse: bool,
    machine: Machine,
) -> list[Any]:
    given = dict(zip(gradient_inputs(names, has_dlse), operands, strict=True))
    asked = _with_scale(asked, given["q"].shape[-1])
    check = functools.partial(backward_call, asked=asked, wrt=wrt)
    results = _call_buffers(execute.backward, check, given, machine)
    gradients = dict(zip(gradient_names(wrt), results, strict=True))
    return [
        _as(gradients[name], given[name].shape).astype(given[name].dtype)
        for name in wrt
    ]


def _tangent(
    *operands: Any,
    names: Names,
    wrt: Names,
    asked: Asked,
    return_lse: bool,
    several: bool,
    machine: Machine,
) -> list[Any]:
    given = dict(zip(tangent_inputs(names, wrt), operands, strict=True))
    lead = operands[0].shape[:several]
    shape = given.pop("out").shape
    lse = given.pop("lse")
    asked = _with_scale(asked, given["q"].shape[-1])
    check = functools.partial(tangent_call, asked=asked, return_lse=return_lse)
    results = _call_buffers(_jvp, check, given, machine)
    shapes = (*lead, *shape), (*lead, *lse.shape)
    tangents = results[1 + return_lse :]
    return [_as(x, y) for x, y in zip(tangents, shapes, strict=False)]


def _second_gradients(
    *operands: Any,
    names: Names,
    asked: Asked,
    moved: Names,
    wrt: Names,
    has_dlse: bool,
    machine: Machine,
) -> list[Any]:
    inputs = second_inputs(names, moved, has_dlse)
    given = dict(zip(inputs, operands, strict=True))
    asked = _with_scale(asked, given["q"].shape[-1])
    check = functools.partial(
        second_gradients_call, asked=asked, wrt=wrt, has_dlse=has_dlse
    )
    results = _call_buffers(_double_backward, check, given, machine)
    found = dict(zip(second_names(wrt, has_dlse), results, strict=True))
    like = {name: given[name] for name in wrt}
    like |= {x: given[x] for x in ("out", "lse")[: 1 + has_dlse]}
    return [
        _as(found[name], x.shape).astype(x.dtype) for name, x in like.items()
    ]


def _jvp(call: Call, backend: Backend) -> tuple[Any, ...]:
    return Kernels(backend).jvp(call)


def _double_backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    return Kernels(backend).double_backward(call)


def lowering(
    traced: Callable[..., list[Any]], machine: Machine
) -> mlir.LoweringRule:
    """The lowering of a primitive, to what a function of arrays computes."""

    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        call = functools.partial(traced, machine=machine, **params)
        return mlir.lower_fun(call, multiple_results=True)(context, *operands)

    return rule


def register(machine: Machine, platform: str) -> None:
    """Lower attention for the calls of a platform to run on a machine."""
    for primitive, traced in (
        (attention_p, _forward),
        (tangent_p, _tangent),
        (gradients_p, _backward),
        (second_gradients_p, _second_gradients),
    ):
        mlir.register_lowering(
            primitive, lowering(traced, machine), platform=platform
        )


register(Cuda(), "cuda")
