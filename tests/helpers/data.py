"""Inputs of a drawn case, with any strides."""

import math
from dataclasses import dataclass, fields

import numpy as np

from cuflash.plans.tiles import Tile

from . import extreme, punishing
from .apart import in_gaps
from .dtypes import DTYPES, lse_dtype
from .options import (
    NumberFields,
    apart,
    option_arrays,
    option_gradients,
    option_numbers,
)


def short_repr(value):
    """Format a dataclass as a constructor call, without defaults."""
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    said = [
        f"{field.name}={short_repr(got)}"
        for field in fields(value)
        if (got := getattr(value, field.name)) != field.default
    ]
    return f"{type(value).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Emulation:
    """The emulated GPU that a case runs on.

    seed : draws the order of its warps.
    resident : how many blocks are alive at once; 0: the seed draws it.
    num_sms, l2_bytes : further inputs of plans; None: an A100's.
    forward_tile, backward_tile : instead of the tuned ones.
    family : to ask for, as by CUFLASH_FAMILY; None: the best one.
    truncates : whether tensor cores truncate sums, as a GPU's do.
    """

    arch: str = "sm_80"
    seed: int = 0
    resident: int = 0
    num_sms: int | None = None
    l2_bytes: int | None = None
    forward_tile: Tile | None = None
    backward_tile: Tile | None = None
    family: str | None = None
    truncates: bool = False

    __repr__ = short_repr


# Of float32, which the best family for every GPU runs by fma.
SIMT = Emulation("sm_75", family="simt")


@dataclass(frozen=True, repr=False)
class Case(NumberFields):
    """One call, small enough to print as one line.

    `seed` determines the arrays, so this line is the whole failing example:
    paste it into a test, as `examples` of `helpers.drawn.on_each_backend`.

    values : how the numbers are chosen: "normal", or one of `VALUES`.
    spoiled : (array, index, value), put into the arrays after that.
    on : where kernels are emulated.
    window, softcap, dropout : as of a call; dropout's seed is the case's.
    arrays_of : the options that are arrays; see `options.MAKERS`.
    offsets : cu_seqlens of queries and of keys, if sequences are packed.
    """

    dtype: str = "float32"
    batch: int = 1
    seqlen_q: int = 16
    seqlen_k: int = 16
    num_heads_q: int = 1
    num_heads_kv: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    causal: bool = False
    scale: float | None = None
    block_q: int | None = None
    block_k: int | None = None
    deterministic: bool = False
    precision: str | None = None
    layout: str = "contiguous"
    values: str = "normal"
    spoiled: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    seed: int = 0
    on: Emulation = Emulation()
    arrays_of: tuple[str, ...] = ()
    offsets: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    __repr__ = short_repr

    def _repr_pretty_(self, printer, cycle):
        """Print on one line, also in Hypothesis's reports."""
        printer.text(repr(self))

    def call(self):
        """Return the keyword arguments that both directions take."""
        blocks = {"block_q": self.block_q, "block_k": self.block_k}
        return {**self.meaning(), **blocks, "precision": self.precision}

    def meaning(self):
        """Return the keyword arguments that determine the result."""
        plain = {"scale": self.scale, "causal": self.causal}
        return {**plain, **self.options()}

    def sums(self):
        """Return what is particular about the kernels' sums: rounding.py."""
        ids = self.offsets is not None or "segment_ids_q" in self.arrays_of
        sixteen_bits = DTYPES[self.dtype].itemsize == 2
        return {
            "truncates": self.precision == "tf32x3",
            "integers": self.deterministic and ids and sixteen_bits,
        }

    def options(self):
        """Return the case's options, without scale and causal."""
        options = option_arrays(self) | option_numbers(self)
        if self.offsets is not None:
            for name, offsets in zip("qk", self.offsets, strict=True):
                options[f"cu_seqlens_{name}"] = np.array(offsets, np.int32)
        if self.layout == "unlike":
            options |= apart(options, self.seed % 2 == 0)
        return options

    def asked(self):
        """Return the keyword arguments that request dbias and dsink."""
        return option_gradients(self)


def shapes(case):
    """Return the shapes of q, k, v and dout."""
    c = case
    return {
        "q": (c.batch, c.seqlen_q, c.num_heads_q, c.head_dim),
        "k": (c.batch, c.seqlen_k, c.num_heads_kv, c.head_dim),
        "v": (c.batch, c.seqlen_k, c.num_heads_kv, c.head_dim_v),
        "dout": (c.batch, c.seqlen_q, c.num_heads_q, c.head_dim_v),
    }


def inputs(case):
    """Return q, k, v and dout of a case, laid out."""
    rng = np.random.default_rng(case.seed)
    arrays = VALUES[case.values](rng, case)
    arrays = {
        name: laid_out(case, name, array.astype(DTYPES[case.dtype]))
        for name, array in zip(shapes(case), arrays, strict=True)
    }
    for name, index, value in case.spoiled:
        arrays[name][index] = float(value)
    return tuple(arrays.values())


def laid_out(case, name, array):
    """Return an array of a case by its layout; `name` is the call's."""
    if case.layout == "unlike":
        return unlike(array, name)
    return LAYOUTS[case.layout](array)


def lse_gradient(case):
    """Return dlse of a case, standard normal."""
    rng = np.random.default_rng([case.seed, case.seqlen_q])
    dlse = rng.standard_normal((case.batch, case.num_heads_q, case.seqlen_q))
    return dlse.astype(lse_dtype(DTYPES[case.dtype]))


# Values: q, k, v and dout of a case from random numbers.


def normal(rng, case):
    return [rng.standard_normal(shape) for shape in shapes(case).values()]


ZERO_QUERIES = 4  # at the end of `halves`


def halves(rng, case):
    """Scores are multiples of 1/2 with a scale of 1/2; the last queries 0."""
    q, k, v, dout = normal(rng, case)
    q, k = (np.sign(x) * (np.abs(x) > 0.7) for x in (q, k))
    q[:, -ZERO_QUERIES:] = 0
    return q, k, v, dout


def subnormal(rng, case):
    """All values are below the smallest normal number of the dtype."""
    small = extreme.SUBNORMAL[case.dtype]
    # Rounded first, so that products are the same in other dtypes.
    return [
        x.astype(DTYPES[case.dtype]).astype(np.float64) * small
        for x in normal(rng, case)
    ]


def with_scores_of(family):
    def values(rng, case):
        scores = family(rng, (case.seqlen_q, case.seqlen_k), case.dtype)
        return extreme.from_scores(scores, rng, case.head_dim_v)

    return values


def punishing_from(first, count):
    def values(rng, case):
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        return punishing.of_heads(
            rng, shapes(case), scale, case.dtype, first, count
        )

    return values


VALUES = (
    {"normal": normal, "halves": halves, "subnormal": subnormal}
    | {
        family.__name__: with_scores_of(family)
        for family in (*extreme.FAMILIES, *extreme.WITH_ONE_MAXIMUM)
    }
    | {
        kind.__name__: punishing_from(i, 1)
        for i, kind in enumerate(punishing.KINDS)
    }
    # Each key head has the next kind.
    | {"punishing": punishing_from(0, len(punishing.KINDS))}
)


# Layouts: the same values, other strides. Gaps between elements are NaN, to
# reveal reads of them. Axes: batch, token, head, head_dim.


def _inside(array, shape, index):
    """Write `array` into a view of a NaN-filled array of `shape`."""
    store = np.full(shape, np.nan).astype(array.dtype)
    view = store[index]
    view[...] = array
    return view


def contiguous(array):
    return np.ascontiguousarray(array)


def heads_outside(array):
    """(batch, heads, tokens, head_dim) in memory, as PyTorch's SDPA."""
    return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def packed(array):
    """Every token's row is a third of a wider one, as in a fused QKV."""
    b, n, h, d = array.shape
    return _inside(array, (b, n, 3, h, d), np.s_[:, :, 1])


def padded_rows(array):
    """Rows 16-byte aligned whatever head_dim is."""
    b, n, h, d = array.shape
    wide = -(-(d + 1) // 8) * 8
    return _inside(array, (b, n, h, wide), np.s_[..., :d])


def misaligned(array):
    """Rows one element off any 16-byte boundary."""
    b, n, h, d = array.shape
    wide = -(-(d + 1) // 8) * 8
    return _inside(array, (b, n, h, wide), np.s_[..., 1 : d + 1])


def every_other_token(array):
    b, n, h, d = array.shape
    return _inside(array, (b, 2 * n, h, d), np.s_[:, ::2])


def tokens_backwards(array):
    """A negative token stride."""
    return _inside(array, array.shape, np.s_[:, ::-1])


def every_other_element(array):
    """No unit stride on the last axis."""
    b, n, h, d = array.shape
    return _inside(array, (b, n, h, 2 * d), np.s_[..., ::2])


def axes_reversed(array):
    """Fortran order: the batch has the smallest stride."""
    return np.asfortranarray(array)


def broadcast(array):
    """Stride 0 on batch and heads; every head holds the first one's data."""
    return np.broadcast_to(array[:1, :, :1], array.shape)


# Arrays of a call that kernels read or write by strides, in no order.
_STRIDED = (
    "q", "k", "v", "dout", "out", "dq", "dk", "dv", "q_dot", "k_dot", "v_dot",
)  # fmt: skip


def unlike(array, name="out"):
    """As of a backend that is `Apart`: strides that no other array has.

    Axes before the last three join batch, as those of directions do in
    place, and packed sequences have none.
    """
    *outer, n, h, d = array.shape
    joined = array.reshape(math.prod(outer), n, h, d)
    *_, view = in_gaps(joined, _STRIDED.index(name))
    return view.reshape(array.shape)


LAYOUTS = {
    f.__name__: f
    for f in (
        contiguous,
        heads_outside,
        packed,
        padded_rows,
        misaligned,
        every_other_token,
        tokens_backwards,
        every_other_element,
        axes_reversed,
        broadcast,
        unlike,
    )
}
