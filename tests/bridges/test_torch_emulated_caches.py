"""Attention over caches on an emulated device: as of NumPy arrays on it."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

import numpy as np  # noqa: E402
from bridge_cases import arch_of  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch.dtypes import from_numpy, to_numpy  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402
from helpers.kvcache_calls import CACHES, KVCase  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

CASES = {
    "appended": KVCase("float16", causal=True, spare=3),
    "length by int": KVCase("float32", (4, 4), by_int=True),
    "nothing new": KVCase("float64", seqlen_new=None, spare=2),
    "pages, rotated": KVCase(
        "bfloat16", page_size=16, rotary_dim=8, causal=True, seqlen_q=2,
        seqlen_new=2,
    ),
    "slots, left padding": KVCase(
        "float32", slots=True, leftpad=(1, 2), rotary_dim=16,
        interleaved=True,
    ),
    "packed queries": KVCase(
        "bfloat16", ragged=(3, 1), packed_new=True, page_size=16, unused=1,
    ),
    "float8, scales of heads": KVCase("float16", page_size=16, scales="head"),
    "float8, scales of pages": KVCase(
        "bfloat16", seqlen_new=None, page_size=16, scales="page",
    ),
    "all numbers": KVCase(
        "float16", (70, 40), window=(50, 0), softcap=3.0, scale=0.2,
        arrays_of=("alibi_slopes", "sink"), num_splits=2,
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def tensors(case):
    """Return a call's arguments, with tensors for arrays."""
    return {
        name: from_numpy(x) if isinstance(x, np.ndarray) else x
        for name, x in case.arguments().items()
    }


def bytes_of(given, results):
    """The bytes of results and caches: unused rows of caches are NaN."""
    arrays = [*results, *(given[name] for name in CACHES)]
    arrays = [to_numpy(x) if isinstance(x, torch.Tensor) else x
              for x in arrays]  # fmt: skip
    return [(x.dtype, x.shape, x.tobytes()) for x in arrays]


@each_case
def test_results_and_caches(case):
    ours, theirs = tensors(case), case.arguments()
    with emulated_torch.active(arch_of(case.dtype)) as device:
        got = cuflash.torch.forward_kvcache(**ours, return_lse=True)
        assert device.launches
        expected = cuflash.forward_kvcache(**theirs, return_lse=True)
    assert bytes_of(ours, got) == bytes_of(theirs, expected)


@pytest.mark.parametrize("given_out", [False, True])
def test_float8_as_bytes_and_a_given_out(given_out):
    case = CASES["float8, scales of heads"]
    ours, theirs = tensors(case), case.arguments()
    for name in CACHES:
        ours[name] = ours[name].view(torch.uint8)
    if given_out:
        ours["out"] = torch.empty_like(ours["q"])
    with emulated_torch.active(arch_of(case.dtype)):
        before = ours["k_cache"]._version
        got = cuflash.torch.forward_kvcache(**ours)
        expected = cuflash.forward_kvcache(**theirs)
    assert_arrays_equal(got, from_numpy(expected), "got")
    assert ours["k_cache"]._version > before
    assert (got is ours.get("out")) is given_out


@pytest.mark.parametrize("name", ["appended", "pages, rotated"])
def test_compiled(name):
    torch._dynamo.reset()
    case = CASES[name]
    ours, theirs = tensors(case), case.arguments()

    def call(given):
        return cuflash.torch.forward_kvcache(**given, return_lse=True)

    with emulated_torch.active(arch_of(case.dtype)):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got = compiled(ours)
        expected = cuflash.forward_kvcache(**theirs, return_lse=True)
    assert bytes_of(ours, got) == bytes_of(theirs, expected)


def test_lengths_are_read_where_asked(monkeypatch):
    """Of tensors that are on a device, only then."""
    given = tensors(CASES["appended"])
    given["cache_seqlens"] = torch.tensor([3, 99], dtype=torch.int32)
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with emulated_torch.active("sm_80") as device:
        with pytest.raises(cuflash.ValueRangeError, match="cache_seqlens"):
            cuflash.torch.forward_kvcache(**given)
    assert not device.launches
