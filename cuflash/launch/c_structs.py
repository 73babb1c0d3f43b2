"""Describes a C struct once, as a NumPy dtype and as text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_KINDS: dict[str, Any] = {
    "const void*": np.uint64,
    "void*": np.uint64,
    "int*": np.uint64,
    "u32*": np.uint64,
    "unsigned char*": np.uint64,
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
# Of all structs, by name, in the order in which they are described.
TEXTS: dict[str, str] = {}

# A type, the names of its fields, and optionally a comment. A name may have
# an array length: ``"terms[4]"``.
Fields = tuple[str, ...]


def described(name: str, comment: str, *fields: Fields) -> np.dtype:
    """A struct's dtype; its C text is added to `TEXTS`."""
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
    TEXTS[name] = "\n".join([
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
