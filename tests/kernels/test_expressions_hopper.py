"""A user's score_mod and mask_mod in Hopper's kernels.

Compared with a bias, a softcap and a boolean mask that mean the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

import cuflash
from cuflash.plans.tiles import Tile
from helpers import expected
from helpers.backends import on_kernels
from helpers.compare import (
    assert_allclose,
    assert_forward_matches,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs

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
    return {"table": rng.standard_normal((shape[1], 2 * REACH))}


def _rate(shape):
    return {"rate": 0.01 * np.arange(1.0, 9.0)[: shape[0]]}


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
    """Two batches, grouped heads."""
    case = Case(
        "bfloat16", 2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim, seed=3,
        on=Emulation("sm_90a", num_sms=2, seed=1),
    )  # fmt: skip
    return replace(case, **more)


def shape_of(case):
    """The shape of a case's scores."""
    return case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k


def placed(backend, arrays):
    """The arrays in the precision of scores, on the backend."""
    return {
        name: backend.place(
            x.astype(np.float32) if x.dtype == np.float64 else x
        )
        for name, x in arrays.items()
    }


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
    """Check dq, dk and dv; return the other gradients, and the expected."""
    q, k, v, dout = inputs(case)
    options, meaning = (
        options_of(backend, case, variant),
        combined(case, variant),
    )
    want = expected.forward(q, k, v, **meaning)
    out, lse = want[0].ref.astype(q.dtype), want[1].ref.astype(np.float32)
    with backend.running(case):
        got = cuflash.backward(
            *(backend.place(x) for x in (dout, q, k, v, out, lse)),
            **options, **more, deterministic=case.deterministic,
        )  # fmt: skip
    want = expected.backward(dout, q, k, v, **meaning)
    for name, x, wanted in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert_matches(backend.fetch(x), wanted, name, case)
    return got[3:], want[3:]


@on_kernels
@pytest.mark.parametrize("name", VARIANTS)
def test_forward(backend, name):
    check_forward(backend, case_of(), VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(backend, name, head_dim):
    check_gradients(backend, case_of(head_dim=head_dim), VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("name", ["relative", "capped odd", "windows"])
def test_wide_heads(backend, name):
    case = case_of(head_dim=256, batch=1)
    check_forward(backend, case, VARIANTS[name])
    check_gradients(backend, case, VARIANTS[name])


MORE = {
    "bias": {"arrays_of": ("bias",), "dtype": "float16"},
    "slopes": {"arrays_of": ("alibi_slopes",), "causal": True},
    "mask": {"arrays_of": ("mask",)},
    "segments": {"arrays_of": ("segment_ids_k", "segment_ids_q")},
    "window": {"window": (50, 60)},
    "dropout": {"dropout": 0.25},
    "sink": {"arrays_of": ("sink",)},
}


@on_kernels
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ["relative", "windows"])
def test_with_other_options(backend, name, more):
    case = case_of(batch=1, **MORE[more])
    check_forward(backend, case, VARIANTS[name])
    check_gradients(backend, case, VARIANTS[name])


def _bent(score, b, h, q_idx, kv_idx, *, table):
    return score * 0.5 * (2 + table[h, q_idx - kv_idx + 2 * REACH])


def scattered(gradient, place, length):
    """The sum of a gradient of pairs at each place of each head's row."""
    heads = gradient.shape[1]
    sums = np.zeros((heads, length))
    for h in range(heads):
        np.add.at(sums[h], place, gradient[:, h].sum(axis=0))
    return sums


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("more", [{}, {"causal": True, "dropout": 0.2}])
def test_gradient_of_a_table(backend, head_dim, more):
    """Once it is added, whose gradient is a bias's; it reaches all pairs."""
    case = case_of(150, 170, head_dim, **more)
    shape = shape_of(case)
    place = np.subtract.outer(np.arange(150), np.arange(170)) + 2 * REACH
    rng = np.random.default_rng(8)
    table = rng.standard_normal((4, 400)).astype(np.float32)

    def score(score, b, h, q_idx, kv_idx, *, table):
        return score + table[h, q_idx - kv_idx + 2 * REACH]

    def bias(table, shape):
        return np.broadcast_to(table[:, place], shape)

    variant = Variant(score, None, lambda _: {"table": table}, bias)
    (dmod,), (dbias, *_) = check_gradients(
        backend, case, variant, return_dmod=("table",)
    )
    want = scattered(dbias.ref, place, table.shape[1])
    got = backend.fetch(dmod["table"])
    assert shape[1] == 4
    assert_allclose(got, want, "dtable", atol=0.01 * np.abs(want).max())


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_a_table_and_a_bias(backend, head_dim):
    """The table multiplies scores to which a bias has been added."""
    case = case_of(150, 170, head_dim, batch=1)
    shape = shape_of(case)
    place = np.subtract.outer(np.arange(150), np.arange(170)) + 2 * REACH
    rng = np.random.default_rng(8)
    table = rng.uniform(-1, 1, (4, 400)).astype(np.float32)
    bias = rng.standard_normal(shape).astype(np.float32)
    q, k, v, dout = inputs(case)
    functions = {"score_mod": _bent}
    given = {"table": table}
    with backend.running(case):
        placed = {
            **functions, "mod_arrays": {"table": backend.place(table)},
            "bias": backend.place(bias),
        }  # fmt: skip
        arrays = [backend.place(x) for x in (q, k, v)]
        out, lse = cuflash.forward(*arrays, **placed, return_lse=True)
        dq, _, _, dbias, dmod = cuflash.backward(
            backend.place(dout), *arrays, out, lse, **placed,
            return_dbias=True, return_dmod=("table",),
        )  # fmt: skip
    # In float64, by definition.
    f = [x.astype(np.float64) for x in (q, k, v, dout)]
    q, k, v, dout = (x.transpose(0, 2, 1, 3) for x in f)
    k, v = (x.repeat(2, axis=1) for x in (k, v))
    x = head_dim**-0.5 * q @ k.swapaxes(-1, -2) + bias
    factor = 0.5 * (2 + given["table"][:, place])
    s = x * factor
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    want = {
        "dbias": ds * factor,
        "dtable": scattered(ds * x * 0.5, place, 400),
        "dq": (head_dim**-0.5 * (ds * factor) @ k).transpose(0, 2, 1, 3),
    }
    found = {"dbias": dbias, "dtable": dmod["table"], "dq": dq}
    for name, expected_ in want.items():
        most = np.abs(expected_).max()
        got = backend.fetch(found[name]).astype(np.float64)
        assert_allclose(got, expected_, name, atol=0.02 * most)


@on_kernels
@pytest.mark.parametrize("name", ["relative", "causal", "capped odd"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic(backend, name, head_dim):
    case = case_of(head_dim=head_dim, deterministic=True, batch=1)
    check_gradients(backend, case, VARIANTS[name])


@on_kernels
@pytest.mark.parametrize("more", [{}, {"causal": True}])
def test_packed_scores(backend, more):
    """b is the sequence, and lengths are its own."""
    offsets = (0, 70, 70, 200), (0, 200, 210, 330)
    case = case_of(batch=1, offsets=offsets, **more)
    q, k, v, dout = inputs(case)
    rate = np.array([0.01, 0.02, 0.03], np.float32)
    given = [backend.place(x[0]) for x in (q, k, v, dout)]
    options = {
        **{f"cu_seqlens_{x}": backend.place(np.array(o, np.int32))
           for x, o in zip("qk", offsets, strict=True)},
        "score_mod": _decay, "mod_arrays": {"rate": backend.place(rate)},
        **more,
    }  # fmt: skip
    with backend.running(case):
        out, lse = cuflash.forward(*given[:3], **options, return_lse=True)
        grads = cuflash.backward(given[3], *given[:3], out, lse, **options)
    out, lse, *grads = map(backend.fetch, (out, lse, *grads))
    for n, (i, j) in enumerate(zip(*map(sequences, offsets), strict=True)):
        shape = 1, 4, i.stop - i.start, j.stop - j.start
        bias = _decay_bias(rate[n : n + 1].astype(np.float64), shape)
        own = q[:, i], k[:, j], v[:, j]
        want = expected.forward(*own, bias=bias, **more)
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)
        want = expected.backward(dout[:, i], *own, bias=bias, **more)
        slices = zip(grads, (i, j, j), ("dq", "dk", "dv"), want, strict=False)
        for gradient, tokens, name, wanted in slices:
            assert_matches(gradient[None, tokens], wanted, name, case)


def sequences(offsets):
    """The tokens of each sequence."""
    return map(slice, offsets[:-1], offsets[1:])


@on_kernels
def test_packed_masks(backend):
    """Another family runs them."""
    offsets = (0, 70, 70, 200), (0, 200, 210, 330)
    case = case_of(batch=1, offsets=offsets)
    q, k, v, _ = inputs(case)
    given = [backend.place(x[0]) for x in (q, k, v)]
    lengths = {
        f"cu_seqlens_{x}": backend.place(np.array(o, np.int32))
        for x, o in zip("qk", offsets, strict=True)
    }
    with backend.running(case):
        out, lse = cuflash.forward(
            *given, **lengths, mask_mod=_odd, return_lse=True
        )
    out, lse = backend.fetch(out), backend.fetch(lse)
    for i, j in zip(*map(sequences, offsets), strict=True):
        shape = 1, 4, i.stop - i.start, j.stop - j.start
        meaning = VARIANTS["odd"].meaning(shape)
        want = expected.forward(q[:, i], k[:, j], v[:, j], **meaning)
        assert_forward_matches((out[None, i], lse[None, :, i]), want, case)


@on_kernels
@pytest.mark.parametrize("name", ["causal", "late", "windows"])
def test_more_key_tiles_than_lanes(backend, name):
    """65 tiles, which the producer examines 32 at a time."""
    tile = Tile(128, 64, 12, num_stages=2)
    case = case_of(
        400, 4150, 16, batch=1, on=Emulation("sm_90a", num_sms=1,
                                             forward_tile=tile),
    )  # fmt: skip
    check_forward(backend, case, VARIANTS[name])


@on_kernels
def test_more_query_tiles_than_lanes(backend):
    case = case_of(3000, 70, 16, batch=1)
    check_gradients(backend, case, VARIANTS["late"])
    check_gradients(backend, case, VARIANTS["windows"])


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_that_are_not_finite(backend, head_dim):
    """At masked pairs a score may be anything, and hide what it hides."""

    def score(score, b, h, q_idx, kv_idx):
        return np.log(np.where(q_idx >= kv_idx, np.exp(score), -1.0 * score))

    def hidden(score, b, h, q_idx, kv_idx):
        return np.where(q_idx >= kv_idx, score, -np.inf)

    case = case_of(head_dim=head_dim, batch=1)
    check_forward(backend, case, Variant(score, _causal, sees=_causal))
    check_forward(backend, case, Variant(hidden, sees=_causal))
    check_gradients(backend, case, Variant(score, _causal, sees=_causal))
    check_gradients(backend, case, Variant(hidden, sees=_causal))
