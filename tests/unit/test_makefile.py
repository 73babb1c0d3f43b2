"""The Makefile: what it installs, `make lint`, the targets of CI."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAMP = ".venv/installed-test"
WORKFLOWS = ("tests", "nightly", "gpu")

# Stands for .venv's Python: notes what it was asked for, and is pip, too.
PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
*--no-index*) exit $LACKING ;;
*pip*) exit $NO_NETWORK ;;
esac
"""

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None, reason="there is no make"
)


@pytest.fixture
def tree(tmp_path):
    """A folder with a .venv in which nothing is installed yet."""
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("cuflash/_version.py", "scripts/cuda_extra.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(tree, *arguments, lacking=0, no_network=0):
    """Run make; pip fails with these exit statuses."""
    own = {"LACKING": str(lacking), "NO_NETWORK": str(no_network)}
    kept = {x: os.environ[x] for x in os.environ if not x.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=tree,
        env={**kept, **own},
        capture_output=True,
        text=True,
    )


def installs(tree):
    calls = (tree / "calls").read_text().splitlines()
    return [call for call in calls if "pip install" in call]


def test_no_network_is_needed_if_all_is_installed(tree):
    done = make(tree, STAMP, no_network=1)
    assert done.returncode == 0, done.stderr
    (install,) = installs(tree)
    assert "--no-index" in install and ".[test,scripts]" in install
    assert (tree / STAMP).exists()


def test_missing_packages_are_installed(tree):
    done = make(tree, STAMP, lacking=1)
    assert done.returncode == 0, done.stderr
    assert "Installing cuflash[test,scripts] into .venv" in done.stdout
    assert "--no-index" not in installs(tree)[-1]
    assert (tree / STAMP).exists()


def test_without_a_network_make_names_missing_packages(tree):
    done = make(tree, STAMP, lacking=1, no_network=1)
    assert done.returncode != 0
    assert ".venv lacks packages of cuflash[test,scripts]" in done.stderr
    assert not (tree / STAMP).exists()


def test_a_python_that_is_not_there_is_named(tree):
    shutil.rmtree(tree / ".venv")
    done = make(tree, STAMP, "PYTHON=no_such_python")
    assert done.returncode != 0
    assert "no_such_python is not there, or too old" in done.stderr


def test_no_half_of_an_environment_is_left(tree):
    """If pip fails, the next make starts over."""
    python = shutil.move(tree / ".venv/bin/python", tree / "python")
    done = make(tree, STAMP, f"PYTHON={python}", no_network=1)
    assert done.returncode != 0
    assert "pip needs a network" in done.stderr
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("changed", ["setup.cfg", "cuflash/_version.py"])
def test_a_changed_dependency_installs_again(tree, changed):
    assert make(tree, STAMP).returncode == 0
    assert make(tree, STAMP).returncode == 0
    assert len(installs(tree)) == 1
    now = os.stat(tree / STAMP).st_mtime
    os.utime(tree / changed, (now + 1, now + 1))
    assert make(tree, STAMP).returncode == 0
    assert len(installs(tree)) == 2


def test_lint_is_the_plain_commands(tree):
    """pyproject.toml configures what they check."""
    assert make(tree, ".venv/installed-lint").returncode == 0
    lines = make(tree, "-n", "lint", "ARGS=").stdout.splitlines()
    commands = [line.strip().removeprefix(".venv/bin/") for line in lines]
    assert commands == ["ruff check", "ruff format --check", "mypy"]


@pytest.mark.parametrize(
    "name",
    [".ci/run", *(f".github/workflows/{x}.yml" for x in WORKFLOWS)],
)
def test_targets_of_ci_exist(name):
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)", (ROOT / name).read_text())
    assert targets
    known = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    assert set(targets) <= set(known)
