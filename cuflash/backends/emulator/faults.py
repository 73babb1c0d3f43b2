"""Adds source lines and names to the message of a fault.

The engine knows program addresses, bytes of shared memory and barrier
numbers. Debug information maps them to lines and names. For addr2line and
readelf the kernel's text is compiled again when there is a fault to explain:
with lines and the same code, and with names alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuflash.backends.emulator import runtime
from cuflash.errors import CompileError
from cuflash.plans.plan import KernelPlan

ADDR2LINE = "addr2line"
READELF = "readelf"


def explain(
    message: str,
    kernel: KernelPlan,
    arch: str,
    program: Path,
    flags: tuple[str, ...] = (),
) -> str:
    """The engine's message with source lines and names.

    Parameters
    ----------
    message : str
    kernel : plan.KernelPlan
    arch : str
    program : Path
        The last word of `runtime.executable` for `kernel`, `arch`, `flags`.
    flags : tuple of str, optional
    """
    if runtime.is_own(kernel) and program.exists():
        with contextlib.suppress(CompileError):
            program = runtime.with_lines(kernel, arch, flags)
    return _with_names(_with_lines(message, kernel, program), kernel, arch)


def _said(*words: str | Path) -> str:
    """A program's output; '' if it does not exist or fails."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout.decode(errors="replace")
    except OSError:
        return ""


# ---- Lines ----

# A site of engine.h followed by addresses, or addresses alone.
_TRACE = re.compile(r"(?:(\S+:\d+) )?pc:((?:0x[0-9a-f]+,?)+)")


def _with_lines(message: str, kernel: KernelPlan, program: Path) -> str:
    addresses = {
        address
        for trace in _TRACE.finditer(message)
        for address in trace[2].split(",")
    }
    places = _places(addresses, program)
    files = _files(kernel)

    def line(trace: re.Match[str]) -> str:
        found = [
            (_own_file(path, files), number)
            for a in trace[2].split(",")
            for path, number in places.get(a, ())
        ]
        # The innermost and the outermost frames belong to the emulator.
        inner = itertools.dropwhile(lambda p: p[0] not in files, found)
        own = itertools.takewhile(lambda p: p[0] in files, inner)
        lines = [f"{file}:{number}" for file, number in own]
        lines = [x for x, _ in itertools.groupby(lines)]
        if trace[1]:  # where the call begins; addr2line may give its end
            path, _, number = trace[1].rpartition(":")
            lines[:1] = [f"{_own_file(path, files)}:{number}"]
        if not lines:
            return f"pc:{trace[2].split(',')[0]}"
        first, *others = lines
        return f"{first} (in {', '.join(others)})" if others else first

    return _TRACE.sub(line, message)


def _files(kernel: KernelPlan) -> set[str]:
    """The names of the files that make up a kernel's text."""
    named = re.findall(r'^#line 1 "(.*)"$', runtime.text(kernel), re.M)
    shown = {Path(x).name if Path(x).is_absolute() else x for x in named}
    return shown - {twin.name for twin in runtime.TWINS.values()}


def _own_file(path: str, files: set[str]) -> str:
    """The name of a file in the kernel's text, or a path's last part."""
    inside = [x for x in files if path == x or path.endswith(f"/{x}")]
    return max(inside, key=len) if inside else Path(path).name


def _places(
    addresses: set[str], program: Path
) -> dict[str, list[tuple[str, str]]]:
    """(file, line) of each address and of the calls inlined there."""
    if not addresses:
        return {}
    # A return address is that of the instruction after the call.
    before = {hex(int(address, 16) - 1): address for address in addresses}
    said = _said(ADDR2LINE, "-a", "-i", "-e", program, *before)
    places: dict[str, list[tuple[str, str]]] = {}
    for line in said.splitlines():
        if line.startswith("0x"):
            here = places.setdefault(before[hex(int(line, 16))], [])
        elif place := re.search(r"^(.+):(\d+)(?: \(.*)?$", line):
            here.append((place[1], place[2]))
    return places


# ---- Names ----


def _with_names(message: str, kernel: KernelPlan, arch: str) -> str:
    if not re.search(r"\bbyte \d|\bbarrier \d", message):
        return message
    names = _names(runtime.text(kernel), arch)

    def mbarrier(found: re.Match[str]) -> str:
        name = names.of_byte(int(found[1]))
        return f"mbarrier {name}" if name else found[0]

    def byte(found: re.Match[str]) -> str:
        name = names.of_byte(int(found[1]))
        return f"{found[0]} ({name})" if name else found[0]

    def barrier(found: re.Match[str]) -> str:
        name = names.of_barrier(int(found[1]))
        return f"{found[0]} ({name})" if name else found[0]

    message = re.sub(
        r"mbarrier at byte (\d+)(?: of shared memory)?", mbarrier, message
    )
    message = re.sub(r"byte (\d+) of shared memory", byte, message)
    return re.sub(r"\bbarrier (\d+)", barrier, message)


@dataclass(frozen=True)
class _Member:
    """A member of SharedPlan, the struct that lays out shared memory.

    Attributes
    ----------
    start, size : int
        In bytes.
    name : str
    lengths : tuple of int
        The lengths of an array, outermost first.
    """

    start: int
    size: int
    name: str
    lengths: tuple[int, ...]

    def at(self, byte: int) -> str:
        """The name of a byte of the member: ``q_full[1]``, ``k + 64``."""
        rest, size, words = byte - self.start, self.size, self.name
        for length in self.lengths:
            size //= length
            words += f"[{rest // size}]"
            rest %= size
        return f"{words} + {rest}" if rest else words


@dataclass(frozen=True)
class _Names:
    """The names of a kernel's shared memory and named barriers."""

    members: tuple[_Member, ...] = ()
    barriers: tuple[tuple[int, str], ...] = ()

    def of_byte(self, byte: int) -> str:
        for member in self.members:
            if member.start <= byte < member.start + member.size:
                return member.at(byte)
        return ""

    def of_barrier(self, number: int) -> str:
        """The nearest constant at or below `number`, plus an offset."""
        below = [x for x in self.barriers if x[0] <= number]
        if not below:
            return ""
        first, name = max(below)
        return f"{name} + {number - first}" if number > first else name


# The struct that lays out a kernel's shared memory.
_PLAN = "SharedPlan"
# The first argument of barrier_sync. Its upper-case constants name a group of
# barriers; the rest of the expression selects one of the group.
_BARRIER = re.compile(r"\bbarrier_(?:sync|arrive)\(([^,;]*),")
_CONSTANT = re.compile(r"(?<![%*/] )\b[A-Z][A-Z0-9_]+\b(?! *\?)")


@functools.lru_cache(maxsize=64)
def _names(text: str, arch: str) -> _Names:
    barriers = {
        name
        for argument in _BARRIER.findall(text)
        for name in _CONSTANT.findall(argument)
    }
    if not barriers and f"struct {_PLAN}" not in text:
        return _Names()
    with tempfile.TemporaryDirectory() as name:
        file, made = Path(name, "names.cpp"), Path(name, "names.o")
        shown = _without_code(text, sorted(barriers))
        file.write_text(shown, encoding="utf-8")
        _said(*runtime.explaining(arch), file, "-o", made)
        dump = _said(READELF, "--debug-dump=info", made)
    try:
        return _read_names(list(_entries(dump)))
    except (KeyError, ValueError, ZeroDivisionError):
        return _Names()  # unknown dump format: report the fault without names


_ENUMERATOR = "emulator_barrier_"


def _without_code(text: str, constants: list[str]) -> str:
    """The text reduced to its types, plus an enum of the constants."""
    named = ", ".join(f"{_ENUMERATOR}{x} = {x}" for x in constants)
    *lines, entry = text.rstrip().splitlines()  # EMULATOR_ENTRY
    return "\n".join([
        lines[0],  # cuda_host.h
        "#undef __global__",
        "#define __global__ inline",  # not called, so no code is generated
        *lines[1:],
        f"enum EmulatorBarriers {{ {named} }};",
        "",
    ])  # fmt: skip


# ---- Debug information, as readelf prints it ----


@dataclass
class _Entry:
    """A type, member or other entry, with its attributes and children."""

    offset: str
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[_Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        # "(indirect string, offset: 0x1a76): SharedPlan" or just the name.
        return self.attributes.get("name", "").rpartition(": ")[2]

    def number(self, attribute: str) -> int:
        return int(self.attributes[attribute].split()[0], 0)

    def type_among(self, by_offset: dict[str, _Entry]) -> _Entry:
        return by_offset[
            self.attributes["type"].strip("<>").removeprefix("0x")
        ]


_HEAD = re.compile(r" *<(\d+)><([0-9a-f]+)>: .*\(DW_TAG_(\w+)\)")
_ATTRIBUTE = re.compile(r" *<[0-9a-f]+> +DW_AT_(\w+) *: ?(.*?)\s*$")


def _entries(dump: str) -> Iterator[_Entry]:
    """All entries of a dump; each is also in its parent's children."""
    path: list[_Entry] = []
    for line in dump.splitlines():
        if head := _HEAD.match(line):
            entry = _Entry(head[2], head[3])
            del path[int(head[1]) :]
            if path:
                path[-1].children.append(entry)
            path.append(entry)
            yield entry
        elif path and (attribute := _ATTRIBUTE.match(line)):
            path[-1].attributes[attribute[1]] = attribute[2]


def _members(
    struct: _Entry, start: int, by_offset: dict[str, _Entry]
) -> Iterator[_Member]:
    """A struct's members, including inherited ones."""
    for entry in struct.children:
        if entry.tag not in ("inheritance", "member"):
            continue
        if "data_member_location" not in entry.attributes:  # static
            continue
        first = start + entry.number("data_member_location")
        kind = entry.type_among(by_offset)
        if entry.tag == "inheritance":
            yield from _members(kind, first, by_offset)
            continue
        lengths: tuple[int, ...] = ()
        while kind.tag in ("array_type", "const_type", "typedef"):
            if kind.tag == "array_type":
                lengths += tuple(
                    x.number("upper_bound") + 1
                    for x in kind.children
                    if x.tag == "subrange_type"
                )
            kind = kind.type_among(by_offset)
        size = kind.number("byte_size")
        for length in lengths:
            size *= length
        yield _Member(first, size, entry.name, lengths)


def _read_names(entries: list[_Entry]) -> _Names:
    by_offset = {entry.offset: entry for entry in entries}
    members: list[_Member] = []
    constants: list[tuple[int, str]] = []
    for entry in entries:
        if entry.tag == "structure_type" and entry.name == _PLAN:
            members += _members(entry, 0, by_offset)
        if entry.tag == "enumerator" and entry.name.startswith(_ENUMERATOR):
            constants.append(
                (
                    entry.number("const_value"),
                    entry.name.removeprefix(_ENUMERATOR),
                )
            )
    return _Names(tuple(members), tuple(constants))
