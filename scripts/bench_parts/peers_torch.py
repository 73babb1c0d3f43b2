"""PyTorch's scaled_dot_product_attention, one runner per backend."""

from __future__ import annotations

from collections.abc import Callable

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cells import Cell
from .peers import Absent, refuse_large_scores
from .runners import Inputs, Runner

BACKENDS = {
    "fa2": (SDPBackend.FLASH_ATTENTION, "FlashAttention-2"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cuDNN"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient kernels"),
    "math": (SDPBackend.MATH, "matrix products and softmax"),
}


def find(name: str) -> Runner:
    """A backend's runner."""
    check_torch()
    backend, what = BACKENDS[name]
    cuda = torch.backends
    available = {
        "fa2": cuda.cuda.is_flash_attention_available,
        "cudnn": cuda.cudnn.is_available,
    }.get(name, lambda: True)
    version = f"PyTorch {torch.__version__}"
    if not available():
        raise Absent(f"not in this {version}")
    if name == "cudnn":
        what += f" {cuda.cudnn.version()}"

    def context():
        return sdpa_kernel(backend)

    prepare = with_autograd(sdpa, context)
    if name == "math":
        prepare = _prepare_math(prepare)
    runner = Runner(name, f"{what} in {version}", prepare, context)
    if name == "efficient":
        # CUTLASS computes float32 matmuls as three TF32 matmuls.
        runner = runner._replace(
            kind=lambda x: "tf32x3" if x.dtype == "float32" else x.kind
        )
    return runner


def _prepare_math(prepare: Callable) -> Callable:
    def prepare_small(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        refuse_large_scores(cell)
        return prepare(cell, inputs)

    return prepare_small


def check_torch() -> None:
    """Check that PyTorch has a GPU and uses CuPy's stream."""
    if not torch.cuda.is_available():
        raise Absent("torch sees no GPU")
    stream = torch.cuda.current_stream().cuda_stream
    if stream != cupy.cuda.get_current_stream().ptr:
        raise SystemExit("torch and CuPy are on different streams")


def sdpa(cell: Cell, q, k, v):
    """Compute attention of (batch, seqlen, heads, head_dim), by views."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=cell.causal,
        enable_gqa=cell.group_size > 1,
    )
    return out.transpose(1, 2)


def with_autograd(attend: Callable, context: Callable) -> Callable:
    """Make `Runner.prepare` from a function that PyTorch differentiates.

    Parameters
    ----------
    attend : callable
        (cell, q, k, v) to out.
    context : callable
        Makes the context manager for its calls.
    """

    def prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        q, k, v, dout = (torch.from_dlpack(x) for x in inputs)
        if cell.direction == "forward":
            return lambda: (attend(cell, q, k, v),)
        for x in (q, k, v):
            x.requires_grad_()
        with context():
            out = attend(cell, q, k, v)
        return lambda: torch.autograd.grad(
            out, (q, k, v), dout, retain_graph=True
        )

    return prepare
