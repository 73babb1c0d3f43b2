"""scripts/bench.py --options without a GPU."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import bench
import cuflash.backends.numpy.attention
from bench_parts import compiling, markdown, option_cells, report
from bench_parts.option_cells import OPTIONS
from cuflash.plans.plan import device_of_arch
from cuflash.plans.tiles import Tile
from cuflash.reference import masks
from helpers import stand_in
from helpers.compare import assert_all

of_each_option = pytest.mark.parametrize("option", OPTIONS)
in_both_directions = pytest.mark.parametrize(
    "direction", ["forward", "backward"]
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make windows, documents and lengths small."""
    monkeypatch.setattr(option_cells, "WINDOW", (7, 0))
    monkeypatch.setattr(option_cells, "DOCUMENTS", 3)
    monkeypatch.setattr(option_cells, "SHORT", 4)
    monkeypatch.setattr(option_cells, "LONG", 48)


def cells_of(option, direction="forward", dtype="float32", tokens=64,
             head_dim=16, causal=True):  # fmt: skip
    """Two batches, 4 query and 2 key heads; or one packed batch."""
    return option_cells.grid(
        [option], [direction], dtype, [head_dim], [causal], [tokens // 2],
        tokens, width=4 * head_dim, kv_heads=2,
    )  # fmt: skip


# What is timed ---------------------------------------------------------------


def visible_by_pairs(cell):
    """Return the visible pairs of all tokens, batch after batch."""
    n = cell.seqlen
    see = np.zeros((cell.batch * n, cell.batch * n), bool)
    for batch, own in enumerate(visible(cell)):
        see[batch * n : (batch + 1) * n, batch * n : (batch + 1) * n] = own
    return see


def visible_pairs(cell):
    """Counted one by one."""
    return visible(cell).sum()


def visible(cell):
    """Which query of a batch sees which key."""
    given, n = cell.keywords(np, np.float32), cell.seqlen
    see = masks.visible(
        n, n, causal=cell.causal, window=given.get("window", (None, None))
    )
    see = np.broadcast_to(see, (cell.batch, n, n))
    if cell.option == "segment_ids":
        ids = given["segment_ids_q"]
        see = see & masks.same_segment(ids, ids)
    if cell.option == "packed":
        lengths = np.diff(given["cu_seqlens_q"])
        ids = np.repeat(np.arange(len(lengths)), lengths)
        see = see & masks.same_segment(ids, ids)
    return see


@of_each_option
@pytest.mark.parametrize("tokens", [2, 14, 16, 64, 74])
def test_pairs_are_those_of_the_mask(option, tokens):
    (cell,) = cells_of(option, tokens=tokens)
    assert cell.pairs == visible_pairs(cell)
    assert cell.plain.pairs == visible_pairs(cell.plain)
    assert cell.plain.pairs >= cell.pairs or option == "packed"


@of_each_option
@pytest.mark.parametrize("blocks", [(1, 1), (4, 8), (16, 5)])
def test_visited_pairs_are_those_of_tiles(option, blocks):
    """With tiles of one pair, they are the visible pairs."""
    (cell,) = cells_of(option, causal=option == "sink")
    tile = Tile(*blocks, 1)
    found = cell.visited_pairs(tile)
    sizes = [cell.seqlen] * cell.batch
    if option == "packed":
        sizes = option_cells.lengths(cell.seqlen)
    see, ends = visible_by_pairs(cell), np.cumsum([0, *sizes])
    want = 0
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        own = see[start:end, start:end]
        for i in range(0, end - start, tile.block_q):
            for j in range(0, end - start, tile.block_k):
                seen = own[i : i + tile.block_q, j : j + tile.block_k].any()
                want += seen * tile.block_q * tile.block_k
    assert found == want


def test_flops_are_those_of_the_pairs():
    (cell,) = cells_of("window")
    assert cell.flops == 4 * 16 * 4 * cell.pairs
    (backward,) = cells_of("window", "backward")
    assert backward.flops == 2.5 * cell.flops


def test_the_default_cells(monkeypatch):
    monkeypatch.undo()
    asked = bench.parse(["--options"])
    assert asked.options == list(OPTIONS) and asked.head_dim == [128]
    assert asked.causal == "no" and asked.seqlen == [4096, 16384]
    grid = option_cells.grid(
        asked.options, asked.direction, asked.dtype, asked.head_dim, [False],
        asked.seqlen, asked.tokens, asked.width,
    )  # fmt: skip
    assert len(grid) == len(set(grid)) == 2 * (6 * 2 + 2)
    for cell in grid:
        long = cell.option == "window_long"
        assert cell.batch * cell.seqlen == (65536 if long else 16384)
        assert cell.shape[2:] == (16, 128)
        assert cell.causal == (cell.option in ("window", "packed") or long)


def test_documents_are_sorted_and_of_unequal_lengths(monkeypatch):
    monkeypatch.undo()
    (cell,) = cells_of("segment_ids", tokens=8192)
    ids = cell.keywords(np, None)["segment_ids_q"]
    assert ids.shape == (2, 4096) and ids.dtype == np.int32
    for row in ids:
        assert_all(np.diff(row) >= 0, True, "np.diff(row) >= 0")
        _, lengths = np.unique(row, return_counts=True)
        assert len(set(lengths)) == 8


def test_packed_sequences_beside_as_many_pairs(monkeypatch):
    monkeypatch.undo()
    (cell,) = cells_of("packed", tokens=16384)
    assert option_cells.lengths(16384) == [64] * 64 + [8192] + [64] * 64
    assert (cell.plain.batch, cell.plain.seqlen) == (4, 4096)
    assert cell.plain.pairs == pytest.approx(cell.pairs, rel=0.01)


# Right first -----------------------------------------------------------------


@pytest.fixture
def on_numpy(monkeypatch):
    # It imports CuPy, and may have done so already.
    gpu = SimpleNamespace(device=lambda _: device_of_arch("sm_90a"))
    monkeypatch.setitem(sys.modules, "cuflash.backends.cupy", gpu)
    monkeypatch.setattr(cuflash.backends, "cupy", gpu, raising=False)
    known = stand_in.MODULES
    monkeypatch.setattr(
        stand_in,
        "MODULES",
        (*known, "bench_parts.timing", "bench_parts.speed"),
    )
    return stand_in.with_numpy(monkeypatch)


def results_of(on_numpy, cell, inputs):
    return on_numpy.runners.OURS.prepare(cell, inputs)()


@in_both_directions
@of_each_option
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_right_results_pass(on_numpy, option, direction, dtype):
    (cell,) = cells_of(option, direction, dtype)
    inputs = on_numpy.runners.make_inputs(cell, seed=0)
    checker = on_numpy.checks.Checker(cell, inputs)
    results = results_of(on_numpy, cell, inputs)
    assert 0 < checker.check("cuflash", results) <= 1


@in_both_directions
@of_each_option
def test_results_without_the_option_do_not(
    on_numpy, monkeypatch, option, direction
):
    """In the timed dtype, with the timed mask and values."""
    monkeypatch.setattr(on_numpy.checks, "to_cupy", lambda x: x)
    (cell,) = cells_of(option, direction, "bfloat16", 512, 128, False)
    inputs = on_numpy.runners.make_inputs(cell, seed=0)
    without = replace(cell, option=option_cells.PLAIN)
    results = results_of(on_numpy, without, inputs)
    with pytest.raises(on_numpy.checks.WrongResult, match="times its"):
        on_numpy.checks.Checker(cell, inputs).check("cuflash", results)


@in_both_directions
@of_each_option
@pytest.mark.parametrize("tokens", [14, 64])
def test_a_problem_is_that_of_the_call(
    on_numpy, monkeypatch, option, direction, tokens
):
    calls, known = [], getattr(cuflash.backends.numpy.attention, direction)
    monkeypatch.setattr(
        cuflash.backends.numpy.attention,
        direction,
        lambda x: calls.append(x) or known(x),
    )
    (cell,) = cells_of(option, direction, tokens=tokens)
    inputs = on_numpy.runners.make_inputs(cell, seed=0)
    results_of(on_numpy, cell, inputs)
    assert calls[-1].problem == compiling.problem_of(cell, direction)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_cell_has_kernels(monkeypatch, arch):
    monkeypatch.undo()
    grid = option_cells.grid(
        OPTIONS, ["backward"], "bfloat16", [64, 128, 256], [False, True],
        [512, 16384], 16384, 2048,
    )  # fmt: skip
    device = device_of_arch(arch)
    for cell in [*grid, *(cell.plain for cell in grid)]:
        files = {x.file for x in compiling.kernels_of([cell], device)}
        assert any("/forward" in x for x in files)
        assert any("/backward" in x for x in files)


# The command -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["window", "--peer", "fa2"], "--options: no --peer"),
        (["--peer"], "--options: no --peer"),
        (["--memory"], "--options: no --memory"),
        (["--import-time"], "--options: no --memory and no --import-time"),
        (["--pictures", "x"], "--options: no --pictures"),
        (["--precision", "tf32x3"], "--options: no --precision"),
        (["--dtype", "float64"], "--options: no float64"),
        (["packed", "window_long", "--seqlen", "512"], "no --seqlen, packed"),
        (["window_long", "--tokens", "512"], "no --tokens, window_long"),
        (["window", "packed", "--causal", "no"], "no --causal, window, pack"),
        (["dropout"], "invalid choice: 'dropout'"),
        (["sink", "--seqlen", "32768"], "--seqlen 32768: at most --tokens"),
    ],
)
def test_arguments_that_conflict_with_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--options", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["window", "packed", "--seqlen", "512"], ["packed", "--tokens", "512"],
     ["softcap", "window", "--causal", "both", "--kv-heads", "4"]],
)  # fmt: skip
def test_arguments_that_go_with_options(arguments):
    assert bench.parse(["--options", *arguments]).options


@pytest.fixture
def without_gpu(on_numpy, monkeypatch):
    """Replace everything that needs a GPU; only the times differ."""
    speed = on_numpy.speed
    properties = {"l2CacheSize": 1 << 20}
    fake = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceProperties=lambda _: properties)
    )
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(speed.cupy, "cuda", fake, raising=False)
    monkeypatch.setattr(
        speed.cupy, "get_default_memory_pool", lambda: pool, raising=False
    )
    ms = {"cuflash": 1.0, "plain": 3.0}
    times = {x: on_numpy.timing.Timing(y, 0.01, 9) for x, y in ms.items()}
    monkeypatch.setattr(
        speed, "alternate", lambda found, _: {x: times[x] for x in found}
    )
    monkeypatch.setattr("bench_parts.compiling.compile_all", lambda *_: None)
    monkeypatch.setattr(bench.machine, "find_gpu", lambda: None)
    monkeypatch.setattr(
        bench.machine, "describe", lambda: {"device": "A fake GPU"}
    )
    return on_numpy


def bench_to(path, *options):
    """Bench calls of a few tokens; return the status and the record."""
    sizes = ["--head-dim", "16", "--width", "32", "--tokens", "64",
             "--seqlen", "32", "--dtype", "float16"]  # fmt: skip
    status = bench.main(["--options", *options, *sizes, "--output", str(path)])
    return status, json.loads(path.read_text())


def test_all_of_them(without_gpu, tmp_path, capsys):
    path = tmp_path / "options.json"
    status, record = bench_to(path)
    assert status == 0 and record["options"] == list(OPTIONS)
    assert set(record["runners"]) == {"cuflash", "plain"}
    assert len(record["rows"]) == 16 and not record["faults"]
    for row in record["rows"]:
        assert row["ms"] == {"cuflash": 1.0, "plain": 3.0}
        assert 0 < row["error"]["plain"] <= 1
        speed = row["tflops"]["cuflash"] / row["tflops"]["plain"]
        assert report.beside_plain(row).of_a_pair == pytest.approx(speed)
    said = capsys.readouterr().out
    assert bench.main(["--read", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 17 and shown in said


@pytest.mark.parametrize(
    ("wrong", "right"), [("cuflash", "plain"), ("plain", "cuflash")]
)
def test_a_wrong_result_is_not_timed(
    without_gpu, monkeypatch, tmp_path, wrong, right
):
    forward = cuflash.forward

    def of_one_kind(*arrays, window=None, **options):
        out, lse = forward(*arrays, window=window, **options)
        return out + ((window is None) == (wrong == "plain")), lse

    monkeypatch.setattr(cuflash, "forward", of_one_kind)
    status, record = bench_to(
        tmp_path / "x.json", "window", "--direction", "forward"
    )
    assert status == 1 and list(record["rows"][0]["ms"]) == [right]
    (fault,) = record["faults"]
    assert fault.startswith(f"{wrong}: {wrong}, ") and "off by" in fault


# Tables ----------------------------------------------------------------------


def row(direction, option, **more):
    return {
        "direction": direction, "option": option, "head_dim": 128,
        "causal": option == "window", "seqlen": 4096, "pairs": 100,
        "plain_pairs": 400, "visited": 160, "plain_visited": 400,
        "ms": {"cuflash": 0.5, "plain": 1.0},
        "spread": {"cuflash": 0.01, "plain": 0.02}, **more,
    }  # fmt: skip


def test_a_row_in_the_terminal():
    assert report.option_line(row("forward", "window")).split() == [
        "forward", "window", "128", "causal", "4096", "0.500", "1.0%",
        "1.000", "2.0%", "2.00", "25.0%", "0.50", "0.80",
    ]  # fmt: skip


def test_a_row_without_a_time_has_dashes():
    text = report.option_line(row("forward", "sink", ms={"plain": 1.0}))
    assert text.split() == ["forward", "sink", "128", "full", "4096", "-",
                            "1.000", "2.0%", "-", "25.0%", "-",
                            "-"]  # fmt: skip
    assert len(text) == len(report.option_heading())


@pytest.mark.parametrize(
    ("mark", "lines"),
    [
        ("forward",
         ["| forward | seqlen | ms | without it | times as fast | pairs seen |"
          " speed per pair | per visited pair |",
          "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
          "| `window`, causal | 4,096 | 0.500 | 1.000 | 2.00 | 25.0% | 0.50 |"
          " 0.80 |",
          "| `sink` | 4,096 | – | 1.000 | – | 25.0% | – | – |"]),
        ("causal",
         ["|  | seqlen | ms | without it | times as fast | pairs seen |"
          " speed per pair | per visited pair |",
          "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
          "| forward, `window`, causal | 4,096 | 0.500 | 1.000 | 2.00 |"
          " 25.0% | 0.50 | 0.80 |",
          "| backward, `window`, causal | 4,096 | 0.500 | 1.000 | 2.00 |"
          " 25.0% | 0.50 | 0.80 |"]),
    ],
)  # fmt: skip
def test_a_table_of_the_docs(tmp_path, mark, lines):
    rows = [row("forward", "window"), row("backward", "window"),
            row("forward", "sink", ms={"plain": 1.0})]  # fmt: skip
    report.save(tmp_path / "some.json", {"options": [], "rows": rows})
    text = f"One.\n\n<!-- bench: some.json options {mark} -->\n"
    new = markdown.updated(text, tmp_path)
    assert new == "\n".join([text, *lines, ""])
    assert markdown.updated(new, tmp_path) == new


@pytest.mark.gpu
def test_options_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(option_cells, "LONG", 2048)
    path = tmp_path / "options.json"
    sizes = ["--tokens", "2048", "--seqlen", "1024", "--width", "256"]
    command = ["--options", *sizes, "--seconds", "0.01"]
    assert bench.main([*command, "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 16
    assert all(set(x["ms"]) == {"cuflash", "plain"} for x in rows)
