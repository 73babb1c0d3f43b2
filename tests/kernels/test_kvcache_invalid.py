"""forward_kvcache with invalid lengths, pages, slots, offsets, positions.

On a device the host does not read them: the call raises nothing, writes
nothing outside the rows of its sequences, and computes the others as ever.
"""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.errors import ValueRangeError
from cuflash.request.validate import kvcache_values
from helpers import kvcache_calls as kv
from helpers.backends import BACKENDS, on_kernels
from helpers.compare import assert_all, assert_bitwise
from helpers.kvcache_calls import KVCase

BAD = 1  # the sequence with the invalid entry, the longest
LEAST, MOST = -(2**31), 2**31 - 1

# With this seed the longest sequence is in slot 0: rows before its first are
# outside the cache, where the emulator allows no reads.
SLOTS = KVCase(
    "bfloat16", (5, 150, 17), seqlen_new=2, seqlen_q=2, head_dim=32,
    head_dim_v=32, spare=3, slots=True, leftpad=(0, 3, 1), rotary_dim=16,
    causal=True, num_splits=1, seed=42,
)  # fmt: skip
PAGES = replace(SLOTS, spare=0, slots=False, leftpad=None, page_size=16)
# The queries of the invalid sequence are the last ones. With this seed
# max_seqlen_q is given, 3.
PACKED = replace(
    PAGES, before=(5, 17, 150), ragged=(2, 1, 3), unused=2, packed_new=True,
    seed=43,
)  # fmt: skip
CASES = {
    "slots": SLOTS,
    "slots, float32": replace(SLOTS, dtype="float32", num_splits=3),
    "pages": replace(PAGES, num_splits=3),
    "pages, float64": replace(PAGES, dtype="float64"),
    "pages, float8": replace(PAGES, dtype="float16", scales="page"),
    "pages, float8 on CUDA cores": replace(
        PAGES, dtype="float32", scales="page"
    ),
    "packed": PACKED,
    # -1 queries of 16 heads would be -1 tiles of 8 rows, which takes places
    # from the others, if parts are balanced. Those have one part each.
    "packed, float32": replace(
        PACKED,
        dtype="float32",
        num_heads_kv=1,
        group_size=16,
        num_splits=None,
    ),
}


def bad_of(case):
    """Return the number of the sequence with the invalid entry."""
    return len(case.before) - 1 if case.ragged else BAD


def lengths(case):
    """Negative ones, and those that leave no room for the new tokens."""
    b = bad_of(case)
    for value in (-1, LEAST, case.capacity - case.new[b] + 1, MOST):
        yield {"cache_seqlens": ((b,), value)}, f"cache_seqlens[{b}] is"


def pages(case):
    """The page of the first token, and that of the new ones."""
    b = bad_of(case)
    for token in (0, case.before[b]):
        index = b, token // case.page_size
        name = f"page_table[{', '.join(map(str, index))}] is"
        for value in (-1, num_slots(case), LEAST, MOST):
            yield {"page_table": (index, value)}, name


def slots(case):
    for value in (-1, num_slots(case), LEAST, MOST):
        name = f"cache_batch_idx[{BAD}] is"
        yield {"cache_batch_idx": ((BAD,), value)}, name


def num_slots(case):
    return len(case.arguments()["k_cache"])


def leftpads(case):
    for value in (-1, LEAST):
        yield {"cache_leftpad": ((BAD,), value)}, f"cache_leftpad[{BAD}] is"


def offsets(case):
    """The end of the last sequence; others belong to two sequences."""
    last = case.batch
    first, total = sum(case.ragged[:-1]), sum(case.ragged) + case.unused
    longer = first + max(case.ragged) + 1
    for value in (first - 1, -1, LEAST, longer, total + 1, MOST):
        name = f"cu_seqlens_q[{last}] is"
        yield {"cu_seqlens_q": ((last,), value)}, name


def tables(case):
    """The rotary tables end before the longest sequence does."""
    b = bad_of(case)
    for rows in (case.after[b] - 1, case.before[b], 30):
        cut = {"rotary_cos": rows, "rotary_sin": rows}
        yield cut, f"cache_seqlens[{b}] is {case.before[b]}, and tokens"


# Which cases have such an entry, and whether new tokens may still be written
# to the sequence's own rows.
KINDS = {
    "length": (lengths, CASES, False),
    "page": (pages, [x for x in CASES if CASES[x].page_size], True),
    "slot": (slots, [x for x in CASES if CASES[x].slots], False),
    "leftpad": (leftpads, [x for x in CASES if CASES[x].leftpad], True),
    "offset": (offsets, [x for x in CASES if CASES[x].ragged], False),
    "position": (tables, CASES, True),
}
on_cases = pytest.mark.parametrize(
    ("kind", "which"),
    [(kind, which) for kind in KINDS for which in KINDS[kind][1]],
)


def spoiled(case, changes):
    """Return the arguments with entries replaced, and tables cut."""
    given = case.arguments()
    for name, change in changes.items():
        if isinstance(change, tuple):
            index, value = change
            given[name][index] = value
        else:
            given[name] = given[name][:change]
    return given


@pytest.fixture
def unread(monkeypatch):
    """As on a GPU, where only kernels read them."""
    monkeypatch.delenv("CUFLASH_CHECK", raising=False)
    monkeypatch.setattr(kvcache_values, "values", lambda call: None)


def run(backend, case, given):
    """Call with guard slots around the caches; return all results."""
    whole = {name: guarded(backend, given[name]) for name in kv.CACHES}
    views = {name: x[1:-1] for name, x in whole.items()}
    results, caches = kv.run(backend, case, given | views)
    for name, placed in whole.items():
        around = np.asarray(backend.fetch(placed))[[0, -1]]
        assert_bitwise(around, np.full_like(around, GUARD), f"around {name}")
    return results, caches


GUARD = 7  # no NaN: of float8 as bytes, on a GPU, too


def guarded(backend, cache):
    """Return a cache on the device with a slot before it and one after."""
    if backend.name == "cupy" and cache.dtype == kv.FLOAT8:
        cache = cache.view(np.uint8)
    whole = np.full((len(cache) + 2, *cache.shape[1:]), GUARD, cache.dtype)
    whole[1:-1] = cache
    return backend.place(whole)


def others(case, results):
    """Return out and lse of the sequences without an invalid entry."""
    b, (out, lse) = bad_of(case), results
    if case.ragged is None:
        return np.delete(out, b, axis=0), np.delete(lse, b, axis=0)
    rows = case.rows(case.ragged)[b]
    own = np.arange(rows.start, sum(case.ragged) + case.unused)
    return np.delete(out, own, axis=0), np.delete(lse, own, axis=1)


@on_kernels
@on_cases
@pytest.mark.usefixtures("unread")
def test_others_are_as_ever(backend, kind, which):
    """Their results, and all of the caches, bit for bit."""
    case, (make, _, writes) = CASES[which], KINDS[kind]
    b, before = bad_of(case), case.arguments()
    own = case.index(before, b, case.before[b], case.after[b])
    valid, want = run(backend, case, before)
    for changes, _ in make(case):
        results, caches = run(backend, case, spoiled(case, changes))
        for name, x, y in zip(
            ("out", "lse"), others(case, results), others(case, valid),
            strict=True,
        ):  # fmt: skip
            assert_bitwise(x, y, f"{name} with {changes}")
        for name, x, y in zip(kv.CACHES, caches, want, strict=True):
            y = y.copy()
            y[own] = x[own] if writes else before[name][own]
            assert_bitwise(x, y, f"{name} with {changes}")


@on_kernels
@pytest.mark.parametrize("which", ["slots", "pages, float64", "packed"])
@pytest.mark.usefixtures("unread")
def test_no_valid_sequence(backend, which):
    """Nothing is written, whatever is invalid, and all results are empty."""
    case = replace(CASES[which], num_splits=None)
    for value in (-1, LEAST, case.capacity, MOST):
        given = case.arguments()
        given["cache_seqlens"][:] = value
        (out, lse), caches = run(backend, case, given)
        assert_all(out, 0, "out", case)
        assert_all(lse, -np.inf, "lse", case)
        for name, x in zip(kv.CACHES, caches, strict=True):
            assert_bitwise(x, given[name], name)


@on_kernels
@pytest.mark.parametrize("which", ["packed", "packed, float32"])
@pytest.mark.usefixtures("unread")
def test_an_int_that_leaves_no_room_for_packed_tokens(backend, which):
    """How many each sequence appends is on the device, too."""
    case = replace(CASES[which], before=(150, 150, 150), by_int=True)
    given = case.arguments() | {"cache_seqlens": case.capacity}
    (out, lse), caches = run(backend, case, given)
    assert_all(out, 0, "out", case)
    assert_all(lse, -np.inf, "lse", case)
    for name, x in zip(kv.CACHES, caches, strict=True):
        assert_bitwise(x, given[name], name)


def middle_offsets():
    """A sequence ends before it begins, or beyond q; the next one overlaps."""
    for value in (1, -5, LEAST, 9, MOST):
        yield {"cu_seqlens_q": ((2,), value)}


@on_kernels
@pytest.mark.parametrize("which", ["packed", "packed, float32"])
@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.usefixtures("unread")
def test_offsets_amid_others(backend, which, num_splits):
    """No row without a sequence is written."""
    case = replace(CASES[which], num_splits=num_splits)
    given = case.arguments()
    rest = np.ones(given["k_cache"].shape[:2], bool)
    for b, n in enumerate(case.after):
        end = -(-n // case.page_size) * case.page_size
        rest[case.index(given, b, case.before[b], end)] = False
    for changes in middle_offsets():
        _, caches = run(backend, case, spoiled(case, changes))
        for name, x in zip(kv.CACHES, caches, strict=True):
            assert_bitwise(x[rest], given[name][rest], f"rest of {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@on_cases
def test_each_is_named_with_check(backend, kind, which, monkeypatch):
    """With NumPy arrays always; and nothing is written."""
    if backend.name == "cupy":
        monkeypatch.setenv("CUFLASH_CHECK", "1")
    case, (make, *_) = CASES[which], KINDS[kind]
    for changes, name in make(case):
        given = spoiled(case, changes)
        placed = {x: guarded(backend, given[x])[1:-1] for x in kv.CACHES}
        with pytest.raises(ValueRangeError) as caught:
            kv.run(backend, case, given | placed)
        assert str(caught.value).startswith(name)
        for x, cache in placed.items():
            got = np.asarray(backend.fetch(cache)).view(given[x].dtype)
            assert_bitwise(got, given[x], x)
