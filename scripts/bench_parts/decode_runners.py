"""Runners of decode calls, and the capture of their calls in CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy

import cuflash

from . import decode_checks, peers, reading
from .decode import PEERS, READ, DecodeCell
from .runners import OURS as OUR_RUNNER
from .runners import Inputs, to_cupy

WARM_UPS = 3  # before a capture: compile, choose algorithms, fill the pool
PAGE_SIZE = 256  # of FlashInfer's cache


class Captured(NamedTuple):
    """A graph of calls.

    Attributes
    ----------
    launch : callable
        Queues the graph on the null stream.
    results : tuple of CuPy arrays
        Of the last call; every launch overwrites them.
    kept : tuple
        Objects that own memory of the graph.
    """

    launch: Callable[[], Any]
    results: tuple
    kept: tuple


class DecodeRunner(NamedTuple):
    """An implementation to time.

    Attributes
    ----------
    name, label, prepare, context
        See `runners.Runner`.
    capture : callable
        Maps (call, number of calls) to a `Captured`.
    checker : callable
        Maps (cell, inputs) to a check of results.
    """

    name: str
    label: str
    prepare: Callable[[DecodeCell, Inputs], Callable[[], tuple]]
    capture: Callable[[Callable[[], tuple], int], Captured]
    context: Callable[[], Any] = contextlib.nullcontext
    checker: Callable = decode_checks.checker


def capture_cupy(call: Callable[[], tuple], count: int) -> Captured:
    """Capture calls on a stream and a memory pool of their own.

    The graph uses the temporaries' addresses after they went back to the
    pool, so no other call may allocate from it.
    """
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()  # the inputs are written
    with cupy.cuda.using_allocator(pool.malloc), stream:
        for _ in range(WARM_UPS):
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            for _ in range(count - 1):
                call()
            results = call()
        finally:
            graph = stream.end_capture()
    return Captured(graph.launch, results, (pool, stream))


def capture_torch(call: Callable[[], tuple], count: int) -> Captured:
    """Capture calls on one of PyTorch's streams and a pool of the graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, stream=stream, capture_error_mode="thread_local"
    ):
        for _ in range(count - 1):
            call()
        results = call()
    return Captured(
        graph.replay, tuple(map(to_cupy, results)), (results, stream)
    )


def _prepare_cuflash(cell: DecodeCell, inputs: Inputs) -> Callable[[], tuple]:
    q, k, v, _ = inputs
    return lambda: (cuflash.forward(q, k, v),)


OURS = DecodeRunner(
    OUR_RUNNER.name, OUR_RUNNER.label, _prepare_cuflash, capture_cupy
)
READING = DecodeRunner(
    READ, "reading K and V alone", reading.prepare, capture_cupy,
    checker=reading.checker,
)  # fmt: skip


def find(names: list[str] | None) -> tuple[list[DecodeRunner], list[str]]:
    """Return the available peers, and a line for each missing one.

    Parameters
    ----------
    names : list of str or None
        None: all.
    """
    wanted = list(PEERS) if names is None else names
    found, words = peers.find_peers(wanted, "bfloat16")
    runners = []
    for peer in found:
        runner = DecodeRunner(
            peer.name, peer.label, peer.prepare, capture_torch, peer.context
        )
        if peer.name == "flashinfer":
            runner = runner._replace(
                label=f"{peer.label}, pages of {PAGE_SIZE}",
                prepare=_prepare_flashinfer,
            )
        runners.append(runner)
    return runners, words


def _prepare_flashinfer(
    cell: DecodeCell, inputs: Inputs
) -> Callable[[], tuple]:
    """Plan decoding on tensor cores, K and V as pages in order."""
    import flashinfer
    import torch

    from .peers_flash import WORKSPACE_BYTES

    if cell.seqlen_k % PAGE_SIZE:
        raise peers.Absent(f"seqlen_k is no multiple of {PAGE_SIZE}")
    q, k, v = (torch.from_dlpack(x) for x in inputs[:3])
    pages = cell.seqlen_k // PAGE_SIZE  # of a sequence
    count = cell.batch * pages

    def numbers(*bounds: int) -> Any:
        return torch.arange(*bounds, dtype=torch.int32, device=q.device)

    starts, indices = numbers(0, count + 1, pages), numbers(count)
    filled = torch.full(
        (cell.batch,), PAGE_SIZE, dtype=torch.int32, device=q.device
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=filled.clone(),
    )
    wrapper.plan(
        starts, indices, filled, cell.heads_q, cell.heads_kv, cell.head_dim,
        PAGE_SIZE, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    queries = q[:, 0]
    cache = tuple(
        x.view(count, PAGE_SIZE, cell.heads_kv, cell.head_dim) for x in (k, v)
    )
    return lambda: (wrapper.run(queries, cache)[:, None],)
