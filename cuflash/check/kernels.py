"""Which kernels calls launch on a device, found without a GPU.

Calls run on a backend that notes their launches and launches nothing; their
results are memory that nobody wrote. So all kernels can be compiled before the
first call, several at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cuflash.backends import emulator
from cuflash.build import nvrtc, parallel
from cuflash.check import run
from cuflash.check.calls import Call
from cuflash.check.places import Cpu
from cuflash.errors import CuflashError, UnsupportedError
from cuflash.plans.plan import Device, FamilyName, KernelPlan, Plan


class _Notebook:
    """Stands for an emulator whose device is the real one."""

    def __init__(self, device: Device, family: FamilyName | None) -> None:
        self.of, self.family = device, family
        self.plans: list[Plan] = []

    def device(self) -> Device:
        return self.of

    def load(self, plan: Plan) -> tuple[Any, ...]:
        self.plans.append(plan)
        return ()

    def backend(self) -> Any:
        from cuflash.backends.emulator.machine import Machine

        target: Any = self

        class Noting(Machine):
            def launch(self, loaded: Any, arguments: bytes, kind: Any) -> None:
                pass

        return Noting(target)


class Planned(NamedTuple):
    """The calls that a device can run, and their kernels.

    Attributes
    ----------
    calls : list of Call
    kernels : list of KernelPlan
    missing : dict
        Of (family, dtype) without any call, why.
    """

    calls: list[Call]
    kernels: list[KernelPlan]
    missing: dict[tuple[str, str], str]


def planned(calls: Iterable[Call], device: Device) -> Planned:
    """Plan calls; those that the family wanted does not run are left out."""
    found: list[Call] = []
    kernels: dict[KernelPlan, None] = {}
    missing: dict[tuple[str, str], str] = {}
    for call in calls:
        if call.is_converted and device.multiplies(call.dtype):
            continue  # no GPU with tensor cores for it lacks that
        key = (str(call.family), call.kind)
        plans, why = _plans(call, device)
        of_tiles = {x.family for x in plans if x.tile}
        if not why and call.family and call.family not in of_tiles:
            why = f"runs by {', '.join(sorted(of_tiles))}"
        if why:
            missing.setdefault(key, why)
            continue
        found.append(call)
        kernels |= dict.fromkeys(k for x in plans for k in x.kernels)
    with_calls = {(str(call.family), call.kind) for call in found}
    left = {x: y for x, y in missing.items() if x not in with_calls}
    return Planned(found, list(kernels), left)


def _plans(call: Call, device: Device) -> tuple[list[Plan], str]:
    """The plans of a call, or why there are none."""
    notebook: Any = _Notebook(device, call.family)
    token = emulator._current.set(notebook)
    try:
        given, arrays = run.placed(call, Cpu())
        run.launch(call, arrays, given)
    except UnsupportedError as error:
        return [], str(error)
    finally:
        emulator._current.reset(token)
    return notebook.plans, ""


def compile_all(
    kernels: Iterable[KernelPlan], device: Device, jobs: int
) -> Iterator[CuflashError | None]:
    """Compile kernels into the cache; yields once for each, with its error."""
    tasks = [(kernel, device.arch) for kernel in kernels]
    for *_, result in parallel.in_threads(nvrtc.cubin_file, tasks, jobs):
        yield result if isinstance(result, CuflashError) else None
