"""The types of options are those of the table and the calls' signatures."""

import inspect
from importlib.util import find_spec

import pytest

import cuflash
from cuflash.api import types as array_types
from cuflash.request import options
from helpers.static_types import fields_of

CALLS = {
    "forward": ("ForwardOptions", {"return_lse", "return_max_score"}),
    "backward": (
        "BackwardOptions",
        {"return_dbias", "return_dsink", "return_dmod"},
    ),
    "vjp": ("VjpOptions", {"return_lse"}),
    "forward_kvcache": ("KVCacheOptions", {"return_lse"}),
    "apply_rotary": ("RotaryOptions", set()),
    "weights": ("WeightsOptions", set()),
    "weight_sums": ("WeightSumsOptions", set()),
    "entropy": ("ReadoutOptions", set()),
    "weights_backward": ("WeightsGradientOptions", {"return_dmod"}),
    "weight_sums_backward": (
        "WeightSumsGradientOptions",
        {"return_drow_weights", "return_dmod"},
    ),
    "entropy_backward": ("EntropyGradientOptions", {"return_dmod"}),
}
BRIDGES = {"torch": "TorchOptions", "jax": "JaxOptions"}


def keywords_of(call):
    parameters = inspect.signature(call).parameters.values()
    return {x.name: x for x in parameters if x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "kind, names",
    [
        ("Options", options.UNTRACED),
        ("CacheOptionsOf", {*options.KVCACHE} & {*options.UNTRACED}),
    ],
)
def test_the_table(kind, names):
    fields = fields_of(kind, array_types.__file__)
    assert fields.keys() == set(names)
    for name, annotation in fields.items():
        array = "A | None" if kind == "CacheOptionsOf" else "Array | None"
        hint = options.BY_NAME[name].hint or array
        window = "tuple[int | None, int | None]"
        assert annotation == hint.replace(window, "Window")


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    kind, others = CALLS[name]
    fields = fields_of(kind, array_types.__file__)
    known = keywords_of(getattr(cuflash, name))
    assert fields.keys() | others == known.keys()
    for option, annotation in fields.items():
        asked = known[option].annotation
        kept = asked.replace("tuple[int | None, int | None]", "Window")
        assert asked == "Any" or annotation == kept, option


@pytest.mark.parametrize("bridge", BRIDGES)
def test_options_of_bridges(bridge):
    if not find_spec(bridge):
        pytest.skip(f"needs {bridge}")
    attention = __import__(f"cuflash.{bridge}", fromlist="_").attention
    fields = fields_of(BRIDGES[bridge], array_types.__file__)
    assert fields.keys() | {"return_lse"} == keywords_of(attention).keys()
