"""The path of CUDA tensors, on an emulated device: each option, each dtype.

As NumPy arrays on the same emulator: in the same order of warps, kernels of
the same plans give the same bits.
"""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from bridge_cases import (  # noqa: E402
    CASES,
    SIZES,
    arch_of,
    each_case,
    each_dtype,
)
from torch_cases import TorchCase  # noqa: E402
from torch_data import assert_equal  # noqa: E402

from cuflash.torch import direct  # noqa: E402
from cuflash.torch.dtypes import from_numpy  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.data import Case  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]


def on_device(dtype):
    return emulated_torch.active(arch_of(dtype))


def assert_launched(device, word):
    """A kernel with that word in its name ran, all on torch's stream."""
    entries, streams = zip(*device.launches, strict=True)
    assert any(word in x for x in entries)
    assert {*streams} == {emulated_torch.STREAM}


def assert_same(got, arrays):
    """The bits of NumPy arrays."""
    assert_equal(got, [*map(from_numpy, arrays)])


@each_case
def test_results_and_gradients(case):
    call = TorchCase(case)
    with on_device(case.dtype) as device:
        got = call.results_and_gradients()
        assert_launched(device, "backward")
        expected = call.on_numpy.results()
        gradients = call.on_numpy.gradients(*expected)
    assert_same(got, (*expected, *gradients))


@each_dtype
def test_calls_without_gradients(dtype):
    """One look-up: in eager mode, and from compiled code."""
    call = TorchCase(Case(dtype, **SIZES))
    with on_device(dtype) as device:
        expected = call.on_numpy.results()
        for _ in range(2):
            assert_same(call.results(), expected)
        qkv = call.tensors.values()
        assert_same(direct.plain_attention(*qkv), expected)
        assert_same(direct.plain_attention_out(*qkv), expected[:1])
    assert_launched(device, "forward")
    assert len({*device.launches}) == 1 and len(device.launches) == 4


def test_copies_in_float32():
    """On sm_75, whose tensor cores do not multiply bfloat16."""
    call = TorchCase(Case("bfloat16", **SIZES))
    with emulated_torch.active("sm_75") as device:
        expected = call.on_numpy.results()
        gradients = call.on_numpy.gradients(*expected)
        got = call.results_and_gradients()
        assert_same(got, (*expected, *gradients))
        assert_same(call.results(), expected)
    assert_launched(device, "backward_fma")


@each_case
def test_tangents(case):
    call = TorchCase(case)
    with on_device(case.dtype) as device:
        got = call.tangents()
        assert_launched(device, "jvp")
        assert_same(got, call.on_numpy.tangents())


@each_case
def test_second_gradients(case):
    call = TorchCase(case)
    with on_device(case.dtype) as device:
        got = call.second_gradients()
        assert_launched(device, "double_backward")
        results = call.on_numpy.results()
        assert_same(got, call.on_numpy.second_gradients(*results))


@pytest.mark.parametrize("name", ["packed", "all-float32"])
def test_compiled(name):
    torch._dynamo.reset()
    call = TorchCase(CASES[name])
    leaves = call.leaves()
    compiled = torch.compile(call.results, fullgraph=True, backend="aot_eager")
    with on_device(CASES[name].dtype) as device:
        got = compiled(leaves)
        wanted = [leaves[x] for x in call.wrt]
        gradients = torch.autograd.grad(got, wanted, call.douts)
        assert_launched(device, "backward")
        expected = call.on_numpy.results()
        assert_same(got, expected)
        assert_same(gradients, call.on_numpy.gradients(*expected))


@pytest.mark.parametrize("name", ["packed", "all-float32"])
def test_results_of_compiled_code_have_the_right_shapes(name):
    """Autograd would sum a first axis of 1: nobody does in compiled code."""
    call = TorchCase(CASES[name])
    given = call.tensors | call.numbers
    given.pop("window", None)  # two numbers in a schema
    q, k, v = (given.pop(x) for x in "qkv")
    more = {f"return_d{x}": True for x in call.wrt[3:]}
    with on_device(CASES[name].dtype):
        out, lse = direct.attention(q, k, v, **given)
        assert_equal(direct.attention_out(q, k, v, **given), [out])
        found = direct.attention_backward(
            *call.douts, q, k, v, out, lse, **given, **more
        )
    found = dict(zip(("q", "k", "v", "bias", "sink"), found, strict=True))
    for name in call.wrt:
        assert found[name].shape == call.tensors[name].shape
