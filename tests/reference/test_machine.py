"""The register machine: cycles, loads and registers, and right numbers."""

import numpy as np
import pytest
import scipy.special

from cuflash.reference import machine
from helpers.compare import assert_all, assert_arrays_equal
from helpers.reference_cases import EPS, assert_close

A = np.array([[2.0, 3.0], [5.0, 7.0]])
B = np.array([[11.0, 13.0], [17.0, 19.0]])

# Trace, registers, LOADs, cycles.
MATMULS = [
    (machine.matmul, 3, 16, 28),
    (machine.inner_product_matmul, 3, 13, 25),
    (machine.outer_product_matmul, 6, 10, 22),
    (machine.wide_inner_product_matmul, 6, 8, 20),
]
LENGTHS = [1, 2, 3, 8, 33]


def multiply(trace, registers):
    dram = {"a": A, "b": B, "c": np.full((2, 2), np.nan)}
    return machine.run(trace, dram, registers)


def softmax(trace, x, registers):
    dram = {"x": x, "out": np.full(len(x), np.nan)}
    return machine.run(trace, dram, registers)


def test_c00_takes_seven_cycles_as_the_document_writes_them():
    assert [str(x) for x in machine.dot_product(0, 0)] == [
        "LOAD a[0][0], R0",
        "LOAD b[0][0], R1",
        "MAC_Z R0, R1, R2",
        "LOAD a[0][1], R0",
        "LOAD b[1][0], R1",
        "MAC R0, R1, R2, R2",
        "STORE R2, c[0][0]",
    ]
    result = multiply(machine.dot_product(0, 0), 3)
    assert (result.cycles, result.registers) == (7, 3)
    assert result.dram["c"][0, 0] == (A @ B)[0, 0]


@pytest.mark.parametrize("make, registers, loads, cycles", MATMULS)
def test_matrix_product(make, registers, loads, cycles):
    result = multiply(make(), registers)
    assert result.registers == registers
    assert (result.loads, result.stores) == (loads, 4)
    assert result.counts["MAC_Z"] == result.counts["MAC"] == 4
    assert result.cycles == cycles == loads + 8 + 4
    # Small integers: every product and sum is exact.
    assert_arrays_equal(result.dram["c"], A @ B, "c")


def test_outer_product_walks_as_the_document_does():
    loads = [
        str(x.sources[0])
        for x in machine.outer_product_matmul()
        if x.name == "LOAD"
    ]
    assert " ".join(loads) == (
        "a[0][0] b[0][0] b[0][1] a[1][0] b[0][0] "
        "a[0][1] b[1][0] b[1][1] a[1][1] b[1][0]"
    )


def test_no_matrix_product_can_load_less_than_the_wide_one():
    trace = machine.wide_inner_product_matmul()
    loaded = [x.sources[0] for x in trace if x.name == "LOAD"]
    assert len(loaded) == len(set(loaded)) == A.size + B.size


@pytest.mark.parametrize(
    "make, registers, moved",
    [(machine.matmul, 3, 20), (machine.inner_product_matmul, 3, 17),
     (machine.outer_product_matmul, 6, 14),
     (machine.wide_inner_product_matmul, 6, 12)],
)  # fmt: skip
def test_intensity_of_a_matrix_product(make, registers, moved):
    # [000]'s quiz: 8 MACs in 28, 25, 22 and 20 cycles.
    assert multiply(make(), registers).intensity == 8 / moved


def test_one_more_register_nearly_doubles_the_intensity_of_softmax():
    # Arithmetic instructions per element: MAX; SUB, EXP, ADD; SUB, EXP, DIV
    # in three passes, 7 + 3 in two. The first element takes 2 and 5 fewer.
    n, x = 1000, np.zeros(1000)
    safe = softmax(machine.safe_softmax(n), x, 3).intensity
    online = softmax(machine.online_softmax(n), x, 4).intensity
    assert safe == (7 * n - 2) / (4 * n)
    assert online == (10 * n - 5) / (3 * n)


@pytest.mark.parametrize("n", LENGTHS)
def test_safe_softmax_reads_three_times_and_writes_once(n):
    x = np.random.default_rng(n).standard_normal(n)
    result = softmax(machine.safe_softmax(n), x, 3)
    assert (result.loads, result.stores, result.registers) == (3 * n, n, 3)
    assert_is_softmax(result, x)


@pytest.mark.parametrize("n", LENGTHS)
def test_online_softmax_reads_twice_and_writes_once(n):
    x = np.random.default_rng(n).standard_normal(n)
    result = softmax(machine.online_softmax(n), x, 4)
    assert (result.loads, result.stores) == (2 * n, n)
    assert_is_softmax(result, x)


def test_online_softmax_needs_the_fourth_register():
    trace = machine.online_softmax(2)
    assert softmax(trace, np.zeros(2), 4).registers == 4
    with pytest.raises(ValueError, match="no R3 among 3 registers"):
        softmax(trace, np.zeros(2), 3)


@pytest.mark.parametrize(
    "make", [machine.safe_softmax, machine.online_softmax]
)
def test_softmax_of_large_numbers_does_not_overflow(make):
    result = softmax(make(3), np.array([-1e300, 1e300, 1e300]), 4)
    assert_arrays_equal(result.dram["out"], [0, 0.5, 0.5], "out")


def assert_is_softmax(result, x):
    # Exponents up to R = 2 max|x| are off by EPS R, and for each of n
    # elements the sum has at most a rescaling (exponents that add up to R),
    # a product and an addition; numerator and denominator, on both sides.
    r = 2 * abs(x).max()
    rel = 2 * 2 * (2 * r + 3 * len(x) + 4) * EPS
    assert_close(result.dram["out"], scipy.special.softmax(x), rel)


def test_online_step_costs_nine_instructions():
    cycles = [
        softmax(machine.online_pass(n), np.zeros(n), 4).cycles
        for n in (1, 2, 3)
    ]
    assert cycles == [5, 14, 23]


def test_register_must_be_written_before_it_is_read():
    with pytest.raises(ValueError, match="SUB R0, R1, R0: R1 was never"):
        softmax(machine.normalise_pass(1), np.zeros(1), 3)


def test_dram_of_the_caller_is_not_changed():
    c = np.zeros((2, 2))
    machine.run(machine.matmul(), {"a": A, "b": B, "c": c}, 3)
    assert_all(c, 0, "c")


def test_load_stays_if_its_register_was_used_between():
    trace = [
        machine.load("a", 0, 0, to=0),
        machine.load("a", 0, 0, to=0),
        machine.op("MOV", 0, 1),
        machine.op("MUL", 0, 1, 0),
        machine.load("a", 0, 0, to=0),
    ]
    kept = machine.without_repeated_loads(trace)
    assert [x.name for x in kept] == ["LOAD", "MOV", "MUL", "LOAD"]
