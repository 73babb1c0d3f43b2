"""Where cuflash keeps what it makes on this machine.

``CUPY_CACHE_DIR`` if that is set, which CuPy reads too; else the folders that
the system has for caches and for data.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CUPY_CACHE_DIR"
ADVICE = (
    f"set the environment variable {VARIABLE} to a folder that can be written"
)


def cache_folder() -> Path:
    """The folder of compiled kernels, which may be deleted at any time."""
    return _given() or _of_system("user_cache_dir")


def tile_tables() -> Path:
    """The folder of the tile tables that were measured on this machine."""
    given = _given()
    if given:
        return given / "cuflash_tiles"
    return _of_system("user_data_dir") / "tiles"


def make(folder: Path) -> None:
    """Make a folder, unless it is there, that can be written to.

    Raises
    ------
    OSError
        If that is not possible. Its text names the folder.
    """
    import tempfile  # here, to keep the import of cuflash short

    if str(folder).startswith("~"):
        raise OSError(f"{folder}: this user has no home folder")
    folder.mkdir(parents=True, exist_ok=True)
    # os.access would not know of every reason: a quota, another system.
    with tempfile.TemporaryFile(dir=folder):
        pass


def files(folder: Path, pattern: str) -> list[Path]:
    """A folder's files of such names, sorted; none if it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def why_no_cupy(error: OSError) -> str:
    """What to say if ``import cupy`` ends so, as it does without a folder."""
    return (
        f"CuPy cannot be imported ({error}); if that is about its cache"
        f" folder, {ADVICE}"
    )


def _given() -> Path | None:
    folder = os.environ.get(VARIABLE)
    return Path(os.path.expanduser(folder)) if folder else None


def _of_system(kind: str) -> Path:
    import platformdirs  # here, to keep the import of cuflash short

    try:
        folder = getattr(platformdirs, kind)("cuflash", appauthor=False)
    except RuntimeError:  # no HOME, and a user whom the system does not know
        folder = "~/.cache/cuflash"
    return Path(folder)
