"""The README's examples run, and what it names exists."""

import re
from pathlib import Path

import pytest

import cuflash

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["dq"].shape == names["q"].shape


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [t for t in targets if not (ROOT / t).exists()] == []


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.M))
def test_make_targets_exist(target):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_public_calls_are_named():
    calls = [n for n in cuflash.__all__ if n.islower() and n[0] != "_"]
    assert calls
    assert [n for n in calls if f"cuflash.{n}(" not in README] == []
