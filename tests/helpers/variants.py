"""A user's score_mod and mask_mod, and built-in options that mean the same.

A bias, a softcap and a boolean mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import cuflash

from . import expected
from .compare import assert_forward_matches, assert_gradients_match
from .data import Case, Emulation, inputs
from .dtypes import lse_dtype

REACH = 90  # of the table, in tokens to both sides


def _relative(score, b, h, q_idx, kv_idx, *, table):
    """Beyond its reach the table is read outside: nothing is added."""
    return score + table[h, np.maximum(q_idx - kv_idx + REACH, -1000)]


def _relative_bias(table, shape):
    _, h, q, k = np.ogrid[tuple(map(slice, shape))]
    place = q - k + REACH
    size = 2 * REACH
    inside = (place >= -size) & (place < size)
    return np.where(inside, table[h, np.where(inside, place, 0)], 0)


def _capped(score, b, h, q_idx, kv_idx):
    return 3.0 * np.tanh(score / 3.0)


def _decay(score, b, h, q_idx, kv_idx, *, rate, seqlen_k):
    return score - rate[b] * (h + 1) * (seqlen_k - kv_idx)


def _decay_bias(rate, shape):
    b, h, _, k = np.ogrid[tuple(map(slice, shape))]
    return np.broadcast_to(-rate[b] * (h + 1) * (shape[3] - k), shape)


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _documents(b, h, q_idx, kv_idx, *, ids):
    return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])


def _windows(b, h, q_idx, kv_idx, *, reach):
    return np.abs(q_idx - kv_idx) <= reach[h] + 10 * b


def _odd(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 != 0


def _late(b, h, q_idx, kv_idx):
    """The first queries see none of the first tiles of keys; some nothing."""
    return (kv_idx >= 300) | (q_idx < 5)


@dataclass(frozen=True)
class Variant:
    """Functions and their arrays; options that mean the same.

    arrays : of a shape (batch, heads, seqlen_q, seqlen_k).
    """

    score: Callable | None = None
    mask: Callable | None = None
    arrays: Callable = lambda shape: {}
    bias: Callable | None = None
    softcap: float | None = None
    sees: Callable | None = None

    def options(self, shape):
        """Return what a call takes, arrays not placed."""
        found = {"score_mod": self.score, "mask_mod": self.mask}
        found = {name: x for name, x in found.items() if x}
        return found, self.arrays(shape)

    def meaning(self, shape):
        """Return built-in options."""
        found, arrays = {}, self.arrays(shape)
        if self.bias:
            found["bias"] = self.bias(*arrays.values(), shape)
        if self.softcap:
            found["softcap"] = self.softcap
        if self.sees:
            b, h, q, k = np.ogrid[tuple(map(slice, shape))]
            sees = self.sees(b, h, q, k, **arrays)
            found["mask"] = np.broadcast_to(sees, shape)
        return found


def _table(shape):
    rng = np.random.default_rng(5)
    table = rng.standard_normal((shape[1], 2 * REACH), np.float32)
    return {"table": table.astype(np.float64)}


def _rate(shape):
    return {"rate": np.arange(1.0, 9.0)[: shape[0]] / 128}


def _ids(shape):
    lengths = [np.arange(max(shape[2:])) // n for n in (70, 110)]
    return {"ids": np.array(lengths, np.int32)[: shape[0]]}


def _reach(shape):
    return {"reach": np.array([20, 90, 7, 400], np.int64)[: shape[1]]}


VARIANTS = {
    "relative": Variant(_relative, None, _table, _relative_bias),
    "capped": Variant(_capped, softcap=3.0),
    "decay": Variant(_decay, None, _rate, _decay_bias),
    "causal": Variant(mask=_causal, sees=_causal),
    "documents": Variant(mask=_documents, arrays=_ids, sees=_documents),
    "windows": Variant(mask=_windows, arrays=_reach, sees=_windows),
    "odd": Variant(mask=_odd, sees=_odd),
    "late": Variant(mask=_late, sees=_late),
    "capped odd": Variant(_capped, _odd, softcap=3.0, sees=_odd),
}


def case_of(seqlen_q=200, seqlen_k=330, head_dim=64, **more):
    """Two batches, grouped heads; on Hopper unless `on` says otherwise."""
    case = Case(
        "bfloat16", 2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim, seed=3,
        on=Emulation("sm_90a", num_sms=2, seed=1),
    )  # fmt: skip
    return replace(case, **more)


def shape_of(case):
    """The shape of a case's scores."""
    return case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k


def sequences(offsets):
    """The tokens of each packed sequence."""
    return map(slice, offsets[:-1], offsets[1:])


def placed(backend, arrays):
    """The arrays on the backend, reals in float32; numbers as they are."""
    found = dict(arrays)
    for name, x in arrays.items():
        if isinstance(x, np.ndarray):
            wide = x.dtype == np.float64
            found[name] = backend.place(x.astype(np.float32) if wide else x)
    return found


def combined(case, variant):
    """The built-in options of a case and what a variant means."""
    own, found = case.meaning(), variant.meaning(shape_of(case))
    if "bias" in own and "bias" in found:
        found["bias"] = found["bias"] + own["bias"].astype(np.float64)
    if "mask" in own and "mask" in found:
        found["mask"] = found["mask"] & own["mask"]
    return own | found


def options_of(backend, case, variant):
    """The keyword arguments of a case's call with a variant."""
    functions, arrays = variant.options(shape_of(case))
    own = {
        name: backend.place(x) if isinstance(x, np.ndarray) else x
        for name, x in case.meaning().items()
    }
    own["precision"] = case.precision
    mods = {"mod_arrays": placed(backend, arrays)} if arrays else {}
    return own | functions | mods


def check_forward(backend, case, variant):
    """Check out and lse."""
    q, k, v, _ = inputs(case)
    options = options_of(backend, case, variant)
    with backend.running(case):
        got = cuflash.forward(
            *(backend.place(x) for x in (q, k, v)), **options, return_lse=True
        )
    want = expected.forward(q, k, v, **combined(case, variant))
    assert_forward_matches([backend.fetch(x) for x in got], want, case)


def check_gradients(backend, case, variant, **more):
    """Check dq, dk, dv, and dbias and dsink of the case; return the rest."""
    q, k, v, dout = inputs(case)
    options = options_of(backend, case, variant)
    meaning = combined(case, variant)
    want = expected.forward(q, k, v, **meaning)
    out = want[0].ref.astype(q.dtype)
    lse = want[1].ref.astype(lse_dtype(case.dtype))
    with backend.running(case):
        got = cuflash.backward(
            *(backend.place(x) for x in (dout, q, k, v, out, lse)),
            **options, **more, deterministic=case.deterministic,
        )  # fmt: skip
    want = expected.backward(dout, q, k, v, **meaning)
    logits = [x for x in ("bias", "sink") if x in meaning]
    of_logits = dict(zip(logits, want[3:], strict=True))
    own = [of_logits[x] for x in logits if x in case.meaning()]
    count = 3 + len(own)
    assert_gradients_match(
        [backend.fetch(x) for x in got[:count]], [*want[:3], *own], case
    )
    return got[count:], want
