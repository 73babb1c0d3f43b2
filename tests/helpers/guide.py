"""CONTRIBUTING.md: which tests to run after a change, as commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
OPTIONS_WITH_VALUES = ("-k", "-m")
# Of make's suites: Hypothesis's profile, and what of the tests they run.
SUITES = {"test": ("quick", ("-m", "not slow")), "test-all": ("ci", ())}


@dataclass(frozen=True)
class Row:
    """A row of the first table.

    commands : suite of make, and the words of ARGS.
    """

    change: str
    places: tuple[str, ...]
    commands: tuple[tuple[str, tuple[str, ...]], ...]


def rows():
    """Return the rows that name tests."""
    table = TEXT.partition("| --- |")[2].partition("\n\n")[0]
    cells = (x.strip("| ").split(" | ") for x in table.splitlines()[1:])
    return [
        Row(change, tuple(_places(places)), _commands(tests))
        for change, places, tests in cells
    ]


def _places(cell):
    """Yield patterns of paths; what follows a folder and a colon is in it."""
    folder = ""
    for name, colon in re.findall(r"`([^`]+)`(?:(:) (?=`))?", cell):
        if colon:
            folder = name
        elif " " not in name and not name.endswith(":"):
            yield folder + name


def _commands(cell):
    found = []
    for text in re.findall(r"`([^`]+)`", cell):
        words = shlex.split(text)
        suite = "test"
        if words[0] == "make":
            suite, words = words[1], words[2:]
            words = (
                shlex.split(words[0].removeprefix("ARGS=")) if words else []
            )
        if words:
            found.append((suite, tuple(_expanded(words))))
    return tuple(found)


def _expanded(words):
    """Yield words, patterns replaced by the files they match, as a shell."""
    before = ""
    for word in words:
        if before in OPTIONS_WITH_VALUES or word.startswith("-"):
            yield word
        else:
            file, *rest = word.split("::")
            for path in sorted(ROOT.glob(file)) or [ROOT / file]:
                yield "::".join([str(path.relative_to(ROOT)), *rest])
        before = word


def files(words):
    """Return the files and folders that a command names."""
    named = (x.partition("::")[0] for x in words)
    return [ROOT / x for x in named if x.startswith("tests/")]


def is_chosen(name, words):
    """Whether a command's -k, if it has one, chooses a test of a file."""
    if "-k" not in words:
        return True
    expression = words[words.index("-k") + 1]

    def has(word):
        kept = word[0] in ("and", "or", "not")
        return word[0] if kept else str(word[0].lower() in name.lower())

    return eval(re.sub(r"[^\s()]+", has, expression))


def places_of(title):
    """Return the places that a guide of this page lists, as (path, names).

    title : begins the guide, as in "**Add an option".
    """
    text = TEXT.partition(f"\n**{title}")[2].partition("\n**")[0]
    items = re.findall(r"^- (.*(?:\n  .*)*)", text, re.M)
    found = (
        re.findall(r"`([^`\s]*[/.][^`\s]*)`(?:\s\((.*?)\))?", x) for x in items
    )
    return [
        (re.sub("<[a-z]*>", "*", path), re.findall(r"`(\w+)`", names))
        for x in found
        for path, names in x
    ]
