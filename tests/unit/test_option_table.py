"""Signatures, docs, structs and kernels agree with the option table."""

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import cuflash
from cuflash.launch import structs as abi
from cuflash.plans import sm90
from cuflash.plans.plan import device_of_arch
from cuflash.plans.steps import option_constants
from cuflash.request import options
from cuflash.request.problem import Problem
from helpers.kernels import ASKED, small_problem

GUIDE = Path(__file__).parents[2] / "docs/guide"
PAGE = (GUIDE / "options.md").read_text(encoding="utf-8")
NAMES = [option.name for option in options.TABLE]
of_each_option = pytest.mark.parametrize("option", options.TABLE, ids=NAMES)
HOPPER = device_of_arch("sm_90a")


def asked(option, direction="backward"):
    changes = ASKED[option.part_of or option.name]
    return small_problem(direction, "float16", **changes)


def calls(option):
    return [cuflash.backward] + [cuflash.forward] * (not option.of_gradients)


# What users see ------------------------------------------------------------


@pytest.mark.parametrize("call", [cuflash.forward, cuflash.backward])
def test_calls_have_the_options_in_its_order(call):
    parameters = list(inspect.signature(call).parameters)
    known = [option.name for option in options.TABLE if call in calls(option)]
    assert parameters[parameters.index("window") :] == known


@pytest.mark.parametrize("call", [cuflash.jvp, cuflash.double_backward])
def test_derivatives_have_the_options_of_forward(call):
    known = inspect.signature(cuflash.forward).parameters
    names = list(options.FORWARD)
    parameters = inspect.signature(call).parameters
    first = list(parameters).index("window")
    assert list(parameters)[first : first + len(names)] == names
    for name in names:
        assert parameters[name].default == known[name].default
        assert re.search(rf"^.*\b{name}\b", inspect.getdoc(call), re.M)


@of_each_option
def test_defaults_are_those_of_the_calls(option):
    for call in calls(option):
        default = inspect.signature(call).parameters[option.name].default
        assert type(default) is type(option.default)
        assert default == option.default


@pytest.mark.parametrize(
    "call, names",
    [
        (cuflash.backward, options.FORWARD),
        (cuflash.vjp, options.FORWARD),
        (cuflash.weights, options.FORWARD),
        (cuflash.weight_sums, options.FORWARD),
        (cuflash.entropy_backward, options.FORWARD),
        (cuflash.forward_kvcache, options.KVCACHE),
    ],
)
def test_docstrings_spell_options_out(call, names):
    arguments, _, _ = inspect.getdoc(call).partition("Returns\n")
    assert set(names) <= set(re.findall(r"\w+", arguments))
    assert "**options" not in arguments


def entry(name, call=cuflash.forward):
    """Return a docstring's entry of an option."""
    found = re.search(
        rf"^[\w, ]*\b{name}\b[\w, ]* : .*(?:\n    .*)*",
        inspect.getdoc(call).partition("Returns\n")[0],
        re.M,
    )
    return found and found[0]


@of_each_option
def test_docstrings_describe_each(option):
    if option.of_gradients:
        assert entry(option.name, cuflash.backward)
        return
    assert entry(option.name)
    as_of_forward = re.search(
        r"^scale, causal(.*\n)+?    As given to `forward`",
        inspect.getdoc(cuflash.backward),
        re.M,
    )
    assert option.name in re.findall(r"\w+", as_of_forward[0])


@of_each_option
def test_docstrings_describe_the_arrays(option):
    if option.array is None:
        return
    text = entry(option.name)
    for dtype in option.array.dtypes:
        named = f"`{dtype}`" if dtype in ("q", "lse") else dtype
        assert ("Integers" if option.array.integers else named) in text
    assert option.array.broadcasts == ("roadcastable" in text)
    for axis in option.array.axes:
        named = {"num_heads_q": "num_heads_q,"}.get(axis, axis)
        assert option.array.broadcasts or named.strip(",") in text


@of_each_option
def test_the_page_lists_what_excludes_it(option):
    if option.of_gradients or not option.flag or option.traced:
        return
    table = PAGE.split("<!-- options:")[1].split("\n\n")[1]
    (row,) = (x for x in table.splitlines() if f"`{option.name}`" in x)
    assert ("| bias, mask or segment" in row) == any(
        option.name in other.not_with for other in options.TABLE
    )


# What the other rooms know -------------------------------------------------


@of_each_option
def test_a_problem_knows_it(option):
    own = {field.name for field in fields(Problem)}
    if option.name == "seed":  # of which nothing is decided
        assert not option.part_of
    elif option.part_of:
        assert asked(option).options == (option.part_of,)
    else:
        assert option.name in own


def test_a_problem_knows_no_other():
    everything = {}
    for changes in ASKED.values():
        everything |= changes
    problem = small_problem("backward", "float16", **everything)
    parts = dict.fromkeys(x.part_of for x in options.TABLE if x.part_of)
    assert set(problem.options) == set(parts)


@of_each_option
def test_kernels_have_its_flag(option):
    if not option.flag:
        return
    without = small_problem("backward", "float16")
    assert dict(option_constants(asked(option), "sm80"))[option.flag] is True
    assert dict(option_constants(without, "sm80"))[option.flag] is False


@of_each_option
def test_what_has_no_order_is_summed_in_integers(option):
    if not (option.part_of or option.of_gradients):
        return
    problem = replace(asked(option), deterministic=True)
    assert sm90.runs(problem, HOPPER)
    assert sm90.has_integer_dq(problem) == ("sm90" in option.no_order)


def test_structs_have_the_fields_of_all():
    signature = options.Signature(small_problem("forward", "float16"), 4, {})
    fields = set(options.numbers(signature, {}))
    fields |= {x.stride for x in options.TABLE if x.stride}
    # Which sequence a block has, it finds itself.
    assert fields == set(abi.OptionNumbers.names) - {"sequence"}


def test_structs_have_a_pointer_for_each_array():
    names = abi.pointers_of(abi.ForwardWgmmaOptionsArguments)
    assert names[: len(options.ARRAYS)] == options.ARRAYS


@of_each_option
def test_strides_are_as_many_as_axes(option):
    if option.array is None:
        return
    field = abi.OptionNumbers[option.stride]
    assert len(field.names or "1") == max(len(option.array.axes), 1)


@of_each_option
def test_partners_are_options(option):
    assert {*option.needs, *option.not_with} <= set(NAMES)
    kinds = option.array, option.check, option.traced or None
    assert sum(x is not None for x in kinds) == 1
