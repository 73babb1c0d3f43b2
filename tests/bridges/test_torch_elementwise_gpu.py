"""Rotations and merges of tensors on a GPU: by the kernels, as on CuPy."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this PyTorch has no CUDA"
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_merge_is_that_of_cupy_arrays(parts, dtype):
    given = [x.cuda() for x in states(parts, dtype)]
    expected = cuflash.merge_states(*given)
    got = merge_states(*leaves(given))
    assert_equal(got, [*map(torch.from_dlpack, expected)])
    if dtype is torch.float32:
        found = [x.cpu() for x in results(merge_states, given)]
        on_cpu = [x.cpu() for x in given]
        assert_close(found, results(merge_states, on_cpu))


@pytest.mark.parametrize("kind", [torch.int64, torch.int16])
def test_a_rotation_is_that_of_cupy_arrays(kind):
    x = torch.randn(2, 5, 3, 8, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 9, 3, device="cuda")
    at = torch.tensor([4, 0, 8, 2, 1], device="cuda").to(kind)
    expected = cuflash.apply_rotary(x, cos, sin, positions=at)
    (leaf,) = leaves([x])
    got = apply_rotary(leaf, cos, sin, positions=at)
    assert_equal([got], [torch.from_dlpack(expected)])
    (dx,) = torch.autograd.grad(got, leaf, x)
    back = cuflash.apply_rotary(x, cos, sin, positions=at, inverse=True)
    assert_equal([dx], [torch.from_dlpack(back)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor's
@pytest.mark.parametrize("function", [apply_rotary, merge_states])
def test_compiled(function):
    """Inductor's own kernel, of torch's operations."""
    if function is merge_states:
        given = [x.cuda() for x in states(2, torch.float32, blind=0)]
    else:
        x = torch.randn(2, 5, 3, 8, device="cuda")
        given = [x, *torch.randn(2, 9, 3, device="cuda")]
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*given), function(*given))


def test_a_position_outside_the_tables(monkeypatch):
    x = torch.ones(1, 2, 1, 4, device="cuda")
    cos, sin = torch.ones(2, 3, 2, device="cuda")
    bad = torch.tensor([0, 3], device="cuda")
    assert apply_rotary(x, cos, sin, positions=bad)[:, 1].isnan().all()
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"positions\[1\] is 3"):
        apply_rotary(x, cos, sin, positions=bad)
