"""The argument structs of the kernels, as NumPy dtypes and as C text.

Each struct is described once, by `_struct`. A 0-d array of its dtype is passed
to a kernel by value; `c_text` becomes ``common/arguments.cuh`` in every
kernel's text (build/source.py). Pointers are addresses, strides count
elements. TensorMaps and pointers, which differ between equal calls, come
first, but for one that comes last: see `Template`.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cuflash.request import options
from cuflash.request.problem import FEW_STATES, MOST_STATES

# ---- Describing a struct ----

_KINDS: dict[str, Any] = {
    "const void*": np.uint64,
    "void*": np.uint64,
    "int*": np.uint64,
    "float*": np.uint64,
    "IdRange*": np.uint64,
    "SequenceStats*": np.uint64,
    "const int*": np.uint64,
    "const float*": np.uint64,
    "u64": np.uint64,
    "i64": np.int64,
    "int": np.int32,
    "u32": np.uint32,
    "double": np.float64,
    "float": np.float32,
}
_TEXTS: dict[str, str] = {}

# A type, the names of its fields, and optionally a comment. A name may have
# an array length: ``"terms[4]"``.
_Fields = tuple[str, ...]


def _struct(name: str, comment: str, *fields: _Fields) -> np.dtype:
    """A struct's dtype; also registers its C text for `c_text`."""
    kinds, lines = [], []
    for kind, names, *notes in fields:
        for field in names.split():
            match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", field)
            assert match
            base = _KINDS[kind]
            length = (int(match[2]),) if match[2] else None
            kinds.append((match[1], (base, length) if length else base))
        lines += _declarations(kind, names.split(), *notes)
    has_maps = any(kind == "TensorMap" for kind, *_ in fields)
    dtype = padded(64, *kinds) if has_maps else _aligned(*kinds)
    aligned = "alignas(64) " if name == "TensorMap" else ""
    _TEXTS[name] = "\n".join([
        *(f"// {line}" for line in comment.splitlines()),
        f"struct {aligned}{name} {{", *lines, "};",
    ])  # fmt: skip
    _KINDS[name] = dtype
    return dtype


def _declarations(kind: str, names: list[str], note: str = "") -> list[str]:
    """Lines of C, of at most 100 columns."""
    if kind.endswith("*"):  # in C it applies to the first name only
        lines = [f"    {kind} {name};" for name in names]
    else:
        lines = [f"    {kind} {', '.join(names)};"]
    if note:
        lines[0] = f"{lines[0]:<48}// {note}"
    return lines


def _aligned(*fields: tuple[str, Any]) -> np.dtype:
    return np.dtype(list(fields), align=True)


def padded(alignment: int, *fields: tuple[str, Any]) -> np.dtype:
    """A struct whose size is a multiple of its alignment, as in C++."""
    kind = _aligned(*fields)
    names, layout = list(kind.names or ()), dict(kind.fields or {})
    return np.dtype(
        {
            "names": names,
            "formats": [kind[name] for name in names],
            "offsets": [layout[name][1] for name in names],
            "itemsize": -(-kind.itemsize // alignment) * alignment,
        }
    )


@functools.cache
def c_text() -> str:
    """All structs in C++; they need the element types of common/types.cuh."""
    return "\n\n".join(_TEXTS.values()) + "\n"


# ---- The structs ----

Strides = _struct(
    "Strides",
    "Strides of an array (batch, seqlen, heads, head_dim); the last axis has"
    " stride 1.",
    ("i64", "batch token head"),
)
Shape = _struct(
    "Shape",
    "",
    ("int", "batch seqlen_q seqlen_k"),
    ("int", "num_heads_q num_heads_kv head_dim head_dim_v"),
)
Schedule = _struct(
    "Schedule",
    "The number of (batch, head) pairs whose tiles run concurrently; of heads,"
    " if the tiles of all\nbatches are in one order. The last section has all"
    " that are left: common/scheduler.cuh.",
    ("int", "heads_per_section last_section"),
)
StaticSchedule = _struct(
    "StaticSchedule",
    "Work items of persistent blocks: common/scheduler.cuh. A head has pairs"
    " of tiles and single\ntiles; items counts the pairs and single tiles of"
    " all heads.",
    ("int", "pairs singles paired_items items"),
)

_COMMON: tuple[_Fields, ...] = (
    ("Shape", "shape"),
    ("Schedule", "schedule"),
    ("double", "scale"),
)
ForwardArguments = _struct(
    "ForwardArguments",
    "lse and delta are contiguous (batch, num_heads_q, seqlen_q) arrays of"
    " Accumulator<Element>.",
    ("const void*", "q k v"),
    ("void*", "out"),
    ("void*", "lse", "null: not stored"),
    ("Strides", "q_stride k_stride v_stride out_stride"),
    *_COMMON,
)
BackwardArguments = _struct(
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
# At the end of each struct of the backward pass: the machine code of kernels
# that do not read it does not depend on it.
_DLSE: _Fields = ("const void*", "dlse", "gradient of lse, alike; or null")
BackwardPlainArguments = _struct(
    "BackwardPlainArguments",
    "For calls without options. Kernels that do not name dlse take its"
    " beginning, BackwardArguments.",
    ("BackwardArguments", "arrays"),
    _DLSE,
)

HeadStrides = _struct(
    "HeadStrides",
    "Strides of options, in elements; 0 along axes that the user left out.",
    ("i64", "batch head"),
)
TokenStrides = _struct("TokenStrides", "", ("i64", "batch token"))
PairStrides = _struct("PairStrides", "", ("i64", "batch head query key"))
OptionNumbers = _struct(
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

IdRange = _struct(
    "IdRange",
    "The smallest and the largest segment id of a tile's tokens; a tile has at"
    " least one.",
    ("int", "low high"),
)
SequenceStats = _struct(
    "SequenceStats",
    "Of packed sequences: whether an offset is bad; the sequences with the"
    " most queries and the most\nkeys.",
    ("int", "bad most_queries most_keys"),
)

# The array options, then the seed, then the workspace of prepare/.
_OPTIONS: tuple[_Fields, ...] = (
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
    ("IdRange*", "query_tile_ids key_tile_ids", "prepare/segment_ranges.cu"),
    ("int*", "tile_order", "prepare/segment_order.cu"),
    ("void*", "lse_rests", "of rows, as lse: score/lse_rest.cuh; or null"),
)
_SCHEDULER: _Fields = (
    "int*",
    "tile_counter previous_tiles",
    "DynamicTileScheduler; or null",
)
_GRADIENTS: tuple[_Fields, ...] = (
    ("void*", "dbias", "sums (dbias.cuh); null: not computed"),
    ("void*", "dsink", "contiguous; null: not computed"),
)
ForwardOptionsArguments = _struct(
    "ForwardOptionsArguments",
    "For calls with options. The pointer of an absent array is null. Types"
    ' "q" and "lse" mean\nthe type of that array.',
    *_OPTIONS,
    ("ForwardArguments", "arrays"),
    ("OptionNumbers", "options"),
)
BackwardOptionsArguments = _struct(
    "BackwardOptionsArguments",
    "",
    *_OPTIONS,
    *_GRADIENTS,
    ("BackwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    _DLSE,
)
DirectionStrides = _struct(
    "DirectionStrides",
    "Strides of tangents: those of one direction as Strides.",
    ("i64", "direction batch token head"),
)
TangentNumbers = _struct(
    "TangentNumbers",
    "Of tangents, in elements. lse_dot is contiguous (directions, batch,"
    " num_heads_q, seqlen_q).",
    ("DirectionStrides", "q_dot k_dot v_dot out_dot"),
    ("PairStrides", "bias_dot", "within a direction"),
    ("i64", "bias_dot_direction sink_dot sink_dot_direction"),
    ("int", "num_directions", "at least 1: without any, nothing moves"),
)
_TANGENTS: tuple[_Fields, ...] = (
    ("const void*", "q_dot k_dot v_dot", "null: does not move"),
    ("void*", "out_dot lse_dot", "null: not stored"),
)
_OF_OPTIONS: _Fields = (
    "const void*",
    "bias_dot sink_dot",
    "as bias and sink; null: do not move",
)
JvpArguments = _struct(
    "JvpArguments",
    "",
    *_TANGENTS,
    ("ForwardArguments", "arrays"),
    ("TangentNumbers", "tangents"),
)
JvpOptionsArguments = _struct(
    "JvpOptionsArguments",
    "",
    *_OPTIONS,
    _OF_OPTIONS,
    *_TANGENTS,
    ("ForwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    ("TangentNumbers", "tangents"),
)
_DELTA_DOT: _Fields = (
    "void*",
    "delta_dot",
    "rowsum(dO * out_dot), as delta",
)
DoubleBackwardArguments = _struct(
    "DoubleBackwardArguments",
    "The tangents are cotangents: of dq, dk, dv and, from a JVP in their"
    " direction, of dout and dlse.\ndq, dk and dv are the second gradients.",
    *_TANGENTS,
    _DELTA_DOT,
    ("BackwardArguments", "arrays"),
    ("TangentNumbers", "tangents"),
    _DLSE,
)
DoubleBackwardOptionsArguments = _struct(
    "DoubleBackwardOptionsArguments",
    "",
    *_OPTIONS,
    *_GRADIENTS,
    _OF_OPTIONS,
    *_TANGENTS,
    _DELTA_DOT,
    ("BackwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    ("TangentNumbers", "tangents"),
    _DLSE,
)
_PARTS: _Fields = (
    "void*",
    "split_out split_lse",
    "null: no row tile is cut",
)
_PART_NUMBERS: _Fields = (
    "int",
    "num_splits",
    "of a row tile; if balanced, the number of blocks",
)
ForwardSplitArguments = _struct(
    "ForwardSplitArguments",
    "Of decode/. Each part of the keys of a row tile leaves O and lse of its"
    " rows as\nAccumulator<Element>, contiguous (slots, BLOCK_Q, head_dim_v).",
    _PARTS,
    ("ForwardArguments", "arrays"),
    _PART_NUMBERS,
)
ForwardSplitOptionsArguments = _struct(
    "ForwardSplitOptionsArguments",
    "",
    *_OPTIONS,
    _PARTS,
    ("ForwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    _PART_NUMBERS,
)


def _merge_struct(name: str, states: int) -> np.dtype:
    return _struct(
        name,
        "All arrays are contiguous: those of out (batch, seqlen_q,"
        " num_heads_q, head_dim_v), those of lse\n(batch, num_heads_q,"
        " seqlen_q).",
        ("const void*", f"outs[{states}] lses[{states}]", "null: none"),
        ("void*", "out lse"),
        ("int", "batch seqlen_q num_heads_q head_dim_v num_states"),
    )


MergeArguments = _merge_struct("MergeArguments", FEW_STATES)
MergeManyArguments = _merge_struct("MergeManyArguments", MOST_STATES)

MergeRowsArguments = _struct(
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
AddRowsArguments = _struct(
    "AddRowsArguments",
    "The rows are (batch, seqlen, columns); the columns are contiguous.",
    ("const void*", "a b0 b1 b2"),
    ("void*", "result"),
    ("TokenStrides", "a_stride b0_stride b1_stride b2_stride result_stride"),
    ("int", "batch seqlen columns"),
)

ElementStrides = _struct(
    "ElementStrides",
    "Strides of an array (batch, seqlen, heads, head_dim), for rows of any"
    " stride.",
    ("i64", "batch token head column"),
)
TableStrides = _struct("TableStrides", "", ("i64", "position column"))
RotaryArguments = _struct(
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

KVCacheNumbers = _struct(
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
ForwardKVCacheArguments = _struct(
    "ForwardKVCacheArguments",
    "arrays.k and arrays.v are the caches; their batch strides are from slot"
    " to slot, or page to page.\narrays.q is q_given, or rotated.",
    ("const void*", "alibi_slopes sink"),
    ("const int*", "cache_seqlens", "null: cache_seqlen"),
    ("const int*", "page_table cache_batch_idx cache_leftpad cu_seqlens_q"),
    ("const float*", "k_scale v_scale"),
    ("const void*", "rotary_cos rotary_sin q_given k_new v_new"),
    ("u64", "cache_seqlen", "the tokens of each sequence before the call"),
    _PARTS,
    ("ForwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    ("KVCacheNumbers", "cache"),
    _PART_NUMBERS,
)

TensorMap = _struct(
    "TensorMap",
    "A CUtensorMap: a 4-D tensor in global memory for TMA. Opaque; the driver"
    " encodes it.",
    ("u64", "opaque[16]"),
)
_FORWARD_MAPS: _Fields = ("TensorMap", "q_map k_map v_map out_map")
_BACKWARD_MAPS: _Fields = (
    "TensorMap",
    "q_map dout_map k_map v_map dk_map dv_map",
)
ForwardWgmmaArguments = _struct(
    "ForwardWgmmaArguments",
    "Maps are of (head_dim, token, head, batch), boxes of 64 columns and a"
    " tile's rows.",
    _FORWARD_MAPS,
    ("ForwardArguments", "arrays"),
    ("StaticSchedule", "work_items"),
)
ForwardWgmmaOptionsArguments = _struct(
    "ForwardWgmmaOptionsArguments",
    "",
    _FORWARD_MAPS,
    *_OPTIONS,
    _SCHEDULER,
    ("ForwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    ("StaticSchedule", "work_items"),
)
JvpWgmmaArguments = _struct(
    "JvpWgmmaArguments",
    "As ForwardWgmmaArguments; those of tangents are of (head_dim, token,"
    " head, direction * batch).",
    ("TensorMap", "q_map k_map v_map q_dot_map k_dot_map v_dot_map"),
    *_TANGENTS,
    ("int*", "recompute_flags", "of 16 rows: row_flags.cuh"),
    ("ForwardArguments", "arrays"),
    ("TangentNumbers", "tangents"),
)
DoubleBackwardWgmmaArguments = _struct(
    "DoubleBackwardWgmmaArguments",
    "As DoubleBackwardArguments. Maps have boxes of 64 columns and a tile's"
    " rows.",
    ("TensorMap", "q_map k_map v_map dout_map q_dot_map k_dot_map v_dot_map"),
    *_TANGENTS,
    _DELTA_DOT,
    ("void*", "query_rows", "of query tiles: second_rows.cuh"),
    ("BackwardArguments", "arrays"),
    ("TangentNumbers", "tangents"),
    _DLSE,
)
BackwardWgmmaArguments = _struct(
    "BackwardWgmmaArguments",
    "The maps of q and dout have boxes of 64 columns and a query tile's rows,"
    " those of k and v a key\ntile's rows, those of dk and dv 16 rows.",
    _BACKWARD_MAPS,
    ("BackwardArguments", "arrays"),
    _DLSE,
)
BackwardWgmmaOptionsArguments = _struct(
    "BackwardWgmmaOptionsArguments",
    "",
    _BACKWARD_MAPS,
    *_OPTIONS,
    *_GRADIENTS,
    ("BackwardArguments", "arrays"),
    ("OptionNumbers", "options"),
    _DLSE,
)


# ---- The struct of a call ----

_CHOSEN: dict[tuple[str, frozenset[str]], np.dtype] = {
    (direction, frozenset(parts.split())): kind
    for direction, parts, kind in (
        ("forward", "", ForwardArguments),
        ("forward", "options", ForwardOptionsArguments),
        ("forward", "maps", ForwardWgmmaArguments),
        ("forward", "maps options", ForwardWgmmaOptionsArguments),
        ("forward", "split", ForwardSplitArguments),
        ("forward", "split options", ForwardSplitOptionsArguments),
        ("backward", "", BackwardPlainArguments),
        ("backward", "options", BackwardOptionsArguments),
        ("backward", "maps", BackwardWgmmaArguments),
        ("backward", "maps options", BackwardWgmmaOptionsArguments),
        ("jvp", "", JvpArguments),
        ("jvp", "options", JvpOptionsArguments),
        ("jvp", "maps", JvpWgmmaArguments),
        ("double_backward", "", DoubleBackwardArguments),
        ("double_backward", "options", DoubleBackwardOptionsArguments),
        ("double_backward", "maps", DoubleBackwardWgmmaArguments),
        ("kvcache", "", ForwardKVCacheArguments),
        ("merge", "", MergeArguments),
        ("merge", "many", MergeManyArguments),
        ("rotary", "", RotaryArguments),
        ("merge_rows", "", MergeRowsArguments),
        ("add_rows", "", AddRowsArguments),
    )
}


def chosen(direction: str, parts: set[str]) -> np.dtype:
    """The struct of a direction's calls that have these parts."""
    known = {x for name, has in _CHOSEN if name == direction for x in has}
    return _CHOSEN[direction, frozenset(parts & known)]


# ---- Filling a struct ----


class Template:
    """An argument struct that lacks only its TensorMaps and pointers.

    These come first; the struct's last fields may be pointers too.

    Parameters
    ----------
    kind : dtype
        One of the structs above.
    **constants
        The other fields, and those of the field ``arrays``. A nested struct
        is given as a dict of its fields; fields left out are 0.
    """

    def __init__(self, kind: np.dtype, **constants: Any) -> None:
        filled = np.zeros((), kind)
        for name, value in constants.items():
            fields = filled if name in (kind.names or ()) else filled["arrays"]
            if isinstance(value, dict):
                for inner, number in value.items():
                    fields[name][inner] = number
            else:
                fields[name] = value
        leaves = [*_leaves(kind)]
        maps = leaves.count(TensorMap)
        last, end = _last_pointers(kind)
        self._count = leaves.count(np.dtype(np.uint64)) - last
        self.kind = kind
        self._first = struct.Struct(
            "=" + f"{TensorMap.itemsize}s" * maps + f"{self._count}Q"
        )
        self._rest = filled.tobytes()[self._first.size : end]
        padding = kind.itemsize - end - 8 * last
        self._last = struct.Struct(f"={last}Q{padding}x")

    def fill(self, maps: Iterable[bytes], pointers: Sequence[int]) -> bytes:
        """The struct's bytes."""
        first, last = pointers[: self._count], pointers[self._count :]
        return (
            self._first.pack(*maps, *first)
            + self._rest
            + self._last.pack(*last)
        )


def _last_pointers(kind: np.dtype) -> tuple[int, int]:
    """How many of a struct's last fields are pointers, and their offset."""
    count, offset = 0, kind.itemsize
    for field, start, *_ in reversed(list(dict(kind.fields or {}).values())):
        if field != np.uint64:
            break
        count, offset = count + 1, start
    return count, offset


def _leaves(kind: np.dtype) -> Iterator[np.dtype]:
    """The dtypes of a struct's fields and nested fields, in order."""
    if kind.subdtype and kind.base == np.uint64:  # an array of pointers
        yield from [kind.base] * kind.shape[0]
        return
    if kind.names is None or kind == TensorMap:
        yield kind
        return
    for name in kind.names:
        yield from _leaves(kind[name])


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
