"""Tables of tuned tiles: their content, and how they are read."""

import json
from dataclasses import replace

import pytest

from cuflash.build import nvrtc
from cuflash.errors import ValueRangeError
from cuflash.plans import tiles
from cuflash.plans.plan import device_of_arch, plan
from helpers.kernels import small_problem
from helpers.tables import BY_BLOCK_K, entry, write_table

ARCHS = {90: "sm_90a"}  # of those whose name has a suffix
TABLE_FILES = sorted(tiles.TABLES.glob("sm_*.json"))
DTYPES = {
    "simt": ("float16", "bfloat16", "float32", "float64"),
    "fma": ("float32",),
    "mma8_float64": ("float64",),
    "mma8_float32": ("float32",),
}


def packaged():
    """Plan every entry of the package, for each dtype that it is for."""
    for path in TABLE_FILES:
        for found in tiles.read_table(path):
            for dtype in (
                [found.dtype]
                if found.dtype
                else DTYPES.get(found.family, ("float16", "bfloat16"))
            ):
                yield found, dtype


def planned(found, dtype):
    problem = small_problem(
        found.direction,
        dtype,
        found.head_dim,
        causal=found.causal is not False,
    )
    if problem.tangents is not None:
        several = replace(problem.tangents, count=found.tile.directions)
        problem = replace(problem, tangents=several)
    device = device_of_arch(ARCHS.get(found.arch, f"sm_{found.arch}"))
    return plan(problem, device, found.family, found.tile), device


# The package's ---------------------------------------------------------------


def test_every_entry_fits_and_is_legal():
    for found, dtype in packaged():
        decided, device = planned(found, dtype)
        assert decided.tile == found.tile, found
        assert decided.family == found.family, found
        for kernel in decided.kernels:
            assert kernel.shared_bytes <= device.shared_bytes, found


def kernels():
    """Each kernel once; float16 stands for bfloat16."""
    made = [
        (device.arch, kernel)
        for decided, device in (
            planned(found, dtype.replace("bfloat16", "float16"))
            for found, dtype in packaged()
        )
        for kernel in decided.kernels
    ]
    return list(dict.fromkeys(made))


def name_of(value):
    if isinstance(value, str):
        return value
    known = dict(value.constants)
    sizes = "x".join(str(known.get(x)) for x in ("BLOCK_Q", "BLOCK_K"))
    return f"{value.entry}-{known.get('HEAD_DIM')}-{sizes}"


KERNELS = kernels()
# One of each file: ptxas may refuse what the text allows.
SOME = {kernel.file: (arch, kernel) for arch, kernel in KERNELS}


@pytest.mark.parametrize("arch, kernel", KERNELS, ids=name_of)
def test_every_entry_is_as_its_kernel_asserts(arch, kernel):
    """The kernel's text asserts the plan's shared-memory layout."""
    nvrtc._compile(kernel, arch, "-fdevice-syntax-only")


@pytest.mark.parametrize("arch, kernel", SOME.values(), ids=name_of)
def test_some_entries_compile(arch, kernel):
    assert nvrtc.cubin_file(kernel, arch).stat().st_size > 0


def test_every_table_has_its_source():
    for path in TABLE_FILES:
        table = json.loads(path.read_text())
        some = any(x.measured for x in tiles.read_table(path))
        assert some or "measured" in table["note"]


def test_a_plan_of_one_tile():
    problem = small_problem("forward", "float16")
    device = device_of_arch("sm_80")
    tile = tiles.Tile(**BY_BLOCK_K[32], ptxas_level=3)
    assert plan(problem, device, None, tile).tile == tile
    for wrong in (replace(tile, num_warps=3), replace(tile, block_q=1 << 12)):
        with pytest.raises(ValueRangeError, match="cannot be run by the sm80"):
            plan(problem, device, None, wrong)


# A table's GPU --------------------------------------------------------------


def test_entries_are_for_the_tables_gpu_unless_they_name_another(tmp_path):
    other = {"gpu": "B", "bandwidth": 2}
    lines = [entry(), entry(gpu=None), entry(gpu="B"), entry(**other)]
    path = write_table(tmp_path, "sm_80", *lines)
    head = {"gpu": "A", "bandwidth": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **head}))
    found = [(x.gpu, x.bandwidth) for x in tiles.read_table(path)]
    assert found == [("A", 1), (None, None), ("B", None), ("B", 2)]


# What is broken --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "a table of ours"}, "format is 'a table of ours'"),
        ({"format": None}, "format is None"),
        ({"arch": "sm_90"}, "it is for 'sm_90'"),
        ({"tiles": None}, "TypeError"),
        ({"tiles": [7]}, "TypeError"),
        ({"tiles": [{"family": "sm80"}]}, "an entry has the fields"),
    ],
)
def test_a_foreign_file_is_ignored_with_a_word(tmp_path, change, word):
    path = write_table(tmp_path, "sm_80", entry())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.warns(RuntimeWarning, match=word) as warned:
        assert tiles.entries(tmp_path) == ()
    assert str(path) in str(warned[0].message)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"seqlen": -1}, "seqlen is -1"),
        ({"tiles_per_sm": float("nan")}, "tiles_per_sm is nan"),
        ({"causal": "yes"}, "causal is 'yes'"),
        ({"option": "softcap"}, "option is 'softcap'"),
        ({"needs": "softcap"}, "needs is 'softcap'"),
        ({"reach": 0}, "reach is 0"),
        ({"gpu": 7}, "gpu is 7"),
        ({"gpu": "A", "bandwidth": 0}, "bandwidth is 0"),
        ({"gpu": "A", "bandwidth": "1"}, "bandwidth is '1'"),
        ({"bandwidth": 1}, "bandwidth is of no gpu"),
        ({"color": "red"}, "an entry has the fields"),
        ({"tile": {"block_q": 64}}, "TypeError"),
        ({"tile": {**BY_BLOCK_K[16], "num_warps": 5}}, "no sm80 forward kern"),
        ({"tile": {**BY_BLOCK_K[16], "num_warps": 4.0}}, "a tile is"),
        ({"family": "sm90"}, "no sm90 forward kernel has the tile"),
    ],
)
def test_a_wrong_entry_is_ignored_with_a_word(tmp_path, change, word):
    """With its whole file, which may contain other errors."""
    write_table(tmp_path, "sm_80", entry(), {**entry(), **change})
    with pytest.warns(RuntimeWarning, match=word):
        assert tiles.entries(tmp_path) == ()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]"])
def test_a_broken_file_spoils_no_other(tmp_path, content):
    (tmp_path / "sm_86.json").write_bytes(content)
    write_table(tmp_path, "sm_80", entry())
    with pytest.warns(RuntimeWarning, match="sm_86.json is not a tile table"):
        (found,) = tiles.entries(tmp_path)
    assert found.arch == 80


def test_a_folder_instead_of_a_file(tmp_path):
    (tmp_path / "sm_80.json").mkdir()
    with pytest.warns(RuntimeWarning, match="it is ignored"):
        assert tiles.entries(tmp_path) == ()
