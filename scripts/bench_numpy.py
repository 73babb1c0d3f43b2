"""Time calls on NumPy arrays, beside dense attention in NumPy.

    python scripts/bench_numpy.py
    OPENBLAS_NUM_THREADS=1 python scripts/bench_numpy.py --rounds 20
    python scripts/bench_numpy.py --shape 4 512 8 64 --causal
    python scripts/bench_numpy.py --nan

Dense attention is matmul, softmax and matmul on whole score matrices of
float32; backward it recomputes P. Both take turns; a time is the least of all
rounds. `differs by` is the largest difference from dense results.

With --nan, each call takes turns with the same call of ordinary numbers:
NaN in a tenth of the keys, masked, and NaN, infinities or large scores in a
hundredth of the queries or keys, at random.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import command_line
import cuflash


class Shape(NamedTuple):
    """What is timed: self-attention in float32."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False


Arrays = dict[str, np.ndarray]

SHAPES = [
    Shape(16, 64, 8, 32),
    Shape(1, 2048, 8, 64),
    Shape(1, 2048, 8, 64, True),
    Shape(1, 8192, 4, 64, True),
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--shape", nargs=4, type=command_line.number, default=None,
        metavar=("BATCH", "SEQLEN", "HEADS", "HEAD_DIM"),
        help="instead of the four of docs/benchmarks")  # fmt: skip
    add("--causal", action="store_true", help="of --shape")
    add("--nan", action="store_true", help="what NaN and large scores cost")
    add("--rounds", type=command_line.number, default=10)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    asked = parse(arguments)
    shapes = SHAPES
    if asked.shape:
        shapes = [Shape(*asked.shape, asked.causal)]
    print(f"NumPy {np.__version__}, float32, ms")
    if asked.nan:
        shape = shapes[0] if asked.shape else Shape(1, 1024, 2, 64)
        print_nan(shape, asked.rounds)
        return 0
    print("batch seqlen heads head_dim causal  direction  cuflash     dense"
          "  times as fast  differs by")  # fmt: skip
    for shape in shapes:
        for direction, calls in both_directions(shape).items():
            ours, dense = best(calls, asked.rounds)
            print(
                f"{shape.batch:5} {shape.seqlen:6} {shape.heads:5} "
                f"{shape.head_dim:8} {'yes' if shape.causal else 'no':>6}  "
                f"{direction:9} {1e3 * ours:8.2f} {1e3 * dense:9.2f} "
                f"{dense / ours:14.2f} {difference(calls):11.0e}"
            )
    return 0


def both_directions(shape: Shape) -> dict[str, tuple[Callable[[], Any], ...]]:
    """Calls of cuflash and of dense attention, by direction."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, *shape[:4]), np.float32)
    causal = shape.causal
    out, lse = cuflash.forward(q, k, v, causal=causal, return_lse=True)

    return {
        "forward": (
            lambda: [cuflash.forward(q, k, v, causal=causal)],
            lambda: [forward(q, k, v, causal)],
        ),
        "backward": (
            lambda: cuflash.backward(dout, q, k, v, out, lse, causal=causal),
            lambda: backward(dout, q, k, v, out, causal),
        ),
    }


def print_nan(shape: Shape, rounds: int) -> None:
    """Print what some rows of other numbers cost each call."""
    print(f"{shape}")
    print("rows                        call             ordinary  these"
          "  times the time")  # fmt: skip
    for rows, given in of_nan(shape).items():
        for name, calls in with_and_without(*given, shape.causal).items():
            ordinary, these = best(calls, rounds)
            print(
                f"{rows:27} {name:15} {1e3 * ordinary:9.2f}"
                f" {1e3 * these:6.1f} {these / ordinary:15.2f}"
            )


def of_nan(shape: Shape) -> dict[str, tuple[Arrays, Arrays, Arrays]]:
    """Ordinary q, k and v, others with the same shapes, and a mask if any."""
    rng = np.random.default_rng(0)
    batch, seqlen, heads, head_dim = shape[:4]
    arrays = rng.standard_normal((3, *shape[:4]), np.float32)
    plain = dict(zip("qkv", arrays, strict=True))
    missing = rng.random(seqlen) < 0.1
    holes = {x: plain[x].copy() for x in "kv"}
    for x in holes.values():
        x[:, missing] = np.nan
    mask = {"mask": np.broadcast_to(~missing, (seqlen, seqlen))}
    found = {"keys of NaN behind a mask": (plain, plain | holes, mask)}
    rows = rng.random((batch, seqlen)) < 0.01
    by_heads = rng.random((batch, seqlen, heads)) < 0.01
    for name, arrays_of, at, number in (
        ("queries of NaN", "q", rows, np.nan),
        ("queries of NaN, by heads", "q", by_heads, np.nan),
        ("queries of inf", "q", rows, np.inf),
        ("queries of large scores", "q", rows, 1e6),
        ("keys and values of NaN", "kv", rows, np.nan),
        ("values of NaN", "v", rows, np.nan),
        ("keys of inf", "k", rows, np.inf),
    ):
        other = {x: plain[x].copy() for x in arrays_of}
        for x in other.values():
            x[at] = number
        found[name] = plain, plain | other, {}
    return found


def with_and_without(
    ordinary: Arrays, other: Arrays, options: Arrays, causal: bool
) -> dict[str, tuple[Callable[[], Any], ...]]:
    """Calls of ordinary numbers and of others, by name."""
    rng = np.random.default_rng(1)
    moved = list(rng.standard_normal((4, *ordinary["q"].shape), np.float32))

    def of(name: str, x: Arrays) -> Callable[[], Any]:
        qkv = [x[y] for y in "qkv"]
        given = {**options, "causal": causal}
        out, lse = cuflash.forward(*qkv, return_lse=True, **given)
        arguments = {
            "forward": qkv,
            "backward": [moved[3], *qkv, out, lse],
            "jvp": [*qkv, *moved[:3]],
            "double_backward": [*moved, *qkv, out, lse],
        }[name]
        call = getattr(cuflash, name)
        return lambda: call(*arguments, **given)

    names = "forward", "backward", "jvp", "double_backward"
    return {x: (of(x, ordinary), of(x, other)) for x in names}


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> np.ndarray:
    """Dense attention of (batch, seqlen, heads, head_dim)."""
    return (weights(q, k, causal) @ v.swapaxes(1, 2)).swapaxes(1, 2)


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    causal: bool,
) -> list[np.ndarray]:
    """Its gradients dq, dk and dv."""
    p = weights(q, k, causal)
    dout, q, k, v, out = (x.swapaxes(1, 2) for x in (dout, q, k, v, out))
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= np.float32(q.shape[-1] ** -0.5)
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    return [x.swapaxes(1, 2) for x in (dq, dk, dv)]


def weights(q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray:
    """P, (batch, heads, seqlen, seqlen)."""
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    s = q @ k.swapaxes(-1, -2)
    s *= np.float32(q.shape[-1] ** -0.5)
    if causal:
        np.copyto(s, -np.inf, where=~np.tri(s.shape[-1], dtype=bool))
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


def best(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[float]:
    """The least seconds of each call, which take turns."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            least[number] = min(least[number], took)
    return least


def difference(calls: tuple[Callable[[], Any], ...]) -> float:
    """The largest difference of the results of two calls."""
    ours, dense = (call() for call in calls)
    pairs = zip(ours, dense, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
