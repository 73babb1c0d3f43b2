"""A cache of built files: kernels compiled for a GPU or a CPU.

The SHA-256 of each file's content is stored next to it and compared once per
process: a truncated, empty or modified file is rebuilt.

If the cache folder is not writable, or its disk is full, a missing file is
built in a temporary folder for this process only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cuflash import folders
from cuflash.errors import CompileError

if TYPE_CHECKING:
    from filelock import BaseFileLock

# Files already compared with their digest. A changed file has another size or
# time; a hard link with the same name has the same key.
_checked: set[tuple[object, ...]] = set()


def kept(name: str, build: Callable[[Path], None]) -> Path:
    """The named file in the cache folder; built if it does not exist.

    Parameters
    ----------
    name : str
        Contains a hash of everything that the content depends on.
    build : callable
        Writes the file to the path it receives, in the folder of the result.
        Only one thread of all processes builds a name at a time.

    Returns
    -------
    Path
        The complete file that `build` wrote.

    Raises
    ------
    CompileError
        If the file cannot be written.
    """
    path = folders.cache_folder() / name
    if _is_whole(path):
        return path
    try:
        return _built(path, build)
    except (OSError, NotImplementedError) as error:
        first = last = error
    for parent in _PARENTS:
        try:
            folder = _instead_of(path.parent, parent, first)
            return _built(folder / name, build)
        except OSError as error:
            last = error
    raise CompileError(
        f"a compiled kernel cannot be written to {path.parent} ({first}), nor"
        f" in a temporary folder ({last}); {folders.ADVICE} with free space"
    ) from last


def _built(path: Path, build: Callable[[Path], None]) -> Path:
    """The file, built if it does not exist; OSError if it cannot be."""
    lock = _locked(path)
    try:
        if not _is_whole(path):  # another process may have built it meanwhile
            _build(path, build)
    finally:
        lock.release()
    return path


def _locked(path: Path) -> BaseFileLock:
    """Acquire the lock of a file to be written.

    The system releases it when the process ends, even by a crash.
    """
    from filelock import FileLock  # here, to keep `import cuflash` fast

    folders.make(path.parent)
    lock = FileLock(path.with_suffix(".lock"))
    lock.acquire()
    return lock


def can_keep() -> bool:
    """Whether the cache folder is writable."""
    try:
        require_folder()
    except CompileError:
        return False
    return True


def require_folder() -> None:
    """Create the cache folder; CompileError if it is not writable."""
    folder = folders.cache_folder()
    try:
        folders.make(folder)
    except OSError as error:
        raise CompileError(
            f"{_cannot_keep(folder, error)}; {folders.ADVICE}"
        ) from error


def _cannot_keep(folder: Path, error: Exception) -> str:
    return f"compiled kernels cannot be kept in {folder} ({error})"


# Where a temporary folder may be: the system's choice, else memory.
_PARENTS = (None, "/dev/shm")
_temporary: dict[tuple[Path, str | None], Path] = {}
_one_thread = threading.Lock()


def _instead_of(folder: Path, parent: str | None, error: Exception) -> Path:
    """This process's temporary folder; the first one is warned of."""
    import tempfile  # here, to keep `import cuflash` fast

    with _one_thread:
        if (folder, parent) in _temporary:
            return _temporary[folder, parent]
        is_first = not any(known == folder for known, _ in _temporary)
        made = Path(tempfile.mkdtemp(prefix="cuflash_", dir=parent))
        atexit.register(_remove, made, os.getpid())
        _temporary[folder, parent] = made
    if is_first:
        warnings.warn(
            f"{_cannot_keep(folder, error)}: each process compiles its own"
            f" into a temporary folder; {folders.ADVICE}",
            RuntimeWarning,
            stacklevel=2,
        )
    return made


def _remove(folder: Path, process: int) -> None:
    import shutil

    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Build a file and its digest; other processes see both or neither."""
    made, digest = path.with_suffix(".new"), path.with_suffix(".new_sha256")
    try:
        build(made)
        digest.write_text(_digest(made), encoding="ascii")
        # The file and the digest do not match until both are replaced.
        _replace(digest, _digest_file(path))
        _replace(made, path)
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
            digest.unlink(missing_ok=True)


_TRIES, _PAUSE = 50, 0.02  # seconds between


def _replace(made: Path, path: Path) -> None:
    """os.replace, which Windows refuses while either file is open.

    A process that compares the digest, or a virus scanner, opens it briefly.
    """
    for _ in range(_TRIES if sys.platform == "win32" else 0):
        try:
            os.replace(made, path)
            return
        except PermissionError:
            time.sleep(_PAUSE)
    os.replace(made, path)


def _is_whole(path: Path) -> bool:
    """Whether a file exists with the content that was built."""
    try:
        found = path.stat()
        key = (
            path.name, found.st_dev, found.st_ino, found.st_size,
            found.st_mtime_ns,
        )  # fmt: skip
        if key not in _checked:
            digest = _digest_file(path).read_text(encoding="ascii")
            if digest != _digest(path):
                return False
            _checked.add(key)
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    import hashlib  # here, to keep `import cuflash` fast

    return hashlib.sha256(path.read_bytes()).hexdigest()
