"""How traces, states and counts of the reference print."""

import numpy as np

from cuflash.reference import machine, traffic
from cuflash.reference.attention import gradient_steps
from cuflash.reference.tile_state import TileState


def test_a_trace_is_a_numbered_list():
    trace = machine.online_softmax(2)
    lines = str(trace).splitlines()
    assert len(lines) == len(trace)
    assert lines[0] == "  1  LOAD x[0], R0"
    assert lines[-1] == " 24  STORE R0, out[1]"
    assert repr(trace) == str(trace)


def test_every_program_is_a_trace():
    made = [
        machine.dot_product(0, 1),
        machine.matmul(),
        machine.inner_product_matmul(),
        machine.outer_product_matmul(),
        machine.wide_inner_product_matmul(),
        machine.safe_softmax(2),
        machine.online_softmax(2),
    ]
    assert all(isinstance(trace, machine.Trace) for trace in made)


def test_a_run_says_what_it_counted():
    dram = {"x": np.zeros(1), "out": np.zeros(1)}
    done = machine.run(machine.safe_softmax(1), dram, registers=3)
    assert str(done) == (
        "10 cycles (LOAD 3, SUB 2, EXP 2, MOV 1, DIV 1, STORE 1), 3 registers"
    )


def test_a_state_has_a_line_for_each_row():
    scores = np.log([[[1.0, 2.0], [4.0, 4.0]]])
    state = TileState.of_tile(scores, np.array([[[1.0, 2.0], [3.0, 4.0]]]))
    assert str(state).splitlines() == [
        "m 0.693  l 1.500  acc [3.5 5. ]",
        "m 1.386  l 2.000  acc [4. 6.]",
    ]


def test_an_empty_state_prints():
    assert str(TileState.empty((1,), 2)) == "m -inf  l 0.000  acc [0. 0.]"
    assert str(TileState.empty((0,), 2)) == ""


def test_gradient_steps_name_what_there_is():
    q, k, v, dout = np.ones((4, 2, 1))
    text = str(gradient_steps(dout, q, k, v))
    names = [line for line in text.splitlines() if line.isidentifier()]
    assert names == ["p", "dv", "dp", "delta", "ds_bias", "ds", "dq", "dk"]


def test_a_report_adds_up():
    counts = {"q": traffic.Count(1000, 0), "out": traffic.Count(1, 500)}
    *_, last = traffic.report(counts).splitlines()
    assert last.split() == ["total", "1,001", "500"]
    assert traffic.total(counts) == 1501
