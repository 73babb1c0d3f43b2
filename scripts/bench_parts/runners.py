"""Who takes part: cuflash, and the peers that this machine has.

All read the same memory. A runner gives a function of a set of inputs that
queues one call on the null stream and returns its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import ml_dtypes
import numpy as np

import cuflash

from .cells import Cell

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


class Inputs(NamedTuple):
    """CuPy arrays, (batch, seqlen, heads, head_dim)."""

    q: cupy.ndarray
    k: cupy.ndarray
    v: cupy.ndarray
    dout: cupy.ndarray


def make_inputs(cell: Cell, seed: int) -> Inputs:
    """Draw standard normal inputs. Zeros would run faster than real data."""
    random = cupy.random.default_rng(seed)
    return Inputs(
        *(
            random.standard_normal(cell.shape, cupy.float32).astype(
                DTYPES[cell.dtype]
            )
            for _ in Inputs._fields
        )
    )


class Runner(NamedTuple):
    """Someone to time.

    Attributes
    ----------
    name, label : str
        Short, for columns and JSON; and in words.
    prepare : callable
        (cell, inputs) to a function without arguments.
    context : callable
        Makes the context manager in which calls run.
    """

    name: str
    label: str
    prepare: Callable[[Cell, Inputs], Callable[[], tuple]]
    context: Callable[[], Any] = contextlib.nullcontext


def _prepare_cuflash(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
    q, k, v, dout = inputs

    def forward():
        # lse too, as the peers always write it.
        return cuflash.forward(q, k, v, causal=cell.causal, return_lse=True)

    if cell.direction == "forward":
        return lambda: forward()[:1]
    out, lse = forward()
    return lambda: cuflash.backward(
        dout, q, k, v, out, lse, causal=cell.causal
    )


OURS = Runner("cuflash", f"cuflash {cuflash.__version__}", _prepare_cuflash)


def _prepare_torch(torch, context) -> Callable:
    """Make `prepare` for one backend of scaled_dot_product_attention."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        q, k, v, dout = (torch.from_dlpack(x) for x in inputs)

        def forward():
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out = attention(*heads_first, is_causal=cell.causal)
            return (out.transpose(1, 2),)

        if cell.direction == "forward":
            return forward
        for x in (q, k, v):
            x.requires_grad_()
        with context():
            (out,) = forward()
        return lambda: torch.autograd.grad(
            out, (q, k, v), dout, retain_graph=True
        )

    return prepare


def find_peers(names: list[str] | None) -> tuple[list[Runner], list[str]]:
    """Return the peers that are here, and a line for each that is not."""
    wanted = names if names is not None else ["fa2", "cudnn"]
    if not wanted:
        return [], []
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        return [], [f"{' and '.join(wanted)} left out: {error}"]
    if not torch.cuda.is_available():
        return [], [f"{' and '.join(wanted)} left out: torch sees no GPU"]
    if torch.cuda.current_stream().cuda_stream != (
        cupy.cuda.get_current_stream().ptr
    ):
        raise SystemExit("torch and CuPy are on different streams")

    version = f"PyTorch {torch.__version__}"
    backends = {
        "fa2": (
            SDPBackend.FLASH_ATTENTION,
            f"FlashAttention-2 in {version}",
            torch.backends.cuda.is_flash_attention_available(),
        ),
        "cudnn": (
            SDPBackend.CUDNN_ATTENTION,
            f"cuDNN {torch.backends.cudnn.version()} in {version}",
            torch.backends.cudnn.is_available(),
        ),
    }
    found, words = [], []
    for name in wanted:
        backend, label, available = backends[name]
        if not available:
            words.append(f"{name} left out: not in this {version}")
            continue

        def context(backend=backend):
            return sdpa_kernel(backend)

        found.append(
            Runner(name, label, _prepare_torch(torch, context), context)
        )
    return found, words


def to_cupy(array: Any) -> cupy.ndarray:
    """Return a result as a CuPy array, in place."""
    if isinstance(array, cupy.ndarray):
        return array
    return cupy.from_dlpack(array.detach())
