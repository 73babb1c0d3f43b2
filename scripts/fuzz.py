"""Random problems for the kernels, on the emulator or a GPU, with a count.

    python scripts/fuzz.py --seconds 60               # on the emulator
    python scripts/fuzz.py --on gpu --record          # adds to docs/fuzz.json
    python scripts/fuzz.py --on gpu --again 1234/5    # repeats a failure
    python scripts/fuzz.py --merge run.json           # of another machine

Draws programs (family, dtype, head dimensions, options), and for each many
problems (lengths, windows, sequences, strides, data) from fresh seeds. Every
element is held against the float64 reference by the bounds of the tests. On a
GPU one seed of eight is a large call, of up to 16,384 tokens, held against
plain attention on the GPU. Exits with status 1 if it finds anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

# Before NumPy and cuflash are imported: one process a core, which compiles no
# other kernels than its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUFLASH_COMPILE", "lazy")

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "scripts"):  # also in the processes that it starts
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

import command_line  # noqa: E402
from bench_parts import machine  # noqa: E402
from fuzz_parts import pages, tally, units, workers  # noqa: E402

MOST_FINDINGS = 30
SAY_EVERY = 30.0  # seconds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--on", choices=["emulator", "gpu"], default="emulator")
    add("--seconds", type=command_line.positive, default=600,
        help="time to run")  # fmt: skip
    add("--count", type=command_line.number, help="number of problems")
    add("--seed", type=int, help="the first seed, by default a fresh one; "
        "each program has the next")  # fmt: skip
    add("--jobs", type=command_line.number, default=_cores(),
        help="processes")  # fmt: skip
    add("--again", metavar="SEED/NUMBER", help="run only this problem")
    add("--record", action="store_true",
        help="add the counts to docs/fuzz.json")  # fmt: skip
    add("--output", type=Path, metavar="FILE",
        help="add them to this file instead")  # fmt: skip
    add("--commit", help="what is tried, by default git's HEAD")
    add("--merge", type=Path, nargs="+", metavar="FILE",
        help="run nothing: add files to docs/fuzz.json")  # fmt: skip
    add("--write-docs", action="store_true",
        help="run nothing: make the tables of the page anew")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.again and not options.again.replace("/", "", 1).isdigit():
        parser.error(f"--again {options.again}: expected SEED/NUMBER")
    if options.output:
        command_line.check_file(parser, "--output", options.output)
    return options


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; return the exit status."""
    options = parse(arguments)
    if options.merge or options.write_docs:
        tally.add_to(tally.FILE, *map(tally.read, options.merge or ()))
        pages.write()
        return 0
    if options.on == "gpu":
        reason = machine.find_gpu()
        if reason is not None:
            print(
                f"fuzz.py --on gpu needs an NVIDIA GPU and found none"
                f" ({reason}). Nothing was run.",
                file=sys.stderr,
            )
            return 1
    if options.again:
        return again(options.on, options.again)
    return run(options)


def again(on: str, name: str) -> int:
    """Run one problem in this process."""
    seed, _, number = name.partition("/")
    for done in units.run(on, workers.make(on), int(seed), int(number or 0)):
        say(f"{done.name}: {describe(done)}: {done.wrong or 'right'}")
        if done.wrong:
            return 1
    return 0


def run(options: argparse.Namespace) -> int:
    """Run problems until the time is up or there are enough of them."""
    first = secrets.randbits(31) if options.seed is None else options.seed
    commit = options.commit or head()
    device = ""
    if options.on == "gpu":
        device = machine.describe()["device"]
    today = datetime.now(timezone.utc).date().isoformat()
    counted = tally.Tally(options.on, commit, today, device)
    say(f"{device or 'emulator'}, commit {commit}, {options.jobs} processes,"
        f" from seed {first} on")  # fmt: skip
    stopped = False
    try:
        work(options, first, counted)
    except KeyboardInterrupt:
        stopped = True
    say(progress(counted))
    path = options.output or (tally.FILE if options.record else None)
    if path and (counted.problems or counted.findings):
        tally.add_to(path, counted.record())
        if path == tally.FILE:
            pages.write()
        say(f"added to {path}")
    if stopped:
        return command_line.stopped("what was found is listed above")
    return 1 if counted.findings else 0


def work(
    options: argparse.Namespace, first: int, counted: tally.Tally
) -> None:
    """Count problems until time, number or findings are up."""
    start = said = time.monotonic()
    with workers.running(options.on, first, options.jobs) as all_done:
        for done in all_done:
            now = time.monotonic()
            counted.seconds = now - start
            if done is not None:
                note(options.on, done, counted)
            if now - said >= SAY_EVERY:
                said = now
                say(progress(counted))
            if (
                now - start >= options.seconds
                or counted.problems == options.count
                or len(counted.findings) >= MOST_FINDINGS
            ):
                return


def note(on: str, done: units.Done, counted: tally.Tally) -> None:
    """Count a problem; say what is wrong with it, and how to repeat it."""
    if done.labels:
        counted.add(done.labels)
    if done.wrong:
        counted.found(done.name, done.wrong)
        say(f"WRONG: {describe(done)}: {done.wrong}")
        say(f"again: python scripts/fuzz.py --on {on} --again {done.name}")


def describe(done: units.Done) -> str:
    """Return family, direction and dtype."""
    named = "family", "direction", "dtype"
    return " ".join(str(done.labels[x]) for x in named if x in done.labels)


def progress(counted: tally.Tally) -> str:
    """Return a one-line summary."""
    each = 1e3 * counted.seconds / max(counted.problems, 1)
    directions: Counter[str] = Counter()
    for kind, count in counted.counts["kinds"].items():
        directions[kind.split(" ")[1]] += count
    words = ", ".join(f"{x} {n}" for x, n in sorted(directions.items()))
    return (
        f"{counted.problems} problems in {counted.seconds:.0f} s"
        f" ({each:.0f} ms each), {len(counted.findings)} findings; {words}"
    )


def head() -> str:
    """Return git's HEAD, shortened; "unknown" without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()
    return "unknown"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
