"""The notebooks of the documentation run, and store no results."""

import json
from pathlib import Path

import pytest

plt = pytest.importorskip(
    "matplotlib.pyplot", reason="notebooks need the extra `scripts`"
)

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    """But for the cell of `python -m cuflash check`: that has own tests."""
    plt.switch_backend("agg")
    names = {}
    for cell in code_cells(path):
        if "check" not in cell["metadata"].get("tags", []):
            code = compile("".join(cell["source"]), path.name, "exec")
            exec(code, names)
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_no_results(path):
    for cell in code_cells(path):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
