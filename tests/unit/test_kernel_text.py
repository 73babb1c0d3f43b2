"""The rules for the text of the kernels."""

import re
from collections import defaultdict
from functools import cache

from cuflash.build.source import GENERATED, KERNELS, kernel_files
from mutation_parts.tokens import Source

PTX = "common/ptx.cuh"
CONSTANTS = "common/constants.cuh"  # lists those that plans set
FILES = {name: path.read_text() for name, path in kernel_files().items()}


@cache
def code_of(name):
    return re.sub(r"//.*", "", FILES[name])


def test_lines_are_at_most_100_columns_of_ascii():
    for name, text in FILES.items():
        assert text.isascii() and "\t" not in text, name
        assert max(map(len, text.splitlines())) <= 100, name


def test_only_files_of_the_folder_are_included():
    known = {f'"{file}"' for file in [*FILES, *GENERATED]}
    for name in FILES:
        included = re.findall(r"#\s*include\s+(.*)", code_of(name))
        assert set(included) <= known, name


def included_by(name):
    """Return the file and all files that it includes, or they do."""
    found = [name]
    for file in found:
        included = re.findall(r'#include "(.*)"', code_of(file))
        found += [x for x in included if x in FILES and x not in found]
    return found


def capitals_in(name):
    code = re.sub(r'"[^"]*"|#.*', "", code_of(name))
    return set(re.findall(r"(?<!::)\b[A-Z][A-Z0-9_]+\b", code))


@cache
def declared_in(name):
    """Return the constants that a file declares: a type, then the name."""
    if name == CONSTANTS:
        return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", FILES[name]))
    code = re.sub(r'"[^"]*"', "", code_of(name))
    first = r"\b(?!return|else|case)\w+\s+([A-Z][A-Z0-9_]+)\b"
    others = r"[,{]\s*([A-Z][A-Z0-9_]+) =\s"
    enums = " ".join(re.findall(r"\benum [^{;]*\{[^}]*\}", code))
    found = [re.findall(x, code) for x in (first, others)]
    return {*sum(found, []), *re.findall(r"\b[A-Z][A-Z0-9_]+\b", enums)}


def test_a_file_includes_the_constants_that_it_uses():
    """None relies on what stands above the line that includes it."""
    for name in FILES.keys() - {PTX}:
        known = set().union(*map(declared_in, included_by(name)))
        assert capitals_in(name) - known == set(), name


def test_constants_of_plans_are_listed():
    plans = " ".join(x.read_text() for x in KERNELS.parent.glob("plans/*.py"))
    made = set(re.findall(r'\("([A-Z][A-Z0-9_]+)", ', plans))
    assert "HEAD_DIM" in made and made <= declared_in(CONSTANTS)


def test_inline_ptx_stands_in_one_file():
    inline = {name for name in FILES if re.search(r"\basm\b", code_of(name))}
    assert inline == {PTX}


def test_every_function_of_ptx_is_used():
    defined = re.findall(r"__forceinline__ [\w ]+? (\w+)\(", FILES[PTX])
    others = " ".join(code_of(name) for name in FILES if name != PTX)
    assert "ldmatrix_x4" in defined
    assert set(defined) <= set(re.findall(r"\w+", others))


def test_sections_of_the_ptx_manual_go_by_title():
    """Their numbers change between its versions."""
    assert "PTX ISA: " in FILES[PTX]
    assert not re.search(r"PTX ISA[ :]+\d", " ".join(FILES.values()))


def test_files_are_at_most_450_lines():
    lines = {x: FILES[x].count("\n") for x in FILES.keys() - {PTX}}
    assert {x: n for x, n in lines.items() if n > 450} == {}


def lists_by_position(text):
    """Return the sizes of the braced lists whose members have no names."""
    for nested in (r"\([^()]*\)", r"\[[^\[\]]*\]", r"<[\w, ]*>"):
        while re.search(nested, text):
            text = re.sub(nested, "", text)
    found = re.findall(r"\{\s*(?![\s.])([^{};]*)\}", text)
    return [x.count(",") + 1 for x in found]


def test_more_than_seven_members_are_filled_by_name():
    for name in FILES:
        sizes = lists_by_position(code_of(name))
        assert max(sizes, default=0) <= 7, name


@cache
def sources():
    return [Source(name, text) for name, text in FILES.items()]


def lines_of_functions():
    """Return (lines, file, name) of each function body, the longest first."""
    found = []
    for source in sources():
        for body in source.functions:
            first, last = source.tokens[body.first], source.tokens[body.last]
            lines = source.line(last.start) - source.line(first.start) + 1
            found.append((lines, source.file, body.name))
    return sorted(found, reverse=True)


def test_functions_are_at_most_80_lines():
    """A body, from its first line to its closing brace."""
    found = lines_of_functions()
    for lines, file, name in found[:10]:
        print(f"{lines:3} {file} {name}")
    assert found[0][0] <= 80


def declared(source, first, last):
    """Return the names that tokens declare: after a type, before a mark."""
    found = set()
    for i in range(first, last):
        before, after = source.tokens[i - 1], source[i + 1]
        type_ends = before.text not in ("return", "else") and (
            before.kind == "name"
            or (before.text in ("&", "*", ">") and not before.spaced)
        )
        if type_ends and after in (",", ")", "[", "=", ";", "{", "(", ":"):
            found.add(source[i])
    return found


def words_of(source, body):
    """Return a body's tokens, with numbers for the names that it declares."""
    start = body.first - 1  # of its head
    while start > 0 and source[start - 1] not in (";", "}", "{"):
        start -= 1
    own, numbers = declared(source, start, body.last), {}
    return tuple(
        numbers.setdefault(word, len(numbers)) if word in own else word
        for word in (source[i] for i in range(body.first, body.last))
    )


def bodies_that_stand_twice(tokens):
    """Return where bodies of so many tokens or more stand, if not once."""
    places = defaultdict(list)
    for source in sources():
        for body in source.functions:
            if body.last - body.first >= tokens:
                name = f"{source.file}: {body.name}"
                places[words_of(source, body)].append(name)
    return [names for names in places.values() if len(names) > 1]


def test_no_function_stands_twice():
    """Whatever it calls its parameters and variables. Short ones may."""
    assert not bodies_that_stand_twice(tokens=30)
