"""Which tests `make test` leaves to `make test-all`: slow.txt."""

import re
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def rules(text):
    """Return a pair for each line of tests: that one, and those within it.

    text : as that of slow.txt.
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
    """Whether a name is as a pattern says, whose * stands for anything."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.S)


def is_slow(name, given):
    """Whether rules name a test, as test_x.py::test_y[z], and keep it not."""
    return any(
        matches(tests, name) and not any(matches(x, name) for x in kept)
        for tests, kept in given
    )
