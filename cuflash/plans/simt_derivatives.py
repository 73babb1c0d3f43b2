"""Plans of the simt kernels of derivatives: any dtype, head dim and GPU."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .record import FamilyName
from .simt import (
    REGISTERS,
    by_queries,
    fits,
    forward_shared,
    gradients,
    kernel_of,
    sizes,
)


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    return 2 * forward_shared(problem, tile)


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether a thread's sums of O and O' stay in registers."""
    if tile.num_warps * 32 % tile.block_q:
        return False
    size, _, dv = sizes(problem, tile, tile.block_q)
    columns = 2 * dv * tile.block_q // (tile.num_warps * 32)
    return columns * size // 4 <= REGISTERS


def recompute_launch(kernel: KernelPlan, tiles: int, device: Device) -> Launch:
    """Of a kernel of flagged tiles, almost all of which are not."""
    return Launch(kernel, min(tiles, 2 * device.num_sms))


def jvp_kernel(
    problem: Problem, tile: Tile, planned_by: FamilyName | None = None
) -> KernelPlan:
    """The kernel of a JVP; in another family's plan, of flagged rows."""
    return kernel_of(
        problem, tile, tile.block_q, _jvp_shared(problem, tile),
        ("ONLY_FLAGGED", planned_by is not None), planned_by=planned_by,
    )  # fmt: skip


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    return by_queries(problem, tile, jvp_kernel(problem, tile))


def _dkdv_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_k)
    return size * (
        tile.block_k * (2 * d + 2 * dv + 4)
        + tile.block_q * (2 * d + dv + 3)
        + 3 * tile.block_k * (tile.block_q + 1)
        + 4 * tile.block_q
    )


def _dq_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_q)
    return size * (
        tile.block_k * (2 * d + 2 * dv + 4)
        + tile.block_q * (2 * d + dv + 3)
        + 2 * tile.block_q * (tile.block_k + 1)
    )


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    return max(_dkdv_shared(problem, tile), _dq_shared(problem, tile))


def double_backward_kernels(
    problem: Problem, tile: Tile, planned_by: FamilyName | None = None
) -> tuple[KernelPlan, KernelPlan]:
    """Of d2k and d2v, and of d2q; in another's plan, of flagged tiles."""
    flagged = ("ONLY_FLAGGED", planned_by is not None)
    dkdv = kernel_of(
        problem, tile, tile.block_k, _dkdv_shared(problem, tile), flagged,
        part="_dkdv", planned_by=planned_by,
    )  # fmt: skip
    dq = kernel_of(
        problem, tile, tile.block_q, _dq_shared(problem, tile), flagged,
        part="_dq", planned_by=planned_by,
    )  # fmt: skip
    return dkdv, dq


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return gradients(problem, tile, *double_backward_kernels(problem, tile))


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(_double_backward, _double_backward_shared, fits)
