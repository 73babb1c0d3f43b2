"""Report the kernel lines that no emulated test runs.

    python scripts/kernel_coverage.py               # tests of `make test-all`
    python scripts/kernel_coverage.py --suite test  # of `make test`
    python scripts/kernel_coverage.py -k merge      # options for pytest

Runs the emulated tests on kernels compiled with --coverage and sums gcov's
counts over all compiled kernels: a line counts as run if it ran in one of
them. Functions that no kernel contains are reported too: a template that is
never instantiated is never compiled.

Exits with status 1 if a line outside EXCEPTIONS did not run, or if one inside
did. `make test` need not run every line: with it, the status is 1 if fewer
than LEAST_SHARE ran.
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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import command_line
from cuflash.build import source
from mutation_parts.running import SUITES

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "cuflash" / "kernels"
PASSED, FAILED, WRONG_USAGE = 0, 1, 4  # pytest's exit statuses

# Of lines with code, in `make test` (docs/internals/testing.md).
LEAST_SHARE = 0.97

Line = tuple[str, int]  # a file of kernels/, a line number from 1 on


@dataclass(frozen=True)
class Excepted:
    """Lines that cannot run, found by their beginning, unindented."""

    file: str
    text: str
    why: str
    lines: int = 1


# An empty text excepts a whole file.
EXCEPTIONS = (
    Excepted(
        "sm80/mma.cuh",
        "__device__ __forceinline__ void load(u32 (&a)[4], int m, int k)"
        " const {\nif (AS_NAMED)",
        "inlined, without a statement: gcov does not list it",
    ),
    Excepted("common/ptx.cuh", "", "the emulator replaces it by its twin"),
    Excepted(
        "common/smem.cuh",
        "template <bool PADDED> constexpr Missing missing(bool ragged) {",
        "a template argument: the compiler evaluates it",
    ),
)


# ---- Counting ----


def run_tests(cache: Path, suite: str, options: list[str]) -> int:
    """Run the emulated tests on instrumented kernels; pytest's status."""
    chosen = ["-m", "not slow"] if suite == "test" else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "emulated",
         "-n", str(os.cpu_count()), "--dist", "worksteal", *chosen,
         *options],
        cwd=ROOT,
        env={"HYPOTHESIS_PROFILE": SUITES[suite], **os.environ, "CI": "1",
             "CUPY_CACHE_DIR": str(cache),
             "CUFLASH_EMULATOR_FLAGS": "--coverage"},
        stdin=subprocess.DEVNULL,
    ).returncode  # fmt: skip


def gcov(notes: Path) -> dict:
    """Return gcov's result for one compiled kernel: run or not, by file."""
    done = subprocess.run(
        ["gcov", "--json-format", "--stdout", notes.name],
        cwd=notes.parent,
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def counts(reports: Iterable[dict], names: set[str]) -> Counter[Line]:
    """Return how often each line with code ran, over all kernels."""
    total: Counter[Line] = Counter()
    for report in reports:
        for file in report["files"]:
            if file["file"] not in names:
                continue  # the emulator's own
            for line in file["lines"]:
                total[file["file"], line["line_number"]] += line["count"]
    return total


# ---- What did not run ----

_HEAD = re.compile(r"(?!\s*(?:if|for|while|switch|else|do|//)\b)[^/]*\) ")
_OPENS = re.compile(_HEAD.pattern + r"(const )?\{$")
_WHOLE = re.compile(_HEAD.pattern + r"(const )?\{ .*; \}$")
_NAME = re.compile(r"(\w+)(?:<\w+>)?\(")


def functions(text: str) -> list[tuple[int, int]]:
    """Return the first and last line of each function, by its layout.

    A body opens at the end of a line and closes where a line begins with a
    brace indented no more than the head, or is one line altogether.
    """
    found, lines = [], text.splitlines()
    for first, line in enumerate(lines, start=1):
        if _WHOLE.match(line):
            found.append((first, first))
        elif _OPENS.match(line):
            # The head may start on an earlier line, indented less.
            depth = 1
            for last in range(first + 1, len(lines) + 1):
                depth += lines[last - 1].count("{")
                depth -= lines[last - 1].count("}")
                if depth <= 0:
                    break
            found.append((first, last))
    return found


def never_compiled(
    text: str, with_code: set[int], called: set[str]
) -> list[int]:
    """Return the first lines of functions that no kernel has code of.

    A one-line function, such as a constant, may be folded into its callers:
    it counts as compiled if its name is among `called`.
    """
    found, end = [], 0
    lines = text.splitlines()
    for first, last in functions(text):
        if first <= end or with_code.intersection(range(first, last + 1)):
            continue
        name = _NAME.search(lines[first - 1])
        if first == last and name and name[1] in called:
            continue
        found.append(first)
        end = last
    return found


def names_called(texts: Iterable[str]) -> set[str]:
    """Return names followed by a parenthesis at least twice.

    One occurrence is the definition.
    """
    code = (re.sub("//.*", "", text) for text in texts)
    names = Counter(name for x in code for name in _NAME.findall(x))
    return {name for name, count in names.items() if count > 1}


def missed(
    name: str, text: str, total: Counter[Line], called: set[str]
) -> dict[int, str]:
    """Return the lines of a file that did not run, and why."""
    of_file = {n: total[file, n] for file, n in total if file == name}
    found = {n: "not run" for n, count in of_file.items() if count == 0}
    for n in never_compiled(text, set(of_file), called):
        found[n] = "not compiled"
    return dict(sorted(found.items()))


def excepted(one: Excepted, text: str) -> list[int]:
    """Return the lines that an exception names; none if it is stale."""
    lines = [line.strip() for line in text.splitlines()]
    if not one.text:
        return list(range(1, len(lines) + 1))
    more = one.text.count("\n")
    found = [
        n
        for n in range(1, len(lines) + 1)
        if "\n".join(lines[n - 1 : n + more]).startswith(one.text)
    ]
    if len(found) != 1:
        return []
    return list(range(found[0], found[0] + one.lines))


def report(
    total: Counter[Line],
    texts: dict[str, str],
    exceptions: tuple[Excepted, ...] = EXCEPTIONS,
) -> list[str]:
    """Return the problems: lines that did not run, stale exceptions."""
    wrong = []
    called = names_called(texts.values())
    for name, text in sorted(texts.items()):
        lines = missed(name, text, total, called)
        for one in (x for x in exceptions if x.file == name):
            named = set(excepted(one, text)).intersection(lines)
            if not named:
                wrong.append(f"{name}: stale exception: {one.text}")
            for n in named:
                del lines[n]
        code = text.splitlines()
        wrong += [
            f"{name}:{n}: {why}: {code[n - 1].strip()}"
            for n, why in lines.items()
        ]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] [--suite SUITE] [options of pytest]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--suite", choices=SUITES, default="test-all")
    known, options = parser.parse_known_args(arguments)
    if shutil.which("gcov") is None:
        print("gcov was not found: it comes with g++", file=sys.stderr)
        return 1
    try:
        return count_and_report(known.suite, options)
    except KeyboardInterrupt:
        return command_line.stopped("nothing was counted")


def count_and_report(suite: str, options: list[str]) -> int:
    """Run a suite's tests with pytest's options, sum counts, report."""
    with tempfile.TemporaryDirectory(prefix="cuflash_coverage_") as cache:
        status = run_tests(Path(cache), suite, options)
        if status not in (PASSED, FAILED):
            print(
                f"pytest ended with status {status}: nothing was counted",
                file=sys.stderr,
            )
            return 2 if status == WRONG_USAGE else 1
        notes = Path(cache).rglob("*.gcno")
        texts = {
            name: path.read_text("ascii")
            for name, path in source.kernel_files().items()
        }
        total = counts(map(gcov, notes), set(texts))
    wrong = report(total, texts)
    print("\n".join(wrong))
    run = sum(count > 0 for count in total.values())
    share = run / max(len(total), 1)
    print(f"{run} of {len(total)} lines with code ran ({share:.2%})")
    enough = not wrong if suite == "test-all" else share >= LEAST_SHARE
    return 0 if enough and not status else 1


if __name__ == "__main__":
    sys.exit(main())
