"""Compiled calls see what functions read change: by guards, or by a break."""

import collections
import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from cuflash.torch import attention  # noqa: E402
from cuflash.torch.compiled_functions import TAKES_OBJECTS  # noqa: E402
from helpers.compare import assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

VALUE = torch.arange(64.0).reshape(1, 8, 1, 8)
QUERY = torch.zeros_like(VALUE)
# Means of at most 8 integers below 64.
ATOL = 2.0**-16


def default(width):
    return lambda b, h, i, j, w=width: i - j < w


def keyword_default(width):
    def mask(b, h, i, j, *, w=width):
        return i - j < w

    return mask


def of_dict(width):
    widths = {"w": width}
    return lambda b, h, i, j: i - j < widths["w"]


def of_list(width):
    widths = [width]
    return lambda b, h, i, j: i - j < widths[0]


def of_ordered_dict(width):
    widths = collections.OrderedDict(w=width)
    return lambda b, h, i, j: i - j < widths["w"]


def of_numpy(width):
    number = np.int64(width)
    return lambda b, h, i, j: i - j < number


def of_partial(width):
    return functools.partial(lambda w, b, h, i, j: i - j < w, width)


class Within:
    width = 0

    def __init__(self, width):
        self.own = width

    def __call__(self, b, h, i, j):
        return i - j < self.own

    def method(self, b, h, i, j):
        return self(b, h, i, j)

    @property
    def computed(self):
        return self.own


def of_method(width):
    owner = Within(width)
    return lambda b, h, i, j: owner.method(b, h, i, j)


def of_property(width):
    owner = Within(width)
    return lambda b, h, i, j: i - j < owner.computed


def of_class(width):
    Within.width, owner = width, Within(0)
    return lambda b, h, i, j: i - j < owner.width


def of_size(width):
    table = torch.zeros(1, width)
    return lambda b, h, i, j: i - j + table[h, 0] < table.shape[1]


def of_size_alone(width):
    table = torch.zeros(width)
    return lambda b, h, i, j: i - j < len(table)


def of_row(width):
    table = torch.ones(1, width)
    return lambda b, h, i, j: i - j < sum(x for x in table[h])


def of_number(width):
    tensor = torch.tensor([width])
    return lambda b, h, i, j: i - j < tensor.item()


def of_nan(width):
    bound = (float("nan"), 2.0)[width % 2]
    return lambda b, h, i, j: (i - j < 3) | (i - j > bound)


def of_torchs_functions(width):
    further = (torch.maximum, torch.minimum)[width % 2]
    return lambda b, h, i, j: further(i - j, 5 * j) < 6


def of_numpys_functions(width):
    further = (np.maximum, np.minimum)[width % 2]
    return lambda b, h, i, j: further(i - j, 5 * j) < 6


def of_pythons_functions(width):
    kind = (int, bool)[width % 2]
    return lambda b, h, i, j: kind(5) >= i - j


def of_dtypes(width):
    kind = (torch.int64, torch.float32)[width % 2]
    return lambda b, h, i, j: ((i - j) / 2).to(kind) < 1


def of_helpers(width):
    helper = (lambda: 2, lambda: 5)[width % 2]
    return lambda b, h, i, j: i - j < helper()


MADE = {
    x.__name__: x
    for x in (
        default, keyword_default, of_dict, of_list, of_ordered_dict, of_numpy,
        of_partial, Within, of_method, of_property, of_class, of_size,
        of_size_alone, of_row, of_number, of_nan, of_torchs_functions,
        of_numpys_functions, of_pythons_functions, of_dtypes, of_helpers,
    )
}  # fmt: skip
BREAK = {"of_ordered_dict", "of_numpy", "of_number"}


def call(mask):
    return attention(QUERY, QUERY, VALUE, mask_mod=mask)


@pytest.mark.parametrize("name", MADE)
def test_a_change_is_seen(name):
    torch._dynamo.reset()
    broken = {*BREAK, "of_partial", *["Within"][TAKES_OBJECTS:]}
    compiled = torch.compile(
        call, backend="eager", fullgraph=name not in broken
    )
    for width in (2, 3, 4, 5, 2):
        mask = MADE[name](width)
        got, expected = compiled(mask).numpy(), call(mask).numpy()
        assert_allclose(got, expected, "out", atol=ATOL)


@pytest.mark.parametrize("name", sorted(BREAK))
def test_what_cannot_be_compared_breaks_the_graph(name):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="pass it by mod_arrays"):
        compiled(MADE[name](3))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.shift = 2, torch.nn.Parameter(torch.zeros(1))

    def mask(self, b, h, i, j):
        return i - j + self.shift[h] < self.width

    def forward(self):
        return call(self.mask)


def test_a_method_of_a_module():
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(
        layer, backend="aot_eager", fullgraph=TAKES_OBJECTS
    )
    for layer.width in (2, 3, 2):
        got, expected = (x().detach().numpy() for x in (compiled, layer))
        assert_allclose(got, expected, "out", atol=ATOL)


def test_tensors_of_other_lengths_share_a_program():
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    counter = torch._dynamo.utils.counters["stats"]
    for length in (8, 9, 10, 11):
        ids = torch.arange(length) // 3
        compiled(lambda b, h, i, j, ids=ids: ids[i] == ids[j])
        if length == 9:
            before = counter["unique_graphs"]
    assert counter["unique_graphs"] == before
