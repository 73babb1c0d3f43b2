"""The nearest entries of the tables of tuned tiles."""

from dataclasses import replace

import pytest

from cuflash import folders
from cuflash.plans import nearest_tiles, tiles
from cuflash.plans.plan import device_of_arch, plan
from helpers.kernels import small_problem
from helpers.tables import BY_BLOCK_K, entry, write_table


def tuned(folder, monkeypatch, *found, **asked):
    """Return the tile of a problem with `found` in this machine's tables."""
    monkeypatch.setattr(folders, "tile_tables", lambda: folder)
    write_table(folder, "sm_80", *found)
    chosen = nearest_tiles.tuned(
        **{
            "capability": 80,
            "family": "sm80",
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
        nearest_tiles._tuned.cache_clear()
        chosen = tuned(tmp_path, monkeypatch, *found)
        assert chosen.block_k == 128


THIS = {"gpu": "this", "bandwidth": 4000}
OTHER = {"gpu": "other", "bandwidth": 4000}


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (THIS, {}),
        (THIS, OTHER),
        ({}, {"gpu": "slower", "bandwidth": 3000}),
        (OTHER, {"gpu": "slower", "bandwidth": 3000}),
        ({"gpu": "faster", "bandwidth": 4500},
         {"gpu": "slower", "bandwidth": 3000}),
        ({"gpu": "slow", "bandwidth": 2000}, {**THIS, "seqlen": 256}),
        ({**THIS, "seqlen": 1500}, {"gpu": "slow", "bandwidth": 2000}),
    ],
)  # fmt: skip
def test_the_nearest_gpu_is_taken(tmp_path, monkeypatch, near, far):
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "package")
    found = [
        entry(tile=BY_BLOCK_K[k], **{"seqlen": 1024, **changes})
        for k, changes in ((16, far), (128, near))
    ]
    write_table(tmp_path / "package", "sm_80", *found)
    assert tuned(tmp_path, monkeypatch, **THIS).block_k == 128


@pytest.mark.parametrize("asked", [{}, {**THIS, "capability": 86}], ids=str)
def test_gpus_are_alike_for_an_unknown_one_and_other_architectures(
    tmp_path, monkeypatch, asked
):
    """Then the first entry of the table is taken."""
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "none")
    gpus = [{"gpu": "slower", "bandwidth": 3000}, OTHER]
    found = [
        entry(tile=BY_BLOCK_K[k], **gpu)
        for k, gpu in zip((128, 16), gpus, strict=True)
    ]
    assert tuned(tmp_path, monkeypatch, *found, **asked).block_k == 128


def test_entries_of_this_machine_that_name_no_gpu_are_for_its_gpu(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "package")
    known = entry(tile=BY_BLOCK_K[16], **THIS)
    write_table(tmp_path / "package", "sm_80", known)
    own = [entry(tile=BY_BLOCK_K[32], **OTHER), entry(tile=BY_BLOCK_K[128])]
    assert tuned(tmp_path, monkeypatch, *own, **THIS).block_k == 128


@pytest.mark.parametrize("capability", [80, 87, 103, 110])
def test_tiles_without_cp_async_are_for_no_other_gpu(capability):
    """sm_75's table is the only one with a tile for segment ids."""
    asked = ("sm80", "forward", "bfloat16", 64, True, "segment_ids", 8192, 8.0)
    own = {x.tile for x in tiles.entries(tiles.TABLES) if x.arch == 75}
    others = {x.tile for x in tiles.entries(tiles.TABLES) if x.arch > 75}
    assert not {*nearest_tiles.tuned(capability, *asked)} & (own - others)
    assert nearest_tiles.tuned(75, *asked)[0] in own


def test_a_plan_takes_the_tile_of_its_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "tile_tables", lambda: tmp_path)
    found = [
        entry(tile=BY_BLOCK_K[k], gpu=gpu, bandwidth=2000)
        for k, gpu in ((16, "A"), (128, "B"))
    ]
    write_table(tmp_path, "sm_80", *found)
    problem = small_problem("forward", "float16", scale=0.3)
    for name, block_k in (("A", 16), ("B", 128)):
        device = replace(device_of_arch("sm_80"), name=name)
        assert plan(problem, device).tile.block_k == block_k


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


NARROW = {"seqlen": 512, "tiles_per_sm": 0.5, "reach": 0.5,
          "causal": True, "dtype": "float16"}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "block_k"),
    [
        ({}, 16),
        ({"seqlen": 724, "tiles_per_sm": 0.7}, 16),
        ({"dtype": "bfloat16"}, 16),
        ({"seqlen": 1024}, 128),
        ({"tiles_per_sm": 1.0}, 128),
        ({"capability": 86}, 128),
        ({"dtype": "float32"}, 128),
        ({"head_dim": 32}, 128),
        ({"causal": False}, 128),
        ({"option": "window"}, 128),
        ({"has": ("sink",)}, 128),
    ],
)
def test_an_entry_acts_for_what_it_needs_as_far_as_it_reaches(
    tmp_path, monkeypatch, asked, block_k
):
    """Even where the other entry is farther."""
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "none")
    found = [
        entry(tile=BY_BLOCK_K[16], needs="bias", **NARROW),
        entry(tile=BY_BLOCK_K[128], head_dim=256, option="segment_ids"),
    ]
    call = {"seqlen": 512, "tiles_per_sm": 0.5, "has": ("bias", "sink")}
    chosen = tuned(tmp_path, monkeypatch, *found, **{**call, **asked})
    assert chosen.block_k == block_k


@pytest.mark.parametrize(
    ("tokens", "changes", "expected"),
    [
        (4096, {}, (192, 80)),
        (4096, {"batch": 1, "num_heads_q": 24}, (192, 80)),
        (1024, {}, (128, 128)),
        (4096, {"sink": True}, (128, 128)),
        (4096, {"return_max_score": True}, (128, 128)),
        (8192, {"seqlen_q": 256}, (128, 176)),  # a third of 192 would be empty
        (8192, {"seqlen_q": 512}, (192, 80)),
    ],
)
def test_wide_tiles_are_for_plain_calls_that_fill_them(
    tokens, changes, expected
):
    """Full masks, heads of 128 on an H200, docs/lab/sm90_forward.md."""
    lengths = {"batch": 16, "seqlen_q": tokens, "seqlen_k": tokens}
    heads = {"num_heads_q": 16, "num_heads_kv": 1, "causal": False}
    dims = {"head_dim": 128, "head_dim_v": 128}
    problem = small_problem(
        "forward", "bfloat16", **{**lengths, **heads, **dims, **changes}
    )
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    tile = plan(problem, device).tile
    assert (tile.block_q, tile.block_k) == expected


@pytest.mark.parametrize(
    ("direction", "dtype", "tokens", "asked", "expected"),
    [
        ("forward", "bfloat16", 512, {"bias": "float32"}, (64, 128)),
        ("forward", "bfloat16", 512, {}, (192, 128)),
        ("forward", "bfloat16", 1024,
         {"causal": True, "num_heads_q": 4, "num_heads_kv": 4}, (192, 128)),
        ("forward", "float32", 1024, {"bias": "float32"}, (64, 64)),
        ("forward", "float32", 1024, {}, (128, 64)),
        ("backward", "bfloat16", 512, {}, (64, 64)),  # timed without, too
        ("backward", "bfloat16", 512, {"num_heads_kv": 4}, (128, 128)),
        ("backward", "float32", 512, {}, (128, 32)),
        ("backward", "float32", 512, {"batch": 4}, (64, 64)),
    ],
)  # fmt: skip
def test_tiles_of_a_pair_are_for_its_grid(
    direction, dtype, tokens, asked, expected
):
    """One sequence of 16 heads of 64 on an H200, docs/lab/pair_bias.md."""
    call = {"num_heads_q": 16, "num_heads_kv": 16, "causal": False, **asked}
    problem = small_problem(
        direction, dtype, seqlen_q=tokens, seqlen_k=tokens, **call
    )
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    tile = plan(problem, device).tile
    assert (tile.block_q, tile.block_k) == expected
