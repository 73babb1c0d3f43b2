"""The calls of `python -m cuflash check`, by NumPy and on the emulator."""

from dataclasses import replace

import pytest

from cuflash.check import calls, kernels, options
from cuflash.check.calls import Call, Shape
from cuflash.check.compare import compared
from cuflash.check.expected import expected
from cuflash.check.places import Cpu, Emulated
from cuflash.check.run import run
from cuflash.plans.plan import device_of_arch
from cuflash.plans.record import FAMILIES
from cuflash.request.options import TABLE
from helpers.host_compiler import needs_compiler


def faults(call, place):
    """Return the results of a call that are past their bounds."""
    got, wanted = run(call, place), expected(call)
    found = [compared(x, y, wanted[x]) for x, y in got.items()]
    return [str(x) for x in found if not x.worst <= 1]


@pytest.mark.parametrize(
    "call",
    calls.of_cpu(quick=True)[::5],
    ids=lambda x: str(x).replace(" ", "-"),
)
def test_calls_on_numpy_arrays_are_right(call):
    assert faults(call, Cpu()) == []


def test_every_family_and_dtype_has_calls_on_some_gpu():
    all_calls = calls.of_families(quick=False)
    first = {(x.family, x.kind): x for x in reversed(all_calls)}
    found = [
        kernels.planned(first.values(), device_of_arch(arch))
        for arch in ("sm_75", "sm_90a")
    ]
    assert {(x.family, x.kind) for y in found for x in y.calls} == {*first}
    assert {family for family, _ in first} == {*FAMILIES, None}
    assert all(x.kernels for x in found)


def test_a_family_that_a_gpu_lacks_is_named():
    wanted = [
        Call("forward", "float64", Shape(1, 16, 16), family=x)
        for x in ("mma8_float64", "simt")
    ]
    found = kernels.planned(wanted, device_of_arch("sm_75"))
    assert found.calls == wanted[1:]
    assert found.missing == {("mma8_float64", "float64"): "runs by simt"}


def test_a_gpu_that_multiplies_bfloat16_lacks_no_conversion():
    wanted = [Call("forward", "bfloat16", Shape(1, 16, 16), family="fma")]
    for arch, left in (("sm_90a", []), ("sm_75", wanted)):
        found = kernels.planned(wanted, device_of_arch(arch))
        assert (found.calls, found.missing) == (left, {})


def test_each_option_is_checked():
    """But bounds of lengths, which change no result."""
    shape = Shape(1, 16, 16)
    chosen = options.of_call(tuple(options.MAKERS), shape, "float32")
    left_out = {x.name for x in TABLE if not x.of_gradients} - chosen.keys()
    assert left_out == {"max_seqlen_q", "max_seqlen_k"}
    in_sets = {x for names in options.SETS for x in names}
    assert in_sets == {*options.MAKERS}


def test_the_line_of_a_call_names_what_it_is():
    call = Call(
        "backward", "float32", Shape(2, 3, 4), "peaked", ("sink",), "fma"
    )
    line = "fma backward float32 2x3x4 heads 2/1 d 64/64 peaked sink"
    assert str(call) == line
    assert str(replace(call, num_splits=3)).endswith(" num_splits=3")


EMULATED = [
    ("sm_75", Call("backward", "float64", Shape(1, 17, 33), family="simt")),
    ("sm_75", Call("backward", "float16", Shape(1, 33, 65), "peaked",
                   ("causal",), "sm80")),
    ("sm_80", Call("backward", "float32", Shape(1, 33, 65), "peaked",
                   ("causal",), "fma")),
    ("sm_80", Call("backward", "bfloat16", Shape(1, 65, 129), "peaked",
                   ("window", "slopes", "sink"), "sm80")),
    ("sm_80", Call("double_backward", "float32", Shape(1, 33, 49),
                   family="mma8_float32")),
    ("sm_80", Call("kvcache", "float16", Shape(3, 4, 64, 4, 2), "coded",
                   ("causal",), "decode", cache="float8")),
    ("sm_80", Call("readouts", "float32", Shape(1, 17, 33), "coded",
                   ("causal",), "fma")),
    ("sm_90a", Call("backward", "float16", Shape(1, 65, 129), "rising",
                    family="sm90")),
    ("sm_90a", Call("jvp", "bfloat16", Shape(1, 65, 127), "peaked", (),
                    "sm90")),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "call"),
    EMULATED,
    ids=[f"{y.family}-{y.direction}" for _, y in EMULATED],
)
def test_emulated_kernels_are_right(arch, call):
    assert faults(call, Emulated(arch)) == []
