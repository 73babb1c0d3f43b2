"""Who takes part: cuflash, and the peers that this machine has.

All read the same memory. A runner gives a function of a set of inputs that
queues one call on the null stream and returns its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
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
    shapes = cell.shape, cell.shape_kv, cell.shape_kv, cell.shape
    return Inputs(
        *(
            random.standard_normal(shape, cupy.float32).astype(
                DTYPES[cell.dtype]
            )
            for shape in shapes
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
    variant : callable
        The cell that it runs in place of a cell: one of as many operations.
    """

    name: str
    label: str
    prepare: Callable[[Cell, Inputs], Callable[[], tuple]]
    context: Callable[[], Any] = contextlib.nullcontext
    variant: Callable[[Cell], Cell] = lambda cell: cell


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

# Ourselves on a call that should be about as fast.
VARIANTS = {
    "mha": Runner(
        "mha",
        "cuflash with a key head for each query head",
        _prepare_cuflash,
        variant=lambda cell: replace(cell, kv_heads=None),
    ),
    "bfloat16": Runner(
        "bfloat16",
        "cuflash in bfloat16",
        _prepare_cuflash,
        variant=lambda cell: replace(cell, dtype="bfloat16"),
    ),
}


def _prepare_torch(torch, context) -> Callable:
    """Make `prepare` for one backend of scaled_dot_product_attention."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        q, k, v, dout = (torch.from_dlpack(x) for x in inputs)

        def forward():
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out = attention(
                *heads_first,
                is_causal=cell.causal,
                enable_gqa=cell.group_size > 1,
            )
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
    found = [VARIANTS[name] for name in wanted if name in VARIANTS]
    wanted = [name for name in wanted if name not in VARIANTS]
    if not wanted:
        return found, []
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        return found, [f"{' and '.join(wanted)} left out: {error}"]
    if not torch.cuda.is_available():
        return found, [f"{' and '.join(wanted)} left out: torch sees no GPU"]
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
    words = []
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
