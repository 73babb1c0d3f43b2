"""Which skips CI accepts, once it has installed all that tests can use.

With CUFLASH_CHECK_SKIPS=1 a run fails if a test skips itself for a reason that
is not listed here: then an install is missing, or the test runs nowhere.
"""

import os
import re
import sys

# What no install brings to a machine without a GPU.
ACCEPTED = ("no Hopper GPU", "needs two GPUs", "NCCL", "os.name", "XDG")
# What a system other than Linux has not.
ONLY_ON_LINUX = ("the emulator runs only on Linux",)

_reasons = {}


def note(report):
    """Remember a report's reason, if its test or file was skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        _reasons.setdefault(reason, report.nodeid)


def unexpected():
    """Return a line for each reason that is not accepted."""
    if os.environ.get("CUFLASH_CHECK_SKIPS") != "1":
        return []
    lacking = () if sys.platform.startswith("linux") else ONLY_ON_LINUX
    accepted = re.compile("|".join(map(re.escape, (*ACCEPTED, *lacking))))
    return [
        f"{test} is skipped: {reason!r} is no reason that tests/skips.py lists"
        for reason, test in _reasons.items()
        if not accepted.search(reason)
    ]
