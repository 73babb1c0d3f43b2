"""What cuflash does where Python has no POSIX modules, as on Windows.

No test here needs Windows: a child process is shown less of this system.
"""

import ast
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuflash import __main__, errors, folders
from cuflash.backends.emulator import runtime
from cuflash.build import cache, warmup
from cuflash.distributed import nccl_library

PACKAGE = Path(cache.__file__).parents[1]

# The libraries are imported before: they ask for the system as they load.
LESS = """
import os, pkgutil, platform, shutil, subprocess, sys, tempfile
import filelock, numpy as np, platformdirs
platform.platform()
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "cupy",
             "torch", "jax"):
    sys.modules[name] = None
for name in ("fork", "getuid", "getppid", "killpg", "setsid", "uname",
             "sched_getaffinity", "register_at_fork"):
    vars(os).pop(name, None)
shutil.which = lambda *_: None  # else it asks Windows
sys.platform = "win32"
"""
# Those of other libraries aside.
IMPORTS = """
import cuflash
others = ("torch", "jax", "flash_attn", "reference", "backends.cupy")
for found in pkgutil.walk_packages(cuflash.__path__, "cuflash."):
    if not found.name.startswith(tuple(f"cuflash.{x}" for x in others)):
        __import__(found.name)
"""
CALLS = """
q = np.eye(4, dtype=np.float32)[:, None]
out, lse = cuflash.forward(q, q, q, scale=50.0, return_lse=True)
assert np.allclose(out, q)
cuflash.backward(out, q, q, q, out, lse)
cuflash.forward(q, q, q, score_mod=lambda s, b, h, i, j: s - abs(i - j))
from cuflash.__main__ import main
assert main(["info"]) == 0
"""


def test_all_modules_and_calls_without_posix():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LESS + IMPORTS + CALLS],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the emulator runs only on Linux, this is win32" in done.stdout


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")


def test_the_emulator_names_what_to_use(windows):
    with pytest.raises(errors.UnsupportedError, match="win32: use WSL 2"):
        runtime.check_system()


def test_there_is_no_nccl(windows, monkeypatch):
    def missing():
        raise ImportError("cupy.cuda.nccl found no NCCL")

    monkeypatch.setattr(nccl_library.api_arrays, "on_cuda", lambda: None)
    monkeypatch.setattr(nccl_library, "OfCupy", missing)
    with pytest.raises(errors.UnsupportedError, match="Windows has none"):
        nccl_library.library("cupy")


@pytest.mark.parametrize("times, is_replaced", [(3, True), (99, False)])
def test_a_file_that_is_open_elsewhere_is_replaced_later(
    times, is_replaced, windows, monkeypatch, tmp_path
):
    made, path = tmp_path / "made", tmp_path / "path"
    made.write_bytes(b"new")
    path.write_bytes(b"old")
    known, refused = os.replace, iter([True] * times)

    def replace(*files):
        if next(refused, False):
            raise PermissionError("used by another process")
        known(*files)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(cache, "_PAUSE", 0)
    with contextlib.nullcontext() if is_replaced else pytest.raises(OSError):
        cache._replace(made, path)
    assert path.read_bytes() == (b"new" if is_replaced else b"old")


def test_any_folder_can_be_printed(monkeypatch):
    """To a pipe, whose encoding is that of a code page."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    folder = Path("C:/Users/Łódź")
    monkeypatch.setattr(folders, "cache_folder", lambda: folder)
    monkeypatch.setattr(cache, "require_folder", lambda: None)
    monkeypatch.setattr(sys, "stdout", written)
    assert __main__.main(["info"]) == 0
    written.flush()
    assert rb"\u0141" in written.buffer.getvalue()


def test_compiling_opens_no_window(monkeypatch):
    asked = {}
    monkeypatch.setattr(subprocess, "CREATE_NO_WINDOW", 7, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: asked | more)
    monkeypatch.setattr(warmup.atexit, "register", lambda *_: None)
    assert warmup._start_child()["creationflags"] == 7


def without_encoding(text):
    """Yield the lines that open text in the system's encoding."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        constants = [x.value for x in node.args if isinstance(x, ast.Constant)]
        binary = any("b" in x for x in constants if isinstance(x, str))
        of_path = name in ("read_text", "write_text")
        if of_path or isinstance(node.func, ast.Name) and name == "open":
            named = {x.arg for x in node.keywords}
            if "encoding" not in named and (of_path or not binary):
                yield node.lineno


def test_text_files_name_their_encoding():
    assert [*without_encoding("open(x)\ny.read_text()")] == [1, 2]
    found = {
        (str(file), line)
        for file in PACKAGE.rglob("*.py")
        for line in without_encoding(file.read_text(encoding="utf-8"))
    }
    assert not found
