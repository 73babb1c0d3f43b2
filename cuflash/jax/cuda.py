"""The lowerings for CUDA: XLA calls Python, which launches on its stream.

At lowering, the call is planned, its kernels are loaded and recorded, and
XLA is told what to allocate. At run time, a callback fills in addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from cuflash.backends.base import Backend
from cuflash.launch.runner import Kernels
from cuflash.launch.widened import in_float32
from cuflash.request import options
from cuflash.request.problem import Call
from cuflash.request.readout import READOUT_GRADIENTS, READOUTS
from cuflash.request.validate.derivatives import COTANGENTS, TANGENTS

from .abstract import Abstract, abstract_all
from .calls import Traced
from .machine import Cuda, Machine
from .primitives import MADE_BY
from .recording import Recording, record

Run = Callable[[Call, Backend], tuple[Any, ...]]


class Program:
    """A buffer callback that runs one call.

    Parameters
    ----------
    run : callable
        As a method of `Kernels`, of a backend.
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
        return [_as_made(x) for x in self.recording.created]

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


def _as_made(array: Abstract) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


# ---- Lowering ----

_WIDE = (
    "q", "k", "v", "out", "dout", "q_dot", "k_dot", "v_dot", "ddq", "ddk",
    "ddv", "k_cache", "v_cache", "k_new", "v_new",
)  # fmt: skip
# What has the dtype of q, or may have it, with tangents and cotangents.
_OF_DTYPE = {*_WIDE, "dweights"} | {
    name
    for row in options.TABLE
    if row.array is not None and "q" in row.array.dtypes
    for name in (row.name, TANGENTS[row.name], COTANGENTS[row.name])
}


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


def _in_float32(call: Call, machine: Machine) -> bool:
    """Whether kernels take a call's arrays as float32."""
    target = machine.backend(machine.first_device()).target
    return in_float32(call.signature, target, target.family) is not None


def _call_buffers(
    run: Run, call: Traced, given: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """The results of a call on traced arrays, by name; they are padded."""
    given = {name: _readable(name, x) for name, x in given.items()}
    if "alibi_slopes" in given:  # kernels read the dtype of lse
        wide = given["q"].dtype == jnp.float64
        slopes = given["alibi_slopes"]
        given["alibi_slopes"] = slopes.astype("float64" if wide else "float32")
    types = abstract_all(given)
    checked = call.check(types)
    if _in_float32(checked, machine):  # results are converted by XLA, too
        given = {
            name: x.astype(jnp.float32) if name in _OF_DTYPE else x
            for name, x in given.items()
        }
        types = abstract_all(given)
        # Of weights: those of float32 are converted like other results.
        others = {x: y for x, y in call.arguments.items() if x != "dtype"}
        checked = call._replace(arguments=others).check(types)
    program = Program(run, checked, types, machine)
    updated = [types[x] for x in call.updated]
    created = buffer_callback(
        program,
        program.types + [_as_made(x) for x in updated],
        input_output_aliases={
            x.slot: len(program.types) + i for i, x in enumerate(updated)
        },
        command_buffer_compatible=program.reads_nothing,
    )(*given.values())
    found = dict(zip(call.returned, program.results(created), strict=True))
    last = created[len(created) - len(updated) :]
    return found | dict(zip(call.updated, last, strict=True))


def _run(direction: str, call: Call, backend: Backend) -> tuple[Any, ...]:
    kernels = Kernels(backend)
    if direction in READOUTS:
        return (kernels.readout(call),)
    if direction in READOUT_GRADIENTS:
        return kernels.readout_backward(call)
    found: tuple[Any, ...] = getattr(kernels, direction)(call)
    return found


def _results(
    *operands: Any, call: Traced, avals: Sequence[Any], machine: Machine
) -> list[Any]:
    """A primitive's results, without padded columns.

    And without batch, where sequences are packed.
    """
    given = call.named(operands)
    # Of unpadded arrays.
    call.arguments.setdefault("scale", given["q"].shape[-1] ** -0.5)
    run = functools.partial(_run, call.validate.__name__)
    found = _call_buffers(run, call, given, machine)
    return [
        found[name][..., : x.shape[-1]].reshape(x.shape).astype(x.dtype)
        for name, x in zip(call.results, avals, strict=True)
    ]


def lowering(
    traced: Callable[..., Traced], machine: Machine
) -> mlir.LoweringRule:
    """The lowering of a primitive that makes a call."""

    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        results = functools.partial(
            _results,
            call=traced(**params),
            avals=context.avals_out,
            machine=machine,
        )
        return mlir.lower_fun(results, multiple_results=True)(
            context, *operands
        )

    return rule


def register(machine: Machine, platform: str) -> None:
    """Lower attention for the calls of a platform to run on a machine."""
    for primitive, traced in MADE_BY:
        mlir.register_lowering(
            primitive, lowering(traced, machine), platform=platform
        )


register(Cuda(), "cuda")
