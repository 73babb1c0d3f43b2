"""Copies of the checkout, in which tests plant faults and run tests."""

import os
import re
import shutil
import subprocess
import sys

from .guide import ROOT

MADE = {"build", "dist", "demo_output", "sweep_output"}
HIDDEN_AND_KEPT = {".ci", ".github"}


def copied(target):
    """Copy the checkout by hard links; return the copy's folder."""

    def others(folder, names):
        if folder != str(ROOT):
            return []
        hidden = {x for x in names if x.startswith(".")}
        return MADE | hidden - HIDDEN_AND_KEPT

    return shutil.copytree(
        ROOT, target, symlinks=True, ignore=others, copy_function=_link
    )


def _link(source, target):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def replace_in(path, text, instead):
    """Replace what stands once in a copy's file, not in what it links to."""
    content = path.read_text(encoding="utf-8")
    assert content.count(text) == 1, (path, text)
    path.unlink()
    path.write_text(content.replace(text, instead), encoding="utf-8")


def environment(tree):
    """Return the environment of a process that imports from a copy."""
    env = {x: y for x, y in os.environ.items() if not x.startswith("PYTEST_")}
    paths = tree, tree / "tests", tree / "scripts"
    return env | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OPENBLAS_NUM_THREADS": "1",
        "COLUMNS": "400",  # pytest cuts no names
    }


def run_tests(tree, words, profile="quick"):
    """Run tests until one fails; return pytest's status, which, and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *words],
        cwd=tree,
        env=environment(tree) | {"HYPOTHESIS_PROFILE": profile},
        capture_output=True,
        text=True,
    )
    failed = re.findall(r"^FAILED (.*?)(?: - |$)", done.stdout, re.M)
    return done.returncode, failed, done.stdout[-2000:]
