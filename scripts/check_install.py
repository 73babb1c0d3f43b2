"""Build an sdist and a wheel, install the wheel elsewhere and use it.

Works in a temporary folder, with pip, and writes nothing to the checkout. The
wheel is built from the sdist, which tests both.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fresh_environment import Failed, make_venv, run, step
from use_wheel import use_wheel

ROOT = Path(__file__).resolve().parents[1]

# A user's first steps. The checkout's modules must not be importable.
USE = """
import numpy as np
import cuflash

q = np.ones((1, 5, 2, 8), np.float32)
out, lse = cuflash.forward(q, q, q, causal=True, return_lse=True)
gradients = cuflash.backward(out, q, q, q, out, lse, causal=True)
assert np.allclose(out, 1) and len(gradients) == 3
whole = cuflash.reference.attention.attention(np.eye(3), np.eye(3), np.eye(3))
try:
    with cuflash.emulator.active():
        emulated = cuflash.forward(q, q, q, causal=True)
    assert np.allclose(emulated, 1)
except cuflash.CompileError as error:
    print(f"kernels are not emulated: {error}")
print(f"cuflash {cuflash.__version__} in {cuflash.__path__[0]}")
"""

INDEX_CHECKS = ("twine", "readme_renderer[md]", "trove-classifiers")

# An index refuses what it does not know.
CLASSIFIERS = """
import email, sys, trove_classifiers, zipfile
archive = zipfile.ZipFile(sys.argv[1])
(name,) = (x for x in archive.namelist() if x.endswith("/METADATA"))
metadata = email.message_from_bytes(archive.read(name))
unknown = set(metadata.get_all("Classifier")) - trove_classifiers.classifiers
sys.exit(f"unknown classifiers: {unknown}" if unknown else 0)
"""

# The types that a user's mypy sees.
TYPED = """
import numpy as np

import cuflash
import cuflash.reference.softmax

reveal_type(cuflash.__version__)
q = np.zeros((4, 8))
cuflash.forward(q, q, q, no_such_option=4)
cuflash.jvp(q, q, q, q, q, q, no_such_option=4)
cuflash.forward([[1.0]], q, q)
cuflash.forward(q, q, q).no_such_part
cuflash.forward(q, q, q, return_lse=True).shape
cuflash.vjp(q, q, q)[1](q).no_such_gradient
cuflash.reference.softmax.no_such_function()
"""
SAID_OF_TYPED = (
    'Revealed type is "str"',
    'Unexpected keyword argument "no_such_option"',
    'Unexpected keyword argument "no_such_option" for "jvp"',
    'No overload variant of "forward" matches argument types "list[',
    'has no attribute "no_such_part"',
    'has no attribute "shape"',
    'has no attribute "no_such_gradient"',
    'Module has no attribute "no_such_function"',
)

# The tests of the sdist that take a few seconds.
SDIST_TESTS = (
    "tests/unit/test_api.py",
    "tests/unit/test_package.py",
    "tests/unit/test_readme.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dist", type=Path, help="keep sdist and wheel in this folder"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cuflash_install_") as folder:
        try:
            check(Path(folder), given.dist)
        except Failed as error:
            print(f"check_install: {error}", file=sys.stderr)
            return 1
    return 0


def check(folder: Path, dist: Path | None) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    step("build")
    # twine renders README.md as an index does only where [md] is there.
    python = make_venv(folder / "builds", "build", *INDEX_CHECKS)
    build = ("-m", "build", "-o", folder / "dist", copy_of_tree(folder))
    run(python, *build, quiet=True)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    if dist:
        dist.mkdir(parents=True, exist_ok=True)
        for path in (sdist, wheel):
            shutil.copy(path, dist)
    print(f"{sdist.name} and {wheel.name}")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)
    run(python, "-c", CLASSIFIERS, wheel)

    step("install the wheel and use it")
    use_wheel(wheel, folder / "alone", "--quick")
    python = make_venv(folder / "uses", f"{wheel}[test,scripts]", "mypy")
    run(python, "-c", USE, cwd=elsewhere)
    run(python, "-m", "cuflash", "--version", cwd=elsewhere)
    run(python, "-m", "pip", "check", cwd=elsewhere)

    step("use it in the checkout, which shadows the installed package")
    run(python, "-c", USE, cwd=ROOT)

    step("types, as another project's mypy sees them")
    (elsewhere / "typed.py").write_text(TYPED)
    said = run(python, "-m", "mypy", "typed.py", cwd=elsewhere, fails=True)
    missing = [words for words in SAID_OF_TYPED if words not in said]
    if missing:
        raise Failed(f"mypy did not report {missing[0]!r}")

    step("install a clone to edit it, and use it beside the clone")
    beside = folder / "beside"
    clone = shutil.copytree(folder / "tree", beside / "cuflash")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "-e", clone)
    run(python, "-c", USE, cwd=beside)

    step("tests of the sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist")
    (unpacked,) = (folder / "sdist").iterdir()
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(*pytest, "--collect-only", "-qq", cwd=unpacked, quiet=True)
    run(*pytest, *SDIST_TESTS, cwd=unpacked)


def copy_of_tree(folder: Path) -> Path:
    """Return the files that git tracks or would add, without build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:  # git is missing, or this is an sdist
        raise Failed(f"git cannot list the files: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        # False for uncommitted deletions and for links to folders.
        if (ROOT / name).is_file():
            target = folder / "tree" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    return folder / "tree"


if __name__ == "__main__":
    sys.exit(main())
