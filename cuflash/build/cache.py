"""Files that are built once and kept: kernels compiled for a GPU or a CPU.

Beside each file stands the SHA-256 of its content. A file is compared with it
once a process: one that was cut short, emptied or changed is built again.

Where the cache folder cannot be written to, a file that is not in it is built
into a temporary folder, for this process alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cuflash import folders
from cuflash.errors import CompileError

if TYPE_CHECKING:
    from filelock import BaseFileLock

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

    Raises
    ------
    CompileError
        If it cannot be written.
    """
    path = folders.cache_folder() / name
    if _is_whole(path):
        return path
    try:
        lock = _locked(path)
    except (OSError, NotImplementedError) as error:
        path = _instead_of(folders.cache_folder(), error) / name
        lock = _locked(path)
    try:
        if not _is_whole(path):  # still: it may have been waited for
            _build(path, build)
    finally:
        lock.release()
    return path


def _locked(path: Path) -> BaseFileLock:
    """Hold the lock of a file that is to be written, in its folder.

    The system takes it back when its holder ends, however it ends.
    """
    from filelock import FileLock  # here, to keep the import of cuflash short

    folders.make(path.parent)
    lock = FileLock(path.with_suffix(".lock"))
    lock.acquire()
    return lock


def can_keep() -> bool:
    """Whether the cache folder can be written to."""
    try:
        require_folder()
    except CompileError:
        return False
    return True


def require_folder() -> None:
    """Make the cache folder; CompileError if it cannot be written to."""
    folder = folders.cache_folder()
    try:
        folders.make(folder)
    except OSError as error:
        raise CompileError(
            f"{_cannot_keep(folder, error)}; {folders.ADVICE}"
        ) from error


def _cannot_keep(folder: Path, error: Exception) -> str:
    return f"compiled kernels cannot be kept in {folder} ({error})"


_temporary: dict[Path, Path] = {}
_one_thread = threading.Lock()


def _instead_of(folder: Path, error: Exception) -> Path:
    """A folder that ends with this process; a warning when it is made."""
    import tempfile  # here, to keep the import of cuflash short

    with _one_thread:
        if folder in _temporary:
            return _temporary[folder]
        try:
            made = Path(tempfile.mkdtemp(prefix="cuflash_"))
        except OSError as second:
            raise CompileError(
                f"{_cannot_keep(folder, error)}, nor in a temporary folder"
                f" ({second}); {folders.ADVICE}"
            ) from second
        atexit.register(_remove, made, os.getpid())
        _temporary[folder] = made
    warnings.warn(
        f"{_cannot_keep(folder, error)}: each process compiles its own into"
        f" a temporary folder; {folders.ADVICE}",
        RuntimeWarning,
        stacklevel=2,
    )
    return made


def _remove(folder: Path, process: int) -> None:
    import shutil

    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Put a file and its digest in place: others see all of both or none."""
    made, digest = path.with_suffix(".new"), path.with_suffix(".new_sha256")
    try:
        build(made)
        digest.write_text(_digest(made))
        # Until both are there they do not match.
        os.replace(digest, _digest_file(path))
        os.replace(made, path)
    except OSError as error:  # a disk that is full, say
        raise CompileError(
            f"a compiled kernel cannot be written to {path.parent} ({error});"
            f" {folders.ADVICE} and has room"
        ) from error
    finally:
        with contextlib.suppress(OSError):
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
    import hashlib  # here, to keep the import of cuflash short

    return hashlib.sha256(path.read_bytes()).hexdigest()
