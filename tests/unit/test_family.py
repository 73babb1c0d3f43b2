"""A family of kernels is one record, and nobody else knows its name."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import cuflash
from cuflash import settings
from cuflash.plans.record import FAMILIES, FamilyName
from cuflash.settings import FORMER_FAMILIES

PACKAGE = Path(cuflash.__file__).parent
KNOWS_NAMES = PACKAGE / "plans/family.py"  # chooses one


def compared_names(tree):
    """Yield the names of families that a module compares with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                for x in ast.walk(side):
                    if isinstance(x, ast.Constant) and x.value in FAMILIES:
                        yield node.lineno, x.value


def test_a_name_is_compared_where_families_are_chosen_alone():
    found = [
        (str(file.relative_to(PACKAGE)), *place)
        for file in PACKAGE.rglob("*.py")
        if file != KNOWS_NAMES
        for place in compared_names(ast.parse(file.read_text()))
    ]
    assert found == [], "ask a field of plans.record.Family instead"


@pytest.mark.parametrize(
    "text", ["f == 'sm80'", "p.family in ('fma', 'simt')", "'simt' != x"]
)
def test_the_law_sees(text):
    assert list(compared_names(ast.parse(text)))


def test_each_name_has_a_record():
    assert tuple(FAMILIES) == get_args(FamilyName)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_folder_has_the_entry(family):
    files = (PACKAGE / "kernels" / family.folder).glob("*.cu")
    entry = f"forward_{family.entry or family.name}("
    assert any(entry in x.read_text() for x in files)


@pytest.mark.parametrize("former", FORMER_FAMILIES)
def test_a_former_name_is_taken(former, monkeypatch):
    monkeypatch.setenv("CUFLASH_FAMILY", former)
    assert settings.read("CUFLASH_FAMILY") == FORMER_FAMILIES[former]
    assert former not in FAMILIES
