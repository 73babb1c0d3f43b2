"""The folders in which cuflash stores compiled kernels and tile tables.

``CUPY_CACHE_DIR``, which CuPy reads too, if it is set; otherwise the system's
folders for caches and for data.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CUPY_CACHE_DIR"
ADVICE = f"set the environment variable {VARIABLE} to a writable folder"


def cache_folder() -> Path:
    """The folder of compiled kernels, which may be deleted at any time."""
    return _from_variable() or _of_system("user_cache_dir")


def tile_tables() -> Path:
    """The folder of tile tables measured on this machine."""
    folder = _from_variable()
    if folder:
        return folder / "cuflash_tiles"
    return _of_system("user_data_dir") / "tiles"


def make(folder: Path) -> None:
    """Create a folder if it does not exist, and check that it is writable.

    Raises
    ------
    OSError
        If that fails. The text names the folder.
    """
    import tempfile  # here, to keep `import cuflash` fast

    if str(folder).startswith("~"):
        raise OSError(f"{folder}: this user has no home folder")
    folder.mkdir(parents=True, exist_ok=True)
    # os.access does not see every reason, such as a quota.
    with tempfile.TemporaryFile(dir=folder):
        pass


def files(folder: Path, pattern: str) -> list[Path]:
    """A folder's files that match, sorted; none if it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def why_no_cupy(error: OSError) -> str:
    """The message for an OSError of ``import cupy``.

    CuPy raises one if it cannot create its cache folder.
    """
    return (
        f"CuPy cannot be imported ({error}); if the cause is its cache"
        f" folder, {ADVICE}"
    )


def _from_variable() -> Path | None:
    folder = os.environ.get(VARIABLE)
    return Path(os.path.expanduser(folder)) if folder else None


def _of_system(kind: str) -> Path:
    import platformdirs  # here, to keep `import cuflash` fast

    try:
        folder = getattr(platformdirs, kind)("cuflash", appauthor=False)
    except RuntimeError:  # no HOME, and a user unknown to the system
        folder = "~/.cache/cuflash"
    return Path(folder)
