"""scripts/fuzz_gpu.py: its draws, and that it detects wrong results."""

import numpy as np
import pytest

import cuflash
import fuzz_gpu
from fuzz_parts import shapes

SEEDS = range(500)


def test_a_seed_is_a_shape():
    drawn = [shapes.draw(seed) for seed in SEEDS]
    assert [shapes.draw(seed) for seed in SEEDS] == drawn
    assert len(set(drawn)) == len(SEEDS)


def test_shapes_are_of_the_grids_ranges():
    for shape in map(shapes.draw, SEEDS):
        assert shape.fits
        assert 64 <= min(shape.seqlen_q, shape.seqlen_k)
        assert max(shape.seqlen_q, shape.seqlen_k) <= 16384
        assert 1 <= min(shape.head_dim, shape.head_dim_v)
        assert max(shape.head_dim, shape.head_dim_v) <= 256


def test_every_kind_of_call_is_drawn():
    drawn = [shapes.draw(seed) for seed in SEEDS]
    for trait in ("dtype", "causal", "deterministic"):
        assert len({getattr(x, trait) for x in drawn}) == 2
    assert {x.group_size for x in drawn} == {1, 2, 4, 8}
    assert any(x.head_dim != x.head_dim_v for x in drawn)
    assert any(x.seqlen_q > 8192 for x in drawn)
    assert any(x.scale < 0 for x in drawn)
    longer_q = {np.sign(x.seqlen_q - x.seqlen_k) for x in drawn}
    assert longer_q == {-1, 0, 1}


def test_ctrl_c_is_no_result(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz_gpu.machine, "find_gpu", lambda: None)
    monkeypatch.setattr(fuzz_gpu.machine, "describe", dict)
    monkeypatch.setattr(fuzz_gpu, "run", interrupted)
    assert fuzz_gpu.main([]) == 130
    assert capsys.readouterr().err.startswith("stopped: ")


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(fuzz_gpu.machine, "find_gpu", lambda: "no driver")
    assert fuzz_gpu.main([]) == 1
    assert "found none (no driver). Nothing was run" in capsys.readouterr().err


@pytest.mark.gpu
def test_some_random_calls_on_a_gpu(capsys):
    assert fuzz_gpu.main(["--count", "30", "--seed", "0"]) == 0
    assert "30 calls in" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.05, float("nan")])
def test_one_wrong_element_is_detected(monkeypatch, capsys, value):
    def wrong(*args, **kwargs):
        dq, dk, dv = backward(*args, **kwargs)
        dk[-1, -1, -1, -1] += dk.max() * value
        return dq, dk, dv

    backward = cuflash.backward
    monkeypatch.setattr(cuflash, "backward", wrong)
    assert fuzz_gpu.main(["--count", "1", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: dk" in said
    assert "again: python scripts/fuzz_gpu.py --seed 7 --count 1" in said
