"""Time calls of cuflash.jax, and of its installed peers, under jax.jit.

    python scripts/bench_jax.py                  # host time of small calls
    python scripts/bench_jax.py --seqlen 4096 --heads 16 --kv-heads 16
    python scripts/bench_jax.py --platform cpu --calls 5    # a trial run

Per call of the forward pass, and of value_and_grad with respect to q, k and v:
the first call (traces, compiles, runs), and the time of one among many that
are queued without waiting. That is the host's time where the GPU is faster:
by default, calls are small. All take turns in one process. `python` counts
how often a call of cuflash ran its callback: 0 where XLA replays a command
buffer. `differs by` is the largest difference from cuflash's results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import command_line

ROUNDS = 7


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, number = parser.add_argument, command_line.number
    add("--batch", type=number, default=2)
    add("--seqlen", type=number, default=64)
    add("--heads", type=number, default=16)
    add("--kv-heads", type=number, default=4)
    add("--head-dim", type=number, default=64)
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--calls", type=number, default=200, help="of each of the rounds")
    add("--platform", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    asked = parse(arguments)
    try:
        import jax
    except ImportError:
        print('bench_jax.py needs JAX: pip install "cuflash[jax]"')
        return 0
    try:
        device = jax.devices(asked.platform)[0]
    except RuntimeError:
        print(f"JAX {jax.__version__} finds no device of {asked.platform}")
        return 0
    print(f"JAX {jax.__version__}, {device.device_kind}: {shapes(asked)}")
    with jax.default_device(device):
        arrays = inputs(asked)
        calls = {
            (name, what): made
            for name, attend in implementations(asked.platform)
            for what, made in passes(attend).items()
        }
        show(measure(calls, arrays, asked.calls))
    return 0


def shapes(asked: argparse.Namespace) -> str:
    """The sizes of a call, in words."""
    heads = f"{asked.heads}/{asked.kv_heads}"
    return (
        f"({asked.batch}, {asked.seqlen}, {heads}, {asked.head_dim}) "
        f"{asked.dtype}, causal"
    )


def inputs(asked: argparse.Namespace) -> list[Any]:
    """Random q, k and v."""
    import jax

    tokens = asked.batch, asked.seqlen
    heads = (asked.heads, asked.kv_heads, asked.kv_heads)
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (*tokens, n, asked.head_dim), asked.dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


# ---- What is timed ----


def implementations(platform: str) -> Iterator[tuple[str, Callable]]:
    """The names and the causal attention of those that are installed."""
    import functools

    import jax

    import cuflash.jax

    yield "cuflash.jax", functools.partial(cuflash.jax.attention, causal=True)
    plain = "cudnn" if platform == "cuda" else "xla"
    yield (
        f"jax.nn, {plain}",
        functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=plain
        ),
    )
    if platform == "cpu":
        return
    for module, call, causal in (
        ("dew_flash_attn", "flash_mha", "is_causal"),
        ("fa4_jax", "flash_attn", "causal"),
    ):
        try:
            peer = getattr(__import__(module), call)
        except Exception as error:  # its libraries may not load
            print(f"{module} is left out: {type(error).__name__}: {error}")
            continue
        yield module, functools.partial(peer, **{causal: True})


def passes(attend: Callable) -> dict[str, Callable]:
    """The jitted calls of an implementation."""
    import jax

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v).astype("float32").sum()

    return {
        "forward": jax.jit(attend),
        "value_and_grad": jax.jit(jax.value_and_grad(loss, (0, 1, 2))),
    }


# ---- Timing ----


class Counted:
    """Counts the callbacks of cuflash, from when it was made."""

    def __init__(self) -> None:
        from cuflash.jax.cuda import Program

        self.count, self.known = 0, Program.__call__

        def call(program: Any, *buffers: Any) -> None:
            self.count += 1
            self.known(program, *buffers)

        Program.__call__ = call  # type: ignore[method-assign]


def measure(
    calls: dict[tuple[str, str], Callable], arrays: list[Any], count: int
) -> list[tuple[str, ...]]:
    """The rows of the table."""
    import jax

    first, times, python, apart = {}, {}, {}, {}
    counted, results = Counted(), {}
    for key, call in calls.items():
        start = time.perf_counter()
        result = jax.block_until_ready(call(*arrays))
        first[key] = time.perf_counter() - start
        apart[key] = _difference(result, results.setdefault(key[1], result))
        times[key] = []
        _queue(call, arrays, 10)
    for _ in range(ROUNDS):
        for key, call in calls.items():
            before = counted.count
            times[key].append(_queue(call, arrays, count))
            python[key] = (counted.count - before) / count
    return [
        (
            name, what, f"{first[name, what]:.2f}",
            f"{1e6 * statistics.median(times[name, what]):.1f}",
            f"{1e6 * min(times[name, what]):.1f}",
            f"{apart[name, what]:.2g}",
            f"{python[name, what]:g}" if "cuflash" in name else "",
        )
        for name, what in calls
    ]  # fmt: skip


def _difference(results: Any, expected: Any) -> float:
    """The largest difference from the first implementation's numbers."""
    import jax
    import numpy as np

    leaves = map(jax.tree.leaves, (results, expected))
    pairs = zip(*leaves, strict=True)
    return max(
        float(np.abs(np.asarray(x, "f8") - np.asarray(y, "f8")).max())
        for x, y in pairs
    )


def _queue(call: Callable, arrays: list[Any], count: int) -> float:
    """Seconds of a call, of `count` that are queued one after another."""
    import jax

    results = call(*arrays)
    jax.block_until_ready(results)
    start = time.perf_counter()
    for _ in range(count):
        results = call(*arrays)
    spent = time.perf_counter() - start
    jax.block_until_ready(results)
    return spent / count


HEAD = ("implementation", "call", "first (s)", "median (us)", "best (us)",
        "differs by", "python")  # fmt: skip


def show(rows: list[tuple[str, ...]]) -> None:
    """Print the table."""
    widths = [
        max(map(len, column)) for column in zip(HEAD, *rows, strict=True)
    ]
    for row in (HEAD, *rows):
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
