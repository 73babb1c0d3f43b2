"""Plans: family, tiles, launches, and their text."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.expressions import nodes
from cuflash.plans import fma, nearest_tiles
from cuflash.plans.kernel import EVEN_SECTIONS
from cuflash.plans.plan import (
    default_plans,
    device_of_arch,
    in_float32,
    legal_tiles,
    occupancy,
    plan,
    tuned_by,
)
from helpers.dtypes import DTYPES
from helpers.kernels import small_problem

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DIRECTIONS = ("forward", "backward")
WIDE = [(257, 257), (512, 512), (512, 64), (64, 257)]
DERIVATIVES = ("jvp", "double_backward")
SIXTEEN_BITS = ("float16", "bfloat16")
FAMILIES = {
    "float16": "sm80",
    "bfloat16": "sm80",
    "float32": "fma",
    "float64": "mma8_float64",
}
KERNELS = {**FAMILIES, "float64": "mma8"}

both_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def planned(direction, dtype="float16", head_dim=64, arch="sm_80", **changes):
    problem = small_problem(direction, dtype, head_dim, **changes)
    return plan(problem, device_of_arch(arch))


@both_directions
@pytest.mark.parametrize("dtype", DTYPES)
def test_family_follows_the_dtype(direction, dtype):
    decided = planned(direction, dtype)
    assert decided.family == FAMILIES[dtype]
    assert any(KERNELS[dtype] in x.entry for x in decided.kernels)


@both_directions
@pytest.mark.parametrize("head_dim", [1, 64, 128, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_tf32x3_is_another_family(direction, head_dim, arch):
    options = {"precision": "tf32x3", "arch": arch}
    decided = planned(direction, "float32", head_dim, **options)
    assert decided.family == "mma8_float32"
    assert decided.kernels[-1].file == f"mma8/{direction}.cu"


@both_directions
@pytest.mark.parametrize("arch", ARCHS)
def test_tf32x3_has_tiles_for_all_head_dims(direction, arch):
    for pair in product(range(32, 257, 32), repeat=2):
        planned(direction, "float32", pair[0], arch, head_dim_v=pair[1],
                precision="tf32x3")  # fmt: skip


@both_directions
@pytest.mark.parametrize("wanted", [None, "mma8_float32"])
@pytest.mark.parametrize(
    ("arch", "families"),
    [("sm_80", ["mma8_float32"] * 4), ("sm_90a", ["mma8_float32"] * 4),
     ("sm_86", ["mma8_float32", "simt", "mma8_float32", "mma8_float32"])],
)  # fmt: skip
def test_tf32x3_above_256(direction, arch, families, wanted):
    """As far as shared memory allows, else without tensor cores."""
    precision = None if wanted else "tf32x3"
    for (d, dv), family in zip(WIDE, families, strict=True):
        problem = small_problem(direction, "float32", d, head_dim_v=dv,
                                precision=precision)  # fmt: skip
        found = plan(problem, device_of_arch(arch), wanted).family
        assert found == family


@both_directions
@pytest.mark.parametrize(
    ("arch", "widest"), [("sm_80", 384), ("sm_90a", 512), ("sm_86", 0)]
)
def test_float64_above_256(direction, arch, widest):
    for d in (257, 384, 385, 512):
        family = "mma8_float64" if d <= widest else "simt"
        assert planned(direction, "float64", d, arch).family == family


@both_directions
def test_tf32x3_needs_sm_80(direction):
    with pytest.raises(UnsupportedError) as raised:
        planned(direction, "float32", arch="sm_75", precision="tf32x3")
    assert str(raised.value) == (
        "precision 'tf32x3' needs a GPU of compute capability 8.0 or newer, "
        "this one has 7.5 (sm_75): leave it out"
    )


@both_directions
@pytest.mark.parametrize(
    ("arch", "wanted", "family"),
    [("sm_80", None, "mma8_float64"), ("sm_90a", None, "mma8_float64"),
     ("sm_80", "simt", "simt"), ("sm_86", None, "simt")],
)  # fmt: skip
def test_options_take_float64_to_no_other_family(
    direction, arch, wanted, family
):
    device = device_of_arch(arch)
    for options in ({}, {"softcap": 1.0, "mask": True}):
        problem = small_problem(direction, "float64", **options)
        assert plan(problem, device, wanted).family == family


@pytest.mark.parametrize("direction", DERIVATIVES)
@pytest.mark.parametrize(
    ("dtype", "precision", "family"),
    [("float64", None, "mma8_float64"), ("float32", "tf32x3", "mma8_float32")],
)
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [("sm_80", 1), ("sm_80", 64), ("sm_90a", 64), ("sm_90a", 128)],
)
def test_mma8_has_derivatives(direction, dtype, precision, family, arch,
                              head_dim):  # fmt: skip
    decided = planned(direction, dtype, head_dim, arch, precision=precision)
    assert decided.family == family
    assert decided.kernels[-1].file.startswith(f"mma8/{direction}")


@pytest.mark.parametrize("direction", DERIVATIVES)
@pytest.mark.parametrize(
    "changes",
    [{"block_q": 16, "block_k": 8}, {"head_dim": 256}, {"arch": "sm_86"}],
    ids=["blocks", "head_dim", "arch"],
)
def test_simt_has_the_other_derivatives(direction, changes):
    assert planned(direction, "float64", **changes).family == "simt"


@both_directions
@pytest.mark.parametrize("d", [1, 64, 100, 128, 192, 224, 256, 512])
def test_sm_75_multiplies_float16_on_tensor_cores(direction, d):
    """Up to 256; bfloat16 is unknown to them."""
    family = "sm80" if d <= 256 else "simt"
    assert planned(direction, "float16", d, "sm_75").family == family
    assert planned(direction, "bfloat16", d, "sm_75").family == "simt"


@both_directions
@pytest.mark.parametrize("d", [1, 32, 64, 96, 128, 192, 256])
def test_64_kib_hold_tiles_of_float32(direction, d):
    """Some of them for sm_75 alone: elsewhere larger ones fit."""
    assert planned(direction, "float32", d, "sm_75").family == "fma"
    others = (planned(direction, "float32", d, x) for x in ("sm_80", "sm_86"))
    assert not any(fma.is_small(x.tile) for x in others)


@both_directions
def test_sizes_that_64_kib_do_not_hold_are_of_simt(direction):
    sizes = {"arch": "sm_75", "block_q": 16, "block_k": 8}
    assert planned(direction, "float32", **sizes).family == "simt"


@pytest.mark.parametrize("direction", [*DIRECTIONS, *DERIVATIVES])
def test_bfloat16_runs_on_copies_where_tensor_cores_lack_it(direction):
    problem = small_problem(direction, "bfloat16")
    old, new = device_of_arch("sm_75"), device_of_arch("sm_80")
    assert in_float32(problem, old) and not in_float32(problem, new)
    assert not in_float32(replace(problem, dtype="float16"), old)
    assert not in_float32(replace(problem, dtype="float32"), old)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({}, "simt"), ({"block_q": 16}, None), ({"head_dim": 512}, None),
     ({"seqlen_q": 1, "seqlen_k": 4096}, None)],
    ids=["asked", "sized", "wide", "few_queries"],
)  # fmt: skip
def test_other_bfloat16_is_read_in_place(changes, wanted):
    problem = small_problem("forward", "bfloat16", **changes)
    assert not in_float32(problem, device_of_arch("sm_75"), wanted)


@both_directions
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_kernels_need_sm_75(direction, dtype):
    assert planned(direction, dtype, arch="sm_75").kernels
    with pytest.raises(UnsupportedError, match=r"7\.5 or newer.*has 7\.0"):
        planned(direction, dtype, arch="sm_70")


@both_directions
@pytest.mark.parametrize(
    ("arch", "wanted", "family"),
    [
        ("sm_80", None, "fma"),
        ("sm_80", "simt", "simt"),
        ("sm_75", None, "fma"),
        ("sm_75", "simt", "simt"),
    ],
)
def test_float32_falls_back_to_simt(direction, arch, wanted, family):
    problem = small_problem(direction, "float32")
    assert plan(problem, device_of_arch(arch), wanted).family == family


@pytest.mark.parametrize(
    ("arch", "block_q", "family"),
    [("sm_80", None, "fma"), ("sm_80", 32, "fma"), ("sm_80", 8, "simt"),
     ("sm_75", None, "fma")],
)  # fmt: skip
@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
def test_derivatives_of_float32_fall_back_to_simt(
    direction, arch, block_q, family
):
    """Where fma has no tiles, or none of the requested size."""
    decided = planned(direction, "float32", arch=arch, block_q=block_q)
    assert decided.family == family


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_derivatives_of_sixteen_bits_use_tensor_cores(arch, dtype):
    """jvp always; double_backward as shared memory allows."""
    device = device_of_arch(arch)
    small = device.shared_bytes < 2**17
    for direction in ("jvp", "double_backward"):
        for head_dim in (16, 64, 128, 192):
            problem = small_problem(direction, dtype, head_dim)
            hopper = arch == "sm_90a" and head_dim < 192
            own = "sm90" if hopper else "sm80"
            assert plan(problem, device).family == own
            assert plan(problem, device, "sm80").family == "sm80"
            assert plan(problem, device, "simt").family == "simt"
            sizes = replace(problem, block_q=16, block_k=8)
            assert plan(sizes, device).family == "simt"
    wide = small_problem("jvp", dtype, 256)
    assert plan(wide, device).family == "sm80"
    wide = small_problem("double_backward", dtype, 256)
    assert plan(wide, device).family == ("simt" if small else "sm80")


@both_directions
@pytest.mark.parametrize(
    ("dtype", "family"),
    [("float16", "sm80"), ("bfloat16", "sm80")],
)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wanted", [None, "sm90", "sm80"])
def test_families_of_wide_heads(direction, dtype, family, arch, wanted):
    if arch == "sm_90a" and family == "sm80" and wanted != "sm80":
        family = "sm90"
    for d, dv in WIDE:
        problem = small_problem(direction, dtype, d, head_dim_v=dv)
        decided = plan(problem, device_of_arch(arch), wanted)
        assert decided.family == family
        assert any(family in kernel.file for kernel in decided.kernels)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("arch", "widest"),
    [("sm_80", (512, 512)), ("sm_86", (448, 384)), ("sm_90a", (512, 512))],
)
def test_derivatives_of_wide_heads(dtype, arch, widest):
    """By mma.sync as far as shared memory allows, else on CUDA cores."""
    for direction, most in zip(DERIVATIVES, widest, strict=True):
        for d in (257, 320, 384, 448, 512):
            found = plan(small_problem(direction, dtype, d),
                         device_of_arch(arch)).family  # fmt: skip
            assert found == ("sm80" if d <= most else "simt")


@pytest.mark.parametrize("arch", ARCHS)
def test_warps_share_rows_of_wide_heads_alone(arch):
    for d in (256, 257):
        tile = planned("forward", "float16", d, arch).tile
        assert (tile.score_warps_q > 1) == (d > 256) or "sm_90" in arch


def test_wide_heads_are_plain_without_room_for_both_directions():
    """Backward needs more: forward could run, but has the same scores."""
    device = replace(device_of_arch("sm_80"), shared_bytes=60 * 1024)
    for direction in ("forward", "backward"):
        problem = small_problem(direction, "bfloat16", 512)
        assert plan(problem, device).family == "simt"


@pytest.mark.parametrize("option", [None, "mask", "segment_ids", "sink"])
@both_directions
def test_options_of_wide_heads_run_by_wgmma(direction, option):
    asked = {} if option is None else {option: True}
    problem = small_problem(direction, "float16", 512, **asked)
    assert plan(problem, device_of_arch("sm_90a")).family == "sm90"


@pytest.mark.parametrize(
    ("arch", "families"),
    [("sm_75", ["simt"] * 3 + ["fma"]),
     ("sm_80", ["simt", "fma", "simt", "fma"]),
     ("sm_90a", ["fma"] * 4), ("sm_120", ["simt"] * 3 + ["fma"])],
)  # fmt: skip
@both_directions
def test_wide_heads_of_float32_have_register_tiles_if_they_fit(
    direction, arch, families
):
    """The same family in both directions, so that scores are the same."""
    found = [
        planned(direction, "float32", d, arch, head_dim_v=dv).family
        for d, dv in WIDE
    ]
    assert found == families


@both_directions
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_kernels_take_all_dtypes(direction, dtype):
    problem = small_problem(direction, dtype)
    for arch in ("sm_80", "sm_90a"):
        assert plan(problem, device_of_arch(arch), "simt").family == "simt"


@both_directions
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_head_dim_192_with_128_has_tensor_cores(direction, arch):
    decided = planned(direction, "bfloat16", 192, arch, head_dim_v=128)
    assert decided.family == ("sm90" if arch == "sm_90a" else "sm80")


def test_errors_name_gpus_with_enough_shared_memory():
    assert planned("forward", "float64", 512, "sm_75").kernels
    assert planned("backward", "float32", 512, "sm_75").kernels
    with pytest.raises(UnsupportedError) as raised:
        planned("backward", "float64", 512, "sm_75")
    assert str(raised.value) == (
        "the backward pass with head_dim 512, head_dim_v 512, float64 needs "
        "66048 bytes of shared memory for its smallest tile, this GPU has "
        "65536 (sm_75); it would fit on sm_80, sm_86, sm_87, sm_89, sm_90, "
        "sm_100, sm_103, sm_110, sm_120, sm_121"
    )


def test_errors_name_the_oldest_gpu():
    """Even on a GPU with the least shared memory."""
    device = replace(device_of_arch("sm_80"), shared_bytes=10_000)
    for dtype in ("float16", "float32"):
        problem = small_problem("forward", dtype, 512)
        with pytest.raises(UnsupportedError, match="fit on sm_75, sm_8"):
            plan(problem, device)


@given(
    direction=st.sampled_from(DIRECTIONS),
    dtype=st.sampled_from(list(DTYPES)),
    arch=st.sampled_from(ARCHS),
    d=st.integers(1, 576),
    dv=st.integers(1, 512),
)
def test_every_head_dim_has_a_plan_that_fits(direction, dtype, arch, d, dv):
    decided = planned(direction, dtype, d, arch, head_dim_v=dv)
    for kernel in decided.kernels:
        known = dict(kernel.constants)
        assert kernel.shared_bytes <= device_of_arch(arch).shared_bytes
        assert kernel.threads <= 1024
        assert known.get("HEAD_DIM", d) >= d
        assert known.get("HEAD_DIM_V", dv) >= dv
        assert known.get("SHARED_BYTES", 0) == kernel.shared_bytes


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [*product(DTYPES, [None]), ("float32", "tf32x3")],
)
def test_kernels_of_options_know_their_shared_memory(dtype, precision):
    options = {"segment_ids": True, "sink": True, "return_dsink": True,
               "precision": precision}  # fmt: skip
    first, *_, last = planned("backward", dtype, **options).kernels
    assert (first.entry, last.entry) == ("segment_ranges", "backward_sink")
    assert first.shared_bytes == 0
    assert dict(last.constants)["SHARED_BYTES"] == last.shared_bytes > 0


@both_directions
def test_the_order_of_tiles_depends_on_a_masks_flags_alone(direction):
    """So that another mask compiles one kernel less."""
    axes = {x: nodes.index(x) for x in ("b", "h", "q_idx", "kv_idx")}

    def kernel(name, *operands):
        mask = nodes.make(name, "bool", tuple(axes[x] for x in operands))
        found = planned(direction, arch="sm_90a", mask_mod=mask).kernels
        return {x.entry: x for x in found}["segment_order"]

    causal = kernel("greater_equal", "q_idx", "kv_idx")
    assert kernel("equal", "kv_idx", "q_idx") == causal
    of_batch, of_head = (kernel("less", x, "q_idx") for x in "bh")
    assert kernel("equal", "q_idx", "h") == of_head
    assert len({causal, of_batch, of_head, kernel("less", "b", "h")}) == 4


@both_directions
@pytest.mark.parametrize(
    ("arch", "finding"),
    [("sm_90a", ["segment_ranges", "segment_order"]),
     ("sm_80", ["segment_ranges"])],
)  # fmt: skip
def test_hopper_computes_an_order_of_tiles(direction, arch, finding):
    """After ranges, a counter and, forward, the blocks' previous tiles."""
    decided = planned(
        direction, arch=arch, segment_ids=True, batch=3, seqlen_q=1000,
        seqlen_k=700,
    )  # fmt: skip
    entries = [kernel.entry for kernel in decided.kernels]
    assert [x for x in entries if x.startswith("segment")] == finding
    assert entries[: len(finding)] == finding
    tiles_q = -(-1000 // decided.tile.block_q)
    tiles_k = -(-700 // decided.tile.block_k)
    expected = {"query_tile_ids": 3 * tiles_q, "key_tile_ids": 3 * tiles_k}
    if arch == "sm_90a":
        assert decided.launches[1].blocks == 1
        forward = direction == "forward"
        expected["tile_order"] = 3 * (tiles_q if forward else tiles_k)
        expected["tile_counter"] = 1
        if forward:
            expected["previous_tiles"] = 2 * 3 * tiles_q
    elements = {x.name: x.elements for x in decided.workspace}
    assert {name: elements[name] for name in expected} == expected


@given(
    dtype=st.sampled_from(list(DTYPES)),
    seqlen_q=st.integers(1, 1000),
    seqlen_k=st.integers(1, 1000),
    heads=st.integers(1, 3),
)
def test_blocks_cover_every_token_once(dtype, seqlen_q, seqlen_k, heads):
    sizes = {"batch": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
             "num_heads_q": 2 * heads, "num_heads_kv": heads}  # fmt: skip
    forward = planned("forward", dtype, **sizes)
    assume(
        not forward.family.startswith("decode")
    )  # tests/unit/test_decode_plan.py
    q_tiles = -(-seqlen_q // forward.tile.block_q)
    assert [x.blocks for x in forward.launches] == [q_tiles * 4 * heads]
    backward = planned("backward", dtype, **sizes)
    k_tiles = -(-seqlen_k // backward.tile.block_k)
    _, by_keys, *by_queries = (x.blocks for x in backward.launches)
    assert by_keys == k_tiles * 2 * heads
    # Only 16-bit dq is rounded from sums, in a launch of its own.
    q_tiles = -(-seqlen_q // backward.tile.block_q)
    sums = [q_tiles * 4 * heads] if dtype in SIXTEEN_BITS else []
    assert by_queries == sums


@both_directions
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_lists_the_blocks_that_can_be_run(direction, dtype):
    with pytest.raises(ValueRangeError, match="^block_q 7, block_k 9 ") as e:
        planned(direction, dtype, block_q=7, block_k=9)
    listed = re.findall(r"\((\d+), (\d+)\)", str(e.value))
    assert listed
    for block_q, block_k in (tuple(map(int, pair)) for pair in listed):
        tile = planned(direction, dtype, block_q=block_q, block_k=block_k).tile
        assert (tile.block_q, tile.block_k) == (block_q, block_k)


@both_directions
@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_one_block_size_alone(direction, name):
    assert getattr(planned(direction, **{name: 32}).tile, name) == 32


@both_directions
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [512, 8192])
def test_the_nearest_tuned_tile_is_taken(direction, arch, head_dim, seqlen):
    """A table's tile that does not fit would be skipped silently."""
    device = device_of_arch(arch)
    decided = planned(
        direction, head_dim=head_dim, arch=arch, seqlen_q=seqlen,
        seqlen_k=seqlen,
    )  # fmt: skip
    nearest, *_ = nearest_tiles.tuned(
        device.capability, decided.family, direction, "float16", head_dim,
        True, None, *tuned_by(decided.problem, device),
    )  # fmt: skip
    assert decided.tile == nearest


def plan_of_sixteen_heads(seqlen, **options):
    """A forward pass of head_dim 128 on an H200."""
    problem = small_problem(
        "forward", "bfloat16", 128, seqlen_q=seqlen, seqlen_k=seqlen,
        num_heads_q=16, num_heads_kv=16, **options,
    )  # fmt: skip
    return plan(problem, replace(device_of_arch("sm_90a"), num_sms=132))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (128, 176)), ({"segment_ids": True}, (128, 160)),
     ({"window": (1024, None)}, (192, 64)),
     ({"window": (1024, 0), "causal": False}, (192, 64)),
     ({"window": (None, 9)}, (128, 176)),
     ({"window": (9000, None)}, (128, 176))],
    ids=str,
)  # fmt: skip
def test_short_walks_have_tiles_of_their_own(options, expected):
    """One bound alone, or one beyond all keys, shortens no loop."""
    tile = plan_of_sixteen_heads(8192, **options).tile
    assert (tile.block_q, tile.block_k) == expected


@pytest.mark.parametrize(
    ("direction", "expected"),
    [("forward", (500, 2 * 2 * 2 / 132)), ("backward", (130, 2 * 4 / 132))],
)
def test_features_that_choose_a_tile(direction, expected):
    """Tokens that a block visits; its own tokens; tiles per SM."""
    problem = small_problem(
        direction, "float16", batch=2, seqlen_q=130, seqlen_k=500
    )
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    assert tuned_by(problem, device) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("causal", "window", "walked"),
    [(False, (100, 20), 121), (True, (100, None), 101),
     (False, (100, None), 500), (False, (None, 20), 500),
     (True, (None, None), 500), (False, (600, 600), 500)],
)  # fmt: skip
def test_keys_that_a_block_visits_under_a_window(causal, window, walked):
    problem = small_problem(
        "forward", "float16", seqlen_q=500, seqlen_k=500, causal=causal,
        window=window,
    )  # fmt: skip
    assert tuned_by(problem, device_of_arch("sm_90a"))[0] == walked


@pytest.mark.parametrize(
    ("direction", "count", "longest", "walked"),
    [
        ("forward", 4, {}, 2500),  # alike, as far as one knows
        ("forward", 4, {"max_seqlen_k": 2500}, 2500),
        ("forward", 4, {"max_seqlen_q": 9970}, 2500),
        ("forward", 4, {"max_seqlen_k": 9970}, 9970),
        ("backward", 4, {"max_seqlen_q": 7970, "max_seqlen_k": 9}, 7970),
        ("forward", 201, {"max_seqlen_k": 1000}, 725),  # 1M of 1.4M pairs
        ("forward", 5001, {"max_seqlen_k": 100}, 35),
        ("forward", 1, {"max_seqlen_k": 20000}, 10000),
        ("forward", 1, {"max_seqlen_k": 0}, 10000),
    ],
)
def test_packed_sequences_count_by_their_pairs(
    direction, count, longest, walked
):
    problem = small_problem(
        direction, "float16", seqlen_q=8000, seqlen_k=10000,
        num_sequences=count, **longest,
    )  # fmt: skip
    assert tuned_by(problem, device_of_arch("sm_90a"))[0] == walked


def test_the_longest_of_packed_sequences_has_its_tile():
    problem = small_problem(
        "forward", "bfloat16", 128, seqlen_q=32768, seqlen_k=32768,
        causal=True, num_sequences=129,
    )  # fmt: skip
    device = device_of_arch("sm_90a")
    said = replace(problem, max_seqlen_q=16384, max_seqlen_k=16384)
    assert [plan(x, device).tile.block_k for x in (problem, said)] == [
        128, 176,
    ]  # fmt: skip


@pytest.mark.parametrize("keys", [128, 144, 160, 176])
def test_segment_ids_have_room_beside_wide_tiles(keys):
    problem = small_problem(
        "forward", "float16", 128, segment_ids=True, block_k=keys
    )
    decided = plan(problem, device_of_arch("sm_90a"))
    assert decided.tile.block_k == keys


def test_long_rows_have_tiles_of_their_own():
    short, long = (
        planned("forward", head_dim=128, arch="sm_90a", batch=64,
                seqlen_k=n).tile
        for n in (2048, 4096)
    )  # fmt: skip
    assert short.block_k < long.block_k


@pytest.mark.parametrize("head_dim", [32, 64])
def test_blocks_of_short_sequences_share_an_sm(head_dim):
    short, long = (
        planned("forward", head_dim=head_dim, arch="sm_90a", batch=1024,
                seqlen_q=n, seqlen_k=n)
        for n in (64, 4096)
    )  # fmt: skip
    assert short.tile.block_q == 64 and short.tile.blocks_per_sm > 1
    assert long.tile.blocks_per_sm == 1
    room = device_of_arch("sm_90a").shared_bytes // short.tile.blocks_per_sm
    assert short.launches[-1].kernel.shared_bytes <= room


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_narrow_heads_are_not_padded_on_hopper(direction):
    decided = planned(direction, head_dim=32, arch="sm_90a", seqlen_q=512)
    sizes = [dict(x.constants).get("HEAD_DIM") for x in decided.kernels]
    assert 32 in sizes and 64 not in sizes


@pytest.mark.parametrize(
    ("direction", "arch", "head_dim", "wanted", "family"),
    [
        ("forward", "sm_90a", 64, None, "sm90"),
        ("forward", "sm_90a", 256, None, "sm90"),
        ("forward", "sm_90a", 64, "sm80", "sm80"),
        ("forward", "sm_90", 64, "sm90", "sm80"),
        ("forward", "sm_100", 64, None, "sm80"),
        ("backward", "sm_90a", 128, None, "sm90"),
        ("backward", "sm_90a", 256, None, "sm90"),
        ("backward", "sm_90a", 64, "sm80", "sm80"),
        ("backward", "sm_90", 64, "sm90", "sm80"),
    ],
)
def test_warpgroup_products_are_hopper_s(
    direction, arch, head_dim, wanted, family
):
    problem = small_problem(direction, "float16", head_dim)
    assert plan(problem, device_of_arch(arch), wanted).family == family


@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({}, "sm90"),
        ({"window": (5, 5), "softcap": 1.0, "sink": True}, "sm90"),
        ({"dropout": 0.5}, "sm90"),
        ({"deterministic": True}, "sm90"),
    ],
)
def test_packed_sequences_are_hopper_s(options, family):
    problem = small_problem("backward", "float16", num_sequences=3, **options)
    assert plan(problem, device_of_arch("sm_90a")).family == family


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"segment_ids": True}])
def test_only_integers_need_maxima_of_keys(options, deterministic):
    """And sums of two limbs, but no semaphores."""
    problem = small_problem(
        "backward", "float16", deterministic=deterministic, **options
    )
    decided = plan(problem, device_of_arch("sm_90a"))
    files = [kernel.file for kernel in decided.kernels]
    elements = {x.name: x.elements for x in decided.workspace}
    integers = bool(options) and deterministic
    assert ("prepare/key_maxima.cu" in files) == integers
    assert elements["dq_sum"] == 128 * 2 * 64 * (1 + integers)
    assert bool(elements["dq_semaphores"]) == (deterministic > integers)


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_blocks_may_take_all_tiles_of_packed_sequences(blocks):
    """Each block records which tile it took before another."""
    device = replace(device_of_arch("sm_90a"), num_sms=blocks)
    decided = plan(small_problem("forward", "float16", num_sequences=2),
                   device)  # fmt: skip
    assert decided.work_items.items == 2 * (
        128 // decided.tile.block_q + 2 + 1
    )
    elements = {x.name: x.elements for x in decided.workspace}
    assert elements == {
        "sequence_stats": 1, "tile_counter": 1,
        "previous_tiles": decided.work_items.items,
    }  # fmt: skip
    resident = blocks * decided.tile.blocks_per_sm
    assert decided.launches[-1].blocks == min(
        resident, decided.work_items.items
    )


@pytest.mark.parametrize(
    ("head_dim", "changes", "items", "of_item"),
    [(64, {}, 6, 1), (256, {"softcap": 2.0}, 10, 1), (256, {}, 6, 2)],
)
@pytest.mark.parametrize("blocks", [2, 7, 132])
def test_key_tiles_are_taken_by_as_many_blocks_as_run_at_once(
    blocks, head_dim, changes, items, of_item
):
    """The tiles of two heads, or clusters' pairs of tiles.

    Before them, one block per query tile; after them, one of each item too.
    """
    device = replace(device_of_arch("sm_90a"), num_sms=blocks)
    problem = small_problem(
        "backward", "float16", head_dim, batch=2, seqlen_q=300, seqlen_k=300,
        **changes,
    )  # fmt: skip
    decided = plan(problem, device)
    q_tiles = -(-300 // decided.tile.block_q) * 2 * 2
    running = of_item * min(blocks // of_item, items)
    assert [x.blocks for x in decided.launches] == [
        q_tiles, running, q_tiles + items,
    ]  # fmt: skip


def test_large_tiles_are_valid_only_if_they_fit():
    problem = small_problem("forward", "float16", 256)
    small, large = (
        set(legal_tiles(problem, device_of_arch(arch), "sm80"))
        for arch in ("sm_86", "sm_90a")
    )
    assert small < large


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (128, 255, 0, (2, 8 / 64)),  # 8192 registers a warp, 65536 in all
        (128, 255, 100 << 10, (1, 4 / 64)),  # 164 KiB, 1 of them a block's
        (1024, 32, 0, (2, 1.0)),  # 64 warps
        (64, 16, 0, (32, 1.0)),
        (256, 40, 40 << 10, (4, 32 / 64)),
    ],
)
def test_occupancy(threads, registers, shared, expected):
    """Limited by registers, shared memory or warps of sm_80."""
    (kernel,) = planned("forward").kernels
    kernel = replace(kernel, threads=threads, shared_bytes=shared)
    assert occupancy(kernel, registers, device_of_arch("sm_80")) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_a_deterministic_dq_has_semaphores(deterministic):
    decided = planned("backward", deterministic=deterministic)
    elements = {x.name: x.elements for x in decided.workspace}
    assert ("dq_semaphores" in elements) == deterministic
    assert ("tile_counter" in elements) == deterministic
    assert elements["dq_sum"] >= 128 * 2 * 64
    others = planned("backward", "float32").workspace
    assert [x.name for x in others] == ["delta"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float16", "sm_90a"), ("float16", "sm_80"), ("float32", "sm_80"),
     ("float32", "sm_75"), ("float64", "sm_80")],
)  # fmt: skip
def test_only_kernels_that_need_delta_read_dlse(dtype, arch, causal):
    """The others serve calls with and without it."""
    problem = small_problem("backward", dtype, causal=causal)
    device = device_of_arch(arch)
    without = plan(problem, device).kernels
    with_dlse = plan(replace(problem, dlse=True), device).kernels
    changed = [b for a, b in zip(without, with_dlse, strict=True) if a != b]
    expected = ["prepare/delta.cu"]
    if arch == "sm_90a":
        expected = ["prepare/row_stats.cu", *["finish/dq.cu"] * causal]
    assert [kernel.file for kernel in changed] == expected
    assert all(("DLSE", True) in kernel.constants for kernel in changed)


@pytest.mark.parametrize("arch", ARCHS)
def test_default_plans_match_the_readme(arch):
    problems = {p.problem for p in default_plans(device_of_arch(arch))}
    found = {(p.direction, p.dtype, p.head_dim, p.causal) for p in problems}
    assert len(found) == len(problems) == 16
    assert {head_dim for _, _, head_dim, _ in found} == {64, 128}
    assert {dtype for _, dtype, _, _ in found} == set(SIXTEEN_BITS)


def test_default_plans_of_sm_75_are_of_float16():
    plans = default_plans(device_of_arch("sm_75"))
    assert len(plans) == 8
    assert {(p.problem.dtype, p.family) for p in plans} == {
        ("float16", "sm80")
    }


def test_a_call_of_a_default_shape_uses_a_default_kernel():
    defaults = {k for p in default_plans(device_of_arch("sm_80"))
                for k in p.kernels}  # fmt: skip
    for direction in DIRECTIONS:
        decided = planned(direction, "bfloat16", seqlen_q=77, batch=3)
        assert set(decided.kernels) <= defaults


@pytest.mark.parametrize(
    ("heads", "tokens", "beside"),
    [(16, 16384, 4), (16, 256, 16), (5, 16384, 5), (64, 65536, 1)],
)
def test_sections_of_packed_sequences_are_alike(heads, tokens, beside):
    """So that the last one has enough tiles for all blocks."""
    problem = small_problem(
        "forward", "float16", 128, seqlen_q=tokens, seqlen_k=tokens,
        num_heads_q=heads, num_heads_kv=heads, num_sequences=129,
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), num_sms=132, l2_bytes=50 << 20)
    assert plan(problem, device).heads_per_section == beside


@pytest.mark.parametrize(
    ("heads", "batch", "tokens", "forward", "backward"),
    [(16, 1, 16384, 4, 4), (16, 1, 4096, 16, 8), (16, 4, 4096, 16, 8),
     (3, 2, 16384, 3, 3), (9, 1, 16384, 5, 5), (7, 1, 65536, 7, 7)],
)  # fmt: skip
def test_sections_of_segments_are_of_heads(
    heads, batch, tokens, forward, backward
):
    """Of four at least, each with the tiles of all batches; all alike.

    A head takes 8 MiB of 25 at 16,384 tokens, and 16 of 25 backward.
    """
    device = replace(device_of_arch("sm_90a"), num_sms=132, l2_bytes=50 << 20)
    found = [
        plan(
            small_problem(
                direction, "float16", 128, batch=batch, seqlen_q=tokens,
                seqlen_k=tokens, num_heads_q=heads, num_heads_kv=heads,
                segment_ids=True,
            ), device,
        ).heads_per_section
        for direction in DIRECTIONS
    ]  # fmt: skip
    assert found == [forward, backward]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_calls_of_nothing_have_plans(empty, causal, deterministic):
    """A traced call is planned, whatever its lengths are."""
    options = {"causal": causal, "deterministic": deterministic}
    for group in (1, 2):
        heads = {"num_heads_q": 2, "num_heads_kv": 2 // group}
        decided = planned(
            "backward", arch="sm_90a", **{empty: 0}, **heads, **options
        )
        assert decided.kernels


@pytest.mark.parametrize(
    ("tokens", "heads", "options", "last"),
    [(1024, 256, {}, 8), (4096, 64, {}, 9), (16384, 16, {}, 13),
     (16384, 1, {}, 0), (4096, 64, {"causal": False}, EVEN_SECTIONS),
     (4096, 64, {"window": (99, 0)}, EVEN_SECTIONS),
     (4096, 64, {"deterministic": True}, 9)],
    ids=str,
)  # fmt: skip
def test_the_last_section_has_two_causal_tiles_a_block(
    tokens, heads, options, last
):
    """Or all tiles, if there are fewer; 264 tiles of 128 keys at least."""
    problem = small_problem(
        "backward", "float16", 128, seqlen_q=tokens, seqlen_k=tokens,
        num_heads_q=heads, num_heads_kv=heads, **{"causal": True} | options,
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), num_sms=132, l2_bytes=50 << 20)
    decided = plan(problem, device)
    assert decided.last_section == last
    left = heads - last * decided.heads_per_section
    assert last in {0, EVEN_SECTIONS} or left * tokens // 128 >= 264


@pytest.mark.parametrize(
    ("head_dim", "tokens", "group", "beside"),
    [(64, 512, 1, 66), (64, 1024, 1, 33), (64, 1024, 4, 12),
     (128, 512, 1, 33), (128, 1024, 1, 16), (256, 512, 1, 16)],
)  # fmt: skip
def test_heads_beside_each_other_in_order(head_dim, tokens, group, beside):
    """Two blocks of all SMs' for each query tile of a head, if L2 has room.

    Of fewer heads more key tiles start together, and wait for one another.
    288 heads: whole ones would keep SMs busy for less than four fifths.
    """
    problem = small_problem(
        "backward", "float16", head_dim, head_dim_v=head_dim, batch=9,
        seqlen_q=tokens, seqlen_k=tokens, num_heads_q=32,
        num_heads_kv=32 // group, deterministic=True,
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), num_sms=132, l2_bytes=50 << 20)
    assert plan(problem, device).heads_per_section == beside


@pytest.mark.parametrize(
    ("tokens", "is_broadcast", "beside"),
    [(16384, True, 4), (16384, False, 1), (4096, True, 1)],
)
def test_few_heads_share_a_bias_at_a_time(tokens, is_broadcast, beside):
    """If it does not fit in L2."""
    problem = small_problem(
        "forward", "float16", 128, seqlen_q=tokens, seqlen_k=tokens,
        num_heads_q=16, num_heads_kv=16, bias="float16",
        bias_is_broadcast=is_broadcast,
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), l2_bytes=50 << 20)
    assert plan(problem, device).heads_per_section == beside


@pytest.mark.parametrize(
    ("options", "pairs"),
    [({"bias": "float16"}, 64), ({}, 64),
     ({"bias": "float16", "window": (1024, None)}, 0),
     ({"segment_ids": True}, 0),
     ({"bias": "float16", "causal": False}, 0)],
    ids=str,
)  # fmt: skip
def test_tiles_that_the_causal_mask_makes_differ_go_in_pairs(options, pairs):
    """Without pairs, the slowest block had 1.5 times the mean work."""
    assert plan_of_sixteen_heads(16384, **options).work_items.pairs == pairs


@pytest.mark.parametrize(
    ("direction", "window", "causal", "beside"),
    [("forward", (9, None), False, 3), ("forward", (0, 8000), False, 6),
     ("forward", (1024, 0), False, 16), ("forward", (1024, None), True, 16),
     ("forward", (None, 9), False, 3), ("backward", (1024, None), True, 16),
     ("backward", (512, 511), False, 16), ("backward", (8191, 0), True, 3),
     ("backward", (None, 9), False, 1), ("backward", (None, None), True, 1)],
)  # fmt: skip
def test_heads_whose_windows_fit_in_l2(direction, window, causal, beside):
    """8 MiB a head without, 4 with half of the keys, of 25.

    Backward 16, and 8 with half of the queries: as many see a key.
    """
    problem = small_problem(
        direction, "float16", 128, seqlen_q=16384, seqlen_k=16384,
        num_heads_q=16, num_heads_kv=16, causal=causal, window=window,
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), l2_bytes=50 << 20)
    assert plan(problem, device).heads_per_section == beside


@both_directions
@pytest.mark.parametrize("dtype", FAMILIES)
def test_only_slopes_and_biases_have_rests_of_lse(direction, dtype):
    """One more launch of backward, and none of other calls."""

    def count(**options):
        made = planned(direction, dtype, **options).kernels
        return sum(kernel.entry == "lse_rests" for kernel in made)

    assert count() == count(causal=True, softcap=5.0, sink=True) == 0
    asked = {"bias": dtype}, {"alibi_slopes": True}
    assert [count(**x) for x in asked] == [direction == "backward"] * 2
