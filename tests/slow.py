"""Which tests `make test` leaves to `make test-all`: slow.txt."""

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


def matches(pattern, name):
    """Whether a name matches a pattern, in which * matches anything."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.S)


def is_slow(name, given):
    """Whether rules name a test (test_x.py::test_y[z]) and do not keep it."""
    return any(
        matches(tests, name) and not any(matches(x, name) for x in kept)
        for tests, kept in given
    )
