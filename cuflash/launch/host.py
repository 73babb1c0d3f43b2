"""The `Runner` of calls on NumPy arrays: they fail where all GPUs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cuflash.backends.base import Runner
from cuflash.plans import plan
from cuflash.request.problem import Call

_Results = TypeVar("_Results")


class Host:
    """Runs checked calls by NumPy, which has no plans to make."""

    def __init__(self, numpy: Runner) -> None:
        self.forward = _planned(numpy.forward)
        self.backward = _planned(numpy.backward)
        self.jvp = _planned(numpy.jvp)
        self.double_backward = _planned(numpy.double_backward)
        self.merge_states = numpy.merge_states
        self.apply_rotary = numpy.apply_rotary
        self.forward_kvcache = numpy.forward_kvcache
        self.finish = numpy.finish


def _planned(run: Callable[[Call], _Results]) -> Callable[[Call], _Results]:
    """It fails where no GPU has a plan."""

    def planned(call: Call) -> _Results:
        plan.check(call.problem)
        return run(call)

    return planned
