"""The environment variables that cuflash reads.

An unknown value never stops an import: the first call raises a
ValueRangeError that says what was expected, whether or not that call would
have used the variable.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from cuflash.errors import ValueRangeError

if TYPE_CHECKING:
    import logging

# Name: the values that are known. An empty variable counts as unset.
VALUES = {
    "CUFLASH_COMPILE": ("background", "eager", "lazy"),
    "CUFLASH_FAMILY": ("wgmma", "mma", "fma", "dmma", "tf32x3", "simt"),
    "CUFLASH_LOG": ("plan",),
    "CUFLASH_CHECK": ("0", "1"),
}
# Those that may have any value, too.
NAMES = (
    *VALUES, "CUFLASH_EMULATOR_FLAGS", "CUPY_CACHE_DIR", "CXX",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def read(name: str) -> str | None:
    """The value of one of `VALUES`; None if it is not set, or empty.

    Raises
    ------
    ValueRangeError
        If the value is unknown.
    """
    value = os.environ.get(name) or None
    if value is None or value in VALUES[name]:
        return value
    raise ValueRangeError(
        f"the environment variable {name} is {value!r}, expected"
        f" {expected(name)}"
    )


def expected(name: str) -> str:
    """The values of one of `VALUES`, in words."""
    return f"{', '.join(map(repr, VALUES[name]))} or unset"


@functools.cache  # until it passes: an error is not remembered
def check() -> None:
    """Raise a ValueRangeError if any variable has an unknown value."""
    for name in VALUES:
        read(name)


def logger() -> logging.Logger:
    """The logger ``cuflash``, which ``CUFLASH_LOG`` opens.

    A program that has set up its own logging gets the lines there, another
    one on stderr.
    """
    import logging  # here, to keep the import of cuflash short

    found = logging.getLogger("cuflash")
    if read("CUFLASH_LOG") == "plan":
        if not found.isEnabledFor(logging.INFO):
            found.setLevel(logging.INFO)
        if not found.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            found.addHandler(handler)
    return found
