"""The large calls of scripts/fuzz.py: draws, and wrong results."""

import numpy as np
import pytest

import cuflash
import fuzz
from fuzz_parts import shapes, units

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


def test_one_seed_in_eight_of_a_gpu():
    assert sum(units.is_large("gpu", seed) for seed in SEEDS) == 63
    assert not any(units.is_large("emulator", seed) for seed in SEEDS)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 8, 16, 24])
def test_some_large_calls_on_a_gpu(seed):
    assert fuzz.main(["--on", "gpu", "--again", f"{seed}/0"]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.05, float("nan")])
def test_one_wrong_element_is_detected(monkeypatch, capsys, value):
    def wrong(*args, **kwargs):
        dq, dk, dv = backward(*args, **kwargs)
        dk[-1, -1, -1, -1] += dk.max() * value
        return dq, dk, dv

    backward = cuflash.backward
    monkeypatch.setattr(cuflash, "backward", wrong)
    assert fuzz.main(["--on", "gpu", "--again", "8/0"]) == 1
    assert "dk " in capsys.readouterr().out
