"""From a checked call to launches: outputs, aligned copies, arguments.

What a call needs of its arrays' library and of a device is a `Machine`:
`launch` has CuPy's, the emulator NumPy's.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from cuflash.arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardWgmmaArguments,
    MergeArguments,
)
from cuflash.plan import Device, Family, Plan, plan
from cuflash.problem import Call, Problem


class Machine(Protocol):
    """Where the kernels of a call run."""

    def device(self) -> Device:
        """The device as plans see it."""

    def family(self) -> Family | None:
        """The kernel family that is asked for."""

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A new array in C order, aligned as CUDA's allocator does it."""

    def contiguous(self, array: Any) -> Any:
        """The array, or a copy in C order where it is not."""

    def aligned(self, array: Any, alignment: int) -> bool:
        """Whether the first element is at a multiple of so many bytes."""

    def address(self, array: Any, written: bool = False) -> int:
        """Where kernels find the first element; whether they write to it."""

    def tensor_map(self, array: Any, rows: int) -> np.ndarray:
        """A TensorMap for boxes of 64 columns and so many tokens."""

    def launch(self, decided: Plan, arguments: np.ndarray) -> None:
        """Run the kernels of a plan, in order, with one argument struct."""


# ---- The calls ----


def forward(call: Call, machine: Machine) -> tuple[Any, Any]:
    """Run a forward call: out in full rank and, if wanted, lse."""
    p = call.problem
    dtype = call.arrays["q"].dtype
    shape = _heads(p, p.seqlen_q, p.num_heads_q, p.head_dim_v)
    out = call.out if call.out is not None else machine.empty(shape, dtype)
    lse = None
    if call.return_lse:
        lse = machine.empty((p.batch, p.num_heads_q, p.seqlen_q), p.lse_dtype)
    if math.prod(shape[:3]):
        decided = plan(p, machine.device(), machine.family())
        by_tma = decided.family == "wgmma"
        q, k, v = (_readable(call.arrays[x], machine, by_tma) for x in "qkv")
        target = out
        if out.size and not _in_place(
            out, 16 if by_tma else out.itemsize, machine, by_tma
        ):
            target = _room(out, machine)
        read, written = _addresses(machine)
        arguments = (
            read(q), read(k), read(v), written(target),
            0 if lse is None else written(lse),
            _strides(q), _strides(k), _strides(v), _strides(target),
            _shape_arguments(p), (decided.heads_per_section,), p.scale,
        )  # fmt: skip
        if by_tma:
            boxes = ((q, decided.tile.block_q), (k, decided.tile.block_k),
                     (v, decided.tile.block_k), (target, 16))  # fmt: skip
            maps = (machine.tensor_map(array, rows) for array, rows in boxes)
            machine.launch(
                decided, np.array(
                    (*maps, arguments, decided.deal), ForwardWgmmaArguments
                ),
            )
        else:
            machine.launch(decided, np.array(arguments, ForwardArguments))
        if target is not out:
            out[...] = target
    return out, lse


def backward(call: Call, machine: Machine) -> tuple[Any, Any, Any]:
    """Run a backward call: dq, dk, dv in full rank."""
    p = call.problem
    dtype = call.arrays["q"].dtype
    of_queries = (p.seqlen_q, p.num_heads_q)
    of_keys = (p.seqlen_k, p.num_heads_kv)
    dq = machine.empty(_heads(p, *of_queries, p.head_dim), dtype)
    dk = machine.empty(_heads(p, *of_keys, p.head_dim), dtype)
    dv = machine.empty(_heads(p, *of_keys, p.head_dim_v), dtype)
    if not (dq.size and dk.size):  # no pair of a query and a key
        for gradient in (dq, dk, dv):
            gradient.fill(0)
        return dq, dk, dv
    decided = plan(p, machine.device(), machine.family())
    dout, q, k, v, out = (
        _readable(call.arrays[x], machine)
        for x in ("dout", "q", "k", "v", "out")
    )
    lse = machine.contiguous(call.arrays["lse"])
    delta = machine.empty(lse.shape, lse.dtype)
    sums = machine.empty(decided.sum_elements, np.float32)
    turns = machine.empty(decided.num_turns, np.int32)
    read, written = _addresses(machine)
    machine.launch(decided, np.array((
        read(dout), read(q), read(k), read(v), read(out), read(lse),
        written(delta), written(sums),
        written(turns) if decided.num_turns else 0,
        written(dq), written(dk), written(dv),
        _strides(dout), _strides(q), _strides(k), _strides(v),
        _strides(out), _strides(dq), _strides(dk), _strides(dv),
        _shape_arguments(p), (decided.heads_per_section,), p.scale,
    ), BackwardArguments))
    return dq, dk, dv


def merge_states(call: Call, machine: Machine) -> tuple[Any, Any]:
    """Run a merge_states call: out and lse in full rank."""
    p = call.problem
    out_a, lse_a, out_b, lse_b = (
        machine.contiguous(call.arrays[x])
        for x in ("out_a", "lse_a", "out_b", "lse_b")
    )
    out = machine.empty(out_a.shape, out_a.dtype)
    lse = machine.empty(lse_a.shape, lse_a.dtype)
    if lse.size:
        read, written = _addresses(machine)
        machine.launch(plan(p, machine.device(), machine.family()), np.array((
            read(out_a), read(lse_a), read(out_b), read(lse_b),
            written(out), written(lse),
            p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v,
        ), MergeArguments))
    return out, lse


# ---- Arrays ----


def _addresses(machine: Machine) -> tuple:
    """`machine.address` for what is read, and for what is written."""
    return machine.address, lambda array: machine.address(array, written=True)


def _in_place(
    array: Any, alignment: int, machine: Machine, by_tma: bool = False
) -> bool:
    """Whether a kernel can read rows of `alignment` bytes where they are.

    The TMA unit has no strides of 0 or less.
    """
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    if not array.dtype.isnative:
        return False
    sizes = zip(array.strides[:-1], array.shape[:-1], strict=True)
    moves = [stride for stride, length in sizes if length > 1]
    if by_tma and not all(stride > 0 for stride in moves):
        return False
    return machine.aligned(array, alignment) and not any(
        stride % alignment for stride in moves
    )


def _room(array: Any, machine: Machine) -> Any:
    """An array like this one with rows at multiples of 16 bytes."""
    step = 16 // array.itemsize
    width = -(-array.shape[-1] // step) * step
    room = machine.empty((*array.shape[:-1], width), array.dtype)
    return room[..., : array.shape[-1]]


def _readable(array: Any, machine: Machine, by_tma: bool = False) -> Any:
    """The array, or a copy with aligned rows where it has none."""
    # Rows of 16-bit elements are read 16 bytes at a time.
    alignment = 16 if array.itemsize == 2 else array.itemsize
    if array.size == 0 or _in_place(array, alignment, machine, by_tma):
        return array
    copy = _room(array, machine)
    copy[...] = array
    return copy


def _strides(array: Any) -> tuple[int, int, int]:
    """(batch, token, head) strides of a 4-D array, in elements.

    0 for an axis of one, whose stride may be anything: kernels form the
    addresses of rows past the end too, which have to be aligned.
    """
    sizes = zip(array.strides[:-1], array.shape[:-1], strict=True)
    batch, token, head = (
        stride // array.itemsize if length > 1 else 0
        for stride, length in sizes
    )
    return batch, token, head


def tensor_strides(array: Any) -> tuple[int, int, int]:
    """(token, head, batch) strides of a 4-D array in bytes, for a TensorMap.

    An axis of one element may have any stride, and here gets a legal one.
    """
    by_batch, by_token, by_head, _ = (
        stride if length > 1 else 16
        for stride, length in zip(array.strides, array.shape, strict=True)
    )
    return by_token, by_head, by_batch


def _heads(problem: Problem, seqlen: int, heads: int, d: int) -> tuple:
    return problem.batch, seqlen, heads, d


def _shape_arguments(problem: Problem) -> tuple[int, ...]:
    return (problem.batch, problem.seqlen_q, problem.seqlen_k,
            problem.num_heads_q, problem.num_heads_kv, problem.head_dim,
            problem.head_dim_v)
