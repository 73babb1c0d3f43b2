"""slow.txt names existing tests, and is read as documented."""

import functools

import pytest

import slow

TEXT = """\
# A comment
test_a.py::test_many*
    but *[small-*
test_b.py::*
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_a.py::test_many[large-1]", True),
        ("test_a.py::test_many[small-1]", False),
        ("test_a.py::test_few[large-1]", False),
        ("test_b.py::test_x", True),
        ("test_c.py::test_b.py::test_x", False),
    ],
)
def test_a_name_is_slow(name, expected):
    assert (name in slow.slow_of([name], slow.rules(TEXT))) == expected


def test_rules_that_do_nothing_are_found():
    text = TEXT + "    but *[7]\ntest_b.py::test_x\n    but *\ntest_z*\n"
    names = ["test_a.py::test_many[small-1]", "test_b.py::test_x"]
    assert [*slow.idle(names, slow.rules(text))] == [
        "test_b.py::* but *[7]", "test_b.py::test_x but *", "test_z*"
    ]  # fmt: skip


def test_each_rule_names_tests_that_run(request):
    """Also each exception: `make test` runs a test that it names."""
    names = request.config.stash[slow.COLLECTED]
    files = {name.partition("::")[0] for name in names}
    rules = [
        (tests, kept)
        for tests, kept in slow.rules(slow.FILE.read_text())
        if tests.partition("::")[0] in files  # a part of the suite runs
    ]
    assert not [*slow.idle(names, rules)]


@functools.cache
def text_of(file):
    path = slow.FILE.parent / file
    return path.read_text() if path.exists() else ""


def names_a_test(line):
    """Whether a line names a function, or files, that there are."""
    file, _, function = line.partition("::")
    if not function:
        return any(slow.FILE.parent.glob(file))
    name = function.partition("[")[0].rstrip("*")
    return f"def {name}" in text_of(file)


def test_each_line_names_tests_that_there_are():
    lines = [tests for tests, _ in slow.rules(slow.FILE.read_text())]
    assert [x for x in lines if not names_a_test(x)] == []
