"""The argument structs of the kernels, as NumPy dtypes and as C text.

Each struct is described once. A 0-d array of its dtype is passed to a kernel
by value; `c_text` becomes ``common/arguments.cuh`` in every kernel's text
(build/source.py). Pointers are addresses, strides count elements. TensorMaps
and pointers, which differ between equal calls, come first, but for one that
comes last: see template.py.
"""

from __future__ import annotations

import functools

import numpy as np

from cuflash.launch import c_structs
from cuflash.launch.c_structs import Fields, described
from cuflash.launch.parts import DIRECTIONS
from cuflash.plans.arguments import struct_name
from cuflash.request.problem import FEW_STATES, MOST_STATES
from cuflash.request.traced import MOST as MOST_MOD_ARRAYS

# ---- Composing a struct of parts, and choosing one ----

_CHOSEN: dict[tuple[str, frozenset[str]], np.dtype] = {}


def _arguments(
    direction: str, words: str, name: str, comment: str, *fields: Fields
) -> np.dtype:
    """A direction's struct; `words` are those of `chosen`."""
    kind = described(name, comment, *fields)
    _CHOSEN[direction, frozenset(words.split())] = kind
    return kind


def _composed(direction: str, words: str, comment: str = "") -> np.dtype:
    """The same, composed of the arrays and the parts for these words.

    Calls with an expression have the parts of options too.
    """
    has = words.split()
    arrays, parts = DIRECTIONS[direction]
    implied = {"options"} if "expression" in has else set()
    present = [
        part for part in parts if {*part.of.split()} <= {*has} | implied
    ]
    fields = (
        *(x for part in present for x in part.pointers),
        (arrays, "arrays"),
        *(x for part in present for x in part.numbers),
        *(x for part in present for x in part.last),
    )
    name = struct_name(direction, has)
    return _arguments(direction, words, name, comment, *fields)


def chosen(direction: str, parts: set[str]) -> np.dtype:
    """The struct of a direction's calls that have these parts.

    parts : as of `plans.arguments`. A word that no struct of a direction
        knows is ignored.
    """
    known = {x for name, has in _CHOSEN if name == direction for x in has}
    return _CHOSEN[direction, frozenset(parts & known)]


# ---- The structs ----

Strides = described(
    "Strides",
    "Strides of an array (batch, seqlen, heads, head_dim); the last axis has"
    " stride 1.",
    ("i64", "batch token head"),
)
Shape = described(
    "Shape",
    "",
    ("int", "batch seqlen_q seqlen_k"),
    ("int", "num_heads_q num_heads_kv head_dim head_dim_v"),
)
Schedule = described(
    "Schedule",
    "The number of (batch, head) pairs whose tiles run concurrently; of heads,"
    " if the tiles of all\nbatches are in one order. The last section has all"
    " that are left: common/scheduler.cuh.",
    ("int", "heads_per_section last_section"),
)
StaticSchedule = described(
    "StaticSchedule",
    "Work items of persistent blocks: common/scheduler.cuh. A head has pairs"
    " of tiles and single\ntiles; items counts the pairs and single tiles of"
    " all heads.",
    ("int", "pairs singles paired_items items"),
)

_COMMON: tuple[Fields, ...] = (
    ("Shape", "shape"),
    ("Schedule", "schedule"),
    ("double", "scale"),
)
ForwardArguments = _arguments(
    "forward",
    "",
    "ForwardArguments",
    "lse and delta are contiguous (batch, num_heads_q, seqlen_q) arrays of"
    " Accumulator<Element>.",
    ("const void*", "q k v"),
    ("void*", "out"),
    ("void*", "lse", "null: not stored"),
    ("Strides", "q_stride k_stride v_stride out_stride"),
    *_COMMON,
)
BackwardArguments = described(
    "BackwardArguments",
    "",
    ("const void*", "dout q k v out lse"),
    ("void*", "delta", "rowsum(dO * O) - dlse; sm90: row_stats.cuh"),
    ("void*", "dq_sum", "sums of dQ, ordered by dq_accum.cuh"),
    ("int*", "tile_counter", "dq_semaphore.cuh, semaphores.cuh; or null"),
    ("int*", "recompute_flags", "semaphores.cuh, tile_flags.cuh; or null"),
    ("int*", "dq_semaphores", "of query tiles, as tile_counter; or null"),
    ("void*", "dq dk dv"),
    ("Strides", "dout_stride q_stride k_stride v_stride out_stride"),
    ("Strides", "dq_stride dk_stride dv_stride"),
    *_COMMON,
)
BackwardPlainArguments = _composed(
    "backward",
    "",
    "For calls without options. Kernels that do not name dlse take its"
    " beginning, BackwardArguments.",
)

HeadStrides = described(
    "HeadStrides",
    "Strides of options, in elements; 0 along axes that the user left out.",
    ("i64", "batch head"),
)
TokenStrides = described("TokenStrides", "", ("i64", "batch token"))
PairStrides = described("PairStrides", "", ("i64", "batch head query key"))
OptionNumbers = described(
    "OptionNumbers",
    "Scalar options (docs/guide/options.md).",
    ("PairStrides", "bias_stride mask_stride dbias_stride"),
    ("HeadStrides", "alibi_stride"),
    ("TokenStrides", "ids_q_stride ids_k_stride"),
    ("i64", "sink_stride", "from head to head"),
    ("double", "softcap"),
    ("float", "poly4_terms[4] poly4_terms_log2[4]", "tanh_poly4: softcap.cuh"),
    ("float", "poly4_most poly4_inverse_log2", "up to S^2 = poly4_most"),
    ("float", "poly3_terms_log2[3] poly3_most poly3_lowest", "tanh_poly3"),
    ("double", "keep_factor", "of dropout: 1 / (1 - probability)"),
    ("i64", "offset_q_stride offset_k_stride", "of cu_seqlens"),
    ("int", "window_left window_right", "from 0 to less than 2^30"),
    ("u32", "drop_below", "of dropout: words below drop a pair"),
    ("int", "num_sequences", "of packed sequences"),
    ("int", "total_q total_k", "tokens of all sequences"),
    ("int", "max_seqlen_q max_seqlen_k"),
    ("int", "sequence", "set by a block: packed_sequences.cuh"),
)

ExpressionNumbers = described(
    "ExpressionNumbers",
    "Of the arrays of a user's functions: axis x of array a has index 4 a + x;"
    " axes that it lacks have\nsize 1.",
    ("i64", f"strides[{4 * MOST_MOD_ARRAYS}]"),
    ("i64", f"dmod_strides[{4 * MOST_MOD_ARRAYS}]", "of its gradient"),
    ("int", f"sizes[{4 * MOST_MOD_ARRAYS}]"),
)
ModTangentNumbers = described(
    "ModTangentNumbers",
    "Of the tangents of these arrays, in elements.",
    ("i64", f"strides[{4 * MOST_MOD_ARRAYS}]", "within a direction"),
    ("i64", f"directions[{MOST_MOD_ARRAYS}]", "from one to the next"),
)

IdRange = described(
    "IdRange",
    "The smallest and the largest segment id of a tile's tokens; a tile has at"
    " least one.",
    ("int", "low high"),
)
SequenceStats = described(
    "SequenceStats",
    "Of packed sequences: whether an offset is bad; the sequences with the"
    " most queries and the most\nkeys.",
    ("int", "bad most_queries most_keys"),
)

ForwardOptionsArguments = _composed(
    "forward",
    "options",
    "For calls with options. The pointer of an absent array is null. Types"
    ' "q" and "lse" mean\nthe type of that array.',
)
BackwardOptionsArguments = _composed("backward", "options")
ForwardExpressionArguments = _composed(
    "forward",
    "expression",
    "For calls with a user's own functions: score/expression.cuh.",
)
BackwardExpressionArguments = _composed("backward", "expression")
DirectionStrides = described(
    "DirectionStrides",
    "Strides of tangents: those of one direction as Strides.",
    ("i64", "direction batch token head"),
)
TangentNumbers = described(
    "TangentNumbers",
    "Of tangents, in elements. lse_dot is contiguous (directions, batch,"
    " num_heads_q, seqlen_q).",
    ("DirectionStrides", "q_dot k_dot v_dot out_dot"),
    ("PairStrides", "bias_dot", "within a direction"),
    ("i64", "bias_dot_direction sink_dot sink_dot_direction"),
    ("int", "num_directions", "at least 1: without any, nothing moves"),
)
JvpArguments = _composed("jvp", "")
JvpOptionsArguments = _composed("jvp", "options")
JvpExpressionArguments = _composed("jvp", "expression")
DoubleBackwardArguments = _composed(
    "double_backward",
    "",
    "The tangents are cotangents: of dq, dk, dv and, from a JVP in their"
    " direction, of dout and dlse.\ndq, dk and dv are the second gradients.",
)
DoubleBackwardOptionsArguments = _composed("double_backward", "options")
DoubleBackwardExpressionArguments = _composed("double_backward", "expression")
ForwardSplitArguments = _composed(
    "forward",
    "split",
    "Of decode/. Each part of the keys of a row tile leaves O and lse of its"
    " rows as\nAccumulator<Element>, contiguous (slots, BLOCK_Q, head_dim_v).",
)
ForwardSplitOptionsArguments = _composed("forward", "split options")
ForwardSplitExpressionArguments = _composed("forward", "split expression")

ReadoutArguments = _arguments(
    "readout",
    "",
    "ReadoutArguments",
    "Of weights, weight_sums, entropy and their gradients. The result is"
    " contiguous: weights (batch,\nnum_heads, num_queries, num_keys) of what"
    " is chosen, else of lse's dtype, (batch, num_heads_q,\nseqlen). So is its"
    " cotangent.",
    ("const void*", "q k lse"),
    ("const void*", "row_weights", "as lse, of any strides; null: all 1"),
    ("const void*", "chosen", "flags (batch, query); null: all"),
    ("const void*", "queries keys heads", "int32 indices; null: all"),
    ("const void*", "cotangent"),
    ("void*", "result"),
    ("int*", "maxima", "(batch, num_heads_q, seqlen_k): FINDS_QUERY"),
    ("void*", "dq dk"),
    ("void*", "dlse drow_weights", "as lse; null: not stored"),
    ("Strides", "q_stride k_stride dq_stride dk_stride"),
    ("PairStrides", "row_weights_stride", "its key has none"),
    ("TokenStrides", "chosen_stride queries_stride"),
    ("i64", "keys_stride heads_stride"),
    ("int", "num_queries num_keys num_heads"),
    *_COMMON,
)
ReadoutOptionsArguments = _composed("readout", "options")
ReadoutExpressionArguments = _composed("readout", "expression")


def _merge_struct(states: int, words: str = "") -> np.dtype:
    return _arguments(
        "merge",
        words,
        struct_name("merge", words.split()),
        "All arrays are contiguous: those of out (batch, seqlen_q,"
        " num_heads_q, head_dim_v), those of lse\n(batch, num_heads_q,"
        " seqlen_q).",
        ("const void*", f"outs[{states}] lses[{states}]", "null: none"),
        ("void*", "out lse"),
        ("int", "batch seqlen_q num_heads_q head_dim_v num_states"),
    )


MergeArguments = _merge_struct(FEW_STATES)
MergeManyArguments = _merge_struct(MOST_STATES, "many")

MergeRowsArguments = _arguments(
    "merge_rows",
    "",
    "MergeRowsArguments",
    "The rows are (batch, seqlen, num_heads, head_dim); the heads of a token"
    " are contiguous.\nEach lse is (batch, num_heads, seqlen); the tokens of a"
    " head are contiguous. lse_a is written.",
    ("const void*", "a b0 b1 b2 lse_b0 lse_b1 lse_b2"),
    ("void*", "result lse_a"),
    ("TokenStrides", "a_stride b0_stride b1_stride b2_stride result_stride"),
    ("HeadStrides", "lse_a_stride"),
    ("HeadStrides", "lse_b0_stride lse_b1_stride lse_b2_stride"),
    ("int", "batch seqlen num_heads head_dim"),
)
AddRowsArguments = _arguments(
    "add_rows",
    "",
    "AddRowsArguments",
    "The rows are (batch, seqlen, columns); the columns are contiguous.",
    ("const void*", "a b0 b1 b2"),
    ("void*", "result"),
    ("TokenStrides", "a_stride b0_stride b1_stride b2_stride result_stride"),
    ("int", "batch seqlen columns"),
)

ElementStrides = described(
    "ElementStrides",
    "Strides of an array (batch, seqlen, heads, head_dim), for rows of any"
    " stride.",
    ("i64", "batch token head column"),
)
TableStrides = described("TableStrides", "", ("i64", "position column"))
RotaryArguments = _arguments(
    "rotary",
    "",
    "RotaryArguments",
    "x and out are (batch, seqlen, num_heads, head_dim), cos and sin"
    " (num_positions, num_pairs),\npositions is (batch, seqlen). out may be"
    " x.",
    ("const void*", "cos sin"),
    ("const void*", "positions", "null: 0, 1, 2, ... along seqlen"),
    ("const void*", "x"),
    ("void*", "out"),
    ("ElementStrides", "x_stride out_stride"),
    ("TableStrides", "cos_stride sin_stride"),
    ("TokenStrides", "positions_stride"),
    ("i64", "num_positions"),
    ("int", "batch seqlen num_heads head_dim num_pairs"),
    ("int", "pair_step pair_width", "pair i: pair_step * i, + pair_width"),
    ("int", "inverse"),
)

KVCacheNumbers = described(
    "KVCacheNumbers",
    "Of a forward_kvcache call: what its arrays mean, and their strides.",
    ("ElementStrides", "q_stride k_new_stride v_new_stride", "as given"),
    ("TableStrides", "cos_stride sin_stride"),
    ("TokenStrides", "page_table_stride", "sequence, page"),
    ("HeadStrides", "k_scale_stride v_scale_stride", "page, head"),
    ("i64", "cache_seqlens_stride cu_seqlens_stride"),
    ("i64", "batch_idx_stride leftpad_stride"),
    ("i64", "capacity", "the most tokens of a sequence"),
    ("i64", "num_positions"),
    ("int", "num_slots", "slots or pages"),
    ("int", "seqlen_new total_q", "total_q: of packed queries"),
    ("int", "num_pairs pair_step pair_width", "as RotaryArguments"),
)
ForwardKVCacheArguments = _composed(
    "kvcache",
    "",
    "arrays.k and arrays.v are the caches; their batch strides are from slot"
    " to slot, or page to page.\narrays.q is q_given, or rotated.",
)
ForwardKVCacheExpressionArguments = _composed("kvcache", "expression")

TensorMap = described(
    "TensorMap",
    "A CUtensorMap: a 4-D tensor in global memory for TMA. Opaque; the driver"
    " encodes it.",
    ("u64", "opaque[16]"),
)
ForwardWgmmaArguments = _composed(
    "forward",
    "maps",
    "Maps are of (head_dim, token, head, batch), boxes of 64 columns and a"
    " tile's rows.",
)
ForwardWgmmaOptionsArguments = _composed("forward", "maps options")
ForwardWgmmaExpressionArguments = _composed("forward", "maps expression")
JvpWgmmaArguments = _composed(
    "jvp",
    "maps",
    "As ForwardWgmmaArguments; those of tangents are of (head_dim, token,"
    " head, direction * batch).",
)
JvpWgmmaExpressionArguments = _composed("jvp", "maps expression")
DoubleBackwardWgmmaArguments = _composed(
    "double_backward",
    "maps",
    "As DoubleBackwardArguments. Maps have boxes of 64 columns and a tile's"
    " rows.",
)
DoubleBackwardWgmmaExpressionArguments = _composed(
    "double_backward", "maps expression"
)
BackwardWgmmaArguments = _composed(
    "backward",
    "maps",
    "The maps of q and dout have boxes of 64 columns and a query tile's rows,"
    " those of k and v a key\ntile's rows, those of dk and dv 16 rows.",
)
BackwardWgmmaOptionsArguments = _composed("backward", "maps options")
BackwardWgmmaExpressionArguments = _composed("backward", "maps expression")


@functools.cache
def c_text() -> str:
    """All structs in C++; they need the element types of common/types.cuh."""
    return "\n\n".join(c_structs.TEXTS.values()) + "\n"


# ---- The fields of a struct ----


def pointers_of(kind: np.dtype) -> tuple[str, ...]:
    """The names of a struct's pointers, in order, including nested structs'.

    Those of an array are ``outs[0]``, ``outs[1]``, ...
    """
    names: list[str] = []
    for name in kind.names or ():
        field = kind[name]
        if field == np.uint64:
            names.append(name)
        elif field.subdtype and field.base == np.uint64:
            names += [f"{name}[{i}]" for i in range(field.shape[0])]
        elif field != TensorMap:
            names += pointers_of(field)
    return tuple(names)


def maps_of(kind: np.dtype) -> tuple[str, ...]:
    """The names of the arrays that a struct has TensorMaps of, in order."""
    return tuple(
        name.removesuffix("_map")
        for name in kind.names or ()
        if kind[name] == TensorMap
    )
