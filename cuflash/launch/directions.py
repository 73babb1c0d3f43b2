"""What kernels of each direction read, write and need between, by name.

The names are those of the pointers of its argument structs (structs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cuflash.request import options
from cuflash.request.problem import MOST_STATES
from cuflash.request.readout import READOUT_ARRAYS
from cuflash.request.traced import MOST as MOST_MOD_ARRAYS

# The kernels take one array and up to this many more (partial/rows.cuh).
MOST_OTHERS = 3


@dataclass(frozen=True)
class Direction:
    """The pointers of a direction's structs; a call may lack any of them.

    Attributes
    ----------
    reads : tuple of str
        The user's arrays, and those of a launch before.
    writes : tuple of str
        Results. A pointer may be among both: jvp's kernels write out, or
        read it after a forward call.
    between : tuple of str
        Workspace that one kernel leaves to another (plans/workspace.py).
    numbers : tuple of str
        Numbers of the call that differ between equal calls.
    arguments : mapping of str to str
        The names of arguments that differ from those of their pointers.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    between: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)

    def check(
        self,
        pointers: Iterable[str],
        written: Iterable[str],
        buffers: Iterable[str],
    ) -> None:
        """Each pointer has a source; each result and buffer, a pointer."""
        known = {*self.reads, *self.writes, *self.between, *self.numbers}
        assert known.issuperset(pointers), {*pointers} - known
        assert {*self.writes}.issuperset(written), {*written}
        assert {*self.between}.issuperset(buffers), {*buffers}


_PREPARED = (
    "sequence_stats", "query_tile_ids", "key_tile_ids", "tile_order",
    "lse_rests", "tile_flags", "mask_bits",
)  # fmt: skip
_OF_GRADIENTS = (
    *_PREPARED, "delta", "dq_sum", "tile_counter", "recompute_flags",
    "dq_semaphores",
)  # fmt: skip
_SPLIT = "split_out", "split_lse"
_GIVEN = "dout", "q", "k", "v", "out", "lse", "dlse"
_GRADIENTS = tuple(f"d{x}" for x in options.MOVED)
_TANGENTS = tuple(f"{x}_dot" for x in options.MOVED)
_OF_OTHERS = range(MOST_OTHERS)
_MOD_ARRAYS, _MOD_NUMBERS, _MOD_DOTS, _DMODS, _DMOD_SUMS = (
    tuple(f"{name}[{i}]" for i in range(MOST_MOD_ARRAYS))
    for name in (
        "mod_arrays", "mod_numbers", "mod_dots", "dmods", "dmod_sums"
    )
)  # fmt: skip
# A tangent is called as what it moves, "_dot".
_OF_MOVING = {
    x: f"{y}_dot" for x, y in zip(_MOD_DOTS, _MOD_ARRAYS, strict=True)
}

DIRECTIONS = {
    "forward": Direction(
        ("q", "k", "v", *options.ARRAYS, *_MOD_ARRAYS),
        ("out", "lse", "max_score"),
        (*_PREPARED, *_SPLIT, "tile_counter", "previous_tiles", "key_parts"),
        ("seed", *_MOD_NUMBERS),
    ),
    "backward": Direction(
        (*_GIVEN, *options.ARRAYS, *_MOD_ARRAYS),
        (*_GRADIENTS, *_DMODS),
        (*_OF_GRADIENTS, *_DMOD_SUMS),
        ("seed", *_MOD_NUMBERS),
    ),
    "jvp": Direction(
        (
            "q", "k", "v", "out", "lse", *options.ARRAYS, *_TANGENTS,
            *_MOD_ARRAYS, *_MOD_DOTS,
        ),
        ("out", "lse", "out_dot", "lse_dot"),
        (*_PREPARED, "recompute_flags"),
        ("seed", *_MOD_NUMBERS),
        _OF_MOVING,
    ),
    "double_backward": Direction(
        (
            *_GIVEN, *options.ARRAYS, *_TANGENTS, "out_dot", "lse_dot",
            *_MOD_ARRAYS, *_MOD_DOTS,
        ),
        (*_GRADIENTS, *_DMODS),
        (*_OF_GRADIENTS, "delta_dot", "query_rows", *_DMOD_SUMS),
        ("seed", *_MOD_NUMBERS),
        _OF_MOVING,
    ),
    "readout": Direction(
        (
            "q", "k", "lse", *READOUT_ARRAYS, "cotangent", *options.ARRAYS,
            *_MOD_ARRAYS,
        ),
        ("result", "dq", "dk", "dlse", "drow_weights", *_DMODS),
        (*_PREPARED, "maxima", *_DMOD_SUMS),
        ("seed", *_MOD_NUMBERS),
    ),
    "kvcache": Direction(
        (
            "q_given", "q", "k", "v", "k_new", "v_new",
            *(x for x in options.KVCACHE if x in options.ARRAYS),
            "cache_seqlens", "page_table", "cache_batch_idx",
            "cache_leftpad", "cu_seqlens_q", "k_scale", "v_scale",
            "rotary_cos", "rotary_sin", *_MOD_ARRAYS,
        ),
        ("out", "lse", "k", "v"),
        ("rotated", *_SPLIT, "tile_flags", "mask_bits"),
        ("cache_seqlen", *_MOD_NUMBERS),
        {"q_given": "q", "k": "k_cache", "v": "v_cache"},
    ),
    "merge": Direction(
        tuple(f"{x}[{i}]" for x in ("outs", "lses")
              for i in range(MOST_STATES)),
        ("out", "lse"),
    ),
    "rotary": Direction(("x", "cos", "sin", "positions"), ("out",)),
    "merge_rows": Direction(
        ("a", *(f"{x}{i}" for x in ("b", "lse_b") for i in _OF_OTHERS)),
        ("result", "lse_a"),
    ),
    "add_rows": Direction(
        ("a", *(f"b{i}" for i in _OF_OTHERS)), ("result",)
    ),
}  # fmt: skip
