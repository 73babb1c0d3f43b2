"""Plant single faults in the kernels and see which the emulated tests catch.

    python scripts/mutate.py                    # all, an hour on two cores
    python scripts/mutate.py --only "^mask"     # those of some names
    python scripts/mutate.py --minutes 8        # as many as are begun by then

The faults are in mutation_parts/faults/. For each, the tests that `make test`
runs on the emulator are run until one fails, with the examples of the `ci`
profile. Ends with status 1 if fewer than 95 % are caught, if one survives
whose text does not say why it must, if one is caught that should not be, or
if some were not run.

First the tests are run without a fault, as they must pass, and which files
the kernels of each are made of is noted. A fault in one file then takes the
tests whose kernels have that file alone: what others run is, byte for byte,
what has passed.

A run that was stopped goes on where it was: the notes, and what became of each
fault, are kept in the cache folder as they come, for as long as neither the
package nor a test is changed, nor the compiler. A fault is known by what it
replaces. Runs of some faults leave their results for one of all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from cuflash import folders
from cuflash.emulator import runtime
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


def command(*options: str) -> list[str]:
    """pytest, on the emulated tests and kernels from a folder."""
    return [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-p", "mutation_parts.planted", "-k", TESTS, *options,
    ]  # fmt: skip


def environment(folder: Path | str, cache: Path) -> dict[str, str]:
    """What pytest has to know besides."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT / "scripts"),
        "CUFLASH_PLANTED": str(folder), "CUPY_CACHE_DIR": str(cache),
        "HYPOTHESIS_PROFILE": "ci", "CI": "1",
    }  # fmt: skip


def run_tests(
    folder: Path, cache: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the emulated tests on the kernels in a folder."""
    return subprocess.run(
        command(*options),
        cwd=ROOT,
        env=environment(folder, cache),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


class Server:
    """A process that has collected the tests, and runs some in its children.

    See mutation_parts/planted.py. It ends with this one, or with its input.
    """

    def __init__(self, cache: Path):
        self.process = subprocess.Popen(
            command("-s", "-x"),
            cwd=ROOT,
            env=environment("-", cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, folder: Path) -> int:
        """pytest's exit status for the kernels and the tests in a folder."""
        said = []
        try:
            print(folder, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has said why
        for line in self.process.stdout:
            if line.startswith("status "):
                return int(line.split()[1])
            said.append(line)
        raise RuntimeError("pytest could not collect\n" + "".join(said))

    def close(self) -> None:
        """Let it end."""
        self.process.communicate("")


@dataclass
class Room:
    """Where the tests run, and what is known of them."""

    folder: Path
    cache: Path  # of programs without a fault
    ran: dict[str, dict]  # tests: their kernels by file, their seconds
    end: float = math.inf  # when to begin no more, by time.monotonic()

    def __post_init__(self):
        self.local = threading.local()
        self.servers = []

    def server(self) -> Server:
        """The thread's own."""
        if not hasattr(self.local, "server"):
            self.local.server = Server(self.cache)
            self.servers.append(self.local.server)
        return self.local.server


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


def check(fault: Fault, room: Room) -> Result | None:
    """Plant a fault and run the tests until one fails; None if too late."""
    start = time.monotonic()
    if start >= room.end:
        return None
    folder = Path(tempfile.mkdtemp(dir=room.folder))
    fault.plant(KERNELS, folder / "kernels")
    tests = tests_of(fault, room.ran)
    if not tests:
        raise RuntimeError(f"{fault}: no test runs that file")
    (folder / "tests.json").write_text(json.dumps(tests))
    # Links to what was compiled without the fault: most of it still holds.
    shutil.copytree(room.cache, folder / "cache", copy_function=os.link)
    status = room.server().run(folder)
    test = said = ""
    if status == FAILED:
        failed = json.loads((folder / "failed.json").read_text())
        test, said = failed["test"], failed["said"]
    elif status != PASSED:
        log = (folder / "log.txt").read_text()
        raise RuntimeError(f"{fault}: pytest could not run\n{log}")
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


def state() -> str:
    """A hash of all that results depend on, besides a fault itself."""
    files = [
        path
        for folder in ("cuflash", "reference", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    texts = [(str(x.relative_to(ROOT)), x.read_bytes()) for x in files]
    compiler = subprocess.run(
        [*runtime.host_compiler(), "--version"], capture_output=True
    ).stdout
    return hashlib.sha256(repr((texts, compiler)).encode()).hexdigest()[:40]


class Results:
    """Those of earlier runs, and of this one: a line each in a file."""

    def __init__(self, path: Path):
        self.path, self.known = path, {}
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # cut off
                of, *rest = json.loads(line)
                self.known[tuple(of)] = rest

    @staticmethod
    def key(fault: Fault) -> tuple:
        """What a fault is, whatever it is called."""
        return fault.file, fault.old, fault.new, fault.which, fault.of

    def get(self, fault: Fault) -> Result | None:
        """What became of a fault, if that is known."""
        rest = self.known.get(self.key(fault))
        return rest and Result(fault, *rest)

    def add(self, result: Result) -> None:
        """Keep one."""
        line = [self.key(result.fault), result.seconds, result.test]
        with open(self.path, "a") as file:
            file.write(json.dumps([*line, result.said]) + "\n")


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


def run(chosen: Iterable[Fault], room: Room, kept: Results, jobs: int) -> None:
    """Check faults, and keep what became of them."""
    with ThreadPoolExecutor(jobs) as pool:
        waited = [pool.submit(check, x, room) for x in chosen]
        try:
            for done in as_completed(waited):
                if done.result():
                    kept.add(done.result())
                    print(done.result(), flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for server in room.servers:
                server.close()


def main(arguments: list[str] | None = None) -> int:
    """Check the faults that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="a regular expression, found in names"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin none after"
    )
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.minutes * 60
    chosen = [x for x in faults.read() if re.search(options.only, str(x))]
    if not chosen:
        parser.error(f"--only {options.only}: no fault has that in its name")
    cache = folders.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    known = cache / f"cuflash_mutate_{state()}.json"
    kept_in = known.with_suffix(".results")
    kept = Results(kept_in)
    left = [x for x in chosen if not kept.get(x)]
    # Those that take all tests first, so that none of them is waited for.
    left.sort(key=lambda x: not x.survives)
    print(f"{len(chosen)} faults, of which {len(left)} were not run yet")
    # Beside the cache: files are linked from there.
    with tempfile.TemporaryDirectory(
        prefix="cuflash_mutate_", dir=cache.parent
    ) as name:
        if not known.exists():
            ran = run_sound(Path(name) / "sound", cache, options.jobs)
            known.write_text(json.dumps(ran))
        ran = json.loads(known.read_text())
        run(left, Room(Path(name), cache, ran, end), kept, options.jobs)
    kept = Results(kept_in)
    results = [x for x in map(kept.get, chosen) if x]
    if results:
        print("\n" + summary(results))
    passed = bool(results) and verdict(results)
    if len(results) < len(chosen):
        lack = len(chosen) - len(results)
        print(f"NOT RUN: {lack} of {len(chosen)}; the same again goes on")
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
