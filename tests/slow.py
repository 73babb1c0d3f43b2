"""Which tests `make test` leaves to `make test-all`: slow.txt."""

import functools
import re
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
COLLECTED = pytest.StashKey[list[str]]()  # the names of a run's tests


def rules(text):
    """Return (pattern, exceptions) for each line that names tests.

    text : the content of slow.txt.
    """
    found = []
    for line in text.splitlines():
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        if words.startswith("but "):
            found[-1][1].append(words.removeprefix("but "))
        else:
            found.append((words, []))
    return found


@functools.cache
def compiled(*patterns):
    """Patterns, in which * matches anything, as one regular expression."""
    either = "|".join(map(re.escape, patterns)).replace(r"\*", ".*")
    return re.compile(either, re.S)


def matches(pattern, name):
    return compiled(pattern).fullmatch(name)


def is_slow(name, given):
    """Whether rules name a test (test_x.py::test_y[z]) and do not keep it."""
    # Most tests have no rule: one expression says so a hundred times faster.
    if not compiled(*(tests for tests, _ in given)).fullmatch(name):
        return False
    return any(
        matches(tests, name) and not any(matches(x, name) for x in kept)
        for tests, kept in given
    )


def idle(names, given):
    """Yield the rules that do nothing: they name no test, or keep none.

    names : of all tests.
    """
    for tests, kept in given:
        named = [x for x in names if matches(tests, x)]
        if not named:
            yield tests
        for pattern in kept:
            run = (x for x in named if matches(pattern, x))
            if not any(not is_slow(x, given) for x in run):
                yield f"{tests} but {pattern}"
