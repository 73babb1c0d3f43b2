"""The default kernels at import: when a child starts, how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuflash.build import warmup


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The children started from now on, on a machine said to have a GPU."""
    children = []

    def start_and_note():
        children.append(original())
        return children[-1]

    original = warmup._start_child
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUFLASH_COMPILE", raising=False)
    monkeypatch.setattr(warmup, "_may_have_gpu", lambda: True)
    monkeypatch.setattr(warmup, "_cupy", lambda: tmp_path / "site" / "cupy")
    monkeypatch.setattr(warmup, "_start_child", start_and_note)
    monkeypatch.setattr(warmup, "_CHILD", "pass")
    yield children
    for child in children:
        child.wait()


def test_a_child_is_started_and_not_waited_for(started, monkeypatch):
    monkeypatch.setattr(warmup, "_CHILD", "import time; time.sleep(60)")
    warmup.start_default_compiles()
    (child,) = started
    assert child.poll() is None
    child.kill()


def test_the_child_is_lazy_itself(started, monkeypatch):
    # Else it would start a child, which would start a child.
    text = "import os; os.environ['CUFLASH_COMPILE'] == 'lazy' or 1 / 0"
    monkeypatch.setattr(warmup, "_CHILD", text)
    warmup.start_default_compiles()
    assert started[0].wait() == 0


def test_lazy_starts_nothing(started, monkeypatch):
    monkeypatch.setenv("CUFLASH_COMPILE", "lazy")
    warmup.start_default_compiles()
    assert not started


def test_without_a_gpu_nothing_is_started(started, monkeypatch):
    monkeypatch.setattr(warmup, "_may_have_gpu", lambda: False)
    warmup.start_default_compiles()
    assert not started


def test_eager_waits(started, monkeypatch):
    monkeypatch.setenv("CUFLASH_COMPILE", "eager")
    warmup.start_default_compiles()
    assert started[0].poll() == 0


def test_eager_warns_if_a_kernel_did_not_compile(started, monkeypatch):
    monkeypatch.setenv("CUFLASH_COMPILE", "eager")
    monkeypatch.setattr(warmup, "_CHILD", "1 / 0")
    with pytest.warns(RuntimeWarning, match="python -m cuflash warmup"):
        warmup.start_default_compiles()


def test_another_setting_stops_no_import(started, monkeypatch):
    """The first call raises: see unit/test_settings.py."""
    monkeypatch.setenv("CUFLASH_COMPILE", "never")
    warmup.start_default_compiles()
    assert not started


def test_without_a_cache_nothing_is_started(started, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    warmup.start_default_compiles()
    assert not started


def test_nothing_is_started_if_all_is_compiled(started):
    warmup.remember_default_compiles()
    warmup.start_default_compiles()
    assert not started


def test_kernels_of_other_devices_do_not_count(started, monkeypatch):
    warmup.remember_default_compiles()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    warmup.start_default_compiles()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("visible", "expected"), [("0", True), ("", False), ("-1", False)]
)
def test_invisible_devices_do_not_count(monkeypatch, visible, expected):
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    monkeypatch.setattr(warmup, "_cupy", lambda: Path("site/cupy"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert warmup._may_have_gpu() == expected


@pytest.mark.parametrize(
    ("driver", "cupy"), [(True, None), (False, Path("site/cupy"))]
)
def test_a_gpu_takes_both_driver_and_cupy(monkeypatch, driver, cupy):
    monkeypatch.setattr(os.path, "exists", lambda path: driver)
    monkeypatch.setattr(warmup, "_cupy", lambda: cupy)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not warmup._may_have_gpu()


SHORT_LIFE = """
import os
os.environ["CUFLASH_COMPILE"] = "lazy"
from cuflash.build import warmup
warmup._CHILD = "import time; time.sleep(600)"
print(warmup._start_child().pid)
"""


@pytest.mark.skipif(os.name == "nt", reason="looks for a POSIX process")
def test_a_process_that_ends_early_is_not_held_up():
    ended = subprocess.run(
        [sys.executable, "-c", SHORT_LIFE],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,  # the child would take 600 s
    )
    assert ended.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.stdout), 0)
