"""scripts/sweep_blocks.py with a fake GPU."""

import errno
import json
import os
from dataclasses import replace
from itertools import islice

import pytest

import cuflash
import sweep_blocks
from bench_parts import report
from cuflash import folders
from cuflash.plans import nearest_tiles, tiles
from cuflash.plans.plan import device_of_arch, legal_tiles, plan
from cuflash.request.problem import Problem
from helpers import fake_gpu
from helpers.tables import entry, write_table
from sweep_parts import forcing, measure, predict, space, tables, worker
from sweep_parts.meter import Meter
from sweep_parts.record import Record

# Four tiles of a kernel that compiles in a tenth of a second.
SMALL = ["--family", "simt", "--dtype", "float32", "--head-dim", "16",
         "--direction", "forward", "--block-q", "32"]  # fmt: skip
GROUP = space.Group("simt", "forward", "float32", 16, True)


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    """Put this machine's tables in the test's folder."""
    folder = tmp_path / "tables"
    monkeypatch.setattr(folders, "tile_tables", lambda: folder)
    forget()
    yield folder
    forget()


def forget():
    """Clear the caches of tables and plans."""
    for known in (tiles.entries, nearest_tiles._tuned, plan):
        known.cache_clear()


@pytest.fixture
def drawn():
    """Let a sweep draw its pictures: a third of its time."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        nothing = "sweep_parts.pictures.write"
        monkeypatch.setattr(nothing, lambda *folder_and_record: [])


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


def sweep(output, *options, gpu=fake_gpu.FakeGpu):
    """Run a small sweep of two lengths; return the exit status."""
    given = [*SMALL, "--causal", "--seqlen", "512", "1024", "--jobs", "1",
             "--output", str(output), *options]  # fmt: skip
    return sweep_blocks.main(given, gpu)


def recorded(output):
    return Record.read(output / "sm_80.measured.json")


# What is swept ---------------------------------------------------------------


def test_a_group_has_every_legal_tile_once():
    group = space.Group("sm80", "backward", "bfloat16", 256, True)
    device = device_of_arch("sm_80")
    found = space.choices(group, device)
    assert len({x.kernels for x in found}) == len(found)
    assert len({x.digest for x in found}) == len(found)
    today = plan(group.problem(1, 1024, 1), device, "sm80")
    assert found[0].kernels == today.kernels
    assert {x.tile.num_stages for x in found} == {1, 2} or len(found) > 10
    assert {x.tile.ptxas_level for x in found} == {1, 3}


def test_a_digest_is_of_all_that_is_compiled(monkeypatch):
    (kernel,) = space.choices(GROUP, device_of_arch("sm_80"))[0].kernels
    other = replace(kernel, ptxas_level=1)
    names = {
        space.digest((k,), arch)
        for k in (kernel, other)
        for arch in ("sm_80", "sm_86")
    }
    assert len(names) == 4


def test_families_are_those_that_the_device_has():
    def families(arch, wanted):
        found = space.groups(
            wanted, ["forward"], "bfloat16", [64], [True], device_of_arch(arch)
        )
        return [group.family for group in found]

    assert families("sm_90a", None) == ["sm90"]
    assert families("sm_90a", ["sm90", "sm80", "fma"]) == ["sm90", "sm80"]
    assert families("sm_90a", ["simt"]) == ["simt"]
    assert families("sm_80", None) == ["sm80"]
    assert families("sm_80", ["sm90"]) == []


@pytest.mark.parametrize(
    ("wanted", "dtype", "arch", "expected"),
    [
        (None, "float32", "sm_90a", ["fma"]),
        (None, "float64", "sm_90a", ["mma8_float64"]),
        (None, "float64", "sm_86", ["simt"]),
        (["mma8_float32", "fma", "simt"], "float32", "sm_80",
         ["mma8_float32", "fma", "simt"]),
        (["mma8_float32", "fma"], "float64", "sm_90a", []),
    ],
)  # fmt: skip
def test_families_of_wide_dtypes(wanted, dtype, arch, expected):
    found = space.groups(
        wanted, ["backward"], dtype, [64], [True], device_of_arch(arch)
    )
    assert [group.family for group in found] == expected


@pytest.mark.parametrize(
    ("family", "dtype", "precision"),
    [("fma", "float32", None), ("mma8_float64", "float64", None),
     ("mma8_float32", "float32", "tf32x3")],
)  # fmt: skip
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wide_group_runs_on_its_family(family, dtype, precision, direction):
    """Selected only by dtype and precision, in cells and in checks."""
    group = space.Group(family, direction, dtype, 64, True)
    cells = group.cells()
    shapes = space.check_shapes(group)
    assert {x.precision for x in (*cells, *shapes)} == {precision}
    device = device_of_arch("sm_90a")
    problems = [group.problem(x.batch, x.seqlen, x.heads) for x in cells]
    problems += [shape.problem(direction) for shape in shapes]
    assert {plan(x, device).family for x in problems} == {family}
    found = space.choices(group, device)
    assert len(found) > 10 and all(x.main(family) for x in found)


def test_calls_of_each_family_take_some_milliseconds():
    """At the measured speeds of the kernels, in TFLOP/s."""
    for family, dtype, tflops in (
        ("sm90", "bfloat16", 500), ("fma", "float32", 35),
        ("mma8_float32", "float32", 45), ("mma8_float64", "float64", 35),
        ("simt", "float32", 1),
    ):  # fmt: skip
        cells = space.Group(family, "backward", dtype, 64, False).cells()
        assert all(x.flops / tflops / 1e9 < 25 for x in cells)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [([], "bfloat16"), (["--family", "sm80"], "bfloat16"),
     (["--family", "mma8_float32"], "float32"),
     (["--family", "mma8_float64"], "float64"),
     (["--family", "simt", "--dtype", "float64"], "float64")],
)  # fmt: skip
def test_the_dtype_follows_from_the_family(options, dtype):
    assert sweep_blocks.parse(options).dtype == dtype


def test_predicted_traffic_is_the_references():
    """Twice the keys per tile halve the passes over the queries."""
    (cell,) = space.Group("sm80", "backward", "float16", 64, False).cells(
        [1024], 1024, 64
    )
    small, large = (
        predict.traffic_bytes(cell, "sm80", tiles.Tile(64, k, 4))
        for k in (64, 128)
    )
    # Sixteen times, or eight times: q, dout and dq in and out, lse, delta.
    n, d = 1024, 64
    assert small - large == 2 * 8 * (4 * n * d + 2 * n)


def test_traffic_is_of_as_many_elements_in_all_dtypes():
    tile = tiles.Tile(64, 32, 4)
    found = []
    for family, dtype in (
        ("sm80", "float16"), ("fma", "float32"), ("mma8_float32", "float32"),
        ("mma8_float64", "float64"),
    ):  # fmt: skip
        group = space.Group(family, "backward", dtype, 64, True)
        (cell,) = group.cells([1024], 1024, 64)
        found.append(predict.traffic_bytes(cell, family, tile))
    assert found == [found[0], 2 * found[0], 2 * found[0], 4 * found[0]]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_forced_tile_is_that_of_its_direction_alone(direction):
    device = device_of_arch("sm_80")
    tile = tiles.Tile(64, 32, 4, ptxas_level=3)
    if direction == "backward":
        tile = replace(tile, score_warps_q=2, gradient_warps_k=2)
    wanted = forcing.Forced("sm80", direction, tile)
    for other in ("forward", "backward"):
        group = space.Group("sm80", other, "float16", 64, True)
        decided = forcing._plan(group.problem(1, 99, 1), device, wanted)
        assert (decided.tile == tile) == (other == direction)


# A sweep ---------------------------------------------------------------------


def test_a_sweep_finds_the_best_tile_and_plans_take_it(
    output, own_tables, capsys, drawn
):
    assert sweep(output) == 0
    said = capsys.readouterr().out
    assert "2 cells, 2 with another tile than today" in said
    found = tiles.read_table(own_tables / "sm_80.json")
    assert [x.seqlen for x in found] == [512, 1024]
    assert {x.tile.block_k for x in found} == {16}
    assert found[0].measured["device"] == "A fake GPU"
    assert (found[0].gpu, found[0].bandwidth) == ("A fake GPU", 1555)
    assert set(found[0].measured) == {
        "device", "driver", "nvrtc", "date", "ms", "spread", "tflops"
    }  # fmt: skip
    forget()
    problem = GROUP.problem(1, 700, 3)
    decided = plan(problem, device_of_arch("sm_80"), GROUP.family)
    assert decided.tile == found[0].tile
    assert (output / "simt_forward_float32_d16.png").stat().st_size > 1000


def test_calls_with_precision_take_their_own_tiles(output, own_tables):
    options = [
        "--family",
        "mma8_float32",
        "--block-q",
        "16",
        "--block-k",
        "16",
    ]
    assert sweep(output, *options, "--dtype", "float32") == 0
    found = tiles.read_table(own_tables / "sm_80.json")
    assert {(x.family, x.dtype) for x in found} == {
        ("mma8_float32", "float32")
    }
    assert {x["precision"] for x in recorded(output).cells} == {"tf32x3"}
    forget()
    problem = GROUP.problem(1, 700, 3)
    with_parts = replace(problem, precision="tf32x3")
    device = device_of_arch("sm_80")
    assert plan(with_parts, device).tile == found[0].tile
    assert plan(problem, device).family == "fma"


def test_the_same_command_measures_nothing_twice(output, own_tables, capsys):
    assert sweep(output) == 0
    assert sweep(output, gpu=fake_gpu.NothingToDo) == 0
    assert "2 cells are in" in capsys.readouterr().out


def test_a_longer_sweep_resumes(output, own_tables):
    assert sweep(output) == 0
    assert sweep(output, "--seqlen", "512", "1024", "2048") == 0
    assert [x["seqlen"] for x in recorded(output).cells] == [512, 1024, 2048]


def test_wrong_tiles_are_left_out_with_a_word(
    output, own_tables, capsys, monkeypatch
):
    monkeypatch.setattr(measure, "CHECK_SECONDS", 1.0)
    monkeypatch.setattr(worker, "FIRST_SECONDS", 0.0)
    assert sweep(output, gpu=fake_gpu.WrongTiles) == 0
    said = capsys.readouterr().out
    assert "no end after 1 s" in said
    assert "the process ended, 7" in said
    assert "ValueError: out is off by 3\n" in said
    (found, _) = tiles.read_table(own_tables / "sm_80.json")
    assert found.tile.block_k == 4


def test_ctrl_c_keeps_measurements(output, own_tables, monkeypatch, capsys):
    def ask(self, seconds, method, *arguments):
        if method == "time" and arguments[0].seqlen == 1024:
            raise KeyboardInterrupt
        return known(self, seconds, method, *arguments)

    known = worker.Worker.ask
    monkeypatch.setattr(worker.Worker, "ask", ask)
    assert sweep(output) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert [x["seqlen"] for x in recorded(output).cells] == [512]
    assert len(tiles.read_table(own_tables / "sm_80.json")) == 1


def test_a_budget_that_is_too_small(output, own_tables, capsys):
    assert sweep(output, "--budget", "0.001s") == 1
    said = capsys.readouterr().out
    assert "4 of 4 tiles, for want of time" in said
    assert "no cell was measured completely" in said


def test_a_full_disk_loses_nothing(output, own_tables, monkeypatch, tmp_path):
    def replace_file(source, target):
        if str(target).startswith(str(output)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return known(source, target)

    known = os.replace
    monkeypatch.setattr(report.os, "replace", replace_file)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert sweep(output) == 0
    assert len(Record.read(tmp_path / "sm_80.measured.json").cells) == 2
    assert not list(output.glob("*.part"))


def test_no_gpu(output, capsys):
    assert sweep(output, gpu=fake_gpu.NoGpuHere) == 1
    said = capsys.readouterr().err
    assert "found none (no driver). Nothing was measured." in said
    assert "--dry-run" in said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"driver": "9.9"}, "is of another driver"),
        ({"device": "Z", "nvrtc": "1.0"}, "is of another device and nvrtc"),
    ],
)
def test_a_record_of_another_machine_is_moved_aside(
    output, own_tables, capsys, change, word
):
    sweep(output)
    path = output / "sm_80.measured.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps({**content, "machine": {**content["machine"], **change}})
    )
    assert sweep(output) == 0
    assert word in capsys.readouterr().out
    assert (output / "sm_80.measured.json.old").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"format": "x"}', "{}"])
def test_a_broken_record_is_moved_aside(output, own_tables, capsys, content):
    output.mkdir()
    (output / "sm_80.measured.json").write_text(content)
    assert sweep(output) == 0
    assert "is no record of a sweep" in capsys.readouterr().out
    assert (output / "sm_80.measured.json.old").read_text() == content


# Tables ----------------------------------------------------------------------


def test_lines_for_other_problems_stay(output, own_tables):
    other = entry(tile={"block_q": 64, "block_k": 16, "num_warps": 4})
    path = write_table(own_tables, "sm_80", other)
    for _ in range(2):  # the second time in place of the first's
        assert sweep(output) == 0
        found = tiles.read_table(path)
        assert [x.family for x in found] == ["simt", "simt", "sm80"]
        assert found[2].tile.block_k == 16 and found[2].measured is None


def line_of(record, **changes):
    """The record's only line, with other fields; None removes one."""
    (line,) = tables.lines(record)
    return {k: v for k, v in {**line, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    ("gpu", "device", "stays"),
    [("A fake GPU", "A fake GPU", False), (None, "A fake GPU", False),
     ("B", "B", True), (None, "B", True)],
)  # fmt: skip
def test_lines_for_other_gpus_stay(tmp_path, gpu, device, stays):
    """Lines of older sweeps name a GPU only among what they measured."""
    record = record_of((16, 1.0))
    measured = {"device": device, "ms": 2.0}
    old = line_of(record, gpu=gpu, bandwidth=None, measured=measured)
    write_table(tmp_path, "sm_80", old)
    path = tables.merge(tmp_path, record)
    found = {x.measured["ms"] for x in tiles.read_table(path)}
    assert found == ({1.0, 2.0} if stays else {1.0})


@pytest.mark.parametrize("name", ["A fake GPU", "B"])
def test_a_table_keeps_its_gpu(tmp_path, name):
    """Lines for that GPU come first and do not name it."""
    path = write_table(tmp_path, "sm_80", entry(gpu=None), entry())
    head = {"gpu": name, "bandwidth": 1555, "note": "by hand"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **head}))
    before = tiles.read_table(path)
    tables.merge(tmp_path, record_of((16, 1.0)))
    table = json.loads(path.read_text())
    assert {k: table[k] for k in head} == head
    assert ("gpu" in table["tiles"][0]) == (name == "B")
    new, *kept = tiles.read_table(path)
    assert set(kept) == set(before) and new.gpu == "A fake GPU"


def test_a_broken_table_is_moved_aside(output, own_tables, capsys):
    own_tables.mkdir()
    (own_tables / "sm_80.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="it is ignored"):
        assert sweep(output) == 0
    assert "is not a tile table" in capsys.readouterr().out
    assert (own_tables / "sm_80.json.broken").read_text() == "{"
    assert len(tiles.read_table(own_tables / "sm_80.json")) == 2


def test_pictures_that_cannot_be_written_spoil_no_table(
    output, own_tables, capsys, drawn
):
    assert sweep(output) == 0
    (own_tables / "sm_80.json").unlink()
    for picture in output.glob("*.png"):
        picture.unlink()
        picture.mkdir()
    assert sweep(output, "--measured") == 0
    assert "no pictures: " in capsys.readouterr().out
    assert len(tiles.read_table(own_tables / "sm_80.json")) == 2


def test_install_writes_into_the_package(
    output, own_tables, tmp_path, monkeypatch
):
    package = tmp_path / "package"
    monkeypatch.setattr(tiles, "TABLES", package)
    assert sweep(output, "--install") == 0
    assert len(tiles.read_table(package / "sm_80.json")) == 2
    assert not own_tables.exists()


def record_of(*times):
    """Return a record of one cell with (block_k, ms); 16 is today's."""
    record = Record("nowhere", {
        **fake_gpu.MACHINE,
        "plans_see": {"arch": "sm_80", "num_sms": 108,
                      "name": "A fake GPU", "bandwidth": 1555},
    })  # fmt: skip
    (cell,) = GROUP.cells([512], 512, 16)
    rows = [
        {"tile": {"block_q": 32, "block_k": k, "num_warps": 4}, "digest": k,
         "ms": ms, "spread": 0.01, "count": 9}
        for k, ms in times
    ]  # fmt: skip
    record.add(GROUP, cell, tiles.Tile(32, 16, 4), rows, "2026-01-01")
    return record


def test_a_gain_within_the_noise_changes_nothing():
    (same,) = tables.verdicts(record_of((16, 1.004), (32, 1.0)))
    assert same.best == same.today and same.gain == 0
    (other,) = tables.verdicts(record_of((16, 1.1), (32, 1.0)))
    assert other.best.block_k == 32 and other.gain == pytest.approx(0.1)


def test_compare_shows_the_record(output, own_tables, capsys):
    sweep(output)
    capsys.readouterr()
    assert sweep(output, "--compare") == 0
    said = capsys.readouterr().out
    assert said.count("simt forward float32 d 16 causal") == 2
    assert "2 cells" in said


def test_compare_with_another_table(output, tmp_path, capsys):
    path = write_table(tmp_path / "new", "sm_80", entry(seqlen=512))
    assert sweep(output, "--compare", str(path)) == 0
    assert "64x64 4w O1" in capsys.readouterr().out


def test_nothing_to_compare(output, capsys):
    assert sweep(output, "--compare") == 1
    assert "no measurements yet in" in capsys.readouterr().err


# Without a GPU ---------------------------------------------------------------


def test_a_dry_run(output, capsys):
    assert sweep(output, "--dry-run", "--arch", "sm_86") == 0
    said = capsys.readouterr().out
    assert "registers" in said and "32x16 4w" in said
    found = json.loads((output / "sm_86.dry.json").read_text())
    rows = found["rows"]
    assert len(rows) == 4 and found["complete"]
    for row in rows:
        assert 0 < row["registers"] < 256
        assert 0 < row["occupancy"] <= 1 <= row["blocks_per_sm"]
        assert row["traffic_bytes"] > 0


@pytest.mark.parametrize("count", [0, 2])
def test_a_dry_run_that_is_stopped_keeps_its_rows(
    output, monkeypatch, capsys, count
):
    def step(meter, number=1, what=None):
        meter.done += number
        if meter.done > count:
            raise KeyboardInterrupt

    monkeypatch.setattr(Meter, "step", step)
    assert sweep(output, "--dry-run", "--arch", "sm_86") == 130
    path, said = output / "sm_86.dry.json", capsys.readouterr().err
    if count:
        assert said == f"stopped: results so far are in {path}\n"
        found = json.loads(path.read_text())
        assert len(found["rows"]) == count and not found["complete"]
    else:
        assert said == "stopped: nothing was compiled\n"
        assert not path.exists()


@pytest.mark.parametrize("family", ["fma", "mma8_float32", "mma8_float64"])
def test_a_dry_run_of_a_wide_family(output, capsys, family):
    options = ["--dry-run", "--arch", "sm_80", "--family", family,
               "--head-dim", "16", "--direction", "forward", "--causal",
               "--block-q", "16", "--block-k", "32", "--jobs", "1",
               "--output", str(output)]  # fmt: skip
    assert sweep_blocks.main(options) == 0
    rows = json.loads((output / "sm_80.dry.json").read_text())["rows"]
    assert rows and all(row["spill_bytes"] == 0 for row in rows)
    assert f"{family} forward" in capsys.readouterr().out


def test_a_dry_run_for_an_unknown_architecture(output, capsys):
    assert sweep(output, "--dry-run", "--arch", "sm_99") == 1
    assert "--arch got 'sm_99'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)],
)
def test_a_budget(text, expected):
    assert sweep_blocks.seconds(text) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "513"], "--head-dim 513: at most 512"),
        (["--seqlen", "32768"], "--seqlen 32768: at most --tokens"),
        (["--budget", "soon"], "'soon' is no time"),
        (["--budget", "0m"], "'0m' is no time"),
        (["--arch", "sm_80"], "--arch requires --dry-run"),
        (["--family", "cuda"], "invalid choice: 'cuda'"),
        (["--seconds", "0"], "--seconds 0.0: must be above 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--output", __file__], "cannot write to"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        sweep_blocks.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_calls_run_on_the_tile_that_is_forced(cp, monkeypatch):
    from cuflash.backends.cupy import CupyBackend, device

    def noted(backend, decided):
        ran.append(decided.tile)
        return load(backend, decided)

    load, ran = CupyBackend.load, []
    monkeypatch.setattr(CupyBackend, "load", noted)
    q = cp.zeros((1, 99, 1, 64), cp.float32)
    problem = Problem("forward", "float32", 1, 99, 99, 1, 1, 64, 64, 1.0)
    few = list(islice(legal_tiles(problem, device(0), "simt"), 3))
    for tile in few:
        forcing.force(forcing.Forced("simt", "forward", tile))
        cuflash.forward(q, q, q, scale=1.0)
    forcing.force(None)
    assert ran == few


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_small_sweep_on_a_gpu(tmp_path, own_tables, direction):
    """Only tiles next to today's, to keep it short."""
    options = ["--head-dim", "64", "--direction", direction, "--causal",
               "--seqlen", "512", "--tokens", "2048", "--seconds", "0.005",
               "--budget", "60s", "--output", str(tmp_path)]  # fmt: skip
    assert sweep_blocks.main(options) == 0
    (path,) = own_tables.glob("sm_*.json")
    (found,) = tiles.read_table(path)
    assert found.measured["ms"] > 0 and found.seqlen == 512


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    ["--dtype", "float32"], ["--dtype", "float64"],
    ["--family", "mma8_float32"],
], ids=" ".join)  # fmt: skip
def test_a_small_wide_sweep_on_a_gpu(tmp_path, own_tables, options):
    more = ["--head-dim", "64", "--causal", "--block-q", "64", "--block-k",
            "32", "--seqlen", "512", "--tokens", "1024", "--width", "256",
            "--seconds", "0.005", "--budget", "120s"]  # fmt: skip
    given = [*options, *more, "--output", str(tmp_path)]
    assert sweep_blocks.main(given) == 0
    (path,) = own_tables.glob("sm_*.json")
    found = tiles.read_table(path)
    assert {x.direction for x in found} == {"forward", "backward"}
    (record,) = map(Record.read, tmp_path.glob("sm_*.measured.json"))
    assert not [x for x in record.checked.values() if "fault" in x]
