"""Runs the kernels on a CPU: a C++ compiler compiles their actual text.

>>> import numpy as np
>>> import cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 16, 8))
>>> with cuflash.emulator.active(arch="sm_90a", seed=0):
...     out = cuflash.forward(q, k, v)
>>> np.allclose(out, cuflash.forward(q, k, v))
True

Within the ``with`` block, calls on NumPy arrays use the plans and kernel text
of that architecture, and every memory access is checked. It is slow and meant
for tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported in `active`, because few programs need it
    from cuflash.backends.emulator.machine import Emulator
    from cuflash.plans.plan import FamilyName

__all__ = ["active", "current"]

_current: ContextVar[Emulator | None] = ContextVar(
    "cuflash.emulator", default=None
)


def current() -> Emulator | None:
    """The active emulator for NumPy arrays, or None."""
    return _current.get()


@contextlib.contextmanager
def active(
    arch: str = "sm_90a",
    seed: int = 0,
    resident: int = 0,
    timeout: float = 120.0,
    flags: tuple[str, ...] | None = None,
    family: FamilyName | None = None,
    truncates: bool = False,
) -> Iterator[Emulator]:
    """Run calls on NumPy arrays with the kernels, emulated on the CPU.

    Applies to this thread (this context) until the end of the ``with`` block.

    Parameters
    ----------
    arch : str, optional
        The architecture whose plans and kernels are used.
    seed : int, optional
        Determines the order in which warps run, and everything else that a
        GPU leaves unspecified.
    resident : int, optional
        The number of blocks alive at once; if 0, the seed determines it.
    timeout : float, optional
        Seconds after which a kernel is stopped.
    flags : tuple of str, optional
        Additional compiler and linker flags for kernels, such as
        ``--coverage``. With any, a kernel's build folder is kept: see
        `runtime.executable`. The default is the environment variable
        CUFLASH_EMULATOR_FLAGS, if set.
    family : str, optional
        ``"sm80"``, ``"simt"`` or another: use this kernel family if it
        supports the problem, as ``CUFLASH_FAMILY`` does on a GPU.
    truncates : bool, optional
        Whether MMAs of 16-bit types and of tf32 truncate sums, as Hopper's
        tensor cores do. By default they round once, which is faster.

    Yields
    ------
    Emulator
        Its method `launch` runs custom kernels.

    Raises
    ------
    UnsupportedError
        If no kernel runs on `arch`; from a call, if `arch` does not support
        the call or its dtype.
    CompileError
        From a call: if there is no C++ compiler, or a kernel does not
        compile.
    KernelFault
        From a call: if a kernel performs an illegal operation or hangs.
    """
    from cuflash.backends.emulator.machine import Emulator

    if flags is None:
        flags = tuple(os.environ.get("CUFLASH_EMULATOR_FLAGS", "").split())
    emulator = Emulator(
        arch, seed, resident, timeout, tuple(flags), family, truncates
    )
    token = _current.set(emulator)
    try:
        yield emulator
    finally:
        _current.reset(token)
