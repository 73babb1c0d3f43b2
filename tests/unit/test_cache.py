"""Files in the cache folder: built once, checked by content, locked."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import platformdirs
import pytest

from cuflash import folders
from cuflash.build import cache
from cuflash.errors import CompileError

tile_tables = folders.tile_tables  # which conftest.py takes away from tests
WHOLE = b"all of the file"


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Keep a file of the name ``a.bin``, and count how often it is built."""

    def build(path):
        keep.times += 1
        path.write_bytes(WHOLE)

    def keep():
        return cache.kept("a.bin", build)

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_checked", set())
    keep.times = 0
    return keep


def test_a_file_is_built_once(keep):
    assert keep() == keep()
    assert keep().read_bytes() == WHOLE
    assert keep.times == 1


@pytest.mark.parametrize("content", [b"", WHOLE[:-1], WHOLE[:-1] + b"?"])
@pytest.mark.parametrize("same_process", [True, False])
def test_a_damaged_file_is_built_again(keep, content, same_process):
    keep()
    keep().write_bytes(content)  # after it was compared with its digest
    if not same_process:
        cache._checked.clear()
    assert keep().read_bytes() == WHOLE
    assert keep.times == 2


@pytest.mark.parametrize("digest", [None, b"", b"\xff", b"0" * 64])
def test_a_file_without_its_digest_is_built_again(keep, digest):
    beside = keep().with_suffix(".sha256")
    beside.unlink() if digest is None else beside.write_bytes(digest)
    cache._checked.clear()
    assert keep().read_bytes() == WHOLE
    assert keep.times == 2


def test_a_file_is_read_once_a_process(keep, monkeypatch):
    keep()
    keep()
    monkeypatch.setattr(cache, "_digest", None)
    assert keep().read_bytes() == WHOLE


def test_a_build_that_fails_leaves_nothing(tmp_path, keep):
    def fail(path):
        path.write_bytes(WHOLE[:3])
        raise KeyError

    with pytest.raises(KeyError):
        cache.kept("a.bin", fail)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {"a.lock"}


def test_threads_build_a_file_once(keep):
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: keep(), range(8)))
    assert len(files) == 1 and keep.times == 1


def test_another_process_waits_and_then_reads(keep, tmp_path):
    text = f"""
import sys
from cuflash.build import cache
def build(path):
    print("building", flush=True)
    sys.stdin.read()
    path.write_bytes({WHOLE!r})
cache.kept("a.bin", build)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other, ThreadPoolExecutor(1) as pool:
        assert other.stdout.readline().strip() == b"building"
        waiting = pool.submit(keep)
        assert not wait([waiting], timeout=0.3).done
        other.stdin.close()
        assert waiting.result(timeout=60).read_bytes() == WHOLE
    assert keep.times == 0


# A folder that cannot be written to ------------------------------------------


@pytest.fixture
def read_only(keep, tmp_path, monkeypatch):
    """The cache folder's path is a file."""
    monkeypatch.setattr(cache, "_temporary", {})
    (tmp_path / "cache").write_text("no folder")


def test_without_a_folder_there_is_a_temporary_one(keep, read_only, tmp_path):
    with pytest.warns(RuntimeWarning) as warned:
        first = keep()
    assert first.read_bytes() == WHOLE and keep() == first
    assert keep.times == 1
    (said,) = [str(x.message) for x in warned]
    assert said.startswith(f"compiled kernels cannot be kept in {tmp_path}")
    assert "set the environment variable CUPY_CACHE_DIR to a writable" in said


def test_a_temporary_folder_ends_with_its_process(tmp_path):
    text = f"""
from cuflash.build import cache
print(cache.kept("a/b.bin", lambda path: path.write_bytes({WHOLE!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "CUPY_CACHE_DIR": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("RuntimeWarning") == 1
    assert not Path(done.stdout.strip()).parent.parent.exists()


def test_a_read_only_cache_is_read(keep, monkeypatch):
    def cannot(folder):
        raise OSError("read-only")

    path = keep()
    cache._checked.clear()
    monkeypatch.setattr(folders, "make", cannot)
    assert keep() == path and keep.times == 1


def test_no_folder_at_all_names_the_variable(keep, read_only, monkeypatch):
    monkeypatch.setattr(cache, "_PARENTS", ("/dev/null/nowhere",))
    with pytest.raises(CompileError, match="nor in a temporary.*CUPY_CACHE_"):
        keep()


# A disk that is full ---------------------------------------------------------


def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disks_that_are_all_full(keep, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_temporary", {})
    with pytest.warns(RuntimeWarning), pytest.raises(CompileError) as caught:
        cache.kept("a.bin", full)
    assert f"written to {tmp_path / 'cache'} ([Errno 28]" in str(caught.value)
    assert "CUPY_CACHE_DIR" in str(caught.value)


@pytest.mark.parametrize("num_full", [1, 2])
def test_a_full_disk_costs_a_warning(keep, monkeypatch, tmp_path, num_full):
    """The system's temporary folder may be on it too, memory is not."""

    def build(path):
        places.append(path.parent)
        if len(places) <= num_full:
            full(path)
        path.write_bytes(WHOLE)

    places = []
    monkeypatch.setattr(cache, "_temporary", {})
    monkeypatch.setattr(cache, "_PARENTS", (None, str(tmp_path)))
    with pytest.warns(RuntimeWarning, match="No space left.*CUPY_CACHE") as x:
        path = cache.kept("a.bin", build)
    assert path.read_bytes() == WHOLE and len(x) == 1
    assert len({*places}) == num_full + 1


@pytest.mark.skipif(os.name == "nt", reason="a limit of POSIX")
def test_a_file_that_the_system_cuts(tmp_path):
    """RLIMIT_FSIZE, as a quota, lets a file be made but not written."""
    text = """
import resource
from cuflash.build import cache
from cuflash.errors import CompileError
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    cache.kept("a.bin", lambda path: path.write_bytes(bytes(1000)))
except CompileError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in done.stdout and "nor in a" in done.stdout


# Which folder ----------------------------------------------------------------


def test_the_folders_of_cupy(monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("HOME", "/home/me")
    assert folders.cache_folder() == Path("/home/me/kernels")
    assert tile_tables() == Path("/home/me/kernels/cuflash_tiles")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="XDG")
def test_the_folders_of_the_system(monkeypatch):
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert folders.cache_folder() == Path("/c/cuflash")
    assert tile_tables() == Path("/d/cuflash/tiles")


def test_a_user_without_a_home(monkeypatch):
    def none(*args, **kwargs):
        raise RuntimeError

    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", none)
    folder = folders.cache_folder()
    with pytest.raises(OSError, match="this user has no home folder"):
        folders.make(folder)
    assert folders.files(folder, "*") == []
