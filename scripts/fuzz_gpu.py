"""Random calls on this machine's GPU, each compared with plain attention.

    python scripts/fuzz_gpu.py                          # ten minutes
    python scripts/fuzz_gpu.py --seconds 60
    python scripts/fuzz_gpu.py --seed 1234 --count 1    # repeat a failure

Draws float16 and bfloat16 calls, forward and backward, from the range of the
benchmarks' grid: sequences of 64 to 16,384 tokens, head_dim 1 to 256, the same
or another head_dim_v, grouped heads, unequal lengths, causal or not. `make
test` covers shorter sequences and other dtypes. Exits with status 1 if a
result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time

import command_line
from bench_parts import machine
from bench_parts.report import say
from fuzz_parts.shapes import Shape, draw

MOST_FAILURES = 10
SAY_EVERY = 10.0  # seconds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=600, help="time to run")
    add("--count", type=int, default=None, help="number of calls")
    add("--seed", type=int, default=None,
        help="seed of the first call; each next call adds 1")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run calls until the time is up; return the exit status."""
    options = parse(arguments)
    reason = machine.find_gpu()
    if reason is not None:
        print(
            f"fuzz_gpu.py runs on an NVIDIA GPU and found none ({reason}). "
            "Nothing was run.",
            file=sys.stderr,
        )
        return 1
    first = options.seed
    if first is None:
        first = secrets.randbits(31)
    say(", ".join(f"{k} {v}" for k, v in machine.describe().items() if v))
    say(f"calls from seed {first} on")
    try:
        return run(first, options.count, options.seconds)
    except KeyboardInterrupt:
        return command_line.stopped("failed calls are listed above")


def run(first: int, count: int | None, seconds: float) -> int:
    """Check the calls of seeds from `first` on; return the exit status."""
    from fuzz_parts.compiled import compiled_ahead

    start = said = time.monotonic()
    seeds = itertools.count(first)
    if count is not None:
        seeds = itertools.islice(seeds, count)
    failed, done, worst = [], 0, {}
    with compiled_ahead(map(draw, seeds)) as shapes:
        for shape in shapes:
            done += 1
            failed += failures(shape, worst)
            now = time.monotonic()
            if now - said >= SAY_EVERY:
                said = now
                say(progress(done, now - start, worst, failed))
            if now - start >= seconds or len(failed) >= MOST_FAILURES:
                break
    say(progress(done, time.monotonic() - start, worst, failed))
    for shape in failed:
        say(f"again: python scripts/fuzz_gpu.py --seed {shape.seed} --count 1")
    return 1 if failed else 0


def failures(shape: Shape, worst: dict[str, float]) -> list[Shape]:
    """Check a call and record its errors; return [call] if it failed."""
    from fuzz_parts.check import WrongResult, check

    try:
        ratios = check(shape)
    except (WrongResult, RuntimeError) as error:
        say(f"WRONG: {error}: {shape}")
        return [shape]
    for name, ratio in ratios.items():
        worst[name] = max(worst.get(name, 0.0), ratio)
    return []


def progress(
    done: int, seconds: float, worst: dict[str, float], failed: list[Shape]
) -> str:
    """Return a one-line summary."""
    errors = ", ".join(f"{name} {x:.2f}" for name, x in worst.items())
    return (
        f"{done} calls in {seconds:.0f} s, {len(failed)} wrong; largest error "
        f"over its bound: {errors or 'none yet'}"
    )


if __name__ == "__main__":
    sys.exit(main())
