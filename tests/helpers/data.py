"""Inputs: ordinary ones of a drawn case, in any strides."""

from dataclasses import dataclass

import numpy as np

from .dtypes import DTYPES


@dataclass(frozen=True)
class Case:
    """One call, small enough to print as one line.

    Arrays come from `seed`, so a failing example is this line alone.
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
    layout: str = "contiguous"
    seed: int = 0

    def _repr_pretty_(self, printer, cycle):
        """Print on one line, also in Hypothesis's reports."""
        printer.text(repr(self))

    def call(self):
        """Return the keyword arguments that both directions take."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "block_q": self.block_q,
            "block_k": self.block_k,
        }

    def meaning(self):
        """Return the keyword arguments that decide the result."""
        return {"scale": self.scale, "causal": self.causal}


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
    """Return q, k, v and dout of a case: standard normal, laid out."""
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    return tuple(
        LAYOUTS[case.layout](rng.standard_normal(shape).astype(dtype))
        for shape in shapes(case).values()
    )


# Layouts: the same values, other strides. What lies between the elements is
# NaN, so a read of the gaps shows. Axes: batch, token, head, head_dim.


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
    )
}
