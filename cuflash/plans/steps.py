"""Shared by all families: sizes, constants, prepare and finish launches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, TypedDict

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request import mod_tangents, options
from cuflash.request.problem import Problem

from . import expression
from .arguments import parts_of, struct_name
from .kernel import EVEN_SECTIONS, Constant, Device, KernelPlan, Launch, Plan
from .record import FAMILIES, FamilyName
from .rounding import ceil_div, round_up


def heads_per_section(
    problem: Problem, device: Device, num_heads: int, bytes_of_head: int
) -> int:
    """The number of heads whose shared data fit in half of L2."""
    fitting = device.l2_bytes // 2 // max(bytes_of_head, 1)
    return max(1, min(fitting, problem.batch * num_heads))


# Tiles for each block that runs at a time, in the last section. The mean of a
# head's causal tiles is half as long as the longest: with two, the longest
# tile, which comes first, takes as long as the section does.
LAST_TILES = 2


def last_section(
    problem: Problem, heads: int, pairs: int, tiles: int, running: int,
    of_block: int = LAST_TILES,
) -> int:  # fmt: skip
    """The section of all (batch, head) pairs that are left.

    It has more pairs than the `heads` of other sections where tiles differ in
    length. Blocks would otherwise wait for the longest tile of the last few
    heads. A pair has `tiles`; `running` blocks run at a time, and have
    `of_block` tiles each.
    """
    has_triangle = problem.causal and "tiles" not in options.acts(problem)
    if not has_triangle:
        return EVEN_SECTIONS
    least = ceil_div(of_block * running, max(tiles, 1))
    return max(pairs - least, 0) // heads


class Sections(TypedDict):
    """Fields of a `Plan`."""

    heads_per_section: int
    last_section: int


def sections(
    problem: Problem, device: Device, kernel: KernelPlan, num_heads: int,
    bytes_of_head: int, pairs: int, tiles: int,
) -> Sections:  # fmt: skip
    """The sections of (batch, head) pairs with so many `tiles` each."""
    heads = heads_per_section(problem, device, num_heads, bytes_of_head)
    running = device.num_sms * device.blocks_by_shared(kernel.shared_bytes)
    return {
        "heads_per_section": heads,
        "last_section": last_section(problem, heads, pairs, tiles, running),
    }


# kernels/common/smem.cuh: rows of 128 bytes, panels of 64 columns.
_PANEL_COLUMNS, _PANEL_ROW_BYTES = 64, 128


def tile_bytes(rows: int, columns: int) -> int:
    """Bytes of common/smem.cuh's SmemTile, rounded up to 1024."""
    panels = ceil_div(columns, _PANEL_COLUMNS)
    return round_up(panels * rows * _PANEL_ROW_BYTES, 1024)


# The largest head dimension of tensor-core kernels, which keep rows in
# registers.
MAX_OF_TENSOR_CORES = 256

# kernels/sm80/mma.cuh: multiples of head_dim that all warp layouts can share;
# four warps share the columns of wide heads.
HEAD_DIM_STEP, WIDE_HEAD_DIM_STEP = 32, 64


def is_wide(problem: Problem) -> bool:
    """Whether a head is wider than a warp's rows may be in registers."""
    return max(problem.head_dim, problem.head_dim_v) > MAX_OF_TENSOR_CORES


def padded_head_dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions for which kernels of mma.sync are compiled."""
    step = WIDE_HEAD_DIM_STEP if is_wide(problem) else HEAD_DIM_STEP
    return (
        round_up(problem.head_dim, step),
        round_up(problem.head_dim_v, step),
    )


ELEMENTS = {"float32": "float", "float64": "double"}

# kernels/common/padded_tiles.cuh: elements that pad each row of a tile.
ROWS_PAD = 4


def element(problem: Problem) -> str:
    return ELEMENTS.get(problem.dtype, problem.dtype)


def element_bytes(problem: Problem) -> int:
    return {"float64": 8, "float32": 4}.get(problem.dtype, 2)


def lse_bytes(problem: Problem) -> int:
    return 8 if problem.lse_dtype == "float64" else 4


def num_rows(problem: Problem) -> int:
    return problem.batch * problem.seqlen_q * problem.num_heads_q


def arguments(
    problem: Problem, family: FamilyName, reads_dlse: bool = False
) -> tuple[str, str]:
    """The argument struct of the kernels in a plan of a family.

    That of a plain backward call begins with its arrays: kernels that do not
    read dlse, which comes last, take these alone.
    """
    parts = parts_of(problem, FAMILIES[family])
    name = struct_name(problem.direction, parts)
    return "Arguments", name if reads_dlse else name.replace("Plain", "")


def tangent_constants(problem: Problem) -> tuple[tuple[str, bool], ...]:
    """The constants of a kernel with tangents: which inputs move."""
    tangents = problem.tangents
    if tangents is None:
        return ()
    moving = tangents.of if tangents.count else ()
    return (
        *((f"{x.upper()}_DOT", x in moving) for x in options.MOVED),
        ("MOD_DOT", bool(mod_tangents.slots_of(moving))),
    )


def num_directions(problem: Problem) -> int:
    """The directions that kernels compute: without any, nothing moves."""
    assert problem.tangents is not None
    return max(problem.tangents.count, 1)


class DirectionGroups(NamedTuple):
    """The directions of a JVP that a launch computes.

    Attributes
    ----------
    directions : int
        Directions of a block.
    groups : int
        The number of such groups.
    which : str
        ``"all"``, or all but a last one; ``"last"``, that one; ``"first"``;
        ``"rest"``, all but the first, whose launch has written out.
    """

    directions: int
    groups: int
    which: str = "all"

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        """The constants of score/directions.cuh."""
        return (
            ("DIRECTIONS", self.directions),
            ("FIRST_DIRECTION", self.which == "first"),
            ("LAST_DIRECTION", self.which == "last"),
            ("READS_OUT", self.which == "rest"),
        )


def direction_groups(
    problem: Problem, tile: Tile
) -> tuple[DirectionGroups, ...]:
    """How launches divide a JVP's directions among blocks."""
    groups, alone = divmod(num_directions(problem), tile.directions)
    last = (DirectionGroups(1, 1, "last"),) if alone else ()
    return DirectionGroups(tile.directions, groups), *last


def option_constants(
    problem: Problem, family: FamilyName, reads_dlse: bool = False
) -> tuple[tuple[str, bool | str], ...]:
    """The option constants of a kernel that supports all options.

    `family`: of the plan; `reads_dlse`: as of `arguments`.
    """
    bias = ELEMENTS.get(problem.bias or "", problem.bias or "float")
    return (
        arguments(problem, family, reads_dlse),
        *options.flags(problem),
        ("FLAGS_OF_GROUPS", problem.direction.endswith("backward")),
        ("Bias", bias),
    )


def adds_floats(problem: Problem) -> bool:
    """Whether a float32 array is added to scores."""
    return problem.bias == "float32"


def some_options(
    problem: Problem, family: FamilyName, *names: str, reads_dlse: bool = False
) -> tuple[tuple[str, bool | str], ...]:
    """The option constants of a kernel that depends on a few options.

    The other constants are as if those options were absent, so that one
    compiled kernel serves all calls that differ only in them.
    """
    kept = {"Arguments", "PACKED", "FLAGS_OF_GROUPS", *names}
    return tuple(
        (name, value if name in kept else "float" if name == "Bias" else False)
        for name, value in option_constants(problem, family, reads_dlse)
    )


def is_packed(problem: Problem) -> bool:
    return problem.num_sequences is not None


def is_linear(problem: Problem) -> bool:
    """score/score_mod.cuh's LINEAR: scores are QK^T times scale."""
    return options.acts(problem).isdisjoint(("bends", "adds"))


def window_of(problem: Problem) -> float:
    """The most keys that the window lets a query see; inf if unbounded.

    It is also the most queries that see a key.
    """
    left, right = problem.window
    right = 0 if problem.causal else right
    if left is None or right is None:
        return math.inf
    return left + right + 1


def has_left_bound(problem: Problem) -> bool:
    """Whether the window hides keys that are far before a query."""
    return problem.window[0] is not None


# The most keys of which tensor cores sum weights times values of one sign
# without losing more than half of float16's unit roundoff, 2^-11: n keys lose
# n / 10 * 2^-24 (docs/guide/accuracy.md). More are summed in two levels.
LONGEST_RUN = 32768


def longest_run(device: Device) -> int:
    """LONGEST_RUN; a quarter below sm_80.

    Tensor cores add 4 products at a time there, not 16, and lose as much each
    time (docs/guide/accuracy.md).
    """
    return LONGEST_RUN if device.capability >= 80 else LONGEST_RUN // 4


def run_tiles(
    problem: Problem, tile: Tile, most: int | None = None
) -> tuple[str, int]:
    """common/long_sums.cuh's RUN_TILES; `most`: by default LONGEST_RUN keys.

    Above head_dim 128 an addition of runs costs 3 % of 32,768 keys on an
    H200 (docs/lab/sm90_forward.md), so a run has four times as many.
    """
    longest = problem.max_seqlen_k or problem.seqlen_k
    run = (most or LONGEST_RUN) * (1 if problem.head_dim_v <= 128 else 4)
    is_long = min(longest, window_of(problem)) > run
    tiles = max(run // tile.block_k, 1)
    return "RUN_TILES", tiles if is_long else 0


ROW_THREADS = 256  # threads of the kernels that process rows


def row_kernel(
    file: str, entry: str, *constants: Constant,
    threads: int = ROW_THREADS, shared_bytes: int = 0,
) -> KernelPlan:  # fmt: skip
    """A kernel of what stands around main ones, by rows or tokens."""
    own: tuple[Constant, ...] = (("NUM_THREADS", threads),)
    if shared_bytes:
        own = (*own, ("SHARED_BYTES", shared_bytes))
    return KernelPlan(file, entry, (*constants, *own), threads, shared_bytes)


# prepare/segment_order.cu has slots for this many tiles, and for four times
# as many ranges: no tile is longer than three tiles of the other kind.
ORDER_THREADS, ORDER_BYTES = 1024, 16 + 4 * 8


def delta_launch(
    problem: Problem, family: FamilyName, block_q: int, dq_columns: int
) -> Launch:
    """Computes delta, and zeroes what the family's main kernel adds to.

    Before a double backward it computes delta_dot too.
    """
    again = problem.direction == "double_backward"
    size = element_bytes(problem)
    aligned = size == 2 or FAMILIES[family].loads == "vectors"
    vector = 16 // size if aligned and not again else 1
    chunks = ceil_div(problem.head_dim_v, vector)
    lanes = min(1 << (chunks - 1).bit_length(), 32)
    own: tuple[Constant, ...] = () if again else (("VECTOR", vector),)
    kernel = row_kernel(
        f"prepare/{'double_' * again}delta.cu",
        f"{problem.direction}_delta",
        ("Element", element(problem)),
        ("LANES", lanes),
        *own,
        ("BLOCK_Q", block_q),
        ("DQ_COLUMNS", dq_columns),
        ("ADDS_TO_DQ", FAMILIES[family].adds_to_dq),
        ("DLSE", problem.dlse),
        arguments(problem, family, reads_dlse=True),
        ("PACKED", is_packed(problem)),
    )
    return Launch(kernel, ceil_div(num_rows(problem) * lanes, ROW_THREADS))


def option_launches(
    problem: Problem, tile: Tile, family: FamilyName
) -> tuple[Launch, ...]:
    """Launches that prepare tile flags, segment ranges, packed sequences.

    These kernels depend on no other option, so they serve calls with any
    others. Only tile flags and the order of tiles depend on the window too.
    """
    launches = _tile_flag_launches(problem, tile, family)
    flags = some_options(problem, family, "SEGMENTS")
    if problem.segment_ids:  # one warp per tile
        kernel = row_kernel(
            "prepare/segment_ranges.cu", "segment_ranges",
            ("BLOCK_Q", tile.block_q), ("BLOCK_K", tile.block_k), *flags,
        )  # fmt: skip
        warps = sum(_tiles_of_segments(problem, tile))
        ranges = Launch(kernel, ceil_div(warps * 32, ROW_THREADS))
        launches = (*launches, ranges)
    elif is_packed(problem):
        kernel = row_kernel(
            "prepare/packed_sequences.cu", "sequences",
            ("Element", element(problem)), *flags,
            shared_bytes=16 * ROW_THREADS,
        )  # fmt: skip
        launches = (Launch(kernel, 1),)  # without tile flags
    if FAMILIES[family].loads_by_tma and skips_tiles(problem):
        return *launches, _order_launch(problem, tile, family)
    return launches


def _tile_flag_launches(
    problem: Problem, tile: Tile, family: FamilyName
) -> tuple[Launch, ...]:
    """Finds which tiles the user's mask hides, or leaves whole."""
    count = expression.count_tile_flags(problem, tile)
    if count == 0:
        return ()
    warps = ROW_THREADS // 32
    options = some_options(problem, family, "WINDOW", "MASK_MOD")
    of_warp = 2 if problem.causal or dict(options)["WINDOW"] else 1  # tiles
    has_bits = FAMILIES[family].loads_by_tma and (
        count_mask_words(problem, tile) > 0
    )
    kernel = row_kernel(
        "prepare/tile_flags.cu",
        "tile_flags",
        ("Element", element(problem)),
        ("CAUSAL", problem.causal),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("MASK_BITS", has_bits),
        *options,
        shared_bytes=12 * warps * of_warp,
    )
    tiles = ceil_div(problem.seqlen_q, tile.block_q)  # of a head
    tiles *= ceil_div(problem.seqlen_k, tile.block_k)
    blocks = ceil_div(ceil_div(tiles, of_warp), warps)
    return (Launch(kernel, count // tiles * blocks),)


# Bytes of the pairs' bits of a mask, if all tiles are partly visible: 32,768
# tokens of a sequence. They are a small part of such a GPU's memory, and only
# those of partly visible tiles are ever written.
_MOST_MASK_BYTES = 1 << 27


def count_mask_words(problem: Problem, tile: Tile) -> int:
    """The words of score/expression_flags.cuh's bits; 0 without any.

    For masks that heads share, if nothing else masks pairs one by one: tiles
    may then be partly visible for another reason.
    """
    mask = problem.mask_mod
    if mask is None or "h" in mask.depends:
        return 0
    if problem.segment_ids or problem.mask:
        return 0
    rows, columns = tile.block_q, tile.block_k
    if problem.direction == "backward":
        rows, columns = columns, rows
    words = ceil_div(rows, 16) * ceil_div(columns, 64) * 32
    words *= expression.count_tile_flags(problem, tile)
    return words if 4 * words <= _MOST_MASK_BYTES else 0


def skips_tiles(problem: Problem) -> bool:
    """score/pair_mask.cuh's SKIPS_TILES."""
    return problem.segment_ids or problem.mask_mod is not None


def _order_launch(problem: Problem, tile: Tile, family: FamilyName) -> Launch:
    """Computes the order in which the dynamic scheduler hands out tiles."""
    of_element = (("Element", element(problem)),) if problem.mask_mod else ()
    kernel = row_kernel(
        "prepare/segment_order.cu",
        "segment_order",
        *of_element,
        ("CAUSAL", problem.causal),
        ("OF_KEYS", problem.direction == "backward"),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        *some_options(problem, family, "WINDOW", "SEGMENTS", "MASK_MOD"),
        threads=ORDER_THREADS,
        shared_bytes=ORDER_BYTES * ORDER_THREADS,
    )
    return Launch(kernel, 1)


def _tiles_of_segments(problem: Problem, tile: Tile) -> tuple[int, int]:
    """The numbers of query tiles and of key tiles of all batches."""
    q_tiles = ceil_div(problem.seqlen_q, tile.block_q)
    k_tiles = ceil_div(problem.seqlen_k, tile.block_k)
    return problem.batch * q_tiles, problem.batch * k_tiles


# prepare/lse_rests.cu: a block's tile, and the columns it loads at once.
_REST_TILE, _REST_COLUMNS = Tile(64, 64, ROW_THREADS // 32), 32


def has_lse_rests(problem: Problem) -> bool:
    """Whether scores may share an offset: score/lse_rest.cuh."""
    return "adds" in options.acts(problem)


def lse_rest_launches(
    problem: Problem, family: FamilyName
) -> tuple[Launch, ...]:
    """Finds what rounding took from the lse of rows whose scores are large."""
    if not has_lse_rests(problem):
        return ()
    tile = _REST_TILE
    rows = tile.block_q + tile.block_k
    kernel = row_kernel(
        "prepare/lse_rests.cu",
        "lse_rests",
        ("Element", element(problem)),
        ("CAUSAL", problem.causal),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        *some_options(
            problem, family,
            *("WINDOW", "SOFTCAP", "ALIBI", "BIAS", "Bias"),
            *("SINK", "SEGMENTS", "HAS_MASK", "SCORE_MOD", "MASK_MOD"),
        ),
        shared_bytes=lse_bytes(problem) * rows * (_REST_COLUMNS + 1),
    )  # fmt: skip
    return (Launch(kernel, query_tiles(problem, tile.block_q)),)


def lse_rest_buffers(problem: Problem) -> tuple[Buffer, ...]:
    """What `lse_rest_launches` write."""
    if not has_lse_rests(problem):
        return ()
    return (Buffer("lse_rests", lse_bytes(problem), num_rows(problem)),)


def option_buffers(problem: Problem, tile: Tile) -> tuple[Buffer, ...]:
    """What `option_launches` write for any family."""
    if is_packed(problem):
        return (Buffer("sequence_stats", 12, 1),)
    count = expression.count_tile_flags(problem, tile)
    flags = (Buffer("tile_flags", 1, count),) if count else ()
    if problem.segment_ids:
        q_tiles, k_tiles = _tiles_of_segments(problem, tile)
        return (
            Buffer("query_tile_ids", 8, q_tiles),
            Buffer("key_tile_ids", 8, k_tiles),
            *flags,
        )
    return flags


def delta_buffers(problem: Problem) -> tuple[Buffer, ...]:
    """What `delta_launch` writes."""
    again = problem.direction == "double_backward"
    names = ("delta", "delta_dot") if again else ("delta",)
    itemsize, rows = lse_bytes(problem), num_rows(problem)
    return tuple(Buffer(name, itemsize, rows) for name in names)


def semaphore_buffers(problem: Problem, q_tiles: int) -> tuple[Buffer, ...]:
    """One semaphore per query tile, if dQ is summed in order."""
    if not problem.deterministic:
        return ()
    return (
        Buffer("tile_counter", 4, 1),
        Buffer("dq_semaphores", 4, q_tiles),
    )


def count_tiles(problem: Problem, seqlen: int, block: int) -> int:
    """Tiles per head; for packed sequences, the number of tile slots.

    See common/packed_sequences.cuh.
    """
    if problem.num_sequences is None:
        return ceil_div(seqlen, block)
    return seqlen // block + problem.num_sequences + 1


def query_tiles(problem: Problem, block_q: int) -> int:
    """Tiles of the queries of all heads of the batch."""
    tiles = count_tiles(problem, problem.seqlen_q, block_q)
    return tiles * problem.batch * problem.num_heads_q


def key_tiles(problem: Problem, block_k: int) -> int:
    """Tiles of the keys of all heads of the batch."""
    tiles = count_tiles(problem, problem.seqlen_k, block_k)
    return tiles * problem.batch * problem.num_heads_kv


def rounding_launch(
    problem: Problem,
    tile: Tile,
    family: FamilyName,
    head_dims: tuple[int, int],
    blocks: int,
    num_warps: int,
    *,
    recomputes: bool = False,
    semaphores: int = 0,
    integers: bool = False,
) -> Launch:
    """Rounds the sums of dQ, and recomputes rows if asked to.

    One block per query tile, then one per key tile for recomputation. Only a
    kernel that recomputes depends on masks, score modifications and
    semaphores; no kernel depends on DBIAS. `integers`: the sums are those of
    sm90/integer_dq.cuh.
    """
    d, dv = head_dims
    shared = tile_bytes(tile.block_q, d)
    flags = (option_constants if recomputes else some_options)(
        problem, family, reads_dlse=True
    )
    kernel = KernelPlan(
        file="finish/dq.cu",
        entry="backward_dq",
        constants=(
            ("Element", problem.dtype),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", num_warps),
            ("SCORE_WARPS_Q", tile.score_warps_q),
            ("SHARED_BYTES", shared),
            *(x for x in flags if x[0] not in ("DBIAS", "STORES_DBIAS")),
            ("RECOMPUTES", recomputes),
            ("CAUSAL", recomputes and problem.causal),
            ("DQ_SEMAPHORES", semaphores if recomputes else 0),
            ("INTEGER_DQ", integers),
            ("DLSE", recomputes and problem.dlse),
        ),
        threads=num_warps * 32,
        shared_bytes=shared,
    )
    return Launch(kernel, blocks)


def gradients_of_rows(
    problem: Problem, tile: Tile, family: FamilyName, integers: bool = False
) -> tuple[Launch, ...]:
    """The gradient of sinks, one block per head, if requested.

    `integers`: as of `rounding_launch`.
    """
    if not problem.return_dsink:
        return ()
    flags = dict(options.flags(problem))
    kernel = row_kernel(
        "finish/dsink.cu",
        "backward_sink",
        ("Element", element(problem)),
        arguments(problem, family),
        ("PACKED", is_packed(problem)),
        ("BLOCK_Q", tile.block_q),
        ("ALIBI", flags["ALIBI"]),
        ("BIAS", flags["BIAS"]),
        ("SCORE_MOD", flags["SCORE_MOD"]),
        ("IN_TILES", FAMILIES[family].loads_by_tma),
        ("SEGMENTS", flags["SEGMENTS"]),
        ("INTEGER_DQ", integers),
        shared_bytes=8 * ROW_THREADS,
    )
    return (Launch(kernel, problem.num_heads_q),)


def shares_evenly(
    tile: Tile, num_warps: int, head_dims: tuple[int, int], rows: int,
    keys: int, columns: int,
) -> bool:  # fmt: skip
    """Whether warps get as much of each product of a backward pass.

    A warp has multiples of `rows` and `keys` of scores, and of 16 keys and
    `columns` of gradients.
    """
    across = num_warps // tile.score_warps_q
    gradient_across = num_warps // tile.gradient_warps_k
    d, dv = head_dims
    shares = (
        tile.block_q % (tile.score_warps_q * rows),
        tile.block_k % (across * keys),
        d % (across * columns),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * columns),
        dv % (gradient_across * columns),
    )
    return not any(shares)


def kept_and_summed(tile: Tile, d: int, dv: int, words: int = 1) -> int:
    """Accumulator registers of a thread: dK and dV, and scores or dq.

    `words` is the number of registers per element.
    """
    threads = tile.num_warps * 32
    kept = words * tile.block_k * (d + dv) // threads
    scores = words * 2 * tile.block_q * tile.block_k // threads
    dq = words * tile.block_q * d // threads
    return kept + max(scores, dq)


def kernel_of(
    problem: Problem,
    tile: Tile,
    family: FamilyName,
    head_dims: tuple[int, int],
    shared: int,
    *own: Constant,
    name: str = "",
    part: str = "",
    planned_by: FamilyName | None = None,
    ptxas_level: int = 3,
) -> KernelPlan:
    """A family's kernel of the problem's direction.

    Parameters
    ----------
    problem, tile, family
    head_dims : tuple of int
        For which it is compiled.
    shared : int
        Bytes of a block.
    *own : tuple
        Constants of its own.
    name : str, optional
        By default that of the direction.
    part : str, optional
        How its name ends, of several kernels of a direction.
    planned_by : str, optional
        The family of the plan, if it is another one.
    ptxas_level : int, optional
    """
    kvcache = problem.direction == "kvcache"
    name = name or ("forward" if kvcache else problem.direction)
    record = FAMILIES[family]
    return KernelPlan(
        file=f"{record.folder}/{name}{part}.cu",
        entry=f"{name}_{record.entry or family}{part}",
        constants=(
            ("Element", element(problem)),
            ("HEAD_DIM", head_dims[0]),
            ("HEAD_DIM_V", head_dims[1]),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("SHARED_BYTES", shared),
            *own,
            ("MAX_SCORE", problem.return_max_score),
            *option_constants(problem, planned_by or family),
            *tangent_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=ptxas_level,
    )


def without_sums(kernel: KernelPlan) -> KernelPlan:
    """The kernel, not adding up gradients of scores: another one does."""
    once = {"DBIAS": False, "DMOD": False}
    constants = tuple((x, once.get(x, y)) for x, y in kernel.constants)
    return replace(kernel, constants=constants)


def main_kernel(
    problem: Problem, tile: Tile, family: FamilyName,
    head_dims: tuple[int, int], shared: int, *own: Constant, part: str = "",
) -> KernelPlan:  # fmt: skip
    """A kernel whose warps and blocks are the tile's; see `kernel_of`."""
    return kernel_of(
        problem, tile, family, head_dims, shared,
        ("NUM_WARPS", tile.num_warps),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        *own, part=part, ptxas_level=tile.ptxas_level,
    )  # fmt: skip


def merge_plan(problem: Problem) -> Plan:
    states = min(problem.num_states, 32)
    kernel = row_kernel(
        "merge.cu",
        "merge",
        ("Element", element(problem)),
        ("LANES", next(x for x in (2, 8, 32) if x >= states)),
        arguments(problem, "simt"),
    )
    blocks = ceil_div(num_rows(problem) * 32, ROW_THREADS)  # a warp per row
    return plan_of_one(problem, kernel, blocks)


def plan_of_one(problem: Problem, kernel: KernelPlan, blocks: int) -> Plan:
    """The plan of a kernel without tiles, which has no families.

    A plan needs one all the same: its record says that there are no
    TensorMaps, and fuzzing counts calls by it. So it is the one that has the
    dtype on most GPUs: sm80 for 16 bits, simt for others.
    """
    has_16_bits = element_bytes(problem) == 2
    family: FamilyName = "sm80" if has_16_bits else "simt"
    return Plan(problem, family, None, (Launch(kernel, blocks),))
