"""What is decided: which kernel runs a problem, with which tiles, how often.

The only dispatcher, and the only place with shared-memory and register
arithmetic: `plan` turns a `Problem` and a `Device` into a `Plan`. Pure
Python, no array library, no GPU.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from cuflash import tiles
from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.problem import Problem
from cuflash.tiles import Tile

Family = Literal["wgmma", "mma", "fma", "dmma", "tf32x3", "simt"]

# ---- What a plan is made for, and of ----


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
_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227,
               103: 227, 110: 227, 120: 99, 121: 99}


def device_of_arch(arch: str) -> Device:
    """A device of an architecture that is not at hand, for compiling."""
    device = Device(arch)
    shared = _SHARED_KIB.get(device.capability, 99)
    return replace(device, shared_bytes=shared * 1024)


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
    of_warp = _round_up(registers * 32, 256)  # as they are given out
    shared = device.shared_bytes + _RESERVED_SHARED
    blocks = min(
        most_blocks,
        most_warps // warps,
        _REGISTERS_OF_SM // of_warp // warps,
        shared // (kernel.shared_bytes + _RESERVED_SHARED),
    )
    return blocks, blocks * warps / most_warps


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


class Deal(NamedTuple):
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
        ``"simt"`` (float32 and float64, anywhere).
    tile : Tile or None
        None for "merge", which has no tiles.
    launches : tuple of Launch
        In order.
    heads_per_section : int
        How many heads walk their tiles side by side (scheduler.cuh).
    deal : Deal or None
        Of a kernel whose blocks take one tile after another.
    sum_elements : int
        float32 elements of the sums of dq, 0 if there are none.
    row_elements : int
        float32 elements of what is known of each query, 0 if that is delta
        alone.
    num_turns : int
        Integers by which blocks know of one another, 0 if there are none.
    num_found : int
        Integers that the first launch finds for the others, 0 if it is one
        of those.
    """

    problem: Problem
    family: Family
    tile: Tile | None
    launches: tuple[Launch, ...]
    heads_per_section: int = 1
    deal: Deal | None = None
    sum_elements: int = 0
    row_elements: int = 0
    num_turns: int = 0
    num_found: int = 0

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


# ---- Planning ----


@functools.lru_cache(maxsize=4096)
def plan(
    problem: Problem,
    device: Device,
    family: Family | None = None,
    tile: Tile | None = None,
) -> Plan:
    """Decide how a device runs a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
    family : str, optional
        Kernels of that family if it has some for the problem, else those
        that are best.
    tile : Tile, optional
        That tile and no other.

    Raises
    ------
    UnsupportedError
        If the device is too old for the problem's dtype.
    ValueRangeError
        If no kernel can run the block sizes that were asked for (the
        message lists those that can), or the tile.
    """
    if problem.direction == "merge":
        made = _merge_plan(problem)
    else:
        family = family_of(problem, device, family)
        if tile is None:
            tile = _choose_tile(problem, device, family)
        elif not is_legal(problem, device, family, tile):
            raise ValueRangeError(
                f"{tile} cannot be run by the {family} {problem.direction}"
                f" kernel on {device.arch}"
            )
        made = _PLANNERS[family, problem.direction](problem, device, tile)
    if os.environ.get("CUFLASH_LOG") == "plan":
        print(f"cuflash: {made}", file=sys.stderr)
    return made


# The options that kernels of a family take (docs/masks.md).
_SERVED = frozenset((
    "window", "softcap", "alibi_slopes", "bias", "mask", "sink",
    "segment_ids", "dropout", "cu_seqlens",
))  # fmt: skip
_WGMMA_SERVED = frozenset((
    "window", "softcap", "alibi_slopes", "sink", "segment_ids",
))  # fmt: skip
_OPTIONS: dict[Family, frozenset[str]] = {
    "wgmma": _WGMMA_SERVED,
    "mma": _SERVED,
    "simt": _SERVED,
}


def _arguments(problem: Problem, kind: str = "") -> tuple[str, str]:
    """The struct that kernels of a family with options take."""
    kind = problem.direction.capitalize() + kind
    return "Arguments", f"{kind}{'Options' * bool(problem.options)}Arguments"


def _option_constants(
    problem: Problem, kind: str = ""
) -> tuple[tuple[str, bool | str], ...]:
    """What every kernel of a family with options is compiled for."""
    options = problem.options
    return (
        _arguments(problem, kind),
        ("WINDOW", "window" in options),
        ("SOFTCAP", "softcap" in options),
        ("ALIBI", "alibi_slopes" in options),
        ("BIAS", "bias" in options),
        ("Bias", _ELEMENTS.get(problem.bias, problem.bias or "float")),
        ("SINK", "sink" in options),
        ("SEGMENTS", "segment_ids" in options),
        ("KEEP", "mask" in options),
        ("DROPOUT", "dropout" in options),
        ("DBIAS", problem.return_dbias),
        _packed(problem),
    )


def _packed(problem: Problem) -> tuple[str, bool]:
    return ("PACKED", problem.num_sequences is not None)


_ELEMENTS = {"float32": "float", "float64": "double"}


def _is_linear(problem: Problem) -> bool:
    """score.cuh's LINEAR: scores are products times scale."""
    return not (problem.softcap or problem.alibi_slopes or problem.bias)


def _check_options(problem: Problem, family: Family) -> None:
    """Raise UnsupportedError if a family's kernels lack an option."""
    known = _OPTIONS.get(family, frozenset())
    words = ", ".join(sorted(known)) or "none"
    for name in problem.options:
        if name not in known:
            served = problem.precision and name in _SERVED
            advice = ", as do calls without precision" if served else ""
            raise UnsupportedError(
                f"{name} is given, which the {family} kernels do not take on"
                f" a GPU (options that they take: {words}); NumPy arrays take"
                f" it{advice}"
            )
    wanted = problem.return_dbias and problem.deterministic
    if wanted and problem.bias_is_broadcast:
        raise UnsupportedError(
            "deterministic and return_dbias are both True and bias is"
            " broadcast, expected one of them False or a bias of the full"
            " shape: what is broadcast has its gradient summed in no fixed"
            " order on a GPU"
        )


def family_of(
    problem: Problem, device: Device, wanted: Family | None = None
) -> Family:
    """The kernel family for a problem on a device."""
    family = _family_of(problem, device, wanted)
    _check_options(problem, family)
    return family


def _family_of(
    problem: Problem, device: Device, wanted: Family | None
) -> Family:
    sixteen_bits = problem.dtype in ("float16", "bfloat16")
    needed = 80 if sixteen_bits else 75
    if device.capability < needed:
        raise UnsupportedError(
            f"{problem.dtype} needs a GPU of compute capability"
            f" {needed / 10} or newer, this one has"
            f" {device.capability / 10} ({device.arch})"
            + (
                "; float32 and float64 run from 7.5 on"
                if device.capability >= 75
                else ""
            )
        )
    if problem.precision:
        if device.capability < 80:
            raise UnsupportedError(
                f"precision {problem.precision!r} needs a GPU of compute"
                " capability 8.0 or newer, this one has"
                f" {device.capability / 10} ({device.arch}): leave it out"
            )
        return "tf32x3"
    if not sixteen_bits:
        parts = problem.dtype == "float32" and device.capability >= 80
        if problem.options:
            return "simt"
        if wanted == "tf32x3" and parts:
            return "tf32x3"
        if wanted != "simt" and _fma_runs(problem, device):
            return "fma"
        if wanted != "simt" and _dmma_runs(problem, device):
            return "dmma"
        return "simt"
    if wanted != "mma" and _wgmma_runs(problem, device):
        return "wgmma"
    return "mma"


def main_file(family: str, file: str) -> bool:
    """Whether a kernel's file is of a family, and not of several."""
    return f"_{_FILES.get(family, family)}" in file


_FILES = {"dmma": "mma8", "tf32x3": "mma8"}


def wanted_family() -> Family | None:
    """What the environment variable ``CUFLASH_FAMILY`` asks for."""
    family = os.environ.get("CUFLASH_FAMILY")
    if not family:
        return None
    if family not in get_args(Family):
        raise ValueRangeError(
            f"the environment variable CUFLASH_FAMILY is {family!r}, expected"
            f" one of {', '.join(get_args(Family))}"
        )
    return family


def legal_tiles(
    problem: Problem, device: Device, family: str
) -> Iterator[Tile]:
    """Every tile with which a family's kernel can run a problem.

    The larger, and so usually the faster, come first.
    """
    for tile in tiles.candidates(family, problem.direction):
        if _fits(problem, device, family, tile):
            yield tile


def _fits(problem: Problem, device: Device, family: str, tile: Tile) -> bool:
    which = family, problem.direction
    shared = tile.blocks_per_sm * _SHARED[which](problem, tile)
    return shared <= device.shared_bytes and _REGISTERS[which](problem, tile)


def is_legal(
    problem: Problem, device: Device, family: str, tile: Tile
) -> bool:
    """Whether a family's kernel can run a problem with a tile."""
    known = tiles.is_known(family, problem.direction, tile)
    return known and _fits(problem, device, family, tile)


def _choose_tile(problem: Problem, device: Device, family: str) -> Tile:
    """The nearest tuned tile of the sizes asked for, else a legal one."""
    asked = problem.block_q, problem.block_k

    def wanted(tile: Tile) -> bool:
        sizes = tile.block_q, tile.block_k
        return all(a in (None, x) for a, x in zip(asked, sizes, strict=True))

    seqlen, load = tuned_by(problem, device)
    nearest = tiles.tuned(
        device.capability,
        family,
        problem.direction,
        problem.dtype,
        max(problem.head_dim, problem.head_dim_v),
        problem.causal,
        seqlen,
        load,
    )
    for tile in filter(wanted, nearest):
        if is_legal(problem, device, family, tile):
            return tile
    legal = list(legal_tiles(problem, device, family))
    for tile in filter(wanted, legal):
        return tile
    sizes = sorted({(tile.block_q, tile.block_k) for tile in legal})
    raise ValueRangeError(
        f"block_q {asked[0]}, block_k {asked[1]} cannot be run by the"
        f" {family} {problem.direction} kernel for head_dim"
        f" {problem.head_dim}, head_dim_v {problem.head_dim_v},"
        f" {problem.dtype} on {device.arch}; these (block_q, block_k) can: "
        + ", ".join(map(str, sizes))
    )


def tuned_by(problem: Problem, device: Device) -> tuple[int, float]:
    """The length and the number of tiles that a tile is chosen by.

    Tokens that a block walks over, and tiles of `tiles.ROWS_OF_A_TILE` rows
    for each multiprocessor: of queries in a forward pass, of keys in a
    backward one.
    """
    walked, rows, heads = (
        (problem.seqlen_k, problem.seqlen_q, problem.num_heads_q)
        if problem.direction == "forward"
        else (problem.seqlen_q, problem.seqlen_k, problem.num_heads_kv)
    )
    if problem.num_sequences:  # as if they were alike
        walked = _ceil_div(walked, problem.num_sequences)
    count = _ceil_div(rows, tiles.ROWS_OF_A_TILE) * problem.batch * heads
    return walked, count / device.num_sms


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b


def _heads_per_section(
    problem: Problem, device: Device, num_heads: int, bytes_of_head: int
) -> int:
    """As many heads as keep what their blocks share in half of L2."""
    fitting = device.l2_bytes // 2 // max(bytes_of_head, 1)
    return max(1, min(fitting, problem.batch * num_heads))


# ---- 16-bit types by mma.sync ----

# kernels/smem.cuh: rows of 128 bytes, a panel of 64 columns each.
_PANEL_COLUMNS, _PANEL_ROW_BYTES = 64, 128
# kernels/mma.cuh: head_dim in steps that every grid of warps can share.
_HEAD_DIM_STEP = 32
# A thread has 255 registers. Accumulators may fill this many: the rest hold
# fragments, addresses and the rows' statistics (seen: 224 still fit).
_ACCUMULATOR_REGISTERS = 224


def _mma_head_dims(problem: Problem) -> tuple[int, int]:
    return (
        _round_up(problem.head_dim, _HEAD_DIM_STEP),
        _round_up(problem.head_dim_v, _HEAD_DIM_STEP),
    )


def _tile_bytes(rows: int, columns: int) -> int:
    """Size of smem.cuh's Tile<rows, columns>, aligned to 1024 bytes."""
    panels = _ceil_div(columns, _PANEL_COLUMNS)
    return _round_up(panels * rows * _PANEL_ROW_BYTES, 1024)


def _forward_mma_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _mma_head_dims(problem)
    return (
        _tile_bytes(tile.block_q, max(d, dv))
        + _tile_bytes(tile.block_k, d)
        + _tile_bytes(tile.block_k, dv)
    )


def _shares_rows(tile: Tile) -> bool:
    """Whether a warp has whole 16-row tiles, a thread whole columns.

    smem.cuh's load_tile: eight threads take a row, and a thread's rows are
    multiples of 8 apart.
    """
    rows_at_once = tile.num_warps * 4
    return not (
        tile.block_q % (tile.num_warps * 16)
        or rows_at_once % 8
        or tile.block_q % rows_at_once
        or tile.block_k % rows_at_once
    )


def _forward_mma_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _mma_head_dims(problem)
    if not _shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    return rows * (tile.block_k + dv) // 32 <= _ACCUMULATOR_REGISTERS


def _padded(problem: Problem, d: int, dv: int) -> bool:
    return (problem.head_dim, problem.head_dim_v) != (d, dv)


def _forward_mma(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _mma_head_dims(problem)
    shared = _forward_mma_shared(problem, tile)
    kernel = KernelPlan(
        file="forward_mma.cu",
        entry="forward_mma",
        constants=(
            ("Element", problem.dtype),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("PADDED", _padded(problem, d, dv)),
            ("CAUSAL", problem.causal),
            ("NEGATE_SCORES", problem.scale < 0 and _is_linear(problem)),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
            *_option_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    num_tiles = _num_tiles(problem, problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    shared_by_head = problem.seqlen_k * (d + dv) * 2 // problem.group_size
    return Plan(
        problem,
        "mma",
        tile,
        (*_finding_launches(problem, tile), Launch(kernel, num_tiles * pairs)),
        num_found=_num_found(problem, tile),
        heads_per_section=_heads_per_section(
            problem, device, problem.num_heads_q, shared_by_head
        ),
    )


def _backward_mma_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _mma_head_dims(problem)
    keys = _tile_bytes(tile.block_k, d) + _tile_bytes(tile.block_k, dv)
    queries = _tile_bytes(tile.block_q, d) + _tile_bytes(tile.block_q, dv)
    scores = 2 * _tile_bytes(tile.block_q, tile.block_k)
    statistics = 2 * 4 * tile.block_q  # lse and delta
    total = keys + scores + tile.num_stages * (queries + statistics)
    return _round_up(total, 1024)


def _backward_mma_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _mma_head_dims(problem)
    across = tile.num_warps // tile.score_warps_q
    gradient_across = tile.num_warps // tile.gradient_warps_k
    shares = (
        tile.block_q % (tile.num_warps * 4),  # rows that are loaded at once
        tile.block_k % (tile.num_warps * 4),
        tile.block_q % (tile.score_warps_q * 16),
        tile.block_k % (across * 16),
        d % (across * 16),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * 16),
        dv % (gradient_across * 16),
    )
    if any(shares):
        return False
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    scores = 2 * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    return kept + max(scores, dq) <= _ACCUMULATOR_REGISTERS


def _backward_mma(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _mma_head_dims(problem)
    shared = _backward_mma_shared(problem, tile)
    layout = (
        ("Element", problem.dtype),
        ("HEAD_DIM", d),
        ("HEAD_DIM_V", dv),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("NUM_WARPS", tile.num_warps),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("GRADIENT_WARPS_K", tile.gradient_warps_k),
    )
    main = KernelPlan(
        file="backward_mma.cu",
        entry="backward_mma",
        constants=(
            *layout,
            ("PADDED", _padded(problem, d, dv)),
            ("CAUSAL", problem.causal),
            ("DETERMINISTIC", problem.deterministic),
            ("NUM_STAGES", tile.num_stages),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
            *_option_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    dq_shared = _tile_bytes(tile.block_q, d)
    round_dq = KernelPlan(
        file="backward_dq.cu",
        entry="backward_dq",
        constants=(
            *layout,
            _arguments(problem),
            _packed(problem),
            ("CAUSAL", False),  # looked at in repairs alone
            ("REPAIRS", False),
            ("TURNS", 0),
            ("SHARED_BYTES", dq_shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=dq_shared,
    )
    q_tiles = _num_tiles(problem, problem.seqlen_q, tile.block_q)
    k_tiles = _num_tiles(problem, problem.seqlen_k, tile.block_k)
    q_pairs = problem.batch * problem.num_heads_q
    kv_pairs = problem.batch * problem.num_heads_kv
    shared_by_head = (
        problem.group_size * problem.seqlen_q * (6 * d + 2 * dv)
    )  # q, dout: 2 bytes an element; the sums of dq: 4
    return Plan(
        problem,
        "mma",
        tile,
        (
            *_finding_launches(problem, tile),
            _delta_launch(problem, tile.block_q, d),
            Launch(main, k_tiles * kv_pairs),
            Launch(round_dq, q_tiles * q_pairs),
            *_sink_launches(problem),
        ),
        heads_per_section=_heads_per_section(
            problem, device, problem.num_heads_kv, shared_by_head
        ),
        sum_elements=q_tiles * tile.block_q * d * q_pairs,
        num_turns=q_tiles * q_pairs if problem.deterministic else 0,
        num_found=_num_found(problem, tile),
    )


# ---- 16-bit types by wgmma ----

# What kernels/ptx.cuh has products for, and shared memory room.
_WGMMA_HEAD_DIMS = {
    "forward": (64, 96, 128, 192, 256),
    "backward": (64, 128, 192, 256),
}
# A thread's registers: 240 with two math warpgroups, 160 with three. S and P
# take 3/4 of block_k, acc half of head_dim_v. Sums up to these were seen not
# to spill, 132 with three was.
_WGMMA_REGISTERS = {2: 196, 3: 128}
# What segment ids or a softcap take besides. At head_dim above 128 there is
# no smaller tile that is fast: there a few bytes are spilt.
_WGMMA_OPTION_REGISTERS = 32
_MBARRIER_BYTES, _WORK_BYTES = 8, 20


def _wgmma_head_dims(problem: Problem) -> tuple[int, int] | None:
    """Rounded up to those that there are kernels for, None if too large."""
    rounded = [
        next((x for x in _WGMMA_HEAD_DIMS[problem.direction] if x >= d), None)
        for d in (problem.head_dim, problem.head_dim_v)
    ]
    return None if None in rounded else tuple(rounded)


def _wgmma_runs(problem: Problem, device: Device) -> bool:
    served = _WGMMA_SERVED if problem.direction == "forward" else frozenset()
    return (
        device.arch == "sm_90a"
        and problem.seqlen_k > 0
        and served.issuperset(problem.options)
        and _wgmma_head_dims(problem) is not None
    )


def _wgmma_shared(problem: Problem, tile: Tile, q_stages: int) -> int:
    d, dv = _wgmma_head_dims(problem)
    queries = _tile_bytes(tile.block_q, max(d, dv))
    keys = _tile_bytes(tile.block_k, d) + _tile_bytes(tile.block_k, dv)
    barriers = 2 * q_stages + 4 * tile.num_stages  # full and empty: q; k, v
    return _round_up(
        q_stages * queries
        + max(q_stages, 2) * _WORK_BYTES
        + tile.num_stages * keys
        + barriers * _MBARRIER_BYTES
        + (4 * tile.num_stages if _is_listed(problem) else 4),
        1024,
    )


def _is_listed(problem: Problem) -> bool:
    """forward_wgmma.cu's LISTED."""
    return "window" in problem.options or problem.segment_ids


def _forward_wgmma_shared(problem: Problem, tile: Tile) -> int:
    """With one tile of queries; more are taken if there is room."""
    return _wgmma_shared(problem, tile, 1)


def _forward_wgmma_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _wgmma_head_dims(problem)
    used = tile.block_k * 3 // 4 + dv // 2
    if dv <= 128 and (problem.segment_ids or problem.softcap):
        used += _WGMMA_OPTION_REGISTERS
    return used <= _WGMMA_REGISTERS[tile.block_q // 64]


def _forward_wgmma(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _wgmma_head_dims(problem)
    q_stages, shared = next(
        (stages, room)
        for stages in (3, 2, 1)
        if (room := _wgmma_shared(problem, tile, stages))
        <= device.shared_bytes
    )
    kernel = KernelPlan(
        file="forward_wgmma.cu",
        entry="forward_wgmma",
        constants=(
            ("Element", problem.dtype),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("NEGATE_SCORES", problem.scale < 0 and _is_linear(problem)),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("Q_STAGES", q_stages),
            ("KV_STAGES", tile.num_stages),
            ("SHARED_BYTES", shared),
            *_option_constants(problem, "Wgmma"),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
    )
    num_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    deal = _deal(num_tiles, heads, problem.causal, device)
    return Plan(
        problem,
        "wgmma",
        tile,
        (
            *_finding_launches(problem, tile, "Wgmma"),
            Launch(kernel, min(deal.items, device.num_sms)),
        ),
        deal=deal,
        num_found=_num_found(problem, tile),
    )


def _deal(
    num_tiles: int, heads: int, by_length: bool, device: Device
) -> Deal:
    """In pairs where tiles differ in length and there are many."""
    pairs = num_tiles // 2 if by_length else 0
    if heads * (num_tiles - pairs) < device.num_sms:
        pairs = 0
    singles = num_tiles - 2 * pairs
    return Deal(pairs, singles, heads * pairs, heads * (pairs + singles))


# What a query tile's rows are known by: kernels/query_rows.cuh. lse, delta;
# three numbers, in 16 bytes.
_ROW_BYTES, _ROWS_BYTES = 2 * 4, 16
# Accumulators that were seen to fit 240 registers: 208 of them with P in
# float, 192 with dS from the rounded P.
_BACKWARD_WGMMA_REGISTERS = 208


# Where key tiles take turns, more heads side by side were seen to cost up to
# 10 % at seqlen 512; fewer cost as much at 4096.
_MOST_HEADS_IN_TURNS = 16


def _backward_wgmma_head_dims(problem: Problem) -> tuple[int, int]:
    """As `_wgmma_head_dims`, the first no smaller than the second."""
    d, dv = _wgmma_head_dims(problem)
    return max(d, dv), dv


def _rows_bytes(tile: Tile) -> int:
    return tile.block_q * _ROW_BYTES + _ROWS_BYTES


def _is_wide(tile: Tile) -> bool:
    """Whether a wgmma tile is one of backward_wgmma_wide.cu's.

    Its warpgroups have the same 64 keys, and one thing to compute each.
    """
    return tile.block_k == 64


def _backward_wgmma_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _backward_wgmma_head_dims(problem)
    keys = _tile_bytes(tile.block_k, d) + _tile_bytes(tile.block_k, dv)
    queries = _tile_bytes(tile.block_q, d) + _tile_bytes(tile.block_q, dv)
    ds = 2 * _tile_bytes(tile.block_k, tile.block_q)
    dq = tile.block_q * d * 4
    barriers = 4 * tile.num_stages + 3 + 2 * 2  # q and dout; k, v; work
    if not _is_wide(tile):
        barriers += 2 * 2  # ds
    else:
        ds *= tile.num_stages  # and p; dq leaves from registers
        dq = 0
        barriers += 2 * tile.num_stages
    return _round_up(
        keys
        + tile.num_stages * (queries + _rows_bytes(tile))
        + ds
        + dq
        + barriers * _MBARRIER_BYTES
        + 2 * 3 * 4,  # work
        1024,
    )


def _backward_wgmma_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _backward_wgmma_head_dims(problem)
    if _is_wide(tile):
        return True  # it deals out registers by head_dim
    if tile.block_q * d != tile.block_k // 64 * 64 * 64:
        return False  # a warpgroup's part of dq is 64 x 64
    scores = tile.block_q * 5 // 4 if tile.block_q <= 64 else tile.block_q
    return (d + dv) // 2 + scores <= _BACKWARD_WGMMA_REGISTERS


def _backward_wgmma(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _backward_wgmma_head_dims(problem)
    shared = _backward_wgmma_shared(problem, tile)
    name = "backward_wgmma_wide" if _is_wide(tile) else "backward_wgmma"
    # Those that have dq: a warpgroup loads, two have dv and dk.
    dq_warps = 4 if _is_wide(tile) else tile.num_warps - 4
    turns_of_tile = dq_warps // 4 if problem.deterministic else 0
    layout = (
        ("Element", problem.dtype),
        ("HEAD_DIM", d),
        ("HEAD_DIM_V", dv),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("NUM_WARPS", dq_warps),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("CAUSAL", problem.causal),
        ("TURNS", turns_of_tile),
    )
    lanes = _ceil_div(problem.head_dim_v, 8)
    rows = KernelPlan(
        file="backward_rows.cu",
        entry="backward_rows",
        constants=(
            *layout,
            ("NUM_THREADS", _ROW_THREADS),
            ("LANES", 1 << (lanes - 1).bit_length()),
        ),
        threads=_ROW_THREADS,
        shared_bytes=0,
    )
    main = KernelPlan(
        file=f"{name}.cu",
        entry=name,
        constants=(
            *layout,
            ("STAGES", tile.num_stages),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    dq_shared = _tile_bytes(tile.block_q, d)
    round_dq = KernelPlan(
        file="backward_dq.cu",
        entry="backward_dq",
        constants=(
            *layout,
            ("Arguments", "BackwardWgmmaArguments"),
            _packed(problem),
            ("REPAIRS", problem.causal),
            ("SHARED_BYTES", dq_shared),
        ),
        threads=dq_warps * 32,
        shared_bytes=dq_shared,
    )
    q_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    q_tiles *= problem.batch * problem.num_heads_q
    kv_pairs = problem.batch * problem.num_heads_kv
    k_tiles = _ceil_div(problem.seqlen_k, tile.block_k) * kv_pairs
    shared_by_head = (
        problem.group_size * problem.seqlen_q * (6 * d + 2 * dv)
    )  # q, dout: 2 bytes an element; the sums of dq: 4
    heads = _heads_per_section(
        problem, device, problem.num_heads_kv, shared_by_head
    )
    if problem.deterministic and not problem.causal:
        heads = min(heads, _MOST_HEADS_IN_TURNS)
    return Plan(
        problem,
        "wgmma",
        tile,
        (
            Launch(rows, q_tiles),
            Launch(main, min(k_tiles, device.num_sms)),
            Launch(round_dq, q_tiles + (k_tiles if problem.causal else 0)),
        ),
        heads_per_section=heads,
        sum_elements=q_tiles * tile.block_q * d,
        row_elements=q_tiles * _rows_bytes(tile) // 4,
        num_turns=1 + k_tiles + q_tiles * turns_of_tile,
    )


# ---- float32 by fused multiply-adds on register tiles ----

# kernels/fma.cuh: a warp's lanes over a product.
_LANE_ROWS, _LANE_COLUMNS = 4, 8
# Elements that are added to rows: of tiles (kernels/wide_tiles.cuh, which
# mma8.cuh has too) and of P (kernels/fma.cuh).
_ROWS_PAD, _WEIGHTS_PAD = 4, 8
# What a thread's sums and one operand's fragments may fill of its 255.
_FMA_REGISTERS = 200


def _fma_head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to steps that every lane, and two warps, can share."""
    return tuple(
        _round_up(d, 32 if d <= 128 else 64)
        for d in (problem.head_dim, problem.head_dim_v)
    )


def _fma_runs(problem: Problem, device: Device) -> bool:
    """float32, cp.async, and room for a tile of such head dimensions."""
    return (
        problem.dtype == "float32"
        and device.capability >= 80
        and any(legal_tiles(problem, device, "fma"))
    )


def _weight_keys(tile: Tile) -> int:
    """Columns of P that a warp's lanes exchange at a time."""
    return 32 if tile.block_k % 64 == 0 else 16


def _forward_fma_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _fma_head_dims(problem)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + _ROWS_PAD)
        + tile.block_k * (dv + _ROWS_PAD)
        + tile.block_q * (_weight_keys(tile) + _WEIGHTS_PAD)
    )


def _forward_fma_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _fma_head_dims(problem)
    if tile.block_q % (tile.num_warps * _LANE_ROWS):
        return False
    rows = tile.block_q // tile.num_warps // _LANE_ROWS
    columns = (tile.block_k + dv) // _LANE_COLUMNS
    return rows <= 8 and rows * (columns + 4) <= _FMA_REGISTERS


def _forward_fma(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _fma_head_dims(problem)
    shared = _forward_fma_shared(problem, tile)
    kernel = KernelPlan(
        file="forward_fma.cu",
        entry="forward_fma",
        constants=(
            ("Element", _element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("NEGATE_SCORES", problem.scale < 0),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("WEIGHT_KEYS", _weight_keys(tile)),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    num_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    shared_by_head = problem.seqlen_k * (d + dv) * 4 // problem.group_size
    return Plan(
        problem,
        "fma",
        tile,
        (Launch(kernel, num_tiles * pairs),),
        heads_per_section=_heads_per_section(
            problem, device, problem.num_heads_q, shared_by_head
        ),
    )


def _backward_fma_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _fma_head_dims(problem)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * _ROWS_PAD)
        + tile.block_q * (tile.block_k + _WEIGHTS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def _backward_fma_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _fma_head_dims(problem)
    across = tile.num_warps // tile.score_warps_q
    gradient_across = tile.num_warps // tile.gradient_warps_k
    shares = (
        tile.block_q % (tile.score_warps_q * _LANE_ROWS),
        tile.block_k % (across * _LANE_COLUMNS),
        d % (across * 32),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * 32),
        dv % (gradient_across * 32),
    )
    if any(shares):
        return False
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    scores = 2 * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    rows = tile.block_q // tile.score_warps_q // _LANE_ROWS
    return kept + max(scores, dq) + 4 * rows <= _FMA_REGISTERS


def _backward_fma(problem: Problem, device: Device, tile: Tile) -> Plan:
    return _backward_in_one(
        problem, device, tile, "fma", "backward_fma",
        _fma_head_dims(problem), _backward_fma_shared(problem, tile),
    )  # fmt: skip


def _backward_in_one(
    problem: Problem,
    device: Device,
    tile: Tile,
    family: Family,
    entry: str,
    head_dims: tuple[int, int],
    shared: int,
) -> Plan:
    """One kernel that adds to dq itself, after that for delta."""
    d, dv = head_dims
    main = KernelPlan(
        file=f"{entry}.cu",
        entry=entry,
        constants=(
            ("Element", _element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("DETERMINISTIC", problem.deterministic),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("SCORE_WARPS_Q", tile.score_warps_q),
            ("GRADIENT_WARPS_K", tile.gradient_warps_k),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    q_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    k_tiles = _ceil_div(problem.seqlen_k, tile.block_k)
    columns = 2 * d + dv  # of q, dq and dout
    shared_by_head = (
        problem.group_size
        * problem.seqlen_q
        * columns
        * _element_bytes(problem)
    )
    return Plan(
        problem,
        family,
        tile,
        (
            _delta_launch(problem, tile.block_q, 0, adds_to_dq=True),
            Launch(main, k_tiles * problem.batch * problem.num_heads_kv),
        ),
        heads_per_section=_heads_per_section(
            problem, device, problem.num_heads_kv, shared_by_head
        ),
        num_turns=(
            q_tiles * problem.batch * problem.num_heads_q
            if problem.deterministic
            else 0
        ),
    )


# ---- float64, and float32 in parts, by mma.sync in steps of 8 ----

# Where double products by tensor cores are no slower than without.
_DMMA_CAPABILITIES = (80, 90, 100, 103)
# Of 255: fragments and addresses need the others.
_MMA8_REGISTERS = 192


def _dmma_runs(problem: Problem, device: Device) -> bool:
    """float64, fast tensor cores, and registers enough for a tile."""
    return (
        problem.dtype == "float64"
        and device.capability in _DMMA_CAPABILITIES
        and any(legal_tiles(problem, device, "dmma"))
    )


def _element_bytes(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4


def _mma8_family(problem: Problem) -> Family:
    return "dmma" if problem.dtype == "float64" else "tf32x3"


def _mma8_head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to steps that warps can share: two if there are many.

    Of float more columns are a step (`_mma8_chunk`).
    """
    dims = problem.head_dim, problem.head_dim_v
    wide = problem.dtype == "float32" and max(dims) > 128
    step = 64 if wide else _HEAD_DIM_STEP
    return _round_up(dims[0], step), _round_up(dims[1], step)


def _mma8_chunk(problem: Problem) -> int:
    """Elements of 16 bytes: tiles of columns come by so many."""
    return 16 // _element_bytes(problem)


def _forward_mma8_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _mma8_head_dims(problem)
    return _element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + _ROWS_PAD)
        + tile.block_k * (dv + _mma8_chunk(problem))
    )


def _forward_mma8_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _mma8_head_dims(problem)
    if tile.block_q % (tile.num_warps * 16):
        return False
    rows = tile.block_q // tile.num_warps
    words = _element_bytes(problem) // 4
    chunk = rows * 8 * 4 if words == 1 else 0  # sums that begin anew
    kept = words * rows * (tile.block_k + dv) + chunk
    return kept // 32 <= _MMA8_REGISTERS


def _forward_mma8(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _mma8_head_dims(problem)
    shared = _forward_mma8_shared(problem, tile)
    kernel = KernelPlan(
        file="forward_mma8.cu",
        entry="forward_mma8",
        constants=(
            ("Element", _element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    num_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    bytes_of_keys = problem.seqlen_k * (d + dv) * _element_bytes(problem)
    return Plan(
        problem,
        _mma8_family(problem),
        tile,
        (Launch(kernel, num_tiles * pairs),),
        heads_per_section=_heads_per_section(
            problem,
            device,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
        ),
    )


def _backward_mma8_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _mma8_head_dims(problem)
    return _element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * _ROWS_PAD)
        + tile.block_q * (tile.block_k + _ROWS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def _backward_mma8_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _mma8_head_dims(problem)
    across = tile.num_warps // tile.score_warps_q
    gradient_across = tile.num_warps // tile.gradient_warps_k
    columns = 8 * _mma8_chunk(problem)
    shares = (
        tile.block_q % (tile.score_warps_q * 16),
        tile.block_k % (across * 8),
        d % (across * columns),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * columns),
        dv % (gradient_across * columns),
    )
    if any(shares):
        return False
    threads = tile.num_warps * 32
    words = _element_bytes(problem) // 4
    kept = words * tile.block_k * (d + dv) // threads
    scores = 2 * words * tile.block_q * tile.block_k // threads
    dq = words * tile.block_q * d // threads
    return kept + max(scores, dq) <= _MMA8_REGISTERS


def _backward_mma8(problem: Problem, device: Device, tile: Tile) -> Plan:
    return _backward_in_one(
        problem, device, tile, _mma8_family(problem), "backward_mma8",
        _mma8_head_dims(problem), _backward_mma8_shared(problem, tile),
    )  # fmt: skip


# ---- float32 and float64, plainly ----


def _simt_sizes(problem: Problem, tile: Tile, rows: int) -> tuple[int, ...]:
    """Bytes of an element; head_dim and head_dim_v as the kernels pad them.

    `rows` is the side of the tile that owns the threads (simt.cuh).
    """
    step = tile.num_warps * 32 // rows
    return (
        8 if problem.dtype == "float64" else 4,
        _round_up(problem.head_dim, step),
        _round_up(problem.head_dim_v, step),
    )


def _forward_simt_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = _simt_sizes(problem, tile, tile.block_q)
    return size * (
        tile.block_q * (d + 1)
        + tile.block_k * (max(d, dv) + 1)
        + tile.block_q * (tile.block_k + 1)
    )


def _dkdv_simt_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = _simt_sizes(problem, tile, tile.block_k)
    return size * (
        (tile.block_q + tile.block_k) * (d + dv + 2)
        + 2 * tile.block_k * (tile.block_q + 1)
        + 2 * tile.block_q
    )


def _dq_simt_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = _simt_sizes(problem, tile, tile.block_q)
    return size * (
        (tile.block_q + tile.block_k) * (d + dv + 2)
        + tile.block_q * (tile.block_k + 1)
    )


def _backward_simt_shared(problem: Problem, tile: Tile) -> int:
    return max(
        _dkdv_simt_shared(problem, tile), _dq_simt_shared(problem, tile)
    )


def _simt_fits(problem: Problem, tile: Tile) -> bool:
    """Whether a thread's sums stay in its registers."""
    rows = max(tile.block_q, tile.block_k)
    if tile.num_warps * 32 % rows:
        return False
    size, d, dv = _simt_sizes(problem, tile, rows)
    columns = (d + dv) * rows // (tile.num_warps * 32)
    return columns * size // 4 <= _SIMT_REGISTERS


# Half of a thread's 255: the rest hold scores and addresses.
_SIMT_REGISTERS = 128


def _simt_kernel(
    file: str, problem: Problem, tile: Tile, rows: int, shared: int
) -> KernelPlan:
    _, d, dv = _simt_sizes(problem, tile, rows)
    return KernelPlan(
        file=f"{file}.cu",
        entry=file,
        constants=(
            ("Element", _element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_THREADS", tile.num_warps * 32),
            ("SHARED_BYTES", shared),
            *_option_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
    )


def _forward_simt(problem: Problem, device: Device, tile: Tile) -> Plan:
    kernel = _simt_kernel(
        "forward_simt", problem, tile, tile.block_q,
        _forward_simt_shared(problem, tile),
    )
    blocks = _num_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q
    return Plan(
        problem,
        "simt",
        tile,
        (*_finding_launches(problem, tile), Launch(kernel, blocks)),
        num_found=_num_found(problem, tile),
    )


def _backward_simt(problem: Problem, device: Device, tile: Tile) -> Plan:
    dkdv = _simt_kernel(
        "backward_simt_dkdv", problem, tile, tile.block_k,
        _dkdv_simt_shared(problem, tile),
    )
    dq = _simt_kernel(
        "backward_simt_dq", problem, tile, tile.block_q,
        _dq_simt_shared(problem, tile),
    )
    k_tiles = _num_tiles(problem, problem.seqlen_k, tile.block_k)
    q_tiles = _num_tiles(problem, problem.seqlen_q, tile.block_q)
    return Plan(
        problem,
        "simt",
        tile,
        (
            *_finding_launches(problem, tile),
            _delta_launch(problem, tile.block_q, 0),
            Launch(dkdv, k_tiles * problem.batch * problem.num_heads_kv),
            Launch(dq, q_tiles * problem.batch * problem.num_heads_q),
            *_sink_launches(problem),
        ),
        num_found=_num_found(problem, tile),
    )


# ---- Steps that families share ----

_ROW_THREADS = 256  # of the kernels that take rows one by one


def _element(problem: Problem) -> str:
    return _ELEMENTS.get(problem.dtype, problem.dtype)


def _num_rows(problem: Problem) -> int:
    return problem.batch * problem.seqlen_q * problem.num_heads_q


def _delta_launch(
    problem: Problem, block_q: int, dq_columns: int, adds_to_dq: bool = False
) -> Launch:
    """rowsum(dO * O), and zeroes for what the main kernel adds to."""
    in_chunk = 1 if problem.dtype in ("float32", "float64") else 8
    chunks = _ceil_div(problem.head_dim_v, in_chunk)
    lanes = min(1 << (chunks - 1).bit_length(), 32)
    kernel = KernelPlan(
        file="backward_delta.cu",
        entry="backward_delta",
        constants=(
            ("Element", _element(problem)),
            ("NUM_THREADS", _ROW_THREADS),
            ("LANES", lanes),
            ("BLOCK_Q", block_q),
            ("DQ_COLUMNS", dq_columns),
            ("ADDS_TO_DQ", adds_to_dq),
            _arguments(problem),
            _packed(problem),
        ),
        threads=_ROW_THREADS,
        shared_bytes=0,
    )
    return Launch(kernel, _ceil_div(_num_rows(problem) * lanes, _ROW_THREADS))


def _finding_launches(
    problem: Problem, tile: Tile, kind: str = ""
) -> tuple[Launch, ...]:
    """What the others ask: segment ids of tiles, or packed sequences."""
    options = _option_constants(problem, kind)
    constants = (("NUM_THREADS", _ROW_THREADS), *options)
    if problem.segment_ids:  # a warp a tile
        sizes = ("BLOCK_Q", tile.block_q), ("BLOCK_K", tile.block_k)
        kernel = KernelPlan(
            file="segment_ranges.cu",
            entry="segment_ranges",
            constants=(*sizes, *constants),
            threads=_ROW_THREADS,
            shared_bytes=0,
        )
        warps = _num_found(problem, tile) // 2
        return (Launch(kernel, _ceil_div(warps * 32, _ROW_THREADS)),)
    if problem.num_sequences is not None:
        kernel = KernelPlan(
            file="sequences.cu",
            entry="sequences",
            constants=(("Element", _element(problem)), *constants),
            threads=_ROW_THREADS,
            shared_bytes=16 * _ROW_THREADS,
        )
        return (Launch(kernel, 1),)
    return ()


def _num_found(problem: Problem, tile: Tile) -> int:
    """Two of each tile with segments; three of packed sequences."""
    if problem.num_sequences is not None:
        return 3
    if not problem.segment_ids:
        return 0
    q_tiles = _ceil_div(problem.seqlen_q, tile.block_q)
    k_tiles = _ceil_div(problem.seqlen_k, tile.block_k)
    return 2 * problem.batch * (q_tiles + k_tiles)


def _num_tiles(problem: Problem, seqlen: int, block: int) -> int:
    """Of a head; of packed sequences places for them (sequences.cuh)."""
    if problem.num_sequences is None:
        return _ceil_div(seqlen, block)
    return seqlen // block + problem.num_sequences + 1


def _sink_launches(problem: Problem) -> tuple[Launch, ...]:
    """The gradient of sinks, a block a head, if it is wanted."""
    if not problem.return_dsink:
        return ()
    shared = 8 * _ROW_THREADS
    kernel = KernelPlan(
        file="backward_sink.cu",
        entry="backward_sink",
        constants=(
            ("Element", _element(problem)),
            _packed(problem),
            ("NUM_THREADS", _ROW_THREADS),
            ("SHARED_BYTES", shared),
        ),
        threads=_ROW_THREADS,
        shared_bytes=shared,
    )
    return (Launch(kernel, problem.num_heads_q),)


def _merge_plan(problem: Problem) -> Plan:
    kernel = KernelPlan(
        file="merge.cu",
        entry="merge",
        constants=(
            ("Element", _element(problem)),
            ("NUM_THREADS", _ROW_THREADS),
        ),
        threads=_ROW_THREADS,
        shared_bytes=0,
    )
    blocks = _ceil_div(_num_rows(problem) * 32, _ROW_THREADS)  # a warp a row
    family = "mma" if _element(problem) == problem.dtype else "simt"
    return Plan(problem, family, None, (Launch(kernel, blocks),))


_PLANNERS = {
    ("wgmma", "forward"): _forward_wgmma,
    ("wgmma", "backward"): _backward_wgmma,
    ("mma", "forward"): _forward_mma,
    ("mma", "backward"): _backward_mma,
    ("fma", "forward"): _forward_fma,
    ("dmma", "forward"): _forward_mma8,
    ("tf32x3", "forward"): _forward_mma8,
    ("dmma", "backward"): _backward_mma8,
    ("tf32x3", "backward"): _backward_mma8,
    ("simt", "forward"): _forward_simt,
    ("fma", "backward"): _backward_fma,
    ("simt", "backward"): _backward_simt,
}
_SHARED = {
    ("wgmma", "forward"): _forward_wgmma_shared,
    ("wgmma", "backward"): _backward_wgmma_shared,
    ("mma", "forward"): _forward_mma_shared,
    ("mma", "backward"): _backward_mma_shared,
    ("fma", "forward"): _forward_fma_shared,
    ("dmma", "forward"): _forward_mma8_shared,
    ("tf32x3", "forward"): _forward_mma8_shared,
    ("dmma", "backward"): _backward_mma8_shared,
    ("tf32x3", "backward"): _backward_mma8_shared,
    ("simt", "forward"): _forward_simt_shared,
    ("fma", "backward"): _backward_fma_shared,
    ("simt", "backward"): _backward_simt_shared,
}
_REGISTERS = {
    ("wgmma", "forward"): _forward_wgmma_fits,
    ("wgmma", "backward"): _backward_wgmma_fits,
    ("mma", "forward"): _forward_mma_fits,
    ("mma", "backward"): _backward_mma_fits,
    ("fma", "forward"): _forward_fma_fits,
    ("dmma", "forward"): _forward_mma8_fits,
    ("tf32x3", "forward"): _forward_mma8_fits,
    ("dmma", "backward"): _backward_mma8_fits,
    ("tf32x3", "backward"): _backward_mma8_fits,
    ("simt", "forward"): _simt_fits,
    ("fma", "backward"): _backward_fma_fits,
    ("simt", "backward"): _simt_fits,
}


def default_plans(device: Device) -> list[Plan]:
    """The plans that are compiled at import: what most calls need."""
    plans = []
    for direction in ("forward", "backward"):
        for dtype in ("float16", "bfloat16"):
            for head_dim in (64, 128):
                for causal in (False, True):
                    # Tiles are chosen by length and number: of 2048 tokens,
                    # and enough of them for any GPU.
                    problem = Problem(
                        direction, dtype, 8, 2048, 2048, 16, 16, head_dim,
                        head_dim, head_dim**-0.5, causal,
                    )
                    if device.capability >= 80:
                        plans.append(plan(problem, device))
    return plans
