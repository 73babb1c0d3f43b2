"""scripts/bench_readouts.py without a GPU."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

import bench_parts
from helpers.compare import assert_all
from helpers.stand_in import StandIn


def once(contenders, seconds):
    """Call each once; the i-th takes i milliseconds."""
    for contender in contenders.values():
        for call in contender.calls:
            call()
    return {
        name: SimpleNamespace(ms=float(i))
        for i, name in enumerate(contenders, 1)
    }


@pytest.fixture
def script(monkeypatch):
    """The script on NumPy arrays."""
    cupy = StandIn("cupy")
    cupy.get_default_memory_pool = lambda: SimpleNamespace(
        free_all_blocks=lambda: None
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in ("bench_parts.timing", "bench_readouts"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.setattr(bench_parts, "timing", None, raising=False)
    script = importlib.import_module("bench_readouts")
    monkeypatch.setattr(script, "alternate", once)
    monkeypatch.setattr(script.machine, "describe", dict)
    monkeypatch.setattr(script, "HEADS", 2)
    monkeypatch.setattr(script, "WEIGHTS_HEADS", 1)
    return script


def test_the_figures(script, capsys, tmp_path):
    file = tmp_path / "figures.json"
    script.main([
        "--head-dim", "8", "--seqlen", "20", "--queries", "3", "--causal",
        "--dtype", "float32", "--output", str(file),
    ])  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("head_dim 8: forward 1.000 (1.00), max_score")
    assert printed[1] == "weights of 3 queries: 2.00 of a copy's rate"
    times, weights = json.loads(file.read_text())["rows"]
    assert_all(list(times["ms"].values()), [1, 2, 3, 4, 5, 6], "ms")
    assert weights == {"queries": 3, "of_copy": 2.0}
