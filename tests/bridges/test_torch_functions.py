"""score_mod and mask_mod of tensors: what they close over, what is kept."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from flex_cases import causal, inputs  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cuflash.errors import (  # noqa: E402
    CuflashError,
    ExpressionError,
    ShapeError,
    ValueRangeError,
)
from cuflash.expressions import trace  # noqa: E402
from cuflash.torch import (  # noqa: E402
    attention,
    create_block_mask,
    flex_attention,
    functions,
)
from helpers.compare import (  # noqa: E402
    assert_allclose,
    assert_arrays_equal,
)

pytestmark = pytest.mark.slow

QKV = [x.detach().transpose(1, 2) for x in inputs(torch.float32, 8)]


# Weights of 8 keys and a factor of 4: 2^-24 of 2^6 at most.
ATOL = 2.0**-18


def assert_near(got, expected):
    got, expected = (x.detach().numpy() for x in (got, expected))
    assert_allclose(got, expected, "result", atol=ATOL)


def bias_of(heads):
    return torch.linspace(-1, 1, 2 * heads).reshape(heads, 2)


def bent(bias):
    """The score with a bias of the head, by a closure."""
    return lambda s, b, h, i, j: s + bias[h, j % 2]


def expected(bias):
    keys = bias[:, torch.arange(8) % 2][None, :, None]
    return attention(*QKV, bias=keys.expand(2, 4, 8, 8))


@pytest.fixture
def recorded(monkeypatch):
    """Names of the functions that were recorded."""
    found, record = [], trace.record
    monkeypatch.setattr(functions, "_OF_CONTENT", {})
    monkeypatch.setattr(functions, "_OF_KEYS", {})

    def noted(function, role, given):
        found.append(role)
        return record(function, role, given)

    monkeypatch.setattr(trace, "record", noted)
    return found


def test_closures_of_each_step_are_recorded_once(recorded):
    for step in range(3):
        bias = bias_of(4) + step
        got = attention(*QKV, score_mod=bent(bias), mask_mod=None)
        assert_near(got, expected(bias))
    assert len(recorded) == 1


def test_other_shapes_and_dtypes_are_recorded_anew(recorded):
    for bias in bias_of(4), bias_of(4).double(), bias_of(5):
        attention(*QKV, score_mod=bent(bias))
    assert len(recorded) == 3


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(bias_of(4))
        self.shift = [torch.tensor(0), torch.tensor(1)]

    def score(self, s, b, h, q_idx, kv_idx):
        return s + self.bias[h, (kv_idx + self.shift[1]) % 2]

    def forward(self):
        return attention(*QKV, score_mod=self.score)


def test_parameters_of_a_module(recorded):
    layer = Layer()
    for _ in range(2):
        layer.zero_grad()
        with torch.no_grad():
            layer.bias.add_(1)
        layer().square().sum().backward()
        moved = layer.bias.detach().clone().requires_grad_()
        expected(moved.flip(1)).square().sum().backward()
        assert_near(layer.bias.grad, moved.grad)
    layer.bias = torch.nn.Parameter(2 * bias_of(4))  # another tensor
    got = layer().detach()
    assert_near(got, expected(2 * bias_of(4).flip(1)))
    assert len(recorded) == 1


def test_what_a_function_computes_of_tensors_is_computed_again(recorded):
    bias = bias_of(4).requires_grad_()

    def score(s, b, h, q_idx, kv_idx):
        return s + (2 * bias)[h, kv_idx % 2]

    for factor in 1, 3:
        with torch.no_grad():
            bias.mul_(factor)
        got = attention(*QKV, score_mod=score)
        assert_near(got, expected(2 * bias))
        assert torch.autograd.grad(got.sum(), bias)[0].shape == (4, 2)
    assert len(recorded) == 2


def test_numbers_and_arrays_by_name(recorded):
    def score(s, b, h, q_idx, kv_idx, *, bias, rate):
        return s + rate * bias[h, kv_idx % 2]

    bias = bias_of(4).requires_grad_()
    for rate in (0.5, 2.0, True):
        arrays = {"rate": rate, "bias": bias}
        got = attention(*QKV, score_mod=score, mod_arrays=arrays)
        assert_near(got, expected(rate * bias))
    assert len(recorded) == 2
    (gradient,) = torch.autograd.grad(got[..., 0].sum(), bias)
    (other,) = torch.autograd.grad(expected(bias)[..., 0].sum(), bias)
    assert_near(gradient, other)


def test_a_mask_has_no_gradient():
    bias = bias_of(4).requires_grad_()

    def mask(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (bias[h, kv_idx % 2] < 2)

    assert not attention(*QKV, mask_mod=mask).requires_grad
    out = attention(*QKV, score_mod=bent(bias), mask_mod=mask)
    assert out.requires_grad


def test_a_block_mask_reads_what_has_changed():
    ids = torch.zeros(8, dtype=torch.int64)
    mask = create_block_mask(
        lambda b, h, i, j: ids[i] == ids[j], None, None, 8, 8
    )
    query, key, value = (x.transpose(1, 2) for x in QKV)
    for _ in range(2):
        visible = ids[:, None] == ids
        got = flex_attention(query, key, value, block_mask=mask)
        full = attention(*QKV, mask=visible[None, None]).transpose(1, 2)
        assert_near(got, full)
        ids[4:] = 1


class Width:
    width = 1


def of_modules(make):
    """A function of a Sequential's first module, and what changes it."""
    modules = torch.nn.Sequential(make(1))
    return (
        lambda b, h, i, j: i - j < modules[0].out_features,
        lambda width: modules.__setitem__(0, make(width)),
    )


CHANGED = {
    "class": lambda: (
        lambda b, h, i, j: i - j < Width.width,
        lambda width: setattr(Width, "width", width),
    ),
    "modules": lambda: of_modules(lambda width: torch.nn.Linear(1, width)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_numbers_that_are_attributes_change(name):
    mask, change = CHANGED[name]()
    for width in 2, 3, 2:
        change(width)
        got = attention(*QKV, mask_mod=mask)
        assert_near(got, attention(*QKV, window=(width - 1, None)))


@pytest.mark.parametrize("dims", [(1, None), (0, 0), (None, 0)])
def test_vmap(dims):
    """By the batch's index they run one after another."""
    q = torch.stack([QKV[0], 2 * QKV[0]], 1)
    biases = torch.stack([bias_of(4), -bias_of(4)])

    def call(q, bias):
        def score(s, b, h, i, j):
            return s + bias[h, j % 2] * (b + 1)

        return attention(q, *QKV[1:], score_mod=score)

    given = q if dims[0] == 1 else q.movedim(1, 0) if dims[0] == 0 else QKV[0]
    bias = biases if dims[1] == 0 else biases[0]
    got = torch.func.vmap(call, dims)(given, bias)
    for n in range(2):
        one = QKV[0] if dims[0] is None else (1 + n) * QKV[0]
        other = biases[n if dims[1] == 0 else 0]
        assert_near(got[n], call(one, other))


def test_under_a_dispatch_mode():
    """By an operator, which the mode sees."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    bias = bias_of(4).requires_grad_()
    with Mode():
        out = attention(*QKV, score_mod=bent(bias), mask_mod=causal)
        (got,) = torch.autograd.grad(out.square().sum(), bias)
    plain = attention(*QKV, score_mod=bent(bias), mask_mod=causal)
    assert_near(out, plain)
    assert_near(got, torch.autograd.grad(plain.square().sum(), bias)[0])
    assert any("function_attention_backward" in x for x in seen)


def test_rows_of_values():
    """Those of a tensor, as torch computes them of all pairs."""
    chosen = torch.tensor([[0, 2], [1, 1], [3, 0]])
    weights = torch.linspace(-1, 1, 12).reshape(3, 4)

    def mask(b, h, i, j):
        here = (chosen[i % 3] == (j % 4).unsqueeze(-1)).any(dim=-1)
        return here | (weights[i % 3] > 0.9).all(-1) | (i == j)

    def score(s, b, h, i, j):
        row = torch.where(weights[i % 3] > 0, weights[i % 3], 0.5 * s)
        near = torch.abs(row - torch.unsqueeze(j, dim=-1)).amin(-1)
        return s + near + torch.dot(weights[j % 3], weights[i % 3])

    def plain(s, b, h, i, j):
        one, other = weights[i % 3], weights[j % 3]
        row = torch.where(one > 0, one, 0.5 * s[..., None])
        near = torch.abs(row - j[..., None]).amin(-1)
        return s + near + (one * other).sum(-1)

    q, k, v = QKV
    i = torch.arange(q.shape[1])[:, None].expand(-1, k.shape[1])
    j = torch.arange(k.shape[1]).expand_as(i)
    got = attention(q, k, v, score_mod=score, mask_mod=mask)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = plain(scores, 0, 0, i, j)
    scores = scores.masked_fill(~mask(0, 0, i, j), -torch.inf)
    weights_of = scores.softmax(-1)
    assert_near(got, torch.einsum("bhij,bjhd->bihd", weights_of, v))


TABLE = torch.zeros(4, 8)
REFUSED = {
    "device": (
        lambda s, b, h, i, j: s + META[h], ValueRangeError,
        "META, which score_mod or mask_mod reads, is on meta, expected cpu",
    ),
    "stack": (
        lambda s, b, h, i, j: s + torch.stack([TABLE[h]] * 2)[0, j],
        ExpressionError, "read an element of each",
    ),
    "no gradients": (
        lambda s, b, h, i, j: torch.no_grad()(lambda: s * s)(),
        ExpressionError, "all of a score is differentiated",
    ),
    "slice": (
        lambda s, b, h, i, j: s + TABLE[h, :].sum(), ExpressionError,
        "is read by a slice",
    ),
    "number": (
        lambda s, b, h, i, j: s + TABLE, ExpressionError,
        "read an element of it",
    ),
    "axes": (
        lambda s, b, h, i, j: s + TABLE[h, i, j], ExpressionError, "give 2",
    ),
    "row": (
        lambda s, b, h, i, j: s + TABLE[h], ExpressionError,
        "it returns several values, expected a score",
    ),
    "rows": (
        lambda s, b, h, i, j: (TABLE[h] * TABLE.mT[j]).sum(-1),
        ExpressionError, "rows of 4 and 8 traced values",
    ),
    "an axis of a row": (
        lambda s, b, h, i, j: s + TABLE[h].sum(dim=1), ExpressionError,
        "write x.sum(dim=-1)",
    ),
    "real index": (
        lambda s, b, h, i, j: s + TABLE[h, i / 2], ExpressionError,
        "np.floor(x)",
    ),
}  # fmt: skip
META = torch.zeros(4, device="meta")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_what_to_write(name):
    function, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        attention(*QKV, score_mod=function)
    assert words in str(caught.value), caught.value


def test_an_ellipsis_and_masks_without_gradients():
    @torch.no_grad()
    def mask(b, h, i, j):
        return i >= j

    table = bias_of(4)
    got = attention(
        *QKV, score_mod=lambda s, b, h, i, j: s + table[h, ..., j % 2],
        mask_mod=mask,
    )  # fmt: skip
    assert_near(got, attention(*QKV, score_mod=bent(table), causal=True))


def test_block_masks_of_other_sizes_and_of_other_things():
    query, key, value = (x.transpose(1, 2) for x in QKV)
    mask = create_block_mask(causal, None, None, 8, 16)
    with pytest.raises(ShapeError, match=r"create_block_mask\(.*8, 8\)"):
        flex_attention(query, key, value, block_mask=mask)
    with pytest.raises(CuflashError, match="expected what create_block_mask"):
        flex_attention(query, key, value, block_mask=causal)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of forward mode
def test_derivatives_of_derivatives():
    """In forward mode, and gradients of gradients."""
    q, k, v = (x[:1, :3, :, :2].double() for x in QKV)
    bias = bias_of(4).double()

    def call(q, bias):
        def score(s, b, h, i, j):
            return torch.tanh(s) * bias[h, (i + j) % 2] + bias[h, j % 2] ** 2

        return attention(q, k, v, score_mod=score, mask_mod=causal)

    given = [x.clone().requires_grad_() for x in (q, bias)]
    assert torch.autograd.gradgradcheck(call, given)
    assert torch.autograd.gradcheck(
        call, given, check_forward_ad=True, check_backward_ad=False
    )
    directions = torch.stack([bias, bias.flip(0)])
    got = torch.func.vmap(
        lambda x: torch.func.jvp(lambda y: call(q, y), (bias,), (x,))[1]
    )(directions)
    for x, direction in zip(got, directions, strict=True):
        other = torch.func.jvp(lambda y: call(q, y), (bias,), (direction,))
        assert_near(x, other[1])


def test_tensors_without_axes_by_name():
    def decay(score, b, h, q_idx, kv_idx, *, rate):
        return score - rate * abs(q_idx - kv_idx)

    rate = torch.tensor(0.5, requires_grad=True)
    call = functools.partial(attention, *QKV, score_mod=decay)
    out = call(mod_arrays={"rate": rate})
    assert_near(out, call(mod_arrays={"rate": 0.5}))
    (slope,) = torch.autograd.grad(out.sum(), rate)
    vector = rate.detach().reshape(1).requires_grad_()
    out = attention(*QKV, score_mod=lambda s, *x: decay(s, *x, rate=vector[0]))
    (expected,) = torch.autograd.grad(out.sum(), vector)
    assert_arrays_equal(slope, expected[0], "slope")
