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
def folders():
    """Return the folders all of whose tests slow.txt names."""
    return {
        FILE.parent / tests.removesuffix("/*")
        for tests, kept in rules(FILE.read_text())
        if tests.endswith("/*") and not kept
    }


def _expression(*patterns):
    """Patterns, in which * matches anything, as one regular expression."""
    return "|".join(re.escape(x).replace(r"\*", ".*") for x in patterns)


def _matching(names, expression):
    matches = re.compile(expression, re.S).fullmatch
    return {*filter(matches, names)}


def _by_file(names):
    """Return names by file: most rules are of one, and tests are many."""
    found = {}
    for name in names:
        found.setdefault(name.partition("::")[0], []).append(name)
    return found


def slow_of(names, given):
    """Return those of names (test_x.py::test_y[z]) that rules make slow."""
    slow = set()
    for file, named in _by_file(names).items():
        either = [
            (rf"(?!(?:{_expression(*kept)})\Z)" if kept else "")
            + _expression(tests)
            for tests, kept in given
            if tests.startswith(f"{file}::") or "*" in tests.partition("::")[0]
        ]
        if either:
            slow |= _matching(named, "|".join(either))
    return slow


def idle(names, given):
    """Yield the rules that do nothing: they name no test, or keep none.

    names : of all tests.
    """
    slow, of_file = slow_of(names, given), _by_file(names)
    for tests, kept in given:
        file = tests.partition("::")[0]
        named = names if "*" in file else of_file.get(file, [])
        named = _matching(named, _expression(tests))
        if not named:
            yield tests
        for pattern in kept:
            if _matching(named, _expression(pattern)) <= slow:
                yield f"{tests} but {pattern}"
