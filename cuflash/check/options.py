"""Values of the options that are checked, and what they change in bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cuflash.check.calls import Shape

DROPOUT, CAP = 0.25, 4.0
PACKED = "packed"  # arrays have no axis of batch
TABLE_WIDTH = 17


def near(
    score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, *, table: Any
) -> Any:
    """A user's score: a number a distance is added."""
    return score + table[head, _column(q_idx, kv_idx)]


def _column(q_idx: Any, kv_idx: Any) -> Any:
    return np.clip(q_idx - kv_idx + 8, 0, 16)


def thirds(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A user's mask that hides one key in three."""
    return (q_idx + 2 * kv_idx) % 3 != 0


def _segments(s: Shape, dtype: Any) -> dict[str, Any]:
    ids = [
        np.repeat(np.arange(4, dtype=np.int32), -(-n // 4))[None, :n]
        for n in (s.seqlen_q, s.seqlen_k)
    ]
    of_q, of_k = (np.repeat(x, s.batch, axis=0) for x in ids)
    return {"segment_ids_q": of_q, "segment_ids_k": of_k}


def _mask(s: Shape, dtype: Any) -> dict[str, Any]:
    i, j = np.ogrid[: s.seqlen_q, : s.seqlen_k]
    return {"mask": (i + 2 * j) % 5 != 0}


def _bias(s: Shape, dtype: Any) -> dict[str, Any]:
    codes = np.arange(s.heads * s.seqlen_k) % 9 - 4
    return {"bias": (codes / 8).reshape(s.heads, 1, -1).astype(dtype)}


def _slopes(s: Shape, dtype: Any) -> dict[str, Any]:
    slopes = 0.5 ** np.arange(4, 4 + s.heads)
    return {"alibi_slopes": slopes.astype(np.float32)}


def _sink(s: Shape, dtype: Any) -> dict[str, Any]:
    kind = np.promote_types(dtype, np.float32)
    return {"sink": np.linspace(0.5, 2, s.heads).astype(kind)}


def _expression(s: Shape, dtype: Any) -> dict[str, Any]:
    codes = np.arange(s.heads * TABLE_WIDTH, dtype=np.float32) % 7 / 8
    table = codes.reshape(s.heads, TABLE_WIDTH)
    found = {"score_mod": near, "mask_mod": thirds}
    return {**found, "mod_arrays": {"table": table}}


def offsets(tokens: int) -> np.ndarray:
    """Of packed sequences: of one token, of none, of many."""
    return np.array([0, 1, 1, tokens // 3, tokens], np.int32)


def _packed(s: Shape, dtype: Any) -> dict[str, Any]:
    of_q, of_k = map(offsets, (s.seqlen_q, s.seqlen_k))
    return {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}


MAKERS: dict[str, Callable[[Shape, Any], dict[str, Any]]] = {
    "causal": lambda s, dtype: {"causal": True},
    "window": lambda s, dtype: {"window": (40, 10)},
    "softcap": lambda s, dtype: {"softcap": CAP},
    "slopes": _slopes,
    "bias": _bias,
    "mask": _mask,
    "sink": _sink,
    "segments": _segments,
    "dropout": lambda s, dtype: {"dropout": DROPOUT, "seed": 58},
    "expression": _expression,
    PACKED: _packed,
}

# Each option once, in few kernels.
SETS = (
    ("window", "slopes", "sink"),
    ("expression",),
    ("causal", "softcap", "bias"),
    ("mask", "dropout"),
    ("segments",),
    ("causal", PACKED),
)
SETS_OF_CACHES = (("window", "slopes"), ("softcap",), ("expression",))


def of_call(
    names: tuple[str, ...], shape: Shape, dtype: Any
) -> dict[str, Any]:
    """The keyword arguments of a call's options."""
    found: dict[str, Any] = {}
    for name in names:
        found |= MAKERS[name](shape, np.dtype(dtype))
    return found


def in_float64(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a call in float64."""
    found = {
        name: x.astype(np.float64) if name in ("bias", "sink") else x
        for name, x in given.items()
    }
    if "mod_arrays" in given:
        tables = given["mod_arrays"].items()
        found["mod_arrays"] = {x: y.astype(np.float64) for x, y in tables}
    return found


def gradients(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `backward` that ask for the gradients of options."""
    asked: dict[str, Any] = {
        f"return_d{x}": True for x in ("bias", "sink") if x in given
    }
    if "mod_arrays" in given:
        asked["return_dmod"] = tuple(given["mod_arrays"])
    return asked


def by_name(asked: Mapping[str, Any], found: Any) -> dict[str, Any]:
    """What `backward` returned; the gradient of a user's array has its name.

    asked : what `gradients` returned.
    """
    names = ("dq", "dk", "dv", *(x.removeprefix("return_") for x in asked))
    results = dict(zip(names, found, strict=True))
    of_arrays = results.pop("dmod", {})
    return results | {f"d{x}": y for x, y in of_arrays.items()}


def sums_of_table(pairs: Any) -> Any:
    """The sum of numbers of pairs that read each element of the table.

    pairs : array, (batch, heads, seqlen_q, seqlen_k)
    """
    heads, rows, keys = pairs.shape[1:]
    column = _column(np.arange(rows)[:, None], np.arange(keys))
    sums = np.zeros((heads, TABLE_WIDTH))
    for head in range(heads):
        np.add.at(sums[head], column, pairs[:, head].sum(axis=0))
    return sums


def steps(given: Mapping[str, Any], score: Any, sizes: Any) -> Any:
    """Errors that options add to scores, in units of roundoff.

    Two roundings for each of slope times distance, bias and score_mod, of
    numbers that are at most ``|S| + |q k|`` in size; tanh within 8 ulp of 1,
    that is 16 u, times the cap, and its argument and product.

    Parameters
    ----------
    score : array
        The final scores.
    sizes : array
        |scale| sum |q| |k|, of what options act on.
    """
    found = np.zeros(np.shape(score))
    if {"bias", "alibi_slopes", "score_mod"} & given.keys():
        found += 16 * (np.abs(score) + sizes)
    if "softcap" in given:
        found += 16 * given["softcap"] + 8 * sizes
    return found


def slope(given: Mapping[str, Any], products: Any) -> tuple[Any, float | None]:
    """The softcap's derivative, and the cap."""
    if "softcap" not in given:
        return 1.0, None
    cap = given["softcap"]
    return 1 - np.tanh(products / cap) ** 2, cap


def of_a_sequence(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of one of the packed sequences."""
    return {x: y for x, y in given.items() if not x.startswith("cu_seqlens")}


def without_dropout(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same call without dropout."""
    return {x: y for x, y in given.items() if x not in ("dropout", "seed")}
