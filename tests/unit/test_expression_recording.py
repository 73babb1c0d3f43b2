"""Recording a user's function: remembering, folding, ranges."""

import functools
import math
import time
import types
from dataclasses import dataclass

import numpy as np
import pytest

from cuflash.expressions import derivative, nodes, ranges, text, trace
from cuflash.expressions.nodes import constant, index
from cuflash.expressions.trace import ArrayKind, Given

ARRAYS = {
    "table": ArrayKind("float32", 2, (1,)),
    "ids": ArrayKind("int32", 1, (0,)),
    "short": ArrayKind("int16", 1, (0,)),
    "flags": ArrayKind("bool", 1, (0,)),
}
GIVEN = Given(tuple(sorted(ARRAYS.items())), (("n", "int"), ("w", "real")))
WIDTH = 3


def score_of(function, given=GIVEN):
    return trace.recorded(function, "score_mod", given)[0]


def mask_of(function, given=GIVEN):
    return trace.recorded(function, "mask_mod", given)[0]


def value_of(expression):
    """Return the node of an expression of q_idx and kv_idx."""
    x, y = trace.Symbol(index("q_idx")), trace.Symbol(index("kv_idx"))
    result = expression(x, y)
    return result.node if isinstance(result, trace.Symbol) else result


# ---- Equal graphs are one object ----


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64", int])
def test_a_bool_is_the_same_in_every_int(dtype):
    found = value_of(lambda x, y: (x > y).astype(dtype))
    assert found is value_of(lambda x, y: (x > y).astype("int32"))


def test_equal_graphs_of_two_functions_are_one_object():
    def first(score, b, h, q_idx, kv_idx):
        return np.exp(score) + q_idx

    def second(score, b, h, q_idx, kv_idx):
        exponential = np.exp(score)
        return exponential + q_idx

    assert score_of(first) is score_of(second)


def test_common_parts_are_one_node():
    node = value_of(lambda x, y: (x - y) * (x - y))
    assert node.args[0] is node.args[1]


def test_arrays_of_other_names_share_a_graph():
    one, other = (Given(((x, ARRAYS["ids"]),)) for x in ("a", "b"))
    first = score_of(
        lambda score, b, h, q_idx, kv_idx, *, a: score + a[h], one
    )
    second = score_of(
        lambda score, b_, h, q_idx, kv_idx, *, b: score + b[h], other
    )
    assert first is second


def test_constants_of_other_kinds_and_signs_differ():
    made = [constant(x) for x in (0, 0.0, -0.0, False, 1, 1.0, True)]
    assert len({*map(id, made)}) == len(made)
    assert constant(float("nan")) is constant(float("nan"))


def test_graphs_are_forgotten_with_what_uses_them():
    before = len(nodes._KNOWN)
    node = value_of(lambda x, y: x * 12347 + y)
    assert len(nodes._KNOWN) > before
    del node
    assert len(nodes._KNOWN) == before


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to("cpu", np.int64),
        lambda x: x.to("cuda:0", dtype=int, copy=True),
        lambda x: x.to(int, False),
        lambda x: x.to(trace.Symbol(index("q_idx"))),
        lambda x: x.to(other=trace.Symbol(index("q_idx"))),
    ],
)
def test_arguments_of_pytorchs_to(convert):
    assert value_of(lambda x, y: convert(x * 0.7)) is value_of(
        lambda x, y: (x * 0.7).astype(int)
    )
    assert value_of(lambda x, y: x.to("cpu", True)) is index("q_idx")


# ---- Remembering: a function is called again if its graph may differ ----


class Calls:
    """Counts the calls of the functions that it makes."""

    def __init__(self):
        self.count = 0


@pytest.fixture
def calls(monkeypatch):
    found, record = Calls(), trace.record

    def counted(*args):
        found.count += 1
        return record(*args)

    monkeypatch.setattr(trace, "record", counted)
    monkeypatch.setattr(trace, "_RECORDED", {})
    return found


def window(width):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width


def test_a_repeated_call_records_nothing(calls):
    def own(b, h, q_idx, kv_idx):
        return np.minimum(q_idx, WIDTH) < kv_idx

    first = mask_of(own)
    assert mask_of(own) is first and calls.count == 1
    assert mask_of(window(5)) is mask_of(window(5)) and calls.count == 2


def test_a_changed_closure_is_recorded_again(calls):
    width = 3

    def own(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < width

    first = mask_of(own)
    width = 4
    assert mask_of(own) is not first
    assert mask_of(own) is mask_of(window(4))


def test_a_changed_global_is_recorded_again(monkeypatch):
    def own(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < WIDTH

    first = mask_of(own)
    monkeypatch.setitem(globals(), "WIDTH", 30)
    assert mask_of(own) is mask_of(window(30)) is not first


def helper(x):
    return x < WIDTH


def test_a_global_of_a_helper_is_recorded_again(monkeypatch):
    def own(b, h, q_idx, kv_idx):
        return (lambda x: helper(x))(q_idx - kv_idx)

    first = mask_of(own)
    monkeypatch.setitem(globals(), "WIDTH", 30)
    assert mask_of(own) is mask_of(window(30)) is not first


def test_changed_defaults_are_recorded_again():
    def own(b, h, q_idx, kv_idx, *, width=3):
        return q_idx - kv_idx < width

    first = mask_of(own)
    own.__kwdefaults__["width"] = 4
    assert mask_of(own) is mask_of(window(4)) is not first


def test_zero_and_one_are_not_false_and_true():
    scale = 1

    def own(score, b, h, q_idx, kv_idx):
        return score + scale

    found = []
    for scale in (1, 1.0, 0.0, -0.0):  # noqa: B007
        found.append(score_of(own))
    assert found[2] is not found[3]


# What a function reads an int of; each can change it.


class Slotted:
    __slots__ = ("width",)


class WithProperty:
    @property
    def width(self):
        return self.inner


@dataclass
class Settings:
    width: int


def of_attribute(held):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < held.width


def of_item(held, key):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < held[key]


def attribute(held, name="width"):
    return lambda x: setattr(held, name, x)


def item(held, key):
    return lambda x: held.__setitem__(key, x)


def holders():
    namespace = types.SimpleNamespace(width=3)
    module, slotted, inner = types.ModuleType("m"), Slotted(), WithProperty()
    a_class = type("A", (), {"width": 3})
    module.width = slotted.width = inner.inner = 3
    listed, by_name, array = [3], {"w": 3}, np.array([3] * 80)
    small = np.array([3])
    nested = types.SimpleNamespace(inner=namespace)
    return {
        "object": (of_attribute(namespace), attribute(namespace)),
        "module": (of_attribute(module), attribute(module)),
        "slots": (of_attribute(slotted), attribute(slotted)),
        "property": (of_attribute(inner), attribute(inner, "inner")),
        "class": (of_attribute(a_class), attribute(a_class)),
        "of a class": (of_attribute(a_class()), attribute(a_class)),
        "list": (of_item(listed, 0), item(listed, 0)),
        "dict": (of_item(by_name, "w"), item(by_name, "w")),
        "array": (of_item(array, 0), item(array, 0)),
        "small array": (of_item(small, 0), item(small, 0)),
        "nested": (
            lambda b, h, q_idx, kv_idx: q_idx - kv_idx < nested.inner.width,
            attribute(namespace),
        ),
    }


@pytest.mark.parametrize("name", holders())
def test_what_an_object_holds_is_recorded_again(name):
    function, change = holders()[name]
    first = mask_of(function)
    assert first is mask_of(function) is mask_of(window(3))
    change(4)
    assert mask_of(function) is mask_of(window(4)) is not first


class Model:
    def __init__(self, width):
        self.width = width

    def mask(self, b, h, q_idx, kv_idx):
        return self.near(q_idx - kv_idx)

    def near(self, distance):
        return distance < self.width

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b, h, q_idx, kv_idx)


@pytest.mark.parametrize("make", [lambda x: x.mask, lambda x: x])
def test_methods_read_their_object_again(make):
    model = Model(3)
    function = make(model)
    assert mask_of(function) is mask_of(window(3))
    model.width = 4
    assert mask_of(function) is mask_of(window(4))


def near_by(settings, x):
    return x < settings.width


def test_a_helpers_argument_is_read_again():
    settings = Settings(3)

    def own(b, h, q_idx, kv_idx):
        return near_by(settings, q_idx - kv_idx)

    assert mask_of(own) is mask_of(window(3))
    settings.width = 4
    assert mask_of(own) is mask_of(window(4))


def test_a_changed_method_is_recorded_again(monkeypatch):
    model = Model(3)
    assert mask_of(model) is mask_of(window(3))
    monkeypatch.setattr(Model, "near", lambda self, x: x < 5)
    assert mask_of(model) is mask_of(window(5))


def test_methods_and_partial_functions_are_remembered(calls):
    model = Model(3)
    partial = functools.partial(Model.mask, Model(7))
    for _ in range(3):
        mask_of(model.mask)
        mask_of(partial)
    assert calls.count == 2


def test_a_partial_functions_globals_are_read_again(monkeypatch):
    def own(width, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < width + WIDTH

    function = functools.partial(own, 1)
    assert mask_of(function) is mask_of(window(4))
    monkeypatch.setitem(globals(), "WIDTH", 30)
    assert mask_of(function) is mask_of(window(31))


def test_a_function_that_names_itself_is_remembered(calls):
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    for _ in range(2):
        score_of(lambda score, b, h, q_idx, kv_idx: power(score, 3))
    assert calls.count == 1


def test_remembering_is_fast():
    function = window(9)
    mask_of(function)
    best = min(_seconds(mask_of, function) for _ in range(200))
    assert best < 40e-6  # seconds; 5 where no other process runs


def _seconds(call, *args):
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


# ---- Constants and operands that are the result ----


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        (lambda x, y: x * 1, lambda x, y: x),
        (lambda x, y: 1 * x, lambda x, y: x),
        (lambda x, y: x + 0, lambda x, y: x),
        (lambda x, y: 0 + x, lambda x, y: x),
        (lambda x, y: x - 0, lambda x, y: x),
        (lambda x, y: x + (x**0 - 1), lambda x, y: x),
        (lambda x, y: +x, lambda x, y: x),
        (lambda x, y: x**1, lambda x, y: x),
        (lambda x, y: x**2, lambda x, y: x * x),
        (lambda x, y: np.square(x), lambda x, y: x * x),
        (lambda x, y: np.where(True, x, y), lambda x, y: x),
        (lambda x, y: np.where(x**0 > 1, x, y), lambda x, y: y),
        (lambda x, y: np.where(x > y, x, x), lambda x, y: x),
        (lambda x, y: (x > y) & True, lambda x, y: x > y),
        (lambda x, y: False | (x > y), lambda x, y: x > y),
        (lambda x, y: np.logical_and(x > y, x**0), lambda x, y: x > y),
        (lambda x, y: np.floor(x), lambda x, y: x),
        (lambda x, y: round(x), lambda x, y: x),
        (lambda x, y: np.clip(x, None, 5), lambda x, y: np.minimum(x, 5)),
        (lambda x, y: np.clip(x, max=5), lambda x, y: np.minimum(x, 5)),
        (lambda x, y: x.clip(max=y, min=1), lambda x, y: np.clip(x, 1, y)),
        (lambda x, y: x.astype(np.int32), lambda x, y: x),
        (
            lambda x, y: (x * y).astype(np.int32),
            lambda x, y: (x * y << 32) >> 32,
        ),
        (
            lambda x, y: (x / y).astype(np.int32),
            lambda x, y: (x / y).astype(int),
        ),
        (lambda x, y: x + np.array(y), lambda x, y: x + y),
        (lambda x, y: 5 < x, lambda x, y: x > 5),
        (lambda x, y: np.abs(x), lambda x, y: abs(x)),
        (lambda x, y: np.fix(x / y), lambda x, y: np.trunc(x / y)),
    ],
)
def test_one_graph(expression, same):
    assert value_of(expression) is value_of(same)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (lambda x, y: (x > y) & False, False),
        (lambda x, y: (x > y) | True, True),
        (lambda x, y: x**0 + 2**62, 2**62 + 1),
        (lambda x, y: (x**0 + 2**31).astype("int32"), 1 - 2**31),
        (lambda x, y: math.floor(x**0 + 2**40), 2**40 + 1),
        (lambda x, y: (x**0 - 8) // 2, -4),
        (lambda x, y: (x**0 - 8) % 3, 2),
        (lambda x, y: (x**0) // (x**0 - 1), 0),
        (lambda x, y: (x**0) % (x**0 - 1), 0),
        (lambda x, y: (x**0 - 8) >> 1, -4),
        (lambda x, y: x**0 / 4, 0.25),
        (lambda x, y: np.exp2(x**0), 2.0),
        (lambda x, y: (x**0 - 3.7).astype(int), -2),
        (lambda x, y: (x**0 * 1e30).astype(int), 0),
    ],
)
def test_constants_are_folded(expression, value):
    node = value_of(expression)
    assert node.is_constant
    assert (node.value, type(node.value)) == (value, type(value))


def test_real_sums_with_zero_are_not_left_out():
    node = value_of(lambda x, y: x / y + 0.0)  # -0.0 becomes 0.0
    assert node.op == "add"


def test_an_int_to_a_real_power_is_a_real():
    assert value_of(lambda x, y: x**2.0).kind == "real"


# ---- Dependence ----


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "q_idx kv_idx"),
        (lambda b, h, q_idx, kv_idx, *, ids: ids[b] > h, "b h"),
        (lambda b, h, q_idx, kv_idx, *, n, seqlen_k: n > seqlen_k, ""),
        (lambda b, h, q_idx, kv_idx, *, ids: ids[q_idx] > ids.shape[0],
         "q_idx"),
    ],
)  # fmt: skip
def test_a_mask_depends_on(function, names):
    assert mask_of(function).depends == {*names.split()}


# ---- Ranges ----


TOKENS = 2**30


@pytest.mark.parametrize(
    ("expression", "low", "high"),
    [
        (lambda x, y: x - y, 1 - TOKENS, TOKENS - 1),
        (lambda x, y: x % 8, 0, 7),
        (lambda x, y: (x - y) % 8, 0, 7),
        (lambda x, y: x % -8, -8, 0),
        (lambda x, y: (x - y) // 8, -TOKENS // 8, TOKENS // 8 - 1),
        (lambda x, y: x & 63, 0, 63),
        (lambda x, y: (x - y) & 63, 0, 63),
        (lambda x, y: x | 63, 0, TOKENS - 1),
        (lambda x, y: (x % 4) ^ (y % 32), 0, 31),
        (lambda x, y: abs(x - y), 0, TOKENS - 1),
        (lambda x, y: np.sign(x - y), -1, 1),
        (lambda x, y: np.clip(x - y, -5, 5), -5, 5),
        (lambda x, y: ~x, -TOKENS, -1),
        (lambda x, y: -x, 1 - TOKENS, 0),
        (lambda x, y: (x % 8) << 2, 0, 28),
        (lambda x, y: x >> 20, 0, 1023),
        (lambda x, y: np.where(x > y, 3, -3), -3, 3),
        (lambda x, y: (x > y) + (x < y) * 2, 0, 3),
    ],
)
def test_a_range(expression, low, high):
    assert ranges.range_of(value_of(expression)) == (low, high)


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: x + y + 1, True),
        (lambda x, y: 4 * x, False),
        (lambda x, y: x * y, False),
        (lambda x, y: (x * y * x * y * x) >> 62, False),  # not held by 64 bits
        (lambda x, y: (x * y) % 1000, True),
        (lambda x, y: (x / y).astype(int), False),
    ],
)
def test_whether_32_bits_hold_it(expression, fits):
    assert ranges.fits_int32(value_of(expression)) is fits


# ---- Long functions ----


def long_score(score, b, h, q_idx, kv_idx, *, table):
    for i in range(300):
        score = np.where(q_idx > i, score * 1.01, score + table[h, i])
    return score


def test_a_long_function_takes_little_time():
    """Some 1200 nodes: each step is linear in them."""
    start = time.process_time()
    node = score_of(long_score, Given((("table", ARRAYS["table"]),)))
    slope = derivative.slope(node)
    made = text.text(node, None, (ARRAYS["table"],), (0,))
    assert len(nodes.in_order([slope])) > 900
    assert len(made) > 10_000
    assert time.process_time() - start < 2  # seconds; 0.2 on a quiet core
