"""The project's address stands in setup.cfg; other files repeat it."""

import re
from configparser import ConfigParser
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[2]
NAMED = ("docs", "recipe", "scripts", "cuflash", ".github", "*.md")
ENDS = {".md", ".ipynb", ".yaml", ".yml", ".py"}


def address():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config["tool:cuflash"]["address"]


def test_the_address_is_that_of_a_repository():
    assert re.fullmatch(r"https://github\.com/[\w-]+/cuflash", address())


def test_every_file_names_the_same_address():
    owner = address().split("/")[-2]
    paths = [path for name in NAMED for path in ROOT.glob(name)]
    paths += [x for path in paths if path.is_dir() for x in path.rglob("*")]
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in ENDS and path.is_file()
    }
    assert len(texts) > 100
    for path, text in texts.items():
        found = re.findall(r"github(?:\.com)?/([\w-]+)/cuflash\b", text)
        assert set(found) <= {owner}, path


def test_no_wheel_names_the_placeholder():
    place = run_path(str(ROOT / "setup.py"))["address"]()
    assert place == (None if "/OWNER/" in address() else address())
