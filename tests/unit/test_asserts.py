"""Tests compare arrays by helpers/compare.py, whose messages say where.

A bare assert of `.all()` says "assert not True": no array, index or number.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
# Functions that compare arrays, of NumPy, JAX and PyTorch.
WHOLE = {"all", "allclose", "array_equal", "equal", "isclose"}
LIBRARIES = {"np", "jnp", "torch"}
# A file without one of them has nothing to find; parsing it takes longer.
SPOKEN = re.compile(rf"\.\s*(any|testing|{'|'.join(WHOLE)})\b")


def is_all(node):
    """Whether a condition is of all elements: x.all(), np.allclose(x, y)."""
    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ):
        return False
    owner, name = node.func.value, node.func.attr
    if isinstance(owner, ast.Name) and owner.id in LIBRARIES:
        return name in WHOLE
    return name == "all" and not node.args and not node.keywords


def is_any(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "any"
        and not node.args
        and not node.keywords
    )


def each_of(node, name):
    """Return the element of all(...) or any(...) of a generator, or None."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and isinstance(node.args[0], ast.GeneratorExp)
    ):
        return node.args[0].elt
    return None


def says_nothing(node):
    """Whether a failing condition leaves out which element is wrong."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return any(map(says_nothing, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return is_any(each_of(node.operand, "any") or node.operand)
    return is_all(each_of(node, "all") or node)


def bare(text):
    """Return the lines of asserts that say nothing."""
    if not SPOKEN.search(text):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Assert) and says_nothing(node.test))
        or (
            isinstance(node, ast.Attribute)
            and node.attr == "testing"
            and ast.unparse(node) == "np.testing"
        )
    ]


@pytest.mark.parametrize(
    "line",
    [
        "assert (x == y).all()",
        "assert not x[3:].any(), name",
        "assert n == 2 and np.isnan(x).all()",
        "assert np.array_equal(x, y)",
        "assert torch.equal(x, y)",
        "assert all(np.isfinite(x).all() for x in got)",
        "assert not any(x.any() for x in got)",
        "np.testing.assert_array_equal(x, y)",
    ],
)
def test_what_says_nothing(line):
    assert bare(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "assert x.any()",  # which element there is none of?
        "assert not (x == y).all()",
        "assert x.all(axis=0).sum() == 3",
        "assert_all(x, 0, 'x')",
    ],
)
def test_what_needs_no_index(line):
    assert bare(line) == []


def test_no_comparison_is_bare():
    lines = {str(file): bare(file.read_text()) for file in FILES}
    assert {file: found for file, found in lines.items() if found} == {}
