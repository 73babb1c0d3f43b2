"""The parts of argument structs: which fields a call adds, and where.

A direction's structs have its arrays, and the parts for what a call has:
options, TensorMaps, split keys. structs.py composes them.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash.launch.c_structs import Fields
from cuflash.request import options
from cuflash.request.traced import MOST as MOST_MOD_ARRAYS


class Part(NamedTuple):
    """Fields that a call's struct has beside the arrays of its direction.

    Attributes
    ----------
    of : str
        The words (`structs.chosen`) that a call needs to have it.
    pointers, numbers, last : tuple of Fields
        What stands before the arrays, after them, and at the end.
    """

    of: str = ""
    pointers: tuple[Fields, ...] = ()
    numbers: tuple[Fields, ...] = ()
    last: tuple[Fields, ...] = ()


def _maps(names: str) -> Part:
    return Part("maps", (("TensorMap", names),))


# The array options, then the seed, then the workspace of prepare/.
_OPTIONS = Part(
    "options",
    (
        *(
            (
                "const void*",
                option.name,
                f"{' or '.join(option.array.dtypes)}, {option.array.words}",
            )
            for option in options.TABLE
            if option.array
        ),
        ("u64", "seed", "of dropout"),
        ("SequenceStats*", "sequence_stats", "prepare/packed_sequences.cu"),
        ("IdRange*", "query_tile_ids key_tile_ids",
         "prepare/segment_ranges.cu"),
        ("int*", "tile_order", "prepare/segment_order.cu"),
        ("void*", "lse_rests", "of rows, as lse: score/lse_rest.cuh; or null"),
    ),
    (("OptionNumbers", "options"),),
)  # fmt: skip
# A user's own score_mod and mask_mod; all counts in elements.
_EXPRESSION = Part(
    "expression",
    (
        ("const void*", f"mod_arrays[{MOST_MOD_ARRAYS}]", "null: none"),
        ("u64", f"mod_numbers[{MOST_MOD_ARRAYS}]", "bits of a double or i64"),
        ("unsigned char*", "tile_flags", "prepare/tile_flags.cu; or null"),
        ("u32*", "mask_bits", "prepare/tile_flags.cu; or null"),
    ),
    (("ExpressionNumbers", "expression"),),
)
_DMODS = Part(
    "expression",
    (
        ("void*", f"dmods[{MOST_MOD_ARRAYS}]", "sums; null: not computed"),
        ("void*", f"dmod_sums[{MOST_MOD_ARRAYS}]", "exact_sums.cuh; or null"),
    ),
)
_MOD_DOTS = Part(
    "expression",
    (("const void*", f"mod_dots[{MOST_MOD_ARRAYS}]", "null: do not move"),),
    (("ModTangentNumbers", "mod_tangents"),),
)
_GRADIENTS = Part(
    "options",
    (
        ("void*", "dbias", "sums (dbias.cuh); null: not computed"),
        ("void*", "dsink", "contiguous; null: not computed"),
    ),
)
# Last: the machine code of kernels that do not read it does not depend on it.
_DLSE = Part(
    last=(("const void*", "dlse", "gradient of lse, alike; or null"),)
)
_MAX_SCORE = Part(
    "options",
    last=(("void*", "max_score", "largest scores, as lse; null: not stored"),),
)
_TANGENTS_OF_OPTIONS = Part(
    "options",
    (
        ("const void*", "bias_dot sink_dot",
         "as bias and sink; null: do not move"),
    ),
)  # fmt: skip
_TANGENTS = Part(
    "",
    (
        ("const void*", "q_dot k_dot v_dot", "null: does not move"),
        ("void*", "out_dot lse_dot", "null: not stored"),
    ),
    (("TangentNumbers", "tangents"),),
)
_SPLIT: tuple[tuple[Fields, ...], ...] = (
    (("void*", "split_out split_lse", "null: no row tile is cut"),),
    (("int", "num_splits",
      "of a row tile; if balanced, the number of blocks"),),
)  # fmt: skip

# The struct of the arrays, and the parts, in order.
DIRECTIONS: dict[str, tuple[str, tuple[Part, ...]]] = {
    "forward": (
        "ForwardArguments",
        (
            _maps("q_map k_map v_map out_map"),
            _OPTIONS,
            _EXPRESSION,
            Part(
                "maps options",
                (("int*", "tile_counter previous_tiles",
                  "DynamicTileScheduler; or null"),),
            ),
            Part("split", *_SPLIT),
            Part("maps", (), (("StaticSchedule", "work_items"),)),
            _MAX_SCORE,
            Part("maps", last=(("void*", "key_parts",
                                "sm90/forward_key_parts.cuh; or null"),)),
        ),
    ),
    "backward": (
        "BackwardArguments",
        (
            _maps("q_map dout_map k_map v_map dk_map dv_map"),
            _OPTIONS,
            _EXPRESSION,
            _GRADIENTS,
            _DMODS,
            _DLSE,
        ),
    ),
    "jvp": (
        "ForwardArguments",
        (
            _maps("q_map k_map v_map q_dot_map k_dot_map v_dot_map"),
            _OPTIONS,
            _EXPRESSION,
            _TANGENTS_OF_OPTIONS,
            _MOD_DOTS,
            _TANGENTS,
            Part("maps", (("int*", "recompute_flags",
                            "of 16 rows: row_flags.cuh"),)),
        ),
    ),
    "double_backward": (
        "BackwardArguments",
        (
            _maps("q_map k_map v_map dout_map q_dot_map k_dot_map v_dot_map"),
            _OPTIONS,
            _EXPRESSION,
            _GRADIENTS,
            _DMODS,
            _TANGENTS_OF_OPTIONS,
            _MOD_DOTS,
            _TANGENTS,
            Part("", (("void*", "delta_dot",
                        "rowsum(dO * out_dot), as delta"),)),
            Part("maps", (("void*", "query_rows",
                            "of query tiles: second_rows.cuh"),)),
            _DLSE,
        ),
    ),
    "readout": ("ReadoutArguments", (_OPTIONS, _EXPRESSION, _DMODS)),
    "kvcache": (
        "ForwardArguments",
        (
            Part(
                "",
                (
                    ("const void*", "alibi_slopes sink"),
                    ("const int*", "cache_seqlens", "null: cache_seqlen"),
                    ("const int*", "page_table cache_batch_idx cache_leftpad"
                                   " cu_seqlens_q"),
                    ("const float*", "k_scale v_scale"),
                    ("const void*", "rotary_cos rotary_sin q_given k_new"
                                    " v_new"),
                    ("u64", "cache_seqlen",
                     "the tokens of each sequence before the call"),
                ),
                (("OptionNumbers", "options"), ("KVCacheNumbers", "cache")),
            ),
            _EXPRESSION,
            Part("", *_SPLIT),
        ),
    ),
}  # fmt: skip
