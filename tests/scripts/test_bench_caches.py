"""scripts/bench_caches.py without a GPU."""

import importlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import bench_parts
from helpers.compare import assert_allclose
from helpers.stand_in import StandIn

SMALL = {
    "CACHES": [(2, 16)],
    "QUERIES": (1, 9),
    "LATENT": [(1, 4, 2)],
    "LATENT_KEYS": 16,
    "LATENT_DIM": 24,
    "LATENT_DIM_V": 16,
    "REQUESTS": 3,
    "PREFIX": 10,
    "SUFFIX": 4,
}


@pytest.fixture
def script(monkeypatch):
    """The script on NumPy arrays; a line's i-th graph takes i ms."""
    cupy = StandIn("cupy")
    cupy.get_default_memory_pool = lambda: SimpleNamespace(
        free_all_blocks=lambda: None
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    names = "timing", "reading", "decode_runners"
    for name in (*(f"bench_parts.{x}" for x in names), "bench_caches"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name in names:
        monkeypatch.setattr(bench_parts, name, None, raising=False)
        del bench_parts.__dict__[name]
    script = importlib.import_module("bench_caches")
    for name, value in SMALL.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "reader", lambda *halves: tuple)
    monkeypatch.setattr(script, "peers", lambda *arrays: {})
    monkeypatch.setattr(script.machine, "describe", dict)
    monkeypatch.setattr(
        script.decode_runners,
        "capture_cupy",
        lambda call, count: SimpleNamespace(launch=call()),
    )
    monkeypatch.setattr(
        script,
        "alternate",
        lambda contenders, seconds: {
            x: SimpleNamespace(ms=float(i))
            for i, x in enumerate(contenders, 1)
        },
    )
    return script


def test_the_figures(script, capsys, tmp_path):
    file = tmp_path / "figures.json"
    script.main(["--output", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["few", "latent", "tree", "prefix"]
    assert [len(x) for x in rows.values()] == [2, 1, 1, 1]
    nine, *_ = rows["few"][1:]
    assert nine["us"] == {"cuflash": 100.0, "read": 200.0}
    assert nine["bytes"] == 2 * 2 * 16 * 8 * 128 * 2
    assert nine["flops"] == 4 * 64 * 128 * 2 * 9 * 16
    shown = capsys.readouterr().out
    assert "2 x 16 keys, 9 queries: 100.0 us, 1 GB/s, 0 TFLOP/s" in shown


def test_a_shared_prefix_gives_what_both_give(script, monkeypatch):
    found = {}

    def kept(name, calls, *others):
        found.update({x: call() for x, call in calls.items()})

    def same(*shape):
        """Each request's own cache is the prefix and its suffix."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal(shape, np.float32)
        if shape[2:3] == (SMALL["PREFIX"] + SMALL["SUFFIX"],):
            x[:, :, : SMALL["PREFIX"]] = seen[SMALL["PREFIX"]]
            x[:, :, SMALL["PREFIX"] :] = seen[SMALL["SUFFIX"]]
        return seen.setdefault(shape[2] if len(shape) == 5 else 0, x)

    seen = {}
    monkeypatch.setattr(script, "line", kept)
    monkeypatch.setattr(script, "random", same)
    script.prefix(0.1)
    out, _ = found["cuflash"]
    # Sums of 14 terms up to 4, of weights with some ten roundings each.
    bound = 14 * 10 * 4 * 2.0**-24
    assert_allclose(out, found["separate"], "out", atol=bound)
