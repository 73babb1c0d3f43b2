"""A plugin of pytest: the emulated tests, on kernels from another folder.

    CUFLASH_PLANTED=folder pytest -p mutation_parts.planted -x -k emulated

The folder has ``kernels``. Left there are ``failed.json``, with what the first
test that failed said, and ``ran.json``: how long each test took and, for each
file that was part of its kernels, of how many.

    CUFLASH_PLANTED=- pytest -s -p mutation_parts.planted -x -k emulated

takes one folder after another from its input, a line each, and answers with
the status of pytest there. To start and to collect the tests takes longer than
most faults do to be found, so this is done once: each folder gets a child of
the process that has collected them. It has ``tests.json`` besides, names of
tests to run in that order, and may have ``cache``, for compiled kernels.
"""

import json
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from cuflash import source

folder = Path(os.environ["CUFLASH_PLANTED"])
SERVES = str(folder) == "-"

_build = source.build
_kernels = defaultdict(set)  # of the test that runs now: by file, their texts


def build_planted(kernel, **options):
    """As `source.build`, from the folder; note of which files it is made."""
    text = _build(kernel, folder=folder / "kernels", **options)
    for file in re.findall('^#line 1 "(.*)"$', text, re.M):
        _kernels[file].add(hash(text))
    return text


class Record:
    """What became of the tests: of all, in the process that was called."""

    def __init__(self):
        self.kernels, self.seconds, self.failed = {}, Counter(), None

    def pytest_runtest_logreport(self, report):
        """Add a test's part: its set-up, itself or what it cleans up."""
        test = report.nodeid
        self.seconds[test] += report.duration
        if report.when == "teardown":
            self.kernels[test] = dict(report.user_properties)["kernels"]
        if report.failed and not self.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            self.failed = {"test": test, "said": said}

    def pytest_sessionfinish(self):
        """Leave it in the folder."""
        if not folder.exists():
            return  # no child, but the one that serves
        ran = {
            test: {"kernels": kernels, "seconds": self.seconds[test]}
            for test, kernels in self.kernels.items()
        }
        (folder / "ran.json").write_text(json.dumps(ran))
        if self.failed:
            (folder / "failed.json").write_text(json.dumps(self.failed))


def pytest_configure(config):
    """Put the folder in the kernels' place; look for no smaller example."""
    source.build = build_planted
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("planted", settings.default, phases=phases)
    settings.load_profile("planted")
    if not hasattr(config, "workerinput"):  # else one of xdist's processes
        config.pluginmanager.register(Record())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Have a child run what each folder asks for, as pytest goes on there."""
    if not SERVES:
        return None
    if serve():
        return True  # nothing is left to run here
    items = {item.nodeid: item for item in session.items}
    tests = json.loads((folder / "tests.json").read_text())
    session.items[:] = [items[x] for x in tests]
    return None


def serve():
    """Whether this is the parent, at the end of its input."""
    global folder
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            folder = Path(line.strip())
            become(folder)
            return False
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"\nstatus {status}", flush=True)
    return True


def become(folder):
    """Leave the parent's input and output, and its cache."""
    with open(folder / "log.txt", "w") as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if (folder / "cache").exists():
        os.environ["CUPY_CACHE_DIR"] = str(folder / "cache")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Start with no kernels."""
    _kernels.clear()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Hand the numbers on with the last report."""
    counts = {file: len(texts) for file, texts in _kernels.items()}
    item.user_properties.append(("kernels", counts))
