"""The same bits every time: out, lse, dk, dv; dq if deterministic.

Emulated, the order of warps and blocks is drawn; on a GPU it differs from run
to run. CUFLASH_REPEATS sets the number of runs (200; under load 1,000).
"""

import os
from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.plans.tiles import Tile
from helpers import calls
from helpers.backends import EMULATED, CupyBackend
from helpers.compare import (
    assert_all,
    assert_bitwise,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend

GPU = CupyBackend()
REPEATS = int(os.environ.get("CUFLASH_REPEATS", "200"))
# Long enough that blocks on all SMs race for the same dq.
LENGTH = 1500


def in_other_orders(case):
    """Yield the case with other orders of warps and resident blocks."""
    for resident in (1, 3):
        seed = case.on.seed + resident
        yield replace(case, on=replace(case.on, seed=seed, resident=resident))


@on_each_backend(
    strategies.cases, backends=[EMULATED], archs=strategies.FAMILIES
)
def test_forward_in_any_order(backend, case):
    q, k, v, _ = inputs(case)
    first = calls.forward(backend, case, q, k, v)
    for other in in_other_orders(case):
        again = calls.forward(backend, other, q, k, v)
        for name, a, b in zip(("out", "lse"), again, first, strict=True):
            assert_bitwise(a, b, f"{name} ({other})")


# One block at a time: whom a block waits for has to have started before it.
ONE_BLOCK = [
    Case(
        "float16", seqlen_q=1, seqlen_k=129, num_heads_q=2, num_heads_kv=2,
        deterministic=True,
        on=Emulation("sm_90a", num_sms=3, resident=1),
    ),
    Case(
        "bfloat16", seqlen_q=1, seqlen_k=65, num_heads_q=2, num_heads_kv=2,
        head_dim=1, head_dim_v=1, deterministic=True,
        on=Emulation(
            "sm_90a", num_sms=3, resident=1,
            backward_tile=Tile(64, 64, 16, 1, 3, 4, 1, 3),
        ),
    ),
    *(
        Case(
            dtype, seqlen_q=9, seqlen_k=150, deterministic=True,
            precision=precision, on=Emulation("sm_80", resident=1),
        )
        for dtype, precision in [
            ("bfloat16", None), ("float32", None), ("float64", None),
            ("float32", "tf32x3"),
        ]
    ),
]  # fmt: skip


@on_each_backend(
    strategies.cases,
    backends=[EMULATED],
    archs=strategies.FAMILIES,
    examples=ONE_BLOCK,
)
def test_backward_in_any_order(backend, case):
    """dk and dv always, dq if deterministic."""
    q, k, v, dout = inputs(case)
    arrays = dout, q, k, v, *calls.forward(backend, case, q, k, v)
    dq, *first = calls.backward(backend, case, *arrays)
    for other in in_other_orders(case):
        dq_again, *again = calls.backward(backend, other, *arrays)
        for name, a, b in zip(("dk", "dv"), again, first, strict=True):
            assert_bitwise(a, b, f"{name} ({other})")
        if case.deterministic:
            assert_bitwise(dq_again, dq, f"dq ({other})")


TURNS = {
    **{
        family: Case(
            dtype, seqlen_q=9, seqlen_k=6 * tile.block_k - 2,
            deterministic=True, precision=precision,
            on=Emulation(backward_tile=tile),
        )
        for family, dtype, precision, tile in [
            ("mma", "bfloat16", None, Tile(32, 32, 4, 1, 2, 2, 2)),
            ("fma", "float32", None, Tile(16, 64, 4, 1, 1, 4, 4, 3)),
            ("dmma", "float64", None, Tile(32, 32, 4, 1, 1, 2, 2, 3)),
            ("tf32x3", "float32", "tf32x3", Tile(32, 32, 2, 1, 1, 2, 2, 3)),
        ]
    },
    "wgmma": Case(
        "bfloat16", seqlen_q=40, seqlen_k=500, deterministic=True,
        on=Emulation(
            "sm_90a", backward_tile=Tile(128, 128, 12, 1, 2, 8, 1, 3)
        ),
    ),
    "wgmma_wide": Case(
        "bfloat16", seqlen_q=40, seqlen_k=250, deterministic=True,
        on=Emulation(
            "sm_90a", backward_tile=Tile(64, 64, 16, 1, 2, 4, 1, 3)
        ),
    ),
}  # fmt: skip
# Three query tiles of each of two heads: semaphores that stand for others.
TURNS["mma_ahead"] = replace(
    TURNS["mma"], seqlen_q=85, num_heads_q=4, num_heads_kv=2
)
# Which key tiles come before one hangs on the mask and on the window.
MASKED_TURNS = {
    name: replace(TURNS["wgmma_wide"], seqlen_q=150, **changes)
    for name, changes in {
        "causal": {"causal": True},
        # The last query tile does not see the first key tile.
        "window": {"window": (164, 230)},
        "causal_window": {"causal": True, "window": (150, 0)},
    }.items()
}
# Two orders of key tiles: two sections of one head, then the last. Hopper's
# grids are one block an SM, and a single block races with none.
for name, num_sms in {"mma": 1, "wgmma": 2, "wgmma_wide": 2}.items():
    MASKED_TURNS[f"sections_{name}"] = replace(
        TURNS[name], seqlen_q=150, causal=True, num_heads_q=6, num_heads_kv=3,
        on=replace(TURNS[name].on, num_sms=num_sms, l2_bytes=1),
    )  # fmt: skip


def cancelling(case):
    """Return arrays whose first two key tiles' terms of dq cancel.

    Unless others are added in between: otherwise rounding dq would mostly
    hide a difference.
    """
    on = case.on
    # Others are not taken; and there would be fewer key tiles than it seems.
    assert on.backward_tile in strategies.tiles(case, "backward", on.arch)
    tile = on.backward_tile.block_k
    q, k, v, dout = inputs(case)
    q[...] = 0  # all keys have the same weight
    k[:, tile : 2 * tile], v[:, tile : 2 * tile] = -k[:, :tile], v[:, :tile]
    k[:, : 2 * tile] *= 2**20
    return dout, q, k, v, *calls.states(case, q, k, v)


def check_dq_order(backend, case, seeds):
    """Compare dq in the orders of several seeds."""
    arrays = cancelling(case)
    dq, _, _ = calls.backward(backend, case, *arrays)
    for seed in range(seeds):
        other = replace(case, on=replace(case.on, seed=seed, resident=5))
        again, _, _ = calls.backward(backend, other, *arrays)
        assert_bitwise(again, dq, f"dq ({other})")


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("case", TURNS.values(), ids=TURNS)
def test_key_tiles_add_in_order(backend, case):
    """In all kernels: no key tile adds to dq before its predecessors."""
    check_dq_order(backend, case, 20 if case.on.arch == "sm_90a" else 8)


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("case", MASKED_TURNS.values(), ids=MASKED_TURNS)
def test_key_tiles_add_in_order_under_masks(backend, case):
    check_dq_order(backend, case, 4)


@pytest.mark.parametrize("backend", [EMULATED])
def test_key_tiles_add_in_order_with_nan(backend):
    """What is noted of keys stands next to the counters of turns.

    With these seeds a block notes its own while others wait for turns, and
    would add in another order if they did not wait.
    """
    case = replace(
        TURNS["wgmma"], seqlen_q=3, seqlen_k=400, num_heads_q=3,
        num_heads_kv=3, causal=True,
    )  # fmt: skip
    arrays = cancelling(case)
    arrays[0][:, -1] = np.nan  # dout
    found = []
    for seed in (7, 8):
        other = replace(case, on=replace(case.on, seed=seed, resident=9))
        dq, dk, dv = calls.backward(backend, other, *arrays)
        found.append(dq[:, :-1])
        assert_bitwise(found[0], found[-1], "dq")
        finite = [np.isfinite(x.astype(np.float32)) for x in (dq, dk, dv)]
        assert_all(finite[0][:, :-1], True, "finite[0][:, :-1]")
        for x in (finite[0][:, -1], *finite[1:]):
            assert_all(x, 0, "x")


def inputs_on_gpu(dtype, head_dim):
    case = Case(dtype, 2, LENGTH, LENGTH, 8, 4, head_dim, head_dim)
    return [GPU.place(x) for x in inputs(case)]


def count_changes(cp, compute, repeats=REPEATS):
    """Count the repeats that differ from the first run in any bit."""
    first = [bits(x) for x in compute()]
    changed = cp.zeros(len(first), cp.int64)
    for _ in range(repeats):
        GPU.poison()
        for i, (a, b) in enumerate(zip(compute(), first, strict=True)):
            changed[i] += (bits(a) != b).any()
    return changed.tolist()


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_forward_on_a_gpu(cp, dtype, head_dim, causal):
    q, k, v, _ = inputs_on_gpu(dtype, head_dim)

    def compute():
        return cuflash.forward(q, k, v, causal=causal, return_lse=True)

    repeats = REPEATS if dtype != "float32" else REPEATS // 10
    assert count_changes(cp, compute, repeats) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_backward_on_a_gpu(cp, dtype, head_dim, causal, deterministic):
    q, k, v, dout = inputs_on_gpu(dtype, head_dim)
    out, lse = cuflash.forward(q, k, v, causal=causal, return_lse=True)

    def compute():
        dq, dk, dv = cuflash.backward(
            dout, q, k, v, out, lse,
            causal=causal, deterministic=deterministic,
        )  # fmt: skip
        return (dk, dv, dq) if deterministic else (dk, dv)

    repeats = REPEATS if dtype != "float32" else REPEATS // 10
    assert not any(count_changes(cp, compute, repeats))


def of_documents(cp):
    """Return three documents a sequence, by segment ids."""
    ids = cp.repeat(cp.arange(3, dtype=cp.int32)[None], LENGTH // 3, axis=1)
    return {"segment_ids_q": ids, "segment_ids_k": ids}


def of_packed(cp):
    """Return the same documents as packed sequences."""
    offsets = cp.arange(0, LENGTH + 1, LENGTH // 3, dtype=cp.int32)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [of_documents, of_packed])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_documents_on_a_gpu(cp, head_dim, options):
    """One sequence, so that both have the same shapes of results."""
    arrays = [x[0] for x in inputs_on_gpu("bfloat16", head_dim)]
    q, k, v, dout = arrays
    given = {"causal": True, **options(cp)}
    out, lse = cuflash.forward(q, k, v, **given, return_lse=True)

    def compute():
        return cuflash.backward(
            dout, q, k, v, out, lse, **given, deterministic=True
        )

    assert not any(count_changes(cp, compute))


# Under load ------------------------------------------------------------------

LOADED_REPEATS = int(os.environ.get("CUFLASH_REPEATS", "1000"))


class Load:
    """Matmuls of many sizes on their own stream.

    Their blocks occupy a varying number of SMs, which changes which of a
    call's blocks run at the same time.
    """

    def __init__(self, cp):
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.matrices = [
            cp.ones((n, n), cp.float16) for n in (256, 700, 1500, 3000)
        ]
        self.rounds = 0

    def keep_up(self):
        """Queue more if the stream is idle."""
        if self.stream.done:
            self.rounds += 1
            with self.stream:
                for a in self.matrices * 10:
                    a @ a


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_under_load(cp, dtype, head_dim, causal):
    case = Case(dtype, 4, 300, 300, 8, 4, head_dim, head_dim)
    q, k, v, dout = (GPU.place(x) for x in inputs(case))
    load = Load(cp)

    def compute():
        load.keep_up()
        out, lse = cuflash.forward(q, k, v, causal=causal, return_lse=True)
        return out, lse, *cuflash.backward(
            dout, q, k, v, out, lse, causal=causal, deterministic=True
        )  # fmt: skip

    assert not any(count_changes(cp, compute, LOADED_REPEATS))
    load.stream.synchronize()
    assert load.rounds > 1  # else the load was gone before the repeats
