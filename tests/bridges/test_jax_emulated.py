"""CUDA's path of `cuflash.jax`, emulated below the driver's launch.

As NumPy arrays on the same emulator: each option, each dtype, the same bits.
`test_jax_cuda_lowering.py` tests what a call is lowered to.
"""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

from bridge_cases import SIZES, BridgeCase, arch_of, each_case  # noqa: E402
from jax_data import assert_same, float64_if  # noqa: E402
from jax_machines import STREAM, by_the_driver  # noqa: E402

import cuflash.jax  # noqa: E402
from helpers.data import Case  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]


class JaxCase(BridgeCase):
    """A case's call as a function of the arrays that have gradients."""

    def of_wrt(self, *moving):
        given = self.arrays | dict(zip(self.wrt, moving, strict=True))
        return cuflash.jax.attention(**given, **self.numbers, return_lse=True)

    def point(self):
        return [jax.numpy.asarray(self.arrays[x]) for x in self.wrt]

    def pulled(self, wrt, douts):
        return jax.vjp(self.of_wrt, *wrt)[1](douts)


def assert_same_bits(got, expected):
    for x, y in zip(jax.tree.leaves(got), expected, strict=True):
        assert_same(x, y)


def check_call_and_derivatives(case, arch):
    """Returns the names of the kernels that ran."""
    call = JaxCase(case)

    def each(point, moved, douts):
        results, tangents = jax.jvp(call.of_wrt, point, moved)
        gradients, again = jax.vjp(call.pulled, point, douts)
        return results, gradients, tangents, again(tuple(moved))

    moved = [call.moved[x] for x in call.wrt]
    with by_the_driver(arch) as device:
        with float64_if(case.dtype):
            got = jax.jit(each)(call.point(), moved, call.douts)
            jax.block_until_ready(got)
        launches = {*device.launches}
        results = call.results()
        assert_same_bits(got[0], results)
        assert_same_bits(got[1], call.gradients(*results))
        assert_same_bits(got[2], call.tangents())
        assert_same_bits(got[3], call.second_gradients(*results))
    assert {stream for _, stream in launches} == {STREAM}
    entries = {entry for entry, _ in launches}
    for word in ("forward", "backward", "jvp", "double_backward"):
        assert any(entry.startswith(word) for entry in entries)
    return entries


@each_case
def test_a_call_and_its_derivatives(case):
    check_call_and_derivatives(case, arch_of(case.dtype))


def test_copies_in_float32():
    """On sm_75 XLA converts bfloat16, which no tensor core multiplies.

    A bias of that dtype, too.
    """
    case = Case("bfloat16", **SIZES, arrays_of=("bias",))
    entries = check_call_and_derivatives(case, "sm_75")
    assert {"forward_fma", "backward_fma"} <= entries
