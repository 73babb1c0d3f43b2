"""A GPU as a place where calls run, and what only a GPU has.

CUDA graphs, streams, times.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.api.arrays import on_cuda
from cuflash.check import run
from cuflash.check.calls import Call
from cuflash.plans.plan import Device

VARIABLE = "CUFLASH_FAMILY"
_WARM_CALLS = 2


class Gpu:
    """CUDA device `index`, by CuPy."""

    name = "any"

    def __init__(self, index: int) -> None:
        self.index = index
        self.backend: Any = on_cuda()
        self.cupy: Any = self.backend.cupy
        self._family: str | None = os.environ.get(VARIABLE)

    def device(self) -> Device:
        """What plans depend on; UnsupportedError if it is too old."""
        found: Device = self.backend.device(self.index)
        return found

    def current(self) -> Any:
        return self.cupy.cuda.Device(self.index)

    def put(self, array: np.ndarray) -> Any:
        with self.current():
            return self.cupy.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        found: np.ndarray = self.cupy.asnumpy(array)
        return found

    @contextlib.contextmanager
    def by(self, call: Call) -> Iterator[None]:
        """The family is asked for as users do, by the environment.

        Backends read the variable when they are made.
        """
        if call.family != self._family:
            os.environ.pop(VARIABLE, None)
            if call.family:
                os.environ[VARIABLE] = call.family
            self.backend.forget_backends()
            made = self.backend.backend(self.index)
            if made.family != call.family:
                raise RuntimeError(
                    f"{call.family} was asked for, not {made.family}"
                )
            self._family = call.family
        with self.current():
            yield

    def poison(self) -> None:
        """Fill free blocks of CuPy's pool, of several sizes, with NaN."""
        sizes = [1 << 9, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
        with self.current():
            # All bits 1 are NaN in every dtype.
            blocks = [self.cupy.full(x, 0xFF, np.uint8) for x in sizes]
        del blocks

    def is_lost(self, error: Exception) -> bool:
        """Whether no later call can run, as after an illegal address."""
        try:
            with self.current():
                self.cupy.cuda.runtime.deviceSynchronize()
                self.cupy.zeros(1).get()
        except RuntimeError:
            return True
        return False

    # ---- graphs and streams ----

    def replayed(self, call: Call, other: Call) -> dict[str, np.ndarray]:
        """The results of `other` by a graph that was captured of `call`.

        Between them the inputs are replaced, and the results poisoned.
        """
        cupy = self.cupy
        given, arrays = run.placed(call, self)
        _, others = run.placed(other, self)
        with self.by(call):
            stream = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
            with stream:
                # Compiles, and fills the pool: a graph cannot allocate.
                run.launch(call, arrays, given)
                stream.synchronize()
                stream.begin_capture()
                results = run.launch(call, arrays, given)
                graph = stream.end_capture()
                for name, array in arrays.items():
                    array.data.copy_from_device_async(
                        others[name].data, array.nbytes, stream
                    )
                for result in results.values():
                    result.data.memset_async(0xFF, result.nbytes, stream)
                graph.launch(stream)
                stream.synchronize()
            return {x: self.get(y) for x, y in results.items()}

    def on_two_streams(
        self, calls: tuple[Call, Call]
    ) -> list[dict[str, np.ndarray]]:
        """The results of two calls, queued in turns on two streams."""
        cupy = self.cupy
        placed = [run.placed(call, self) for call in calls]
        with self.by(calls[0]):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in calls]
            cupy.cuda.Device().synchronize()
            results: list[Mapping[str, Any]] = [{}, {}]
            for _ in range(4):
                for i, stream in enumerate(streams):
                    given, arrays = placed[i]
                    with stream:
                        results[i] = run.launch(calls[i], arrays, given)
            for stream in streams:
                stream.synchronize()
            return [{x: self.get(y) for x, y in r.items()} for r in results]

    # ---- times ----

    def seconds(self, work: Callable[[], Any], at_least: float) -> float:
        """The time of a call on the GPU, queued again and again."""
        with self.current():
            for _ in range(_WARM_CALLS):
                work()
            once = max(self._elapsed(work, 1), 1e-6)
            count = int(min(max(at_least / once, 3), 200))
            return self._elapsed(work, count) / count

    def _elapsed(self, work: Callable[[], Any], count: int) -> float:
        event = self.cupy.cuda.Event
        start, stop = event(), event()
        start.record()
        for _ in range(count):
            work()
        stop.record()
        stop.synchronize()
        milliseconds = self.cupy.cuda.get_elapsed_time(start, stop)
        return float(milliseconds) / 1e3

    def clock(self) -> float | None:
        """The highest clock of its SMs in Hz, if the driver tells."""
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.index)
        kilohertz = properties.get("clockRate")
        if not kilohertz:
            attributes = self.cupy.cuda.Device(self.index).attributes
            kilohertz = attributes.get("ClockRate")
        return 1e3 * kilohertz if kilohertz else None


def other_values(call: Call) -> Call:
    """The same call with other numbers."""
    values = "peaked" if call.values == "coded" else "coded"
    return replace(call, values=values)
