"""Forces calls of cuflash to use a given tile.

No argument of a call selects a tile; block_q and block_k leave many. A call's
plan follows from its problem, its device and the family that its backend
prefers, and the family is part of the key of cached recipes. So a `Forced`
replaces the family.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash.launch import recipe
from cuflash.plans import plan as planning
from cuflash.plans.plan import Device, Plan
from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem


class Forced(NamedTuple):
    """A family, and the tile of one direction; the other keeps its own."""

    family: str
    direction: str
    tile: Tile


def force(choice: Forced | None) -> None:
    """Make all later calls on CuPy's current device use a choice."""
    import cupy

    from cuflash.backends import cupy as gpu

    recipe.plan = _plan
    gpu.backend(cupy.cuda.Device().id).family = choice


def _plan(problem: Problem, device: Device, wanted: Forced | None) -> Plan:
    if wanted is None:
        return planning.plan(problem, device)
    tile = wanted.tile if problem.direction == wanted.direction else None
    return planning.plan(problem, device, wanted.family, tile)
