"""Mutate the kernels and see which mutants the emulated tests catch.

    python scripts/mutate.py                        # 100, drawn by rules
    python scripts/mutate.py --count 1000 --jobs 16 --output results.json
    python scripts/mutate.py --only common/mask.cuh        # of a file
    python scripts/mutate.py --only ID              # one again
    python scripts/mutate.py --list --only "*/by-hand/*"
    python scripts/mutate.py --seconds 500 --folder mutants   # and again

A mutant is a kernel with one small change, made by an operator, which is a
rule on tokens (mutation_parts/operators.py), or by hand (by_hand.txt). For
each mutant, the tests that run the changed line are run until one fails,
starting with those that run the most other lines for their time. A recorded
run tells which tests those are; it is made if missing, and cached.

The sample depends on the seed and on the mutants' ids: the operators take
turns. A mutant that does not compile is replaced by the next.

A stopped run resumes if no file has changed; --seconds stops it. Exits with
status 1 if too few mutants are caught, 3 if the time was up before the end.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from cuflash.build import source
from cuflash.errors import CompileError
from mutation_parts import mutants, records, running
from mutation_parts.mutants import Mutant, Population
from mutation_parts.running import (
    CAUGHT,
    DOES_NOT_COMPILE,
    EQUIVALENT,
    OUTCOMES,
    SUITES,
    UNMODELLED,
    Result,
    TimeIsUp,
    WorkerError,
)

# Least share caught of what tests can detect: docs/internals/emulator.md.
ENOUGH = {"test": 0.93, "test-all": 0.97}
UNDETECTABLE = EQUIVALENT, UNMODELLED
UNFINISHED = 3  # exit status


def drawn(all_of_them: Iterable[Mutant], seed: int) -> Iterator[Mutant]:
    """Return mutants in the order of a sample: operators take turns."""
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in all_of_them:
        by_operator.setdefault(mutant.id.split("/")[-2], []).append(mutant)
    turns = []
    for name, of_it in by_operator.items():
        first = hashlib.sha256(f"{seed} {name}".encode()).digest()
        of_it.sort(key=lambda x: x.rank(seed))
        turns += [(i, first, mutant) for i, mutant in enumerate(of_it)]
    turns.sort(key=lambda x: x[:2])
    return (mutant for *_, mutant in turns)


def matching(found: Population, patterns: list[str]) -> list[Mutant]:
    """Return the mutants that ids, files or patterns select."""
    if not patterns:
        return [*found.mutants.values()]
    if all(x in found.mutants for x in patterns):
        return [found.mutants[x] for x in patterns]
    return [
        x
        for x in found.mutants.values()
        if any(
            fnmatch.fnmatchcase(x.id, pattern)
            or x.id.startswith(f"{pattern.rstrip('/')}/")
            for pattern in patterns
        )
    ]


class Results:
    """Results of this run, and of an earlier one on identical files."""

    def __init__(self, path: Path, state: str):
        self.path, self.state = path, state
        self.known: dict[str, Result] = {}
        try:
            kept = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return
        if kept["state"] == state:
            self.known = {x["id"]: Result(**x) for x in kept["results"]}

    def add(self, result: Result) -> None:
        """Store a result."""
        self.known[result.id] = result
        kept = [asdict(x) for x in self.known.values()]
        said = {"state": self.state, "results": kept}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(said, indent=1))
        os.replace(part, self.path)


def state_of(record: records.Record, suite: str, budget: float) -> str:
    """Return a hash of everything that results depend on but the mutant."""
    files = source.kernel_files(records.KERNELS)
    kernels = [(name, path.read_text()) for name, path in files.items()]
    tests = [records.state(x, ()) for x in sorted(record.tests)]
    said = repr((sorted(kernels), tests, suite, budget))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def repeat(one: Result, options: argparse.Namespace) -> str:
    """Return the command that reruns a mutant."""
    words = [f"--only {one.id}"]
    if options.suite != "test":
        words.append(f"--suite {options.suite}")
    return f'make mutate ARGS="{" ".join(words)}"'


def described(one: Result, options: argparse.Namespace) -> str:
    """Return a result as text, with the command that repeats it."""
    tests = f", {one.run} of {one.chosen} tests" if one.chosen else ""
    return (
        f"{one.outcome}: {one.file}:{one.line}: {one.what}"
        f" ({one.seconds:.0f} CPU s{tests})\n"
        + (f"    {one.why}\n" if one.why else "")
        + f"    {repeat(one, options)}"
    )


def table(results: list[Result]) -> str:
    """Return a table: mutants of each operator by outcome."""
    columns = OUTCOMES[:-1]
    lines = [
        "| operator | drawn | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) + 1),
    ]
    for name in [*sorted({x.operator for x in results}), "all"]:
        of_it = [x for x in results if name in (x.operator, "all")]
        counts = [sum(x.outcome == c for x in of_it) for c in columns]
        cells = map(str, [len(of_it), *counts])
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def share_caught(results: list[Result]) -> float:
    """Return the share caught of those that tests can detect; 1 if none."""
    counted = [x for x in results if x.outcome not in UNDETECTABLE]
    caught = sum(x.outcome == CAUGHT for x in counted)
    return caught / len(counted) if counted else 1.0


def sample(
    chosen: list[Mutant],
    found: Population,
    kept: Results,
    options: argparse.Namespace,
    record: records.Record,
) -> tuple[list[Result], bool]:
    """Run the requested number of mutants that compile.

    Returns
    -------
    tuple of list and bool
        The results, and whether they are all.
    """
    order, results, is_all = iter(chosen), [], True
    exact = len(options.only) == 1 and options.only[0] in found.mutants

    def run(mutant: Mutant) -> Result:
        return running.check(mutant, pool, record, options.budget)

    with running.pool(options.suite, options.jobs, options.deadline) as pool:
        # Replace those that did not compile.
        while is_all and (
            batch := [*islice(order, options.count - len(results))]
        ):
            left = []
            for x in batch:
                why = None if exact else found.undetectable(x.id)
                if why is not None:
                    listed = x.id in found.equivalent
                    outcome = EQUIVALENT if listed else UNMODELLED
                    results.append(
                        Result(x.id, outcome, x.lines[0], x.what, why)
                    )
                elif x.id in kept.known and not exact:
                    results.append(kept.known[x.id])
                else:
                    left.append(x)
            try:
                for result in pool.each(run, left):
                    kept.add(result)
                    results.append(result)
                    print(described(result, options), flush=True)
            except TimeIsUp:
                is_all = False
            results = [x for x in results if x.outcome != DOES_NOT_COMPILE]
    return results, is_all


def report(results: list[Result], options: argparse.Namespace) -> int:
    """Print survivors and the table; return the exit status."""
    for outcome in OUTCOMES[1:-1]:
        of_it = [x for x in results if x.outcome == outcome]
        if of_it:
            print(f"\n==== {outcome} ====")
        for one in of_it:
            print(described(one, options))
    share, enough = share_caught(results), ENOUGH[options.suite]
    counted = sum(x.outcome not in UNDETECTABLE for x in results)
    unmodelled = sum(x.outcome == UNMODELLED for x in results)
    seconds = sum(x.seconds for x in results)
    print(f"\n{table(results)}\n")
    print(
        f"{share:.1%} of {counted} mutants that tests can detect are caught"
        f" by `make {options.suite}`, of which {enough:.0%} are asked for;"
        f" {len(results) - counted - unmodelled} are equivalent, {unmodelled}"
        f" faults that the emulator does not model; {seconds:.0f} CPU s"
    )
    return 0 if share >= enough else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--count", type=int, default=100, help="mutants to draw (100)")
    add("--seed", type=int, default=0, help="seed of the sample (0)")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="ID",
        help="draw only from these: ids, files, file/function or patterns",
    )
    add("--suite", choices=SUITES, default="test", help="the tests to run")
    add(
        "--budget",
        type=float,
        default=60.0,
        help="CPU seconds per mutant (60), after which no test is started",
    )
    add("--jobs", type=int, default=os.cpu_count(), help="mutants in parallel")
    add("--seconds", type=float, help="stop after so long, resume later")
    add(
        "--tests",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="of the suite's tests only these, such as '*test_merge.py*'",
    )
    add(
        "--folder",
        type=Path,
        default=running.default_folder(),
        help="where record and results are kept (the cache folder)",
    )
    add("--output", type=Path, help="JSON file of results, to resume")
    add("--list", action="store_true", help="print the sample, run nothing")
    options = parser.parse_args(arguments)  # fmt: skip
    options.deadline = None
    if options.seconds is not None:
        options.deadline = time.monotonic() + options.seconds
    return options


def main(arguments: list[str] | None = None) -> int:
    """Draw mutants and run them; return the exit status."""
    options = parsed(arguments)
    found = mutants.population(records.KERNELS)
    order = [*drawn(matching(found, options.only), options.seed)]
    for line in found.stale:
        print(f"stale: {line}")
    if not order:
        print(f"no mutant is called {' '.join(options.only)}")
        return 2
    print(f"{len(order)} mutants, of which {options.count} at most are drawn")
    if options.list:
        for x in order[: options.count]:
            print(f"{x.id}\n    {x.file}:{x.lines[0]}: {x.what}")
        return 0
    folder, suite = options.folder, options.suite
    try:
        record = running.recorded(
            folder, suite, options.jobs, options.deadline,
            patterns=options.tests,
        )  # fmt: skip
        for test, ran in record.tests.items():
            if not ran.passed:
                print(f"left out: fails unmutated, with --coverage: {test}")
        path = options.output or folder / f"results_{suite}.json"
        state = state_of(record, suite, options.budget)
        kept = Results(path, state)
        results, is_all = sample(order, found, kept, options, record)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        return 130
    except TimeIsUp:
        print("\nthe time is up, the record incomplete: again, to go on")
        return UNFINISHED
    except (CompileError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2
    status = report(results, options)
    if not is_all:
        print("the time is up: the same command goes on from here")
    return status if is_all else UNFINISHED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
