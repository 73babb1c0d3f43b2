"""Structs lead kernels to the arrays of a call, whatever strides they have.

Each input, option, tangent and result of each direction and family, without
a kernel: helpers/reading.py follows pointers, strides and TensorMaps.
"""

import pytest

from helpers import launched
from helpers.launched import FAMILIES, OF_GRADIENTS, READ, Launched

OPTIONS = {
    "plain": (),
    "options": ("alibi_slopes_of_batches", "bias", "mask", "sink",
                "segment_ids_k", "segment_ids_q"),
}  # fmt: skip

with_options = pytest.mark.parametrize("names", OPTIONS.values(), ids=OPTIONS)
on_all = pytest.mark.parametrize("family", FAMILIES)
on_gradients = pytest.mark.parametrize("family", OF_GRADIENTS)


def calls(family, names):
    """Each array has each layout; of those with options, some."""
    for batch in (1, 2):
        for first in range(0, len(READ), 3 if names else 1):
            yield Launched(family, batch, first, names)


def check(run, family, names, instead=None):
    """Run each call, by the family or by the one that has what it lacks."""
    families = set()
    for call in calls(family, names):
        run(call)
        families |= call.families
    own = family.removesuffix("16")
    assert own in families or (names and instead), families
    assert families <= {own, instead}


@on_all
@with_options
def test_forward(family, names):
    check(launched.forward, family, names)


@on_gradients
@with_options
def test_backward(family, names):
    check(launched.backward, family, names)


# Hopper's kernels of derivatives have no options.
INSTEAD = {"sm90": "sm80"}


@on_gradients
@with_options
def test_jvp(family, names):
    check(launched.jvp, family, names, INSTEAD.get(family))


@on_gradients
@with_options
def test_double_backward(family, names):
    check(launched.double_backward, family, names, INSTEAD.get(family))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", launched.KINDS_OF_CACHES)
def test_caches(dtype, kind):
    """16-byte copies of float16 need aligned rows, wherever they begin."""
    families = {
        launched.caches(dtype, batch, first, kind)
        for batch in (1, 2)
        for first in range(len(READ))
    }
    both = {"decode", "decode_simt"} if dtype == "float16" else set()
    assert families == (both or {"decode_simt"})
