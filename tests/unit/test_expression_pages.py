"""The pages about expressions name what there is, and show what is written."""

import re
from pathlib import Path

import pytest

from cuflash.expressions.functions import BY_UFUNC, FUNCTIONS, LOGICAL

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/expressions.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/internals/expressions.md").read_text(encoding="utf-8")
KERNELS_FILE = "cuflash/kernels/score/expression_functions.cuh"
KERNELS = (ROOT / KERNELS_FILE).read_text(encoding="utf-8")

# What users write as operators, and what only graphs have.
OPERATORS = {
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder"),
    *("power", "negative", "absolute", "less", "less_equal", "greater"),
    *("greater_equal", "equal", "not_equal", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "invert", "left_shift", "right_shift"),
}
INNER = {"to_int", "to_real", "product_if"}


def test_the_guide_names_each_function():
    listed = GUIDE.partition("**Functions**")[2].partition("PyTorch")[0]
    names = {x for x in re.findall(r"`(\w+)`", listed) if x[-1] != "_"}
    assert names >= FUNCTIONS.keys() - OPERATORS - INNER
    composed = {"abs", "clip", "square", "fmod", "logaddexp"}
    assert names <= BY_UFUNC.keys() | LOGICAL.keys() | composed


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"to_real"}))
def test_each_function_has_one_of_the_kernels(name):
    assert re.search(rf"inline \w+ {name}\(", KERNELS)


def test_the_text_is_that_of_the_page():
    """If it fails: paste what text.py writes now into the page."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)
    shown = re.findall(r"```cuda\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) == 2
    assert all(x in names["source"] for x in shown)


def test_ten_variants():
    variants = GUIDE.partition("## Ten variants")[2].partition("\n## ")[0]
    assert variants.count("\n### ") == 10
