"""Packages of attention kernels for PyTorch: flash-attn 3 and 4, FlashInfer.

All take (batch, seqlen, heads, head_dim).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import metadata

import torch

from .cells import Cell
from .peers import Absent
from .peers_torch import check_torch, with_autograd
from .runners import Inputs, Runner

WORKSPACE_BYTES = 128 << 20  # the size in FlashInfer's documentation


def find(name: str) -> Runner:
    """A package's runner."""
    check_torch()
    return {"fa3": _fa3, "fa4": _fa4, "flashinfer": _flashinfer}[name]()


def _fa3() -> Runner:
    from flash_attn_interface import flash_attn_func

    return _flash_attn("fa3", "FlashAttention-3", "flash_attn_3",
                       flash_attn_func)  # fmt: skip


def _fa4() -> Runner:
    from flash_attn.cute import flash_attn_func

    return _flash_attn("fa4", "FlashAttention-4", "flash-attn-4",
                       flash_attn_func)  # fmt: skip


def _flash_attn(name: str, label: str, package: str, call) -> Runner:
    def attend(cell, q, k, v):
        out = call(q, k, v, causal=cell.causal)
        return out[0] if isinstance(out, tuple) else out  # and lse

    with contextlib.suppress(metadata.PackageNotFoundError):
        label = f"{label} {metadata.version(package)}"
    return Runner(name, label, with_autograd(attend, contextlib.nullcontext))


def _flashinfer() -> Runner:
    import flashinfer

    def prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        if cell.direction == "backward":
            raise Absent("FlashInfer has no backward pass")
        q, k, v = (
            torch.from_dlpack(x).flatten(0, 1) for x in inputs[:3]
        )  # (tokens of all sequences, heads, head_dim)
        starts = torch.arange(
            0, (cell.batch + 1) * cell.seqlen, cell.seqlen,
            dtype=torch.int32, device=q.device,
        )  # fmt: skip
        room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(room, "NHD")
        wrapper.plan(
            starts, starts, cell.heads, cell.heads // cell.group_size,
            cell.head_dim, causal=cell.causal, q_data_type=q.dtype,
        )  # fmt: skip

        def call():
            out, _ = wrapper.run(q, k, v, return_lse=True)
            return (out.reshape(cell.shape),)

        return call

    return Runner(
        "flashinfer", f"FlashInfer {flashinfer.__version__}", prepare
    )
