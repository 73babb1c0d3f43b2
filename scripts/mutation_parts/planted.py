"""A plugin of pytest: the emulated tests, on kernels from another folder.

    CUFLASH_PLANTED=folder pytest -p mutation_parts.planted -x -k emulated

The folder has ``kernels``, and may have ``tests.json``: names of tests to run,
in that order. Left there are ``failed.json``, with what the first test that
failed said, and ``ran.json``: how long each test took and, for each file that
was part of its kernels, of how many.
"""

import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from cuflash import source

FOLDER = Path(os.environ["CUFLASH_PLANTED"])

_build = source.build
_kernels = defaultdict(set)  # of the test that runs now: by file, their texts


def build_planted(kernel, **options):
    """As `source.build`, from the folder; note of which files it is made."""
    text = _build(kernel, folder=FOLDER / "kernels", **options)
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
        ran = {
            test: {"kernels": kernels, "seconds": self.seconds[test]}
            for test, kernels in self.kernels.items()
        }
        (FOLDER / "ran.json").write_text(json.dumps(ran))
        if self.failed:
            (FOLDER / "failed.json").write_text(json.dumps(self.failed))


def pytest_configure(config):
    """Put the folder in the kernels' place; look for no smaller example."""
    source.build = build_planted
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("planted", settings.default, phases=phases)
    settings.load_profile("planted")
    if not hasattr(config, "workerinput"):  # else one of xdist's processes
        config.pluginmanager.register(Record())


def pytest_collection_modifyitems(config, items):
    """Run the tests that are asked for, in that order."""
    file = FOLDER / "tests.json"
    if not file.exists():
        return
    order = {x: n for n, x in enumerate(json.loads(file.read_text()))}
    others = [item for item in items if item.nodeid not in order]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid in order]
    items.sort(key=lambda item: order[item.nodeid])


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
