"""scripts/bench.py without a GPU: grid, arithmetic, usage errors."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench_parts import compiling, markdown, peers, report
from cuflash.build import nvrtc
from cuflash.errors import CompileError
from cuflash.plans.plan import device_of_arch


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


@pytest.mark.parametrize(
    ("options", "dtype"),
    [(["--dtype", "float32"], "float32"), (["--dtype", "float64"], "float64"),
     (["--precision", "tf32x3"], "float32")],
)  # fmt: skip
def test_the_grid_of_wide_dtypes(options, dtype):
    known = bench.parse(options)
    assert known.dtype == dtype and known.head_dim == [64, 128]
    assert known.seqlen == [1024, 2048, 4096, 8192, 16384]
    assert known.tokens == 16384 and known.width == 1024


def test_kinds_of_checks():
    cell = bench.cells.Cell("forward", "float32", 64, False, 512, 1, 1)
    assert cell.kind == "low"
    assert replace(cell, precision="tf32x3").kind == "tf32x3"
    assert replace(cell, dtype="float64").kind == "float64"


@pytest.mark.parametrize(
    ("dtype", "precision", "family"),
    [("float32", None, "fma"), ("float32", "tf32x3", "mma8"),
     ("float64", None, "mma8")],
)  # fmt: skip
def test_kernels_are_compiled_before_they_are_timed(
    monkeypatch, dtype, precision, family
):
    grid = bench.cells.grid(
        ["backward"], dtype, [64], [True], [512, 4096], precision=precision
    )
    given = []

    def cubin_file(kernel, arch):
        given.append((kernel.file, arch))
        raise CompileError("not now")

    monkeypatch.setattr(nvrtc, "cubin_file", cubin_file)
    compiling.compile_all(grid, device_of_arch("sm_90a"))
    files = [f"{family}/forward.cu", f"{family}/backward.cu",
             "prepare/delta.cu"]  # fmt: skip
    assert {x for x, _ in given} == set(files)
    assert {arch for _, arch in given} == {"sm_90a"}


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


def test_heads_instead_of_a_width():
    (cell,) = bench.cells.grid(
        ["forward"], "bfloat16", [128], [False], [512], heads=6
    )
    assert cell.shape == (32, 512, 6, 128)


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


def test_files_are_saved_atomically(tmp_path):
    path = tmp_path / "folder" / "out.json"
    report.save(path, {"a": 1})
    with pytest.raises(TypeError):
        report.save(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_record_is_one_line(tmp_path):
    record = {"device": "x", "rows": [{"a": [1, 2]}, {"a": []}], "none": []}
    report.save(tmp_path / "out.json", record)
    lines = (tmp_path / "out.json").read_text().splitlines()
    assert lines[3:5] == ['  {"a": [1, 2]},', '  {"a": []}']


def test_every_peer_has_a_module():
    for dtype in ("bfloat16", "float32", "float64"):
        names = peers.all_for(dtype)
        assert set(names) <= set(peers.NAMES) and "cupy" in names
    folder = Path(bench.__file__).parent / "bench_parts"
    for module in peers.MODULES.values():
        assert (folder / f"{module}.py").exists()


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flashinfer", "jax"])
def test_an_absent_peer_is_left_out_with_a_word(monkeypatch, name):
    for package in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, package, None)
    found, (word,) = peers.find_peers([name], "bfloat16")
    assert not found
    assert word.startswith(f"{name} left out: ")


# Tables and pictures ---------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/README.md"])
def test_tables_match_the_json_files(name):
    """If not, run: python scripts/bench.py --write-docs."""
    path = Path(bench.__file__).parents[1] / name
    text = path.read_text(encoding="utf-8")
    assert markdown.MARK.search(text)
    assert markdown.updated(text, path.parent) == text


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/README.md"])
def test_sections_that_wait_can_be_written(name):
    text = (Path(bench.__file__).parents[1] / name).read_text("utf-8")
    for file, section in markdown.WAITING.findall(text):
        assert file in section
        for line in section.splitlines():
            if line.startswith("bench: "):
                assert markdown.parse(line[7:]).files == [file]


def saved(tmp_path):
    """Write a record of three cells; return its path."""
    rows = [
        row("forward", 512, cuflash=300.0, fa2=200.0),
        row("forward", 1024, cuflash=401.0),
        row("backward", 512, cuflash=100.0, fa2=200.0),
    ]
    path = tmp_path / "some.json"
    record = {
        "device": "A fake GPU",
        "date": "2026-01-01",
        "runners": {"cuflash": "cuflash 0", "fa2": "FlashAttention-2"},
        "ceilings": {"matmul_float16_8192_tflops": 700.0, "copy_gb_s": 4.0},
        "rows": rows,
        "summary": report.summary(rows, ["fa2"]),
    }
    report.save(path, record)
    return path


@pytest.mark.parametrize(
    ("mark", "lines"),
    [
        ("forward", ["| forward | 512 | 1,024 |", "| --- | ---: | ---: |",
                     "| head_dim 64 | 300 (1.50) | 401 (–) |"]),
        ("512", ["| ours · FlashAttention-2 | seqlen 512 |", "| --- | ---: |",
                 "| forward, head_dim 64 | 300 · 200 |",
                 "| backward, head_dim 64 | 100 · 200 |"]),
        ("backward means",
         ["| geometric mean over all cells | over FlashAttention-2 | worst |",
          "| --- | ---: | ---: |", "| backward, 1 cells | 0.500 | 0.50 |"]),
        ("causal", ["|  |", "| --- |"]),
    ],
)  # fmt: skip
def test_a_table_replaces_the_old_one(tmp_path, mark, lines):
    saved(tmp_path)
    above, below = f"One.\n\n<!-- bench: some.json {mark} -->\n", "\nTwo.\n"
    for old in ("", "\n| old |\n| --- |\n", "| old |\n"):
        new = markdown.updated(f"{above}{old}{below}", tmp_path)
        assert new == "\n".join([above, *lines, below])


def test_a_section_waits_for_its_file(tmp_path):
    section = "Of\n\nbench: some.json 512\n"
    waiting = f"<!-- when some.json is there:\n{section}-->\n"
    text = f"One.\n\n{waiting}\nTwo.\n"
    assert markdown.updated(text, tmp_path) == text
    saved(tmp_path)
    new = markdown.updated(text, tmp_path)
    assert new.startswith("One.\n\nOf\n\n<!-- bench: some.json 512 -->\n\n|")
    assert new.endswith("| 100 · 200 |\n\nTwo.\n")
    assert markdown.updated(new, tmp_path) == new


def test_a_mark_that_nobody_understands_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="sideways"):
        markdown.parse("some.json sideways")


def test_read_shows_and_draws(tmp_path, capsys):
    path = saved(tmp_path)
    options = ["--read", str(path), "--pictures", str(tmp_path / "png")]
    assert bench.main(options) == 0
    said = capsys.readouterr().out
    assert "300.0" in said and "forward / fa2" in said
    drawn = {x.name: x.stat().st_size for x in (tmp_path / "png").iterdir()}
    assert set(drawn) == {
        "some.png", "some_forward.png", "some_backward.png"
    }  # fmt: skip
    assert min(drawn.values()) > 1000


@pytest.mark.parametrize("content", [None, "{", "{}", '{"rows": 1}', "[]"])
def test_a_file_without_figures(tmp_path, capsys, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert bench.main(["--read", str(path)]) == 1
    assert "is no record of bench.py" in capsys.readouterr().err


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(bench.machine, "find_gpu", lambda: "no driver")
    assert bench.main([]) == 1
    assert "found none (no driver). Nothing was measured" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--head-dim", "513"], "--head-dim 513: at most 512"),
        (["--head-dim", "0"], "0 is less than 1"),
        (["--seqlen", "32768"], "--seqlen 32768: at most --tokens"),
        (["--seconds", "0"], "--seconds 0.0: must be above 0"),
        (
            ["--dtype", "float64", "--precision", "tf32x3"],
            "--precision tf32x3: for float32 only",
        ),
        (["--peer", "fa9"], "invalid choice: 'fa9'"),
        (["--kv-heads", "3"], "--kv-heads 3: does not divide 32"),
        (
            ["--memory", "--peer", "mha"],
            "--memory supports only the peers fa2",
        ),
        (
            ["--memory", "--peer", "jax"],
            "--memory supports only the peers fa2",
        ),
        (
            ["--heads", "6", "--kv-heads", "4"],
            "--kv-heads 4: does not divide 6",
        ),
        (["--output", f"{__file__}/x.json"], "cannot write to"),
        (["--output", "."], "--output .: is a folder, not a file"),
        (["--pictures", __file__], "cannot write to"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("keeps", [True, False])
def test_ctrl_c_keeps_results(tmp_path, monkeypatch, capsys, keeps):
    def interrupted(options, record):
        record["rows"] = ["a row"]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.machine, "find_gpu", lambda: None)
    monkeypatch.setattr(bench.machine, "describe", dict)
    monkeypatch.setattr(bench, "measure_speed", interrupted)
    path = tmp_path / "x.json"
    assert bench.main(["--output", str(path)] if keeps else []) == 130
    said = capsys.readouterr().err
    if keeps:
        assert said == f"stopped: results so far are in {path}\n"
        found = json.loads(path.read_text())
        assert (found["rows"], found["complete"]) == (["a row"], False)
    else:
        assert "--output would save" in said


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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    ["--dtype", "float16"], ["--dtype", "float32"], ["--dtype", "float64"],
    ["--precision", "tf32x3"],
], ids=" ".join)  # fmt: skip
def test_a_cell_beside_plain_cupy(tmp_path, options):
    for row in rows_of(tmp_path, *options, "--peer", "cupy"):
        assert set(row["tflops"]) == {"cuflash", "cupy"}
        assert max(row["error"].values()) <= 1
