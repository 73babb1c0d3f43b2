"""scripts/bench_torch.py without a GPU: usage, its table, its reasons."""

import sys

import pytest

import bench_torch


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def test_without_pytorch_it_says_so(capsys, no_torch):
    assert bench_torch.main([]) == 0
    assert capsys.readouterr().out == (
        "bench_torch: nothing timed: PyTorch is not installed: "
        'pip install "cuflash[torch]"\n'
    )


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--only", "all"]])
def test_wrong_options(options, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_torch.main(options)
    assert ended.value.code == 2


def test_a_row_tells_what_is_above_its_limit():
    times = {"cuflash": [30.0, 20.0, 40.0], "SDPA": [20.0, 25.0, 15.0]}
    row = bench_torch.row("forward", times)
    assert row.split()[:5] == ["forward", "30.0", "20.0", "1.500", "1.50"]
    assert "ABOVE" not in row and row.endswith("[20.0 · 15.0]")
    assert "ABOVE" in bench_torch.row("Llama step", times)
