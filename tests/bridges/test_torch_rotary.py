"""`cuflash.torch.apply_rotary`: values, derivatives, transforms."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch_data import on_numpy  # noqa: E402
from torch_states import leaves  # noqa: E402

import cuflash  # noqa: E402
from cuflash.torch import apply_rotary, rotary, rotary_kernel  # noqa: E402
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_arrays_equal,
    assert_finite,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
]

POSITIONS = {
    "none": None,
    "of tokens": torch.tensor([4, 0, 8, 2, 1]),
    "of each": torch.arange(10, dtype=torch.int32).view(2, 5) % 9,
    "of sequences": torch.tensor([[3], [7]]),
}


def call(dtype=torch.float64, shape=(2, 5, 3, 8), pairs=3):
    """Return x, and cos and sin of nine positions."""
    generator = torch.Generator().manual_seed(0)
    x, angles = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (shape, (9, pairs))
    )
    return x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_values_are_those_of_numpy(name, inverse, interleaved, dtype):
    given = {"interleaved": interleaved, "inverse": inverse}
    if name != "none":
        given["positions"] = POSITIONS[name]
    arguments = call(dtype)
    got = apply_rotary(*arguments, **given)
    expected = on_numpy(cuflash.apply_rotary, *arguments, **given)
    # Two products and a sum in float32 or wider, of pairs of size up to 4.
    wide = torch.promote_types(dtype, torch.float32)
    atol = 3 * 8 * torch.finfo(wide).eps / 2
    rtol = torch.finfo(dtype).eps  # on two sides of a rounding
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out(rank):
    x, *tables = call()
    index = {3: 0, 2: (0, slice(None), 0)}[rank]
    given = {"positions": POSITIONS["of tokens"]}
    whole = apply_rotary(x, *tables, **given)
    assert_arrays_equal(
        apply_rotary(x[index], *tables, **given), whole[index], "apply_rotary"
    )


def test_no_columns_are_rotated():
    x, cos, sin = call(pairs=0)
    assert_arrays_equal(apply_rotary(x, cos, sin), x, "apply_rotary")


def test_derivatives():
    """Of x and the tables, in both modes, and of batches of gradients."""
    given = leaves(call(shape=(1, 3, 2, 4), pairs=1))

    def function(*given):
        return apply_rotary(*given, positions=torch.tensor([4, 0, 4]))

    assert gradcheck(
        function, given, check_forward_ad=True, check_batched_grad=True
    )
    assert gradgradcheck(function, given, check_batched_grad=True)


@pytest.mark.parametrize("name, dynamic", [("none", False), ("of each", True)])
def test_compiled(name, dynamic):
    torch._dynamo.reset()

    def function(*given):
        return apply_rotary(*given, positions=POSITIONS[name])

    compiled = torch.compile(
        function, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    given = leaves(call())
    got, expected = (
        torch.autograd.grad(ours(*given).square().sum(), given)
        for ours in (compiled, function)
    )
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "cut, words",
    [
        ((slice(None), slice(3), slice(3)), "cos has 3 rows"),
        ((slice(None), slice(None), slice(3)), "sin"),
        ((..., slice(None), slice(None)), "cos has 3 columns"),
    ],
)
def test_compiled_calls_refuse_other_shapes(cut, words):
    torch._dynamo.reset()
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="eager")
    given = [x[at] for x, at in zip(call(), cut, strict=True)]
    if cut[0] is ...:
        given[0] = given[0][..., :4]
    for function in (compiled, apply_rotary):
        with pytest.raises(Exception, match=words):
            function(*given)


def test_vmap_over_positions():
    x, cos, sin = call()

    def function(positions):
        return apply_rotary(x, cos, sin, positions=positions)

    many = torch.stack([POSITIONS["of tokens"], torch.arange(5)])
    got = torch.func.vmap(function)(many)
    assert_arrays_equal(got, torch.stack([*map(function, many)]), "got")


def test_positions_outside_the_tables():
    """An error where the host reads them, else NaN as from the kernel."""
    x, cos, sin = call()

    def function(positions):
        return apply_rotary(x, cos, sin, positions=positions)

    bad = torch.tensor([0, 1, -1, 9, 8])
    with pytest.raises(ValueError, match=r"positions\[2\] is -1"):
        function(bad)
    got = torch.func.vmap(function)(bad[None])[0]
    assert_all(got[:, 2:4, :, :6], float("nan"), "got[:, 2:4, :, :6]")
    assert_arrays_equal(got[..., 6:], x[..., 6:], "got[..., 6:]")
    assert_finite(got[:, [0, 1, 4]], "got[:, [0, 1, 4]]")


def test_fake_and_meta_tensors():
    given = call(torch.bfloat16)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = apply_rotary(*map(mode.from_tensor, given))
    meta = apply_rotary(*(x.to("meta") for x in given))
    for x in (fake, meta):
        assert (x.shape, x.dtype) == (given[0].shape, torch.bfloat16)


def test_the_kernels_gradient_is_that_of_torch(monkeypatch):
    """`_Rotated`, whose passes are the kernel on a GPU."""
    flags = {"interleaved": True, "inverse": False}
    x, cos, sin = call(shape=(1, 3, 2, 4), pairs=1)
    (x,) = leaves([x])

    def by_kernel(_, x, cos, sin, positions, *flags):
        *flags, inplace = flags
        assert not inplace
        rows = rotary._table_rows(x, cos, sin, positions)
        rotated = rotary.rotated_columns(x, *rows, *flags)
        return torch.cat((rotated, x[..., rotated.shape[-1] :]), -1)

    monkeypatch.setattr(rotary_kernel, "apply_rotary", by_kernel)
    monkeypatch.setattr(rotary, "kernel_backend", lambda *_: "a device")
    out = apply_rotary(x, cos, sin, **flags)
    assert type(out.grad_fn).__name__ == "_RotatedBackward"
    dout = leaves([out])[0]
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
    # There and back: twice two products and a sum, of numbers of size 4.
    torch.testing.assert_close(dx, x, rtol=0, atol=6 * 8 * 2.0**-53)
    (again,) = torch.autograd.grad(dx, dout, x.detach())
    assert_arrays_equal(again, out, "again")


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_traced_for_other_lengths():
    def function(*given):
        return apply_rotary(*given, positions=positions)

    positions = torch.tensor([4])
    x, cos, sin = call()
    for ours in (apply_rotary, function):
        traced = torch.jit.trace(ours, (x, cos, sin))
        assert_arrays_equal(
            traced(x[:, :3], cos, sin), ours(x[:, :3], cos, sin), "traced"
        )
