"""Calls of forward_kvcache: arguments of a case, and what they must give.

Elements of the caches that hold no token are NaN, scales of the page that
holds none as well, and entries of the page table that hold none are
2**31 - 1: whoever reads them is found out.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

import cuflash
from cuflash.reference import kvcache, rotary

from . import expected
from .compare import (
    assert_all,
    assert_bitwise,
    assert_forward_matches,
)
from .data import LAYOUTS, Case, Emulation, inputs, short_repr
from .dtypes import DTYPES, PRECISION, lse_dtype

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_UNIT, FLOAT8_FLOOR = 2.0**-4, 2.0**-10  # as in dtypes.Precision
NO_PAGE = 2**31 - 1
CACHES = "k_cache", "v_cache"


@dataclass(frozen=True, repr=False)
class KVCase:
    """One call; `seed` determines its arrays.

    before : cache_seqlens; an int for all if `by_int`.
    ragged : the queries of each sequence, packed; else each has seqlen_q.
    unused : tokens of a packed q beyond the last offset.
    seqlen_new : None for no k_new; new tokens are packed like q if
        `packed_new`.
    page_size : None for contiguous caches, with `spare` rows.
    slots : whether there is a cache_batch_idx.
    leftpad : cache_leftpad.
    rotary_dim : None without tables.
    latent : whether values are the keys' first columns: "no", "yes", or a
        "view" of them as v_cache.
    scales : of float8 caches: "head" or "page"; None: caches have q's dtype.
    power_of_two : whether the scales are.
    layout : of the caches.
    values : of q and of the tokens in the caches, as of `data.Case`.
    arrays_of : alibi_slopes or alibi_slopes_of_batches, sink.
    """

    dtype: str = "float32"
    before: tuple[int, ...] = (3, 5)
    by_int: bool = False
    seqlen_q: int = 1
    ragged: tuple[int, ...] | None = None
    unused: int = 0
    seqlen_new: int | None = 1
    packed_new: bool = False
    num_heads_kv: int = 2
    group_size: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    page_size: int | None = None
    spare: int = 0
    slots: bool = False
    leftpad: tuple[int, ...] | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    latent: str = "no"
    scales: str | None = None
    power_of_two: bool = True
    layout: str = "contiguous"
    values: str = "normal"
    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    arrays_of: tuple[str, ...] = ()
    num_splits: int | None = None
    seed: int = 0
    on: Emulation = Emulation()

    __repr__ = short_repr

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))

    # Sizes -----------------------------------------------------------------

    @property
    def batch(self):
        return len(self.before)

    @property
    def num_heads_q(self):
        return self.num_heads_kv * self.group_size

    @property
    def queries(self):
        """How many queries each sequence has."""
        return self.ragged or (self.seqlen_q,) * self.batch

    @property
    def new(self):
        """How many tokens each sequence appends."""
        if self.packed_new:
            return self.queries
        return (self.seqlen_new or 0,) * self.batch

    @property
    def after(self):
        """The length of each sequence after the call."""
        return tuple(map(sum, zip(self.before, self.new, strict=True)))

    @property
    def ordered(self):
        """Whether each query is rotated by a position of its own."""
        return self.causal or self.window not in (None, (None, None))

    def rows(self, lengths):
        """Index the packed tokens of each sequence."""
        ends = np.cumsum((0, *lengths))
        return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    # Arguments -------------------------------------------------------------

    def arguments(self):
        """Return the arguments of the call, by name."""
        rng = np.random.default_rng(self.seed)
        given = self._queries(rng)
        given |= self._new(rng)
        given |= self._caches(rng)
        given |= self._tables(rng)
        given |= self._options(rng)
        if self.latent != "no":
            for name in ("v_cache", "v_new", "v_scale"):
                given.pop(name, None)
            given["head_dim_v"] = self.head_dim_v
        if self.by_int:
            given["cache_seqlens"] = self.before[0]
        elif self.seqlen_new is not None or any(
            n != self.capacity for n in self.before
        ):
            given["cache_seqlens"] = np.array(self.before, np.int32)
        return given

    @property
    def capacity(self):
        longest = max(self.after, default=self.seqlen_new or 0)
        if self.page_size is None:
            return longest + self.spare
        return (-(-longest // self.page_size) + 1) * self.page_size

    def _array(self, rng, *shape):
        return rng.standard_normal(shape).astype(DTYPES[self.dtype])

    def _inputs(self, b):
        """Return q of a sequence, and k and v of its tokens in the cache."""
        case = Case(
            self.dtype, 1, self.queries[b],
            max(self.before[b] - self.first(b), 0), self.num_heads_q,
            self.num_heads_kv, *self._dims(), scale=self.scale,
            values=self.values, seed=self.seed + b,
        )  # fmt: skip
        return [x[0] for x in inputs(case)[:3]]

    def _queries(self, rng):
        heads, d = self.num_heads_q, self.head_dim
        if self.ragged is None:
            q = self._array(rng, self.batch, self.seqlen_q, heads, d)
        else:
            total = sum(self.ragged)
            q = self._array(rng, total + self.unused, heads, d)
            q[total:] = np.nan
        if self.values != "normal":
            for b, rows in enumerate(self.rows(self.queries)):
                q[b if self.ragged is None else rows] = self._inputs(b)[0]
        if self.ragged is None:
            return {"q": q}
        offsets = np.cumsum((0, *self.ragged)).astype(np.int32)
        return {"q": q, "cu_seqlens_q": offsets}

    def _new(self, rng):
        if self.seqlen_new is None:
            return {}
        lead = (self.batch, self.seqlen_new)
        if self.packed_new:
            lead = (sum(self.ragged) + self.unused,)
        # Some exceed float8's largest number times a scale.
        size = DTYPES[self.dtype].type(100 if self.seed % 8 == 0 else 1)
        heads = self.num_heads_kv
        return {
            name: self._array(rng, *lead, heads, d) * size
            for name, d in zip(("k_new", "v_new"), self._dims(), strict=True)
        }

    def _caches(self, rng):
        lead, given = self._places(rng)
        for name, d in zip(CACHES, self._dims(), strict=True):
            values = rng.standard_normal((*lead, self.num_heads_kv, d))
            dtype = DTYPES[self.dtype]
            scale = None
            if self.scales:
                dtype, scale = FLOAT8, self._scale(rng, lead[0])
                if self.scales == "page":
                    unused = np.isin(
                        np.arange(lead[0]), given["page_table"], invert=True
                    )
                    scale[unused] = np.nan
                given[f"{name[0]}_scale"] = scale
            stored = np.full(values.shape, np.nan).astype(dtype)
            for b, n in enumerate(self.before):
                index = self.index(given, b, self.first(b), n)
                if self.values != "normal":
                    values[index] = self._inputs(b)[1 + CACHES.index(name)]
                kvcache.store(stored, index, values[index], scale)
            given[name] = LAYOUTS[self.layout](stored)
        return given

    def _dims(self):
        return self.head_dim, self.head_dim_v

    def _scale(self, rng, pages):
        shape = (self.num_heads_kv,)
        if self.scales == "page":
            shape = (pages, *shape)
        power = 2.0 ** rng.integers(-7, -3, shape)
        if self.power_of_two:
            return power.astype(np.float32)
        return (power * rng.uniform(1, 2, shape)).astype(np.float32)

    def _places(self, rng):
        """Return the caches' first two axes, and who is where."""
        if self.page_size is None:
            given, slots = {}, self.batch
            if self.slots:
                slots += 2
                at = rng.permutation(slots)[: self.batch]
                given["cache_batch_idx"] = at.astype(np.int32)
            if self.leftpad is not None:
                given["cache_leftpad"] = np.array(self.leftpad, np.int32)
            return (slots, self.capacity), given
        each = [-(-n // self.page_size) for n in self.after]
        numbers = rng.permutation(sum(each) + 1)
        shape = (self.batch, self.capacity // self.page_size)
        table = np.full(shape, NO_PAGE, np.int32)
        for b, at in enumerate(self.rows(each)):
            table[b, : each[b]] = numbers[at]
        return (len(numbers), self.page_size), {"page_table": table}

    def _tables(self, rng):
        if self.rotary_dim is None:
            return {}
        longest = max(self.after, default=0)
        count = max(longest, max(self.before, default=0)
                    + max(self.queries, default=0)) + 1  # fmt: skip
        dtype = DTYPES[self.dtype]
        dtype = lse_dtype(dtype) if rng.random() < 0.5 else dtype
        cos, sin = (
            x.astype(dtype) for x in rotary.tables(count, self.rotary_dim)
        )
        return {"rotary_cos": cos, "rotary_sin": sin,
                "rotary_interleaved": self.interleaved}  # fmt: skip

    def _options(self, rng):
        heads = self.num_heads_q
        made = {
            "alibi_slopes": 2.0 ** -rng.integers(1, 9, heads),
            "alibi_slopes_of_batches": 2.0 ** -rng.integers(
                1, 9, (self.batch, heads)),
            "sink": 2 * rng.standard_normal(heads),
        }  # fmt: skip
        kinds = {"sink": lse_dtype(DTYPES[self.dtype])}
        arrays = {
            name.removesuffix("_of_batches"): made[name].astype(
                kinds.get(name, np.float32)
            )
            for name in self.arrays_of
        }
        numbers = {
            name: getattr(self, name)
            for name in ("scale", "causal", "window", "softcap", "num_splits")
            if getattr(self, name) is not None
        }
        if self.ragged and self.seed % 2:
            numbers["max_seqlen_q"] = max(self.ragged)
        return {**arrays, **numbers}

    # Where tokens are ------------------------------------------------------

    def first(self, b):
        """The first token of a sequence."""
        return 0 if self.leftpad is None else self.leftpad[b]

    def index(self, given, b, start, stop):
        """Index the first two axes of a cache by a sequence's tokens."""
        start = min(start, stop)
        slots = given.get("cache_batch_idx", np.arange(self.batch))
        table = given.get("page_table")
        rows = self.page_size or self.capacity
        return kvcache.Addresses(rows, slots, table).of(b, start, stop)

    def of_sequence(self, given, name, b):
        """Return a sequence's queries or new tokens, (tokens, heads, d)."""
        if given[name].ndim == 4:
            return given[name][b]
        return given[name][self.rows(self.queries)[b]]


# Checks ---------------------------------------------------------------------


def check(backend, case, meaning=None, **more):
    """Check out, lse and the caches after a call; return out and lse.

    meaning : of a sequence and the shape of its scores, built-in options that
        mean what `more` asks for.
    """
    given = case.arguments()
    results, caches = run(backend, case, case.arguments() | more)
    held = dict(zip(CACHES, caches, strict=False))
    for name, cache in held.items():
        _check_cache(case, given, name, cache)
    if case.latent != "no":
        held["v_cache"] = held["k_cache"][..., : case.head_dim_v]
        given |= {"v_scale": given["k_scale"]} if case.scales else {}
    _check_results(case, given, results, held, meaning)
    return results


def run(backend, case, given):
    """Call; return out and lse, and the caches after that, on the host."""
    backend.poison()
    placed = {
        name: _place(backend, x) if isinstance(x, np.ndarray) else x
        for name, x in given.items()
    }
    if case.latent == "view":
        columns = placed.pop("head_dim_v")
        placed["v_cache"] = placed["k_cache"][..., :columns]
        if case.scales:
            placed["v_scale"] = placed["k_scale"]
    with backend.running(case):
        results = cuflash.forward_kvcache(**placed, return_lse=True)
    caches = [backend.fetch(placed[x]) for x in CACHES if x in given]
    if case.scales:
        caches = [x.view(FLOAT8) for x in caches]
    return [np.asarray(backend.fetch(x)) for x in results], caches


def _place(backend, array):
    """Place an array; CuPy holds float8 as bytes."""
    if backend.name == "cupy" and array.dtype == FLOAT8:
        array = array.view(np.uint8)
    return backend.place(array)


def _check_cache(case, given, name, got):
    """New tokens are within one rounding, all else has the same bits."""
    before, scale = given[name], given.get(f"{name[0]}_scale")
    untouched = np.ones(before.shape[:2], bool)
    for b in range(case.batch if case.seqlen_new is not None else 0):
        index = case.index(given, b, case.before[b], case.after[b])
        untouched[index] = False
        new = case.of_sequence(given, f"{name[0]}_new", b)
        exact, slack = new.astype(np.float64), 0.0
        if name == "k_cache":
            positions = np.arange(case.before[b], case.after[b])
            exact, slack = rotated(case, given, new, positions)
        size = kvcache.scale_of(scale, index[0])
        want, error = _stored(case, exact, slack, size)
        values = kvcache.dequantise(got[index], size)
        wrong = ~(np.abs(values - want) <= error)
        assert_all(
            wrong,
            0,
            "wrong",
            f"{name} of sequence {b}: {values[wrong][:3]} are not "
            f"{want[wrong][:3]} within {error[wrong][:3]} ({case})",
        )
    assert_bitwise(got[untouched], before[untouched], f"rest of {name}")


def _stored(case, exact, slack, scale):
    """Return the value to expect in a cache, and its largest error.

    Dividing by the scale, and the product with it here, add an error of the
    arithmetic to the one rounding.
    """
    u, f, e = PRECISION[case.dtype]
    if not case.scales:
        changes = case.rotary_dim is not None
        return exact, slack + changes * (u * np.abs(exact) + f)
    size = np.broadcast_to(scale[..., None], exact.shape).astype(np.float64)
    want = np.clip(exact, -448 * size, 448 * size)
    error = FLOAT8_UNIT * np.abs(want) + FLOAT8_FLOOR * size
    return want, error * (1 + 4 * e) + slack + 4 * e * np.abs(want)


def rotated(case, given, x, positions):
    """Return x, rotated, and the error of doing that in the arithmetic."""
    x = x.astype(np.float64)
    if case.rotary_dim is None:
        return x, np.zeros(x.shape)
    e = PRECISION[case.dtype].sum_unit
    cos, sin = (given[f"rotary_{n}"].astype(float) for n in ("cos", "sin"))
    turn = positions, case.interleaved
    exact = rotary.apply_rotary(x, cos, sin, *turn)
    # |a cos| + |b sin|: see test_rotary.py.
    sums = [abs(rotary.apply_rotary(abs(x), abs(cos), s, *turn))
            for s in (abs(sin), -abs(sin))]  # fmt: skip
    slack = 2 * e * np.maximum(*sums)
    slack[..., case.rotary_dim :] = 0
    return exact, slack


def _check_results(case, given, results, caches, meaning):
    """Check each sequence, given its tokens as the caches hold them."""
    out, lse = results
    dtype = DTYPES[case.dtype]
    assert out.dtype == dtype and lse.dtype == lse_dtype(dtype)
    if case.ragged is not None:
        rest = sum(case.ragged)
        assert_all(out[rest:], 0, "out[rest:]", case)
        assert_all(lse[:, rest:], -np.inf, "lse[:, rest:]", case)
    for b, rows in enumerate(case.rows(case.queries)):
        if case.ragged is None:
            got = out[b : b + 1], lse[b : b + 1]
        else:
            got = out[None, rows], lse[None, :, rows]
        want = _expected(case, given, caches, b, meaning)
        assert_forward_matches(got, want, case)


def _expected(case, given, caches, b, meaning):
    """Return the expected out and lse of a sequence.

    Rotated queries are rounded to the dtype. Where the arithmetic's error may
    round one the other way, and where a float8 value is multiplied by its
    scale, results differ by what `_moved` adds.
    """
    dtype = DTYPES[case.dtype]
    q = case.of_sequence(given, "q", b)
    turns = np.arange(len(q)) if case.ordered else np.zeros(len(q), int)
    exact, slack = rotated(case, given, q, case.before[b] + turns)
    q = exact.astype(dtype)
    ends = [(exact + x).astype(dtype).astype(float) for x in (-slack, slack)]
    q_error = np.maximum(*(abs(x - q.astype(float)) for x in ends))
    tokens, errors = [], []
    for name in CACHES:
        index = case.index(given, b, case.first(b), case.after[b])
        exact = kvcache.load(
            caches[name], index, given.get(f"{name[0]}_scale")
        )
        # stored * scale is a float32 product, or a factor of the result.
        error = 4 * PRECISION[case.dtype].sum_unit * abs(exact)
        tokens.append(exact if case.scales else exact.astype(dtype))
        errors.append(error if case.scales else 0 * error)
    options = {
        name: given[name]
        for name in ("scale", "causal", "window", "softcap", "sink")
        if name in given
    }
    slopes = given.get("alibi_slopes")
    if slopes is not None:
        options["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[b]
    if meaning is not None:
        options |= meaning(b, (1, q.shape[1], len(q), len(tokens[0])))
    want = expected.forward(*(x[None] for x in (q, *tokens)), **options)
    return _moved(case, want, q, q_error, *tokens, *errors)


def _moved(case, want, q, q_error, k, v, k_error, v_error):
    """Add the errors of q, k and v to the bounds of out and lse.

    A score is off by d = scale * sum(dq |k| + |q| dk) at most; so is lse by
    the largest d of its row, and a weight by a factor within exp(2 d).
    """
    q, q_error = (np.moveaxis(abs(x.astype(float)), 1, 0)
                  for x in (q, q_error))  # fmt: skip
    k, v, k_error, v_error = (
        np.repeat(np.moveaxis(abs(x.astype(float)), 1, 0), case.group_size, 0)
        for x in (k, v, k_error, v_error)
    )
    off = q_error @ k.swapaxes(1, 2) + q @ k_error.swapaxes(1, 2)
    off = off.max(axis=-1, initial=0) * abs(case.scale or case.head_dim**-0.5)
    factor = np.expm1(2 * off)[..., None]
    more = factor * v.max(axis=1, keepdims=True, initial=0)
    more += (1 + factor) * v_error.max(axis=1, keepdims=True, initial=0)
    out, lse = want
    # `bound` is the larger of two; both grow, so it is the only one left.
    return (
        out._replace(tiny=out.bound() + np.moveaxis(more, 0, 1), factor=0),
        lse._replace(tiny=lse.bound() + off),
    )
