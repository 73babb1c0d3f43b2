"""Tables of tuned tiles: their content, and the nearest entry."""

import json
from dataclasses import replace

import pytest

from cuflash import folders, tiles
from cuflash.build import nvrtc
from cuflash.errors import ValueRangeError
from cuflash.plan import device_of_arch, plan
from helpers.kernels import small_problem
from helpers.tables import entry, write_table

ARCHS = {90: "sm_90a"}  # of those whose name has a suffix
TABLE_FILES = sorted(tiles.TABLES.glob("sm_*.json"))
DTYPES = {
    "simt": ("float16", "bfloat16", "float32", "float64"),
    "fma": ("float32",),
    "dmma": ("float64",),
    "tf32x3": ("float32",),
}

# Tiles that mma's forward kernel is written for, by their block_k.
BY_BLOCK_K = {k: {"block_q": 64, "block_k": k, "num_warps": 4}
              for k in (16, 32, 64, 128)}  # fmt: skip


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


def tuned(folder, monkeypatch, *found, **asked):
    """Return the tile of a problem with `found` in this machine's tables."""
    monkeypatch.setattr(folders, "tile_tables", lambda: folder)
    write_table(folder, "sm_80", *found)
    chosen = tiles.tuned(
        **{
            "capability": 80,
            "family": "mma",
            "direction": "forward",
            "dtype": "float16",
            "head_dim": 64,
            "causal": True,
            "option": None,
            "seqlen": 1024,
            "tiles_per_sm": 4.0,
            **asked,
        }
    )
    return chosen[0]


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


@pytest.mark.parametrize("arch, kernel", kernels(), ids=name_of)
def test_every_entry_compiles(arch, kernel):
    """The kernel's text asserts the plan's shared-memory layout."""
    assert nvrtc.cubin_file(kernel, arch).stat().st_size > 0


def test_every_table_has_its_source():
    for path in TABLE_FILES:
        table = json.loads(path.read_text())
        some = any(x.measured for x in tiles.read_table(path))
        assert some or "measured" in table["note"]


# The nearest -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ({"head_dim": 64}, {"head_dim": 128}),
        ({"head_dim": 128}, {"head_dim": 32}),
        ({"causal": True}, {"causal": False}),
        ({"causal": None}, {"causal": False}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"seqlen": 1024}, {"seqlen": 512}),
        ({"seqlen": 2048}, {"seqlen": 256}),
        ({"seqlen": 512, "tiles_per_sm": 4.0},
         {"seqlen": 1024, "tiles_per_sm": 0.25}),
        ({"seqlen": 2048, "causal": True}, {"seqlen": 1024, "causal": False}),
        ({"seqlen": 2048}, {"seqlen": None, "tiles_per_sm": None}),
        ({"seqlen": None}, {"seqlen": 16384}),
        ({"seqlen": 8192}, {"seqlen": 1024, "option": "window"}),
    ],
)  # fmt: skip
def test_the_nearest_entry_is_taken(tmp_path, monkeypatch, near, far):
    first, second = (
        entry(tile=BY_BLOCK_K[k], **changes)
        for k, changes in ((16, far), (128, near))
    )
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "none")
    for found in ((first, second), (second, first)):
        tiles.entries.cache_clear()
        tiles._tuned.cache_clear()
        chosen = tuned(tmp_path, monkeypatch, *found)
        assert chosen.block_k == 128


def test_many_tiles_are_as_many_as_more(tmp_path, monkeypatch):
    found = [
        entry(tile=BY_BLOCK_K[32], tiles_per_sm=8.0, seqlen=1024),
        entry(tile=BY_BLOCK_K[16], tiles_per_sm=300.0, seqlen=2048),
    ]
    asked = {"tiles_per_sm": 200.0}
    assert tuned(tmp_path, monkeypatch, *found, **asked).block_k == 32


@pytest.mark.parametrize("capability, expected", [(80, 16), (89, 64)])
def test_this_machines_table_takes_precedence(
    tmp_path, monkeypatch, capability, expected
):
    """But not over an entry for the exact architecture."""
    chosen = tuned(
        tmp_path, monkeypatch, entry(tile=BY_BLOCK_K[16]),
        capability=capability,
    )  # fmt: skip
    assert chosen.block_k == expected


def test_a_plan_takes_this_machines_tile(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "tile_tables", lambda: tmp_path)
    found = entry(tile=BY_BLOCK_K[16], head_dim=128, causal=True)
    write_table(tmp_path, "sm_80", found)
    problem = small_problem("forward", "float16", 128, scale=0.3)
    decided = plan(problem, device_of_arch("sm_80"))
    assert decided.tile == tiles.Tile(**BY_BLOCK_K[16])
    assert decided.kernels[0].shared_bytes > 0


def test_a_tile_that_does_not_fit_is_passed_over(tmp_path, monkeypatch):
    """head_dim_v is larger than the entry's, and shared memory too small."""
    monkeypatch.setattr(folders, "tile_tables", lambda: tmp_path)
    large = {"block_q": 128, "block_k": 128, "num_warps": 8,
             "blocks_per_sm": 2}  # fmt: skip
    found = entry(tile=large, head_dim=256)
    write_table(tmp_path, "sm_80", found)
    problem = small_problem("forward", "float16", 256, scale=0.3)
    assert plan(problem, device_of_arch("sm_80")).tile.block_k < 128


def test_a_plan_of_one_tile():
    problem = small_problem("forward", "float16")
    device = device_of_arch("sm_80")
    tile = tiles.Tile(**BY_BLOCK_K[32], ptxas_level=3)
    assert plan(problem, device, None, tile).tile == tile
    for wrong in (replace(tile, num_warps=3), replace(tile, block_q=1 << 12)):
        with pytest.raises(ValueRangeError, match="cannot be run by the mma"):
            plan(problem, device, None, wrong)


# What is broken --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "a table of ours"}, "format is 'a table of ours'"),
        ({"format": None}, "format is None"),
        ({"arch": "sm_90"}, "it is for 'sm_90'"),
        ({"tiles": None}, "TypeError"),
        ({"tiles": [7]}, "TypeError"),
        ({"tiles": [{"family": "mma"}]}, "an entry has the fields"),
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
        ({"color": "red"}, "an entry has the fields"),
        ({"tile": {"block_q": 64}}, "TypeError"),
        ({"tile": {**BY_BLOCK_K[16], "num_warps": 5}}, "no mma forward kern"),
        ({"tile": {**BY_BLOCK_K[16], "num_warps": 4.0}}, "a tile is"),
        ({"family": "wgmma"}, "no wgmma forward kernel has the tile"),
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
