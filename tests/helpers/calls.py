"""Public calls on host arrays (place, call, fetch) or on device arrays."""

from dataclasses import replace

import numpy as np

import cuflash

from .backends import NumpyBackend
from .data import unlike


def forward(backend, case, q, k, v, **options):
    """Return (out, lse) of a case as NumPy arrays."""
    backend.poison()
    placed = [backend.place(x) for x in (q, k, v)]
    if case.layout == "unlike" and "out" not in options:
        empty = np.full((*q.shape[:-1], v.shape[-1]), np.nan).astype(q.dtype)
        options["out"] = backend.place(unlike(empty, "out"))
    with backend.running(case):
        results = cuflash.forward(
            *placed, **_call(backend, case), return_lse=True, **options
        )
    return tuple(backend.fetch(x) for x in results)


def backward(backend, case, dout, q, k, v, out, lse, **more):
    """Return (dq, dk, dv) of a case as NumPy arrays, and dbias, dsink."""
    if case.layout == "unlike":
        out = unlike(out, "out")
        for name, x in {"dq": q, "dk": k, "dv": v}.items():
            empty = np.full(x.shape, np.nan).astype(x.dtype)
            more.setdefault(name, backend.place(unlike(empty, name)))
    placed = [backend.place(x) for x in (dout, q, k, v, out, lse)]
    options = {**_call(backend, case), **more}
    backend.poison()
    with backend.running(case):
        results = cuflash.backward(
            *placed,
            **options,
            **case.asked(),
            deterministic=case.deterministic,
        )
    return tuple(backend.fetch(x) for x in results)


def _call(backend, case):
    """Return a case's keyword arguments, arrays placed."""
    return {
        name: backend.place(x) if isinstance(x, np.ndarray) else x
        for name, x in case.call().items()
    }


def both(backend, case, q, k, v, dout):
    """Return (dq, dk, dv, ...), with out and lse from our own forward."""
    # Block sizes are those of the gradients' kernels.
    first = replace(case, block_q=None, block_k=None)
    out, lse = forward(backend, first, q, k, v)
    return backward(backend, case, dout, q, k, v, out, lse)


def states(case, q, k, v, **options):
    """Return (out, lse) of the NumPy path, for tests of gradients alone.

    No kernel of the forward pass has to be compiled.
    """
    first = replace(case, block_q=None, block_k=None)
    return forward(NumpyBackend(), first, q, k, v, **options)


def gradients(backend, case, q, k, v, dout, **options):
    """Return (dq, dk, dv, ...), with out and lse from the NumPy path."""
    given = states(case, q, k, v, **options)
    return backward(backend, case, dout, q, k, v, *given, **options)


def all_results(q, k, v, dout):
    """Return (out, lse, dq, dk, dv) of arrays where they are, causal."""
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    grads = cuflash.backward(
        dout, q, k, v, out, lse, causal=True, deterministic=True
    )
    return out, lse, *grads


def merge_states(backend, case, *states):
    """Return (out, lse) of (out_a, lse_a, out_b, lse_b)."""
    backend.poison()
    placed = [backend.place(x) for x in states]
    with backend.running(case):
        merged = cuflash.merge_states(*placed)
    return tuple(backend.fetch(x) for x in merged)
