"""Calls with one TileMask find out once which tiles it leaves."""

import contextlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.backends import emulator
from cuflash.backends.emulator import machine, runtime
from cuflash.plans import expression
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request import traced
from cuflash.request.kept import Kept
from cuflash.request.problem import Problem
from helpers.backends import on_kernels
from helpers.compare import assert_arrays_equal
from helpers.data import Emulation, inputs
from helpers.host_compiler import needs_compiler
from helpers.variants import VARIANTS, case_of, placed, shape_of

SIZES = {"batch": 2, "num_heads": 4, "seqlen_q": 100, "seqlen_k": 170}
DOCUMENTS = VARIANTS["documents"]
IDS = DOCUMENTS.arrays((2, 4, 100, 170))["ids"]
Q, K, V, DOUT = inputs(
    case_of(100, 170, 32, dtype="float32", on=Emulation("sm_80"))
)


def mask_of_ids(**more):
    arrays = {"mod_arrays": {"ids": IDS}}
    return cuflash.tile_mask(DOCUMENTS.mask, **SIZES, **arrays, **more)


def both(mask, **options):
    """Return the results of both directions."""
    asked = {"mask_mod": mask, **options}
    out, lse = cuflash.forward(Q, K, V, **asked, return_lse=True)
    return out, lse, *cuflash.backward(DOUT, Q, K, V, out, lse, **asked)


@contextlib.contextmanager
def entries():
    """Note the kernels that the emulator runs."""
    ran, run = [], runtime.run
    noting = mock.patch.object(
        runtime, "run", lambda *x: (ran.append(x[2]), run(*x))
    )
    with noting, emulator.active("sm_80", seed=1, family="fma"):
        yield ran


@needs_compiler
def test_kernels_of_flags_run_once():
    tiles = mask_of_ids()
    with entries() as ran:
        first = both(tiles)
        assert ran.count("tile_flags") == 2  # forward and backward
        again = both(tiles)
        assert ran.count("tile_flags") == 2
        alone = both(DOCUMENTS.mask, mod_arrays={"ids": IDS})
        assert ran.count("tile_flags") == 4
        both(mask_of_ids())
        assert ran.count("tile_flags") == 6
    for x, y, z in zip(first, again, alone, strict=True):
        assert_arrays_equal(y, x, "again")
        assert_arrays_equal(z, x, "alone")


@on_kernels
def test_hoppers_scheduler_starts_anew(backend, monkeypatch):
    """From a counter of 0, whatever its memory held."""
    monkeypatch.setattr(machine, "UNWRITTEN", 1)
    case = case_of()  # of test_expressions_hopper.py
    shape = shape_of(case)
    arrays = placed(backend, DOCUMENTS.arrays(shape))
    sizes = dict(zip(SIZES, shape, strict=True))
    with backend.running(case):
        tiles = cuflash.tile_mask(DOCUMENTS.mask, **sizes, mod_arrays=arrays)
        q, k, v = map(backend.place, inputs(case)[:3])
        first = backend.fetch(cuflash.forward(q, k, v, mask_mod=tiles))
        backend.poison()
        again = backend.fetch(cuflash.forward(q, k, v, mask_mod=tiles))
    assert_arrays_equal(again, first, "out")
    assert len(tiles._kept) == 1


@needs_compiler
def test_while_a_stream_is_captured_nothing_is_kept():
    tiles = mask_of_ids()
    captured = mock.patch.object(machine.Machine, "queue", lambda _: None)
    with entries() as ran, captured:
        cuflash.forward(Q, K, V, mask_mod=tiles)
        cuflash.forward(Q, K, V, mask_mod=tiles)
        assert ran.count("tile_flags") == 2
    assert len(tiles._kept) == 0


@pytest.mark.parametrize("values", [(IDS, IDS[:, ::-1]), (0, 1)])
def test_what_the_call_alone_has_is_not_kept(values):
    """Another call may have something else by its name."""

    def mask(b, h, q_idx, kv_idx, *, ids=None):
        if ids is None:
            return q_idx >= kv_idx
        read = ids if isinstance(values[0], int) else ids[b, kv_idx]
        return read * q_idx == 0

    tiles = cuflash.tile_mask(mask, **SIZES)
    for ids in values:
        got = cuflash.forward(Q, K, V, mask_mod=tiles, mod_arrays={"ids": ids})
        alone = {"mask_mod": mask, "mod_arrays": {"ids": ids}}
        assert_arrays_equal(got, cuflash.forward(Q, K, V, **alone), "out")
    assert len(tiles._kept) == 0


def test_numbers_of_the_score_make_no_difference():
    def shifted(score, b, h, q_idx, kv_idx, *, m):
        return score * m

    tiles = mask_of_ids()
    for m in (1.0, 2.0):
        options = {"score_mod": shifted, "mod_arrays": {"m": m}}
        got = cuflash.forward(Q, K, V, mask_mod=tiles, **options)
        arrays = {"mod_arrays": {"m": m, "ids": IDS}}
        options |= {"mask_mod": DOCUMENTS.mask, **arrays}
        assert_arrays_equal(got, cuflash.forward(Q, K, V, **options), "out")
    assert len(tiles._kept) == 1


# Plans ----------------------------------------------------------------------


def added(score, b, h, q_idx, kv_idx, *, table):
    return score + table[h]


def plan_of(direction, table=None, **more):
    functions = {"mask_mod": DOCUMENTS.mask}
    if table is not None:
        functions |= {"score_mod": added, "return_dmod": ("table",)}
    arrays = {"ids": IDS} | ({} if table is None else {"table": table})
    others, named = traced.parted(arrays)
    fields = traced.recorded({**functions, "mod_arrays": others, **named})
    sizes = 2, 512, 512, 4, 2, 64, 64, 1.0
    problem = Problem(direction, "bfloat16", *sizes, **dict(fields.fields))
    return plan(replace(problem, **more), device_of_arch("sm_90a"))


def files(decided):
    return [x.kernel.file for x in decided.launches]


def test_on_hopper_a_small_kernel_zeroes_the_counter():
    decided = plan_of("forward")
    assert files(decided) == [
        "prepare/tile_flags.cu", "prepare/segment_order.cu",
        "sm90/forward.cu",
    ]  # fmt: skip
    later = expression.after_found(decided)
    assert files(later) == ["prepare/tile_counter.cu", "sm90/forward.cu"]


def test_backward_other_kernels_zero_it():
    found = ["prepare/tile_flags.cu", "prepare/segment_order.cu"]
    table = np.zeros(4, np.float32)
    exact = plan_of("backward", table, deterministic=True)
    for first, decided in enumerate((plan_of("backward"), exact)):
        names = files(decided)
        assert names[first : first + 2] == found
        rest = names[:first] + names[first + 2 :]
        assert files(expression.after_found(decided)) == rest


def test_with_segment_ids_nothing_is_shared():
    assert expression.found_of_mask(plan_of("forward", segment_ids=True)) == ()
    assert expression.found_of_mask(plan_of("forward")) != ()


@pytest.mark.parametrize("change", [{"seqlen_q": 640}, {"window": (9, 9)}])
def test_the_key_has_what_flags_depend_on(change):
    keys = {
        expression.key_of_found(plan_of("forward", **x))
        for x in ({}, {"scale": 2.0}, change)
    }
    assert len(keys) == 2


def test_the_oldest_is_dropped():
    kept = Kept()
    for n in range(Kept.MOST + 1):
        assert kept.put(n, -n) == -n
    assert kept.get(0) is None and kept.get(1) == -1
    assert kept.put(1, "another") == -1
