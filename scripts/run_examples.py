"""Run every Python block of the documentation, and every doctest.

README.md and docs/**/*.md: the blocks of a page run from top to bottom, as one
program. A comment on the line before a block,

    <!-- needs: torch -->

lets it run only where that is there: torch, transformers, jax, gpu (and CuPy)
or compiler (of C++). What did not run is named. Then the doctests of cuflash
and of its reference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import command_line
from example_parts import pages, running

ROOT = running.ROOT
PROCESSES = 4


class Task(NamedTuple):
    """What a child process runs: the blocks of a page, or modules' doctests.

    name : as it is printed.
    arguments : those of --child.
    blocks, modules : their numbers.
    """

    name: str
    arguments: tuple[str, ...]
    blocks: int = 0
    modules: int = 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", nargs="*", type=Path, help="default: all, and all doctests"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=pages.NEEDS,
        help="fail if this is not there, instead of skipping its blocks",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return _child(*args.child)
    if absent := running.missing(tuple(args.require)):
        parser.error(f"--require {absent[0]}: it is not there")
    for page in args.pages:
        if not page.is_file():
            parser.error(f"{page}: there is no such page")
    tasks, skipped = _tasks(args.pages)
    failed = run(tasks)
    for name in skipped:
        print(f"skipped: {name}")
    blocks, modules = (
        sum(getattr(task, name) for task in tasks)
        for name in ("blocks", "modules")
    )
    print(
        f"{blocks} blocks and the doctests of {modules} modules ran, "
        f"{len(skipped)} were skipped; "
        + (f"failed: {', '.join(x.name for x in failed)}" if failed else "ok")
    )
    return 1 if failed else 0


def _tasks(only: list[Path]) -> tuple[list[Task], list[str]]:
    """Return what runs, and the names of what does not."""
    tasks, skipped = [], []
    for page in only or every_page():
        blocks = [*pages.blocks_of(page)]
        number = 0
        for block in blocks:
            if absent := running.missing(block.needs):
                skipped.append(f"{_name(page)}:{block.line} ({absent[0]})")
            else:
                number += 1
        if number:
            tasks.append(Task(_name(page), ("page", str(page)), number))
    if only:
        return tasks, skipped
    by_needs: dict[tuple[str, ...], list[str]] = {}
    for module, needs in running.modules_with_doctests():
        if absent := running.missing(needs):
            skipped.append(f"doctests of {module} ({absent[0]})")
        else:
            by_needs.setdefault(needs, []).append(module)
    for needs, modules in by_needs.items():
        name = " ".join(["doctests", *(["with"] if needs else []), *needs])
        command = ("modules", *modules)
        tasks.append(Task(name, command, modules=len(modules)))
    return tasks, skipped


def every_page() -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def _name(page: Path) -> str:
    page = page.resolve()
    return str(page.relative_to(ROOT) if ROOT in page.parents else page)


def run(tasks: list[Task]) -> list[Task]:
    """Run each in a process; print them; return those that failed."""
    failed = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for task, (status, text, seconds) in zip(
            tasks, pool.map(_run_one, tasks), strict=True
        ):
            verdict = "FAILED" if status else "ok"
            print(f"{verdict:6} {seconds:5.1f} s  {task.name}", flush=True)
            if status:
                failed.append(task)
                print(text, flush=True)
    return failed


def _run_one(task: Task) -> tuple[int, str, float]:
    command = [sys.executable, __file__, "--child", *task.arguments]
    start = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout, time.monotonic() - start


def _child(kind: str, *what: str) -> int:
    """Run one page, whose errors end the process, or doctests."""
    running.in_checkout()
    if kind == "modules":
        failures = [running.run_doctests(module) for module in what]
        return 1 if any(failures) else 0
    blocks = pages.blocks_of(Path(what[0]))
    running.run_blocks([x for x in blocks if not running.missing(x.needs)])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"run_examples.py: {error}")
    except KeyboardInterrupt:
        sys.exit(command_line.stopped("examples that had not run yet"))
