"""The families of kernels, and with which options each is tested.

A new option in the table (helpers/options.py) is tested alone by the families
that have `ALONE` and with all others by each.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from cuflash.plans.tiles import Tile
from strategies import FEW_OPTIONS

from .backends import CUPY, EMULATED
from .data import SIMT, Case, Emulation
from .dtypes import DTYPES
from .options import TABLE, everything, fields_of

# Sets of options, as fields of a case ---------------------------------------

ALONE = {
    name: fields
    for data in TABLE.values()
    if data.effect
    for name, fields in data.alone.items()
}
ALL = {
    **fields_of(everything()),
    "window": (60, 60),
    "softcap": 30.0,
    "dropout": 0.5,
}
FEW = {
    "all" if names == everything() else "-".join(names): {
        **fields_of(names),
        "causal": "softcap" in names,
    }
    for names in FEW_OPTIONS
}


# No two arrays have a stride in common.
APART = {"layout": "unlike"}


def with_scales(**scales):
    """`ALONE`, some of it with a scale."""
    scaled = {n: {**ALONE[n], "scale": x} for n, x in scales.items()}
    return {**ALONE, **scaled}


def sizes(*numbers, causal=False):
    names = (
        "batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv",
        "head_dim", "head_dim_v",
    )  # fmt: skip
    return {**dict(zip(names, numbers, strict=True)), "causal": causal}


# Families -------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of kernels, and the cases that test its options.

    fields : of each case.
    shapes : names to further fields.
    sets : names to the fields of a set of options.
    pairs : names of a shape and a set, which are tested together.
    in_turns : the same, with deterministic=True.
    repeats : how often those run again, in another order of warps.
    emulated : the pairs that are emulated; on a GPU all run.
    """

    fields: dict[str, Any]
    shapes: dict[str, dict[str, Any]]
    sets: dict[str, dict[str, Any]]
    pairs: list[tuple[str, str]]
    in_turns: list[tuple[str, str]] = field(default_factory=list)
    repeats: int = 1
    emulated: list[tuple[str, str]] | None = None

    def case(self, shape, name, **more):
        """Return the case of a shape and a set of options."""
        fields = self.fields | self.shapes[shape] | self.sets[name] | more
        return Case(**fields)


# Only kernels for 16-bit types compute small and huge softcaps differently.
_FMA = {
    name: fields
    for name, fields in with_scales(slopes=-0.3, sink=-0.05).items()
    if name not in ("small softcap", "huge softcap")
} | {"all": ALL}

# In one shape.
_RARE = {
    # Scores are small, or smaller, in half of the warps' tiles; in none, by
    # the scale.
    "mixed softcap": {"softcap": 11.5},
    "mixed poly3 softcap": {"softcap": 18.2},
    "small softcap, sink": {"softcap": 30.0, "arrays_of": ("sink",)},
    "small softcap, dropout": {"softcap": 30.0, "dropout": 0.25},
    "negative softcap": {"softcap": 30.0, "scale": -0.1},
    "small softcap, slopes": {
        "softcap": 30.0,
        "arrays_of": ("alibi_slopes",),
    },
    # As with a mixed softcap.
    "capped bias": {"softcap": 11.5, "arrays_of": ("bias",)},
    "huge softcap, mask": {"softcap": 3e4, "arrays_of": ("mask",)},
    "bias, slopes": {"arrays_of": ("bias", "alibi_slopes")},
}
_WGMMA = with_scales(sink=-0.3) | {
    # Without bias, mask and dropout, which rule out compute_p_poly4().
    "few": {
        "window": (60, 60),
        "softcap": 30.0,
        "arrays_of": (
            "alibi_slopes_of_batches", "segment_ids_k", "segment_ids_q",
            "sink",
        ),
    },
    "all": ALL,
}  # fmt: skip

# Small tiles, of which many are skipped, or cut, or asked pair by pair.
_WIDE_KINDS = {
    "dmma": {
        "dtype": "float64",
        "on": Emulation(
            forward_tile=Tile(32, 16, 2, ptxas_level=3),
            backward_tile=Tile(32, 32, 4, 1, 1, 2, 2, 3),
            resident=3,
        ),
    },
    "tf32x3": {
        "dtype": "float32",
        "precision": "tf32x3",
        "on": Emulation(
            forward_tile=Tile(32, 16, 2, ptxas_level=3),
            backward_tile=Tile(32, 32, 2, 1, 1, 2, 2, 3),
            resident=3,
        ),
    },
    "simt64": {"dtype": "float64", "on": Emulation("sm_75")},
}
KINDS = {
    "mma": {"dtype": "bfloat16"},
    "fma": {"dtype": "float32"},
    "simt": {"dtype": "float32", "on": SIMT},
    **_WIDE_KINDS,
}

# On a GPU each dtype with each set; emulated, all dtypes and all sets.
_EMULATED = {
    "float16": ["window-alibi_slopes-sink", "all"],
    "bfloat16": ["window-segment_ids_q"],
    "float32": ["softcap-bias"],
    "float64": ["mask-dropout-sink"],
}


def _of_dtype(dtype):
    return Family(
        {"dtype": dtype, "seed": 3},
        {"several": {**sizes(2, 113, 203, 4, 2, 40, 40), **APART}},
        FEW,
        [*product(["several"], FEW)],
        emulated=[*product(["several"], _EMULATED[dtype])],
    )


def _of_wide_kind(kind):
    turns = {
        "window": {"window": (20, 20)},
        "segments": ALONE["segments"],
        "packed": TABLE["cu_seqlens_q"].alone["packed"],
    }
    return Family(
        kind,
        {
            # The bias is that of all heads, the mask that of all batches.
            "several": {
                **sizes(2, 113, 203, 4, 2, 40, 24),
                "seed": 23,
                **APART,
            },
            "long": sizes(1, 150, 150, 2, 1, 16, 16),
        },
        FEW | turns,
        [*product(["several"], FEW)],
        [*product(["long"], turns)],
        repeats=2,
    )


FAMILIES = {
    **{dtype: _of_dtype(dtype) for dtype in DTYPES},
    "fma": Family(
        {"dtype": "float32", "seed": 85},
        {
            # Batches and grouped heads, tiles as they are tuned.
            "tuned": {
                **sizes(2, 150, 190, 4, 2, 40, 24, causal=True),
                **APART,
                "on": Emulation(num_sms=2, seed=1, resident=2),
            },
            # Small tiles, and lanes with few pairs of them.
            "small": {
                **sizes(1, 70, 100, 2, 1, 64, 64),
                **APART,
                "on": Emulation(
                    num_sms=2,
                    resident=2,
                    forward_tile=Tile(16, 48, 2, ptxas_level=3),
                    backward_tile=Tile(16, 32, 4, 1, 1, 2, 2, 3),
                ),
            },
        },
        _FMA,
        [*product(["tuned", "small"], _FMA)],
        [*product(["tuned"], ["window", "left", "segments", "mask"])],
        emulated=[
            *product(["small"], _FMA),
            *product(["tuned"], ["all", *[*_FMA][:-1:2]]),
        ],
    ),
    **{name: _of_wide_kind(kind) for name, kind in _WIDE_KINDS.items()},
    "wgmma": Family(
        {
            "dtype": "bfloat16",
            "seed": 4,
            # Blocks wait for each other at dq_semaphore.
            "on": Emulation("sm_90a", num_sms=2, seed=1, resident=2),
        },
        {
            "grouped": {
                **sizes(2, 170, 200, 4, 2, 64, 64, causal=True),
                **APART,
            },
            # Shared memory holds one Q.
            "wide": {
                **sizes(1, 150, 140, 2, 2, 160, 200, causal=True),
                **APART,
            },
            # Many key tiles of few queries.
            "long": sizes(1, 130, 400, 1, 1, 128, 128),
        },
        _WGMMA | _RARE,
        [
            *product(["grouped", "wide", "long"], _WGMMA),
            *product(["grouped"], _RARE),
            ("long", "mixed poly3 softcap"),
        ],
        [
            *product(["grouped", "wide", "long"], ["window"]),
            ("grouped", "left"),
            ("wide", "sink"),
            ("long", "mask"),
            ("grouped", "dropout"),
        ],
        repeats=0,  # test_reproducible.py repeats calls on Hopper
        emulated=[
            *product(["grouped"], _WGMMA | _RARE),
            *product(["wide", "long"], ["few", "all"]),
            *product(["wide"], [*ALONE][::2]),
            *product(["long"], [*ALONE][1::2]),
            ("long", "mixed poly3 softcap"),
        ],
    ),
}


# Marks ----------------------------------------------------------------------


def _each(pairs_of):
    """Parametrise a test by backend, family, shape and set of options."""
    return pytest.mark.parametrize(
        ("backend", "family", "shape", "name"),
        [
            pytest.param(
                *backend.values,
                family,
                shape,
                name,
                marks=backend.marks,
                id="-".join((backend.id, family, shape, name)),
            )
            for backend in (EMULATED, CUPY)
            for family, made in FAMILIES.items()
            for shape, name in pairs_of(made, backend)
        ],
    )


def _pairs(family, backend):
    if backend is EMULATED and family.emulated:
        return family.emulated
    return family.pairs


on_families = _each(_pairs)
on_deterministic_families = _each(lambda family, backend: family.in_turns)
on_kinds = pytest.mark.parametrize("kind", KINDS)
on_wide_kinds = pytest.mark.parametrize("kind", _WIDE_KINDS)
