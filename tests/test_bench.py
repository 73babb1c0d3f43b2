"""scripts/bench.py without a GPU: its grid, its sums, its refusals."""

import json
from dataclasses import replace

import pytest

import bench
from bench_parts import report


def row(direction, seqlen, **tflops):
    cell = {"direction": direction, "dtype": "bfloat16", "head_dim": 64,
            "causal": False, "seqlen": seqlen, "batch": 1,
            "heads": 1}  # fmt: skip
    return {**cell, "tflops": tflops, "spread": dict.fromkeys(tflops, 0.01)}


def test_the_default_grid():
    grid = bench.cells.grid(
        ["forward"], "bfloat16", bench.cells.HEAD_DIMS, [False, True],
        bench.cells.SEQLENS,
    )  # fmt: skip
    assert len(set(grid)) == 36
    for cell in grid:
        assert cell.batch * cell.seqlen == 16384
        assert cell.heads * cell.head_dim == 2048


def test_flops():
    cell = bench.cells.Cell("forward", "float16", 64, False, 10, 2, 3)
    assert cell.flops == 4 * 2 * 3 * 10 * 10 * 64
    assert cell.tflops(1.0) == cell.flops / 1e9
    backward = bench.cells.Cell("backward", "float16", 64, True, 10, 2, 3)
    assert backward.flops == cell.flops / 2 * 2.5


def test_grouped_heads():
    (cell,) = bench.cells.grid(
        ["forward"], "bfloat16", [128], [False], [512], width=4096, kv_heads=8
    )
    assert cell.shape == (32, 512, 32, 128)
    assert cell.shape_kv == (32, 512, 8, 128)
    assert cell.group_size == 4
    assert cell.flops == replace(cell, kv_heads=None).flops


def test_summary():
    rows = [
        row("forward", 512, cuflash=100.0, fa2=200.0),
        row("forward", 1024, cuflash=400.0, fa2=200.0),
        row("forward", 2048, fa2=200.0),
        row("backward", 512, cuflash=30.0, fa2=20.0),
    ]
    forward, backward = report.summary(rows, ["fa2", "cudnn"])
    assert forward["cells"] == 2
    assert forward["geometric_mean"] == pytest.approx(1.0)
    assert forward["worst"] == 0.5 and "seqlen 512" in forward["worst_cell"]
    assert backward["geometric_mean"] == pytest.approx(1.5)


def test_a_peer_that_is_missing_is_a_dash():
    text = report.line(row("forward", 512, cuflash=1.0), ["cuflash", "fa2"])
    assert text.split() == [
        "forward", "64", "full", "512", "1.0", "1.0%", "-", "-"
    ]  # fmt: skip


def test_a_saved_file_is_whole_or_the_old_one(tmp_path):
    path = tmp_path / "folder" / "out.json"
    report.save(path, {"a": 1})
    with pytest.raises(TypeError):
        report.save(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(bench.machine, "find_gpu", lambda: "no driver")
    assert bench.main([]) == 1
    assert "found none (no driver). Nothing was measured" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--head-dim", "512"], "--head-dim 512: at most 256"),
        (["--head-dim", "0"], "0 is less than 1"),
        (["--seqlen", "32768"], "--seqlen 32768: at most --tokens"),
        (["--seconds", "0"], "--seconds 0.0: more than 0"),
        (["--peer", "fa9"], "invalid choice: 'fa9'"),
        (["--kv-heads", "3"], "--kv-heads 3: no divisor of 32"),
        (["--memory", "--peer", "mha"], "--memory knows the peers fa2"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def rows_of(tmp_path, *options):
    """Bench one cell of each direction; return its rows."""
    path = tmp_path / "bench.json"
    cell = ["--head-dim", "64", "--seqlen", "512", "--tokens", "1024",
            "--causal", "yes", "--seconds", "0.01"]  # fmt: skip
    assert bench.main([*cell, *options, "--output", str(path)]) == 0
    return json.loads(path.read_text())["rows"]


@pytest.mark.gpu
def test_one_cell(tmp_path):
    rows = rows_of(tmp_path, "--peer")
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(row["tflops"]["cuflash"] > 0 for row in rows)
    assert all(row["error"]["cuflash"] <= 1 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "options"),
    [("mha", ["--kv-heads", "8"]), ("bfloat16", ["--dtype", "float16"])],
)
def test_a_cell_beside_its_variant(tmp_path, variant, options):
    for row in rows_of(tmp_path, *options, "--peer", variant):
        assert set(row["tflops"]) == {"cuflash", variant}
        assert max(row["error"].values()) <= 1
