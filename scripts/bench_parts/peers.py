"""The known peers, and those that this machine has.

A peer is detected by importing it, and not before it is needed. An absent one
is left out, with a message.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .cells import Cell

if TYPE_CHECKING:
    from .runners import Runner

# The largest score matrix. A peer that materialises scores allocates several,
# and the other runners need memory at the same time.
MOST_BYTES = 8 << 30


class Absent(Exception):
    """A peer is not available; the message says why."""


def refuse_large_scores(cell: Cell) -> None:
    """Raise Absent if materialised scores (at least float32) are too large."""
    nbytes = 8 if cell.dtype == "float64" else 4
    nbytes *= cell.batch * cell.heads * cell.seqlen**2
    if nbytes > MOST_BYTES:
        raise Absent(f"its score matrix takes {nbytes >> 30} GiB")


# Module by peer name.
SIXTEEN_BITS = {
    "cudnn": "peers_torch",
    "fa2": "peers_torch",
    "fa3": "peers_flash",
    "fa4": "peers_flash",
    "flashinfer": "peers_flash",
    "jax": "peers_jax",
}
FLOAT32 = {"efficient": "peers_torch", "math": "peers_torch"}
FLOAT64 = {"math": "peers_torch"}
WIDE = {"float32": FLOAT32, "float64": FLOAT64}
MATERIALISED = {"cupy": "peers_cupy"}
MODULES = {**SIXTEEN_BITS, **FLOAT32, **MATERIALISED}
VARIANTS = ("mha", "bfloat16")  # cuflash itself, on a different call
NAMES = (*MODULES, *VARIANTS)


def all_for(dtype: str) -> list[str]:
    """Return every peer that supports a dtype."""
    return [*WIDE.get(dtype, SIXTEEN_BITS), *MATERIALISED]


def find_peers(
    names: list[str] | None, dtype: str
) -> tuple[list[Runner], list[str]]:
    """Return the available peers, and a line for each missing one.

    Parameters
    ----------
    names : list of str or None
        None: all that support the dtype.
    """
    found, words = [], []
    for name in all_for(dtype) if names is None else names:
        if name in VARIANTS:
            from . import runners

            found.append(runners.VARIANTS[name])
            continue
        try:
            module = importlib.import_module(f".{MODULES[name]}", __package__)
            found.append(module.find(name))
        except (Absent, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            words.append(f"{name} left out: {reason}")
        except (OSError, RuntimeError, AttributeError) as error:
            # An extension built for another version.
            reason = str(error).strip().partition("\n")[0]
            words.append(f"{name} left out: {type(error).__name__}: {reason}")
    return found, words
