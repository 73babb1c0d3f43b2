"""A function whose surroundings change is recorded again."""

import array
import collections
import contextvars
import os
import types

import pytest

from cuflash.expressions import trace

GIVEN = trace.Given()
ONE = contextvars.ContextVar("one")


class Config:
    width = 0


class Bag(dict):
    """A dict of one's own."""


Pair = collections.namedtuple("Pair", "widths")


def by_item(made):
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < made[0]

    return mask, lambda width: made.__setitem__(0, width)


def by_name(made):
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < getattr(made, "width", 0)

    return mask, lambda width: setattr(made, "width", width)


def by_closed_name():
    made, name = types.SimpleNamespace(), "width"
    return (
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < getattr(made, name),
        lambda width: setattr(made, "width", width),
    )


def of_context():
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < ONE.get(), ONE.set


def of_environment():
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < int(os.environ["CUFLASH_WIDTH"])

    return mask, lambda x: os.environ.__setitem__("CUFLASH_WIDTH", str(x))


def of_itself():
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < mask.width

    return mask, lambda width: setattr(mask, "width", width)


def of_a_pair():
    pair = Pair([0])
    return (
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < pair.widths[0],
        lambda width: pair.widths.__setitem__(0, width),
    )


CHANGING = {
    "OrderedDict": lambda: by_item(collections.OrderedDict()),
    "dict": lambda: by_item(Bag()),
    "deque": lambda: by_item(collections.deque([0])),
    "array": lambda: by_item(array.array("i", [0])),
    "attribute": lambda: by_name(types.SimpleNamespace()),
    "class": lambda: by_name(Config),
    "closed name": by_closed_name,
    "context": of_context,
    "environment": of_environment,
    "itself": of_itself,
    "pair": of_a_pair,
}


def plain(width):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width


@pytest.mark.parametrize("name", CHANGING)
def test_a_change_is_seen(name, monkeypatch):
    monkeypatch.setenv("CUFLASH_WIDTH", "0")
    mask, change = CHANGING[name]()
    for width in (3, 4, 3):
        change(width)
        got, _ = trace.recorded(mask, "mask_mod", GIVEN)
        expected, _ = trace.record(plain(width), "mask_mod", GIVEN)
        assert got is expected
