"""What plans are made for, and of: devices, kernels, launches.

Pure values: how they come about is `cuflash.plan`'s and the families'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from cuflash.problem import Problem
from cuflash.tiles import Tile
from cuflash.workspace import Buffer

from .rounding import round_up

Family = Literal["wgmma", "mma", "fma", "dmma", "tf32x3", "simt"]


@dataclass(frozen=True)
class Device:
    """A GPU, as far as plans depend on it.

    Attributes
    ----------
    arch : str
        As ``sm_90a``.
    num_sms : int
        Streaming multiprocessors.
    shared_bytes : int
        Shared memory that one block may ask for.
    l2_bytes : int
        Second-level cache.
    """

    arch: str
    num_sms: int = 108
    shared_bytes: int = 99 * 1024
    l2_bytes: int = 40 << 20

    @property
    def capability(self) -> int:
        """Compute capability without the dot: 90 of ``sm_90a``."""
        return int("".join(c for c in self.arch if c.isdigit()))


# Shared memory that a block may have, by compute capability (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability").
SHARED_KIB = {
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}


def device_of_arch(arch: str) -> Device:
    """A device of an architecture that is not at hand, for compiling."""
    device = Device(arch)
    shared = SHARED_KIB.get(device.capability, 99)
    return replace(device, shared_bytes=shared * 1024)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel with all its compile-time constants.

    Attributes
    ----------
    file, entry : str
        The file in ``kernels/`` and its ``__global__`` function.
    constants : tuple of (str, bool | int | str)
        The generated block at the top of its text.
    threads : int
        Of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    ptxas_level : int
        The assembler's optimisation level, 3 by default: see `tiles.Tile`.
    """

    file: str
    entry: str
    constants: tuple[tuple[str, bool | int | str], ...]
    threads: int
    shared_bytes: int
    ptxas_level: int = 3


@dataclass(frozen=True)
class Launch:
    """A kernel and the number of its blocks."""

    kernel: KernelPlan
    blocks: int


class StaticSchedule(NamedTuple):
    """How tiles are dealt to blocks that take one after another.

    Attributes
    ----------
    pairs, singles : int
        Of a head: pairs of a long and a short tile, and single tiles.
    paired_items, items : int
        Of all heads: pairs; pairs and single tiles.
    """

    pairs: int
    singles: int
    paired_items: int
    items: int


@dataclass(frozen=True)
class Plan:
    """All that is decided about a problem.

    Attributes
    ----------
    problem : Problem
    family : str
        ``"wgmma"`` (16-bit types, Hopper's warpgroups), ``"mma"`` (16-bit
        types, any tensor cores), ``"fma"`` (float32), ``"tf32x3"`` (float32
        in parts, tensor cores), ``"dmma"`` (float64, tensor cores) or
        ``"simt"`` (any, plainly: where no other family runs).
    tile : Tile or None
        None for "merge", which has no tiles.
    launches : tuple of Launch
        In order.
    heads_per_section : int
        How many heads walk their tiles side by side (common/scheduler.cuh).
    work_items : StaticSchedule or None
        Of a kernel whose blocks take one tile after another.
    workspace : tuple of Buffer
        Scratch memory of its kernels.
    """

    problem: Problem
    family: Family
    tile: Tile | None
    launches: tuple[Launch, ...]
    heads_per_section: int = 1
    work_items: StaticSchedule | None = None
    workspace: tuple[Buffer, ...] = ()

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """The kernels of its launches."""
        return tuple(launch.kernel for launch in self.launches)

    def __str__(self) -> str:
        p = self.problem
        shape = (
            f"batch {p.batch} seqlen {p.seqlen_q} x {p.seqlen_k} heads"
            f" {p.num_heads_q}/{p.num_heads_kv} head_dim"
            f" {p.head_dim}/{p.head_dim_v} {p.dtype}"
        )
        kernels = " + ".join(
            f"{x.kernel.entry} ({x.blocks} blocks of {x.kernel.threads}"
            f" threads, {x.kernel.shared_bytes} bytes)"
            for x in self.launches
        )
        causal = " causal" if p.causal else ""
        causal += "".join(f" {name}" for name in p.options)
        tile = f" [{self.tile}]" if self.tile else ""
        return f"{p.direction} {shape}{causal}: {kernels}{tile}"


# Warps and blocks that a multiprocessor holds at most (the same table).
_WARPS_AND_BLOCKS = {75: (32, 16), 80: (64, 32), 86: (48, 16), 87: (48, 16),
                     89: (48, 24), 90: (64, 32), 100: (64, 32),
                     103: (64, 32), 110: (48, 24), 120: (48, 24),
                     121: (48, 24)}  # fmt: skip


_REGISTERS_OF_SM = 64 * 1024


_RESERVED_SHARED = 1024  # of each block, by the driver, from 8.0 on


def occupancy(
    kernel: KernelPlan, registers: int, device: Device
) -> tuple[int, float]:
    """How much of a kernel a multiprocessor holds at once.

    Parameters
    ----------
    kernel : KernelPlan
    registers : int
        Of a thread, as the compiler says.
    device : Device

    Returns
    -------
    blocks : int
    share : float
        Their warps over those that there is room for.
    """
    most_warps, most_blocks = _WARPS_AND_BLOCKS.get(
        device.capability, (48, 16)
    )
    warps = kernel.threads // 32
    of_warp = round_up(registers * 32, 256)  # as they are given out
    shared = device.shared_bytes + _RESERVED_SHARED
    blocks = min(
        most_blocks,
        most_warps // warps,
        _REGISTERS_OF_SM // of_warp // warps,
        shared // (kernel.shared_bytes + _RESERVED_SHARED),
    )
    return blocks, blocks * warps / most_warps


class Maker(NamedTuple):
    """How a family's kernels of one direction are planned.

    Attributes
    ----------
    plan : callable
        (problem, device, tile) to the Plan.
    shared_bytes : callable
        (problem, tile) to the shared memory of the block that needs most.
    fits : callable
        (problem, tile) to whether the tile is one that the kernels know and
        have registers for.
    """

    plan: Callable[[Problem, Device, Tile], Plan]
    shared_bytes: Callable[[Problem, Tile], int]
    fits: Callable[[Problem, Tile], bool]
