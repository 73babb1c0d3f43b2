"""Docstrings, as help() prints them."""

import ast
from pathlib import Path

import pytest

import cuflash

ROOT = Path(cuflash.__file__).parent
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file):
    """Return the docstrings of a file."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = (
        ast.get_docstring(x, clean=False)
        for x in nodes
        if isinstance(x, KINDS)
    )
    return [text for text in found if text]


def _name(folder):
    return str(folder.relative_to(ROOT))


@pytest.mark.parametrize(
    "folder", sorted({x.parent for x in ROOT.rglob("*.py")}), ids=_name
)
def test_lines_are_those_of_the_source(folder):
    """A backslash at the end of a line joins it to the next: too long."""
    for file in folder.glob("*.py"):
        lines = "\n".join(docstrings(file)).splitlines()
        assert [x for x in lines if len(x) > 79] == [], file.name
