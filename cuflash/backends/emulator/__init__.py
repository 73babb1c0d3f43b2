"""Runs the kernels on a CPU: their very text, by a C++ compiler.

>>> with cuflash.emulator.active(arch="sm_90a", seed=0):
...     out = cuflash.forward(q, k, v)

Within the ``with``, calls on NumPy arrays go through the plan, the text and
the kernels that a GPU of that architecture gets, and every access to memory
is checked. Slow, and meant for tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported by `active`: few need it
    from cuflash.backends.emulator.machine import Emulator
    from cuflash.plan import Family

__all__ = ["active", "current"]

_current: ContextVar[Emulator | None] = ContextVar(
    "cuflash.emulator", default=None
)


def current() -> Emulator | None:
    """The emulator that NumPy arrays go to, None if they do not."""
    return _current.get()


@contextlib.contextmanager
def active(
    arch: str = "sm_90a",
    seed: int = 0,
    resident: int = 0,
    timeout: float = 120.0,
    flags: tuple[str, ...] | None = None,
    family: Family | None = None,
) -> Iterator[Emulator]:
    """Have calls on NumPy arrays run the kernels, emulated on the CPU.

    For this thread (this context) alone, until the end of the ``with``.

    Parameters
    ----------
    arch : str, optional
        The architecture whose plans and kernels are run.
    seed : int, optional
        Draws the order in which warps take turns, and all else that a GPU
        leaves open.
    resident : int, optional
        How many blocks are alive at once; 0, the seed draws it.
    timeout : float, optional
        Seconds after which a kernel is given up.
    flags : tuple of str, optional
        Further flags of the C++ compiler, to compile and to link kernels
        with, as ``--coverage``. With any, the folder that a kernel was
        compiled in is kept: see `runtime.executable`. By default those
        in the environment variable CUFLASH_EMULATOR_FLAGS, if it is set.
    family : str, optional
        ``"mma"``, ``"simt"`` or another: run these kernels where there are
        some, as the environment variable ``CUFLASH_FAMILY`` does on a
        GPU.

    Yields
    ------
    Emulator
        Its method `launch` runs kernels of one's own.

    Raises
    ------
    UnsupportedError
        If no kernel runs on `arch`; from a call, if it or its dtype cannot
        run there.
    CompileError
        From a call: if there is no C++ compiler, or a kernel does not
        compile.
    KernelFault
        From a call: if a kernel does what it must not, or does not end.
    """
    from cuflash.backends.emulator.machine import Emulator

    if flags is None:
        flags = tuple(os.environ.get("CUFLASH_EMULATOR_FLAGS", "").split())
    emulator = Emulator(arch, seed, resident, timeout, tuple(flags), family)
    token = _current.set(emulator)
    try:
        yield emulator
    finally:
        _current.reset(token)
