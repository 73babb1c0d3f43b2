"""README.md on a package index, where no file is beside it: setup.py."""

import re
from pathlib import Path
from runpy import run_path

import pytest

import cuflash

ROOT = Path(__file__).parents[2]
SETUP = run_path(str(ROOT / "setup.py"))
PLACE = "https://github.com/somebody/cuflash"
FILES = f"{PLACE}/blob/v{cuflash.__version__}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/x.md#y)", f"[a]({FILES}/docs/x.md#y)"),
        ("[`a`\nb](reference)", f"[`a`\nb]({FILES}/reference)"),
        ("[a](#options)", f"[a]({FILES}/README.md#options)"),
        ("![a](x.png)", f"![a]({FILES.replace('blob', 'raw')}/x.png)"),
        ("[a](https://x.y/z)", "[a](https://x.y/z)"),
        ("<!-- bench: a -->\n\n| a |", "| a |"),
    ],
)
def test_links_lead_to_the_files_of_this_version(text, expected):
    assert SETUP["description"](text, PLACE) == expected


@pytest.mark.parametrize("place", [None, PLACE])
def test_no_link_of_the_readme_needs_a_file(place):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = SETUP["description"](readme, place)
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets and "<img" not in page and "<!--" not in page
    assert [x for x in targets if not x.startswith("https://")] == []
    assert (PLACE in page) == bool(place)


def test_files_that_addresses_name_exist():
    for target in SETUP["project_urls"](PLACE).values():
        rest = target.removeprefix(PLACE)
        path = re.sub(rf"/(tree|blob)/v{cuflash.__version__}/", "", rest)
        assert path in ("", "/issues") or (ROOT / path).exists()
