"""The known peers, and those that this machine has.

A peer is looked for by importing it; one that is absent is left out with a
word. Nothing is imported before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .cells import Cell

if TYPE_CHECKING:
    from .runners import Runner

# Of one matrix of scores. Who writes them down has a few of that size, and
# the others have to find room beside it.
MOST_BYTES = 8 << 30


class Absent(Exception):
    """A peer is not available; the message says why."""


def refuse_large_scores(cell: Cell) -> None:
    """Raise Absent for one who writes down scores, float32 at least."""
    nbytes = 8 if cell.dtype == "float64" else 4
    nbytes *= cell.batch * cell.heads * cell.seqlen**2
    if nbytes > MOST_BYTES:
        raise Absent(f"its matrix of scores takes {nbytes >> 30} GiB")


# Name: the module that knows it.
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
VARIANTS = ("mha", "bfloat16")  # cuflash itself, on another call
NAMES = (*MODULES, *VARIANTS)


def all_for(dtype: str) -> list[str]:
    """Every peer that has a kernel for a dtype."""
    return [*WIDE.get(dtype, SIXTEEN_BITS), *MATERIALISED]


def find_peers(
    names: list[str] | None, dtype: str
) -> tuple[list[Runner], list[str]]:
    """Return the available peers, and a line for each missing one.

    Parameters
    ----------
    names : list of str or None
        None: all that know the dtype.
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
            # An extension that was built for something else.
            reason = str(error).strip().partition("\n")[0]
            words.append(f"{name} left out: {type(error).__name__}: {reason}")
    return found, words
