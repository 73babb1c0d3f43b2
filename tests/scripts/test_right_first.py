"""The result checks of bench.py and sweep_blocks.py, on NumPy arrays."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from bench_parts import peers
from bench_parts.cells import Cell
from helpers.stand_in import with_numpy
from sweep_parts import space

KINDS = [("float16", None), ("float32", None), ("float32", "tf32x3"),
         ("float64", None)]  # fmt: skip
of_each_kind = pytest.mark.parametrize(("dtype", "precision"), KINDS)
on_wide_families = pytest.mark.parametrize(
    ("family", "dtype"),
    [("fma", "float32"), ("tf32x3", "float32"), ("dmma", "float64")],
)
in_both_directions = pytest.mark.parametrize(
    "direction", ["forward", "backward"]
)


@pytest.fixture
def on_numpy(monkeypatch):
    return with_numpy(monkeypatch)


def cell(direction, dtype, precision=None, causal=True):
    return Cell(direction, dtype, 16, causal, seqlen=40, batch=2, heads=4,
                kv_heads=2, precision=precision)  # fmt: skip


def results_and_checker(on_numpy, cell):
    inputs = on_numpy.runners.make_inputs(cell, seed=0)
    assert {x.dtype.name for x in inputs} == {cell.dtype}
    call = on_numpy.runners.OURS.prepare(cell, inputs)
    return call(), on_numpy.checks.Checker(cell, inputs)


def rounded_to(bits, array):
    """Round to that many bits."""
    fraction, exponent = np.frexp(array)
    kept = np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)
    return kept.astype(array.dtype)


@in_both_directions
@of_each_kind
def test_right_results_pass(on_numpy, dtype, precision, direction):
    results, checker = results_and_checker(
        on_numpy, cell(direction, dtype, precision)
    )
    assert 0 < checker.check("cuflash", results) <= 1


@in_both_directions
@pytest.mark.parametrize(
    ("dtype", "precision", "bits"),
    [("float16", None, 8), ("float32", None, 16), ("float32", "tf32x3", 8),
     ("float64", None, 40)],
)  # fmt: skip
def test_results_of_too_few_bits_do_not(
    on_numpy, dtype, precision, bits, direction
):
    results, checker = results_and_checker(
        on_numpy, cell(direction, dtype, precision)
    )
    for i in range(len(results)):
        wrong = list(results)
        wrong[i] = rounded_to(bits, results[i])
        with pytest.raises(on_numpy.checks.WrongResult, match="times its"):
            checker.check("cuflash", tuple(wrong))


def test_a_result_that_is_not_finite(on_numpy):
    (out,), checker = results_and_checker(on_numpy, cell("forward", "float64"))
    out[0, 0, 0, 0] = np.nan  # not of the head that is compared
    with pytest.raises(on_numpy.checks.WrongResult, match="out has NaN"):
        checker.check("cuflash", (out,))


def test_a_peer_may_be_judged_by_another_kind(on_numpy):
    """As PyTorch's float32, which uses three TF32 matmuls."""
    (out,), checker = results_and_checker(on_numpy, cell("forward", "float32"))
    rough = rounded_to(17, out)
    assert checker.check("peer", (rough,), "tf32x3") <= 1
    with pytest.raises(on_numpy.checks.WrongResult):
        checker.check("cuflash", (rough,))


@in_both_directions
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_plain_cupy_is_attention(on_numpy, dtype, causal, direction):
    it = cell(direction, dtype, causal=causal)
    inputs = on_numpy.runners.make_inputs(it, seed=0)
    results = on_numpy.peers_cupy.find("cupy").prepare(it, inputs)()
    assert {x.dtype.name for x in results} == {dtype}
    assert on_numpy.checks.Checker(it, inputs).check("cupy", results) <= 1


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float16", 4), ("float32", 4), ("float64", 8)]
)
def test_scores_beyond_8_gib_are_refused(on_numpy, monkeypatch, dtype, nbytes):
    assert peers.MOST_BYTES == 8 << 30
    it = cell("forward", dtype)
    inputs = on_numpy.runners.make_inputs(it, seed=0)
    prepare = on_numpy.peers_cupy.find("cupy").prepare
    monkeypatch.setattr(peers, "MOST_BYTES", 2 * 4 * 40 * 40 * nbytes)
    prepare(it, inputs)
    monkeypatch.setattr(peers, "MOST_BYTES", peers.MOST_BYTES - 1)
    with pytest.raises(peers.Absent, match="its score matrix takes"):
        prepare(it, inputs)


# Of a tile ------------------------------------------------------------------


def tile_shape(family, dtype):
    """With rows that see no key."""
    group = space.Group(family, "backward", dtype, 16, True)
    shape, _ = space.check_shapes(group)
    return replace(shape, seqlen_q=150, seqlen_k=120)


@on_wide_families
def test_right_tiles_pass(on_numpy, family, dtype):
    ratios = on_numpy.wide.check(tile_shape(family, dtype))
    assert list(ratios) == ["out", "lse", "dq", "dk", "dv"]
    assert 0 < max(ratios.values()) <= 1


@on_wide_families
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_keys_that_are_not_read(on_numpy, monkeypatch, family, dtype, name):
    shape = tile_shape(family, dtype)
    inputs = on_numpy.large.make_inputs(shape)
    got = on_numpy.large.results(shape, inputs)
    for x in ("k", "v"):
        inputs[x][:, 64:80] = 0  # one tile of them
    other = on_numpy.large.results(shape, inputs)
    monkeypatch.setattr(
        on_numpy.large, "results", lambda *_: {**got, name: other[name]}
    )
    with pytest.raises(on_numpy.large.WrongResult, match=f"{name} is off by"):
        on_numpy.wide.check(shape)


def test_a_tile_of_float32_is_no_tile_of_float64(on_numpy, monkeypatch):
    known = cuflash.forward

    def forward(*arrays, **options):
        narrow = (x.astype(np.float32) for x in arrays)
        return [x.astype(np.float64) for x in known(*narrow, **options)]

    monkeypatch.setattr(on_numpy.large.cuflash, "forward", forward)
    with pytest.raises(on_numpy.large.WrongResult, match="out is off by"):
        on_numpy.wide.check(tile_shape("dmma", "float64"))
