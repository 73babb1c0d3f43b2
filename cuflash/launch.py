"""Runs planned kernels on CuPy arrays: inputs, outputs, launches.

Every call is queued on CuPy's current stream and reads nothing back.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from cuflash import compiler
from cuflash.arguments import (
    BackwardArguments,
    ForwardArguments,
    MergeArguments,
)
from cuflash.errors import UnsupportedError
from cuflash.plan import Device, Plan, plan
from cuflash.problem import Call, Problem

# ---- Arrays ----


def to_cupy(array: Any) -> cupy.ndarray:
    """Any array on a CUDA device as CuPy's, sharing its memory."""
    if isinstance(array, cupy.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)
    return cupy.asarray(array)


def _in_place(array: cupy.ndarray, alignment: int) -> bool:
    """Whether a kernel can read rows of `alignment` bytes where they are."""
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    sizes = zip(array.strides[:-1], array.shape[:-1], strict=True)
    moves = [stride for stride, length in sizes if length > 1]
    return not any(x % alignment for x in (array.data.ptr, *moves))


def _readable(array: cupy.ndarray, alignment: int) -> cupy.ndarray:
    """The array, or a copy with aligned rows where it has none."""
    if array.size == 0 or _in_place(array, alignment):
        return array
    step = max(alignment // array.itemsize, 1)
    width = -(-array.shape[-1] // step) * step
    room = cupy.empty((*array.shape[:-1], width), array.dtype)
    copy = room[..., : array.shape[-1]]
    copy[...] = array
    return copy


def _strides(array: cupy.ndarray) -> tuple[int, int, int]:
    """(batch, token, head) strides of a 4-D array, in elements."""
    batch, token, head, _ = (s // array.itemsize for s in array.strides)
    return batch, token, head


def _alignment(problem: Problem) -> int:
    """Bytes to which the kernels need rows aligned: a cp.async of 16."""
    return 16 if problem.dtype in ("float16", "bfloat16") else 1


def _heads(problem: Problem, seqlen: int, heads: int, d: int) -> tuple:
    return problem.batch, seqlen, heads, d


# ---- Launches ----


@functools.cache
def device(index: int) -> Device:
    """The CUDA device `index` as plans see it."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    capability = 10 * properties["major"] + properties["minor"]
    if capability < 75:
        raise UnsupportedError(
            f"CUDA device {index} has compute capability {capability / 10};"
            " cuflash's kernels run from 7.5 (float32, float64) and 8.0"
            " (float16, bfloat16) on"
        )
    return Device(
        arch="sm_90a" if capability == 90 else f"sm_{capability}",
        num_sms=properties["multiProcessorCount"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
    )


@functools.lru_cache(maxsize=4096)
def _loaded(
    decided: Plan, index: int
) -> tuple[tuple[Any, int, int, int], ...]:
    """(function, blocks, threads, shared bytes) of each launch of a plan."""
    return tuple(
        (compiler.function(x.kernel, device(index)), x.blocks,
         x.kernel.threads, x.kernel.shared_bytes)
        for x in decided.launches
    )


def _launch(decided: Plan, index: int, arguments: np.ndarray) -> None:
    for function, blocks, threads, shared in _loaded(decided, index):
        function((blocks,), (threads,), (arguments,), shared_mem=shared)


def _shape_arguments(problem: Problem) -> tuple[int, ...]:
    return (problem.batch, problem.seqlen_q, problem.seqlen_k,
            problem.num_heads_q, problem.num_heads_kv, problem.head_dim,
            problem.head_dim_v)


def forward(call: Call) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Run a forward call: out in full rank and, if wanted, lse."""
    p = call.problem
    q = call.arrays["q"]
    with q.device:
        shape = _heads(p, p.seqlen_q, p.num_heads_q, p.head_dim_v)
        out = call.out
        if out is None or (out.size and not _in_place(out, out.itemsize)):
            out = cupy.empty(shape, q.dtype)
        lse = None
        if call.return_lse:
            lse = cupy.empty((p.batch, p.num_heads_q, p.seqlen_q), p.lse_dtype)
        if math.prod(shape[:3]):
            index = q.device.id
            decided = plan(p, device(index))
            alignment = _alignment(p)
            q, k, v = (_readable(call.arrays[x], alignment) for x in "qkv")
            _launch(decided, index, np.array((
                q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr,
                0 if lse is None else lse.data.ptr,
                _strides(q), _strides(k), _strides(v), _strides(out),
                _shape_arguments(p), (decided.heads_per_section,), p.scale,
            ), ForwardArguments))
        if call.out is not None and out is not call.out:
            call.out[...] = out
            out = call.out
    return out, lse


def backward(call: Call) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    """Run a backward call: dq, dk, dv in full rank."""
    p = call.problem
    q, dtype = call.arrays["q"], call.arrays["q"].dtype
    with q.device:
        of_queries = (p.seqlen_q, p.num_heads_q)
        of_keys = (p.seqlen_k, p.num_heads_kv)
        dq = cupy.empty(_heads(p, *of_queries, p.head_dim), dtype)
        dk = cupy.empty(_heads(p, *of_keys, p.head_dim), dtype)
        dv = cupy.empty(_heads(p, *of_keys, p.head_dim_v), dtype)
        if not (dq.size and dk.size):  # no pair of a query and a key
            for gradient in (dq, dk, dv):
                gradient.fill(0)
            return dq, dk, dv
        index = q.device.id
        decided = plan(p, device(index))
        alignment = _alignment(p)
        dout, q, k, v, out = (
            _readable(call.arrays[x], alignment)
            for x in ("dout", "q", "k", "v", "out")
        )
        lse = cupy.ascontiguousarray(call.arrays["lse"])
        delta = cupy.empty(lse.shape, lse.dtype)
        sums = cupy.empty(decided.sum_elements, np.float32)
        turns = cupy.empty(decided.num_turns, np.int32)
        _launch(decided, index, np.array((
            dout.data.ptr, q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr,
            lse.data.ptr, delta.data.ptr, sums.data.ptr,
            turns.data.ptr if decided.num_turns else 0,
            dq.data.ptr, dk.data.ptr, dv.data.ptr,
            _strides(dout), _strides(q), _strides(k), _strides(v),
            _strides(out), _strides(dq), _strides(dk), _strides(dv),
            _shape_arguments(p), (decided.heads_per_section,), p.scale,
        ), BackwardArguments))
    return dq, dk, dv


def merge_states(call: Call) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Run a merge_states call: out and lse in full rank."""
    p = call.problem
    with call.arrays["out_a"].device as current:
        out_a, lse_a, out_b, lse_b = (
            cupy.ascontiguousarray(call.arrays[x])
            for x in ("out_a", "lse_a", "out_b", "lse_b")
        )
        out, lse = cupy.empty_like(out_a), cupy.empty_like(lse_a)
        if lse.size:
            decided = plan(p, device(current.id))
            _launch(decided, current.id, np.array((
                out_a.data.ptr, lse_a.data.ptr, out_b.data.ptr,
                lse_b.data.ptr, out.data.ptr, lse.data.ptr,
                p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v,
            ), MergeArguments))
    return out, lse
