"""The Python blocks of a Markdown page, and what each needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEEDS = ("torch", "transformers", "jax", "gpu", "launcher", "compiler")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_NEEDS = re.compile(r"^\s*<!--\s*needs:(?P<names>.*?)-->\s*$")


@dataclass(frozen=True)
class Block:
    """A block of Python.

    Attributes
    ----------
    page : Path
    line : int
        Of its first line of code, from 1.
    code : str
    needs : tuple of str
        Of `NEEDS`: it runs only where all of them are there.
    """

    page: Path
    line: int
    code: str
    needs: tuple[str, ...] = ()

    @property
    def is_session(self) -> bool:
        """Whether it shows prompts and results, as a doctest does."""
        return self.code.lstrip().startswith(">>>")


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield a page's blocks fenced as ``python`` or ``pycon``, in order.

    Raises
    ------
    ValueError
        If a `needs` comment names something unknown or is not on the line
        before a block of Python, or a block has no end.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    i, needs = 0, None
    while i < len(lines):
        asked, fence = _NEEDS.match(lines[i]), _FENCE.match(lines[i])
        if needs is not None and not (fence and _is_python(fence)):
            raise ValueError(
                f"{page}:{i}: no ```python on the line after a `needs` comment"
            )
        i += 1
        if asked:
            needs = _known(asked["names"], f"{page}:{i}")
        elif fence:
            start = i
            while i < len(lines) and not _closes(lines[i], fence["fence"]):
                i += 1
            if i == len(lines):
                raise ValueError(f"{page}:{start}: this block has no end")
            if _is_python(fence):
                indent = len(fence["indent"])
                code = "".join(f"{x[indent:]}\n" for x in lines[start:i])
                yield Block(page, start + 1, code, needs or ())
            i, needs = i + 1, None


def _is_python(fence: re.Match[str]) -> bool:
    return fence["info"].strip() in ("python", "pycon")


def _closes(line: str, fence: str) -> bool:
    line = line.strip()
    return line.startswith(fence) and not line.strip(fence[0])


def _known(names: str, where: str) -> tuple[str, ...]:
    found = tuple(re.split(r"[\s,]+", names.strip()))
    for name in found:
        if name not in NEEDS:
            raise ValueError(f"{where}: needs {name!r}, not one of {NEEDS}")
    return found
