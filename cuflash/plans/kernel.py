"""The values of plans: devices, kernels, launches, schedules.

`plans.plan` and the families' modules compute them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem

from .record import FAMILIES, Family, FamilyName
from .rounding import round_up

OLDEST_WITH_CP_ASYNC = 80  # compute capability


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that plans depend on.

    Attributes
    ----------
    arch : str
        Such as ``sm_90a``.
    num_sms : int
        Streaming multiprocessors (SMs).
    shared_bytes : int
        The most shared memory that one block may use.
    l2_bytes : int
        The size of the L2 cache.
    name : str or None
        The driver's name of the GPU; None: one that stands for any of its
        architecture.
    bandwidth : int or None
        The peak bandwidth of its memory in GB/s.
    """

    arch: str
    num_sms: int = 108
    shared_bytes: int = 99 * 1024
    l2_bytes: int = 40 << 20
    name: str | None = None
    bandwidth: int | None = None

    @property
    def capability(self) -> int:
        """Compute capability without the dot: 90 of ``sm_90a``."""
        return _capability(self.arch)

    def multiplies(self, dtype: str) -> bool:
        """Whether its tensor cores multiply numbers of this 16-bit type."""
        return self.capability >= {"float16": 75, "bfloat16": 80}[dtype]

    @property
    def copies_at_once(self) -> bool:
        """Whether it has no cp.async: stages would load nothing ahead."""
        return self.capability < OLDEST_WITH_CP_ASYNC

    @property
    def reserved_bytes(self) -> int:
        """Shared memory of each block for the driver, besides its own."""
        return 1024 if self.capability >= 80 else 0

    def blocks_by_shared(self, shared: int) -> int:
        """Blocks of an SM at once, each with so much shared memory."""
        whole = self.shared_bytes + self.reserved_bytes
        return whole // (shared + self.reserved_bytes)


@functools.cache
def _capability(arch: str) -> int:
    return int("".join(c for c in arch if c.isdigit()))


# The most shared memory of a block in KiB, by compute capability (CUDA C++
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
    """A typical device of an architecture, for compiling without the GPU."""
    device = Device(arch)
    shared = SHARED_KIB.get(device.capability, 99)
    return replace(device, shared_bytes=shared * 1024)


# A constant's name and value: a type's name, if it is a str.
Constant: TypeAlias = tuple[str, bool | int | str]


@dataclass(frozen=True)
class KernelPlan:
    """One kernel with all its compile-time constants.

    Attributes
    ----------
    file, entry : str
        The file in ``kernels/`` and its ``__global__`` function.
    constants : tuple of Constant
        The generated constants at the top of its text.
    threads : int
        Threads of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    ptxas_level : int
        The optimisation level of ptxas, 3 by default: see `tiles.Tile`.
    expression : str
        The text of score/expression.cuh, for calls with a user's own
        functions.
    """

    file: str
    entry: str
    constants: tuple[Constant, ...]
    threads: int
    shared_bytes: int = 0
    ptxas_level: int = 3
    expression: str = ""


@dataclass(frozen=True)
class Launch:
    """A kernel and the number of its blocks.

    Attributes
    ----------
    kernel : KernelPlan
    blocks : int
    overlaps : bool
        Whether it may start before the launch before it has ended, for whose
        results it waits itself (programmatic dependent launch).
    """

    kernel: KernelPlan
    blocks: int
    overlaps: bool = False


# No section has more heads than others: the largest int of CUDA.
EVEN_SECTIONS = 2**31 - 1


class StaticSchedule(NamedTuple):
    """The work items of persistent blocks, for the static tile scheduler.

    Attributes
    ----------
    pairs, singles : int
        Per head: pairs of a long and a short tile, and single tiles.
    paired_items, items : int
        Over all heads: pairs of persistent blocks; these and single tiles.
    """

    pairs: int
    singles: int
    paired_items: int
    items: int


@dataclass(frozen=True)
class Plan:
    """The decisions about a problem.

    Attributes
    ----------
    problem : Problem
    family : str
        ``"sm90"`` (16-bit types, Hopper), ``"sm80"`` (16-bit types, tensor
        cores from sm_80 on, float16 from sm_75 on), ``"decode"`` (the same
        for few queries and many keys, forward), ``"decode_sm90"`` (more
        queries, Hopper),
        ``"decode_simt"`` (few queries of other types and of wide heads, CUDA
        cores), ``"fma"`` (float32), ``"mma8_float32"`` (float32 split into
        TF32 parts, tensor cores), ``"mma8_float64"`` (float64, tensor cores)
        or ``"simt"`` (everything else; CUDA cores, not optimised).
    tile : Tile or None
        None for "merge" and "rotary", which have no tiles.
    launches : tuple of Launch
        In order.
    heads_per_section : int
        The number of heads whose tiles run concurrently
        (common/scheduler.cuh).
    last_section : int
        The section of all heads that are left, however many, or
        ``EVEN_SECTIONS``: none has more than `heads_per_section`.
    work_items : StaticSchedule or None
        The schedule of a kernel with persistent blocks.
    workspace : tuple of Buffer
        The workspace of its kernels.
    num_splits : int
        The number of parts into which decode kernels cut the keys; if parts
        are balanced (decode/parts.cuh), the number of blocks.
    after_forward : bool
        jvp: whether its kernels read out and lse, which a forward call
        computes before.
    """

    problem: Problem
    family: FamilyName
    tile: Tile | None
    launches: tuple[Launch, ...]
    heads_per_section: int = 1
    last_section: int = EVEN_SECTIONS
    work_items: StaticSchedule | None = None
    workspace: tuple[Buffer, ...] = ()
    num_splits: int = 1
    after_forward: bool = False

    @property
    def record(self) -> Family:
        """What is true of its family's kernels."""
        return FAMILIES[self.family]

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


# The most warps and blocks resident on an SM (same table).
_WARPS_AND_BLOCKS = {75: (32, 16), 80: (64, 32), 86: (48, 16), 87: (48, 16),
                     89: (48, 24), 90: (64, 32), 100: (64, 32),
                     103: (64, 32), 110: (48, 24), 120: (48, 24),
                     121: (48, 24)}  # fmt: skip


_REGISTERS_OF_SM = 64 * 1024


def shared_bytes_of_block(device: Device, blocks_per_sm: int) -> int:
    """The most shared memory of a block, if an SM has that many."""
    whole = device.shared_bytes + device.reserved_bytes
    return whole // blocks_per_sm - device.reserved_bytes


def occupancy(
    kernel: KernelPlan, registers: int, device: Device
) -> tuple[int, float]:
    """The number of blocks resident on an SM, and the occupancy.

    Parameters
    ----------
    kernel : KernelPlan
    registers : int
        Registers per thread, as reported by the compiler.
    device : Device

    Returns
    -------
    blocks : int
    share : float
        Resident warps over the most warps of an SM.
    """
    most_warps, most_blocks = _WARPS_AND_BLOCKS.get(
        device.capability, (48, 16)
    )
    warps = kernel.threads // 32
    warp_registers = round_up(registers * 32, 256)  # allocation unit
    blocks = min(
        most_blocks,
        most_warps // warps,
        _REGISTERS_OF_SM // warp_registers // warps,
        device.blocks_by_shared(kernel.shared_bytes),
    )
    return blocks, blocks * warps / most_warps


class Maker(NamedTuple):
    """The functions that plan a family's kernels of one direction.

    Attributes
    ----------
    plan : callable
        (problem, device, tile) to the Plan.
    shared_bytes : callable
        (problem, tile) to the largest shared memory of any of its blocks.
    fits : callable
        (problem, tile) to whether the kernels support the tile and have
        enough registers.
    """

    plan: Callable[[Problem, Device, Tile], Plan]
    shared_bytes: Callable[[Problem, Tile], int]
    fits: Callable[[Problem, Tile], bool]
