"""The `Runner` of calls on NumPy arrays: they fail where all GPUs do."""

from __future__ import annotations

from typing import Any

from cuflash.backends.base import Runner
from cuflash.plans import plan
from cuflash.request.problem import Call


class Host:
    """Runs checked calls by NumPy, which has no plans to make."""

    def __init__(self, numpy: Runner) -> None:
        self._numpy = numpy
        self.merge_states = numpy.merge_states
        self.apply_rotary = numpy.apply_rotary
        self.forward_kvcache = numpy.forward_kvcache
        self.finish = numpy.finish

    def forward(self, call: Call) -> tuple[Any, ...]:
        """Out, lse, and max_score if asked for."""
        plan.check(call.problem)
        return self._numpy.forward(call)

    def backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dv; those of logits if wanted."""
        plan.check(call.problem)
        return self._numpy.backward(call)

    def jvp(self, call: Call) -> tuple[Any, ...]:
        """Out, lse, out_dot, lse_dot; the last two by direction."""
        plan.check(call.problem)
        return self._numpy.jvp(call)

    def double_backward(self, call: Call) -> tuple[Any, ...]:
        """d2q, d2k, d2v, ddout; of logits and lse if wanted."""
        plan.check(call.problem)
        return self._numpy.double_backward(call)

    def readout(self, call: Call) -> Any:
        """Weights, their sums or entropies."""
        plan.check(call.problem)
        return self._numpy.readout(call)

    def readout_backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dlse; that of row weights if wanted."""
        plan.check(call.problem)
        return self._numpy.readout_backward(call)
