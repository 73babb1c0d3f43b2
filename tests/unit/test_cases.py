"""The cases that Hypothesis draws: their line, and what is made of it."""

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import reference_strategies
import strategies
from cuflash.plans.tiles import Tile
from helpers import calls
from helpers.backends import EmulatedBackend, NumpyBackend
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.host_compiler import needs_compiler
from helpers.punishing import KINDS

EMULATED = EmulatedBackend()
NAMES = {"Case": Case, "Emulation": Emulation, "Tile": Tile}


@given(case=strategies.cases(EMULATED, wide=True))
def test_a_case_prints_as_the_line_that_makes_it(case):
    assert "\n" not in repr(case)
    assert eval(repr(case), NAMES) == case


@given(case=strategies.cases(NumpyBackend()))
def test_arrays_follow_from_the_case(case):
    again = eval(repr(case), NAMES)
    for a, b in zip(inputs(case), inputs(again), strict=True):
        assert_bitwise(a, b, "input")


DRAWN = {
    "cases": strategies.cases(EMULATED),
    "spoiled": strategies.spoiled(EMULATED, "float32", ["q"]),
    "packed_cases": strategies.packed_cases(EMULATED),
    "optional_cases": strategies.optional_cases(EMULATED),
    "decode_cases": strategies.decode_cases(EMULATED),
    "kvcache_cases": strategies.kvcache_cases(EMULATED),
    "reference_cases": reference_strategies.reference_cases(),
    "reference's optional_cases": reference_strategies.optional_cases(),
}


@pytest.mark.parametrize("which", DRAWN)
def test_all_draw_data_that_punishes(which):
    """NoSuchExample says that none of 1,000 cases has that data."""
    kind = KINDS[-1].__name__
    once = settings(
        max_examples=1000, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    find(DRAWN[which], lambda case: case.values == kind, settings=once)


def numbers_of_keys(backend):
    return st.integers(0, 9).map(lambda n: Case(seqlen_k=n))


def run_until_it_fails(**options):
    """Return the cases of a test that fails from four keys on."""
    seen = []

    @on_each_backend(numbers_of_keys, **options)
    def fails(backend, case):
        seen.append(case)
        assert case.seqlen_k < 4

    with pytest.raises(AssertionError):
        fails(NumpyBackend())
    return seen


def test_a_failure_shrinks():
    assert run_until_it_fails()[-1] == Case(seqlen_k=4)


def test_examples_run_first():
    kept = Case(seqlen_k=1234)
    assert run_until_it_fails(examples=[kept])[0] == kept


@needs_compiler
@pytest.mark.parametrize("tile", [Tile(32, 16, 2), Tile(64, 128, 2)])
def test_the_emulated_tile_is_that_of_the_case(caplog, tile):
    case = Case("float16", on=Emulation(forward_tile=tile))
    with caplog.at_level("INFO", "cuflash"):
        calls.forward(EMULATED, case, *inputs(case)[:3])
    assert f"[{tile}]" in caplog.text
