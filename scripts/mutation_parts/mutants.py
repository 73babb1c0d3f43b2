"""Mutants: their ids, rules, hand-written ones, those that no test catches.

An id names file, function and operator, with a hash of the changed tokens,
their replacement and some tokens around. So it survives moved lines, comments
and reformatting. Mutants equal in all this are numbered.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuflash.build.source import kernel_files
from cuflash.expressions import text
from cuflash.expressions.trace import ArrayKind, Given, record
from mutation_parts import operators
from mutation_parts.operators import Edit
from mutation_parts.tokens import Function, Source, tokens_of

BY_HAND = Path(__file__).parent / "by_hand.txt"
EQUIVALENTS = Path(__file__).parent / "equivalents.txt"
UNMODELLED = Path(__file__).parent / "unmodelled.txt"
# Of what cuflash/expressions/text.py writes, which no file holds.
GENERATED = Path(__file__).parent / "generated.txt"
GENERATED_FILE = "score/expression.cuh (generated)"
# The emulator replaces it by a twin.
NO_MUTANTS = frozenset(["common/ptx.cuh"])
AROUND = 6  # tokens on each side that are part of an id


@dataclass(frozen=True)
class Mutant:
    """One change of one kernel file: text[start:end] becomes `new`.

    With a `pattern`, one of every generated text: what it matches becomes
    `new`, as `re.sub` has it.
    """

    id: str
    file: str
    start: int
    end: int
    new: str
    # Where it stands, as lines from 1 on: itself, its statement, its function.
    lines: tuple[int, ...]
    statement: tuple[int, ...] = ()
    function: tuple[int, ...] = ()
    constant: bool = False  # the function is constexpr
    what: str = ""
    pattern: str = ""

    def applied(self, text: str) -> str:
        """Return the changed text, with the same number of lines."""
        old = text[self.start : self.end]
        lines = old.count("\n") - self.new.count("\n")
        new = self.new + "\n" * max(lines, 0)
        return text[: self.start] + new + text[self.end :]

    def rank(self, seed: int) -> bytes:
        """Return its rank in a sample, from the id and the seed."""
        return hashlib.sha256(f"{seed} {self.id}".encode()).digest()


# ---- By rules ----


def _id_of(source: Source, of: Function, operator: str, edit: Edit) -> str:
    around = [
        source.joined(max(of.first, edit.first - AROUND), edit.first),
        source.joined(edit.first, edit.last),
        " ".join(map(str, tokens_of(edit.new))),
        source.joined(edit.last, min(of.last, edit.last + AROUND)),
    ]
    digest = hashlib.sha256("\n".join(around).encode()).hexdigest()[:8]
    return f"{source.file}/{of.name}/{operator}/{digest}"


def _lines(source: Source, first: int, last: int) -> tuple[int, ...]:
    """The lines of tokens [first, last)."""
    tokens = source.tokens
    begin = source.line(tokens[first].start)
    end = source.line(tokens[max(first, last - 1)].start)
    return tuple(range(begin, end + 1))


def by_rules(
    source: Source, names: Collection[str] | None = None
) -> Iterator[Mutant]:
    """The mutants of a file, in the order of its functions.

    names : of the only functions to mutate.
    """
    known: Counter[str] = Counter()
    made: set[tuple[int, int, str]] = set()
    for of in source.functions:
        if names is not None and of.name not in names:
            continue
        for operator, edit in operators.edits(source, of):
            start = source.tokens[edit.first].start
            end = source.tokens[edit.last - 1].end
            if (start, end, edit.new) in made:  # by another rule
                continue
            made.add((start, end, edit.new))
            name = _id_of(source, of, operator, edit)
            known[name] += 1
            if known[name] > 1:
                name += f".{known[name]}"
            first, last = source.statement(edit.first)
            old = " ".join(source.text[start:end].split())
            new = " ".join(edit.new.split())
            yield Mutant(
                name, source.file, start, end, edit.new,
                _lines(source, edit.first, edit.last),
                _lines(source, first, last + 1),
                _lines(source, of.first - 1, of.last + 1), of.constant,
                f"{old}  ->  {new or '(nothing)'}",
            )  # fmt: skip


# ---- By hand ----


@dataclass(frozen=True)
class HandMade:
    """A change that no rule makes: tokens `old` become `new`.

    If `old` stands in the file `among` times, the `number`-th is changed.
    """

    file: str
    name: str
    old: str
    new: str
    number: int = 1
    among: int = 1

    @property
    def id(self) -> str:
        """Of the mutant."""
        slug = re.sub(r"\W+", "-", self.name.lower()).strip("-")
        return f"{self.file}/by-hand/{slug}"

    def mutant(self, source: Source) -> Mutant | None:
        """Return the mutant; None if the text does not occur as described."""
        wanted = [x.text for x in tokens_of(self.old)]
        texts, count = [x.text for x in source.tokens], len(wanted)
        found = [
            i
            for i in range(len(texts) - count + 1)
            if texts[i : i + count] == wanted
        ]
        if len(found) != self.among:
            return None
        first = found[self.number - 1]
        last = first + count
        inside = [x for x in source.functions if x.first <= first < x.last]
        return Mutant(
            self.id, source.file, source.tokens[first].start,
            source.tokens[last - 1].end, self.new,
            _lines(source, first, last),
            function=tuple(
                line
                for x in inside
                for line in _lines(source, x.first - 1, x.last + 1)
            ),
            constant=any(x.constant for x in inside), what=self.name,
        )  # fmt: skip


def hand_made(text: str) -> list[HandMade]:
    """Parse a text like by_hand.txt: blocks separated by blank lines.

    ::

        # file: the fault
        - the kernel's text, one or more lines
        + its replacement, zero or more lines
        @ 2 of 3
    """
    found = []
    for block in filter(None, text.strip().split("\n\n")):
        parts: dict[str, list[str]] = {mark: [] for mark in "#-+@"}
        for line in block.splitlines():
            parts[line[0]].append(line[2:])
        if not parts["#"] or not parts["-"]:
            raise ValueError(f"a mutant by hand needs # and -:\n{block}")
        file, _, name = " ".join(parts["#"]).partition(": ")
        number, among = (
            map(int, parts["@"][0].split(" of ")) if parts["@"] else (1, 1)
        )
        old, new = "\n".join(parts["-"]), "\n".join(parts["+"])
        found.append(HandMade(file, name, old, new, number, among))
    return found


# ---- Of generated text ----


def of_generated(text: str) -> Iterator[Mutant]:
    """Parse generated.txt: as by_hand.txt, of patterns, without a file."""
    for block in filter(None, text.strip().split("\n\n")):
        name, pattern, *new = block.splitlines()
        what = name.removeprefix("# ")
        slug = re.sub(r"\W+", "-", what.lower()).strip("-")
        yield Mutant(
            f"score/expression.cuh/generated/{slug}", GENERATED_FILE, 0, 0,
            "\n".join(x[2:] for x in new), (1,), what=what,
            pattern=pattern[2:],
        )  # fmt: skip


@functools.cache
def written() -> str:
    """Texts in which every pattern of generated.txt occurs."""
    arrays = (ArrayKind("float32", 2), ArrayKind("float64", 1, (0,)))
    given = Given(
        (("curve", arrays[1]), ("table", arrays[0])),
        (("n", "int"), ("w", "real")),
    )

    def score(score, b, h, q_idx, kv_idx, *, table, curve, n, seqlen_q):
        far = np.where(q_idx - kv_idx > n, score * table[h, q_idx], -np.inf)
        return far * score + curve[kv_idx] * (seqlen_q < b)

    def mask(b, h, q_idx, kv_idx, *, w, seqlen_q):
        near = (q_idx >= kv_idx) | (q_idx - kv_idx < w)
        return near & (b + h < seqlen_q)

    return text.text(
        record(score, "score_mod", given)[0],
        record(mask, "mask_mod", given)[0],
        (arrays[1], arrays[0]), (0, 1),
    )  # fmt: skip


# ---- Equivalents, and faults that the emulator does not model ----


def reasons(text: str) -> dict[str, str]:
    """Return, by id, why no test can detect the mutant.

    The texts of equivalents.txt and unmodelled.txt: blocks separated by blank
    lines, in which # lines give the reason and others are ids.
    """
    known = {}
    for block in filter(str.strip, text.split("\n\n")):
        lines = block.strip().splitlines()
        why = " ".join(x[1:].strip() for x in lines if x.startswith("#"))
        for line in lines:
            if not line.startswith("#"):
                known[line.split()[0]] = why
    return known


# ---- All ----


@dataclass
class Population:
    """All mutants by id, and what the lists say of them.

    equivalent, unmodelled : by id, why no test can detect them.
    stale : lines about entries that name no mutant: fix or remove them.
    """

    mutants: dict[str, Mutant]
    equivalent: dict[str, str]
    unmodelled: dict[str, str]
    stale: list[str]

    def undetectable(self, name: str) -> str | None:
        """Return why no test can detect a mutant, if none can."""
        return self.equivalent.get(name) or self.unmodelled.get(name)


def population(
    kernels: Path,
    by_hand: Iterable[HandMade] | None = None,
    known: dict[str, str] | None = None,
    unmodelled: dict[str, str] | None = None,
    generated: Iterable[Mutant] | None = None,
) -> Population:
    """The mutants of a folder of kernels as it is."""
    if by_hand is None:
        by_hand = hand_made(BY_HAND.read_text("ascii"))
    if known is None:
        known = reasons(EQUIVALENTS.read_text("ascii"))
    if unmodelled is None:
        unmodelled = reasons(UNMODELLED.read_text("ascii"))
    sources = {
        name: Source(name, path.read_text("ascii"))
        for name, path in kernel_files(kernels).items()
        if name not in NO_MUTANTS
    }
    made = [x for source in sources.values() for x in by_rules(source)]
    stale = []
    for entry in by_hand:
        source = sources.get(entry.file)
        mutant = source and entry.mutant(source)
        if mutant:
            made.append(mutant)
        else:
            stale.append(f"by_hand.txt: {entry.id}: its text is not there")
    if generated is None:
        generated = of_generated(GENERATED.read_text("ascii"))
    for mutant in generated:
        if re.search(mutant.pattern, written()):
            made.append(mutant)
        else:
            stale.append(f"generated.txt: {mutant.what}: matches nothing")
    mutants = {x.id: x for x in made}
    for list_name, names in (
        ("equivalents.txt", known),
        ("unmodelled.txt", unmodelled),
    ):
        stale += [
            f"{list_name}: {x}: no such mutant"
            for x in names
            if x not in mutants
        ]
    return Population(mutants, known, unmodelled, stale)
