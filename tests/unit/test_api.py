"""From public calls to the module that runs them, and back.

A module that computes on the CPU replaces the CUDA side, so that the path to
it is tested without a GPU.
"""

import doctest
import importlib
import inspect
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.api import arrays as api_arrays
from cuflash.backends.numpy import attention as cpu
from cuflash.errors import DTypeError, UnsupportedError
from cuflash.request.validate import devices
from helpers.checked_by import CHECKED_BY
from helpers.compare import assert_elements
from helpers.data import Case, inputs

RANKS = {4: (), 3: (0,), 2: (0, slice(None), 0)}


class Tensor:
    """Another library's array on a CUDA device."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 2, 0


def forward_without_lse(call):
    out, lse = cpu.forward(call)
    return out, lse if call.return_lse else None


@pytest.fixture
def launch(monkeypatch):
    fake = SimpleNamespace(
        Array=None,
        to_cupy=lambda tensor: tensor.array,
        backend_of=lambda array: None,
        give_back=lambda lent: None,
        finish=cpu.finish,
        forward=forward_without_lse,
        backward=cpu.backward,
        merge_states=cpu.merge_states,
        apply_rotary=cpu.apply_rotary,
        forward_kvcache=cpu.forward_kvcache,
    )
    monkeypatch.setattr(api_arrays, "on_cuda", lambda: fake)
    monkeypatch.setattr(
        api_arrays, "_kernels", lambda: lambda backend, finish: fake
    )
    return fake


def same(results, others):
    return all(
        np.array_equal(a, b) for a, b in zip(results, others, strict=True)
    )


@pytest.mark.parametrize("rank", RANKS)
def test_cuda_arrays_go_through_launch(launch, rank):
    q, k, v, dout = (x[RANKS[rank]] for x in inputs(Case()))
    forward = cuflash.forward(q, k, v, return_lse=True)
    backward = cuflash.backward(dout, q, k, v, *forward)
    merged = cuflash.merge_states(*forward, *forward)
    on_gpu = [Tensor(x) for x in (dout, q, k, v, *forward)]
    dout, q, k, v, out, lse = on_gpu
    assert same(cuflash.forward(q, k, v, return_lse=True), forward)
    assert same([cuflash.forward(q, k, v)], forward[:1])
    assert same(cuflash.backward(*on_gpu), backward)
    assert same(cuflash.merge_states(out, lse, out, lse), merged)


@pytest.mark.parametrize("rank", RANKS)
def test_apply_rotary_goes_through_launch(launch, rank):
    x = inputs(Case())[0][RANKS[rank]]
    tables = [np.ones((16, 4), np.float32), np.zeros((16, 4), np.float32)]
    on_gpu = [Tensor(a) for a in (x, *tables)]
    assert same([cuflash.apply_rotary(*on_gpu)], [x])
    out = Tensor(np.zeros_like(x))
    assert cuflash.apply_rotary(*on_gpu, out=out) is out
    assert same([out.array], [x])


@pytest.mark.parametrize("packed", [False, True])
def test_forward_kvcache_goes_through_launch(launch, packed):
    """The caches are written where they are."""
    rng = np.random.default_rng(0)
    shapes = (1, 3, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8), (1, 2, 2, 8)
    q, k_cache, v_cache, new = map(rng.standard_normal, shapes)
    arrays = {"k_new": new, "v_new": new,
              "cache_seqlens": np.array([5], np.int32)}  # fmt: skip
    if packed:
        q, arrays["cu_seqlens_q"] = q[0], np.array([0, 3], np.int32)
    own = [Tensor(x.copy()) for x in (k_cache, v_cache)]
    on_gpu = {name: Tensor(x) for name, x in arrays.items()}
    got = cuflash.forward_kvcache(Tensor(q), *own, **on_gpu, return_lse=True)
    caches = k_cache, v_cache
    assert same(
        got, cuflash.forward_kvcache(q, *caches, **arrays, return_lse=True)
    )
    assert same([x.array for x in own], caches)
    assert got[1].shape == ((4, 3) if packed else (1, 4, 3))
    assert_elements(k_cache[0, 5:7], new[0], "k_cache[0, 5:7]")


@pytest.mark.parametrize("name", sorted(CHECKED_BY.keys() - {"merge_states"}))
def test_each_argument_is_checked(name, monkeypatch):
    """Under its name, those too that calls on NumPy arrays do not use."""
    parameters = inspect.signature(getattr(cuflash, name)).parameters
    given = {
        x: np.full(1, number, np.int32)
        for number, (x, of) in enumerate(parameters.items())
        if of.annotation != "NoReturn"
    }
    given.pop("head_dim_v", None)  # not with v_cache
    for tangents in ("mod_dots", "ddmods"):  # checked by their arrays' names
        given.pop(tangents, None)
    if "mod_arrays" in given:
        given["mod_arrays"] = {"c": 2.0}
    check = mock.Mock(side_effect=UnsupportedError("seen"))
    monkeypatch.setattr(CHECKED_BY[name], name, check)
    with pytest.raises(UnsupportedError, match="seen"):
        getattr(cuflash, name)(**given)
    got = check.mock_calls[0].kwargs
    assert {x: got.get(x) for x in given} == given


def test_out_is_returned(launch):
    q, k, v, out = (Tensor(x) for x in inputs(Case()))
    plain = cuflash.forward(q, k, v)
    assert cuflash.forward(q, k, v, out=out) is out
    assert_elements(out.array, plain, "out.array")


def test_gradients_that_were_given_are_returned(launch):
    q, k, v, dout = inputs(Case())
    given = [dout, q, k, v, *cuflash.forward(q, k, v, return_lse=True)]
    plain = cuflash.backward(*given, dlse=given[-1])
    *on_gpu, dlse, dq, dv = (
        Tensor(x.copy()) for x in (*given, given[-1], q, v)
    )
    got = cuflash.backward(*on_gpu, dlse=dlse, dq=dq, dv=dv)
    assert got[0] is dq and got[2] is dv
    assert same((dq.array, got[1], dv.array), plain)


@pytest.mark.parametrize("error", [TypeError, BufferError, ValueError])
def test_an_array_that_cupy_cannot_read(launch, error):
    def to_cupy(tensor):
        raise error("float8 is not supported")

    launch.to_cupy = to_cupy
    q, k, v, _ = (Tensor(x) for x in inputs(Case()))
    with pytest.raises(DTypeError) as caught:
        cuflash.forward(q, k, v)
    assert str(caught.value) == (
        "q is of type test_api.Tensor, which CuPy cannot read: float8 is not "
        "supported"
    )


def test_an_error_of_ours_passes(launch):
    def forward(call):
        raise UnsupportedError("too old")

    launch.forward = forward
    q, k, v, _ = (Tensor(x) for x in inputs(Case()))
    with pytest.raises(UnsupportedError, match="^too old$"):
        cuflash.forward(q, k, v)


def test_cupy_arrays_are_known_by_their_type(monkeypatch):
    """Without asking the driver: a call has up to six arrays."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Plain))
    assert devices.device_of(q=Plain()) == "cuda"


class Plain:
    """An array whose device is unknown."""


@pytest.mark.parametrize(
    "module", ["attention", "derivatives", "kvcache", "merging", "rotary"]
)
def test_examples(module):
    calls = importlib.import_module(f"cuflash.api.{module}")
    failed, attempted = doctest.testmod(calls)
    assert attempted and not failed


def test_version_is_the_packages():
    assert cuflash.__version__ == version("cuflash")


def test_public_names():
    assert all(hasattr(cuflash, name) for name in cuflash.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        cuflash.absent  # noqa: B018
