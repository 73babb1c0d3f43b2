"""`cuflash.torch.merge_states`: values, derivatives, transforms."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch_data import assert_equal, on_numpy, tensors  # noqa: E402
from torch_states import (  # noqa: E402
    assert_close,
    leaves,
    results,
    states,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch import merging  # noqa: E402
from cuflash.torch.merging import merge_states  # noqa: E402
from helpers.compare import assert_all  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_values_are_those_of_numpy(parts, dtype):
    given = states(parts, dtype)
    got = merge_states(*given)
    assert_close(got, on_numpy(cuflash.merge_states, *given))


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out(rank):
    index = {3: 0, 2: (0, slice(None), 0)}[rank]
    of_lse = {3: 0, 2: (0, 0)}[rank]
    given = states(2)
    part = [x[of_lse if i % 2 else index] for i, x in enumerate(given)]
    out, lse = merge_states(*given)
    assert_equal(merge_states(*part), (out[index], lse[of_lse]))


def test_rows_that_see_no_key_have_no_gradient():
    given = states(2)
    dead = (given[1] == -torch.inf).mT
    *_, dout, dlse, _, _ = results(merge_states, given)
    assert dead.any()
    assert_all(dout[dead], 0, "dout[dead]")
    assert_all(dlse[dead.mT], 0, "dlse[dead.mT]")
    assert dout[~dead].any()


def test_an_infinite_lse_stays():
    given = states(2)
    given[1][0] = torch.inf
    out, lse = merge_states(*given)
    assert_all(out[0], float("nan"), "out[0]")
    assert_all(lse[0], torch.inf, "lse[0]")


def test_derivatives():
    """Of both orders, in forward mode and of batches of gradients."""
    given = leaves(states(2, blind=0)[:4])
    given = leaves(x[:1, :2, :2] for x in given)
    assert gradcheck(
        merge_states, given, check_forward_ad=True, check_batched_grad=True
    )
    assert gradgradcheck(merge_states, given, check_batched_grad=True)


def test_two_parts_of_the_keys_are_trained_as_the_whole():
    q, k, v = tensors(requires_grad=True)

    def parts(q, k, v):
        return merge_states(
            *cuflash.torch.attention(q, k[:, :3], v[:, :3], return_lse=True),
            *cuflash.torch.attention(q, k[:, 3:], v[:, 3:], return_lse=True),
        )

    def whole(q, k, v):
        return cuflash.torch.attention(q, k, v, return_lse=True)

    given = [x.detach() for x in (q, k, v)]
    assert_close(results(parts, given), results(whole, given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    call = torch.compile(
        merge_states, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    assert_equal(results(call, states(2)), results(merge_states, states(2)))


def test_compiled_calls_refuse_other_shapes():
    torch._dynamo.reset()
    call = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    out, lse, *_ = states(1)
    with pytest.raises(Exception, match="argument 3 of merge_states has"):
        call(out, lse, out, lse[:, :1])
    with pytest.raises(Exception, match="merge_states got 3 arrays"):
        call(out, lse, out)


def test_vmap():
    given, other = states(2), states(2, seed=1)
    given[2] = other[2] = given[2].nan_to_num()
    stacked = [torch.stack(x, 1) for x in zip(given, other, strict=True)]
    stacked[2] = given[2]
    got = torch.func.vmap(merge_states, (1, 1, None, 1))(*stacked)
    for index, each in enumerate((given, other)):
        assert_close([x[index] for x in got], merge_states(*each))


def test_fake_and_meta_tensors():
    given = states(2, torch.bfloat16)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = merge_states(*map(mode.from_tensor, given))
    meta = merge_states(*(x.to("meta") for x in given))
    for real, *others in zip(merge_states(*given), fake, meta, strict=True):
        for x in others:
            assert (x.shape, x.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("wanted", [[0], [1], [0, 1]])
def test_the_kernels_gradients_are_those_of_torch(wanted, monkeypatch):
    """`_Merged`, whose forward pass is the kernel on a GPU."""
    given = states(3)
    expected = _gradients(merge_states, given, wanted)
    monkeypatch.setattr(
        merging, "_by_kernel", lambda _, *given: merging._by_torch(*given)
    )

    def by_kernel(*given):
        return merging._Merged.apply(None, *given)

    assert_close(_gradients(by_kernel, given, wanted), expected)
    few = leaves(x[:1, :2, :2] for x in states(2, blind=0))
    assert gradgradcheck(by_kernel, few, check_batched_grad=True)


def _gradients(function, given, wanted):
    given = leaves(given)
    merged = function(*given)
    loss = sum(merged[i].nan_to_num(neginf=0).square().sum() for i in wanted)
    found = torch.autograd.grad(loss, given, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d
            for x, d in zip(given, found, strict=True)]  # fmt: skip


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_traced_for_other_batches():
    given = states(2)
    traced = torch.jit.trace(merge_states, given)
    one = [x[:1] for x in given]
    assert_equal(traced(*one), merge_states(*one))
