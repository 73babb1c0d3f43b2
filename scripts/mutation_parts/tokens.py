"""Kernel text as tokens: which brackets match, which function is where.

Not a parser of C++: it relies on the layout of `cuflash/kernels`. A binary
operator has whitespace on both sides; template brackets, pointers, references
and unary operators do not. Comments and preprocessor lines are no tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:\\\n|[^\n])* | \s+ )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<number> (?: 0[xX][0-9A-Fa-f]+
                  | (?:\d+\.?\d* | \.\d+) (?:[eE][+-]?\d+)? ) [uUlLfF]* )
  | (?P<string> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
  | (?P<op> <<=|>>=|->|\+\+|--|<<|(?<=\s)>>(?=\s)|<=|>=|==|!=|&&|\|\|
          | [-+*/%&|^]=|::|. )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)

# Of binary operators; a larger number binds tighter.
PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6,
    "<": 7, ">": 7, "<=": 7, ">=": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "%": 10,
}  # fmt: skip
ASSIGNMENTS = frozenset(
    ["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="]
)
_ENDS = frozenset(["?", ":", ",", ";", "return", *ASSIGNMENTS])
_OPEN = {"(": ")", "[": "]", "{": "}"}
_CLOSE = frozenset(_OPEN.values())
_NO_FUNCTION = frozenset(["alignas", "decltype", "sizeof"])


@dataclass(frozen=True)
class Token:
    """One token: its kind is name, number, string or op."""

    kind: str
    text: str
    start: int
    end: int
    spaced: bool  # whitespace on both sides

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Function:
    """A function's body: tokens [first, last), its brackets not included."""

    name: str
    first: int
    last: int
    constant: bool = False  # constexpr: the compiler may evaluate it


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text."""
    found = []
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "skip":
            continue
        start, end = match.span()
        around = text[start - 1 : start] + text[end : end + 1]
        spaced = len(around) == 2 and around.isspace()
        found.append(Token(match.lastgroup, match[0], start, end, spaced))
    return found


class Source:
    """The tokens of one kernel file, with brackets and functions."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text
        self.tokens = tokens_of(text)
        self._texts = [x.text for x in self.tokens]
        self._line_starts = [m.end() for m in re.finditer("^|\n", text)]
        self.match: dict[int, int] = {}  # brackets, both ways
        self.inside: list[int] = []  # each token's innermost open bracket
        self._match_brackets()

    def __getitem__(self, i: int) -> str:
        """Text of token `i`; empty where there is none."""
        return self._texts[i] if 0 <= i < len(self._texts) else ""

    def line(self, offset: int) -> int:
        """The line, from 1 on, of an offset in the text."""
        return bisect_right(self._line_starts, offset)

    def joined(self, first: int, last: int) -> str:
        """The text of tokens [first, last), on one line."""
        return " ".join(map(str, self.tokens[first:last]))

    def raw(self, first: int, last: int) -> str:
        """The text of tokens [first, last) as it stands."""
        tokens = self.tokens
        return self.text[tokens[first].start : tokens[last - 1].end]

    # ---- Brackets and functions ----

    def _match_brackets(self) -> None:
        stack = [-1]
        for i, token in enumerate(self.tokens):
            opens = token.text in _OPEN or self._opens_template(i)
            closes = token.text in _CLOSE or (
                token.text == ">"
                and not token.spaced
                and self[stack[-1]] == "<"
            )
            if closes and len(stack) > 1:
                self.match[i] = stack.pop()
                self.match[self.match[i]] = i
            self.inside.append(stack[-1])
            if opens:
                stack.append(i)

    def _opens_template(self, i: int) -> bool:
        token, before = self.tokens[i], self.tokens[i - 1] if i else None
        return (
            token.text == "<"
            and not token.spaced
            and before is not None
            and before.kind == "name"
            and (before.end == token.start or before.text == "template")
        )

    def plain(self, first: int, last: int) -> list[int]:
        """Which of the tokens [first, last) are no template arguments."""
        begin, end = (bisect_left(self._plain, x) for x in (first, last))
        return self._plain[begin:end]

    @cached_property
    def _plain(self) -> list[int]:
        inside = enumerate(self.inside)
        return [i for i, bracket in inside if self[bracket] != "<"]

    @cached_property
    def functions(self) -> list[Function]:
        """All function bodies, lambdas as part of theirs."""
        found: list[Function] = []
        scopes: list[tuple[int, str]] = []  # of structs: their end, their name
        start = i = 0  # `start`: of the declaration at hand
        while i < len(self.tokens):
            text = self[i]
            if text == "{" and i in self.match:
                end = self.match[i]
                head = self._head(start, i)
                if head and head[0] == "struct":
                    scopes.append((end, head[1]))
                elif head:
                    name = "::".join([*(x[1] for x in scopes), head[1]])
                    constant = "constexpr" in map(str, self.tokens[start:i])
                    found.append(Function(name, i + 1, end, constant))
                    i = end
                else:
                    i = end  # an initialiser
                    start = start if self[i + 1] == ";" else i + 1
                    i += 1
                    continue
                start = i + 1
            elif text in (";", "}"):
                start = i + 1
                if scopes and scopes[-1][0] == i:
                    scopes.pop()
            i += 1
        return found

    def _head(self, start: int, end: int) -> tuple[str, str] | None:
        """What tokens before a brace declare: ("struct"|"function", name)."""
        i = start
        while i < end:
            text, token = self[i], self.tokens[i]
            if text == "=" and self[i - 1] != "operator":
                return None
            if text in ("struct", "class", "union", "namespace", "enum"):
                return "struct", self[i + 1]
            if text in ("(", "<", "[") and i in self.match:
                i = self.match[i]
            elif (
                token.kind == "name"
                and self[i + 1] == "("
                and not text.startswith("__")
                and text not in _NO_FUNCTION
            ):
                return "function", text
            i += 1
        return None

    # ---- Expressions and statements ----

    def binary(self, i: int) -> bool:
        """Whether a token is a binary operator, no assignment."""
        return self[i] in PRECEDENCE and self.tokens[i].spaced

    def right_end(self, i: int) -> int:
        """Where the right operand of binary operator `i` ends."""
        j = i + 1
        while j < len(self.tokens):
            if j in self.match and self.match[j] > j:
                j = self.match[j]
            elif self[j] in _ENDS or j in self.match:
                break
            elif self.binary(j) and PRECEDENCE[self[j]] <= PRECEDENCE[self[i]]:
                break
            j += 1
        return j

    def left_start(self, i: int) -> int:
        """Where the left operand of binary operator (or `?`) `i` begins."""
        strength = PRECEDENCE.get(self[i], 0)
        j = i - 1
        while j >= 0:
            if j in self.match and self.match[j] < j:
                j = self.match[j]
            elif self[j] in _ENDS or j in self.match:
                break
            elif self.binary(j) and PRECEDENCE[self[j]] < strength:
                break
            j -= 1
        return j + 1

    def chain_start(self, i: int) -> int:
        """Where the member access that ends with token `i` begins."""
        while self[i - 1] in (".", "->", "::"):
            i -= 2
            while i in self.match and self.match[i] < i:
                i = self.match[i] - 1
        return i

    def chain_end(self, i: int) -> int:
        """Return the end of the names, members and calls from `i` on."""
        while self[i] in ("*", "("):  # *pointer = x
            if self[i] == "(":
                return i
            i += 1
        if i >= len(self.tokens) or self.tokens[i].kind != "name":
            return i
        i += 1
        while i < len(self.tokens):
            if self[i] in (".", "->", "::"):
                i += 2
            elif self[i] in ("(", "[", "<") and i in self.match:
                i = self.match[i] + 1
            else:
                break
        return i

    def statement_starts(self, of: Function) -> list[int]:
        """Yield tokens of a function that may begin a statement."""
        return [
            i
            for i in range(of.first, of.last)
            if self[self.inside[i]] == "{"
            and (self[i - 1] in ("{", "}", ";", "else") or self._after_head(i))
        ]

    def _after_head(self, i: int) -> bool:
        """Whether `if (...)` or the like stands before a token."""
        if self[i - 1] != ")" or i - 1 not in self.match:
            return False
        before = self.match[i - 1] - 1
        return self[before] in ("if", "for", "while", "constexpr")

    def statement(self, i: int) -> tuple[int, int]:
        """First and last token of the statement, or head, of a token."""
        starts, ends = self._statements
        return starts[bisect_right(starts, i) - 1], ends[bisect_left(ends, i)]

    @cached_property
    def _statements(self) -> tuple[list[int], list[int]]:
        """Where statements and heads start, and where they end."""
        texts, count = self._texts, len(self._texts)
        starts = [
            i for i in range(1, count) if texts[i - 1] in ("{", "}", ";")
        ]
        ends = [i for i in range(count - 1) if texts[i] in ("{", ";")]
        return [0, *starts], [*ends, count - 1]
