"""scripts/bench_pairs.py without a GPU."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the script times torch tensors")

import bench_pairs  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """On the CPU, where a call takes 2 ms and one with backward 6."""
    monkeypatch.setattr(bench_pairs, "DEVICE", "cpu")
    monkeypatch.setattr(bench_pairs, "HEADS", 2)
    monkeypatch.setattr(bench_pairs.machine, "describe", dict)

    def ms_of(call):
        return 6.0 if call() is None else 2.0

    monkeypatch.setattr(bench_pairs, "ms_of", ms_of)


def test_the_figures(capsys, tmp_path):
    file = tmp_path / "figures.json"
    bench_pairs.main([
        "--seqlen", "5", "--head-dim", "8", "--dtype", "float32", "--output",
        str(file),
    ])  # fmt: skip
    pair, triangle = json.loads(file.read_text())["rows"]
    assert pair["ms"]["cuflash"] == triangle["ms"]["math"] == [2.0, 4.0]
    shown = capsys.readouterr().out
    assert "pair 5, 2 x 8, float32: cuflash 2.000 (1.00), 4.000" in shown


def test_a_wrong_result_is_not_timed():
    def wrong(q, k, v, bias):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v + 0 * bias.sum()

    row = bench_pairs.cell("triangle", 5, 8, "float32", {"wrong": wrong})
    assert row["ms"]["wrong"].startswith("wrong by ")


def test_what_does_not_run_says_why():
    def refused(*tensors):
        raise RuntimeError("no kernel\nfor this")

    row = bench_pairs.cell("pair", 5, 8, "bfloat16", {"peer": refused})
    assert row["ms"] == {"peer": "no kernel"}
