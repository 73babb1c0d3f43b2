"""Substitutes NumPy for CuPy, for scripts that compute with CuPy.

cuflash recognises CuPy's arrays by their class, which no array has here, so
its calls run on the CPU.
"""

import importlib
import sys
import types

import numpy as np

# What imports CuPy, those that others import first.
MODULES = (
    "dense_attention", "bench_parts.runners", "bench_parts.checks",
    "bench_parts.peers_cupy", "fuzz_parts.large", "sweep_parts.wide",
)  # fmt: skip


class StandIn(types.ModuleType):
    class ndarray:
        """A class without instances."""

    def __getattr__(self, name):
        return getattr(np, name)


def with_numpy(monkeypatch):
    """Return the modules, reloaded on NumPy, by their last names."""
    monkeypatch.setitem(sys.modules, "cupy", StandIn("cupy"))
    for name in MODULES:  # all are forgotten before the first is imported
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    made = {}
    for name in MODULES:
        package, _, last = name.rpartition(".")
        if package:  # import sets it, and nothing would set it back
            package = importlib.import_module(package)
            monkeypatch.setattr(package, last, None, raising=False)
        made[last] = importlib.import_module(name)
    return types.SimpleNamespace(**made)
