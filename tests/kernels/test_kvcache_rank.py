"""forward_kvcache without a batch axis, or without batch and heads."""

import numpy as np
import pytest

import cuflash
from cuflash import emulator
from helpers.backends import EMULATED
from helpers.compare import assert_arrays_equal

rng = np.random.default_rng(0)
Q, K_NEW, V_NEW = rng.standard_normal((3, 1, 2, 2, 8), dtype=np.float32)
PAGES = rng.standard_normal((2, 4, 4, 2, 8), dtype=np.float32)
CALLS = {
    "contiguous": {"cache_seqlens": 2},
    "pages": {
        "cache_seqlens": np.int32([5]),
        "page_table": np.int32([[3, 1]]),
    },
    "slots": {"cache_seqlens": 2, "cache_batch_idx": np.int32([2])},
    "padded": {"cache_seqlens": 2, "cache_leftpad": np.int32([1])},
}


def without(array, rank):
    """An array without batch, or without batch and heads."""
    return array[0] if rank == 3 else array[0][..., 0, :]


def given(call, rank):
    """The arguments of a rank: of the first head, if it has no heads."""
    indices = dict(CALLS[call])
    caches = (
        PAGES.copy() if call in ("pages", "slots") else PAGES[:, :1].copy()
    )
    arrays = {"q": Q, "k_new": K_NEW, "v_new": V_NEW}
    if rank == 2:
        arrays = {name: x[:, :, :1] for name, x in arrays.items()}
        caches = caches[..., :1, :]
    if rank < 4:
        arrays = {name: without(x, rank) for name, x in arrays.items()}
        if call == "pages":
            indices["page_table"] = indices["page_table"][0]
        caches = caches if rank == 3 else caches[..., 0, :]
        caches = caches if call in ("pages", "slots") else caches[:, 0]
    arrays |= {"k_cache": caches[0], "v_cache": caches[1]}
    return {**arrays, **indices}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [2, 3])
def test_is_that_of_a_batch_of_one(call, rank):
    given_out = np.zeros_like(without(Q, rank))
    arrays = given(call, rank)
    out, lse = cuflash.forward_kvcache(
        **arrays, causal=True, out=given_out, return_lse=True
    )
    heads = slice(1) if rank == 2 else slice(2)
    whole = given(call, 4)
    for name in ("q", "k_new", "v_new", "k_cache", "v_cache"):
        whole[name] = whole[name][..., heads, :]
    want = cuflash.forward_kvcache(**whole, causal=True, return_lse=True)
    assert out is given_out and lse.ndim == rank - 1
    assert_arrays_equal(out, without(want[0], rank), "out")
    assert_arrays_equal(lse.ravel(), want[1].ravel(), "lse.ravel()")
    assert arrays["k_cache"].tobytes() == whole["k_cache"].tobytes()


@pytest.mark.parametrize("backend", [EMULATED])
def test_kernels_write_into_the_caches_of_the_caller(backend):
    arrays = given("contiguous", 3)
    with emulator.active("sm_80"):
        out = cuflash.forward_kvcache(**arrays)
    assert out.shape == Q[0].shape
    assert_arrays_equal(arrays["k_cache"][2:4], K_NEW[0], "k_cache")
