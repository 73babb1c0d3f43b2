"""Times attention over the GPUs of a launcher, or over threads on one GPU.

    torchrun --nproc-per-node 2 -m cuflash.distributed.bench
    mpirun -n 2 python -m cuflash.distributed.bench
    python -m cuflash.distributed.bench --processes 2
    python -m cuflash.distributed.bench --threads 2 4

Efficiency is the time of one GPU for the whole sequence (at the mean speed of
all), over the number of GPUs times the slowest one's time. With threads on one
GPU it is one call's time over the threads' time together: what splitting and
merging cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import cuflash
from cuflash.api import arrays as api_arrays
from cuflash.errors import CuflashError

from . import environment
from .attention import backward, forward
from .group import Group
from .in_process import run as run_threads
from .layouts import shard

_TFLOP = 1e12


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash.distributed.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seqlens", type=int, nargs="+", default=[65536, 131072, 262144])
    add("--heads", type=int, nargs=2, default=[32, 8], metavar=("Q", "KV"))
    add("--head-dim", type=int, default=128)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    add("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    add("--ulysses", type=int, nargs="+", default=[1])
    add("--full", action="store_true", help="without the causal mask")
    add("--window", type=int, help="keys before each query that it sees")
    add("--repeats", type=int, default=5, help="the median is reported")
    add("--library", choices=["cupy", "nccl4py"], help="bindings of NCCL")
    add("--transport", choices=environment.TRANSPORTS, help="between GPUs")
    add("--timeout", type=float, default=120.0)
    add("--processes", type=int, help="start that many, one a GPU")
    add("--threads", type=int, nargs="+", help="ranks on one GPU")
    add("--no-check", action="store_true", help="do not compare results")
    add("--json", metavar="FILE", help="write the figures")
    return parser.parse_args(arguments)


class Call:
    """The arrays of one sequence, whole and of a rank."""

    def __init__(self, options: argparse.Namespace, seqlen: int) -> None:
        self.seqlen, self.options = seqlen, options
        heads, heads_kv = options.heads
        self.q, self.dout, self.k, self.v = (
            random_rows(options, seqlen, h, seed)
            for seed, h in enumerate((heads, heads, heads_kv, heads_kv))
        )
        self.mask: dict[str, Any] = {"causal": not options.full}
        if options.window is not None:
            self.mask["window"] = (options.window, None)

    def flops(self) -> float:
        """Of the forward pass: 4 per visible pair, head and column."""
        n = self.seqlen
        pairs = n * n if self.options.full else n * (n + 1) // 2
        if self.options.window is not None:
            least = min(self.options.window + 1, n)
            hidden = (n - least) * (n - least + 1) // 2
            pairs -= hidden
        return 4.0 * pairs * self.options.heads[0] * self.options.head_dim

    def alone(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward, and forward and backward, by one call each."""

        def first() -> Any:
            return cuflash.forward(
                self.q, self.k, self.v, return_lse=True, **self.mask
            )

        def both() -> Any:
            out, lse = first()
            return out, *cuflash.backward(
                self.dout, self.q, self.k, self.v, out, lse, **self.mask
            )

        return first, both

    def of_rank(
        self, group: Group, ulysses: int
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The same of a rank."""
        dout, q, k, v = (
            self.part(x, group) for x in (self.dout, self.q, self.k, self.v)
        )
        given = {
            **self.mask,
            "group": group,
            "layout": self.options.layout,
            "ulysses": ulysses,
        }

        def first() -> Any:
            return forward(q, k, v, return_lse=True, **given)

        def both() -> Any:
            out, lse = first()
            return out, *backward(dout, q, k, v, out, lse, **given)

        return first, both

    def part(self, array: Any, group: Group) -> Any:
        """A rank's tokens of an array."""
        return shard(array, group.rank, group.size, layout=self.options.layout)


_DISTINCT = 4096  # tokens; drawing all of them would take minutes


def random_rows(
    options: argparse.Namespace, seqlen: int, heads: int, seed: int
) -> Any:
    """Normal numbers (1, seqlen, heads, head_dim) of few distinct tokens.

    Drawn by NumPy, so that CuPy's random numbers need not be installed.
    """
    cupy = api_arrays.on_cuda().cupy
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, options.dtype, options.dtype))
    rows = rng.standard_normal(
        (_DISTINCT, heads, options.head_dim), np.float32
    ).astype(dtype)
    chosen = cupy.asarray(rng.integers(_DISTINCT, size=seqlen))
    bits = cupy.asarray(rows.view(np.uint16))
    return bits[chosen][None].view(dtype)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """The median of seconds until the stream's end."""
    return in_turns([call], repeats, lambda: None)[0]


def in_turns(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    ready: Callable[[], None],
) -> list[float]:
    """The median of each call's seconds, from `ready` to the stream's end.

    The calls take turns: a GPU's clock falls while it works.
    """
    stream = api_arrays.on_cuda().cupy.cuda.get_current_stream()
    seconds: list[list[float]] = [[] for _ in calls]
    for i in range(repeats + 2):
        for call, found in zip(calls, seconds, strict=True):
            stream.synchronize()
            ready()
            start = time.perf_counter()
            call()
            stream.synchronize()
            if i >= 2:  # the first calls compile, and allocate
                found.append(time.perf_counter() - start)
    return [statistics.median(x) for x in seconds]


def largest_error(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest element."""
    cupy = api_arrays.on_cuda().cupy
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        a, b = x.astype(np.float32), y.astype(np.float32)
        worst = max(worst, float(cupy.abs(a - b).max() / cupy.abs(b).max()))
    return worst


def on_ranks(options: argparse.Namespace, group: Group) -> list[dict]:
    """Figures of a group of GPUs, on rank 0; each has its whole sequence."""
    found = []

    def ready() -> None:
        group.gather_bytes(b"ready")

    for seqlen in options.seqlens:
        call = Call(options, seqlen)
        whole = None if options.no_check else call.alone()[1]()
        for ulysses in options.ulysses:
            calls = call.of_rank(group, ulysses)
            before = group.bytes_sent
            results = calls[1]()
            sent = group.bytes_sent - before
            error = None
            if whole is not None:
                error = largest_error(
                    results, [call.part(x, group) for x in whole]
                )
            del results
            # All ranks time a GPU alone, so that all have the same clock.
            times = [
                in_turns(pair, options.repeats, ready)
                for pair in zip(call.alone(), calls, strict=True)
            ]
            told = json.dumps([times, error, sent]).encode().ljust(512)
            each = [json.loads(x) for x in group.gather_bytes(told)]
            single, slowest = over_ranks([x[0] for x in each])
            worst = None if error is None else max(x[1] for x in each)
            found.append(
                figures(
                    call, group.size, ulysses, single, slowest, worst,
                    share=group.size, sent=max(x[2] for x in each),
                )
            )  # fmt: skip
            if group.rank == 0:
                show(found[-1])
        del whole, call
    return found


def over_ranks(
    times: list[list[list[float]]],
) -> tuple[list[float], list[float]]:
    """Seconds of one GPU, and of all: [rank][direction][alone, together].

    One GPU's are such that its speed is the mean of all.
    """
    directions = range(len(times[0]))
    return (
        [
            statistics.harmonic_mean([x[i][0] for x in times])
            for i in directions
        ],
        [max(x[i][1] for x in times) for i in directions],
    )


def on_threads(options: argparse.Namespace) -> list[dict]:
    """Figures of ranks that share one GPU."""
    found = []
    cupy = api_arrays.on_cuda().cupy
    for seqlen in options.seqlens:
        call = Call(options, seqlen)
        single = [timed(x, options.repeats) for x in call.alone()]
        whole = None if options.no_check else call.alone()[1]()
        for size in options.threads:
            for ulysses in options.ulysses:
                seconds, error = threads_time(
                    call, size, ulysses, whole, options
                )
                found.append(
                    figures(
                        call, size, ulysses, single, seconds, error, share=1
                    )
                )
                show(found[-1])
        del whole, call
        cupy.get_default_memory_pool().free_all_blocks()
    return found


def threads_time(
    call: Call,
    size: int,
    ulysses: int,
    whole: Any,
    options: argparse.Namespace,
) -> tuple[list[float], float | None]:
    """Seconds of each direction on threads, and the largest error."""
    cupy = api_arrays.on_cuda().cupy

    def of_rank(group: Group) -> tuple[list[float], float | None]:
        calls = call.of_rank(group, ulysses)
        error = None
        if whole is not None:
            wanted = [call.part(x, group) for x in whole]
            error = largest_error(calls[1](), wanted)
        seconds = [
            together(x, options.repeats, group, cupy.cuda.Device())
            for x in calls
        ]
        return seconds, error

    each = run_threads(size, of_rank, timeout=options.timeout)
    seconds = [max(x[0][i] for x in each) for i in range(2)]
    errors = [x[1] for x in each if x[1] is not None]
    return seconds, max(errors, default=None)


def together(
    call: Callable[[], Any], repeats: int, group: Group, device: Any
) -> float:
    """The median of seconds until all threads' work on the device is done."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(repeats):
        group.gather_bytes(b"warm")
        device.synchronize()
        group.gather_bytes(b"idle")
        start = time.perf_counter()
        call()
        group.gather_bytes(b"done")
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def figures(
    call: Call,
    ranks: int,
    ulysses: int,
    single: list[float],
    seconds: list[float],
    error: float | None,
    *,
    share: int,
    sent: int | None = None,
) -> dict:
    """What is reported of a call."""
    flops = [call.flops(), 3.5 * call.flops()]
    found: dict[str, Any] = {
        "seqlen": call.seqlen, "ranks": ranks, "ulysses": ulysses,
        "gpus": share, "layout": call.options.layout, **call.mask,
        "heads": call.options.heads, "head_dim": call.options.head_dim,
        "dtype": call.options.dtype, "largest_error": error,
        "bytes_sent": sent,
    }  # fmt: skip
    for name, alone, own, work in zip(
        ("forward", "both"), single, seconds, flops, strict=True
    ):
        found[name] = {
            "seconds_single": alone,
            "seconds": own,
            "tflops": work / own / share / _TFLOP,
            "tflops_single": work / alone / _TFLOP,
            "efficiency": alone / own / share,
        }
    return found


def show(found: dict) -> None:
    """Print a line of figures."""
    words = [
        f"{found['seqlen']:>8} tokens, {found['ranks']} ranks on"
        f" {found['gpus']} GPU, ulysses {found['ulysses']}:"
    ]
    for name, title in (("forward", "forward"), ("both", "and backward")):
        x = found[name]
        words.append(
            f"{title} {1e3 * x['seconds']:.2f} ms ({x['tflops']:.0f} TFLOPS"
            f" a GPU, {100 * x['efficiency']:.1f} %)"
        )
    if found["largest_error"] is not None:
        words.append(f"error {found['largest_error']:.1e}")
    print(*words, sep="  ", flush=True)


def start_processes(count: int, arguments: list[str]) -> int:
    """Run this command in processes, one a GPU, as torchrun does."""
    kept = [
        x
        for i, x in enumerate(arguments)
        if x != "--processes" and arguments[max(i - 1, 0)] != "--processes"
    ]
    command = [sys.executable, "-m", "cuflash.distributed.bench", *kept]
    children = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(count)
    ]
    return max(abs(child.wait()) for child in children)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    if options.processes:
        return start_processes(options.processes, given)
    rank = 0
    if not environment.count_devices():
        print("bench: there is no GPU, or CuPy finds none", file=sys.stderr)
        return 1
    try:
        cupy = api_arrays.on_cuda().cupy
        if options.threads:
            found = on_threads(options)
        else:
            group = environment.group_from_environment(
                timeout=options.timeout,
                library=options.library,
                transport=options.transport,
            )
            rank = group.rank
            found = on_ranks(options, group)
    except CuflashError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.json and rank == 0:
        properties = cupy.cuda.runtime.getDeviceProperties(
            cupy.cuda.runtime.getDevice()
        )
        report = {"gpu": properties["name"].decode(), "cells": found}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
