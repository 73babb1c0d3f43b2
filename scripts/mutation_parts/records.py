"""Which lines of the kernels each test runs, from a recorded run.

Runs the emulated tests once on kernels compiled with --coverage. A test's
record is valid as long as the package, the helpers, its own file and the
kernel files of its programs are unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuflash.backends.emulator import runtime
from mutation_parts.mutants import Mutant

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "cuflash" / "kernels"
BATCH = 4  # tests that one child of a worker records

Bits = dict[str, int]  # lines by file, line n as bit n


@dataclass(frozen=True)
class Program:
    """A compiled kernel: its lines with code, by file; its cost."""

    files: frozenset[str]
    holds: Bits
    compile: float  # CPU seconds


@dataclass(frozen=True)
class Ran:
    """What one test ran."""

    ran: Bits
    programs: tuple[str, ...]
    seconds: float  # CPU seconds, besides compiling
    passed: bool = True


@dataclass
class Record:
    """The recorded runs of tests and programs."""

    tests: dict[str, Ran] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)


# ---- What a record depends on ----


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def common() -> str:
    """A hash of what all tests depend on, without kernels and test files."""
    command = [*runtime.host_compiler(), "--version"]
    paths = [
        path
        for folder in ("cuflash", "reference", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and KERNELS not in path.parents
        and not path.match("test_*.py")
    ]
    said = [(str(x.relative_to(ROOT)), _digest(x)) for x in paths]
    version = subprocess.run(command, capture_output=True, check=True).stdout
    return hashlib.sha256(repr((said, version)).encode()).hexdigest()


def state(test: str, files: Iterable[str]) -> str:
    """A hash of what a test's record depends on."""
    paths = [ROOT / test.partition("::")[0]]
    paths += [KERNELS / file for file in sorted(files)]
    parts = [_digest(x) if x.is_file() else "" for x in paths]
    return hashlib.sha256(repr((common(), parts)).encode()).hexdigest()[:16]


# ---- Making one ----


def make(
    path: Path,
    tests: list[str],
    run: Callable[[list[dict]], Iterator[dict]],
) -> Record:
    """The record of some tests: from a file, or by running them now.

    `run` yields the results of jobs (see worker.py) as they end.
    """
    record = Record()
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [x for x in map(_parsed, lines) if x and _holds(x)]
    for said in kept:
        _add(record, said)
    left = [x for x in tests if x not in record.tests]
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(kept) < len(lines):
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text("".join(json.dumps(x) + "\n" for x in kept))
        os.replace(part, path)
    jobs = [
        {"tests": left[i : i + BATCH], "record": True}
        for i in range(0, len(left), BATCH)
    ]
    for i, done in enumerate(run(jobs) if jobs else (), start=1):
        said = [*_lines(done)]
        with open(path, "a") as file:
            file.write("".join(json.dumps(x) + "\n" for x in said))
        for one in said:
            _add(record, one)
        print(f"\rrecorded {i} of {len(jobs)} batches", end="", flush=True)
    if jobs:
        print()
    record.tests = {x: record.tests[x] for x in tests if x in record.tests}
    return record


def read(path: Path) -> Record:
    """The record of a file, whether or not it still holds."""
    record = Record()
    for said in map(_parsed, path.read_text().splitlines()):
        if said:
            _add(record, said)
    return record


def _lines(ran: dict) -> Iterator[dict]:
    """What a job noted, as the file has it: a line a test."""
    for test in ran["tests"]:
        used = {x: ran["programs"][x] for x in test["programs"]}
        files = sorted({file for x in used.values() for file in x["files"]})
        yield {**test, "state": state(test["test"], files), "files": files,
               "programs": used}  # fmt: skip


def _parsed(line: str) -> dict | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # cut off
        return None


def _holds(said: dict) -> bool:
    return said["state"] == state(said["test"], said["files"])


def _add(record: Record, said: dict) -> None:
    """Add a line of the file."""
    record.tests[said["test"]] = Ran(
        _bits(said["ran"]), tuple(said["programs"]), said["seconds"],
        said["passed"],
    )  # fmt: skip
    for key, x in said["programs"].items():
        known = record.programs.get(key)
        cost = max(x["compile"], known.compile if known else 0.0)
        record.programs[key] = Program(
            frozenset(x["files"]), _bits(x["holds"]), cost
        )


def _bits(lines: dict[str, str]) -> Bits:
    return {file: int(bits, 16) for file, bits in lines.items()}


# ---- Which tests a mutant takes ----


@dataclass(frozen=True)
class Choice:
    """Tests in the order to run them; programs that lack the mutated line."""

    tests: list[str]
    spared: list[str]
    holding: int  # how many programs have it


def choose(mutant: Mutant, record: Record, budget: float) -> Choice:
    """The tests that run a mutated line, in the order of `_ordered`.

    A line without code, such as a constant, counts as its statement, else as
    its function. A line of a constexpr function, of no function, or of one
    that gcov does not list, counts as the whole file; tests that run it come
    first.
    """
    file = mutant.file
    for lines in (mutant.lines, mutant.statement, mutant.function):
        bits = sum(1 << line for line in set(lines))
        if any(x.holds.get(file, 0) & bits for x in record.programs.values()):
            break
    else:
        bits = 0
    whole = mutant.constant or not mutant.function or not bits
    hit = {
        key: file in x.files if whole else bool(x.holds.get(file, 0) & bits)
        for key, x in record.programs.items()
    }
    runs = {
        test: bool(x.ran.get(file, 0) & bits)
        for test, x in record.tests.items()
        if x.passed
    }
    first = [x for x in runs if runs[x]]
    others = [
        x
        for x in runs
        if whole
        and not runs[x]
        and any(map(hit.get, record.tests[x].programs))
    ]
    order = _ordered(first, record, hit, budget)
    order += _ordered(others, record, hit, budget)
    spared = [key for key in hit if not hit[key]]
    return Choice(order, spared, len(hit) - len(spared))


def _ordered(
    tests: list[str], record: Record, hit: dict[str, bool], budget: float
) -> list[str]:
    """Tests by the lines that each adds, for the time that it adds.

    The time includes that of programs not yet compiled. Similar tests come
    late, because they add few lines. If no test adds a line, the cheapest is
    next.
    """
    order, left, made, spent = [], set(tests), set(), 0.0
    seen: Bits = {}
    needs = {
        test: [x for x in record.tests[test].programs if hit[x]]
        for test in tests
    }

    def cost(test: str) -> float:
        new = (x for x in needs[test] if x not in made)
        compiling = sum(record.programs[x].compile for x in new)
        return record.tests[test].seconds + compiling

    def worth(test: str) -> tuple[float, str]:
        ran = record.tests[test].ran.items()
        new = sum((x & ~seen.get(file, 0)).bit_count() for file, x in ran)
        return -(1 + new) / max(cost(test), 1e-3), test

    while left and spent < budget:
        best = min(map(worth, left))[1]
        spent += cost(best)
        order.append(best)
        left.remove(best)
        made.update(needs[best])
        for file, lines in record.tests[best].ran.items():
            seen[file] = seen.get(file, 0) | lines
    return order + sorted(left, key=worth)
