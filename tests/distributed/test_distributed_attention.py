"""Attention of several ranks is that of the whole sequence."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers import expected
from helpers.backends import BACKENDS, CUPY, EMULATED, NUMPY, on_backends
from helpers.compare import assert_gradients_match
from helpers.data import Case, Emulation
from helpers.dtypes import DTYPES
from helpers.punishing import KINDS
from helpers.ranks import Shared, bits_of

HOPPER = Emulation("sm_90a")
PLAIN = Case(
    "bfloat16", 1, 96, 96, 4, 2, 32, 32, causal=True, seed=1, on=HOPPER
)
OFFSETS = (0, 16, 16, 64, 96)
PACKED = replace(PLAIN, offsets=(OFFSETS, OFFSETS))


def of_ranks(size, case=PLAIN):
    """The case with a length that 2 `size` divides, and as many heads."""
    length = 2 * size * max(1, 96 // (2 * size))
    return replace(case, seqlen_q=length, seqlen_k=length)


def few(backend):
    """How many ranks; each launch of an emulated kernel is a process."""
    return 2 if backend.name == "emulated" else 4


def check(backend, case, size, **sharing):
    shared = Shared(case, size, **sharing)
    shared.check(shared.results(backend))


def on_sizes(names, all_of_them, emulated):
    """Fewer where they are emulated: launches add up."""
    return pytest.mark.parametrize(
        ("backend", *names),
        [
            pytest.param(
                *backend.values,
                *sizes,
                marks=backend.marks,
                id="-".join(map(str, (*sizes, backend.id))),
            )
            for backend in BACKENDS
            for sizes in (emulated if backend is EMULATED else all_of_them)
        ],
    )


@on_sizes(["size"], [(x,) for x in range(1, 9)], [(1,), (3,), (4,)])
def test_ring(backend, size):
    check(backend, of_ranks(size), size)


@on_backends
@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all(backend, size):
    case = replace(of_ranks(size), num_heads_q=8, num_heads_kv=4)
    check(backend, case, size, ulysses=size)


@on_sizes(["size", "ulysses"], [(4, 2), (6, 2), (8, 2), (8, 4)], [(4, 2)])
def test_their_product(backend, size, ulysses):
    case = replace(of_ranks(size), num_heads_q=8, num_heads_kv=4)
    check(backend, case, size, ulysses=ulysses)


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(backend, dtype):
    check(backend, replace(of_ranks(3), dtype=dtype), 3)


@pytest.mark.parametrize("backend", [NUMPY, CUPY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_that_punishes(backend, dtype):
    """Each key head has another kind."""
    count = len(KINDS)
    heads = {"num_heads_q": count, "num_heads_kv": count}
    case = replace(of_ranks(3), dtype=dtype, values="punishing", **heads)
    check(backend, case, 3)


@on_backends
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(backend, layout, causal):
    case = replace(of_ranks(3), causal=causal, dtype="float32")
    check(backend, case, 3, layout=layout)


@on_backends
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [(20, None), (9, 5)])
def test_windows(backend, layout, window):
    size = few(backend) + 1
    case = replace(of_ranks(size), causal=window[1] is None, window=window)
    check(backend, case, size, layout=layout)


@on_backends
@pytest.mark.parametrize("seqlen_k", [48, 144])
def test_other_lengths_of_keys(backend, seqlen_k):
    """Queries of the first ranks may see no key."""
    check(backend, replace(of_ranks(3), seqlen_k=seqlen_k), 3)


@on_backends
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(backend, layout, causal):
    case = replace(PACKED, causal=causal)
    check(backend, case, few(backend), layout=layout)


@on_backends
@pytest.mark.parametrize("change", [
    {"window": (20, None)},
    {"offsets": (OFFSETS, (0, 32, 48, 64, 96))},
])  # fmt: skip
def test_packed_sequences_of_cut_blocks(backend, change):
    check(backend, replace(PACKED, **change), few(backend))


@on_backends
def test_packed_sequences_over_heads(backend):
    case = replace(PACKED, num_heads_q=8, num_heads_kv=4)
    check(backend, case, 4, ulysses=2)


@on_backends
@pytest.mark.parametrize("sharing", [{}, {"ulysses": 2}])
def test_the_gradient_of_lse(backend, sharing):
    case = replace(of_ranks(2), dtype="float32")
    shared = Shared(case, 2, **sharing)
    q, k, v, dout = shared.whole
    dlse = np.random.default_rng(2).standard_normal((1, 4, 96), np.float32)
    results = shared.results(backend, dlse)
    want = expected.backward(dout, q, k, v, dlse=dlse, **case.meaning())
    assert_gradients_match(results[2:], want, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_and_a_softcap(backend):
    case = replace(of_ranks(2), batch=2, softcap=5.0, head_dim_v=24)
    check(backend, case, 2)


@pytest.mark.parametrize("backend", [EMULATED])
def test_head_dims_without_vectors(backend):
    check(backend, replace(of_ranks(2), head_dim=33, head_dim_v=7), 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_makes_the_call_itself(backend):
    """With the same bits."""
    case = replace(PLAIN, deterministic=True)
    shared = Shared(case, 1)
    results = shared.results(backend)
    q, k, v, dout = (backend.place(x) for x in shared.whole)
    with backend.running(case):
        options = case.meaning()
        out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
        gradients = cuflash.backward(
            dout, q, k, v, out, lse, deterministic=True, **options
        )
    alone = [backend.fetch(x) for x in (out, lse, *gradients)]
    assert bits_of(results) == bits_of(alone)
