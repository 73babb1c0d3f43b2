"""`cuflash.torch.attention` under torch.func, against dense attention."""

from functools import partial
from itertools import product
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.func import grad, hessian, jacfwd, jvp, vmap  # noqa: E402
from torch_data import packed_tensors, tensors  # noqa: E402
from torch_transforms import (  # noqa: E402
    OPTIONS,
    TRANSFORMS,
    assert_close,
    both,
    derivative,
    total,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch import request_derivatives  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_transforms(transform, name):
    ours, theirs, inputs = both(name)
    got, expected = (
        derivative(transform, function, len(inputs), *inputs)
        for function in (ours, theirs)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("transform", [None, *TRANSFORMS])
@pytest.mark.parametrize("moving", ["all", "q", "last"])
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap(transform, moving, name):
    ours, theirs, inputs = both(name, batch=1)
    last = len(inputs) - 1
    moves = {"all": range(last + 1), "q": [0], "last": [last]}[moving]
    axes = tuple(min(1, x.ndim) if i in moves else None
                 for i, x in enumerate(inputs))  # fmt: skip
    mapped = [
        x if axis is None else torch.stack([x, x.sin()], axis)
        for x, axis in zip(inputs, axes, strict=True)
    ]
    got, expected = (
        vmap(
            function
            if transform is None
            else partial(derivative, transform, function, len(inputs)),
            in_dims=axes,
        )(*mapped)
        for function in (ours, theirs)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("index", [(0,), (0, slice(None), 0)])
def test_axes_that_are_left_out(index):
    ours, _, inputs = both("none", num_heads_kv=2)
    few = tuple(x[index] for x in inputs)
    one = tuple(x[:1] if len(index) == 1 else x[:1, :, :1] for x in inputs)
    got, expected = (
        derivative("forward over reverse", ours, 3, *each)
        for each in (few, one)
    )
    for x, y in zip(sum(got, ()), sum(expected, ()), strict=True):
        assert_arrays_equal(x, y.reshape(x.shape), "x")


def counted(monkeypatch, name):
    of_cpu = request_derivatives.ON_CPU
    call = mock.Mock(side_effect=of_cpu[name])
    monkeypatch.setitem(of_cpu, name, call)
    return call


def test_jacfwd_is_one_call_of_many_directions(monkeypatch):
    ours, _, inputs = both("none")
    calls = counted(monkeypatch, "jvp")
    jacfwd(ours, 1)(*inputs)
    (call,) = calls.mock_calls
    k = inputs[1]
    assert call.kwargs["k_dot"].shape == (k.numel(), *k.shape)
    assert call.kwargs["k"].shape == k.shape


def test_the_jacobians_of_a_batch_are_one_call(monkeypatch):
    ours, _, inputs = both("none")
    calls = counted(monkeypatch, "jvp")
    vmap(jacfwd(ours, 0))(*(torch.stack([x, x, x]) for x in inputs))
    (call,) = calls.mock_calls
    q = inputs[0]
    assert call.kwargs["q_dot"].shape == (q.numel(), 6, *q.shape[1:])


def test_nested_maps_of_tangents():
    """One tangent moves along both axes, each other along one of them."""
    ours, _, inputs = both("none")
    q, k, v = (x.cos() for x in inputs)
    dq = torch.stack([q * n for n in range(6)], -1).unflatten(-1, (2, 3))
    dk, dv = torch.stack([k, -k], -1), torch.stack([v, 2 * v, 3 * v])

    def call(*moved):
        return jvp(ours, inputs, moved)[1]

    inner = vmap(call, (-1, None, 0))
    got = vmap(inner, (-2, -1, None))(dq, dk, dv)
    for i, j in product(range(2), range(3)):
        one = call(dq[..., i, j], dk[..., i], dv[j])
        assert_arrays_equal(got[i, j], one, "got", f"{i}, {j}")


def test_packed_sequences_are_mapped_one_by_one():
    inputs, given = packed_tensors()

    def call(q):
        return cuflash.torch.attention(q, *inputs[1:], **given)

    several = torch.stack([inputs[0], 2 * inputs[0]])
    for function in (call, jacfwd(call)):
        got = vmap(function)(several)
        for x, q in zip(got, several, strict=True):
            assert_arrays_equal(x, function(q), "x")


def test_dropout_is_that_of_each_element():
    inputs = tensors()

    def call(q):
        return cuflash.torch.attention(q, *inputs[1:], dropout=0.5, seed=3)

    got = vmap(call)(torch.stack([inputs[0]] * 2))
    for x in got:
        assert_arrays_equal(x, call(inputs[0]), "x")


def test_dropout_needs_a_seed():
    inputs = tensors()
    words = "dropout is given without seed inside a transform of torch.func"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        grad(lambda q: cuflash.torch.attention(
            q, *inputs[1:], dropout=0.5
        ).sum())(inputs[0])  # fmt: skip


def test_gradients_are_mapped_outside_of_a_call():
    """As the rows of a Jacobian are computed by torch.autograd."""
    q, k, v = tensors(requires_grad=True)
    out = cuflash.torch.attention(q, k, v)
    weights = torch.stack([torch.ones_like(out), out.detach()])

    def pull(dout):
        return torch.autograd.grad(out, (q, k), dout, retain_graph=True)

    for got, expected in zip(
        vmap(pull)(weights),
        zip(*map(pull, weights), strict=True),
        strict=True,
    ):
        for x, y in zip(got, expected, strict=True):
            assert_arrays_equal(x, y, "x")


def test_forward_over_forward_is_refused():
    ours, _, inputs = both("none")
    with pytest.raises(cuflash.UnsupportedError, match="forward mode twice"):
        jacfwd(jacfwd(ours))(*inputs)


def test_third_derivatives_are_refused():
    ours, _, inputs = both("none")
    with pytest.raises(cuflash.UnsupportedError, match="third derivatives"):
        grad(lambda q: hessian(partial(total, ours))(
            q, *inputs[1:]
        ).sum())(inputs[0])  # fmt: skip


def test_modes_are_refused():
    ours, _, inputs = both("none")
    words = "q, k or v is a fake tensor"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        torch.func.linearize(ours, *inputs)


def test_options_without_derivatives():
    inputs = tensors()
    words = "alibi_slopes is differentiated"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        grad(lambda slopes: cuflash.torch.attention(
            *inputs, alibi_slopes=slopes
        ).sum())(torch.ones(4))  # fmt: skip


def test_caches_are_refused():
    q, k, v = tensors()
    words = "attention over caches is called inside a transform"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        vmap(lambda q: cuflash.torch.forward_kvcache(
            q, k, v, cache_seqlens=7
        ))(q[None])  # fmt: skip


def test_double_backward_of_a_batch_is_one_call(monkeypatch):
    ours, _, inputs = both("none")
    calls = counted(monkeypatch, "double_backward")
    vmap(hessian(partial(total, ours)))(*(torch.stack([x]) for x in inputs))
    assert calls.call_count == 1
