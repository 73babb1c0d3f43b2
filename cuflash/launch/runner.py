"""The `Runner` that runs calls by kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash.backends.base import Backend
from cuflash.launch import attention, derivatives, kvcache, readouts, rows
from cuflash.request.problem import Call


class Kernels:
    """Runs checked calls by kernels: a `backends.base.Runner`."""

    def __init__(
        self, backend: Backend, finish: Callable[[], None] | None = None
    ) -> None:
        self.backend = backend
        self._finish = finish

    def forward(self, call: Call) -> tuple[Any, ...]:
        """Out in full rank, lse or None, and max_score if asked for."""
        return attention.forward(call, self.backend)

    def backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dv in full rank; those of options if wanted."""
        return attention.backward(call, self.backend)

    def merge_states(self, call: Call) -> tuple[Any, Any]:
        """Out and lse in full rank."""
        return rows.merge_states(call, self.backend)

    def apply_rotary(self, call: Call) -> Any:
        """Out in full rank."""
        return rows.apply_rotary(call, self.backend)

    def forward_kvcache(self, call: Call) -> tuple[Any, Any]:
        """Out in full rank and, if wanted, lse."""
        return kvcache.forward_kvcache(call, self.backend)

    def jvp(self, call: Call) -> tuple[Any, ...]:
        """Out, lse, out_dot, lse_dot; the last two by direction."""
        return derivatives.jvp(call, self.backend)

    def finish(self) -> None:
        """Let other libraries go on with their arrays after this call."""
        if self._finish is not None:
            self._finish()

    def double_backward(self, call: Call) -> tuple[Any, ...]:
        """d2q, d2k, d2v, ddout; of options, and ddlse, if wanted."""
        return derivatives.double_backward(call, self.backend)

    def readout(self, call: Call) -> Any:
        """Weights, their sums or entropies, in full rank."""
        return readouts.readout(call, self.backend)

    def readout_backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dlse in full rank; drow_weights if wanted."""
        return readouts.readout_backward(call, self.backend)
