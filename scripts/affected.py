"""Run the tests that run a kernel file, few and fast ones first.

    python scripts/affected.py sm90/forward_softmax.cuh
    python scripts/affected.py common/mask.cuh --list    # names alone

The record that `make mutate` keeps says which lines each emulated test of
`make test` runs; it is made if there is none, which takes some minutes. It may
be older than the file: changed lines count where they stood. First come tests
that together run every line of the file that any test runs, however long they
take, then others for `--seconds` in all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from cuflash.errors import CompileError
from mutation_parts import records, running
from mutation_parts.records import Ran, Record
from mutation_parts.running import WorkerError

SUITE = "test"


def ordered(record: Record, file: str, seconds: float) -> list[str]:
    """Return tests that run a file, for so many CPU seconds in all.

    First those that together run all lines of it that any test does, then
    others. The next is the one that runs the most lines which those before it
    did not, and then any at all, for its time: with that of its programs that
    are not compiled yet, as they are once the file has changed.
    """
    left = {n: x for n, x in record.tests.items() if x.ran.get(file)}
    chosen: list[str] = []
    done, compiled = 0, set[str]()

    def cost(ran: Ran) -> float:
        new = set(ran.programs) - compiled
        return 0.1 + ran.seconds + sum(record.programs[x].compile for x in new)

    def worth(name: str) -> tuple[float, float]:
        ran = left[name]
        time = cost(ran)
        return (ran.ran[file] & ~done).bit_count() / time, 1 / time

    while left:
        best = max(left, key=worth)
        ran = left.pop(best)
        seconds -= cost(ran)
        if seconds < 0 and not ran.ran[file] & ~done:
            break
        done |= ran.ran[file]
        compiled |= set(ran.programs)
        chosen.append(best)
    return chosen


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("file", help="in cuflash/kernels, such as sm90/forward.cu")
    add("--list", action="store_true", help="print the tests, run none")
    add("--seconds", type=float, default=60.0, help="CPU seconds (60)")
    add("--jobs", type=int, default=2, help="to make a record (2)")
    add(
        "--folder",
        type=Path,
        default=running.default_folder(),
        help="where the record is kept (the cache folder)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Choose tests and run them; return pytest's exit status."""
    options = parsed(arguments)
    if not (records.KERNELS / options.file).is_file():
        print(f"no file of cuflash/kernels is called {options.file}")
        return 2
    try:
        record = running.recorded(
            options.folder, SUITE, options.jobs, any_age=True
        )
    except (CompileError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2
    names = ordered(record, options.file, options.seconds)
    if not names:
        print(f"no emulated test of `make test` runs {options.file}")
        return 1
    number = sum(bool(x.ran.get(options.file)) for x in record.tests.values())
    print(
        f"{len(names)} of {number} tests that run {options.file}; they run all"
        " of its lines that any of them runs",
        flush=True,
    )
    if options.list:
        print("\n".join(names))
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-x", *names]
    return subprocess.run(command, cwd=records.ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
