"""The package: its version, the contents of wheel and sdist, the extras."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import cuda_extra
import cuflash

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "cuflash",
    "reference",
    "docs",
    "recipe",
    "scripts",
    "tests",
    ".ci",
    ".github",
)
BUILD = """
import sys
from setuptools import build_meta
sys.argv[1:] = ["-q"]
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


def setup_cfg():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def copy_of_tree(target, folders=FOLDERS):
    """Copy a checkout or sdist without build outputs."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in folders:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in (".git", ".coverage"):
            shutil.copy(path, target)
    return target


def python(text, folder, *options):
    """Return what Python prints when started in a folder."""
    done = subprocess.run(
        [sys.executable, *options, "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with sdist and wheel, built where there was a build before.

    As pip builds them, but with the setuptools that is here.
    """
    tree = copy_of_tree(tmp_path_factory.mktemp("tree"))
    before = tree / "build" / "lib" / "cuflash" / "of_an_earlier_build.py"
    before.parent.mkdir(parents=True)
    before.touch()
    python(BUILD, tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def built(wheel):
    return set(wheel.namelist())


@pytest.fixture(scope="module")
def in_sdist(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [x.name for x in archive.getmembers() if x.isfile()]
    return {name.partition("/")[2] for name in files}


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (x for x in wheel.namelist() if x.endswith("/METADATA"))
    return wheel.read(name).decode()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A second checkout, with another version than the installed one."""
    tree = copy_of_tree(
        tmp_path_factory.mktemp("checkout"), ("cuflash", "reference")
    )
    (tree / "cuflash" / "_version.py").write_text('__version__ = "9.8.7"')
    return tree


def test_the_version_is_the_installed_one(metadata):
    assert importlib.metadata.version("cuflash") == cuflash.__version__
    assert f"\nVersion: {cuflash.__version__}\n" in metadata


def test_the_version_of_a_checkout_is_its_own(checkout):
    """Not the version of the installed package."""
    main = "from cuflash.__main__ import main; main(['--version'])"
    with_exit = f"try:\n    {main}\nexcept SystemExit:\n    pass"
    assert python(with_exit, checkout) == "cuflash 9.8.7\n"
    info = python("from cuflash.__main__ import info; info()", checkout)
    assert info.splitlines()[0].split() == ["cuflash", "9.8.7"]


def test_python_in_a_checkout_finds_the_reference_there(checkout):
    """Not the installed checkout's, and each module once."""
    text = """
import pickle
import cuflash.backends.numpy.attention
from cuflash.reference.tile_state import TileState
assert cuflash.backends.numpy.attention.TileState is TileState
assert pickle.loads(pickle.dumps(TileState)) is TileState
print(cuflash.reference.__file__)
"""
    found = Path(python(text, checkout).strip())
    assert found == checkout / "reference" / "__init__.py"


EDITABLE = """
import sys, zipfile
from setuptools import build_meta
sys.argv[1:] = ["-q"]
name = build_meta.build_editable("dist")
zipfile.ZipFile(f"dist/{name}").extractall("../site")
"""
# Without site-packages, where another cuflash may be.
FOUND = """
import site, sys
from importlib.util import find_spec
site.addsitedir("site")
print(find_spec("cuflash").origin)
"""


def test_python_beside_a_clone_finds_the_editable_install(tmp_path):
    """Not the clone's folder, which has the package's name."""
    clone = copy_of_tree(tmp_path / "cuflash", ("cuflash", "reference"))
    python(EDITABLE, clone)
    found = Path(python(FOUND, tmp_path, "-S").strip())
    assert found == clone / "cuflash" / "__init__.py"


def test_nothing_else_of_a_checkout_is_a_package_of_cuflash(checkout):
    (checkout / "scripts").mkdir(exist_ok=True)
    text = """
import pkgutil, cuflash
from importlib.util import find_spec
print(find_spec("cuflash.scripts"), find_spec("cuflash.cuflash"))
"""
    assert python(text, checkout) == "None None\n"


@pytest.mark.parametrize(
    "name", ["reference.softmax.safe_softmax", "emulator.active"]
)
def test_submodules_are_there_without_an_import_of_their_own(name):
    printed = python(f"import cuflash; print(cuflash.{name})", ROOT)
    assert name.rpartition(".")[2] in printed


def test_dir_lists_the_reference():
    assert "reference" in python("import cuflash; print(dir(cuflash))", ROOT)


def test_changelog_names_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {cuflash.__version__}" in text


def named(folder, pattern, prefix):
    """Return paths under `folder` as installed under `prefix`."""
    folder = ROOT / folder
    found = {path.relative_to(folder) for path in folder.glob(pattern)}
    assert found
    return {f"{prefix}/{path.as_posix()}" for path in found}


@pytest.mark.parametrize(
    ("folder", "pattern", "prefix"),
    [
        ("cuflash", "*.py", "cuflash"),
        ("cuflash", "py.typed", "cuflash"),
        ("cuflash", "plans/*.py", "cuflash"),
        ("cuflash", "kernels/**/*.cu*", "cuflash"),
        ("cuflash", "plans/tile_tables/*.json", "cuflash"),
        ("cuflash", "backends/*.py", "cuflash"),
        ("cuflash", "backends/emulator/*.*", "cuflash"),
        ("cuflash", "build/*.py", "cuflash"),
        ("reference", "*.py", "cuflash/reference"),
        ("reference", "py.typed", "cuflash/reference"),
    ],
)
def test_every_file_is_installed(built, folder, pattern, prefix):
    assert named(folder, pattern, prefix) <= built


def test_nothing_else_is_installed(built):
    tops = {name.partition("/")[0] for name in built}
    assert tops == {"cuflash", f"cuflash-{cuflash.__version__}.dist-info"}


def test_nothing_of_an_earlier_build_is_installed(built):
    modules = {x for x in built if re.fullmatch(r"cuflash/\w+\.py", x)}
    assert modules == named("cuflash", "*.py", "cuflash")


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_sdist_holds_all_that_a_checkout_does(in_sdist, folder):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files and files <= in_sdist


def test_an_sdist_has_the_top_level_files(in_sdist):
    names = "README CHANGELOG CONTRIBUTING".split()
    assert {f"{name}.md" for name in names} <= in_sdist
    assert {
        "LICENSE",
        "Makefile",
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
    } <= in_sdist
    assert not [name for name in in_sdist if name.endswith(".pyc")]


def test_the_description_is_the_readme(metadata):
    _, _, description = metadata.partition("\n\n")
    title, install = "# cuflash\n", "\n## Install\n"
    assert description.startswith(title) and install in description
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata


def test_pythons_that_are_named_are_those_that_are_tested():
    classifiers = setup_cfg()["metadata"]["classifiers"]
    named = re.findall(r"Python :: (3\.\d+)", classifiers)
    workflow = ROOT / ".github" / "workflows" / "tests.yml"
    (tested,) = re.findall(r"python: \[(.*)\]", workflow.read_text())
    assert tested == ", ".join(f'"{version}"' for version in named)
    assert f">={named[0]}" == setup_cfg()["options"]["python_requires"]


@pytest.mark.parametrize(
    ("driver", "extra"),
    [(None, ""), (11, ""), (12, "cuda12"), (13, "cuda13"), (14, "cuda13")],
)
def test_extra_by_the_version_of_the_driver(driver, extra):
    assert cuda_extra.extra_for(driver) == extra
    assert not extra or extra in setup_cfg()["options.extras_require"]
