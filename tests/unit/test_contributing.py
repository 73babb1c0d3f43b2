"""CONTRIBUTING.md: its tables and guides, held to the files and the code."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

import slow
from helpers import copies, guide, trivial_option
from helpers.host_compiler import WHY_NONE
from helpers.row_faults import FAULTS

ROWS = {row.change: row for row in guide.rows()}

# Which tests run after a change ---------------------------------------------


def test_each_file_of_tests_has_a_row():
    named = set()
    for row in ROWS.values():
        for _, words in row.commands:
            for path in guide.files(words):
                inside = path.rglob("test_*.py") if path.is_dir() else [path]
                named.update(inside)
    assert set(guide.ROOT.glob("tests/**/test_*.py")) == named


def test_each_command_runs_tests_of_each_file_that_it_names(request):
    """Of those that this run has collected."""
    names, collected = request.config.stash[slow.COLLECTED], {}
    left = slow.slow_of(names, slow.rules(slow.FILE.read_text()))
    for name in names:
        collected.setdefault(name.partition("::")[0], []).append(name)
    left_out = []
    for row in ROWS.values():
        for suite, words in row.commands:
            for file in {x.partition("::")[0][6:] for x in words} & {
                *collected
            }:
                names = collected[file]
                if suite == "test":
                    names = [x for x in names if x not in left]
                if not any(guide.is_chosen(x, words) for x in names):
                    left_out.append((row.change, file))
    assert left_out == []


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_place_exists(row):
    assert row.places
    for pattern in row.places:
        assert any(guide.ROOT.glob(pattern.rstrip("/"))), pattern


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_row_has_a_fault_in_one_of_its_files(row):
    fault = FAULTS[row.change]
    places = (x for y in row.places for x in guide.ROOT.glob(y.rstrip("/")))
    file = guide.ROOT / fault.file
    assert any(file == x or x in file.parents for x in places)
    assert file.read_text(encoding="utf-8").count(fault.text) == 1


# Guides ---------------------------------------------------------------------

GUIDES = [
    "Add an option",
    "Add a function to expressions",
    "Add a kernel",
    "Add a direction",
]


@pytest.mark.parametrize("title", GUIDES)
def test_the_places_of_a_guide_exist(title):
    places = guide.places_of(title)
    assert len(places) > 5
    for pattern, names in places:
        paths = [*guide.ROOT.glob(pattern.rstrip("/"))]
        assert paths, pattern
        text = "".join(x.read_text() for x in paths if x.is_file())
        assert [x for x in names if not re.search(rf"\b{x}\b", text)] == []


def test_an_option_without_an_effect(tmp_path):
    """What the table and a field make of it, and who has to be told."""
    tree = copies.copied(tmp_path / "copy")
    trivial_option.add(tree)
    done = subprocess.run(
        [sys.executable, "-m", "helpers.trivial_option"],
        cwd=tree,
        env=copies.environment(tree),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = dict(map(json.loads, done.stdout.splitlines()))
    places = {path for path, _ in guide.places_of("Add an option")}
    assert {*trivial_option.EDITS} <= places
    assert {x for x, wrong in said.items() if wrong == "no keyword"} <= {
        name for name, file in BY_HAND.items() if file in places
    }
    assert not {*said.values()} - {"", "no keyword"}, said


# Entry points that do not get their options from the table, and which file
# spells them out.
BY_HAND = {
    "distributed.forward": "cuflash/distributed/attention.py",
    "distributed.backward": "cuflash/distributed/attention.py",
    "torch.distributed_attention": "cuflash/distributed/attention.py",
    "flash_attn.flash_attn_func": "cuflash/flash_attn/",
}


# Which tests run after a change: planted faults ------------------------------


@pytest.fixture(scope="module")
def found():
    """The tests that found a fault: they pass without it."""
    failed = []
    yield failed
    if failed:
        status, _, said = copies.run_tests(guide.ROOT, failed)
        assert status == 0, said


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_finds_a_fault_in_its_file(row, tmp_path, found):
    fault, (suite, words) = FAULTS[row.change], row.commands[0]
    for package in fault.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"this row needs {package}")
    if WHY_NONE and "emulat" in " ".join(words):
        pytest.skip(WHY_NONE)
    tree = copies.copied(tmp_path / "copy")
    copies.replace_in(tree / fault.file, fault.text, fault.instead)
    profile, marks = guide.SUITES[suite]
    status, failed, said = copies.run_tests(tree, [*marks, *words], profile)
    assert status == 1 and failed, said
    found += failed
