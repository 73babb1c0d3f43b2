"""Rotations and merges on a device: by the kernels, as of arrays."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal  # noqa: E402
from torch_states import (  # noqa: E402
    assert_close,
    leaves,
    results,
    states,
)

import cuflash  # noqa: E402
from cuflash.torch import apply_rotary, merge_states  # noqa: E402
from helpers.compare import assert_all  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_merge_is_that_of_arrays(device, parts, dtype):
    given = device.put(states(parts, dtype))
    expected = device.expected(cuflash.merge_states, *given)
    assert_equal(merge_states(*leaves(given)), expected)


@pytest.mark.parametrize("rank", [3, 4])
def test_gradients_of_a_merge(device, rank):
    given = [x[0] if rank == 3 else x for x in states(3, torch.float32)]
    found = results(merge_states, device.put(given))
    with device.left_out():
        expected = results(merge_states, given)
    assert_close([x.cpu() for x in found], expected)


@pytest.mark.parametrize("kind", [torch.int64, torch.int16])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_rotation_is_that_of_arrays(device, rank, kind):
    x = torch.randn(2, 5, 3, 8).to(torch.bfloat16)
    x = x[{4: slice(None), 3: 0, 2: (0, slice(None), 0)}[rank]]
    at = torch.tensor([4, 0, 8, 2, 1]).to(kind)
    x, cos, sin, at = device.put([x, *torch.randn(2, 9, 3), at])
    expected = device.expected(cuflash.apply_rotary, x, cos, sin, positions=at)
    (leaf,) = leaves([x])
    got = apply_rotary(leaf, cos, sin, positions=at)
    assert_equal([got], [expected])
    (dx,) = torch.autograd.grad(got, leaf, x)
    back = device.expected(
        cuflash.apply_rotary, x, cos, sin, positions=at, inverse=True
    )
    assert_equal([dx], [back])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor's
@pytest.mark.parametrize("function", [apply_rotary, merge_states])
def test_compiled(device, function):
    """The compiler's own kernel, of torch's operations."""
    torch._dynamo.reset()
    given = states(2, torch.float32, blind=0)
    if function is apply_rotary:
        given = [torch.randn(2, 5, 3, 8), *torch.randn(2, 9, 3)]
    compiled, given = device.compile(function), device.put(given)
    torch.testing.assert_close(compiled(*given), function(*given))


def test_a_position_outside_the_tables(device, monkeypatch):
    x, cos, sin = device.put([torch.ones(1, 2, 1, 4), *torch.ones(2, 3, 2)])
    bad = device.put(torch.tensor([0, 3]))
    got = apply_rotary(x, cos, sin, positions=bad)
    assert_all(got[:, 1], torch.nan, "got[:, 1]")
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"positions\[1\] is 3"):
        apply_rotary(x, cos, sin, positions=bad)
