"""Peak extra memory, at a length where a score matrix would dominate."""

from __future__ import annotations

from typing import Any

from device_memory import peak_bytes

from .cells import Cell
from .runners import OURS, Inputs, Runner, make_inputs

SEQLEN = 65536


def peaks(dtype: str, head_dim: int, peers: list[Runner]) -> list[dict]:
    """Return a row for each direction: peak bytes beyond the inputs.

    Includes the results: out and lse, or dq, dk and dv.
    """
    rows = []
    heads = 2048 // head_dim
    for direction in ("forward", "backward"):
        cell = Cell(direction, dtype, head_dim, True, SEQLEN, 1, heads)
        inputs = make_inputs(cell, 0)
        row: dict[str, Any] = {
            "direction": direction,
            "dtype": dtype,
            "head_dim": head_dim,
            "heads": heads,
            "seqlen": SEQLEN,
            "q_bytes": inputs.q.nbytes,
            "row_of_float32_bytes": 4 * heads * SEQLEN,
            "pairs_bytes": inputs.q.itemsize * heads * SEQLEN**2,
            "peak_bytes": {OURS.name: _our_peak(cell, inputs)},
        }
        for peer in peers:
            row["peak_bytes"][peer.name] = _torch_peak(peer, cell, inputs)
        rows.append(row)
    return rows


def _our_peak(cell: Cell, inputs: Inputs) -> int:
    call = OURS.prepare(cell, inputs)
    call()  # compiles
    return peak_bytes(call)


def _torch_peak(peer: Runner, cell: Cell, inputs: Inputs) -> int | None:
    import torch

    try:
        with peer.context():
            call = peer.prepare(cell, inputs)
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            return torch.cuda.max_memory_allocated() - before
    except RuntimeError:
        return None
