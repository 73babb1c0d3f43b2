"""Plant single faults in the kernels and see which the emulated tests catch.

    python scripts/mutate.py                    # all, about half an hour
    python scripts/mutate.py --only "^mask"     # those of some names

The faults are in mutation_parts/faults/. For each, the tests that `make test`
runs on the emulator are run until one fails, with the examples of the `ci`
profile. Ends with status 1 if fewer than 95 % are caught, if one survives
whose text does not say why it must, or if one is caught that should not be.

First the tests are run without a fault, as they must pass, and which files
the kernels of each are made of is noted. A fault in one file then takes the
tests whose kernels have that file alone: what others run is, byte for byte,
what has passed. The notes are kept in the cache folder for as long as neither
the package nor a test is changed.
"""

from __future__ import annotations

import argparse
import hashlib
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


@dataclass(frozen=True)
class Room:
    """Where the tests run, and what is known of them."""

    folder: Path
    cache: Path  # of programs without a fault
    ran: dict[str, dict]  # tests: their kernels by file, their seconds


def run_tests(
    folder: Path, cache: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the emulated tests on the kernels in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "-p", "mutation_parts.planted", "-k", TESTS, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"),
             "CUFLASH_PLANTED": str(folder), "CUPY_CACHE_DIR": str(cache),
             "HYPOTHESIS_PROFILE": "ci", "CI": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )  # fmt: skip


def tests_of(fault: Fault, ran: dict[str, dict]) -> list[str]:
    """The tests that run the file of a fault, in an order to find it soon.

    Those with more of the words of `first` in their names before others; then
    by the number of kernels that have to be compiled, and by time.
    """

    def late(test: str) -> tuple[int, int, float]:
        absent = sum(word not in test for word in fault.first.split())
        return absent, kernels[test], ran[test]["seconds"]

    kernels = {x: ran[x]["kernels"].get(fault.file, 0) for x in ran}
    return sorted((x for x in ran if kernels[x]), key=late)


def check(fault: Fault, room: Room) -> Result:
    """Plant a fault and run the tests until one fails."""
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=room.folder))
    fault.plant(KERNELS, folder / "kernels")
    tests = tests_of(fault, room.ran)
    if not tests:
        raise RuntimeError(f"{fault}: no test runs that file")
    (folder / "tests.json").write_text(json.dumps(tests))
    # Links to what was compiled without the fault: most of it still holds.
    shutil.copytree(room.cache, folder / "cache", copy_function=os.link)
    files = sorted({x.partition("::")[0] for x in tests})
    done = run_tests(folder, folder / "cache", "-x", *files)
    test = said = ""
    if done.returncode == FAILED:
        failed = json.loads((folder / "failed.json").read_text())
        test, said = failed["test"], failed["said"]
    elif done.returncode != PASSED:
        raise RuntimeError(f"{fault}: pytest could not run\n{done.stdout}")
    shutil.rmtree(folder)
    return Result(fault, time.monotonic() - start, test, said)


def run_sound(folder: Path, cache: Path, jobs: int) -> dict[str, dict]:
    """Run the tests without a fault, as they must pass."""
    shutil.copytree(KERNELS, folder / "kernels")
    share = "-n", str(jobs), "--dist", "worksteal"
    done = run_tests(folder, cache, *share)
    if done.returncode != PASSED:
        raise RuntimeError(f"the tests fail without a fault\n{done.stdout}")
    return json.loads((folder / "ran.json").read_text())


def notes(cache: Path) -> Path:
    """Where the notes of the tests without a fault are kept."""
    files = [
        path
        for folder in ("cuflash", "reference", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    texts = [(str(path), path.read_bytes()) for path in files]
    key = hashlib.sha256(repr(texts).encode()).hexdigest()[:40]
    return cache / f"cuflash_mutate_{key}.json"


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
        folder, known = Path(name), notes(cache)
        if not known.exists():
            ran = run_sound(folder / "sound", cache, options.jobs)
            known.write_text(json.dumps(ran))
        room = Room(folder, cache, json.loads(known.read_text()))
        results = []
        with ThreadPoolExecutor(options.jobs) as pool:
            waited = [pool.submit(check, x, room) for x in chosen]
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
