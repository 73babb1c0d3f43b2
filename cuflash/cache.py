"""Files that are built once and kept: kernels compiled for a GPU or a CPU.

Beside each file stands the SHA-256 of its content. A file is compared with it
once a process: one that was cut short, emptied or changed is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from cuflash.folders import cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

# Files that were compared with their digest. A file that changes has another
# size or time; a hard link to a file of the same name has not.
_checked: set[tuple[object, ...]] = set()


def kept(name: str, build: Callable[[Path], None]) -> Path:
    """The file of that name in the cache folder, built if it is not there.

    Parameters
    ----------
    name : str
        Says all that the content depends on, as a hash does.
    build : callable
        Writes the file to the path that it is given, beside the one
        returned. Among all threads and processes one builds at a time.

    Returns
    -------
    Path
        Its content is what `build` wrote, all of it.
    """
    path = cache_folder() / name
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with only_one(path.with_suffix(".lock")):
            if not _is_whole(path):  # still: it may have been waited for
                _build(path, build)
    return path


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Put a file and its digest in place: others see all of both or none."""
    made, digest = path.with_suffix(".new"), path.with_suffix(".new_sha256")
    try:
        build(made)
        digest.write_text(_digest(made))
        # Until both are there they do not match.
        os.replace(digest, _digest_file(path))
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether a file is there, with the content that it was built with."""
    try:
        found = path.stat()
        key = (
            path.name, found.st_dev, found.st_ino, found.st_size,
            found.st_mtime_ns,
        )  # fmt: skip
        if key not in _checked:
            if _digest_file(path).read_text() != _digest(path):
                return False
            _checked.add(key)
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a file's lock, among the threads of all processes.

    The system takes the lock back when its holder ends, however it ends.
    """
    with open(path, "ab") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            _lock_on_windows(file)
        try:
            yield
        finally:
            if fcntl:  # closing is not enough where a fork holds it too
                fcntl.flock(file, fcntl.LOCK_UN)


def _lock_on_windows(file: IO[bytes]) -> None:
    file.seek(0)
    while True:
        try:
            return msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        except OSError:  # not free after ten seconds: once more
            pass
