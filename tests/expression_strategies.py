"""Draws a user's functions: score_mod and mask_mod as Python text.

An expression has a depth of up to 6 over all functions. It reads the arrays
of `ARRAYS` at indices that leave them, and numbers. `Drawn.function` is what a
user would pass; it takes NumPy arrays of indices as well as traced values.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from scipy import special

DEPTH = 6

# Names of arrays, by what an element is; the axes of each.
REALS = {"table": 2, "curve": 1, "half": 1}
INTS = {"ids": 2, "small": 1, "far": 1}
BOOLS = {"flags": 1, "pairs": 2}
ARRAYS = REALS | INTS | BOOLS
NUMBERS = {"n": "int", "w": "real", "on": "bool"}
LENGTHS = ("seqlen_q", "seqlen_k")
INDICES = ("b", "h", "q_idx", "kv_idx")


def to_int(x):
    """As ``astype(int)``: truncates; what no int64 holds is 0."""
    if not isinstance(x, (np.ndarray, np.generic, int, float)):
        return x.astype(int)  # a traced value
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(x) < 2.0**63, x, 0).astype(np.int64)


def to_real(x):
    if not isinstance(x, (np.ndarray, np.generic, int, float)):
        return x.astype(float)
    return np.asarray(x).astype(np.float64)


@dataclass(frozen=True)
class Drawn:
    """A function of a user's, by its expression.

    Printed as code, so that a failing example can be pasted.
    """

    role: str
    text: str

    def __repr__(self):
        return f"Drawn({self.role!r}, {self.text!r})"

    @property
    def function(self):
        arguments = INDICES if self.role == "mask_mod" else ("score", *INDICES)
        named = ", ".join([*LENGTHS, *ARRAYS, *NUMBERS])
        text = f"lambda {', '.join(arguments)}, *, {named}: {self.text}"
        space = {
            "np": np, "special": special, "to_int": to_int, "to_real": to_real
        }  # fmt: skip
        return eval(text, space)


# ---- The grammar: each draws the text of an expression of some kind ----

_ROUNDED = ("np.exp", "np.exp2", "np.expm1", "np.log", "np.log2", "np.log10",
            "np.log1p", "np.tanh", "np.sin", "np.cos", "special.erf",
            "special.erfc", "np.arctan")  # fmt: skip
_OF_ONE = ("-{}", "abs({})", "np.sqrt({})", "np.floor({})", "np.ceil({})",
           "np.trunc({})", "np.rint({})", "np.sign({})",
           "np.square({})", "({}) ** 3")  # fmt: skip
_OF_TWO = ("({} + {})", "({} - {})", "({} * {})", "({} / {})",
           "np.minimum({}, {})", "np.maximum({}, {})", "({} // {})",
           "({} % {})")  # fmt: skip
_OF_INTS = ("({} + {})", "({} - {})", "np.minimum({}, {})",
            "np.maximum({}, {})", "({} // {})", "({} % {})", "({} & {})",
            "({} | {})", "({} ^ {})")  # fmt: skip
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


@dataclass(frozen=True)
class Grammar:
    """What expressions may have.

    Attributes
    ----------
    score : bool
        Whether ``score`` is among the leaves.
    rounded : bool
        Whether functions are that a library rounds: exp and the like.
    """

    score: bool
    rounded: bool = True

    def pick(self, draw, *makers):
        return makers[draw(st.integers(0, len(makers) - 1))]()

    def filled(self, draw, forms, *operands):
        form = draw(st.sampled_from(forms))
        count = form.count("{}")
        return form.format(*(operands[i % len(operands)]()
                             for i in range(count)))  # fmt: skip

    def gather(self, draw, names, depth):
        name = draw(st.sampled_from([*names]))
        indices = [self.index(draw, min(depth, 2)) for _ in range(names[name])]
        return f"{name}[{', '.join(indices)}]"

    def index(self, draw, depth):
        """An index of an array, often outside."""
        usual = ("q_idx", "kv_idx", "h", "b", "q_idx - kv_idx", "0", "-1")
        if depth <= 0 or draw(st.integers(0, 2)):
            return draw(st.sampled_from(usual))
        return self.int(draw, depth - 1)

    # Leaves.

    def real_leaf(self, draw):
        leaves = ["w", "to_real(q_idx)", "0.25 * kv_idx"]
        if self.score:
            leaves += ["score"] * 6
        return self.pick(
            draw,
            lambda: draw(st.sampled_from(leaves)),
            lambda: draw(st.sampled_from(leaves)),
            lambda: repr(draw(st.integers(-32, 32)) / 8),
            lambda: self.gather(draw, REALS, 0),
        )

    def int_leaf(self, draw):
        leaves = ("q_idx", "kv_idx", "q_idx", "kv_idx", "b", "h", "n",
                  *LENGTHS, "(q_idx - kv_idx)", "table.shape[1]")  # fmt: skip
        return self.pick(
            draw,
            lambda: draw(st.sampled_from(leaves)),
            lambda: draw(st.sampled_from(leaves)),
            lambda: f"np.int64({draw(st.integers(-9, 40))})",
            lambda: self.gather(draw, INTS, 0),
        )

    # Whole expressions.

    def real(self, draw, depth):
        if depth <= 0:
            return self.real_leaf(draw)

        def x():
            return self.real(draw, depth - 1 - draw(st.integers(0, 1)))

        def rounded():
            return f"{draw(st.sampled_from(_ROUNDED))}({x()})"

        several = (rounded, rounded) if self.rounded else ()
        return self.pick(
            draw,
            lambda: self.filled(draw, _OF_TWO, x),
            lambda: self.filled(draw, _OF_TWO, x),
            lambda: self.filled(draw, _OF_ONE, x),
            lambda: f"np.where({self.bool(draw, depth - 1)}, {x()}, {x()})",
            lambda: f"np.clip({x()}, -2.5, {x()})",
            lambda: f"({self.int(draw, depth - 1)} * 0.5)",
            lambda: f"({self.int(draw, depth - 1)} / 3)",
            lambda: self.gather(draw, REALS, depth),
            *several,
            *([lambda: f"(0.5 + abs({x()})) ** {self.real(draw, 0)}"]
              if self.rounded else ()),
        )  # fmt: skip

    def int(self, draw, depth):
        if depth <= 0:
            return self.int_leaf(draw)

        def x():
            return self.int(draw, depth - 1 - draw(st.integers(0, 1)))

        return self.pick(
            draw,
            lambda: self.filled(draw, _OF_INTS, x),
            lambda: self.filled(draw, _OF_INTS, x),
            lambda: self.filled(
                draw, ("-{}", "~{}", "abs({})", "np.sign({})"), x
            ),
            lambda: self.filled(
                draw,
                ("({} * 3)", "({} << 2)", "({} >> 1)", "({} % 8)",
                 "({} // 4)", "({} >> 40)", "({} % -3)"), x,
            ),
            lambda: f"({x()} * {self.int_leaf(draw)})",
            lambda: f"np.where({self.bool(draw, depth - 1)}, {x()}, {x()})",
            lambda: f"to_int({self.real(draw, depth - 2)})",
            lambda: self.gather(draw, INTS, depth),
        )  # fmt: skip

    def bool(self, draw, depth):
        if depth <= 0:
            return self.pick(
                draw,
                lambda: "(q_idx >= kv_idx)",
                lambda: "on",
                lambda: self.gather(draw, BOOLS, 0),
            )

        def x():
            return self.bool(draw, depth - 1 - draw(st.integers(0, 1)))

        def compared(*kinds):
            sign = draw(st.sampled_from(_COMPARISONS))
            left, right = (kind(draw, depth - 1) for kind in kinds)
            return f"({left} {sign} {right})"

        return self.pick(
            draw,
            lambda: compared(self.int, self.int),
            lambda: compared(self.int, self.int),
            lambda: compared(self.real, self.real),
            lambda: compared(self.int, self.real),
            lambda: compared(self.bool, self.bool),
            lambda: self.filled(
                draw, ("({} & {})", "({} | {})", "({} ^ {})", "~{}"), x
            ),
            lambda: self.filled(
                draw,
                ("np.logical_and({}, {})", "np.logical_or({}, {})",
                 "np.logical_not({})", "np.logical_xor({}, {})"), x,
            ),
            lambda: f"np.where({x()}, {x()}, {x()})",
            lambda: self.filled(
                draw, ("np.isnan({})", "np.isinf({})"),
                lambda: self.real(draw, depth - 1),
            ),
            lambda: self.gather(draw, BOOLS, depth),
        )  # fmt: skip


@st.composite
def scores(draw, rounded=True):
    """A score_mod."""
    depth = draw(st.integers(1, DEPTH))
    return Drawn("score_mod", Grammar(True, rounded).real(draw, depth))


@st.composite
def masks(draw, rounded=True):
    """A mask_mod."""
    depth = draw(st.integers(1, DEPTH))
    return Drawn("mask_mod", Grammar(False, rounded).bool(draw, depth))


@st.composite
def masks_of_ints(draw):
    """A mask_mod that intervals have a chance with: ints, no reals."""

    class OfInts(Grammar):
        def real(self, draw, depth):
            return self.int(draw, depth)

    depth = draw(st.integers(1, 4))
    return Drawn("mask_mod", OfInts(False, False).bool(draw, depth))
