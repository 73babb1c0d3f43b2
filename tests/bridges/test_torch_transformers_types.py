"""Every type of model that builds small: eager's logits, or an error of ours.

A type that eager attention does not run with these sizes and inputs is left
out. What is left is a quarter of all at least.
"""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")
pytest.importorskip("transformers", reason="tests of its models need it")

from hf_models import NAME  # noqa: E402

import cuflash  # noqa: E402
from helpers.small_models import (  # noqa: E402
    ROUNDING,
    TEXT,
    TYPES,
    cached_results,
    difference,
    is_small,
    results,
    small_config,
    small_model,
)

# Of its own code: it renames arguments, and asks for kernels.
pytestmark = pytest.mark.filterwarnings("ignore")

GROUPS = 8
RUNS = [(7, "full"), (7, "left"), (20, "right")]


def outputs(model, kind):
    """Return the results of each run, and of a call after a cache."""
    images = model.main_input_name == "pixel_values"
    found = {x: results(model, *x) for x in (RUNS[:1] if images else RUNS)}
    if kind in TEXT and not model.config.is_encoder_decoder:
        found["cache"] = lambda: cached_results(model, 20, "left", 17)
    return found


def by_eager(kind):
    """Return eager's outputs, and the configuration; None without them."""
    try:
        config = small_config(kind)
        if not is_small(kind, config):
            return None
        model = small_model(kind, "eager", config)
        found = outputs(model, kind)
    except Exception:  # of any kind: sizes, inputs, packages
        return None
    try:
        found["cache"] = found.pop("cache")()
    except Exception:  # it has none
        found.pop("cache", None)
    return found, config


def worst(kind, expected, config):
    """Return the largest difference of our outputs; None for an error."""
    try:
        found = outputs(small_model(kind, NAME, config), kind)
        if "cache" in expected:
            found["cache"] = found["cache"]()
    except cuflash.CuflashError:
        return None
    except KeyError as error:  # Transformers' own table of implementations
        assert error.args == (NAME,)
        return None
    return max(difference(found[x], expected[x]) for x in expected)


def own_error(kind, expected, config):
    """Return how far eager in float32 is from itself in float64."""
    exact = small_model(kind, "eager", config).double()
    return max(
        difference(expected[x], results(exact, *x).float())
        for x in expected
        if x != "cache"
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_type(group):
    types = TYPES[group::GROUPS]
    wrong, compared = {}, 0
    for kind in types:
        theirs = by_eager(kind)
        error = None if theirs is None else worst(kind, *theirs)
        if error is None:
            continue
        compared += 1
        # Scores above 30, as in T5, which does not scale them: its own
        # error tells the size of others.
        if error > ROUNDING and error > 8 * own_error(kind, *theirs):
            wrong[kind] = error
    assert not wrong
    assert compared >= len(types) / 4
