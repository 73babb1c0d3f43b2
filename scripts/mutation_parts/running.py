"""Runs mutants in a pool of workers, and reports each one's outcome."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cuflash import folders
from mutation_parts import records
from mutation_parts.mutants import Mutant
from mutation_parts.records import KERNELS, ROOT, Record, choose

GCOV = shutil.which("gcov")
# make's targets, and Hypothesis's profiles there.
SUITES = {"test": "quick", "test-all": "ci"}

OUTCOMES = (
    CAUGHT, EQUIVALENT, UNMODELLED, MISSED, OUT_OF_BUDGET, DOES_NOT_COMPILE
) = (
    "caught", "equivalent", "unmodelled", "missed", "out of budget",
    "does not compile",
)  # fmt: skip


class WorkerError(RuntimeError):
    """A worker failed to do a job."""


class ChildError(WorkerError):
    """One job could not be done: its child left no result."""


class TimeIsUp(Exception):
    """The deadline of a pool has passed."""


class Worker:
    """A process that has collected the tests: see worker.py."""

    def __init__(self, env: dict[str, str]):
        paths = str(ROOT / "scripts"), os.environ.get("PYTHONPATH")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-s", "-x",
             "-p", "no:cacheprovider", "-p", "mutation_parts.worker",
             "-k", "emulated"],
            cwd=ROOT,
            env={**os.environ, "CI": "1", **env,
                 "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's alone
        )  # fmt: skip

    def do(self, folder: Path, job: dict) -> int:
        """Run a job in a folder; return pytest's status."""
        (folder / "job.json").write_text(json.dumps(job))
        said = []
        try:
            print(folder, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has said why
        for line in self.process.stdout:
            if line.startswith("status "):
                return int(line.split()[1])
            said.append(line)
        raise WorkerError("pytest could not collect\n" + "".join(said))

    def close(self) -> None:
        """Let the process end."""
        self.process.communicate("")


class Pool:
    """Workers, each started when it is needed.

    deadline : when `each` stops, in seconds of `time.monotonic`.
    """

    def __init__(
        self, suite: str, jobs: int, deadline: float | None = None, **env: str
    ):
        self._jobs, self._suite, self._deadline = jobs, suite, deadline
        self._env = {"HYPOTHESIS_PROFILE": SUITES[suite], **env}
        self._started: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        worker = self._idle.get()
        if worker is None:
            worker = Worker(self._env)
            self._started.append(worker)
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def do(self, job: dict, text: str | None = None) -> dict:
        """Run one job with a mutated file's text; return its results."""
        with (
            self._worker() as worker,
            tempfile.TemporaryDirectory(prefix="cuflash_mutate_") as name,
        ):
            folder = Path(name)
            if text is not None:
                (folder / "mutant").write_text(text, "ascii")
            status = worker.do(folder, job)
            for file in ("tests.json", "ran.json", "result.json"):
                if (folder / file).exists():
                    return json.loads((folder / file).read_text())
            log = (folder / "log.txt").read_text()[-500:]
            raise ChildError(f"pytest ended with status {status}: {log}")

    def each(self, do: Callable, items: Iterable) -> Iterator:
        """Yield the result of `do` for each item, in parallel, as they end.

        Raises
        ------
        TimeIsUp
            At the deadline. What has not ended by then is killed.
        """
        left = None
        if self._deadline is not None:
            left = max(self._deadline - time.monotonic(), 0)
        with ThreadPoolExecutor(self._jobs) as threads:
            waited = [threads.submit(do, x) for x in items]
            try:
                for done in as_completed(waited, left):
                    yield done.result()
            except BaseException as error:  # Ctrl-C too: wait for none
                threads.shutdown(wait=False, cancel_futures=True)
                self.kill()
                if isinstance(error, concurrent.futures.TimeoutError):
                    raise TimeIsUp from None
                raise

    def tests(self) -> list[str]:
        """The names of all tests of the suite: `test` is without slow ones."""
        slow = self.do({"tests": None})
        return [x for x in slow if self._suite == "test-all" or not slow[x]]

    def kill(self) -> None:
        """Kill all workers and their children."""
        for worker in self._started:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """Let idle workers end."""
        while not self._idle.empty():
            worker = self._idle.get()
            if worker:
                worker.close()


@contextmanager
def pool(
    suite: str, jobs: int, deadline: float | None = None, **env: str
) -> Iterator[Pool]:
    """A `Pool` that ends."""
    made = Pool(suite, jobs, deadline, **env)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def recording_pool(
    suite: str, jobs: int, beside: Path, deadline: float | None = None
) -> Iterator[Pool]:
    """One whose programs say which lines ran, and which are not kept."""
    if not GCOV:
        raise WorkerError("gcov was not found: it comes with g++")
    beside.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="cuflash_mutate_", dir=beside)
    env = {"CUPY_CACHE_DIR": folder, "CUFLASH_EMULATOR_FLAGS": "--coverage"}
    try:
        with pool(suite, jobs, deadline, **env) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def default_folder() -> Path:
    """Return where records and results are kept."""
    return folders.cache_folder() / "cuflash_mutate"


def selected(tests: list[str], patterns: Iterable[str]) -> list[str]:
    """Return the tests that one of some patterns matches."""
    return [
        x for x in tests if any(fnmatch.fnmatchcase(x, y) for y in patterns)
    ]


def recorded(
    folder: Path,
    suite: str,
    jobs: int,
    deadline: float | None = None,
    *,
    patterns: Iterable[str] = ("*",),
    any_age: bool = False,
) -> Record:
    """Return the record of a suite's tests, kept in a folder.

    What the folder lacks is run now, as is what no longer holds, unless a
    record of any age will do.
    """
    path = folder / f"record_{suite}.jsonl"
    if any_age and path.exists():
        return records.read(path)
    if not path.exists():
        print("there is no record yet: making one", flush=True)
    beside = folders.cache_folder()
    with recording_pool(suite, jobs, beside, deadline) as made:
        tests = selected(made.tests(), patterns)
        return records.make(path, tests, lambda x: made.each(made.do, x))


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant."""

    id: str
    outcome: str  # one of OUTCOMES
    line: int
    what: str
    why: str = ""  # what failed, or why nothing could
    seconds: float = 0.0  # CPU seconds
    run: int = 0  # tests
    chosen: int = 0  # tests that run the line

    @property
    def file(self) -> str:
        """The mutated file."""
        return self.id.rsplit("/", 3)[0]

    @property
    def operator(self) -> str:
        """The operator that made the mutant."""
        return self.id.split("/")[-2]


def check(mutant: Mutant, made: Pool, record: Record, budget: float) -> Result:
    """Run a mutant's tests until one fails."""
    chosen = choose(mutant, record, budget)
    line = mutant.lines[0]
    if not chosen.tests:
        why = "no test runs the line"
        return Result(mutant.id, MISSED, line, mutant.what, why)
    job = {
        "tests": chosen.tests, "file": mutant.file, "spared": chosen.spared,
        "holding": chosen.holding, "budget": budget,
    }  # fmt: skip
    changed = None
    if mutant.pattern:
        job |= {"pattern": mutant.pattern, "new": mutant.new}
    else:
        text = (KERNELS / mutant.file).read_text("ascii")
        changed = mutant.applied(text)
    try:
        said = made.do(job, changed)
    except ChildError as error:
        return Result(mutant.id, MISSED, line, mutant.what, str(error))
    outcome, why = verdict(said)
    return Result(
        mutant.id, outcome, line, mutant.what, why, round(said["seconds"], 1),
        said["run"], len(chosen.tests),
    )  # fmt: skip


def verdict(said: dict) -> tuple[str, str]:
    """The outcome of a job, and why."""
    failed = said["failed"]
    if failed and "CompileError" in failed["said"]:
        return DOES_NOT_COMPILE, " ".join(failed["said"].split())[:300]
    if failed:
        test = failed["test"].rpartition("/")[2]
        return CAUGHT, f"{test}: {' '.join(failed['said'].split())[:200]}"
    if said.get("same_code"):
        return EQUIVALENT, "the compiler makes the same code of it"
    return (OUT_OF_BUDGET if said["out_of_budget"] else MISSED), ""
