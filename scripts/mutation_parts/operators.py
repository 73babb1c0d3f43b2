"""Mutation operators: rules on tokens, each of which makes one kind of change.

An operator takes a `Source` and one of its functions, and yields edits. Its
name, with dashes, is part of each mutant's id, so renaming it changes ids. It
should yield only edits that compile, as far as tokens can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mutation_parts.tokens import ASSIGNMENTS, Function, Source

# Words in names of calls that order threads and memory.
_SYNC = frozenset(
    """wait arrive fence sync syncthreads syncwarp barrier commit acquire
    release turn await tell publish keep""".split()
)
# Not modelled by the emulator: no emulated test can detect their removal.
NOT_MODELLED = frozenset(["__threadfence"])
_PHASE = re.compile(r"(?:\w*_)?(?:parity|phase)")
_STAGE = frozenset(["stage", "place", "slot"])
_INDICES = frozenset(
    """batch column group half head i j key kv_head lane n number query row
    stage tile turn where word""".split()
)
_FUNCTIONS = frozenset(
    """cap exp exp2_approx exp2f exponential fabs fabsf log logf quad_max
    quad_sum reciprocal_approx rounded row_max row_sum tanh""".split()
)
_PAIRS = {
    "min": "max", "fmin": "fmax", "fminf": "fmaxf",
    "atomicMin": "atomicMax", "__any_sync": "__all_sync",
}  # fmt: skip
_MIN_MAX = _PAIRS | {high: low for low, high in _PAIRS.items()}
_COMPARE = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
}  # fmt: skip
_ARITHMETIC = {
    "+": "-", "-": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|",
    "+=": "-=", "-=": "+=", "*=": "/=", "&=": "|=", "|=": "&=", "^=": "|=",
}  # fmt: skip


class Edit(NamedTuple):
    """Tokens [first, last) become another text."""

    first: int
    last: int
    new: str


Operator = Callable[[Source, Function], Iterator[Edit]]
OPERATORS: dict[str, Operator] = {}


def _operator(rule: Operator) -> Operator:
    OPERATORS[rule.__name__.replace("_", "-")] = rule
    return rule


def edits(source: Source, of: Function) -> Iterator[tuple[str, Edit]]:
    """All edits of a function, each with its operator's name."""
    for name, rule in OPERATORS.items():
        for edit in rule(source, of):
            if not _is_declarative(source, edit.first):
                yield name, edit


def _is_declarative(source: Source, i: int) -> bool:
    """Whether a token is of a static_assert or names a type."""
    first, _ = source.statement(i)
    return source[first] in ("static_assert", "using", "typedef")


def _body(source: Source, of: Function) -> list[int]:
    """Return tokens of a function that are no template arguments."""
    return source.plain(of.first, of.last)


def _binaries(source: Source, of: Function) -> Iterator[int]:
    return (i for i in _body(source, of) if source.binary(i))


# ---- Statements that are left out ----


def _calls(source: Source, of: Function) -> Iterator[tuple[int, int, str]]:
    """Statements that are a call: first, its semicolon, words of the name."""
    for first in source.statement_starts(of):
        end = source.chain_end(first)
        if source[end] != ";" or source[end - 1] != ")":
            continue
        opening = source.match[end - 1]
        names = source.joined(first, opening)
        if source[first] != "return" and not NOT_MODELLED & {*names.split()}:
            yield first, end, names


def _words(names: str) -> set[str]:
    return set(re.split(r"[\W_]+", names))


@_operator
def drop_sync(source: Source, of: Function) -> Iterator[Edit]:
    """Leave out a barrier, wait, arrival, fence or commit."""
    for first, end, names in _calls(source, of):
        if _SYNC & _words(names):
            yield Edit(first, end, "")
    for i in _body(source, of):  # while (load_acquire(x) != turn) {}
        if source[i] == "while" and source[i + 1] == "(":
            end = source.match[i + 1]
            if source[end + 1] == "{" and source[end + 2] == "}":
                yield Edit(i + 2, end, "false")


@_operator
def drop_call(source: Source, of: Function) -> Iterator[Edit]:
    """Leave out any other call whose result is unused."""
    for first, end, names in _calls(source, of):
        if not _SYNC & _words(names):
            yield Edit(first, end, "")


@_operator
def drop_assignment(source: Source, of: Function) -> Iterator[Edit]:
    """Leave out an assignment: `l *= rescale;`, `++count;`."""
    for first in source.statement_starts(of):
        step = source[first] in ("++", "--")
        end = source.chain_end(first + step)
        if step and source[end] == ";":
            yield Edit(first, end, "")
        if not step and end > first and source[end] in ASSIGNMENTS:
            _, last = source.statement(first)
            if source[last] == ";":
                yield Edit(first, last, "")


# ---- Pipelines ----


@_operator
def flip_phase(source: Source, of: Function) -> Iterator[Edit]:
    """Wait for the other phase of a barrier."""
    for i in _body(source, of):
        end = _behind_call(source, i)
        if (
            _PHASE.fullmatch(source[i])
            and source[i - 1] not in ("&", "*")
            and source[end] in (")", ",", ";")
            and source.tokens[i - 1].kind != "name"
        ):
            yield Edit(end - 1, end, source[end - 1] + " ^ 1")


@_operator
def wrong_stage(source: Source, of: Function) -> Iterator[Edit]:
    """Use another stage of a pipeline."""
    for i in _body(source, of):
        end = _behind_call(source, i)
        if source[i] in _STAGE and source[end] in (")", ",", ";", "]"):
            first = source.chain_start(i)
            if source.tokens[first - 1].kind != "name":  # no declaration
                yield Edit(first, end, f"({source.raw(first, end)} ^ 1)")


@_operator
def wait_for_fewer(source: Source, of: Function) -> Iterator[Edit]:
    """Let one more group be in flight: `wgmma_wait<0>` waits for all."""
    for i in range(of.first, of.last):
        if (
            "wait" in source[i]
            and source[i + 1] == "<"
            and source[i + 2].isdigit()
        ):
            yield Edit(i + 2, i + 3, str(int(source[i + 2]) + 1))


def _behind_call(source: Source, i: int) -> int:
    """Return the end of a name, or of a call of it without arguments."""
    return i + 3 if source[i + 1] == "(" and source[i + 2] == ")" else i + 1


# ---- Comparisons and bounds ----


@_operator
def compare(source: Source, of: Function) -> Iterator[Edit]:
    """`<` and `<=`, `>` and `>=`, `==` and `!=`."""
    for i in _binaries(source, of):
        if source[i] in _COMPARE:
            yield Edit(i, i + 1, _COMPARE[source[i]])


@_operator
def bound(source: Source, of: Function) -> Iterator[Edit]:
    """A bound off by 1, in the direction that `compare` does not try."""
    further = {"<": "-", "<=": "+", ">": "+", ">=": "-"}
    for i in _binaries(source, of):
        if source[i] in further:
            end = source.right_end(i)
            old = source.raw(end - 1, end)
            yield Edit(end - 1, end, f"{old} {further[source[i]]} 1")


@_operator
def literal(source: Source, of: Function) -> Iterator[Edit]:
    """An integer that is 1 more; 0.0 for 1.0 and the other way."""
    floats = {"0.0f": "1.0f", "1.0f": "0.0f"}
    for i in _body(source, of):
        if source.tokens[i].kind == "number":
            text = source[i]
            if text in floats:
                yield Edit(i, i + 1, floats[text])
            elif text.isdigit():
                yield Edit(i, i + 1, str(int(text) + 1))


@_operator
def min_max(source: Source, of: Function) -> Iterator[Edit]:
    """The larger for the smaller, all for any; one of the two alone."""
    for i in _body(source, of):
        if source[i] in _MIN_MAX and source[i + 1] == "(":
            yield Edit(i, i + 1, _MIN_MAX[source[i]])
            for first, end in _arguments(source, i + 1):
                alone = f"({source.raw(first, end)})"
                yield Edit(i, source.match[i + 1] + 1, alone)


# ---- Arithmetic ----


@_operator
def arithmetic(source: Source, of: Function) -> Iterator[Edit]:
    """Add for subtract, left for right, and for or."""
    for i in _body(source, of):
        if source[i] in _ARITHMETIC and source.tokens[i].spaced:
            yield Edit(i, i + 1, _ARITHMETIC[source[i]])


def _dropped(source: Source, i: int) -> Iterator[Edit]:
    """A binary operator without its right operand, or its first one."""
    first, end = source.left_start(i), source.right_end(i)
    yield Edit(i, end, "")
    if source[i] in ("+", "*", "&&", "||") and not any(
        source[j] == source[i] and source.inside[j] == source.inside[i]
        for j in range(first, i)
    ):
        yield Edit(first, i + 1, "")


@_operator
def drop_term(source: Source, of: Function) -> Iterator[Edit]:
    """A sum or difference without one of its terms."""
    for i in _binaries(source, of):
        if source[i] in ("+", "-"):
            yield from _dropped(source, i)


@_operator
def drop_factor(source: Source, of: Function) -> Iterator[Edit]:
    """A product, quotient, shift or bit operation without one operand."""
    for i in _binaries(source, of):
        if source[i] in ("*", "/", "%", "<<", ">>", "&", "|", "^"):
            yield from _dropped(source, i)


@_operator
def swap_operands(source: Source, of: Function) -> Iterator[Edit]:
    """`b - a` for `a - b`."""
    for i in _binaries(source, of):
        if source[i] == "-":
            first, end = source.left_start(i), source.right_end(i)
            left, right = source.raw(first, i), source.raw(i + 1, end)
            if left != right:
                yield Edit(first, end, f"{right} - {left}")


@_operator
def swap_arguments(source: Source, of: Function) -> Iterator[Edit]:
    """Swap two adjacent arguments of a call, if they look alike."""
    for i in _body(source, of):
        called = source.tokens[i - 1].kind == "name" or source[i - 1] == ">"
        if source[i] != "(" or not called or source[i - 1] in _HEADS:
            continue
        parts = _arguments(source, i)
        for (first, middle), (second, end) in zip(
            parts, parts[1:], strict=False
        ):
            left, right = source.raw(first, middle), source.raw(second, end)
            if left != right and _shape(left) == _shape(right):
                between = source.raw(middle, second)
                yield Edit(first, end, f"{right}{between} {left}")


_HEADS = frozenset(["if", "for", "while", "switch", "return", "constexpr"])


def _arguments(source: Source, opening: int) -> list[tuple[int, int]]:
    """The arguments between brackets, each first token and end."""
    found, first = [], opening + 1
    for i in range(opening + 1, source.match[opening] + 1):
        at_comma = source[i] == "," and source.inside[i] == opening
        if at_comma or i == source.match[opening]:
            found.append((first, i))
            first = i + 1
    return [(a, b) for a, b in found if a < b]


def _shape(text: str) -> str:
    """An argument with its names left out: `a.b` is as `c.d`."""

    def letter(word: re.Match[str]) -> str:
        return "0" if word[0].isdigit() else "X" if word[0].isupper() else "x"

    return re.sub(r"\w+", letter, text)


@_operator
def zero(source: Source, of: Function) -> Iterator[Edit]:
    """0 for an argument or subscript that is an index: the first head."""
    for i in _body(source, of):
        if source[i] in _INDICES and source[i + 1] in (")", ",", "]"):
            first = source.chain_start(i)
            if source[first - 1] in ("(", ",", "["):
                yield Edit(first, i + 1, "0")


@_operator
def drop_function(source: Source, of: Function) -> Iterator[Edit]:
    """`x` for `log(x)`, a function of floats."""
    for i in _body(source, of):
        if source[i] in _FUNCTIONS and source[i + 1] == "(":
            end = source.match[i + 1] + 1
            yield Edit(i, end, source.raw(i + 1, end))


@_operator
def drop_minus(source: Source, of: Function) -> Iterator[Edit]:
    """`x` for `-x`."""
    for i in _body(source, of):
        if source[i] == "-" and not source.tokens[i].spaced:
            yield Edit(i, i + 1, "")


# ---- Conditions ----


@_operator
def condition(source: Source, of: Function) -> Iterator[Edit]:
    """A branch that is always taken, or never."""
    for i in range(of.first, of.last):
        constant = source[i] == "constexpr" and source[i - 1] == "if"
        plain = source[i] == "if" and source[i + 1] == "("
        if constant or plain:
            yield Edit(i + 2, source.match[i + 1], "false")
        if plain:
            yield Edit(i + 2, source.match[i + 1], "true")
        if source[i] == "while" and source[source.match[i + 1] + 2] != "}":
            yield Edit(i + 2, source.match[i + 1], "false")


@_operator
def choice(source: Source, of: Function) -> Iterator[Edit]:
    """`a` or `b` for `c ? a : b`."""
    for i in _body(source, of):
        if source[i] != "?":
            continue
        colon = _end_of_choice(source, i + 1)
        end = _end_of_choice(source, colon + 1)
        first = source.left_start(i)
        yield Edit(first, end, source.raw(i + 1, colon))
        yield Edit(first, end, source.raw(colon + 1, end))


def _end_of_choice(source: Source, i: int) -> int:
    """Where an expression from `i` on ends that may hold further choices."""
    depth, around = 0, source.inside[i]
    while source.inside[i] == around and source[i] not in (",", ";"):
        depth += (source[i] == "?") - (source[i] == ":")
        if depth < 0:
            break
        i = source.match[i] + 1 if i in source.match else i + 1
    return i


@_operator
def logic(source: Source, of: Function) -> Iterator[Edit]:
    """Or for and."""
    other = {"&&": "||", "||": "&&"}
    for i in _binaries(source, of):
        if source[i] in other:
            yield Edit(i, i + 1, other[source[i]])


@_operator
def drop_condition(source: Source, of: Function) -> Iterator[Edit]:
    """One of several conditions left out."""
    for i in _binaries(source, of):
        if source[i] in ("&&", "||"):
            yield from _dropped(source, i)


@_operator
def drop_negation(source: Source, of: Function) -> Iterator[Edit]:
    """`x` for `!x`."""
    for i in _body(source, of):
        if source[i] == "!":
            yield Edit(i, i + 1, "")


@_operator
def flip_bool(source: Source, of: Function) -> Iterator[Edit]:
    """`true` and `false`, as template arguments too: `Bool<true>`."""
    other = {"true": "false", "false": "true"}
    for i in range(of.first, of.last):
        if source[i] in other:
            yield Edit(i, i + 1, other[source[i]])
