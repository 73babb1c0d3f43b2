"""CUDA's path of `cuflash.jax`, emulated below the driver's launch.

As NumPy arrays on the same emulator: each option, each dtype, the same bits.
`test_jax_cuda_lowering.py` tests what a call is lowered to.
"""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

from bridge_cases import BridgeCase, arch_of, each_case  # noqa: E402
from jax_data import assert_same, float64_if  # noqa: E402
from jax_machines import STREAM, by_the_driver  # noqa: E402

import cuflash.jax  # noqa: E402
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


@each_case
def test_a_call_and_its_derivatives(case):
    call = JaxCase(case)

    def each(point, moved, douts):
        results, tangents = jax.jvp(call.of_wrt, point, moved)
        gradients, again = jax.vjp(call.pulled, point, douts)
        return results, gradients, tangents, again(tuple(moved))

    moved = [call.moved[x] for x in call.wrt]
    with by_the_driver(arch_of(case.dtype)) as device:
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
    for word in ("forward", "backward", "jvp", "double_backward"):
        assert any(entry.startswith(word) for entry, _ in launches)
