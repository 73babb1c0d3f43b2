"""Readouts of CUDA tensors, on an emulated device: NumPy arrays' bits."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal, on_numpy, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

CHOICES = {
    "weights": {"queries": [-1, 2], "keys": [4, 0], "heads": [1]},
    "weight_sums": {"queries": torch.tensor([[-1, 2], [0, 0]])},
    "entropy": {},
}


@pytest.mark.parametrize("name", CHOICES)
def test_results_and_gradients(name):
    (q, k, v), given = tensors(torch.float32), {"causal": True}
    with emulated_torch.active("sm_80") as device:
        lse = cuflash.torch.attention(q, k, v, return_lse=True, **given)[1]
        leaves = [x.clone().requires_grad_() for x in (q, k, lse)]
        call = getattr(cuflash.torch, name)
        got = call(*leaves, **given, **CHOICES[name])
        weights = torch.sin(torch.arange(got.numel()).view(got.shape) + 1.0)
        gradients = torch.autograd.grad(got, leaves, weights)
        entries = {entry for entry, _ in device.launches}
        assert f"{name}_fma" in entries
        assert "readout_gradients_fma" in entries
        assert {stream for _, stream in device.launches} == {
            emulated_torch.STREAM
        }
        given |= CHOICES[name]
        expected = on_numpy(getattr(cuflash, name), q, k, lse, **given)
        backward = getattr(cuflash, f"{name}_backward")
        of_inputs = on_numpy(backward, weights, q, k, lse, **given)
    assert_equal([got, *gradients], [expected, *of_inputs])


def test_row_weights_and_queries_out_of_range():
    """Which choose nothing on a device: the host does not read them."""
    q, k, v = tensors(torch.float32)
    rows = torch.arange(4.0)[:, None].requires_grad_()
    with emulated_torch.active("sm_80"):
        lse = cuflash.torch.attention(q, k, v, return_lse=True)[1]
        found = []
        for queries in (torch.tensor([1, 99, -99]), [1]):
            sums = cuflash.torch.weight_sums(
                q, k, lse, queries=queries, row_weights=rows
            )
            (drows,) = torch.autograd.grad(sums.square().sum(), rows)
            found.append((sums, drows))
    assert_equal(*found)
    assert found[0][1].any()


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_tensors_that_a_score_reads(name):
    q, k, v = tensors(torch.float32)
    table = torch.cos(torch.arange(40.0)).requires_grad_()
    given = {"score_mod": lambda s, b, h, i, j, *, t: s + t[i - j + 20] * s}
    given |= {"deterministic": True, **CHOICES[name]}
    with emulated_torch.active("sm_80"):
        lse = cuflash.torch.attention(q, k, v, return_lse=True)[1]
        call = getattr(cuflash.torch, name)
        got = call(q, k, lse, mod_arrays={"t": table}, **given)
        (dtable,) = torch.autograd.grad(got, table, got.detach())
        of_t = {"mod_arrays": {"t": table.detach().numpy()}}
        backward = getattr(cuflash, f"{name}_backward")
        *_, expected = on_numpy(
            lambda *x, **more: tuple(
                y["t"] if isinstance(y, dict) else y
                for y in backward(*x, return_dmod=("t",), **of_t, **more)
            ),
            got.detach(), q, k, lse, **given,
        )  # fmt: skip
    assert_equal([dtable], [expected])
