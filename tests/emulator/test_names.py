"""The names that a fault's message has for shared memory and barriers."""

from pathlib import Path

import pytest

from cuflash.backends.emulator import faults, runtime
from cuflash.plans.plan import KernelPlan
from helpers.host_compiler import needs_compiler
from helpers.kernels import kernels

pytestmark = needs_compiler

TEXT = """\
template <int N> struct Tile { u16 elements[N]; };
struct First { Tile<16> k[2]; };
template <bool> struct Second {};
template <> struct Second<true> { static constexpr int ASKED = 1; u64 asked; };
using Row = float[4];
struct SharedPlan : First, Second<true> {
    Row rows[2][3];
    alignas(64) u64 full;
};
constexpr int EMPTY = 2, FULL = EMPTY + 2, GROUPS = 2;
extern "C" __global__ void named(const __grid_constant__ int group) {
    barrier_sync((group > 5 ? EMPTY : FULL) + (group + 1) % GROUPS, 64);
    barrier_arrive(BROKEN ? 3 : 4, 64);
}
"""


@pytest.fixture
def explained(tmp_path):
    file = tmp_path / "named.cu"
    file.write_text('#include "common/ptx.cuh"\n' + TEXT)
    kernel = KernelPlan(str(file), "named", (("BROKEN", True),), 64, 256)

    def explain(message):
        return faults.explain(message, kernel, "sm_90a", Path("no-program"))

    return explain


@pytest.mark.parametrize(
    ("byte", "name"),
    [(0, "k[0]"), (34, "k[1] + 2"), (64, "asked"), (72, "rows[0][0][0]"),
     (140, "rows[1][1][1]"), (142, "rows[1][1][1] + 2"), (192, "full"),
     (199, "full + 7")],
)  # fmt: skip
def test_a_byte_has_its_member_s_name(explained, byte, name):
    said = f"reads 4 bytes at byte {byte} of shared memory, which"
    named = f"reads 4 bytes at byte {byte} of shared memory ({name}), which"
    assert explained(said) == named


@pytest.mark.parametrize("byte", [170, 200, 1024])
def test_a_byte_between_or_behind_members_has_none(explained, byte):
    said = f"reads 4 bytes at byte {byte} of shared memory, which"
    assert explained(said) == said


def test_an_mbarrier_has_its_name_instead(explained):
    assert explained("the mbarrier at byte 64 of shared memory, which") == (
        "the mbarrier asked, which"
    )
    assert explained("mbarrier at byte 192: phase") == "mbarrier full: phase"


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, None), (2, "EMPTY"), (3, "EMPTY + 1"), (4, "FULL"), (5, "FULL + 1")],
)
def test_a_named_barrier_has_the_constant_below(explained, number, name):
    said = f"barrier {number}: 32 of 64 threads have arrived"
    named = f"barrier {number} ({name})" if name else f"barrier {number}"
    assert explained(said) == said.replace(f"barrier {number}", named)


def test_a_byte_of_an_array_has_none(explained):
    said = "reads 4 bytes at byte 64 of x, which has 64"
    assert explained(said) == said


def test_without_readelf_a_message_stays_as_it_is(explained, monkeypatch):
    monkeypatch.setattr(faults, "READELF", "no-such-program")
    faults._names.cache_clear()
    said = "mbarrier at byte 64: phase 0 lacks 1 of 1 arrival"
    assert explained(said) == said


def test_a_dump_of_another_form_does_not_hide_the_fault(
    explained, monkeypatch
):
    monkeypatch.setattr(faults, "READELF", "echo")
    faults._names.cache_clear()
    assert explained("barrier 2: 32 threads") == "barrier 2: 32 threads"
    dump = " <1><2a>: x (DW_TAG_structure_type)\n <2b> DW_AT_name : SharedPlan"
    member = " <2><3a>: x (DW_TAG_member)\n <3b> DW_AT_data_member_location: x"
    monkeypatch.setattr(faults, "_said", lambda *words: f"{dump}\n{member}")
    faults._names.cache_clear()
    assert explained("barrier 2: 32 threads") == "barrier 2: 32 threads"


HOPPER_S = [
    kernel
    for direction in ("forward", "backward")
    for head_dim in (64, 256)
    for kernel in kernels(direction, "float16", "sm_90a", head_dim)
    if "sm90" in kernel.entry
]


@pytest.mark.parametrize("kernel", HOPPER_S, ids=lambda k: k.entry)
def test_all_shared_memory_of_hopper_s_kernels_has_names(kernel):
    names = faults._names(runtime.text(kernel), "sm_90a")
    end = max(member.start + member.size for member in names.members)
    assert 0 <= kernel.shared_bytes - end < 1024  # Tiles are aligned so
    assert names.barriers
