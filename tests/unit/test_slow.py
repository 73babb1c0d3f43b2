"""slow.txt names existing tests, and is read as documented."""

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
    assert slow.is_slow(name, slow.rules(TEXT)) == expected


@pytest.mark.parametrize("tests, kept", slow.rules(slow.FILE.read_text()))
def test_a_line_names_tests_that_there_are(tests, kept):
    file, _, function = tests.partition("::")
    text = (slow.FILE.parent / file).read_text()
    name = function.partition("[")[0].rstrip("*")
    assert f"def {name}" in text
    assert all("*" in pattern for pattern in kept)
