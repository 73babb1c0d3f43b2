"""The argument structs of the kernels, as NumPy dtypes.

They mirror the structs of ``kernels/types.cuh`` by name and field by field:
an array without axes of such a dtype is passed to a kernel by value.
Pointers are addresses, strides count elements. What differs between calls
that are alike, maps and pointers, comes first: see `Template`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cuflash import options


def _struct(*fields: tuple[str, Any]) -> np.dtype:
    return np.dtype(list(fields), align=True)


class Template:
    """An argument struct that lacks its TensorMaps and pointers alone.

    Parameters
    ----------
    kind : dtype
        One of the structs below.
    **constants
        Its other fields, and those of its field ``arrays``. Of a struct a
        dict may have some fields; the others are 0.
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
        pointers = leaves.count(np.dtype(np.uint64))
        self.kind = kind
        self._first = struct.Struct(
            "=" + f"{TensorMap.itemsize}s" * maps + f"{pointers}Q"
        )
        self._rest = filled.tobytes()[self._first.size :]

    def fill(self, maps: Iterable[bytes], pointers: Iterable[int]) -> bytes:
        """The struct's bytes."""
        return self._first.pack(*maps, *pointers) + self._rest


def _leaves(kind: np.dtype) -> Iterator[np.dtype]:
    """The dtypes of a struct's fields, and of theirs, in order."""
    if kind.names is None or kind == TensorMap:
        yield kind
        return
    for name in kind.names:
        yield from _leaves(kind[name])


def pointers_of(kind: np.dtype) -> tuple[str, ...]:
    """The names of a struct's pointers, and of those in its structs."""
    names: list[str] = []
    for name in kind.names or ():
        if kind[name] == np.uint64:
            names.append(name)
        elif kind[name] != TensorMap:
            names += pointers_of(kind[name])
    return tuple(names)


def padded(alignment: int, *fields: tuple[str, Any]) -> np.dtype:
    """A struct whose size is a multiple of its alignment, as in C++."""
    struct = _struct(*fields)
    names, places = list(struct.names or ()), dict(struct.fields or {})
    return np.dtype(
        {
            "names": names,
            "formats": [struct[name] for name in names],
            "offsets": [places[name][1] for name in names],
            "itemsize": -(-struct.itemsize // alignment) * alignment,
        }
    )


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, Any]]:
    return _fields(names, np.uint64)


def _strides_of(names: str) -> list[tuple[str, Any]]:
    return [(f"{name}_stride", Strides) for name in names.split()]


Strides = _struct(*_fields("batch token head", np.int64))
Shape = _struct(
    *_fields(
        "batch seqlen_q seqlen_k num_heads_q num_heads_kv head_dim head_dim_v",
        np.int32,
    )
)
Schedule = _struct(("heads_per_section", np.int32))

_COMMON = [("shape", Shape), ("schedule", Schedule), ("scale", np.float64)]

ForwardArguments = _struct(
    *_pointers("q k v out lse"), *_strides_of("q k v out"), *_COMMON
)
# 128 bytes that are the driver's own affair, at multiples of 64.
TensorMap = _struct(("opaque", (np.uint64, (16,))))
StaticSchedule = _struct(
    *_fields("pairs singles paired_items items", np.int32)
)
ForwardWgmmaArguments = padded(
    64,
    *_fields("q_map k_map v_map out_map", TensorMap),
    ("arrays", ForwardArguments),
    ("work_items", StaticSchedule),
)
BackwardArguments = _struct(
    *_pointers("dout q k v out lse delta dq_sum turns dq dk dv"),
    *_strides_of("dout q k v out dq dk dv"),
    *_COMMON,
)
BackwardWgmmaArguments = padded(
    64,
    *_fields("q_map dout_map k_map v_map dk_map dv_map", TensorMap),
    ("arrays", BackwardArguments),
)
HeadStrides = _struct(*_fields("batch head", np.int64))
TokenStrides = _struct(*_fields("batch token", np.int64))
PairStrides = _struct(*_fields("batch head query key", np.int64))
OptionNumbers = _struct(
    *[(f"{name}_stride", PairStrides) for name in ("bias", "mask", "dbias")],
    ("alibi_stride", HeadStrides),
    *[(f"ids_{name}_stride", TokenStrides) for name in "qk"],
    ("sink_stride", np.int64),
    ("softcap", np.float64),
    ("cap_terms", (np.float32, (4,))),
    ("cap_terms_log2", (np.float32, (4,))),
    *_fields("cap_small cap_inverse_log2", np.float32),
    ("cap_slight_terms_log2", (np.float32, (3,))),
    *_fields("cap_slight cap_lowest", np.float32),
    ("keep_factor", np.float64),
    *_fields("offset_q_stride offset_k_stride", np.int64),
    *_fields("window_left window_right", np.int32),
    ("drop_below", np.uint32),
    *_fields("num_sequences total_q total_k", np.int32),
    *_fields("max_seqlen_q max_seqlen_k sequence", np.int32),
)
# Options that are arrays, then a number, then what kernels write.
_OPTION_POINTERS = " ".join([*options.ARRAYS, "seed", "found"])
ForwardOptionsArguments = _struct(
    *_pointers(_OPTION_POINTERS),
    ("arrays", ForwardArguments),
    ("options", OptionNumbers),
)
ForwardWgmmaOptionsArguments = padded(
    64,
    *_fields("q_map k_map v_map out_map", TensorMap),
    *_pointers(_OPTION_POINTERS),
    ("arrays", ForwardArguments),
    ("options", OptionNumbers),
    ("work_items", StaticSchedule),
)
BackwardOptionsArguments = _struct(
    *_pointers(f"{_OPTION_POINTERS} dbias dsink"),
    ("arrays", BackwardArguments),
    ("options", OptionNumbers),
)
BackwardWgmmaOptionsArguments = padded(
    64,
    *_fields("q_map dout_map k_map v_map dk_map dv_map", TensorMap),
    *_pointers(f"{_OPTION_POINTERS} dbias dsink"),
    ("arrays", BackwardArguments),
    ("options", OptionNumbers),
)
MergeArguments = _struct(
    *_pointers("out_a lse_a out_b lse_b out lse"),
    *_fields("batch seqlen_q num_heads_q head_dim_v", np.int32),
)
