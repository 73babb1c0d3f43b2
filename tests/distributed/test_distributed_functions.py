"""A user's score and mask of sequences that ranks share."""

from dataclasses import dataclass

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import functions, schedule
from cuflash.errors import UnsupportedError, ValueRangeError
from helpers.backends import on_backends
from helpers.compare import assert_allclose, assert_bitwise
from helpers.data import Case, Emulation
from helpers.dtypes import lse_dtype

LENGTH, BATCH, HEADS = 96, 2, 4
RNG = np.random.default_rng(7)
IDS = np.arange(LENGTH) // 20
TABLE = RNG.standard_normal((HEADS, 2 * LENGTH))
RATE = RNG.standard_normal((BATCH, LENGTH))


def bent(score, b, h, q_idx, kv_idx, *, table, rate, w, seqlen_k):
    far = rate[b, kv_idx] * (q_idx / seqlen_k)
    return score + w * table[h, q_idx - kv_idx + 96] + far


def documents(b, h, q_idx, kv_idx, *, ids):
    return (ids[q_idx] == ids[kv_idx]) | (kv_idx == b + 5)


def near(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 10


def heads_differ(b, h, q_idx, kv_idx, **arrays):
    return (kv_idx <= q_idx) & (kv_idx >= 8 * h)


MASKS = {"none": None, "documents": documents, "near": near,
         "of heads": heads_differ}  # fmt: skip


def options_of(mask, dtype=np.float64, **more):
    arrays = {"table": TABLE.astype(dtype), "rate": RATE.astype(dtype)}
    arrays |= {"w": 0.5} | ({"ids": IDS} if mask == "documents" else {})
    found = {"score_mod": bent, "mod_arrays": arrays, **more}
    return found | ({"mask_mod": MASKS[mask]} if MASKS[mask] else {})


def inputs(batch=BATCH, length=LENGTH, dtype=np.float64):
    """Return q, k, v and dout."""
    rng = np.random.default_rng(1)
    heads = HEADS, 2, 2, HEADS
    return [
        rng.standard_normal((batch, length, h, 16)).astype(dtype)
        for h in heads
    ]


def shared(size, arrays, options, cut, ulysses=1, place=lambda x: x):
    """Return out, dq, dk and dv of ranks, joined."""

    def of_rank(group):
        own = [
            place(distributed.shard(x, group.rank, size, **cut))
            for x in arrays
        ]
        q, k, v, dout = own
        given = options | {"group": group, "ulysses": ulysses}
        given |= {"layout": cut["layout"]}
        out, lse = distributed.forward(q, k, v, return_lse=True, **given)
        return out, *distributed.backward(dout, q, k, v, out, lse, **given)

    each = distributed.run_threads(size, of_rank, timeout=120)
    return [distributed.unshard([x[i] for x in each], **cut) for i in range(4)]


def whole(arrays, options):
    q, k, v, dout = arrays
    out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
    return out, *cuflash.backward(dout, q, k, v, out, lse, **options)


def assert_same(got, want, unit):
    """Sums of at most 2 * 96 terms below 100, in another order."""
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_allclose(x, y, name, atol=192 * unit * 100)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("layout", distributed.layouts.LAYOUTS)
def test_ranks_have_the_whole_calls_results(mask, ulysses, layout):
    arrays, options = inputs(), options_of(mask, causal=ulysses == 1)
    got = shared(4, arrays, options, {"layout": layout}, ulysses)
    assert_same(got, whole(arrays, options), 2.0**-53)


@pytest.mark.parametrize("mask", ["none", "documents"])
def test_packed_sequences_have_numbers(mask):
    cut = {"layout": "zigzag", "cu_seqlens": (0, 32, 32, 96)}
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"),
                            np.array(cut["cu_seqlens"]))  # fmt: skip
    arrays = [x[0] for x in inputs(1)]
    options = options_of(mask)
    options["mod_arrays"]["rate"] = RNG.standard_normal((3, LENGTH))
    options |= offsets
    got = shared(4, arrays, options, cut)
    assert_same(got, whole(arrays, options), 2.0**-53)


def dmods_of(size, arrays, options, cut, ulysses=1):
    """Return the gradients of arrays of each rank, and the whole call's."""
    names = ("table", "rate")

    def of_rank(group):
        own = [distributed.shard(x, group.rank, size, **cut) for x in arrays]
        q, k, v, dout = own
        given = options | {"group": group, "ulysses": ulysses}
        given |= {"layout": cut["layout"]}
        out, lse = distributed.forward(q, k, v, return_lse=True, **given)
        return distributed.backward(
            dout, q, k, v, out, lse, return_dmod=names, **given
        )[-1]

    each = distributed.run_threads(size, of_rank, timeout=120)
    q, k, v, dout = arrays
    out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
    *_, want = cuflash.backward(
        dout, q, k, v, out, lse, return_dmod=names, **options
    )
    return each, want


@pytest.mark.parametrize("mask", ["near", "of heads"])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_gradients_of_arrays_are_the_whole_calls(mask, ulysses):
    cut = {"layout": "zigzag"}
    each, want = dmods_of(4, inputs(), options_of(mask), cut, ulysses)
    for found in each:
        assert found.keys() == want.keys() == {"table", "rate"}
        for name, x in found.items():
            # Sums of at most 2 * 96 * 4 terms below 100, in another order.
            assert_allclose(x, want[name], name, atol=768 * 2.0**-53 * 100)
            assert_bitwise(x, each[0][name], name)


def test_gradients_of_arrays_of_packed_sequences():
    cut = {"layout": "zigzag", "cu_seqlens": (0, 32, 32, 96)}
    offsets = np.array(cut["cu_seqlens"])
    options = options_of("none", cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    options["mod_arrays"]["rate"] = RNG.standard_normal((3, LENGTH))
    each, want = dmods_of(4, [x[0] for x in inputs(1)], options, cut)
    for name, x in want.items():
        assert_allclose(each[1][name], x, name, atol=768 * 2.0**-53 * 100)


@on_backends
def test_kernels(backend):
    """Each block has the same kernels: places are numbers."""
    case = Case("float32", on=Emulation("sm_80", seed=1))
    real = lse_dtype(case.dtype)
    arrays, options = inputs(1, dtype=real), options_of("near", real)
    placed = {
        x: backend.place(y) if isinstance(y, np.ndarray) else y
        for x, y in options["mod_arrays"].items()
    }
    with backend.running(case):
        got = shared(
            2, arrays, options | {"mod_arrays": placed},
            {"layout": "zigzag"}, place=backend.place,
        )  # fmt: skip
    wide = [x.astype(np.float64) for x in arrays]
    want = whole(wide, options_of("near"))
    assert_same(map(backend.fetch, got), want, 2.0**-24)


@dataclass
class Near:
    """A callable without a hash, as dataclasses that compare have none."""

    width: int

    def __call__(self, b, h, q_idx, kv_idx, *, seqlen_k):
        return (abs(q_idx - kv_idx) < self.width) | (kv_idx == seqlen_k - 1)


def test_a_callable_without_a_hash():
    arrays, options = inputs(), {"mask_mod": Near(10)}
    got = shared(2, arrays, options, {"layout": "zigzag"})
    assert_same(got, whole(arrays, options), 2.0**-53)


def test_hidden_blocks_are_nobodys():
    """Of 8 chunks of 12, `near` leaves those that touch."""
    hidden = functions.hidden_of({"mask_mod": near}, BATCH, HEADS, "float32")
    offsets = (0, LENGTH)
    mask = schedule.Mask(
        8, "contiguous", False, (None, None), offsets, offsets, False,
        has_functions=True, hidden=hidden,
    )  # fmt: skip
    needed = [
        [bool(schedule.needed_keys(mask, q, k)) for k in range(8)]
        for q in range(8)
    ]
    assert needed == [[abs(q - k) <= 1 for k in range(8)] for q in range(8)]


def test_arrays_are_not_read_to_decide():
    hidden = functions.hidden_of(
        {"mask_mod": documents, "mod_arrays['ids']": IDS},
        BATCH,
        HEADS,
        "float32",
    )
    block = schedule.Block(range(8), range(8), positions=(0, 80))
    mask = schedule.Mask(
        2, "zigzag", False, (None, None), (0, 96), (0, 96), False
    )
    assert not hidden.hides(block, mask)


def test_ranks_must_agree_on_functions():
    def of_rank(group):
        own = [distributed.shard(x, group.rank, 2) for x in inputs()[:3]]
        return distributed.forward(
            *own, group=group, mask_mod=(near, heads_differ)[group.rank]
        )

    with pytest.raises(ValueRangeError, match="functions"):
        distributed.run_threads(2, of_rank)


def called(size, options, **more):
    """The joined out of ranks."""

    def of_rank(group):
        own = [distributed.shard(x, group.rank, size) for x in inputs()[:3]]
        given = options(group.rank) if callable(options) else options
        return distributed.forward(*own, group=group, **given, **more)

    return distributed.unshard(
        distributed.run_threads(size, of_rank, timeout=30)
    )


def test_reals_of_float64_calls_have_their_bits():
    """float32 takes these times for equal, and would hide all keys."""

    def since(b, h, q_idx, kv_idx, *, start):
        return start + kv_idx * 1.0 > start + 20

    options = {"mask_mod": since, "mod_arrays": {"start": 1.7e9}}
    want = cuflash.forward(*inputs()[:3], **options)
    # Two orders of sums of up to 96 terms below 4, of weights of one.
    bound = 96 * 4 * 2.0**-52
    assert_allclose(called(4, options), want, "out", atol=bound)


def test_ranks_must_agree_on_shapes_of_arrays():
    def options(rank):
        return {"mask_mod": documents, "mod_arrays": {"ids": IDS[rank:]}}

    with pytest.raises(ValueRangeError, match=r"\(95,\)"):
        called(2, options)


def many(score, b, h, q_idx, kv_idx, *, n0, n1, n2, n3, n4, n5):
    return score + (q_idx - kv_idx + h) * (n0 + n1 + n2 + n3 + n4 + n5)


def test_numbers_that_leave_blocks_no_room_are_refused_everywhere():
    numbers = dict.fromkeys((f"n{i}" for i in range(6)), 1.0)
    options = {"score_mod": many, "mod_arrays": numbers}
    assert called(2, options).shape == (BATCH, LENGTH, HEADS, 16)
    with pytest.raises(UnsupportedError, match="at most 5: .*h, q_idx, kv_id"):
        called(2, options, ulysses=2)


def test_a_reserved_name_is_refused():
    def far(b, h, q_idx, kv_idx, *, cuflash_h):
        return q_idx - kv_idx < cuflash_h

    options = {"mask_mod": far, "mod_arrays": {"cuflash_h": 3}}
    with pytest.raises(ValueRangeError, match="'cuflash_h', which a block's"):
        called(2, options)
