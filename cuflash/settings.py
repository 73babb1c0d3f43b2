"""The environment variables that cuflash reads.

An unknown value never makes the import fail. The first call raises a
ValueRangeError that names the expected values, even if that call does not use
the variable.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Literal, get_args

from cuflash.errors import ValueRangeError

if TYPE_CHECKING:
    import logging

# The families of kernels (plans/record.py).
FamilyName = Literal[
    "sm90", "sm80", "decode", "decode_sm90", "decode_simt", "fma",
    "mma8_float64", "mma8_float32", "simt",
]  # fmt: skip
# What some were called before; still taken.
FORMER_FAMILIES: dict[str, FamilyName] = {
    "wgmma": "sm90",
    "mma": "sm80",
    "dmma": "mma8_float64",
    "tf32x3": "mma8_float32",
}

# Variable: its known values. An empty variable counts as unset.
VALUES = {
    "CUFLASH_COMPILE": ("background", "eager", "lazy"),
    "CUFLASH_FAMILY": get_args(FamilyName),
    "CUFLASH_LOG": ("plan",),
    "CUFLASH_CHECK": ("0", "1"),
}
# These, and variables that accept any value.
NAMES = (
    *VALUES, "CUFLASH_EMULATOR_FLAGS", "CUPY_CACHE_DIR", "CXX",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def read(name: str) -> str | None:
    """The value of a variable in `VALUES`; None if it is unset or empty.

    Raises
    ------
    ValueRangeError
        If the value is unknown.
    """
    value = os.environ.get(name) or None
    if name == "CUFLASH_FAMILY" and value in FORMER_FAMILIES:
        return FORMER_FAMILIES[value]
    if value is None or value in VALUES[name]:
        return value
    raise ValueRangeError(
        f"the environment variable {name} is {value!r}, expected"
        f" {expected(name)}"
    )


def expected(name: str) -> str:
    """Describe the values that a variable in `VALUES` accepts."""
    return f"{', '.join(map(repr, VALUES[name]))} or unset"


@functools.cache  # caches success only: an exception is not cached
def check() -> None:
    """Raise a ValueRangeError if any variable has an unknown value."""
    for name in VALUES:
        read(name)


def logger() -> logging.Logger:
    """The logger ``cuflash``, enabled by ``CUFLASH_LOG``.

    Lines go to the program's own log handlers, or to stderr if it has none.
    """
    import logging  # here, to keep `import cuflash` fast

    found = logging.getLogger("cuflash")
    if read("CUFLASH_LOG") == "plan":
        if not found.isEnabledFor(logging.INFO):
            found.setLevel(logging.INFO)
        if not found.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            found.addHandler(handler)
    return found
