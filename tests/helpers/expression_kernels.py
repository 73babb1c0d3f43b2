"""The generated text of users' functions, run by the emulator.

Several functions make one kernel, as most of a compilation's time is the
headers'.
"""

from dataclasses import dataclass

import numpy as np

from cuflash import emulator
from cuflash.expressions import nodes, text
from cuflash.plans.kernel import KernelPlan
from cuflash.request.traced import bits
from helpers.small_kernels import KERNELS, read_only

INCLUDES = """\
#include "score/array_gradients.cuh"
#include "score/mod_arrays.cuh"
"""
EVERYTHING = nodes.constant(True)  # a mask: text without one includes a file
MOST_ARRAYS, MOST_AXES = 8, 4
DTYPES = {"float32": np.float32, "float64": np.float64}


@dataclass(frozen=True)
class Graphs:
    """A score and a mask to be evaluated together; None: none.

    dmods : slots of the arrays whose gradients are summed.
    """

    score: object = None
    mask: object = None
    dmods: tuple = ()


@dataclass(frozen=True)
class Found:
    """What a kernel computed of `Graphs`: (queries, keys), (tiles,).

    dmods : by slot.
    inside : of tiles, 1 if all reads are inside arrays; 2 if they are said to
        be, and scores without tests differ. mask_inside: the same of masks.
    affine : of tiles, 1 if scores are affine in the key; 2 if they are said to
        be, and differ from what follows, which rounding may explain.
    """

    score: np.ndarray
    value: np.ndarray
    slope: np.ndarray
    visible: np.ndarray
    of_warp: np.ndarray
    of_lane: np.ndarray
    dmods: dict
    inside: np.ndarray
    mask_inside: np.ndarray
    affine: np.ndarray


def _text(graphs, kinds, short):
    parts = [INCLUDES]
    for i, x in enumerate(graphs):
        score, mask = x.score or nodes.SCORE, x.mask or EVERYTHING
        own = text.text(score, mask, kinds, x.dmods, short)
        parts.append(f"namespace e{i} {{\n{own}\n}}\n")
    visits = "\n".join(
        f"    visit(e{i}::ScoreExpression<Accumulator<Element>>{{}},"
        f" e{i}::MaskExpression{{}}, Grid<{i % 4}>{{}}, {i});"
        for i in range(len(graphs))
    )
    return "\n".join([
        *parts,
        "template <class Visit> inline void visit_all(Visit visit) {",
        visits, "}\n",
    ])  # fmt: skip


def _axes(arrays):
    """Sizes, strides in elements, strides of gradients, each (8, 4)."""
    sizes = np.ones((MOST_ARRAYS, MOST_AXES), np.int32)
    strides = np.zeros((2, MOST_ARRAYS, MOST_AXES), np.int64)
    for i, x in enumerate(arrays):
        sizes[i, : x.ndim] = x.shape
        strides[0, i, : x.ndim] = [s // x.itemsize for s in x.strides]
        own = np.cumprod([1, *x.shape[:0:-1]])[::-1]
        strides[1, i, : x.ndim] = own
    return sizes, strides[0], strides[1]


def evaluate(graphs, kinds, arrays, numbers, pairs, ds, tiles, element,
             short=False):  # fmt: skip
    """Run graphs on the pairs of a head.

    Parameters
    ----------
    graphs : list of Graphs
    kinds : tuple of ArrayKind
    arrays, numbers : list
        By slot.
    pairs : expression_calls.Pairs
    ds : ndarray, (queries, keys)
    tiles : ndarray of int, (tiles, 4)
        First and last query, first and last key.
    element : str
        The kernel's Element.
    short : bool
        As in `text.text`.

    Returns
    -------
    list of Found
    """
    real = pairs.score.dtype
    shape = len(graphs), pairs.queries, pairs.keys
    sizes, strides, dmod_strides = _axes(arrays)
    counts = [x.size for x in arrays]
    offsets = np.cumsum([0, *counts, *[0] * MOST_ARRAYS])
    values, results, slopes = (np.full(shape, np.nan, real) for _ in range(3))
    visible = np.full(shape, 7, np.uint8)
    flags = np.full((len(graphs), 5, len(tiles)), 7, np.uint8)
    sums = np.zeros((len(graphs), sum(counts)), real)
    nothing = [np.zeros(0)] * MOST_ARRAYS
    fields = {
        f"a{i}": read_only(x)
        for i, x in enumerate([*arrays, *nothing][:MOST_ARRAYS])
    }
    fields |= {
        "numbers": read_only(np.array(bits(tuple(numbers)), np.uint64)),
        "strides": read_only(strides.ravel()),
        "dmod_strides": read_only(dmod_strides.ravel()),
        "sizes": read_only(sizes.ravel()),
        "dmod_offsets": read_only(offsets[:MOST_ARRAYS].astype(np.int64)),
        "scores": read_only(np.ascontiguousarray(pairs.score)),
        "ds": read_only(np.ascontiguousarray(ds.astype(real))),
        "results": results, "values": values, "slopes": slopes,
        "visible": visible,
        "tiles": read_only(np.asarray(tiles, np.int32)),
        "flags": flags, "sums": sums,
        "b": pairs.b, "h": pairs.h, "queries": pairs.queries,
        "keys": pairs.keys, "num_tiles": len(tiles),
        "num_sums": sums.shape[1],
    }  # fmt: skip
    kernel = KernelPlan(
        str(KERNELS / "expressions" / "evaluate_expressions.cu"),
        "evaluate_expressions",
        (("Element", element), ("Arguments", "BackwardExpressionArguments")),
        32,
        0,
        expression=_text(graphs, kinds, short),
    )
    with emulator.active("sm_90a") as emulated:
        emulated.launch(kernel, 1, **fields)
    return [
        Found(
            results[i], values[i], slopes[i], visible[i].astype(bool),
            flags[i, 0], flags[i, 1],
            {
                slot: sums[i, offsets[slot] : offsets[slot + 1]].reshape(
                    arrays[slot].shape)
                for slot in x.dmods
            },
            *flags[i, 2:],
        )
        for i, x in enumerate(graphs)
    ]  # fmt: skip
