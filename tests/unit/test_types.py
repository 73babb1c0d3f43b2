"""The types of options are those of the calls' signatures."""

import inspect
from importlib.util import find_spec

import pytest

import cuflash
from cuflash.api import types as array_types

CALLS = {
    "forward": (array_types.ForwardOptions, {"return_lse"}),
    "backward": (
        array_types.BackwardOptions, {"return_dbias", "return_dsink"},
    ),
    "vjp": (array_types.VjpOptions, {"return_lse"}),
    "forward_kvcache": (array_types.KVCacheOptions, {"return_lse"}),
    "apply_rotary": (array_types.RotaryOptions, set()),
}  # fmt: skip
BRIDGES = {"torch": array_types.TorchOptions, "jax": array_types.JaxOptions}


def options_of(call):
    parameters = inspect.signature(call).parameters.values()
    return {x.name: x for x in parameters if x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    kind, others = CALLS[name]
    known = options_of(getattr(cuflash, name))
    assert kind.__annotations__.keys() | others == known.keys()
    for option, annotation in kind.__annotations__.items():
        asked = known[option].annotation
        kept = asked.replace("tuple[int | None, int | None]", "Window")
        assert asked == "Any" or annotation.__forward_arg__ == kept, option


@pytest.mark.parametrize("bridge", BRIDGES)
def test_options_of_bridges(bridge):
    if not find_spec(bridge):
        pytest.skip(f"needs {bridge}")
    attention = __import__(f"cuflash.{bridge}", fromlist="_").attention
    known = options_of(attention).keys()
    assert BRIDGES[bridge].__annotations__.keys() | {"return_lse"} == known
