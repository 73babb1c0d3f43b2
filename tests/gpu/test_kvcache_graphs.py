"""forward_kvcache captured in a CUDA graph, as serving programs do.

Lengths, pages, slots, offsets and tokens are arrays on the device, so one
graph serves all steps: replays read what stands in the arrays then.
"""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers import kvcache_calls as kv
from helpers.backends import CupyBackend
from helpers.compare import assert_bitwise
from helpers.dtypes import DTYPES
from helpers.kvcache_calls import KVCase

pytestmark = pytest.mark.gpu

GPU = CupyBackend()

CONTIGUOUS = KVCase(
    "bfloat16", (700, 30, 5), seqlen_new=1, seqlen_q=1, num_heads_kv=2,
    group_size=4, head_dim=64, head_dim_v=64, spare=10, slots=True,
    leftpad=(1, 4, 0), rotary_dim=64, seed=2,
)  # fmt: skip
PAGES = replace(
    CONTIGUOUS, seqlen_new=3, seqlen_q=3, causal=True, slots=False,
    leftpad=None, page_size=16, spare=0,
)  # fmt: skip
PACKED = replace(PAGES, ragged=(4, 1, 2), unused=3, packed_new=True,
                 before=(700, 40, 5))  # fmt: skip
CASES = {
    "contiguous": CONTIGUOUS,
    "contiguous, float32": replace(CONTIGUOUS, dtype="float32"),
    "contiguous, nothing appended": replace(
        CONTIGUOUS, seqlen_new=None, rotary_dim=None
    ),
    "pages": PAGES,
    "pages, float32": replace(PAGES, dtype="float32", num_splits=3),
    "pages, float8": replace(PAGES, dtype="float16", scales="page"),
    "packed": PACKED,
    "packed, float32": replace(PACKED, dtype="float32"),
}
on_cases = pytest.mark.parametrize("which", CASES)


@pytest.fixture
def stream(cp):
    """A stream that the null stream does not wait for."""
    stream = cp.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()


def arguments_of(which):
    """Return the arguments of three calls, which differ only in arrays.

    Sequences trade places, so shapes and numbers of pages stay.
    """
    case, calls = CASES[which], []
    for by in range(3):
        traded = {
            name: values[by:] + values[:by]
            for name in ("before", "ragged", "leftpad")
            if (values := getattr(case, name))
        }
        seed = case.seed + 2 * by
        calls.append(replace(case, seed=seed, **traded).arguments())
    tables = {x: y for x, y in calls[0].items() if x.startswith("rotary_")}
    return [given | tables for given in calls]


def place(given):
    """Place all arrays on the device; CuPy holds float8 as bytes."""
    placed = dict(given)
    for name, x in given.items():
        if isinstance(x, np.ndarray):
            is_float8 = x.dtype == kv.FLOAT8
            placed[name] = GPU.place(x.view(np.uint8) if is_float8 else x)
    return placed


def call(given):
    return cuflash.forward_kvcache(**given, return_lse=True)


def hosts(arrays):
    return [np.asarray(x.get()) for x in arrays]


def results_of(results, given):
    """Return out, lse and the caches, which the call may have written."""
    return hosts([*results, *(given[name] for name in kv.CACHES)])


def assert_same(got, want, when):
    names = ("out", "lse", *kv.CACHES)
    for name, a, b in zip(names, got, want, strict=True):
        assert_bitwise(a, b, f"{name} of {when}")


def captured(stream, given):
    """Record a call into a CUDA graph; return it and its results.

    The call before that compiles, and fills the pool of this stream.
    """
    call(given)
    stream.begin_capture()
    results = call(given)
    return stream.end_capture(), results


def replayed(stream, graph, results, given, changes):
    """Overwrite a graph's arrays, then launch it."""
    for name, source in changes.items():
        if isinstance(source, type(results[0])):
            target = given[name]
            assert (target.shape, target.dtype) == (source.shape, source.dtype)
            target.data.copy_from_device_async(
                source.data, source.nbytes, stream
            )
    for result in results:
        result.data.memset_async(0xFF, result.nbytes, stream)
    graph.launch(stream)
    stream.synchronize()
    return results_of(results, given)


@on_cases
def test_replays_read_what_stands_in_the_arrays(cp, stream, which):
    """Other lengths, pages, slots, offsets, tokens and caches."""
    first, *others = arguments_of(which)
    wants = []
    for given in others:
        placed = place(given)
        wants.append(results_of(call(placed), placed))
    given, *changes = map(place, [first, *others])
    cp.cuda.Device().synchronize()
    with stream:
        graph, results = captured(stream, given)
        for number, change in enumerate(changes):
            got = replayed(stream, graph, results, given, change)
            assert_same(got, wants[number], f"call {number}")


def steps_of_decoding(dtype, page_size):
    """Return caches, and what changes from token to token: 20 steps.

    A page is entered into the table when a sequence needs it.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([0, 13, 600], np.int32)
    if page_size:
        pages = -(-(lengths + 20) // page_size)
        numbers = rng.permutation(pages.sum()).astype(np.int32)
        of_each = np.split(numbers, np.cumsum(pages)[:-1])
    lead = (pages.sum(), page_size) if page_size else (3, 640)
    caches = {
        name: rng.standard_normal((*lead, 2, 64)).astype(dtype)
        for name in kv.CACHES
    }
    steps = []
    for _ in range(20):
        q, k, v = (
            rng.standard_normal((3, 1, heads, 64)).astype(dtype)
            for heads in (8, 2, 2)
        )
        step = {"q": q, "k_new": k, "v_new": v, "cache_seqlens": lengths}
        lengths = lengths + 1
        if page_size:
            step["page_table"] = np.full((3, pages.max()), kv.NO_PAGE, "i4")
            for b, n in enumerate(-(-lengths // page_size)):
                step["page_table"][b, :n] = of_each[b][:n]
        steps.append(step)
    return caches, steps


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_decoding_by_one_graph(cp, stream, dtype, page_size):
    """Token after token into the same caches."""
    caches, steps = steps_of_decoding(DTYPES[dtype], page_size)
    steps = [place(step) for step in steps]
    kept, wants = place(caches), []
    for step in steps:
        wants.append(results_of(call(step | kept), kept))
    # The graph's arrays are its own: a replay changes them.
    given = place(caches) | {x: y.copy() for x, y in steps[0].items()}
    cp.cuda.Device().synchronize()
    with stream:
        graph, results = captured(stream, given)
        for number, (step, want) in enumerate(zip(steps, wants, strict=True)):
            got = replayed(stream, graph, results, given, step)
            assert_same(got, want, f"step {number}")
