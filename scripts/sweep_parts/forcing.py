"""Forces calls of cuflash to use a given tile.

No argument of a call asks for a tile, and none should: block_q and block_k
leave many. What a call is decided by is its problem, its device and the
family that its backend was asked for, and recipes are remembered by the last
one too. So a `Forced` takes its place.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash import execute
from cuflash import plan as planning
from cuflash.plan import Device, Plan
from cuflash.problem import Problem
from cuflash.tiles import Tile


class Forced(NamedTuple):
    """A family, and one direction's tile. The other has its own."""

    family: str
    direction: str
    tile: Tile


def force(choice: Forced | None) -> None:
    """Make all further calls on CuPy's current device use a choice."""
    import cupy

    from cuflash.backends import cupy as gpu

    execute.plan = _plan
    gpu.backend(cupy.cuda.Device().id).family = choice


def _plan(problem: Problem, device: Device, wanted: Forced | None) -> Plan:
    if wanted is None:
        return planning.plan(problem, device)
    tile = wanted.tile if problem.direction == wanted.direction else None
    return planning.plan(problem, device, wanted.family, tile)
