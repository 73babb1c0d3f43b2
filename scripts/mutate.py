"""Plant single faults in the kernels and see which the emulated tests catch.

    python scripts/mutate.py                    # all, about half an hour
    python scripts/mutate.py --only "^mask"     # those of some names

The faults are in mutation_parts/faults/. For each, the tests that `make test`
runs on the emulator are run until one fails, with the examples of the `ci`
profile. Ends with status 1 if fewer than 95 % are caught, if one survives
whose text does not say why it must, or if one is caught that should not be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from cuflash import compiler
from mutation_parts import faults
from mutation_parts.faults import Fault

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "cuflash" / "kernels"
ENOUGH = 0.95
# Those of the primitives have kernels of their own.
TESTS = "emulated and not test_ptx"

PASSED, FAILED = 0, 1  # pytest's exit statuses


@dataclass(frozen=True)
class Result:
    """What became of a fault."""

    fault: Fault
    seconds: float
    test: str = ""  # that failed, empty if the fault survived
    said: str = ""

    @property
    def how(self) -> str:
        """One of the columns of the summary."""
        if not self.test:
            return "survived"
        if "CompileError" in self.said:
            return "does not compile"
        return "stopped" if "KernelFault" in self.said else "wrong result"

    @property
    def as_expected(self) -> bool:
        if self.fault.survives:
            return self.how == "survived"
        return self.how in ("stopped", "wrong result")

    def __str__(self) -> str:
        test = self.test.rpartition("/")[2]
        said = " ".join(self.said.split())[:160]
        return (
            f"{self.how:12} {self.seconds:4.0f} s  {self.fault}"
            + (f"\n{'':20} {test}\n{'':20} {said}" if test else "")
            + ("" if self.as_expected else f"\n{'':20} NOT AS EXPECTED")
        )


def run_tests(
    folder: Path, cache: Path, first: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the emulated tests on the kernels in a folder.

    Those with the words of `first` in their names before the others.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "-p", "mutation_parts.planted", "-k", TESTS, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"),
             "CUFLASH_PLANTED": str(folder), "CUFLASH_FIRST": first,
             "CUPY_CACHE_DIR": str(cache), "HYPOTHESIS_PROFILE": "ci",
             "CI": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )  # fmt: skip


def check(fault: Fault, room: Path, cache: Path) -> Result:
    """Plant a fault and run the tests until one fails."""
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=room))
    fault.plant(KERNELS, folder / "kernels")
    # Links to what was compiled without the fault: most of it still holds.
    shutil.copytree(cache, folder / "cache", copy_function=os.link)
    done = run_tests(folder, folder / "cache", fault.first, "-x")
    test = said = ""
    if done.returncode == FAILED:
        failed = json.loads((folder / "failed.json").read_text())
        test, said = failed["test"], failed["said"]
    elif done.returncode != PASSED:
        raise RuntimeError(f"{fault}: pytest could not run\n{done.stdout}")
    shutil.rmtree(folder)
    return Result(fault, time.monotonic() - start, test, said)


def run_sound(room: Path, cache: Path, jobs: int) -> None:
    """Run the tests without a fault, as they must pass."""
    shutil.copytree(KERNELS, room / "sound" / "kernels")
    share = "-n", str(jobs), "--dist", "worksteal"
    done = run_tests(room / "sound", cache, "", *share)
    if done.returncode != PASSED:
        raise RuntimeError(f"the tests fail without a fault\n{done.stdout}")


def summary(results: list[Result]) -> str:
    """A table: how many faults of each file came to what."""
    columns = ["stopped", "wrong result", "survived"]
    lines = [
        "| faults in | planted | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) + 1),
    ]
    files = sorted({x.fault.file for x in results})
    for name in [*files, "all"]:
        of_file = [x for x in results if name in (x.fault.file, "all")]
        counts = Counter(x.how for x in of_file)
        cells = [len(of_file), *(counts[column] for column in columns)]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def verdict(results: list[Result]) -> bool:
    """Whether enough are caught, and all as expected."""
    caught = sum(x.how in ("stopped", "wrong result") for x in results)
    print(f"caught {caught} of {len(results)}: {caught / len(results):.1%}")
    for x in results:
        if not x.as_expected:
            print(f"not as expected: {x.how}: {x.fault}")
    return caught >= ENOUGH * len(results) and all(
        x.as_expected for x in results
    )


def main(arguments: list[str] | None = None) -> int:
    """Check the faults that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="a regular expression, found in names"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--trust",
        action="store_true",
        help="the tests pass without a fault: do not run them first",
    )
    options = parser.parse_args(arguments)
    chosen = [x for x in faults.read() if re.search(options.only, str(x))]
    if not chosen:
        parser.error(f"--only {options.only}: no fault has that in its name")
    cache = compiler.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    # Beside the cache: files are linked from there.
    with tempfile.TemporaryDirectory(
        prefix="cuflash_mutate_", dir=cache.parent
    ) as name:
        room = Path(name)
        if not options.trust:
            run_sound(room, cache, options.jobs)
        results = []
        with ThreadPoolExecutor(options.jobs) as pool:
            waited = [pool.submit(check, x, room, cache) for x in chosen]
            try:
                for done in as_completed(waited):
                    results.append(done.result())
                    print(results[-1], flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    print("\n" + summary(results))
    return 0 if verdict(results) else 1


if __name__ == "__main__":
    sys.exit(main())
