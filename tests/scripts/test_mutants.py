"""mutation_parts/mutants.py: ids that outlive edits, entries that do not."""

import re

import pytest

from mutation_parts import mutants, records
from mutation_parts.mutants import HandMade
from mutation_parts.tokens import Source

TEXT = """\
void f(int n) {
    if (n < 2) g(n + 1);
}
void h(int n) {
    for (int i = 0; i < n; ++i) g(i);
}
"""


def ids(text):
    return [x.id for x in mutants.by_rules(Source("a.cu", text))]


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: "// a line before\n\n" + x,
        lambda x: x.replace(" g(", "\n        g("),
        lambda x: x.replace("2)", "2) /* two */"),
        lambda x: "void new_one(int n) { g(n + 1); }\n" + x,
    ],
)
def test_ids_outlive_edits_that_change_no_tokens(edit):
    assert set(ids(TEXT)) <= set(ids(edit(TEXT)))


def test_an_id_depends_on_its_context():
    assert not set(ids(TEXT)) <= set(ids(TEXT.replace("n + 1", "n + 3")))


def test_mutants_that_are_alike_are_numbered():
    row = " ".join(["__syncthreads();"] * 9)
    found = ids(f"void f() {{ {row} }}")
    assert len(found) == len(set(found)) == 9
    assert any(x.endswith(".2") for x in found)


def test_a_mutant_has_as_many_lines():
    text = "void f() {\n    x = a\n      + b;\n    g();\n}\n"
    for mutant in mutants.by_rules(Source("a.cu", text)):
        assert mutant.applied(text).count("\n") == text.count("\n"), mutant


def test_location_of_a_mutant():
    found = mutants.by_rules(Source("a.cu", TEXT))
    one = next(x for x in found if "/bound/" in x.id and "/h/" in x.id)
    assert one.lines == one.statement == (5,)
    assert one.function == (4, 5, 6)
    assert one.what == "n  ->  n - 1"


def test_by_hand():
    (made,) = mutants.hand_made(
        "# a.cu: the bound and the sum\n- n < 2)\n-  g(n + 1\n+ n) g(n\n"
    )
    assert made.id == "a.cu/by-hand/the-bound-and-the-sum"
    text = made.mutant(Source("a.cu", TEXT)).applied(TEXT)
    assert "if (n) g(n);" in text


def test_by_hand_at_one_of_several_matches():
    made = HandMade("a.cu", "second", "int n", "int m", number=2, among=2)
    changed = made.mutant(Source("a.cu", TEXT)).applied(TEXT)
    assert changed == TEXT.replace("h(int n)", "h(int m)")


def test_stale_entries_are_reported(tmp_path):
    (tmp_path / "a.cu").write_text(TEXT)
    by_hand = [
        HandMade("a.cu", "gone", "n < 3", "n"),
        HandMade("b.cu", "no such file", "n", "m"),
        HandMade("a.cu", "twice", "int n", "int m"),
        HandMade("a.cu", "good", "n < 2", "n < 7"),
    ]
    known = {"a.cu/by-hand/good": "as it is", "a.cu/f/compare/0": "gone"}
    unmodelled = {"a.cu/f/drop-sync/0": "gone"}
    found = mutants.population(tmp_path, by_hand, known, unmodelled, ())
    assert "a.cu/by-hand/good" in found.mutants
    assert [x.partition(": ")[2] for x in found.stale] == [
        "a.cu/by-hand/gone: its text is not there",
        "b.cu/by-hand/no-such-file: its text is not there",
        "a.cu/by-hand/twice: its text is not there",
        "a.cu/f/compare/0: no such mutant",
        "a.cu/f/drop-sync/0: no such mutant",
    ]


def test_mutants_of_generated_text_change_it():
    """Each its own way; a rule that matches nothing would be stale."""
    made = [*mutants.of_generated(mutants.GENERATED.read_text("ascii"))]
    text = mutants.written()
    changed = {x.id: re.sub(x.pattern, x.new, text) for x in made}
    assert len({*changed.values(), text}) == len(made) + 1
    assert len(changed) == len(made)
    assert all(x.file == mutants.GENERATED_FILE for x in made)


def test_reasons():
    known = mutants.reasons(
        "# never 0,\n# so it is the same\na.cu/f/compare/1\na.cu/g/zero/2\n"
        "\n# other\nb.cu/h/bound/3\n"
    )
    assert known == {
        "a.cu/f/compare/1": "never 0, so it is the same",
        "a.cu/g/zero/2": "never 0, so it is the same",
        "b.cu/h/bound/3": "other",
    }


def source_of(file):
    return Source(file, (records.KERNELS / file).read_text("ascii"))


def test_mutants_by_hand_are_of_todays_kernels():
    by_hand = mutants.hand_made(mutants.BY_HAND.read_text("ascii"))
    sources = {x.file: source_of(x.file) for x in by_hand}
    gone = [x.id for x in by_hand if not x.mutant(sources[x.file])]
    assert not gone
    assert len({x.id for x in by_hand}) == len(by_hand) > 0


@pytest.mark.parametrize("path", [mutants.EQUIVALENTS, mutants.UNMODELLED])
def test_listed_mutants_are_of_todays_kernels(path):
    """Of the functions that are named; to make all mutants takes seconds."""
    known = mutants.reasons(path.read_text("ascii"))
    names = {}
    for name in known:
        file, function, *_ = name.rsplit("/", 3)
        names.setdefault(file, set()).add(function)
    made = {
        x.id
        for file, functions in names.items()
        for x in mutants.by_rules(source_of(file), functions)
    }
    assert not known.keys() - made
    assert all(known.values())
