"""Calls with drawn functions, and built-in options that mean the same.

Masks are of ints; scores get a sum of exact reals, which is a bias, perhaps
after a softcap. So the bounds of calls with options hold (expected.py).
"""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from cuflash.reference import expressions as reference
from expression_strategies import (
    REALS,
    Drawn,
    Grammar,
    masks_of_ints,
)

from . import expression_calls
from .data import Case

# float64 elements are read as float32 by some kernels: all are exact.
GRADIENTS = ("curve", "table")
CAP = 3.0


class Exact(Grammar):
    """Reals that are multiples of 1/64 below 2^12, in any precision."""

    def real(self, draw, depth):
        def x():
            return self.real(draw, depth - 1)

        def read():
            return self.gather(draw, REALS, min(depth, 2))

        if depth <= 0:
            return self.pick(
                draw, read, read, lambda: "w",
                lambda: repr(draw(st.integers(-16, 16)) / 8),
            )  # fmt: skip
        return self.pick(
            draw,
            lambda: f"({x()} + {x()})",
            lambda: f"({x()} - {x()})",
            lambda: f"np.minimum({x()}, {x()})",
            lambda: f"np.maximum({x()}, {x()})",
            lambda: f"abs({x()})",
            lambda: f"-{x()}",
            lambda: f"({read()} * {read()})",
            lambda: f"({read()} * w)",
            lambda: f"np.where({self.bool(draw, 1)}, {x()}, {x()})",
            lambda: f"(np.clip({self.int(draw, 1)}, -30, 30) * 0.125)",
            read,
        )

    def bool(self, draw, depth):
        signs = draw(st.sampled_from(("<", ">=", "==", "!=")))
        return f"({self.int(draw, depth)} {signs} {self.int(draw, depth)})"

    def int(self, draw, depth):
        if depth <= 0:
            leaves = ("q_idx", "kv_idx", "h", "b", "n", "seqlen_k")
            return draw(st.sampled_from(leaves))
        return self.filled(
            draw,
            ("({} - {})", "({} % 7)", "({} // 3)", "abs({})",
             "np.minimum({}, {})", "({} & 5)"),
            lambda: self.int(draw, depth - 1),
        )  # fmt: skip


@dataclass(frozen=True)
class DrawnVariant:
    """A `variants.Variant` of drawn text.

    added : the expression that is added to the score; "" for none.
    mask : that of the mask; "" for none.
    capped : whether the score has a softcap of `CAP` before.
    seed : of the arrays.
    """

    added: str = ""
    mask: str = ""
    capped: bool = False
    seed: int = 0

    @property
    def softcap(self):
        return CAP if self.capped else None

    def functions(self):
        score = f"{CAP} * np.tanh(score / {CAP})" if self.capped else "score"
        if self.added:
            score += f" + np.clip({self.added}, -4, 4)"
        found = {}
        if score != "score":
            found["score_mod"] = Drawn("score_mod", score)
        if self.mask:
            found["mask_mod"] = Drawn("mask_mod", self.mask)
        return found

    def arrays(self, shape):
        return expression_calls.mod_arrays(self.seed)

    def options(self, shape):
        found = {name: x.function for name, x in self.functions().items()}
        return found, self.arrays(shape) if found else {}

    def meaning(self, shape):
        """Return built-in options."""
        found = {}
        if self.capped:
            found["softcap"] = CAP
        if self.added:
            text = f"np.clip({self.added}, -4, 4)"
            found["bias"] = self._everywhere(Drawn("mask_mod", text), shape)
        if self.mask:
            mask = Drawn("mask_mod", self.mask)
            found["mask"] = self._everywhere(mask, shape).astype(bool)
        return found

    def _everywhere(self, drawn, shape):
        values, (batch, heads, queries, keys) = self.arrays(shape), shape
        none = np.zeros((queries, keys))
        return np.array([
            [
                expression_calls.plain(
                    drawn, values,
                    expression_calls.Pairs(b, h, queries, keys, none),
                )
                for h in range(heads)
            ]
            for b in range(batch)
        ]).reshape(shape)  # fmt: skip

    def gradients(self, dbias):
        """Return those of arrays, and bounds of their errors.

        dbias : Expected, the gradient of what is added to scores.
        """
        shape, values = dbias.ref.shape, self.arrays(dbias.ref.shape)
        totals, errors = (
            {x: np.zeros(values[x].shape) for x in GRADIENTS} for _ in range(2)
        )
        function = self.functions()["score_mod"].function
        for b, h in np.ndindex(shape[:2]):
            place = reference.Place(
                np.arange(shape[2]), np.arange(shape[3]), *shape[2:],
                reference.HeadIndices(b, h),
            )  # fmt: skip
            found = reference.score(
                function, np.zeros(shape[2:]), place, values, GRADIENTS
            ).gathers
            reference.add_gradients(totals, found, dbias.ref[b, h])
            sizes = {x: np.abs(y) for x, y in found.items()}
            reference.add_gradients(errors, sizes, dbias.bound()[b, h])
            # Each of so many additions rounds.
            added = np.abs(dbias.ref[b, h]) * 2.0**-23 * dbias.ref[0].size
            reference.add_gradients(errors, sizes, added)
        return totals, errors


@st.composite
def variants(draw):
    """Draw functions."""
    kind = draw(st.integers(1, 3))
    added = mask = ""
    if kind & 1:
        added = Exact(False, False).real(draw, draw(st.integers(0, 3)))
    if kind & 2:
        mask = draw(masks_of_ints()).text
    return DrawnVariant(
        added, mask, draw(st.booleans()), draw(st.integers(0, 2**16))
    )


# One token before, at and after the ends of tiles and of two.
EDGES = [1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 127, 128, 129, 144]

# Options beside the functions, as fields of a case; most calls have none.
BESIDE = (
    {}, {}, {}, {"causal": True}, {"window": (20, 9)}, {"softcap": 5.0},
    {"dropout": 0.25}, {"arrays_of": ("alibi_slopes",)},
    {"arrays_of": ("bias",)}, {"arrays_of": ("mask",)},
    {"arrays_of": ("sink",)},
    {"arrays_of": ("segment_ids_k", "segment_ids_q")},
)  # fmt: skip


@st.composite
def calls(draw, dtype, on, longest_q=144, head_dim=32, precision=None):
    """Draw a `Case` and a `DrawnVariant`."""
    edges = st.sampled_from(EDGES)
    heads_q, heads_kv = draw(st.sampled_from([(2, 1), (3, 3), (4, 2)]))
    beside = draw(st.sampled_from(BESIDE))
    variant = draw(variants())
    # A softcap of its own comes after these, a built-in one before.
    after = {"softcap", "alibi_slopes", "bias"}
    if after & {*beside, *beside.get("arrays_of", ())}:
        variant = replace(variant, capped=False)
    return Case(
        dtype, draw(st.integers(1, 2)), min(draw(edges), longest_q),
        draw(edges), heads_q, heads_kv, head_dim, head_dim,
        deterministic=draw(st.booleans()), precision=precision,
        seed=draw(st.integers(0, 2**16)), on=on, **beside,
    ), variant  # fmt: skip
