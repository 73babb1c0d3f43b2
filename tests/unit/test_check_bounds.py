"""What `python -m cuflash check` notices: results past their bounds."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.check import data, options
from cuflash.check.calls import VALUES, Call, Shape
from cuflash.check.compare import compared
from cuflash.check.expected import expected
from cuflash.check.places import Cpu
from cuflash.check.run import launch, placed, run
from helpers.compare import assert_finite

DTYPES = ("float16", "bfloat16", "float32")
on_data = pytest.mark.parametrize("values", VALUES)
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)
CPU = Cpu()


def call_of(dtype, values, **others):
    return Call("backward", dtype, Shape(1, 129, 129), values, **others)


def past(call, got):
    """Return the names of results that are past their bounds."""
    wanted = expected(call)
    return [x for x, y in got.items() if compared(x, y, wanted[x]).worst > 1]


@on_data
@on_dtypes
def test_right_results_are_within(dtype, values):
    call = call_of(dtype, values)
    assert past(call, run(call, CPU)) == []


@pytest.mark.parametrize("key", [0, 63, 64, 128])
@on_data
@on_dtypes
def test_a_key_that_is_left_out_is_noticed(dtype, values, key):
    """Also the first one under rising scores, of weight e^-6 of the last."""
    call = call_of(dtype, values)
    given, arrays = placed(call, CPU)
    given["mask"] = np.arange(129)[None] != key
    given["mask"] = np.repeat(given["mask"], 129, axis=0)
    assert "dv" in past(call, launch(call, arrays, given))


@pytest.mark.parametrize("query", [0, 64, 128])
@on_data
@on_dtypes
def test_a_query_that_is_left_out_is_noticed(dtype, values, query):
    """Rising keys are parallel, so that in dq all roundings add up."""
    call = call_of(dtype, values)
    given, arrays = placed(call, CPU)
    arrays["dout"][:, query] = 0
    wanted = {"dv"} if values == "rising" else {"dq", "dv"}
    assert wanted <= set(past(call, launch(call, arrays, given)))


@on_dtypes
def test_values_of_neighbours_are_told_apart(dtype):
    call = call_of(dtype, "coded")
    given, arrays = placed(call, CPU)
    arrays["v"][:, [64, 65]] = arrays["v"][:, [65, 64]]
    assert "out" in past(call, launch(call, arrays, given))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_one_element_that_nobody_wrote_is_named(wrong):
    call = call_of("float16", "peaked")
    out = run(call, CPU)["out"]
    out[0, 128, 1, 63] = wrong
    found = compared("out", out, expected(call)["out"])
    assert found.worst > 1
    assert str(found).startswith("out[0, 128, 1, 63] is ")


def test_each_option_has_values_in_which_it_counts():
    """Without it, results are past the bounds."""
    for name in options.MAKERS:
        call = replace(call_of("float32", "coded"), options=(name,))
        got = run(replace(call, options=()), CPU)
        if name == options.PACKED:  # arrays without an axis of batch
            got = {x: y[0] for x, y in got.items()}
        assert past(call, got), name


def test_data_are_numbers_of_the_dtype():
    for values in VALUES:
        arrays = data.inputs(call_of("bfloat16", values))
        assert {x.dtype for x in arrays.values()} == {data.NUMPY["bfloat16"]}
        for name, x in arrays.items():
            assert_finite(x, name)
