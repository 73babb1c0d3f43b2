"""Offsets, ids, lengths, pages and positions may have any integer dtype."""

import numpy as np
import pytest

import cuflash
from cuflash import emulator
from cuflash.launch.runner import Kernels
from cuflash.request.validate import attention as validate
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import rotary as validate_rotary
from helpers.backends import EMULATED
from helpers.compare import assert_arrays_equal

rng = np.random.default_rng(0)
Q, K, V = rng.standard_normal((3, 2, 8, 2, 8), dtype=np.float32)
IDS = np.repeat(np.arange(2), 4)[None].repeat(2, 0)
OFFSETS = np.array([0, 3, 8])
CACHES = rng.standard_normal((2, 4, 4, 2, 8), dtype=np.float32)
KVCACHE = {
    "cache_seqlens": np.array([5, 8]),
    "page_table": np.array([[3, 0], [2, 1]]),
}
COS = np.cos(np.outer(np.arange(40), [1.0, 0.1])).astype(np.float32)
SIN = np.sin(np.outer(np.arange(40), [1.0, 0.1])).astype(np.float32)

CALLS = {
    "segments": lambda x: cuflash.forward(
        Q, K, V, segment_ids_q=x(IDS), segment_ids_k=x(IDS)
    ),
    "packed": lambda x: cuflash.forward(
        Q[0], K[0], V[0], cu_seqlens_q=x(OFFSETS), cu_seqlens_k=x(OFFSETS)
    ),
    "gradients": lambda x: cuflash.vjp(
        Q[0], K[0], V[0], cu_seqlens_q=x(OFFSETS), cu_seqlens_k=x(OFFSETS)
    )[1](Q[0]).dk,
    "jvp": lambda x: cuflash.jvp(
        Q[0], K[0], V[0], Q[0], None, None,
        cu_seqlens_q=x(OFFSETS), cu_seqlens_k=x(OFFSETS),
    )[1],
    "double_backward": lambda x: cuflash.double_backward(
        None, Q, None, Q, Q, K, V, Q, np.zeros((2, 2, 8), np.float32),
        segment_ids_q=x(IDS), segment_ids_k=x(IDS),
    )[0],
    "kvcache": lambda x: cuflash.forward_kvcache(
        Q[:, :1], *CACHES, **{name: x(y) for name, y in KVCACHE.items()}
    ),
    "leftpad": lambda x: cuflash.forward_kvcache(
        Q[:, :1], K, V, cache_batch_idx=x(np.array([1, 0])),
        cache_leftpad=x(np.array([2, 0])),
    ),
    "rotary": lambda x: cuflash.apply_rotary(
        Q, COS, SIN, positions=x(np.arange(8) * 3)
    ),
}  # fmt: skip
on_each_call = pytest.mark.parametrize("call", CALLS)
DTYPES = ["int64", "uint8", "int16", ">i4", "uint64"]


@on_each_call
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_numpy_arrays(call, dtype):
    want = CALLS[call](lambda x: x.astype(np.int32))
    got = CALLS[call](lambda x: x.astype(dtype))
    assert_arrays_equal(got, want, "got")


FORWARD = {"q": Q, "k": K, "v": V}
PACKED = {"q": Q[0], "k": K[0], "v": V[0]}
ON_KERNELS = {
    "segments": ("forward", validate.forward, FORWARD,
                 {"segment_ids_q": IDS, "segment_ids_k": IDS}),
    "packed": ("forward", validate.forward, PACKED,
               {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}),
    "kvcache": ("forward_kvcache", validate_kvcache.forward_kvcache,
                {"q": Q[:, :1], "k_cache": CACHES[0], "v_cache": CACHES[1]},
                KVCACHE),
    "one length": ("forward_kvcache", validate_kvcache.forward_kvcache,
                   {"q": Q[:, :1], "k_cache": CACHES[0],
                    "v_cache": CACHES[1]},
                   {**KVCACHE, "cache_seqlens": np.array(6)}),
    "rotary": ("apply_rotary", validate_rotary.apply_rotary,
               {"x": Q, "cos": COS, "sin": SIN},
               {"positions": np.broadcast_to(np.arange(8) * 3, (2, 8))}),
}  # fmt: skip


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("call", ON_KERNELS)
def test_kernels_get_a_converted_copy(backend, call):
    """Of arrays on a device, which the host does not read."""
    run, check, given, indices = ON_KERNELS[call]
    found = []
    with emulator.active("sm_80") as emulated:
        runner = Kernels(emulated.backend())
        for dtype in (np.int32, np.int64, np.uint16):
            arrays = {name: x.astype(dtype) for name, x in indices.items()}
            result = getattr(runner, run)(check(**given, **arrays))
            found.append(result[0] if isinstance(result, tuple) else result)
    for other in found[1:]:
        assert_arrays_equal(other, found[0], "other")


def test_one_length_without_axes():
    want = cuflash.forward_kvcache(Q[:, :1], K, V, cache_seqlens=3)
    given = np.array(3), np.array(3, np.uint8), np.int64(3)
    for length in given:
        got = cuflash.forward_kvcache(Q[:, :1], K, V, cache_seqlens=length)
        assert_arrays_equal(got, want, "got")


@pytest.mark.parametrize("length", [3.0, np.float32(3), np.array(3.0)])
def test_a_length_that_is_no_int(length):
    with pytest.raises(cuflash.DTypeError, match=r"int\(cache_seqlens\)"):
        cuflash.forward_kvcache(Q[:, :1], K, V, cache_seqlens=length)
