"""Files in the cache folder: built once, checked by content, locked."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cuflash import cache

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
    keep().write_bytes(content)
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


def test_a_lock_keeps_others_out(tmp_path):
    def enter():
        with cache.only_one(tmp_path / "lock"):
            entered.set()

    entered = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with cache.only_one(tmp_path / "lock"):
            waiting = pool.submit(enter)
            assert not entered.wait(0.2)
        waiting.result(timeout=60)
