"""Where cuflash keeps what it makes on this machine: CuPy's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled kernels: CuPy's own."""
    folder = os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"
    return Path(folder).expanduser()


def tile_tables() -> Path:
    """The folder of the tile tables that were measured on this machine."""
    return cache_folder() / "cuflash_tiles"
