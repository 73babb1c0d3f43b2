"""A plugin of pytest: collects the tests once, and runs some in forks.

    pytest -s -x -p mutation_parts.worker -k emulated

Reads folders from its input, one per line, and answers each with a line
`status N`. Starting pytest and collecting tests takes longer than catching
most mutants, so a child of the process that has collected them handles each
folder. A folder's ``job.json`` describes the job::

    tests     names of tests, in this order; null: only list all in tests.json,
              and whether they are marked `slow`
    record    record the lines that each test runs, in ran.json; requires
              --coverage in the emulator's flags (environment)
    file      of the kernels, with the text ``mutant`` in the folder
    pattern   instead: of generated texts, what it matches becomes
    new       this
    spared    keys of programs that do not contain the mutated line
    holding   how many do
    budget    CPU seconds, after which no further test is started

Results are ``result.json`` and ``log.txt``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from cuflash.backends.emulator import runtime
from cuflash.build import source
from mutation_parts.mutants import GENERATED_FILE

KERNEL_FILES = frozenset(source.kernel_files())
LONGEST_LAUNCH = 30  # CPU seconds, after which a program counts as hanging

_executable, _run, _build = runtime.executable, runtime.run, source.build


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children."""
    return sum(os.times()[:4])


def key_of(text: str, arch: str) -> str:
    """Return the key of a program."""
    return hashlib.sha256(f"{arch}\n{text}".encode()).hexdigest()[:20]


def files_of(text: str) -> list[str]:
    """The kernel files that a program's text is made of."""
    begin = [x for x in text.splitlines() if x.startswith('#line 1 "')]
    return sorted(KERNEL_FILES.intersection(x.split('"')[1] for x in begin))


class Job:
    """The job of one folder, in the child that runs it."""

    def __init__(self, folder: Path):
        self.folder = folder
        job = json.loads((folder / "job.json").read_text())
        self.tests, self.record = job["tests"], job.get("record", False)
        self.file, self.budget = job.get("file"), job.get("budget")
        self.pattern, self.new = job.get("pattern"), job.get("new")
        self.spared = frozenset(job.get("spared", ()))
        self.holding = job.get("holding", 0)
        self.compiling = 0.0  # CPU seconds, of the test that runs
        self.launched: dict[str, Path] = {}  # by it: programs
        self.ran: list[dict] = []
        self.programs: dict[str, dict] = {}  # of all tests
        self.mutated: dict[Path, tuple] = {}
        self.result = {"failed": None, "run": 0, "out_of_budget": False}
        self.kernels: Path | None = None  # of the program that is built
        self._keys: dict[Path, str] = {}

    def begin(self) -> None:
        """Replace the emulator's functions that compile and run."""
        runtime.executable, runtime.run = self.executable, self.run
        source.build = self.build
        if self.file and not self.pattern:
            for name, path in source.kernel_files().items():
                link = self.folder / "kernels" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
            mutant = self.folder / "kernels" / self.file
            mutant.unlink()
            mutant.symlink_to(self.folder / "mutant")

    def build(self, kernel, **options):
        """As `source.build`, of the kernels with the mutant if it is asked."""
        if self.kernels:
            options.setdefault("folder", self.kernels)
        return _build(kernel, **options)

    def executable(self, kernel, arch, flags=()):
        """As `runtime.executable`, with the mutant unless spared."""
        text = _build(kernel, twins=runtime.TWINS)
        key, files = key_of(text, arch), files_of(text)
        if kernel.expression:
            files.append(GENERATED_FILE)
        mutate = self.file in files and key not in self.spared
        start, plain = cpu_seconds(), kernel
        if mutate and self.pattern:
            own = re.sub(self.pattern, self.new, kernel.expression)
            mutate = own != kernel.expression
            kernel = dataclasses.replace(kernel, expression=own)
        elif mutate:
            self.kernels = self.folder / "kernels"
        try:
            command = _executable(kernel, arch, flags)
        finally:
            self.kernels = None
        path = command[-1]
        spent = cpu_seconds() - start
        self.compiling += spent
        if mutate:
            self.mutated[path] = plain, arch, flags
        self._keys[path] = key
        known = self.programs.setdefault(key, {"compile": 0.0, "files": files})
        known["compile"] = max(known["compile"], spent)
        return command

    def run(self, command, folder, *rest):
        """As `runtime.run`, for a limited time, recording lines."""
        key = self._keys.get(command[-1])
        if self.record and key:
            # One file of counts for all launches of a program in a test.
            counts = self.folder / "counts" / key
            os.environ["GCOV_PREFIX"] = str(counts)
            os.environ["GCOV_PREFIX_STRIP"] = "99"
            self.launched[key] = command[-1]
        limit, most = resource.getrlimit(resource.RLIMIT_CPU)
        own = sum(os.times()[:2])  # children count from 0 on, this one goes on
        longest = int(own + LONGEST_LAUNCH)
        resource.setrlimit(resource.RLIMIT_CPU, (longest, most))
        try:
            _run(command, folder, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, most))

    # ---- Records ----

    def note(self, test: str, seconds: float, passed: bool) -> None:
        """What a test ran: lines by file, as bits of a number."""
        ran: dict[str, int] = {}
        for key, program in self.launched.items():
            folder = self.folder / "counts" / key
            holds = self.programs[key].setdefault("holds", {})
            for file, line, count in gcov(program, folder):
                holds[file] = holds.get(file, 0) | 1 << line
                if count:
                    ran[file] = ran.get(file, 0) | 1 << line
        shutil.rmtree(self.folder / "counts", ignore_errors=True)
        programs = [*self.launched]
        self.ran.append({
            "test": test, "passed": passed, "programs": programs,
            "seconds": seconds - self.compiling, "ran": in_hex(ran),
        })  # fmt: skip

    # ---- The end ----

    def same_code(self) -> bool:
        """Whether the mutated programs are what they are without the mutant.

        For mutants that no test caught: the compiler may prove that they
        change nothing. That counts only if all programs with the line were
        compiled: another may have an option for which the change matters.
        """
        return len(self.mutated) >= self.holding > 0 and all(
            path.exists() and code(path) == code(_executable(*rest)[-1])
            for path, rest in self.mutated.items()
        )

    def end(self) -> None:
        """Leave the results; remove the mutant's programs."""
        self.result["seconds"] = cpu_seconds()
        if self.record:
            for program in self.programs.values():
                program["holds"] = in_hex(program.get("holds", {}))
            said = {"tests": self.ran, "programs": self.programs}
            (self.folder / "ran.json").write_text(json.dumps(said))
        if self.file and not self.result["failed"]:
            self.result["same_code"] = self.same_code()
        for path in self.mutated:
            for made in path.parent.glob(f"{path.name}*"):
                made.unlink()
        (self.folder / "result.json").write_text(json.dumps(self.result))


def in_hex(lines: dict[str, int]) -> dict[str, str]:
    """Lines by file, as JSON has them."""
    return {file: hex(bits) for file, bits in lines.items()}


def gcov(program: Path, folder: Path) -> list[tuple[str, int, int]]:
    """(file, line, count) of the kernel files of a program that has run."""
    if not folder.exists():
        return []
    for notes in program.with_suffix(".build").glob("*.gcno"):
        (folder / notes.name).symlink_to(notes)
    done = subprocess.run(
        ["gcov", "--json-format", "--stdout", *folder.glob("*.gcno")],
        cwd=folder,
        capture_output=True,
        check=True,
        text=True,
    )
    return [
        (file["file"], line["line_number"], line["count"])
        for report in done.stdout.splitlines()
        for file in json.loads(report)["files"]
        if file["file"] in KERNEL_FILES
        for line in file["lines"]
    ]


def code(program: Path) -> bytes:
    """A program without its debug information."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "program"
        subprocess.run(
            ["objcopy", "--strip-debug", "--remove-section=.note.gnu.build-id",
             program, bare],
            check=True,
        )  # fmt: skip
        return bare.read_bytes()


# ---- pytest's part ----

_job: Job | None = None


def pytest_configure(config):
    """Look for no smaller example."""
    name = settings.get_current_profile_name()  # which tests may ask for
    phases = (Phase.explicit, Phase.generate)
    profile = settings(settings.get_profile(name), phases=phases)
    settings.register_profile(name, profile)
    settings.load_profile(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Let a child handle each folder; pytest continues in it."""
    items = {item.nodeid: item for item in session.items}
    slow = {x: bool(items[x].get_closest_marker("slow")) for x in items}
    if serve(slow):
        return True  # the parent, at the end of its input
    session.items[:] = [items[x] for x in _job.tests if x in items]
    if _job.record:
        session.config.option.maxfail = 0  # all are run
    return None


def serve(collected: dict[str, bool]) -> bool:
    """Whether this is the parent, at the end of its input."""
    global _job
    for line in sys.stdin:
        sys.stdout.flush()
        job = Job(Path(line.strip()))
        if job.tests is None:
            (job.folder / "tests.json").write_text(json.dumps(collected))
            print("\nstatus 0", flush=True)
            continue
        child = os.fork()
        if child == 0:
            _job = job
            with open(job.folder / "log.txt", "w") as log:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            job.begin()
            return False
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"\nstatus {status}", flush=True)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Record what a test runs; start none after the budget."""
    _job.launched, _job.compiling = {}, 0.0
    failed_before, start = item.session.testsfailed, cpu_seconds()
    done = yield
    _job.result["run"] += 1
    if _job.record:
        passed = item.session.testsfailed == failed_before
        _job.note(item.nodeid, cpu_seconds() - start, passed)
    if _job.budget and cpu_seconds() > _job.budget and nextitem:
        _job.result["out_of_budget"] = True
        item.session.shouldstop = "out of budget"
    return done


def pytest_runtest_logreport(report):
    """Keep the message of the first test that fails."""
    if report.failed and not _job.result["failed"]:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash else str(report.longrepr)
        _job.result["failed"] = {"test": report.nodeid, "said": said}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Write the results."""
    if _job:
        _job.end()
