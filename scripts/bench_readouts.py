"""Time readouts beside the forward pass of the same arrays.

    python scripts/bench_readouts.py
    python scripts/bench_readouts.py --dtype float32 --head-dim 128
    python scripts/bench_readouts.py --causal --output readouts.json

One sequence, 16 heads. Each line is a call's milliseconds, and in brackets
its multiple of forward's. Weights of the last queries, of 32 heads, are
compared with a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import cuflash
from bench_parts import machine
from bench_parts.timing import Contender, alternate

HEADS, WEIGHTS_HEADS = 16, 32


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--head-dim", nargs="+", type=int, default=[64, 128])
    add("--seqlen", type=int, default=16384)
    add("--queries", nargs="*", type=int, default=[64, 256])
    add("--causal", action="store_true")
    add("--dtype", default="bfloat16",
        choices=["bfloat16", "float16", "float32", "float64"])  # fmt: skip
    add("--seconds", type=float, default=0.1, help="to time each")
    add("--output", type=Path, help="a JSON file")
    return parser.parse_args(arguments)


def arrays(count: int, shape: tuple[int, ...], dtype: str) -> list[Any]:
    """Random arrays."""
    if dtype == "bfloat16":
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)
    rng = cupy.random.default_rng(0)
    return [
        rng.standard_normal(shape, np.float32).astype(kind)
        for _ in range(count)
    ]


def calls_of(head_dim: int, given: argparse.Namespace) -> dict[str, Callable]:
    """Forward and the readouts, by name."""
    shape = (1, given.seqlen, HEADS, head_dim)
    q, k, v = arrays(3, shape, given.dtype)
    options = {"causal": given.causal}
    _, lse = cuflash.forward(q, k, v, return_lse=True, **options)
    return {
        "forward": lambda: cuflash.forward(q, k, v, **options),
        "max_score": lambda: cuflash.forward(
            q, k, v, return_max_score=True, **options
        ),
        "weight_sums": lambda: cuflash.weight_sums(q, k, lse, **options),
        "weight_sums, max": lambda: cuflash.weight_sums(
            q, k, lse, reduce="max", **options
        ),
        "entropy": lambda: cuflash.entropy(q, k, lse, **options),
        "entropy_backward": lambda: cuflash.entropy_backward(
            lse, q, k, lse, **options
        ),
    }


def measure(head_dim: int, given: argparse.Namespace) -> dict[str, Any]:
    """One head dimension's milliseconds."""
    contenders = {
        x: Contender([y]) for x, y in calls_of(head_dim, given).items()
    }
    ms = {
        x: round(y.ms, 4)
        for x, y in alternate(contenders, given.seconds).items()
    }
    print(f"head_dim {head_dim}: " + ", ".join(
        f"{x} {y:.3f} ({y / ms['forward']:.2f})" for x, y in ms.items()
    ), flush=True)  # fmt: skip
    return {"head_dim": head_dim, "ms": ms}


def measure_weights(count: int, given: argparse.Namespace) -> dict[str, Any]:
    """Weights of `count` queries beside a copy of what they write."""
    q, k = arrays(2, (1, given.seqlen, WEIGHTS_HEADS, 128), given.dtype)
    _, lse = cuflash.forward(q, k, k, return_lse=True)
    rows = cupy.arange(given.seqlen - count, given.seqlen, dtype=np.int32)

    def weights() -> Any:
        return cuflash.weights(q, k, lse, queries=rows)

    written = weights()
    target = cupy.empty_like(written)
    contenders = {
        "weights": Contender([weights]),
        "copy": Contender([lambda: cupy.copyto(target, written)]),
    }
    found = alternate(contenders, given.seconds)
    rate = found["copy"].ms / found["weights"].ms
    print(f"weights of {count} queries: {rate:.2f} of a copy's rate")
    return {"queries": count, "of_copy": round(rate, 3)}


def main(arguments: list[str] | None = None) -> None:
    """Time all, and print a line for each."""
    given = parse(arguments)
    lines = []
    for head_dim in given.head_dim:
        lines.append(measure(head_dim, given))
        cupy.get_default_memory_pool().free_all_blocks()
    lines += [measure_weights(count, given) for count in given.queries]
    if given.output:
        record = {"machine": machine.describe(), "rows": lines}
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
