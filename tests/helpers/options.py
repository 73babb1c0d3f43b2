"""What tests know of each option: a row for each of request.options.TABLE.

A deliberate second implementation of docs/guide/options.md. Arrays broadcast
to the public layout (batch, heads, seqlen_q, seqlen_k).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cuflash.reference.dropout import Dropout
from cuflash.request import options as options_of_calls

from .dtypes import DTYPES, lse_dtype
from .expressions import MASK_MOD, MOD_ARRAYS, SCORE_MOD

# Terms: what the options of a call do ---------------------------------------


@dataclass(frozen=True)
class Terms:
    """The effect of a call's options on its pairs.

    distance : how many tokens each key stands before each query.
    see : which query sees which key.
    added : to scores, in float64.
    softcap : or None.
    sink : (heads, 1, 1), or None.
    z : factors of dropout, or 1.0.
    """

    distance: np.ndarray
    see: np.ndarray
    added: np.ndarray = field(default_factory=lambda: np.zeros(()))
    softcap: float | None = None
    sink: np.ndarray | None = None
    z: np.ndarray | float = 1.0

    def score(self, s):
        """Return scores from scaled QK^T, in its dtype; -inf where masked."""
        if self.softcap is not None:
            s = s.dtype.type(self.softcap) * np.tanh(s / self.softcap)
        s = s + self.added.astype(s.dtype)
        return np.where(self.see, s, s.dtype.type(-np.inf))

    def slope(self, s):
        """Return the derivative of `score` with respect to scaled QK^T."""
        if self.softcap is None:
            return s.dtype.type(1)
        return 1 - np.tanh(s / self.softcap) ** 2

    def softmax(self, s):
        """Return the weights of scores, and the sink's, (..., rows, 1)."""
        sink = -np.inf if self.sink is None else self.sink
        sink = np.broadcast_to(sink, (*s.shape[:-1], 1)).astype(s.dtype)
        m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        m = np.where(m == -np.inf, s.dtype.type(0), m)
        p, of_sink = np.exp(s - m), np.exp(sink - m)
        total = p.sum(axis=-1, keepdims=True) + of_sink
        total = np.where(total == 0, s.dtype.type(1), total)
        return p / total, of_sink / total


def terms_of(q, k, *, causal=False, **options):
    """Return the terms of a call's options, by their public names."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    distance = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = distance - np.arange(seqlen_k)
    terms = Terms(distance, (distance >= 0) | (not causal))
    for name, data in TABLE.items():
        if data.effect and options.get(name) is not None:
            terms = data.effect(terms, options, q)
    return terms


# Effects: (terms, options, q) to terms --------------------------------------


def _window(terms, options, q):
    left, right = options["window"]
    see = left is None or terms.distance <= left
    see &= right is None or -terms.distance <= right
    return replace(terms, see=terms.see & see)


def _capped(terms, options, q):
    return replace(terms, softcap=options["softcap"])


def _sloped(terms, options, q):
    slopes = np.asarray(options["alibi_slopes"], np.float64)
    subtracted = slopes[..., None, None] * abs(terms.distance)
    return replace(terms, added=terms.added - subtracted)


def _biased(terms, options, q):
    bias = np.asarray(options["bias"], np.float64)
    return replace(terms, added=terms.added + bias)


def _masked(terms, options, q):
    return replace(terms, see=terms.see & options["mask"])


def _with_sink(terms, options, q):
    return replace(terms, sink=np.float64(options["sink"])[:, None, None])


def _in_segments(terms, options, q):
    of_q, of_k = options["segment_ids_q"], options["segment_ids_k"]
    same = of_q[:, None, :, None] == of_k[:, None, None, :]
    return replace(terms, see=terms.see & same)


def _dropped(terms, options, q):
    dropout = reference_dropout(q, options)
    if dropout is None:
        return terms
    return replace(
        terms, z=dropout.factors(*map(np.arange, terms.distance.shape))
    )


# Values ----------------------------------------------------------------------


def windows(case):
    """Draw bounds that mask some pairs, bounds that mask none, and None."""
    longest = max(case.seqlen_q, case.seqlen_k, 1)
    some = st.sampled_from([0, 1, 16, 63]) | st.integers(0, longest)
    return st.tuples(st.none() | some, st.none() | some)


def lse_type(case):
    return lse_dtype(DTYPES[case.dtype])


def _slopes(rng, case):
    """The slopes of 8 heads, 2^-1 to 2^-8."""
    return 2.0 ** -rng.integers(1, 9, case.num_heads_q).astype(np.float32)


def _slopes_of_batches(rng, case):
    """Of each packed sequence, if there are any."""
    count = case.batch if case.offsets is None else len(case.offsets[0]) - 1
    shape = (count, case.num_heads_q)
    return 2.0 ** -rng.integers(1, 9, shape).astype(np.float32)


def _bias(rng, case):
    shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    # Any axis may be left to broadcasting.
    shape = tuple(n if rng.random() < 0.6 else 1 for n in shape)
    return rng.standard_normal(shape).astype(DTYPES[case.dtype])


def _mask(rng, case):
    shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    shape = tuple(n if rng.random() < 0.6 else 1 for n in shape)
    return rng.random(shape) < 0.8


def _sink(rng, case):
    sink = rng.standard_normal(case.num_heads_q) * 2
    return sink.astype(lse_type(case))


def _ids(seqlen):
    def make(rng, case):
        """Return ids of consecutive documents, sometimes unsorted."""
        ids = rng.integers(0, 4, (case.batch, getattr(case, seqlen)))
        if rng.random() < 0.8:
            ids.sort(axis=1)
        return ids.astype(np.int32)

    return make


# The table -------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What tests know of an option.

    alone : names to the fields of a case that has no other option. The first
        is also what cases of several options have.
    draw : from a case to a strategy for the value, unless it is an array.
    makes : from random numbers and a case to the array, by names in
        `Case.arrays_of`; cases of all options have the last.
    effect : from the terms without it, the call's options and q to terms.
    problem : fields of a Problem of float16 that has it.
    hides : fields of a case of 50 tokens in which query 9 does not see
        key 9, if it masks pairs.
    comes_with : the option that has it in its tests, if it has none alone.
    """

    alone: dict[str, dict[str, Any]] = field(default_factory=dict)
    draw: Callable | None = None
    makes: dict[str, Callable] = field(default_factory=dict)
    effect: Callable | None = None
    problem: dict[str, Any] = field(default_factory=dict)
    hides: dict[str, Any] | None = None
    comes_with: str = ""


def _array(*names):
    return {"arrays_of": names}


_SEGMENTS = _array("segment_ids_k", "segment_ids_q")

# In the order of request.options.TABLE, and with `seed` for all that a case
# draws: a new array comes after the others.
TABLE = {
    "window": Data(
        {"window": {"window": (40, 30)}, "left": {"window": (40, None)}},
        draw=windows,
        effect=_window,
        problem={"window": (5, 5)},
        hides={"window": (3, 3)},
    ),
    "softcap": Data(
        {
            "softcap": {"softcap": 5.0},
            # All scores are small; so small that the cap's own error shows.
            "small softcap": {"softcap": 30.0},
            "huge softcap": {"softcap": 3e4},
        },
        draw=lambda case: st.sampled_from([1.0, 30.0]),
        effect=_capped,
        problem={"softcap": 1.0},
    ),
    "alibi_slopes": Data(
        {"slopes": _array("alibi_slopes")},
        makes={
            "alibi_slopes": _slopes,
            "alibi_slopes_of_batches": _slopes_of_batches,
        },
        effect=_sloped,
        problem={"alibi_slopes": True},
    ),
    "bias": Data(
        {"bias": _array("bias")},
        makes={"bias": _bias},
        effect=_biased,
        problem={"bias": "float16"},
    ),
    "mask": Data(
        {"mask": _array("mask")},
        makes={"mask": _mask},
        effect=_masked,
        problem={"mask": True},
        hides=_array("mask"),
    ),
    "sink": Data(
        {"sink": _array("sink")},
        makes={"sink": _sink},
        effect=_with_sink,
        problem={"sink": True},
    ),
    "segment_ids_q": Data(
        {"segments": _SEGMENTS},
        makes={"segment_ids_q": _ids("seqlen_q")},
        effect=_in_segments,
        problem={"segment_ids": True},
        hides=_SEGMENTS,
    ),
    "segment_ids_k": Data(
        makes={"segment_ids_k": _ids("seqlen_k")}, comes_with="segment_ids_q"
    ),
    "dropout": Data(
        {"dropout": {"dropout": 0.25}},
        draw=lambda case: st.sampled_from([0.25, 0.5]),
        effect=_dropped,
        problem={"dropout": 0.5},
    ),
    "seed": Data(comes_with="dropout"),
    # Each packed sequence is a call of its own (packed.py); `offsets` has
    # them in a case.
    "cu_seqlens_q": Data(
        {"packed": {"offsets": ((0, 10, 60, 150), (0, 50, 60, 150))}},
        problem={"num_sequences": 3},
    ),
    "cu_seqlens_k": Data(comes_with="cu_seqlens_q"),
    "max_seqlen_q": Data(comes_with="cu_seqlens_q"),
    "max_seqlen_k": Data(comes_with="cu_seqlens_q"),
    "score_mod": Data(
        problem={"score_mod": SCORE_MOD, "mod_arrays": MOD_ARRAYS}
    ),
    "mask_mod": Data(problem={"mask_mod": MASK_MOD}),
    "mod_arrays": Data(comes_with="score_mod"),
    "return_dbias": Data(
        problem={"bias": "float16", "return_dbias": True}, comes_with="bias"
    ),
    "return_dsink": Data(
        problem={"sink": True, "return_dsink": True}, comes_with="sink"
    ),
    "return_dmod": Data(
        problem={
            "score_mod": SCORE_MOD,
            "mod_arrays": MOD_ARRAYS,
            "return_dmod": (0,),
        },
        comes_with="score_mod",
    ),
}

# The fields of a case for the options that are not arrays.
NUMBERS = {
    option.name: option.default
    for option in options_of_calls.TABLE
    if option.name in TABLE and TABLE[option.name].draw
}
NumberFields = make_dataclass(
    "NumberFields",
    [(name, Any, default) for name, default in NUMBERS.items()],
    frozen=True,
    kw_only=True,
)

MAKERS = {
    name: make for data in TABLE.values() for name, make in data.makes.items()
}


def everything():
    """Return the names of all options that a call can have together."""
    return tuple(
        [name, *data.makes][-1] for name, data in TABLE.items() if data.effect
    )


def is_in(name, case):
    """Whether a case has an option."""
    if name in NUMBERS:
        return getattr(case, name) != NUMBERS[name]
    return bool(set(TABLE[name].makes) & set(case.arrays_of))


def completed(names):
    """Return names of options with the others that these need."""
    needed = {
        other
        for option in options_of_calls.TABLE
        if option.name in names
        for other in option.needs
    }
    return {*names, *needed}


def fields_of(names):
    """Return the fields of a case that has the named options."""
    names = completed(names)
    numbers = {
        name: next(iter(TABLE[name].alone.values()))[name]
        for name in NUMBERS
        if name in names
    }
    return {**numbers, "arrays_of": tuple(sorted(names & set(MAKERS)))}


def option_arrays(case):
    """Return a case's option arrays by argument name."""
    made = {}
    for number, (name, make) in enumerate(MAKERS.items()):
        if name in case.arrays_of:
            rng = np.random.default_rng([case.seed, number])
            made[name.removesuffix("_of_batches")] = make(rng, case)
    return made


def apart(options, in_chunks):
    """Return the arrays among options, each by strides of its own.

    in_chunks : whether rows of pairs begin at multiples of 16 bytes.
    """
    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    return {
        name: _apart(x, number + 2, in_chunks)
        for number, (name, x) in enumerate(sorted(arrays.items()))
    }


def _apart(array, gap, in_chunks):
    """Elements of vectors and ids are `gap` apart; rows of pairs have more."""
    *outer, last = array.shape
    if array.ndim < 3:
        store, index = (*outer, last * gap), np.s_[..., ::gap]
    else:
        wide = 16 * (last // 16 + gap) if in_chunks else last + gap
        store = (*(n + gap for n in outer), wide)
        index = tuple(slice(n) for n in array.shape)
    between = {"b": True, "i": 99}.get(array.dtype.kind, np.nan)
    view = np.full(store, between).astype(array.dtype)[index]
    view[...] = array
    return view


def option_numbers(case):
    """Return a case's other options by argument name."""
    given = {name: getattr(case, name) for name in NUMBERS}
    given = {n: x for n, x in given.items() if x != NUMBERS[n]}
    return given | ({"seed": case.seed} if case.dropout else {})


def option_gradients(case):
    """Return the arguments that ask for the gradients of option arrays."""
    return {
        option.name: True
        for option in options_of_calls.TABLE
        if option.of_gradients
        and option.needs
        and set(option.needs) <= set(case.arrays_of)
    }


def reference_dropout(q, options):
    if not options.get("dropout"):
        return None
    batch, _, heads, _ = q.shape
    first = options.get("first_batch", 0)
    numbers = first + np.arange(batch)[:, None], np.arange(heads)
    return Dropout(options["dropout"], options["seed"], *numbers)


def of_reference(q, options):
    """Return options for the reference, with axes (batch, heads)."""
    other = "dropout", "seed", "first_batch"
    taken = {name: x for name, x in options.items() if name not in other}
    for name in ("segment_ids_q", "segment_ids_k"):
        if name in taken:
            taken[name] = taken[name][:, None]
    if taken.get("window", "") is None:
        del taken["window"]
    dropout = reference_dropout(q, options)
    return {**taken, "dropout": dropout, "heads_first": True}
