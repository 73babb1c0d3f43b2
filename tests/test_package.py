"""What is installed: the version, the files of a wheel, the CUDA extras."""

import importlib.metadata
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import cuda_extra
import cuflash

ROOT = Path(__file__).parents[1]


def setup_cfg():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Files as setuptools installs them, from a copy: no build/ is left."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("cuflash", "reference"):
        shutil.copytree(ROOT / name, copy / name)
    setup = "import setuptools; setuptools.setup()"
    done = subprocess.run(
        [sys.executable, "-c", setup, "-q", "build", "--build-lib", "built"],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = [path for path in (copy / "built").rglob("*") if path.is_file()]
    return {path.relative_to(copy / "built").as_posix() for path in files}


def test_version_is_that_of_setup_cfg():
    version = setup_cfg()["metadata"]["version"]
    assert cuflash.__version__ == version
    assert importlib.metadata.version("cuflash") == version


def test_changelog_names_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {cuflash.__version__}" in text


def named(folder, pattern, prefix):
    """Paths under `folder` as they are to be installed under `prefix`."""
    folder = ROOT / folder
    found = {path.relative_to(folder) for path in folder.glob(pattern)}
    assert found
    return {f"{prefix}/{path.as_posix()}" for path in found}


@pytest.mark.parametrize(
    ("folder", "pattern", "prefix"),
    [
        ("cuflash", "*.py", "cuflash"),
        ("cuflash", "kernels/*.cu*", "cuflash"),
        ("cuflash", "tile_tables/*.json", "cuflash"),
        ("cuflash", "emulator/*.*", "cuflash"),
        ("reference", "*.py", "cuflash/reference"),
    ],
)
def test_every_file_is_installed(built, folder, pattern, prefix):
    assert named(folder, pattern, prefix) <= built


def test_nothing_else_is_installed(built):
    assert {name.partition("/")[0] for name in built} == {"cuflash"}


@pytest.mark.parametrize(
    ("driver", "extra"),
    [(None, ""), (11, ""), (12, "cuda12"), (13, "cuda13"), (14, "cuda13")],
)
def test_extra_by_the_version_of_the_driver(driver, extra):
    assert cuda_extra.extra_for(driver) == extra
    assert not extra or extra in setup_cfg()["options.extras_require"]
