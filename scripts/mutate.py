"""Mutate the kernels and see which mutants the emulated tests catch.

    python scripts/mutate.py                        # 100, drawn by rules
    python scripts/mutate.py --count 1000 --jobs 16 --output results.json
    python scripts/mutate.py --only common/mask.cuh        # of a file
    python scripts/mutate.py --only ID              # one again
    python scripts/mutate.py --list --only "*/by-hand/*"

A mutant is a kernel with one small change, made by an operator, which is a
rule on tokens (mutation_parts/operators.py), or by hand (by_hand.txt). For
each, the tests that run the changed line are run, those first that run most
other lines for their time, until one fails. A recorded run says which tests
those are; it is made first where there is none, and kept in the cache folder.

The sample depends on the seed and on the mutants' ids: each operator in turn
gives one. A mutant that does not compile is replaced by the next.

A run that was stopped goes on where it was, as long as nothing has changed.
Ends with status 1 if too few are caught.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from cuflash import folders
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
    Result,
    WorkerError,
)

# Of those that are not equivalent; docs/internals/emulator.md.
ENOUGH = {"test": 0.93, "test-all": 0.97}


def drawn(all_of_them: Iterable[Mutant], seed: int) -> Iterator[Mutant]:
    """Mutants in the order of a sample: of each operator one in turn."""
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
    """The mutants with one of some ids, or of some files, or patterns."""
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
    """Those of this run, and of one before it on the very same files."""

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
        """Keep one."""
        self.known[result.id] = result
        kept = [asdict(x) for x in self.known.values()]
        said = {"state": self.state, "results": kept}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(said, indent=1))
        os.replace(part, self.path)


def state_of(record: records.Record, suite: str, budget: float) -> str:
    """A hash of all that results depend on, besides a mutant itself."""
    files = source.kernel_files(records.KERNELS)
    kernels = [(name, path.read_text()) for name, path in files.items()]
    tests = [records.state(x, ()) for x in sorted(record.tests)]
    said = repr((sorted(kernels), tests, suite, budget))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def repeat(one: Result, options: argparse.Namespace) -> str:
    """The command that runs a mutant again."""
    words = [f"--only {one.id}"]
    if options.suite != "test":
        words.append(f"--suite {options.suite}")
    return f'make mutate ARGS="{" ".join(words)}"'


def described(one: Result, options: argparse.Namespace) -> str:
    """A result, and how to have it again."""
    tests = f", {one.run} of {one.chosen} tests" if one.chosen else ""
    return (
        f"{one.outcome}: {one.file}:{one.line}: {one.what}"
        f" ({one.seconds:.0f} CPU s{tests})\n"
        + (f"    {one.why}\n" if one.why else "")
        + f"    {repeat(one, options)}"
    )


def table(results: list[Result]) -> str:
    """How many mutants of each operator came to what."""
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
    """Of those that are not equivalent; 1 if there are none."""
    counted = [x for x in results if x.outcome != EQUIVALENT]
    caught = sum(x.outcome == CAUGHT for x in counted)
    return caught / len(counted) if counted else 1.0


def sample(
    chosen: list[Mutant],
    found: Population,
    kept: Results,
    options: argparse.Namespace,
    record: records.Record,
) -> list[Result]:
    """Run as many mutants as asked for, which compile."""
    order, results = iter(chosen), []
    exact = len(options.only) == 1 and options.only[0] in found.mutants

    def run(mutant: Mutant) -> Result:
        return running.check(mutant, pool, record, options.budget)

    with running.pool(options.suite, options.jobs) as pool:
        # Further ones for those that do not compile.
        while batch := [*islice(order, options.count - len(results))]:
            left = []
            for x in batch:
                if x.id in found.equivalent and not exact:
                    why = found.equivalent[x.id]
                    results.append(
                        Result(x.id, EQUIVALENT, x.lines[0], x.what, why)
                    )
                elif x.id in kept.known and not exact:
                    results.append(kept.known[x.id])
                else:
                    left.append(x)
            for result in pool.each(run, left):
                kept.add(result)
                results.append(result)
                print(described(result, options), flush=True)
            results = [x for x in results if x.outcome != DOES_NOT_COMPILE]
    return results


def report(results: list[Result], options: argparse.Namespace) -> int:
    """Print what was not caught, and the table; the exit status."""
    for outcome in OUTCOMES[1:-1]:
        of_it = [x for x in results if x.outcome == outcome]
        if of_it:
            print(f"\n==== {outcome} ====")
        for one in of_it:
            print(described(one, options))
    share, enough = share_caught(results), ENOUGH[options.suite]
    equivalent = sum(x.outcome == EQUIVALENT for x in results)
    seconds = sum(x.seconds for x in results)
    print(f"\n{table(results)}\n")
    print(
        f"{share:.1%} of {len(results) - equivalent} mutants that are not"
        f" equivalent are caught by `make {options.suite}`, of which"
        f" {enough:.0%} are asked for; {seconds:.0f} CPU s"
    )
    return 0 if share >= enough else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--count", type=int, default=100, help="mutants to draw (100)")
    add("--seed", type=int, default=0, help="of the draw (0)")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="ID",
        help="draw from these alone: ids, files, file/function or patterns",
    )
    add("--suite", choices=SUITES, default="test", help="whose tests run")
    add(
        "--budget",
        type=float,
        default=60.0,
        help="CPU seconds for a mutant (60); a test that has begun ends",
    )
    add("--jobs", type=int, default=os.cpu_count(), help="side by side")
    add("--output", type=Path, help="results as JSON; goes on from there")
    add("--list", action="store_true", help="print what is drawn, run none")
    return parser.parse_args(arguments)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Draw mutants and run them."""
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
    cache = folders.cache_folder() / "cuflash_mutate"
    try:
        with running.recording_pool(
            options.suite, options.jobs, cache
        ) as pool:
            record = records.make(
                cache / f"record_{options.suite}.jsonl",
                pool.tests(),
                lambda jobs: pool.each(pool.do, jobs),
            )
        for test, ran in record.tests.items():
            if not ran.passed:
                print(f"left out: fails unmutated, with --coverage: {test}")
        path = options.output or cache / f"results_{options.suite}.json"
        state = state_of(record, options.suite, options.budget)
        kept = Results(path, state)
        results = sample(order, found, kept, options, record)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        return 130
    except (CompileError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2
    return report(results, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
