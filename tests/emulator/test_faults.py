"""Kernels with one bug each: the emulator finds it, and only where it is.

A kernel of ``tests/cuda/broken/`` has its bug while the constant BROKEN
is true, and is sound without it. Its lines marked ``caught here`` are those
at which the fault may be found, by the order of the warps.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.backends.emulator import runtime
from cuflash.backends.emulator.machine import BoxesOf
from cuflash.errors import KernelFault
from helpers.host_compiler import needs_compiler
from helpers.small_kernels import KERNELS, is_hopper, read_only, run

pytestmark = needs_compiler

FOLDER = KERNELS / "broken"

# ---- What kernels get, and what sound ones make of it: (arguments, right)


def copied(count=64):
    """Most kernels copy x to out, by different means."""
    x = np.arange(1, count + 1, dtype=np.float32)
    out = np.full_like(x, np.nan)
    return {"x": read_only(x), "out": out}, {"out": x}


def copied_with(**more):
    arguments, right = copied()
    return {**arguments, **more}, right


def copied_by_way_of_memory():
    arguments, right = copied()
    return {**arguments, "between": np.full(64, np.nan, np.float32)}, right


def copied_rows(columns, stride):
    """16 rows with gaps between them."""
    x = np.arange(16 * stride, dtype=np.float32).reshape(16, stride)
    x, out = x[:, :columns], np.full_like(x, np.nan)[:, :columns]
    return {"x": read_only(x), "out": out}, {"out": x}


def copied_backwards_by_blocks():
    x = np.arange(64, dtype=np.float32)
    out = np.full(4 * 64, np.nan, np.float32)
    return {"x": read_only(x), "out": out}, {"out": np.tile(x[::-1], 4)}


def copied_zeros():
    x = np.zeros(64, np.float32)
    return {"x": read_only(x), "out": np.full_like(x, np.nan)}, {"out": x}


def multiplied(columns, transposed=False):
    """Small integers: float16 holds them, and their sums are exact."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-8, 8, (2, 16, 16)).astype(np.float32)
    y = y[:, :columns].copy()
    right = x @ (y.T if transposed else y)
    out = np.full_like(right, np.nan)
    return {"x": read_only(x), "y": read_only(y), "out": out}, {"out": right}


def warpgroup_multiplied():
    """x y^T of 64 rows each."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-8, 8, (2, 64, 16)).astype(np.float16)
    right = x.astype(np.float32) @ y.T.astype(np.float32)
    out = np.full_like(right, np.nan)
    return {"x": read_only(x), "y": read_only(y), "out": out}, {"out": right}


def one_box():
    """Eight rows of 64 elements, and a target of that size."""
    x = np.arange(512, dtype=np.uint16).reshape(1, 8, 1, 64)
    return read_only(x), np.full_like(x, 0xFFFF)


def box_loaded():
    x, out = one_box()
    return {"x": BoxesOf(x, 8), "out": out}, {"out": x}


def box_stored():
    x, out = one_box()
    return {"out": BoxesOf(out, 8), "x": x}, {"out": x}


def summed():
    """Blocks in order: sums = 2 sums + x depends on the order."""
    x = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)
    sums, turns = np.zeros(64, np.float32), np.zeros(2, np.int32)
    right = np.float32([8, 4, 2, 1]) @ x
    return {"x": read_only(x), "sums": sums, "turns": turns}, {"sums": right}


# ---- The kernels


@dataclass(frozen=True)
class Case:
    """A kernel of the folder, its launch, and the fault's message."""

    name: str
    words: str = ""
    make: Callable = copied
    threads: int = 64
    blocks: int = 1
    shared_bytes: int = 256
    resident: int = 0
    cluster: int = 1

    def launch(self, broken, **options):
        """Run the kernel; return whether the result is right."""
        arguments, right = self.make()
        run(
            f"broken/{self.name}",
            arguments,
            constants={"BROKEN": broken, "CLUSTER_BLOCKS": self.cluster},
            threads=self.threads,
            blocks=self.blocks,
            shared_bytes=self.shared_bytes,
            **{"resident": self.resident, **options},
        )
        return all(
            np.array_equal(array_of(arguments[name]), x)
            for name, x in right.items()
        )

    @property
    def text(self):
        return (FOLDER / f"{self.name}.cu").read_text()

    def lines(self):
        """Return the lines at which the fault may be reported."""
        numbered = enumerate(self.text.splitlines(), start=1)
        return {n for n, line in numbered if line.endswith("// caught here")}


def array_of(argument):
    return argument.array if isinstance(argument, BoxesOf) else argument


def some(count):
    return lambda: copied(count)


UNDER_WAY = r"where a copy of thread \d+ is in flight"
UNWRITTEN = "which no thread of the block has written"
UNORDERED = "without a barrier in between"
RACE = f"{UNWRITTEN}|{UNORDERED}|{UNDER_WAY}"
OVERRUN = r"(\d+) of shared memory, which has \1$"
UNDERRUN = r"byte -4 of shared memory, which has 256"
UNFENCED = "has written without fence.proxy.async"
IN_USE = "reads the accumulator of a wgmma that it has not waited for"
STUCK = "no thread can continue:"
GAP = "in a gap between its rows|of (x|out), which has"
MISALIGNED = r"0x[0-9a-f]+ is not aligned to 16 bytes"
OUTSIDE = "out of the bounds of an array"
IN_TURN = {"make": summed, "blocks": 4}
LDMATRIX = {"make": some(128), "threads": 32, "shared_bytes": 512}

# Found whatever the seed.
FAULTS = [
    # Asynchronous copies
    Case("cp_async_no_wait", UNDER_WAY),
    Case(
        "cp_async_waits_for_one_too_few",
        UNDER_WAY,
        some(128),
        shared_bytes=512,
    ),
    Case("cp_async_not_committed", UNDER_WAY),
    Case("cp_async_no_barrier", RACE),
    Case(
        "cp_async_overwrites_what_is_read", RACE, some(512), shared_bytes=512
    ),
    Case(
        "cp_async_past_the_end",
        "16 bytes at byte 240 of x, which has 248",
        some(62),
    ),
    Case(
        "cp_async_too_many_bytes", "cp.async reads 20 of 16 bytes", threads=16
    ),
    Case("cp_async_misaligned_source", MISALIGNED, threads=16),
    Case(
        "cp_async_misaligned_target", MISALIGNED, threads=16, shared_bytes=512
    ),
    Case("cp_async_target_written", UNDER_WAY),
    Case("cp_async_same_target", f"{UNDER_WAY}|{UNORDERED}"),
    # Threads that meet
    Case("no_syncthreads_before_read", RACE),
    Case("no_syncthreads_before_overwrite", UNORDERED, some(128)),
    Case("two_warps_write_one_word", UNORDERED),
    Case("no_syncwarp_before_read", RACE),
    Case("no_syncwarp_before_overwrite", UNORDERED, some(128)),
    Case("two_lanes_write_one_word", UNORDERED),
    Case("shuffle_for_syncwarp", UNORDERED),
    Case("syncthreads_in_half", "waits in __syncthreads while other threads"),
    Case(
        "syncthreads_in_two_branches",
        "waits in __syncthreads while other threads",
    ),
    Case("syncthreads_after_return", STUCK),
    Case("syncthreads_in_uneven_loop", STUCK, some(128)),
    Case("syncwarp_in_half", STUCK),
    Case(
        "shuffle_lane_outside_mask",
        "mask 0x7fffffff, which lacks its own lane",
    ),
    Case("shuffle_lane_never_comes", STUCK),
    Case("shuffle_masks_differ", STUCK),
    Case("mma_without_a_lane", STUCK, some(128), threads=32),
    Case("ldmatrix_in_half", STUCK, **LDMATRIX),
    Case(
        "ldmatrix_misaligned", MISALIGNED, **{**LDMATRIX, "shared_bytes": 1024}
    ),
    Case("ldmatrix_past_the_end", OVERRUN, **LDMATRIX),
    Case("ldmatrix_no_syncwarp", RACE, **LDMATRIX),
    Case("ldmatrix_no_syncwarp_own_row", RACE, **LDMATRIX),
    # Memory
    Case("shared_read_past_the_end", OVERRUN),
    Case("shared_write_past_the_end", OVERRUN),
    Case("store_shared_past_the_end", OVERRUN),
    Case("shared_before_the_start", UNDERRUN),
    Case("shared_written_before_the_start", UNDERRUN),
    Case("shared_never_written", UNWRITTEN),
    Case(
        "shared_of_a_former_block",
        UNWRITTEN,
        copied_backwards_by_blocks,
        blocks=4,
    ),
    Case("global_read_past_the_end", "byte 256 of x, which has 256"),
    Case("global_write_past_the_end", "byte 256 of out, which has 256"),
    Case("global_read_before_the_start", "byte -4 of x, which has 256"),
    Case("atomic_past_the_end", "byte 256 of out, which has 256"),
    Case(
        "struct_past_the_end",
        "24 bytes at byte 224 of x, which has 240",
        some(60),
        threads=10,
    ),
    Case("gap_read", GAP, lambda: copied_rows(4, 6)),
    Case("gap_written", GAP, lambda: copied_rows(4, 6)),
    Case("gap_in_a_wide_read", GAP, lambda: copied_rows(3, 8), threads=16),
    Case("input_written", "of x, which is an input"),
    Case(
        "null_pointer",
        "writes at address .*, which belongs to no array",
        lambda: copied_with(lse=np.empty(0, np.float32)),
    ),
    Case("wild_pointer", "reads at address .*, which belongs to no array"),
    Case("reduce_misaligned", MISALIGNED, threads=16),
    Case("float4_misaligned", MISALIGNED, threads=16),
    Case("shared_float4_misaligned", MISALIGNED, threads=16, shared_bytes=512),
    Case(
        "local_past_the_end", OUTSIDE, lambda: copied_with(one=1), threads=16
    ),
    Case("row_past_its_end", OUTSIDE),
    # Blocks that wait for one another
    Case("turn_of_a_later_block", STUCK, **IN_TURN, resident=2),
    Case("turn_never_passed", STUCK, **IN_TURN),
]

# The same for Hopper's instructions.
PRODUCT = {"make": warpgroup_multiplied, "threads": 128,
           "shared_bytes": 16384}  # fmt: skip
LOAD = {"make": box_loaded, "shared_bytes": 1032}
STORE = {"make": box_stored, "shared_bytes": 1024}
PAIR = {"threads": 32, "blocks": 2, "cluster": 2, "shared_bytes": 320}
NOT_OWN = r"shared memory of block (\d) of the cluster, in block (?!\1)"
REGISTERS = {"make": some(384), "threads": 384}
FAULTS_ON_HOPPER = [
    # Products of a warpgroup
    Case("wgmma_no_wait", IN_USE, **PRODUCT),
    Case("wgmma_waits_for_one_too_few", IN_USE, **PRODUCT),
    Case("wgmma_not_committed", IN_USE, **PRODUCT),
    Case("wgmma_operand_overwritten", "writes an operand of", **PRODUCT),
    Case("wgmma_no_fence", "without wgmma.fence", **PRODUCT),
    Case("wgmma_no_proxy_fence", UNFENCED, **PRODUCT),
    Case("wgmma_no_syncthreads", RACE, **PRODUCT),
    Case("wgmma_swizzle_of_64_bytes", "no 128-byte swizzle", **PRODUCT),
    # Bulk copies, and barriers that count their bytes
    Case("tma_load_no_wait", UNDER_WAY, **LOAD),
    Case("tma_load_wrong_bytes", STUCK, **LOAD),
    Case(
        "tma_load_overwrites_what_is_read",
        # Or the copy is through while a thread still waits for the first.
        rf"{RACE}|phase 2 lacks 1 of 1 arrival",
        **LOAD,
    ),
    Case("tma_load_under_way_at_the_end", "block 0 ends while", **LOAD),
    Case("mbarrier_wrong_parity", UNDER_WAY, **LOAD),
    Case("mbarrier_arrival_missing", STUCK, **LOAD),
    Case("mbarrier_phase_missed", STUCK, shared_bytes=16),
    Case("mbarrier_not_fenced", "was not fenced", **LOAD),
    Case("mbarrier_no_barrier", "no mbarrier|without a barrier", **LOAD),
    Case("pipeline_stage_never_filled", STUCK, shared_bytes=272),
    Case("cluster_source_overwritten", "of block 0 may still read", **PAIR),
    Case("cluster_past_the_end", "which has 320$", **PAIR),
    Case("cluster_into_the_next_block", "which has 320$", **PAIR),
    Case("cluster_address_of_another_block", NOT_OWN, **PAIR),
    Case("cluster_waits_at_another_block", NOT_OWN, **PAIR),
    Case(
        "cluster_arrival_missing",
        "mbarrier at byte 256 of block 1: phase 0 lacks 1 of 1 arrival",
        **PAIR,
    ),
    Case("tma_store_no_proxy_fence", UNFENCED, **STORE),
    Case("tma_store_no_syncthreads", RACE, **STORE),
    Case("tma_store_not_committed", "the thread ends while", **STORE),
    Case("tma_store_no_wait", "the thread ends while", **STORE),
    Case("tma_store_source_overwritten", "may still read", **STORE),
    # Barriers of some threads
    Case("bar_sync_count_too_large", STUCK),
    Case("bar_sync_counts_differ", r"for (64|96) threads, others for"),
    Case("bar_sync_of_another_barrier", STUCK),
    Case("bar_arrive_does_not_wait", RACE),
    Case("bar_arrive_for_nobody", "has 32 of its 64 threads when the block"),
    # Registers
    Case("setmaxnreg_too_many", "need 66560 registers", **REGISTERS),
    Case("setmaxnreg_never_given", "need 82944 registers", **REGISTERS),
    Case("setmaxnreg_takes_fewer", "takes registers: from 168", **REGISTERS),
]

# No fault, but a result that is wrong whatever the seed.
WRONG_RESULTS = [
    Case("cp_async_source_overwritten"),
    Case("shuffle_partner_outside_mask"),
    Case("global_no_syncthreads", make=copied_by_way_of_memory),
    Case("sum_never_cleared", make=lambda: copied_with(turns=1)),
    Case("mma_swapped_a", make=lambda: multiplied(8), threads=32),
    Case("mma_swapped_b", make=lambda: multiplied(8), threads=32),
    Case(
        "ldmatrix_wrong_chunks",
        make=lambda: multiplied(16, True),
        threads=32,
        shared_bytes=1024,
    ),
]

# A fault or a wrong result with some seeds: global memory is not watched for
# races, nor are lanes that a mask of __syncwarp leaves out.
FOUND_BY_SOME_SEEDS = [
    Case("no_turns", **IN_TURN),
    Case("turn_not_waited_for", **IN_TURN),
    Case("turn_by_block_index", STUCK, **IN_TURN),
    Case("turn_passed_too_early", **IN_TURN),
    Case("syncwarp_mask_too_small"),
    Case("mbarrier_waits_once", **LOAD),
    Case("cluster_block_has_ended", "which has ended", **PAIR),
    Case("cluster_copy_under_way_at_the_end", "block 0 ends while", **PAIR),
]

# Kernels without an end: no line is known.
ENDLESS = [
    Case(
        "endless_loop",
        r"endless_loop: did not end within 0\.5 s",
        copied_zeros,
    ),
    Case("endless_recursion", r"block 0, thread \d+: signal 11 .*overflow"),
    Case("stack_overflow", r"block 0, thread \d+: a stack overflow"),
]

ALL_FAULTS = [*FAULTS, *FAULTS_ON_HOPPER]
CASES = [*ALL_FAULTS, *WRONG_RESULTS, *FOUND_BY_SOME_SEEDS, *ENDLESS]


def of(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# A third of the profile's examples: the kernels are many.
on_seeds = given(seed=st.integers(0, 2**32 - 1))
fewer = settings(max_examples=settings().max_examples // 3)


# ---- The bugs


def test_every_kernel_of_the_folder_is_tried():
    files = {file.stem for file in FOLDER.iterdir()}
    assert files == {case.name for case in CASES}
    assert len(files) == len(CASES)


@of(ALL_FAULTS)
@fewer
@on_seeds
def test_a_bug_is_reported_at_its_line(case, seed):
    with pytest.raises(KernelFault, match=case.words) as fault:
        case.launch(True, seed=seed)
    line = re.search(rf"{case.name}\.cu:(\d+)", fault.value.message)[1]
    assert int(line) in case.lines()


# Copies that are complete at once race at their call; nothing is under way.
RACES_OF_COPIES = [
    case for case in FAULTS
    if case.name in ("cp_async_no_barrier",
                     "cp_async_overwrites_what_is_read")
]  # fmt: skip


@of(RACES_OF_COPIES)
@fewer
@on_seeds
def test_a_race_of_copies_that_are_complete_at_once(case, seed):
    with pytest.raises(KernelFault, match=RACE):
        case.launch(True, seed=seed, arch="sm_75")
    assert case.launch(False, seed=seed, arch="sm_75")


@of(WRONG_RESULTS)
@fewer
@on_seeds
def test_a_bug_makes_the_result_wrong(case, seed):
    assert not case.launch(True, seed=seed)


@of(FOUND_BY_SOME_SEEDS)
def test_some_seed_finds_a_bug(case):
    def found(seed):
        try:
            return not case.launch(True, seed=seed, resident=2)
        except KernelFault as fault:
            return re.search(case.words or RACE, fault.message)

    assert any(map(found, range(100)))


@of(ENDLESS)
def test_a_kernel_without_an_end_is_ended(case):
    with pytest.raises(KernelFault, match=case.words):
        case.launch(True, timeout=0.5)


# ---- No false alarms


@of(CASES)
@fewer
@on_seeds
def test_the_same_kernel_without_its_bug_is_sound(case, seed):
    assert case.launch(False, seed=seed)


@pytest.mark.gpu
@of([case for case in CASES if case not in ENDLESS])  # a GPU's stack is small
def test_a_gpu_agrees_that_it_is_sound(case):
    if "On sm_90a" in case.text and not is_hopper():
        pytest.skip("no Hopper GPU")
    assert case.launch(False, backend="gpu")


@fewer
@given(seed=st.integers(0, 2**32 - 1), resident=st.integers(1, 6))
def test_tickets_of_any_number_of_blocks(seed, resident):
    case = Case("no_turns", **IN_TURN, resident=resident)
    assert case.launch(False, seed=seed)


# ---- What is said


def message(name):
    """Return the message without paths, and the lines of the bug."""
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(KernelFault) as fault:
        replace(case, resident=1).launch(True)
    said = str(fault.value).replace(f"{FOLDER}/", "")
    return said, *(f"{name}.cu:{line}" for line in sorted(case.lines()))


def test_a_message_names_thread_access_and_line():
    said, place = message("global_read_past_the_end")
    assert said == (
        "global_read_past_the_end: block 0, thread 63 (warp 1, lane 31),"
        f" {place}: reads 4 bytes at byte 256 of x, which has 256"
    )


def test_a_message_names_waiting_threads():
    said, place = message("syncthreads_after_return")
    assert said.splitlines() == [
        "syncthreads_after_return: no thread can continue:",
        "    block 0, threads 0 to 39 (warps 0 to 1) wait in __syncthreads at"
        f" {place} for 24 of 64 threads",
        "    block 0, threads 40 to 63 (warp 1) have ended",
    ]


def test_a_message_names_barriers_and_missing_arrivals():
    said, waits, reads, meets = message("pipeline_stage_never_filled")
    said = re.sub(r"(pipeline\.cuh):\d+", r"\1", said)
    assert said.splitlines() == [
        "pipeline_stage_never_filled: no thread can continue:",
        "    block 0, mbarrier full[1]: phase 0 lacks 32 of 32 arrivals",
        "    block 0, barrier 2 (STAGE_READ + 1): 32 of 64 threads have"
        " arrived",
        "    block 0, threads 0 to 31 (warp 0) wait in bar.sync at"
        f" {meets} for barrier 2 (STAGE_READ + 1)",
        "    block 0, threads 32 to 63 (warp 1) wait in mbarrier.try_wait at"
        f" sm90/pipeline.cuh (in {waits}, {reads}) for mbarrier full[1]",
    ]


def test_a_message_names_awaited_lanes_and_values():
    said, *_ = message("mma_without_a_lane")
    assert "threads 0 to 30 (warp 0) wait in mma.sync at" in said
    assert " for lane 31\n" in said
    said, *_ = message("turn_never_passed")
    assert " for byte 4 of turns, which holds 0\n" in said


def test_a_message_names_missing_bytes_of_an_mbarrier():
    said, _ = message("tma_load_wrong_bytes")
    assert (
        "mbarrier at byte 1024: phase 0 lacks 0 of 1 arrival; 512 bytes are"
        " expected, 1024 are in flight\n"
    ) in said


def test_a_program_without_lines_gets_them_for_a_message(monkeypatch):
    """Compiled with lines, each address is what it was."""
    said = message("pipeline_stage_never_filled")
    monkeypatch.setattr(runtime, "is_own", lambda kernel: True)
    assert message("pipeline_stage_never_filled") == said


@pytest.mark.parametrize(
    ("name", "header"),
    [("wgmma_no_proxy_fence", "wgmma"), ("tma_store_no_wait", "pipeline")],
)
def test_a_message_lists_the_inlined_calls(name, header):
    """Also if the thread has moved on when the fault is detected."""
    said, place = message(name)
    assert re.search(rf", sm90/{header}\.cuh:\d+ \(in {place}\): ", said)
