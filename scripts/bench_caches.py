"""Time few queries over many keys, latent caches, drafts, shared prefixes.

    python scripts/bench_caches.py
    python scripts/bench_caches.py --only few latent --output caches.json

bfloat16, contiguous caches, no mask. Each line is a call's microseconds of
GPU time in a replayed graph, the rate at which it reads K and V, and what it
multiplies. `read` is a kernel that only reads the caches. With PyTorch, its
backends are timed beside on the same arrays, heads grouped by `enable_gqa`.
A cache of 32 MiB (8,192 keys) stays in an H200's L2 from call to call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cuflash
from bench_parts import decode_runners, machine, reading
from bench_parts.timing import Contender, alternate
from demo_parts.generation import in_tree

BF16 = np.dtype(ml_dtypes.bfloat16)
CALLS = 10  # in a graph
PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}

# (batch, keys), heads 64/8 of 128, by numbers of queries.
CACHES = (1, 8192), (1, 65536), (16, 8192)
QUERIES = 1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192

# (batch, heads, queries): 32,768 keys of 576 columns, values the first 512.
LATENT_KEYS, LATENT_DIM, LATENT_DIM_V = 32768, 576, 512
LATENT = (16, 128, 1), (64, 128, 1), (16, 16, 1), (64, 16, 1), (16, 128, 4)

NODES = 8  # of a tree of drafts
REQUESTS, PREFIX, SUFFIX = 32, 16384, 1024


def random(*shape: int) -> Any:
    """Standard normal bfloat16 numbers."""
    rng = cupy.random.default_rng(0)
    return rng.standard_normal(shape, np.float32).astype(BF16)


def reader(k: Any, v: Any) -> Callable[[], Any]:
    """A call that only reads two arrays of one size."""
    return reading.prepare(None, SimpleNamespace(k=k, v=v))


def peers(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's backends that take the call, by name."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}

    def tensor(x: Any) -> Any:
        bits = torch.from_dlpack(x.view(np.int16))
        return bits.view(torch.bfloat16).transpose(1, 2)

    tensors = [tensor(x) for x in (q, k, v)]

    def call_of(name: str) -> Callable[[], Any]:
        def call() -> tuple:
            with sdpa_kernel(getattr(SDPBackend, PEERS[name])):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *tensors, enable_gqa=True
                )
            return (out.view(torch.int16),)

        return call

    found = {}
    for name in PEERS:
        call = call_of(name)
        try:
            call()
        except RuntimeError:  # the backend does not take it
            continue
        found[name] = call
    return found


def few(seconds: float) -> list[dict[str, Any]]:
    """Queries from one to many, of grouped heads."""
    rows = []
    for batch, keys in CACHES:
        k, v = random(2, batch, keys, 8, 128)
        for count in QUERIES:
            q = random(batch, count, 64, 128)
            calls = {
                "cuflash": lambda q=q, k=k, v=v: cuflash.forward(q, k, v),
                "read": reader(k, v),
                **peers(q, k, v),
            }
            name = f"{batch} x {keys:,} keys, {count} queries"
            flops = 4 * 64 * 128 * batch * count * keys
            rows.append(line(name, calls, 2 * k.nbytes, flops, seconds))
    return rows


def latent(seconds: float) -> list[dict[str, Any]]:
    """Many heads on one key head, whose values are the keys' first part."""
    rows = []
    for batch, heads, count in LATENT:
        cache = random(batch, LATENT_KEYS, 1, LATENT_DIM)
        q = random(batch, count, heads, LATENT_DIM)
        calls = {
            "cuflash": lambda q=q, cache=cache: cuflash.forward_kvcache(
                q, cache, head_dim_v=LATENT_DIM_V
            ),
            "read": reader(*cache.reshape(2, -1)),
        }
        name = (
            f"{batch} x {LATENT_KEYS:,} keys, {heads} heads, {count} queries"
        )
        pairs = batch * heads * count * LATENT_KEYS
        flops = 2 * pairs * (LATENT_DIM + LATENT_DIM_V)
        rows.append(line(name, calls, cache.nbytes, flops, seconds))
    return rows


def tree(seconds: float) -> list[dict[str, Any]]:
    """Drafts with the mask of a tree, and without a mask."""
    rows = []
    for batch, keys in CACHES:
        k, v = random(2, batch, keys, 8, 128)
        q = random(batch, NODES, 64, 128)
        lengths = cupy.full(batch, keys - 1, np.int32)
        above = cupy.tri(NODES, dtype=bool)
        above[NODES // 2 :, 1 : NODES // 2] = False
        given = {"cache_seqlens": lengths}
        mask = {"mask_mod": in_tree, "mod_arrays": {"is_ancestor": above}}
        calls = {
            "cuflash": lambda q=q, k=k, v=v, given=given, mask=mask: (
                cuflash.forward_kvcache(q, k, v, **given, **mask)
            ),
            "without": lambda q=q, k=k, v=v, given=given: (
                cuflash.forward_kvcache(q, k, v, **given)
            ),
            "causal": lambda q=q, k=k, v=v, given=given: (
                cuflash.forward_kvcache(q, k, v, **given, causal=True)
            ),
        }
        name = f"{batch} x {keys:,} keys, a tree of {NODES}"
        flops = 4 * 64 * 128 * batch * NODES * keys
        rows.append(line(name, calls, 2 * k.nbytes, flops, seconds))
    return rows


def prefix(seconds: float) -> list[dict[str, Any]]:
    """A prefix that requests share, read once; beside caches of their own."""
    heads, kv_heads, d = 32, 8, 128
    ours = random(2, 1, PREFIX, kv_heads, d)
    suffix = random(2, REQUESTS, SUFFIX, kv_heads, d)
    own = random(2, REQUESTS, PREFIX + SUFFIX, kv_heads, d)
    q = random(REQUESTS, 1, heads, d)

    def shared() -> Any:
        together = q.reshape(1, REQUESTS, heads, d)
        out, lse = cuflash.forward_kvcache(together, *ours, return_lse=True)
        out_s, lse_s = cuflash.forward_kvcache(q, *suffix, return_lse=True)
        lse = cupy.ascontiguousarray(lse.transpose(2, 1, 0))
        return cuflash.merge_states(out.reshape(q.shape), lse, out_s, lse_s)

    calls = {
        "cuflash": shared,
        "separate": lambda: cuflash.forward_kvcache(q, *own),
    }
    name = f"{REQUESTS} requests, {PREFIX:,} keys shared, {SUFFIX:,} own"
    flops = 4 * heads * d * REQUESTS * (PREFIX + SUFFIX)
    read = ours.nbytes + suffix.nbytes
    return [line(name, calls, read, flops, seconds)]


def line(
    name: str, calls: dict[str, Callable[[], Any]], read: int, flops: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Time calls, print a line, and return a row of the record."""
    graphs = {
        x: decode_runners.capture_torch(y, CALLS)
        if x in PEERS
        else decode_runners.capture_cupy(y, CALLS)
        for x, y in calls.items()
    }
    contenders = {x: Contender([y.launch]) for x, y in graphs.items()}
    timings = alternate(contenders, seconds)
    us = {x: round(y.ms * 1e3 / CALLS, 1) for x, y in timings.items()}
    of_ours = us["cuflash"]
    print(
        f"{name}: {of_ours:.1f} us, {read / of_ours / 1e3:,.0f} GB/s,"
        f" {flops / of_ours / 1e6:,.0f} TFLOP/s; "
        + ", ".join(
            f"{x} {y:.1f} ({y / of_ours:.2f})"
            for x, y in us.items()
            if x != "cuflash"
        ),
        flush=True,
    )
    return {"name": name, "us": us, "bytes": read, "flops": flops}


SECTIONS = {"few": few, "latent": latent, "tree": tree, "prefix": prefix}


def main(arguments: list[str] | None = None) -> None:
    """Time the sections, and print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    add("--seconds", type=float, default=0.05, help="to time each")
    add("--output", type=Path, help="a JSON file")
    given = parser.parse_args(arguments)
    rows = {}
    for name in given.only:
        print(f"\n{SECTIONS[name].__doc__}", flush=True)
        rows[name] = SECTIONS[name](given.seconds)
        cupy.get_default_memory_pool().free_all_blocks()
    if given.output:
        record = {"machine": machine.describe(), "rows": rows}
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
