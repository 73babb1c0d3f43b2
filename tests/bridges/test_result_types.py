"""Annotations of the bridges: options by name, results of a known type."""

import inspect
import typing

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
jax = pytest.importorskip("jax", reason="needs JAX")

import cuflash.jax  # noqa: E402
import cuflash.torch  # noqa: E402
import cuflash.torch.types  # noqa: E402
from cuflash.api import types  # noqa: E402
from helpers.static_types import fields_of  # noqa: E402

pytestmark = pytest.mark.slow

OPTIONS = [
    (cuflash.torch.forward_kvcache, "TorchCacheOptions"),
    (cuflash.torch.distributed_attention, "SharedOptions"),
]
OVERLOADED = [
    (cuflash.torch.attention, "Results"),
    (cuflash.torch.forward_kvcache, "Results"),
    (cuflash.torch.distributed_attention, "Results"),
    (cuflash.jax.attention, "tuple[jax.Array, jax.Array]"),
]
OTHERS = [
    cuflash.torch.apply_rotary,
    cuflash.torch.merge_states,
    cuflash.jax.apply_rotary,
    cuflash.jax.merge_states,
]


@pytest.mark.parametrize("function, options", OPTIONS)
def test_options_are_the_keywords(function, options):
    found = {
        name: x.annotation
        for name, x in inspect.signature(function).parameters.items()
        if x.kind is x.KEYWORD_ONLY and name != "return_lse"
    }
    files = types.__file__, cuflash.torch.types.__file__
    written = fields_of(options, *files)
    window = "tuple[int | None, int | None]"
    assert written == {
        x: y.replace(window, "Window") for x, y in found.items()
    }


@pytest.mark.skipif(
    not hasattr(typing, "get_overloads"), reason="needs Python 3.11"
)
@pytest.mark.parametrize("function, pair", OVERLOADED)
def test_results_follow_return_lse(function, pair):
    of = "jax.Array" if "jax" in function.__module__ else "torch.Tensor"
    found = {
        inspect.signature(x).parameters["return_lse"].annotation: (
            inspect.signature(x).return_annotation
        )
        for x in typing.get_overloads(function)
    }
    assert found == {
        "Literal[False]": of,
        "Literal[True]": pair,
        "bool": f"{of} | {pair}",
    }


@pytest.mark.parametrize("function", OTHERS)
def test_other_results(function):
    hints = typing.get_type_hints(function)
    of = jax.Array if "jax" in function.__module__ else torch.Tensor
    pair = "merge" in function.__name__
    assert hints["return"] == (tuple[of, of] if pair else of)
