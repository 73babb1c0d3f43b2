"""The faults, as data: one text file of ``faults/`` for each kernel file.

Blocks between blank lines, each of one fault::

    # what is wrong then
    - the kernel's text, of one line or more
    + what replaces it: also of no line
    @ 2 of 3
    ~ words in the names of tests to run first, as they are likely to fail
    ! why no test can see it

The text must stand in the kernel exactly once. With ``@`` it stands there
three times, and the second is replaced. Only a fault with ``!`` may survive.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "faults"

# The words of `~` where a fault has none, by what its file's name contains.
_FIRST = {
    "merge": "test_merge",
    "wgmma_wide": "much_at_once wgmma_wide",
    "wgmma": "much_at_once wgmma",
    "repair": "much_at_once wgmma_nonfinite",
    "backward_rows": "much_at_once wgmma",
    "backward_steps": "much_at_once wgmma",
    "simt": "much_at_once simt",
    "fma": "much_at_once fma",
    "": "much_at_once",
}


class StaleFault(ValueError):
    """A fault whose text no longer stands in the kernel as it says."""


@dataclass(frozen=True)
class Fault:
    """One fault of one kernel file."""

    file: str
    what: str
    old: str
    new: str
    which: int = 1
    of: int = 1
    first: str = ""
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def planted(self, text: str) -> str:
        """The kernel's text with this fault."""
        found = text.count(self.old)
        if found != self.of:
            raise StaleFault(
                f"{self}: found {found} times, expected {self.of}:\n{self.old}"
            )
        parts = text.split(self.old)
        before, after = parts[: self.which], parts[self.which :]
        return self.old.join(before) + self.new + self.old.join(after)

    def plant(self, kernels: Path, folder: Path) -> None:
        """Copy the kernels to a folder, this one with the fault."""
        shutil.copytree(kernels, folder)
        path = folder / self.file
        path.write_text(self.planted(path.read_text("ascii")), "ascii")


def parsed(file: str, text: str) -> list[Fault]:
    """The faults that a text describes."""
    return [_fault(file, block) for block in text.strip().split("\n\n")]


def _fault(file: str, block: str) -> Fault:
    parts = {mark: [] for mark in "#-+@~!"}
    for line in block.splitlines():
        parts[line[0]].append(line[2:])
    joined = {mark: "\n".join(lines) for mark, lines in parts.items()}
    if not joined["#"] or not joined["-"]:
        raise ValueError(f"{file}: a fault needs # and -:\n{block}")
    which, of = map(int, (joined["@"] or "1 of 1").split(" of "))
    first = joined["~"] or next(x for n, x in _FIRST.items() if n in file)
    why = " ".join(parts["!"])
    return Fault(
        file, joined["#"], joined["-"], joined["+"], which, of, first, why
    )


def read() -> list[Fault]:
    """All faults, by file."""
    faults = []
    for path in sorted(FOLDER.glob("*.txt")):
        faults += parsed(path.stem, path.read_text("ascii"))
    return faults
