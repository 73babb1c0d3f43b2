"""scripts/bench.py --decode without a GPU."""

import importlib
import json
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import bench
from bench_parts import decode, decode_report, markdown, peers, report
from cuflash.plans.plan import device_of_arch, plan
from helpers import stand_in
from helpers.compare import assert_all

PARTS = ("reading", "decode_checks", "decode_runners", "decode_speed")
SMALL = decode.DecodeCell(2, 96, 8, 2, 16)


# Cells and figures -----------------------------------------------------------


def test_the_cells():
    assert len(set(decode.CELLS)) == 8
    for cell in decode.CELLS:
        assert cell.heads_q % cell.heads_kv == 0
        assert cell.seqlen_k % 256 == 0  # FlashInfer's pages
    assert str(decode.CELLS[0]) == "1 x 1,024, 32/8, 128"
    assert decode.CELLS[0].kv_bytes == 2 * 1024 * 8 * 128 * 2
    assert decode.CELLS[5].kv_bytes == 1 << 30
    assert decode.CELLS[0].group_size == 4


def test_the_problem_of_a_cell_has_a_plan():
    for cell in decode.CELLS:
        problem = cell.problem
        assert problem.seqlen_q == 1 and not problem.causal
        assert plan(problem, device_of_arch("sm_90a")).launches


def row(cell, read=(1.0, 2.0), **us):
    """A row with (warm, flushed) microseconds by runner."""
    us = {**us, "read": read}
    return {
        **cell.row,
        "us": {
            name: dict(zip(decode.PROTOCOLS, (*times, 50.0), strict=True))
            for name, times in us.items()
        },
        "faults": [],
        "left_out": [],
    }


ROWS = [
    row(decode.CELLS[0], cuflash=(5.0, 8.0), cudnn=(10.0, 9.0),
        fa2=(20.0, 4.0)),
    row(decode.CELLS[4], (100.0, 120.0), cuflash=(125.0, 150.0),
        cudnn=(250.0, 75.0)),
    row(decode.CELLS[5], fa2=(400.0, 410.0)),
]  # fmt: skip


def test_figures_of_a_row():
    first, second, third = ROWS
    assert decode.gb_s(first, "cuflash") == pytest.approx(4194304 / 8e3)
    assert decode.over_best_peer(first, "warm") == 2.0
    assert decode.over_best_peer(first, "flushed") == 0.5
    assert decode.of_read(second, "warm") == 0.8
    assert decode.gb_s(third, "cuflash") is None
    assert decode.over_best_peer(third, "warm") is None
    assert decode.of_read(third, "warm") is None


def test_geometric_means():
    found = decode.means(ROWS)
    best = found["over_best_peer"]
    assert best["warm"] == {
        "cells": 2, "geometric_mean": pytest.approx(2.0), "worst": 2.0
    }  # fmt: skip
    assert best["flushed"]["geometric_mean"] == pytest.approx(0.5)
    assert found["of_read"]["warm"]["worst"] == 0.2
    assert decode.means([ROWS[2]]) == {}


# Report, tables, picture -----------------------------------------------------

RUNNERS = {"cuflash": "cuflash 0", "cudnn": "cuDNN 0", "fa2": "FA2",
           "read": "reading K and V alone"}  # fmt: skip
RECORD = {
    "device": "A fake GPU",
    "date": "2026-01-01",
    "runners": RUNNERS,
    "decode": decode.PROTOCOL,
    "rows": ROWS,
    "means": decode.means(ROWS),
}


def test_a_line():
    text = decode_report.line(ROWS[0], list(RUNNERS))
    assert text.split() == [
        "1", "x", "1,024,", "32/8,", "128", "5.0/8.0/50.0", "10.0/9.0/50.0",
        "20.0/4.0/50.0", "1.0/2.0/50.0", "524", "2.00/0.50", "0.20/0.25",
    ]  # fmt: skip


def test_a_line_without_ours():
    text = decode_report.line(ROWS[2], list(RUNNERS))
    assert text.split()[5:] == [
        "–/–/–", "–/–/–", "400.0/410.0/50.0", "1.0/2.0/50.0", "–", "–/–",
        "–/–",
    ]  # fmt: skip


def test_lines_have_columns():
    heading, *lines = report.lines(RECORD)
    width = heading.index("   us ")
    assert {len(text) for text in lines[:3]} == {width}
    assert lines[3].startswith(
        "over the best peer, warm: geometric mean 2.000 of 2 rows, worst 2.00"
    )
    assert len(lines) == 7


def test_tables(tmp_path):
    report.save(tmp_path / "some.json", RECORD)
    text = "<!-- bench: some.json decode -->\n"
    assert markdown.updated(text, tmp_path).splitlines()[2:] == [
        "| batch x seqlen_k, heads q/kv, head_dim | cuflash | cuDNN | "
        "FlashAttention-2 | reading alone | GB/s | over the best peer | "
        "of reading |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 x 1,024, 32/8, 128 | 5.0 / 8.0 | 10.0 / 9.0 | 20.0 / 4.0 | "
        "1.0 / 2.0 | 524 | 2.00 / 0.50 | 0.20 / 0.25 |",
        "| 16 x 8,192, 32/8, 128 | 125.0 / 150.0 | 250.0 / 75.0 | – / – | "
        "100.0 / 120.0 | 3,579 | 2.00 / 0.50 | 0.80 / 0.80 |",
        "| 128 x 2,048, 32/8, 128 | – / – | – / – | 400.0 / 410.0 | "
        "1.0 / 2.0 | – | – / – | – / – |",
    ]
    text = "<!-- bench: some.json decode means -->\n"
    assert markdown.updated(text, tmp_path).splitlines()[2:] == [
        "| geometric mean over all rows | warm | worst | flushed | worst |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| over the best peer | 2.000 | 2.00 | 0.500 | 0.50 |",
        "| of reading alone | 0.400 | 0.20 | 0.447 | 0.25 |",
    ]


def test_read_shows_and_draws(tmp_path, capsys):
    path = tmp_path / "some.json"
    report.save(path, RECORD)
    options = ["--read", str(path), "--pictures", str(tmp_path / "png")]
    assert bench.main(options) == 0
    said = capsys.readouterr().out
    assert "5.0/8.0/50.0" in said and "geometric mean 2.000" in said
    (picture,) = (tmp_path / "png").iterdir()
    assert picture.name == "some.png" and picture.stat().st_size > 1000


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:]])
def test_a_picture_of_some_rows(rows):
    from bench_parts import decode_pictures

    (axes,) = decode_pictures.draw({**RECORD, "rows": rows}).axes
    drawn = {x.get_label() for x in axes.get_lines()}
    assert "reading K and V alone" in drawn and "cuflash 0" in drawn


# Usage errors ----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--memory"], "no --options, no --memory and no --import-time"),
        (["--options"], "no --options, no --memory and no --import-time"),
        (["--seqlen", "512"], "shapes and masks are fixed"),
        (["--causal", "no"], "shapes and masks are fixed"),
        (["--tokens", "512"], "shapes and masks are fixed"),
        (["--direction", "forward"], "forward only"),
        (["--dtype", "float16"], "bfloat16 only"),
        (["--precision", "tf32x3"], "bfloat16 only"),
        (["--peer", "fa3"], "supports only the peers cudnn, fa2, flashinfer"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--decode", *arguments])
    assert stopped.value.code == 2
    assert f"--decode: {message}" in capsys.readouterr().err


# On NumPy --------------------------------------------------------------------


@pytest.fixture
def on_numpy(monkeypatch):
    """The modules that compute with CuPy, reloaded on NumPy."""
    made = stand_in.with_numpy(monkeypatch)
    package = sys.modules["bench_parts"]
    names = (*PARTS, "timing")
    for name in names:
        monkeypatch.setitem(sys.modules, f"bench_parts.{name}", None)
        del sys.modules[f"bench_parts.{name}"]
        monkeypatch.setattr(package, name, None, raising=False)
    for name in names:
        module = importlib.import_module(f"bench_parts.{name}")
        setattr(made, name, module)
    for module in (made.decode_checks, made.decode_runners):
        monkeypatch.setattr(module, "to_cupy", lambda x: x)
    return made


def results_of(on_numpy, inputs):
    q, k, v, _ = inputs
    return on_numpy.decode_runners.cuflash.forward(q, k, v)


def test_inputs_have_the_shapes_of_the_cell(on_numpy):
    inputs = on_numpy.runners.make_inputs(SMALL, 0)
    assert inputs.q.shape == (2, 1, 8, 16)
    assert inputs.k.shape == inputs.v.shape == (2, 96, 2, 16)
    assert inputs.k.nbytes + inputs.v.nbytes == SMALL.kv_bytes


def test_checked_heads(on_numpy):
    assert on_numpy.decode_checks.heads_of(SMALL) == [
        (0, 0), (0, 3), (0, 7), (1, 0), (1, 3), (1, 4), (1, 7)
    ]  # fmt: skip
    one = decode.DecodeCell(1, 8, 1, 1, 16)
    assert on_numpy.decode_checks.heads_of(one) == [(0, 0)]


def test_right_results_pass(on_numpy):
    inputs = on_numpy.runners.make_inputs(SMALL, 0)
    check = on_numpy.decode_checks.checker(SMALL, inputs)
    assert 0 < check("cuflash", (results_of(on_numpy, inputs),)) <= 1


@pytest.mark.parametrize("spoil", ["nan", "head", "group"])
def test_wrong_results_do_not(on_numpy, spoil):
    inputs = on_numpy.runners.make_inputs(SMALL, 0)
    check = on_numpy.decode_checks.checker(SMALL, inputs)
    out = results_of(on_numpy, inputs).copy()
    if spoil == "nan":
        out[0, 0, 1, 3] = np.nan  # of no checked head
    elif spoil == "head":
        out[1, 0, 7] *= 1.1
    else:  # query head h reads key head h % heads_kv
        q, k, v, _ = inputs
        others = [np.tile(x, (1, 1, 4, 1)) for x in (k, v)]
        out = on_numpy.decode_runners.cuflash.forward(q, *others)
    match = "has NaN" if spoil == "nan" else "times its bound"
    with pytest.raises(on_numpy.checks.WrongResult, match=match):
        check("cuflash", (out,))


def test_the_sum_of_all_words(on_numpy):
    inputs = on_numpy.runners.make_inputs(SMALL, 0)
    check = on_numpy.reading.checker(SMALL, inputs)
    words = np.concatenate([x.reshape(-1).view(np.uint32)
                            for x in (inputs.k, inputs.v)])  # fmt: skip
    sums = np.add.reduceat(words, range(0, len(words), 64),
                           dtype=np.uint32)  # fmt: skip
    assert check("read", (sums,)) == 0
    sums[1] = 0xFFFFFFFF
    with pytest.raises(on_numpy.checks.WrongResult, match="every byte"):
        check("read", (sums,))


def test_the_reading_kernel_fits_its_blocks(on_numpy):
    """Eight blocks an SM have 32 registers a thread; none may spill."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    text = on_numpy.reading.SOURCE.encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"read.cu", 0, [], [])
    flags = [b"-arch=sm_90", b"--ptxas-options=-v"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert b"0 bytes spill stores" in log


@pytest.mark.parametrize("seqlen_k, blocks", [(32, 8), (1 << 16, 1056)])
def test_the_grid_of_the_reading_kernel(
    on_numpy, monkeypatch, seqlen_k, blocks
):
    launched = []

    def kernel(text, name):
        assert f"{name}(" in text
        assert f"__launch_bounds__({on_numpy.reading.THREADS}, " in text
        return lambda grid, block, arguments: launched.append(
            (grid, block, arguments)
        )

    cupy = on_numpy.reading.cupy
    monkeypatch.setattr(cupy, "RawKernel", kernel, raising=False)
    properties = {"multiProcessorCount": 132}
    monkeypatch.setattr(
        cupy, "cuda",
        SimpleNamespace(runtime=SimpleNamespace(
            getDeviceProperties=lambda index: properties
        )), raising=False,
    )  # fmt: skip
    array = np.zeros((1, seqlen_k, 4, 128), ml_dtypes.bfloat16)
    inputs = on_numpy.runners.Inputs(None, array, array, None)
    (sums,) = on_numpy.reading.prepare(None, inputs)()
    ((grid, block, arguments),) = launched
    assert (grid, block) == ((blocks,), (256,))
    assert arguments[2] == array.nbytes // 16
    assert sums.shape == (blocks * 8,) and sums.dtype == np.uint32


# Captures, with fakes --------------------------------------------------------


class FakeCuda:
    """CuPy's streams and pools, and a log of what happens on them."""

    def __init__(self):
        self.log, cuda = [], self

        class Stream:
            def __init__(self, non_blocking):
                assert non_blocking

            def __enter__(self):
                cuda.log.append("enter")

            def __exit__(self, *error):
                cuda.log.append("leave")

            def synchronize(self):
                cuda.log.append("wait")

            def begin_capture(self):
                cuda.log.append("begin")

            def end_capture(self):
                cuda.log.append("end")
                return SimpleNamespace(launch="launch")

        @contextmanager
        def using_allocator(malloc):
            assert malloc == "of the pool"
            cuda.log.append("pool")
            yield
            cuda.log.append("no pool")

        self.Stream, self.using_allocator = Stream, using_allocator
        self.MemoryPool = lambda: SimpleNamespace(malloc="of the pool")
        self.get_current_stream = lambda: SimpleNamespace(
            synchronize=lambda: self.log.append("inputs")
        )


@pytest.mark.parametrize("count", [1, 3])
def test_a_capture_by_cupy(on_numpy, monkeypatch, count):
    cuda, calls = FakeCuda(), iter(range(100))
    runners = on_numpy.decode_runners
    monkeypatch.setattr(runners.cupy, "cuda", cuda, raising=False)

    def call():
        cuda.log.append("call")
        return (next(calls),)

    found = runners.capture_cupy(call, count)
    assert cuda.log == [
        "inputs", "pool", "enter", *["call"] * 3, "wait", "begin",
        *["call"] * count, "end", "leave", "no pool",
    ]  # fmt: skip
    assert found.launch == "launch" and found.results == (2 + count,)


def fake_torch(log):
    """What capture_torch and FlashInfer's runner use of PyTorch."""

    @contextmanager
    def on(stream):
        log.append("enter")
        yield
        log.append("leave")

    @contextmanager
    def graph(graph, stream, capture_error_mode):
        log.append("begin")
        yield
        log.append("end")

    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        current_stream=lambda: None,
        stream=on,
        synchronize=lambda: log.append("wait"),
        CUDAGraph=lambda: SimpleNamespace(replay="replay"),
        graph=graph,
    )
    return torch


@pytest.mark.parametrize("count", [1, 3])
def test_a_capture_by_torch(on_numpy, monkeypatch, count):
    log = []
    monkeypatch.setitem(sys.modules, "torch", fake_torch(log))

    def call():
        log.append("call")
        return ("out",)

    found = on_numpy.decode_runners.capture_torch(call, count)
    assert log == [
        "enter", *["call"] * 3, "leave", "wait", "begin", *["call"] * count,
        "end",
    ]  # fmt: skip
    assert found.launch == "replay" and found.results == ("out",)


# Peers -----------------------------------------------------------------------


def test_without_torch(on_numpy, monkeypatch):
    for name in ("torch", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    found, words = on_numpy.decode_runners.find(None)
    assert not found
    assert [word.partition(" left out: ")[0] for word in words] == [
        "cudnn", "fa2", "flashinfer"
    ]  # fmt: skip


def test_no_peers(on_numpy):
    assert on_numpy.decode_runners.find([]) == ([], [])


def fake_peers(monkeypatch, *there):
    """Make these peers available."""

    def find_peers(names, dtype):
        assert dtype == "bfloat16"
        found = [
            SimpleNamespace(name=name, label=name.upper(), prepare=name,
                            context=nullcontext)
            for name in names
            if name in there
        ]  # fmt: skip
        return found, [f"{x} left out: why" for x in names if x not in there]

    monkeypatch.setattr(peers, "find_peers", find_peers)


def test_torch_without_flashinfer(on_numpy, monkeypatch):
    fake_peers(monkeypatch, "cudnn", "fa2")
    runners = on_numpy.decode_runners
    found, words = runners.find(None)
    assert [x.name for x in found] == ["cudnn", "fa2"]
    assert {x.capture for x in found} == {runners.capture_torch}
    assert [x.prepare for x in found] == ["cudnn", "fa2"]
    assert words == ["flashinfer left out: why"]


class Tensor:
    """A NumPy array with PyTorch's methods."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.dtype, self.device = self.array.dtype, "cuda"

    def view(self, *shape):
        return Tensor(self.array.reshape(shape))

    def clone(self):
        return Tensor(self.array.copy())

    def __getitem__(self, index):
        return Tensor(self.array[index])


def test_flashinfer_reads_the_same_keys_as_pages(on_numpy, monkeypatch):
    """By a fake wrapper that attends to the pages that it is given."""
    fake_peers(monkeypatch, "flashinfer")
    cell = decode.DecodeCell(2, 512, 4, 2, 16)
    made = []

    class Wrapper:
        def __init__(self, workspace, layout, **keywords):
            assert layout == "NHD"
            assert_all(workspace.array, 0, "workspace.array")
            assert keywords.pop("use_cuda_graph")
            assert keywords.pop("use_tensor_cores")
            self.lengths = [len(x.array) for x in keywords.values()]
            made.append(self)

        def plan(self, starts, indices, filled, *numbers, **dtypes):
            self.starts, self.indices = starts.array, indices.array
            self.filled, self.numbers = filled.array, numbers

        def run(self, q, cache):
            rows = []
            for b, one in enumerate(q.array):
                pages = self.indices[self.starts[b] : self.starts[b + 1]]
                k, v = (np.concatenate(x.array[pages]) for x in cache)
                forward = on_numpy.decode_runners.cuflash.forward
                rows.append(forward(one[None], k, v)[0])
            return Tensor(np.stack(rows))

    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    torch = fake_torch([])
    torch.int32, torch.uint8 = np.int32, np.uint8
    torch.from_dlpack = Tensor
    torch.arange = lambda *x, dtype, device: Tensor(np.arange(*x, dtype=dtype))
    torch.zeros = lambda *x, dtype, device: Tensor(np.zeros(*x, dtype))
    torch.full = lambda *x, dtype, device: Tensor(np.full(*x, dtype))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    flash = ModuleType("bench_parts.peers_flash")
    flash.WORKSPACE_BYTES = 64
    monkeypatch.setitem(sys.modules, "bench_parts.peers_flash", flash)

    (runner,), words = on_numpy.decode_runners.find(["flashinfer"])
    assert runner.label == "FLASHINFER, pages of 256" and not words
    inputs = on_numpy.runners.make_inputs(cell, 0)
    (out,) = runner.prepare(cell, inputs)()
    check = on_numpy.decode_checks.checker(cell, inputs)
    assert out.array.shape == cell.shape
    assert check("flashinfer", (out.array,)) <= 1
    (wrapper,) = made
    assert wrapper.lengths == [3, 4, 2]
    assert list(wrapper.filled) == [256, 256]
    assert wrapper.numbers == (4, 2, 16, 256)
    odd = decode.DecodeCell(2, 500, 4, 2, 16)
    with pytest.raises(peers.Absent, match="no multiple of 256"):
        runner.prepare(odd, inputs)


# A whole run, with a fake clock ----------------------------------------------


@pytest.fixture
def gpu(on_numpy, monkeypatch):
    """Fake events and properties; `now` is in milliseconds."""
    gpu = SimpleNamespace(now=0.0, log=[])

    class Event:
        def record(self):
            self.time = gpu.now

        def synchronize(self):
            pass

    class Buffer:
        def fill(self, value):
            gpu.now += 1.0
            gpu.log.append("flush")

    cuda = SimpleNamespace(
        Event=Event,
        get_elapsed_time=lambda a, b: b.time - a.time,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        runtime=SimpleNamespace(
            getDeviceProperties=lambda index: {"l2CacheSize": 50 << 20}
        ),
    )

    def empty(size, dtype):
        assert size == decode.FLUSH_BYTES
        return Buffer()

    speed = on_numpy.decode_speed
    monkeypatch.setattr(speed.cupy, "cuda", cuda, raising=False)
    monkeypatch.setattr(speed.cupy, "empty", empty, raising=False)
    monkeypatch.setattr(speed, "free_memory", lambda: None)
    monkeypatch.setattr(speed, "_plan", lambda cell: "a plan")
    monkeypatch.setattr(
        on_numpy.decode_checks, "poison",
        lambda results: [x.fill(np.nan) for x in results],
    )  # fmt: skip
    return gpu


def runner_of(on_numpy, gpu, name, ms, spoiled=(), checker=None):
    """A runner whose calls take some time; graphs recompute the results.

    `spoiled` are the counts of captured calls whose graph writes nothing.
    """
    runners = on_numpy.decode_runners

    def prepare(cell, inputs):
        def call():
            gpu.now += ms
            gpu.log.append(name)
            return (np.array(results_of(on_numpy, inputs)),)

        return call

    def capture(call, count):
        results = call()

        def launch():
            for _ in range(count):
                (out,) = call()
            if count not in spoiled:
                results[0][...] = out

        return runners.Captured(launch, results, ())

    return runners.DecodeRunner(name, name, prepare, capture)


def measured(on_numpy, monkeypatch, runners):
    ours = {x.name: x for x in runners}
    speed = on_numpy.decode_speed
    monkeypatch.setattr(speed, "OURS", ours.get("cuflash"))
    monkeypatch.setattr(speed, "READING", ours.get("read"))
    return speed.measure(SMALL, runners, 0.0)


def test_a_row(on_numpy, gpu, monkeypatch):
    names = {"cuflash": 0.5, "cudnn": 0.25}
    runners = [
        runner_of(on_numpy, gpu, name, ms) for name, ms in names.items()
    ]
    found = measured(on_numpy, monkeypatch, runners)
    for name, ms in names.items():
        for protocol in decode.PROTOCOLS:
            assert found["us"][name][protocol] == pytest.approx(1e3 * ms)
            assert found["count"][name][protocol] == 20
        assert 0 < found["error"][name] <= 1
    assert not found["faults"] and not found["left_out"]
    assert found["batch"] == 2 and found["kv_bytes"] == SMALL.kv_bytes
    json.dumps(found)
    # Plain calls, which come last, take turns behind a flush each.
    assert gpu.log[-80:] == ["flush", "cuflash", "flush", "cudnn"] * 20


@pytest.mark.parametrize("count", [1, decode.WARM_CALLS])
@pytest.mark.parametrize(
    "name, key", [("cuflash", "faults"), ("fa2", "left_out")]
)
def test_a_wrong_graph_is_not_timed(
    on_numpy, gpu, monkeypatch, count, name, key
):
    runners = [
        runner_of(on_numpy, gpu, name, 0.5, spoiled=[count]),
        runner_of(on_numpy, gpu, "cudnn", 0.5),
    ]
    found = measured(on_numpy, monkeypatch, runners)
    assert set(found["us"]) == {"cudnn"}
    assert found[key] == [f"{name}: {name}, {SMALL}: out has NaN"]


def test_a_peer_that_fails_is_left_out(on_numpy, gpu, monkeypatch):
    def prepare(cell, inputs):
        raise ValueError("not here\nand a stack")

    bad = runner_of(on_numpy, gpu, "flashinfer", 1.0)._replace(prepare=prepare)
    runners = [runner_of(on_numpy, gpu, "cuflash", 0.5), bad]
    found = measured(on_numpy, monkeypatch, runners)
    assert found["left_out"] == ["flashinfer: not here"]
    assert set(found["us"]) == {"cuflash"}


def test_nothing_runs(on_numpy, gpu, monkeypatch):
    runners = [runner_of(on_numpy, gpu, "cuflash", 0.5, spoiled=[1])]
    found = measured(on_numpy, monkeypatch, runners)
    assert found["us"] == {} and len(found["faults"]) == 1


def test_more_seconds_are_more_turns(on_numpy, gpu, monkeypatch):
    runner = runner_of(on_numpy, gpu, "cuflash", 0.5)
    monkeypatch.setattr(on_numpy.decode_speed, "OURS", runner)
    found = on_numpy.decode_speed.measure(SMALL, [runner], 0.06)
    assert found["count"]["cuflash"] == {"warm": 20, "flushed": 40, "call": 40}


def test_bench_writes_a_record(on_numpy, monkeypatch, tmp_path, capsys):
    """main(), with rows that are given."""
    fake_peers(monkeypatch, "cudnn")
    monkeypatch.setattr(bench.machine, "find_gpu", lambda: None)
    monkeypatch.setattr(bench.machine, "describe", lambda: {
        "device": "A fake GPU", "date": "2026-01-01"})  # fmt: skip
    given = iter([*ROWS, *[ROWS[0]] * 5])

    def measure(cell, runners, seconds):
        assert [x.name for x in runners] == ["cuflash", "cudnn", "read"]
        assert cell in decode.CELLS and seconds == 0.08
        return next(given)

    monkeypatch.setattr(on_numpy.decode_speed, "measure", measure)
    path = tmp_path / "some.json"
    options = ["--output", str(path), "--pictures", str(tmp_path)]
    assert bench.main(["--decode", *options]) == 0
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 8 and found["decode"] == decode.PROTOCOL
    assert found["means"]["over_best_peer"]["warm"]["cells"] == 7
    said = capsys.readouterr().out
    assert "fa2 left out: why" in said and "geometric mean" in said
    assert "\n".join(report.lines(found)) in said
    assert (tmp_path / "some.png").exists()


@pytest.mark.gpu
def test_small_cells(monkeypatch, tmp_path):
    cells = [decode.DecodeCell(2, 256, 8, 2, 64), decode.CELLS[0]]
    monkeypatch.setattr(decode, "CELLS", cells)
    path = tmp_path / "some.json"
    options = ["--peer", "--seconds", "0.001", "--output", str(path)]
    assert bench.main(["--decode", *options]) == 0
    for found in json.loads(path.read_text())["rows"]:
        assert not found["faults"] and found["error"]["cuflash"] <= 1
        for name in ("cuflash", "read"):
            assert min(found["us"][name].values()) > 0
