"""Which tests `make test` leaves to `make test-all`: slow.txt."""

import functools
import re
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


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


@functools.cache  # some two million calls: each test, each rule
def compiled(pattern):
    """A pattern, in which * matches anything, as a regular expression."""
    return re.compile(re.escape(pattern).replace(r"\*", ".*"), re.S)


def matches(pattern, name):
    return compiled(pattern).fullmatch(name)


def is_slow(name, given):
    """Whether rules name a test (test_x.py::test_y[z]) and do not keep it."""
    return any(
        matches(tests, name) and not any(matches(x, name) for x in kept)
        for tests, kept in given
    )
