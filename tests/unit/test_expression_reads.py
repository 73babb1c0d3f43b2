"""CUFLASH_CHECK=1: which reads outside an array raise, and what is said."""

import contextlib

import numpy as np
import pytest

import cuflash
from cuflash.errors import ValueRangeError
from helpers.compare import assert_arrays_equal

QUERIES, KEYS, COLUMNS = 7, 9, 5
Q = np.random.default_rng(0).standard_normal((2, QUERIES, 4, 8))
K = np.random.default_rng(1).standard_normal((2, KEYS, 2, 8))
IDS = np.zeros((2, COLUMNS), int)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")


def forward(q=Q, k=K, **options):
    return cuflash.forward(q, k, k, mod_arrays={"ids": IDS}, **options)


def refused(**options):
    """Return the message."""
    with pytest.raises(ValueRangeError) as caught:
        forward(**options)
    return str(caught.value)


def biased(score, b, h, i, j, *, ids):
    return score + ids[b, j]


def same(b, h, i, j, *, ids):
    near = i >= j
    return near & (
        ids[b, j] == 0
    )  # fmt: skip


def by_score(score, b, h, i, j, *, ids):
    return np.where(score < 1e9, score, ids[b, j])


def by_large_score(score, b, h, i, j, *, ids):
    return np.where(score > -1e9, ids[b, j], score)


def not_taken(score, b, h, i, j, *, ids):
    return np.where(j < COLUMNS, score + ids[b, j], score)


def in_array(b, h, i, j, *, ids):
    return (j < COLUMNS) & (ids[b, j] == 0)


def array_first(b, h, i, j, *, ids):
    return (ids[b, j] == 0) & (j < COLUMNS)


def beyond_or_0(b, h, i, j, *, ids):
    return (j >= COLUMNS) | ~(ids[b, j] != 0)


def from_the_end(b, h, i, j, *, ids):
    return ids[-b - 1, -(j % COLUMNS) - 1] == 0


OUTSIDE = {
    "score": {"score_mod": biased},
    "mask": {"mask_mod": same},
    "taken": {"score_mod": by_large_score},
    "one sequence": {
        **{"score_mod": biased, "q": Q[0], "k": K[0]},
        **{"cu_seqlens_q": [0, 1, 7], "cu_seqlens_k": [0, 3, 9]},
    },
}


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_read_outside_raises(name, emulated):
    options = dict(OUTSIDE[name])
    for x in options.keys() & {"cu_seqlens_q", "cu_seqlens_k"}:
        options[x] = np.array(options[x], np.int32)
    on = cuflash.emulator.active("sm_80")  # compiles nothing: it raises first
    with on if emulated else contextlib.nullcontext():
        assert "is outside, expected -5 to 4" in refused(**options)


INSIDE = {
    "not taken": {"score_mod": not_taken},
    "not taken by score": {"score_mod": by_score},
    "and": {"mask_mod": in_array},
    "and, read first": {"mask_mod": array_first},
    "or": {"mask_mod": beyond_or_0},
    "from the end": {"mask_mod": from_the_end},
    "masked by mask_mod": {"score_mod": biased, "mask_mod": in_array},
    "masked by mask": {
        **{"score_mod": biased, "mask": np.arange(KEYS) < COLUMNS},
        "mask_mod": lambda b, h, i, j, *, ids: ids[b, j] == 0,
    },
    "masked by causal": {"score_mod": biased, "q": Q[:, :5], "k": K[:, :5]},
    "masked by segments": {
        "score_mod": biased,
        "segment_ids_q": np.zeros((2, QUERIES), int),
        "segment_ids_k": np.arange(KEYS)[None].repeat(2, 0) // COLUMNS,
    },
}


@pytest.mark.parametrize("name", INSIDE)
def test_dropped_and_masked_reads_may_be_outside(name):
    forward(**INSIDE[name])


def test_causal_and_window_mask_reads():
    far = {"q": Q[:, :5], "k": K[:, :5], "score_mod": shifted}
    forward(causal=True, **far)
    forward(window=(1, 0), **far)
    assert "for b=0, h=0, q_idx=0, kv_idx=1" in refused(**far)


def shifted(score, b, h, i, j, *, ids):
    return score + ids[b, j - i + 4]


def test_the_message_names_array_line_and_pair():
    line = same.__code__.co_firstlineno + 3
    assert refused(mask_mod=same).startswith(
        f"{__file__}, line {line}: mod_arrays['ids'] has shape (2, 5) and is"
        " read at [0, 5] for b=0, h=0, q_idx=5, kv_idx=5: along axis 1 index"
        " 5 is outside, expected -5 to 4"
    )


def test_backward_raises_too():
    out, lse, dout = np.zeros_like(Q), np.zeros((2, 4, QUERIES)), Q
    with pytest.raises(ValueRangeError, match=r"mod_arrays\['ids'\]"):
        cuflash.backward(
            dout, Q, K, K, out, lse, score_mod=biased, mod_arrays={"ids": IDS}
        )


def test_an_empty_array_has_no_inside():
    with pytest.raises(ValueRangeError, match="expected none: it is empty"):
        cuflash.forward(
            Q, K, K, score_mod=biased, mod_arrays={"ids": IDS[:, :0]}
        )


def test_unasked_it_reads_0(monkeypatch):
    monkeypatch.delenv("CUFLASH_CHECK")
    zeros = {"ids": np.zeros((2, KEYS), int)}
    want = cuflash.forward(Q, K, K, score_mod=biased, mod_arrays=zeros)
    assert_arrays_equal(forward(score_mod=biased), want, "out")


def of_token(score, b, h, i, j, *, ids):
    return score + ids[b, j // 4]


@pytest.mark.parametrize("paged", [False, True])
def test_caches_are_read_as_they_will_be(paged):
    """Of 20 tokens one more is appended, to the second sequence alone 21."""
    cache = np.zeros((2, 24, 2, 8))
    given = {"score_mod": of_token, "mod_arrays": {"ids": IDS}}
    table = {}
    if paged:
        cache = cache.reshape(8, 6, 2, 8)
        table = {"page_table": np.arange(8).reshape(2, 4)}
    new = {"k_new": K[:, :1], "v_new": K[:, :1], **table}
    lengths = np.array([19, 19])
    cuflash.forward_kvcache(Q[:, :1], cache, cache.copy(),
                            cache_seqlens=lengths, **new, **given)  # fmt: skip
    with pytest.raises(ValueRangeError, match=r"b=1.*kv_idx=20: along axis 1"):
        cuflash.forward_kvcache(
            Q[:, :1], cache, cache.copy(), cache_seqlens=lengths + [0, 1],
            **new, **given,
        )  # fmt: skip


@pytest.mark.parametrize("call", ["jvp", "double_backward"])
def test_derivatives_raise_too(call):
    options = {"score_mod": biased, "mod_arrays": {"ids": IDS}}
    given = (Q, K, K, Q, None, None)
    if call == "double_backward":
        out, lse = cuflash.forward(Q, K, K, return_lse=True)
        given = Q, None, None, Q, Q, K, K, out, lse
    with pytest.raises(ValueRangeError, match="along axis 1 index 5"):
        getattr(cuflash, call)(*given, **options)
