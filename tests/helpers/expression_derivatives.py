"""Derivatives of calls with a user's score and mask, and what to expect.

The reference calls the user's function on dual numbers; kernels and NumPy
arrays have the recorded graph.
"""

import numpy as np

import cuflash
from cuflash.reference.attention import attention
from cuflash.reference.double_backward import double_backward
from cuflash.reference.expressions import HeadIndices
from cuflash.reference.jvp import jvp

from .data import inputs
from .derivatives import INPUTS, NUMPY, tangents
from .dtypes import lse_dtype
from .heads import heads_first, heads_last, sum_groups
from .options import of_reference

MOVING = "gain", "table", "rate", "weight"


def bent(
    score, b, h, q_idx, kv_idx, *, gain, table, rate, weight, at, n, seqlen_k
):
    """Each kind of sum, a conversion of an index, slopes that move."""
    near = np.where(at[kv_idx] > 0, gain[h] * np.tanh(score), score / n)
    far = rate[b, q_idx] * np.exp(-abs(seqlen_k - kv_idx) / 8)
    return score + near * weight[kv_idx] + far + table[h, q_idx - kv_idx + 40]


def some(b, h, q_idx, kv_idx, *, at):
    """The first tile of keys is hidden, others whole or in part."""
    return (kv_idx >= 16) & (q_idx + 9 >= kv_idx + 2 * b * at[kv_idx])


def arrays_of(case):
    """Return what they read, and tangents of `MOVING`."""
    rng = np.random.default_rng([case.seed, 8])
    heads, keys = case.num_heads_q, case.seqlen_k
    shapes = {
        "gain": (heads,),
        "table": (heads, 60),
        "rate": (case.batch, case.seqlen_q),
        "weight": (keys - 3,),  # the last keys read 0
    }
    real = lse_dtype(case.dtype)
    made = [
        {x: rng.uniform(-1, 1, y).astype(real) for x, y in shapes.items()}
        for _ in range(2)
    ]
    others = {"at": np.arange(keys, dtype=np.int32) % 3, "n": 4.0}
    return made[0] | others, made[1]


class Call:
    """A case's derivatives in one direction, all that moves or some.

    score_mod : alone, of `arrays` that do not move; None: `bent`, `some`.
    """

    def __init__(
        self, case, moving=(*INPUTS, *MOVING), score_mod=None, **arrays
    ):
        self.case = case
        self.arrays, dots = (arrays, {}) if score_mod else arrays_of(case)
        self.dots = {x: y for x, y in dots.items() if x in moving}
        self.direction = tangents(case, moving)
        self.functions = {"score_mod": score_mod}
        if score_mod is None:
            self.functions = {"score_mod": bent, "mask_mod": some}

    def options(self, backend):
        """Return the case's options and functions, arrays placed."""
        own = {x: _place(backend, y) for x, y in self.case.call().items()}
        mods = {x: _place(backend, y) for x, y in self.arrays.items()}
        return own | self.functions | {"mod_arrays": mods}

    def jvp(self, backend=NUMPY, **more):
        """Return out_dot and lse_dot by name."""
        given = [*inputs(self.case)[:3]]
        given += [self.direction.get(x) for x in "qkv"]
        others = {
            f"{x}_dot": _place(backend, y)
            for x, y in self.direction.items()
            if x not in "qkv"
        }
        dots = {x: _place(backend, y) for x, y in self.dots.items()}
        with backend.running(self.case):
            found = cuflash.jvp(
                *(_place(backend, x) for x in given), **others, mod_dots=dots,
                **self.options(backend), return_lse=True, **more,
            )  # fmt: skip
        return dict(zip(NAMES, map(backend.fetch, found), strict=True))

    def double_backward(self, backend=NUMPY, **more):
        """Return all second gradients by name."""
        dout, (out, lse) = inputs(self.case)[3], self._forward()
        out = heads_last(out).astype(dout.dtype)
        lse = lse.astype(lse_dtype(self.case.dtype))
        given = [self.direction.get(x) for x in "qkv"]
        given += [dout, *inputs(self.case)[:3], out, lse]
        logits = [x for x in ("bias", "sink") if x in self.case.options()]
        others = {
            f"dd{x}": _place(backend, self.direction.get(x)) for x in logits
        }
        dots = {x: _place(backend, y) for x, y in self.dots.items()}
        with backend.running(self.case):
            found = cuflash.double_backward(
                *(_place(backend, x) for x in given), **others, ddmods=dots,
                **self.options(backend), return_d2mod=self._summed(),
                return_ddlse=True,
                **{f"return_d2{x}": True for x in logits}, **more,
            )  # fmt: skip
        mod = ["mod"] if self._summed() else []
        names = ["q", "k", "v", "out", *logits, *mod, "lse"]
        by_name = dict(zip(names, found, strict=True))
        mods = by_name.pop("mod", {})
        return {x: backend.fetch(y) for x, y in (by_name | mods).items()}

    def _summed(self):
        """Return the names of the arrays that have second gradients."""
        return tuple(x for x in MOVING if x in self.arrays)

    # What to expect ---------------------------------------------------------

    def expected_jvp(self):
        """Return out, lse and their tangents by name."""
        moves = {f"{x}_dot": y for x, y in self._moves().items()}
        found = jvp(
            **self._arrays(), **moves, mod_dots=self.dots, **self._options()
        )
        out, lse, out_dot, lse_dot = found
        values = heads_last(out), lse, heads_last(out_dot), lse_dot
        return dict(zip(NAMES, values, strict=True))

    def expected_double_backward(self):
        """Return the second gradients of `double_backward` by name."""
        out, lse = self._forward()
        moves = dict.fromkeys(("ddq", "ddk", "ddv"))
        moves |= {f"dd{x}": y for x, y in self._moves().items()}
        found = double_backward(
            **moves, **self._arrays(), out=out, lse=lse, ddmods=self.dots,
            dout=_by_heads(inputs(self.case)[3], self.case.num_heads_q),
            **self._options(return_dmod=self._summed()),
        )  # fmt: skip
        heads = self.case.num_heads_kv
        refs = {
            "q": heads_last(found.d2q),
            "k": heads_last(sum_groups(found.d2k, heads)),
            "v": heads_last(sum_groups(found.d2v, heads)),
            "out": heads_last(found.ddout),
            "bias": found.d2bias,
            "sink": found.d2sink,
            "lse": found.ddlse,
            **(found.d2mod or {}),
        }
        return {x: y for x, y in refs.items() if y is not None}

    def _forward(self):
        return attention(**self._arrays(), **self._options())

    def _arrays(self):
        heads = self.case.num_heads_q
        return {
            name: _by_heads(x, heads)
            for name, x in zip("qkv", inputs(self.case), strict=False)
        }

    def _moves(self):
        heads = self.case.num_heads_q
        return {
            name: _by_heads(x, heads) if name in "qkv" else x.astype(float)
            for name, x in self.direction.items()
        }

    def _options(self, **more):
        q, case = inputs(self.case)[0], self.case
        indices = HeadIndices(
            np.arange(case.batch)[:, None], np.arange(case.num_heads_q)
        )
        arrays = {
            x: y.astype(float) if x in MOVING else y
            for x, y in self.arrays.items()
        }
        return (
            of_reference(q, self.case.meaning())
            | self.functions
            | {"mod_arrays": arrays, "head_indices": indices}
            | more
        )


NAMES = "out", "lse", "out_dot", "lse_dot"


def _by_heads(x, heads):
    return heads_first(x, heads).astype(np.float64)


def _place(backend, x):
    return backend.place(x) if isinstance(x, np.ndarray) else x
