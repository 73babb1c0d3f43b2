"""From a planned kernel to the source text that the compiler gets.

The text consists of ``common/constants.cuh`` and the kernel's file, in this
order. The first ``#include "folder/x.cuh"`` of a file of ``kernels/`` is
replaced by the file; ``#line`` directives keep the original file and line in
messages. `launch.structs` generates ``common/arguments.cuh``, this module
``common/plan_constants.cuh``. The plan's text, if it has one, takes the place
of ``score/expression.cuh``. A kernel can include nothing from outside
``kernels/``, so the binary depends on this text alone.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cuflash.errors import CompileError
from cuflash.launch import structs as abi

KERNELS = Path(__file__).parent.parent / "kernels"

# Generated for every kernel; none of them exists in the folder.
GENERATED = ("common/arguments.cuh", "common/plan_constants.cuh")

# A user's own functions; the folder's file is for calls without any.
EXPRESSION = "score/expression.cuh"

_INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]*)[">]')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


class Kernel(Protocol):
    """The fields of a `plan.KernelPlan` that this module reads."""

    @property
    def file(self) -> str: ...

    @property
    def constants(self) -> tuple[tuple[str, bool | int | str], ...]: ...

    @property
    def expression(self) -> str: ...


def kernel_files(folder: Path = KERNELS) -> dict[str, Path]:
    """Every kernel file by its name, such as ``sm90/forward.cu``."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*.cu*"))
    }


def build(
    kernel: Kernel,
    folder: Path = KERNELS,
    twins: Mapping[str, Path] | None = None,
) -> str:
    """The self-contained source text of a planned kernel.

    Parameters
    ----------
    kernel : plan.KernelPlan
        ``file`` is the name of a file in ``kernels/``, or an absolute path;
        ``constants`` are pairs of a name and a bool, an int or (a type's
        name) a str; ``expression`` is the text of `EXPRESSION`, if any.
    folder : Path, optional
        The folder of the kernel files.
    twins : mapping of str to Path, optional
        Files that replace files of the folder, by the names of the latter.

    Raises
    ------
    CompileError
        If a kernel includes a file that is not in the folder.
    """
    texts = abi.c_text(), "\n".join(map(_constant, kernel.constants))
    generated = dict(zip(GENERATED, texts, strict=True))
    if kernel.expression:
        generated[EXPRESSION] = kernel.expression
    files = folder, twins or {}, generated
    done: set[str] = set()
    return "\n".join([
        *_splice("common/constants.cuh", *files, done),
        *_splice(kernel.file, *files, done),
        "",
    ])  # fmt: skip


def _constant(constant: tuple[str, bool | int | str]) -> str:
    name, value = constant
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    if isinstance(value, str):
        return f"using {name} = {value};"
    raise TypeError(
        f"constant {name} is {value!r}, expected a bool, an int or the name"
        " of a type"
    )


def _splice(
    file: str,
    folder: Path,
    twins: Mapping[str, Path],
    generated: Mapping[str, str],
    done: set[str],
) -> list[str]:
    """The lines of a file with its includes expanded."""
    done.add(file)
    if file in generated:
        text = generated[file]
    else:
        # Strings: Paths would take half of the time of a text's lookup.
        text = read(twins.get(file) or os.path.join(folder, file))
        if file in twins:
            file = twins[file].name
    lines = [f'#line 1 "{file}"']
    for plain, number, quote, name in _parts(text):
        lines += plain
        if not number:
            break
        known = name in generated or name in done
        known = known or os.path.isfile(os.path.join(folder, name))
        if quote != '"' or not known:
            raise CompileError(
                f"{file}({number}) includes {name}, which is not a file"
                f" of {folder}: a kernel can include only those"
            )
        if name not in done:
            lines += _splice(name, folder, twins, generated, done)
        lines.append(f'#line {number + 1} "{file}"')
    return lines


def read(path: str | Path) -> str:
    """A file's text, kept as long as the file is the same."""
    found = os.stat(path)
    return _read(path, found.st_mtime_ns, found.st_size, found.st_ino)


@functools.lru_cache(maxsize=512)
def _read(path: str | Path, *version: int) -> str:
    return Path(path).read_text(encoding="ascii")


# A text's lines up to an include, and this include's line number, quote and
# name; last the lines that remain, with the number 0.
_Part = tuple[tuple[str, ...], int, str, str]


@functools.lru_cache(maxsize=256)
def _parts(text: str) -> tuple[_Part, ...]:
    """A file's text, split at its includes.

    Cached by the text itself, so that a file that changes is read anew.
    """
    parts: list[_Part] = []
    plain: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include:
            parts.append((tuple(plain), number, include[1], include[2]))
            plain = []
        elif _PRAGMA_ONCE.match(line):
            plain.append("")  # each file is included only once anyway
        else:
            plain.append(line)
    return (*parts, (tuple(plain), 0, "", ""))


def lines_by_place(text: str) -> dict[tuple[str, int], str]:
    """The lines of a built text by (file, line), as in messages."""
    lines = {}
    file, number = "", 1
    for line in text.splitlines():
        directive = re.match(r'#line (\d+) "([^"]*)"', line)
        if directive:
            number, file = int(directive[1]), directive[2]
        else:
            lines[file, number] = line
            number += 1
    return lines


def explain(kernel: Kernel, text: str, how: str, log: str, error: str) -> str:
    """A compiler's message and the numbered source around the error.

    error : a pattern of its file and line in the log.
    """
    constants = ", ".join(f"{n}={value}" for n, value in kernel.constants)
    words = [f"{kernel.file} does not compile {how} ({constants}):", log]
    found = re.search(error, log, re.M)
    if found:
        words += excerpt(text, found[1], int(found[2]))
    return "\n".join(words)


def excerpt(text: str, file: str, at: int) -> list[str]:
    """The numbered lines of a built text around an error, for a message."""
    lines = lines_by_place(text)
    if (file, at) not in lines:
        return []
    return ["", file] + [
        f"{'>' if n == at else ' '} {n:4d} | {lines[file, n]}"
        for n in range(at - 4, at + 4)
        if (file, n) in lines
    ]
