"""The calls that are checked: of a family, a direction, a dtype, options.

Lengths are one before, at and after the edges of tiles, which all are
multiples of 16 tokens; few kernels serve many calls, because compiling them
takes longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cuflash.check import options
from cuflash.plans.record import FAMILIES, FamilyName
from cuflash.request.problem import DType


class Shape(NamedTuple):
    """Sizes of a call's arrays."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64


@dataclass(frozen=True)
class Call:
    """One call; its line in a report repeats it.

    Attributes
    ----------
    direction : str
        ``"forward"``; ``"backward"``, after forward; ``"jvp"``,
        ``"double_backward"``, ``"kvcache"``, ``"readouts"``, ``"merge"``,
        ``"rotary"``.
    dtype : str
    shape : Shape
    values : str
        How the numbers are chosen: data.py.
    options : tuple of str
        Names of `options.MAKERS`.
    family : str or None
        The family that runs it; None: NumPy, or any.
    deterministic : bool
    num_splits : int or None
    cache : str
        Of ``"kvcache"``: data.py.
    """

    direction: str
    dtype: DType
    shape: Shape
    values: str = "coded"
    options: tuple[str, ...] = ()
    family: FamilyName | None = None
    deterministic: bool = False
    num_splits: int | None = None
    cache: str = ""

    @property
    def kind(self) -> str:
        """Its arithmetic, a name in bounds.py."""
        record = FAMILIES[self.family] if self.family else None
        is_split = record is not None and record.multiplies == "mma_tf32"
        return "tf32x3" if is_split else self.dtype

    @property
    def is_converted(self) -> bool:
        """Whether float32 copies are computed with (launch/widened.py)."""
        return self.dtype in CONVERTED.get(self.family, ())

    def __str__(self) -> str:
        s = self.shape
        words = [
            self.family or "", self.direction, self.kind,
            f"{s.batch}x{s.seqlen_q}x{s.seqlen_k}",
            f"heads {s.heads}/{s.heads_kv} d {s.head_dim}/{s.head_dim_v}",
            self.values, self.cache, *self.options,
            "deterministic" if self.deterministic else "",
            f"num_splits={self.num_splits}" if self.num_splits else "",
        ]  # fmt: skip
        return " ".join(filter(None, words))


SIXTEEN_BITS: tuple[DType, ...] = ("float16", "bfloat16")
# Where tensor cores lack them, converted to float32.
CONVERTED: dict[FamilyName | None, tuple[DType, ...]] = {"fma": ("bfloat16",)}
# The dtypes of each family, if these are others.
DTYPES: dict[FamilyName, tuple[DType, ...]] = {
    "decode_simt": ("float32", "float64", *SIXTEEN_BITS),
    "fma": ("float32", *CONVERTED["fma"]),
    "mma8_float32": ("float32",),
    "mma8_float64": ("float64",),
    "simt": ("float32", "float64", *SIXTEEN_BITS),
}

VALUES = ("coded", "peaked", "rising")
# (seqlen_q, seqlen_k): tiles have 16 to 256 tokens.
LENGTHS = (
    (64, 64), (63, 65), (129, 127), (128, 257), (1, 97), (130, 129),
    (33, 256), (100, 31), (255, 192),
)  # fmt: skip
WIDTHS = ((128, 128), (40, 72), (256, 256), (320, 264))
CACHES = ("contiguous", "paged", "float8", "new")


def of_cpu(quick: bool) -> list[Call]:
    """The calls on NumPy arrays; float64 is what they are compared with."""
    dtypes: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    return [
        call
        for dtype in dtypes
        for call in [
            *_many_queries(None, dtype, quick),
            *_derivatives(None, dtype, quick),
            *_around(None, dtype),
            *_caches(None, dtype, quick),
            _rotary(dtype),
        ]
    ]


def of_families(quick: bool) -> list[Call]:
    """The calls of all families, also of those that a device lacks.

    The first dtype of a family has all, others the most usual ones; a quick
    check has the first alone.
    """
    found: list[Call] = []
    for record in FAMILIES.values():
        name = record.name
        dtypes = DTYPES.get(name, SIXTEEN_BITS)
        for dtype in dtypes[: 1 if quick else None]:
            few = quick or dtype != dtypes[0]
            if record.splits_keys:
                found += _few_queries(name, dtype, few)
                found += _caches(name, dtype, few)
            else:
                found += _many_queries(name, dtype, few)
                found += _derivatives(name, dtype, few)
                found += _around(name, dtype)
    dtypes = ("float32", "float64", *SIXTEEN_BITS)
    return found + [_rotary(dtype) for dtype in dtypes[: 1 if quick else None]]


def _many_queries(
    family: FamilyName | None, dtype: DType, few: bool
) -> Iterator[Call]:
    """forward and backward: lengths, head dimensions, options."""
    lengths = LENGTHS[:4] if few else LENGTHS
    for i, sizes in enumerate(lengths):
        for chosen in ((), ("causal",)):
            yield Call(
                "backward", dtype, Shape(2, *sizes), VALUES[i % 3], chosen,
                family,
            )  # fmt: skip
    for values in VALUES[:2]:
        yield Call(
            "backward", dtype, Shape(2, 130, 129), values, ("causal",), family,
            deterministic=True,
        )  # fmt: skip
    for i, (d, dv) in enumerate(WIDTHS[:1] if few else WIDTHS):
        for values in VALUES[:2]:
            yield Call(
                "backward", dtype, Shape(1, 65, 129, 2, 1, d, dv), values,
                ("causal",) if i % 2 else (), family,
            )  # fmt: skip
    for some in options.SETS[:2] if few else options.SETS:
        batch = 1 if options.PACKED in some else 2
        for values, sizes in zip(
            VALUES, ((65, 129), (128, 200)), strict=False
        ):
            yield Call(
                "backward", dtype, Shape(batch, *sizes, 4, 2), values, some,
                family,
            )  # fmt: skip


def _derivatives(
    family: FamilyName | None, dtype: DType, few: bool
) -> Iterator[Call]:
    for direction in ("jvp", "double_backward"):
        for i, sizes in enumerate(((64, 64), (65, 127), (33, 97))):
            for chosen in ((),) if few else ((), ("causal",)):
                yield Call(
                    direction, dtype, Shape(1, *sizes), VALUES[i % 2], chosen,
                    family,
                )  # fmt: skip


def _around(family: FamilyName | None, dtype: DType) -> Iterator[Call]:
    """What reads or joins the results of forward."""
    for values, sizes in zip(VALUES, ((65, 130), (63, 97)), strict=False):
        shape = Shape(2, *sizes)
        yield Call("readouts", dtype, shape, values, ("causal",), family)
        yield Call("merge", dtype, shape, values, (), family)


def _rotary(dtype: DType) -> Call:
    """apply_rotary, whose kernel belongs to no family."""
    return Call("rotary", dtype, Shape(2, 65, 1), "peaked")


def _few_queries(
    family: FamilyName, dtype: DType, few: bool
) -> Iterator[Call]:
    """forward by the families that split keys."""
    lengths = (255, 257) if few else (63, 128, 255, 257, 600)
    for i, keys in enumerate(lengths):
        for rows in (1, 17) if few else (1, 3, 17):
            yield Call(
                "forward", dtype, Shape(2, rows, keys, 4, 2), VALUES[i % 2],
                ("causal",), family, num_splits=3,
            )  # fmt: skip
    for chosen in () if few else options.SETS_OF_CACHES:
        yield Call(
            "forward", dtype, Shape(2, 3, 257, 4, 2), "coded", chosen, family,
            num_splits=3,
        )  # fmt: skip


def _caches(
    family: FamilyName | None, dtype: DType, few: bool
) -> Iterator[Call]:
    for cache in CACHES:
        if cache == "float8" and dtype == "float64":
            continue
        for i, keys in enumerate((129,) if few else (64, 129, 300)):
            yield Call(
                "kvcache", dtype, Shape(3, 4, keys, 4, 2), VALUES[i % 2],
                ("causal",), family, cache=cache,
            )  # fmt: skip
