"""A user's own score_mod and mask_mod: which kernels depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuflash.expressions import derivative, nodes
from cuflash.expressions.reals import SHORT
from cuflash.expressions.text import Moves, text
from cuflash.plans.tiles import Tile
from cuflash.request import mod_tangents
from cuflash.request.problem import Problem

from .kernel import KernelPlan, Launch, Plan
from .rounding import ceil_div
from .workspace import Buffer

_INCLUDES = """\
#include "score/mod_arrays.cuh"
#include "score/visibility.cuh"

"""
_OF_GRADIENTS = '#include "score/array_gradients.cuh"\n\n'


def has_expression(problem: Problem) -> bool:
    """Whether a call has a function of the user's."""
    return not (problem.score_mod is problem.mask_mod is None)


def tiles_of_slopes(problem: Problem) -> int:
    """The tiles of numbers that a double backward keeps of slopes.

    Slopes that differ from pair to pair, and how they move; scores before f
    and their tangents, if arrays have second gradients by these.
    """
    score = problem.score_mod
    if score is None or derivative.slope(score).is_constant:
        return 0
    return 4 if problem.return_dmod else 2


def sums_exactly(problem: Problem) -> bool:
    """Whether gradients of arrays are sums of score/exact_sums.cuh."""
    return problem.deterministic and bool(problem.return_dmod)


def keys_in_order(problem: Problem) -> bool:
    """Whether the columns of a kernel's tiles are neighbouring keys.

    Keys that the gradient of `weights` chooses are not.
    """
    return problem.readout is None or problem.readout.keys is None


# The words of score/exact_sums.cuh by the sums' dtype.
_WORDS = {"float32": 13, "float64": 89}


def bytes_of_sum(problem: Problem) -> int:
    """The workspace of an element's exact sum."""
    return 8 * _WORDS[problem.lse_dtype]


def count_tile_flags(problem: Problem, tile: Tile) -> int:
    """The flags of score/expression_flags.cuh; 0 without any."""
    graph = problem.mask_mod
    if graph is None or problem.num_sequences is not None:
        return 0
    of_groups = problem.direction.endswith("backward")
    heads = problem.num_heads_kv if of_groups else problem.num_heads_q
    count = (heads if "h" in graph.depends else 1) * (
        problem.batch if "b" in graph.depends else 1
    )
    q_tiles = ceil_div(problem.seqlen_q, tile.block_q)
    return count * q_tiles * ceil_div(problem.seqlen_k, tile.block_k)


# What kernels find out about a user's mask, and the buffers that they leave.
_FINDERS = "prepare/tile_flags.cu", "prepare/segment_order.cu"
_FOUND = "tile_flags", "mask_bits", "tile_order"


def found_of_mask(plan: Plan) -> tuple[Buffer, ...]:
    """The buffers that calls with the same mask may share, if any.

    Of calls with segment ids none: the order of tiles depends on these too.
    """
    names = {x.name for x in plan.workspace}
    if "tile_flags" not in names or plan.problem.segment_ids:
        return ()
    return tuple(x for x in plan.workspace if x.name in _FOUND)


def key_of_found(plan: Plan) -> tuple[Any, ...]:
    """What these depend on, but for the device and what the mask reads."""
    p = plan.problem
    sizes = p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.num_heads_kv
    finders = (x for x in plan.launches if x.kernel.file in _FINDERS)
    return p.direction, p.window, *sizes, *finders


def after_found(plan: Plan) -> Plan:
    """The plan of a call for which these buffers are filled already."""
    launches = tuple(x for x in plan.launches if x.kernel.file not in _FINDERS)
    counts = "tile_counter" in {x.name for x in plan.workspace}
    if counts and plan.problem.direction == "forward":
        (of_flags,) = (
            x.constants for x in plan.kernels if x.file == _FINDERS[0]
        )
        own = (x for x in of_flags if x[0] in ("Element", "Arguments"))
        constants = (*own, ("NUM_THREADS", 32))
        file = "prepare/tile_counter.cu"
        clear = Launch(KernelPlan(file, "tile_counter", constants, 32), 1)
        launches = clear, *launches
    return replace(plan, launches=launches)


def with_text(plan: Plan) -> Plan:
    """The plan with the texts of its kernels' expressions.

    A kernel that does not depend on a function is compiled without it.
    """
    if not has_expression(plan.problem):
        return plan
    launches = (
        replace(launch, kernel=_with_text(plan.problem, launch.kernel))
        for launch in _with_sums(plan)
    )
    return replace(plan, launches=tuple(launches))


# Of the kernels that clear and round exact sums; their blocks share these.
_SUM_THREADS, _SUM_BLOCKS = 256, 128


def _with_sums(plan: Plan) -> tuple[Launch, ...]:
    """The launches; with exact sums, what clears and what rounds these."""
    if not sums_exactly(plan.problem):
        return plan.launches
    (of_main,) = {
        tuple(x for x in kernel.constants if x[0] in ("Element", "Arguments"))
        for kernel in plan.kernels
        if ("DMOD", True) in kernel.constants
    }

    def launch(file: str, entry: str) -> Launch:
        constants = (("NUM_THREADS", _SUM_THREADS), *of_main)
        kernel = KernelPlan(file, entry, constants, _SUM_THREADS)
        return Launch(kernel, _SUM_BLOCKS)

    return (
        launch("prepare/clear_array_sums.cu", "clear_array_sums"),
        *plan.launches,
        launch("finish/array_gradients.cu", "round_array_gradients"),
    )


# Reads a mask's flags and calls no mask.
_ORDERS_TILES = "prepare/segment_order.cu"


def _one_of_its_flags(graph: nodes.Node) -> nodes.Node:
    """A mask_mod whose flags have the same shape.

    Kernels that read these alone are the same for all of them.
    """
    axes = [nodes.index(x) for x in ("b", "h") if x in graph.depends]
    if not axes:
        return nodes.constant(True)
    return nodes.make("equal", "bool", (axes[0], axes[-1]))


def _moves(problem: Problem) -> Moves | None:
    """How scores move; None without a derivative along directions."""
    tangents = problem.tangents
    if tangents is None:
        return None
    moving = tangents.of if tangents.count else ()
    twice = problem.direction == "double_backward"
    return Moves(mod_tangents.slots_of(moving), twice)


def _with_text(problem: Problem, kernel: KernelPlan) -> KernelPlan:
    has = {name for name, value in kernel.constants if value is True}
    if has.isdisjoint(("SCORE_MOD", "MASK_MOD")):
        return kernel
    graph = problem.mask_mod if "MASK_MOD" in has else None
    if graph is not None and kernel.file == _ORDERS_TILES:
        graph = _one_of_its_flags(graph)
    own = text(
        problem.score_mod if "SCORE_MOD" in has else None,
        graph,
        problem.mod_arrays,
        problem.return_dmod if "DMOD" in has else (),
        max(problem.seqlen_q, problem.seqlen_k) <= SHORT,
        sums_exactly(problem),
        _moves(problem) if "SCORE_MOD" in has else None,
        "DMOD" in has and not keys_in_order(problem),
    )
    sums = _OF_GRADIENTS if "DMOD" in has else ""
    return replace(kernel, expression=_INCLUDES + sums + own)
