"""`weights`, `weight_sums` and `entropy` of torch tensors."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd import gradcheck  # noqa: E402
from torch_data import (  # noqa: E402
    assert_equal,
    on_numpy,
    options,
    packed_tensors,
    tensors,
)
from torch_dense import weights_of  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_allclose, assert_arrays_equal  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
]

NAMES = "weights", "weight_sums", "entropy"
CHOICES = {
    "weights": {"queries": [-1, 2], "keys": [4, 0], "heads": [1]},
    "weight_sums": {"queries": [-1, 2], "reduce": "max"},
    "entropy": {},
}
# A row's sum has at most 16 terms, a gradient's 64, of numbers up to 10, each
# with some ten roundings before: 64 * 10 * 10 * 2^-53 = 7e-13.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
by_name = pytest.mark.parametrize("name", NAMES)
by_option = pytest.mark.parametrize("option", options())


def readout(name, q, k, lse, **given):
    return getattr(cuflash.torch, name)(q, k, lse, **given)


def lse_of(q, k, v, **given):
    return cuflash.torch.attention(q, k, v, return_lse=True, **given)[1]


def call(name, q, k, v, given):
    """A readout whose lse depends on q and k too."""
    lse = lse_of(q, k, v, **given)
    return readout(name, q, k, lse, **given, **CHOICES[name])


def gradients(result, inputs):
    weights = torch.cos(torch.arange(result.numel())).view(result.shape)
    return torch.autograd.grad((result * weights).sum(), inputs)


@by_option
@by_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_and_gradients_are_those_of_numpy(name, option, dtype):
    (q, k, v), given = tensors(dtype), options(dtype)[option]
    lse = lse_of(q, k, v, **given)
    given = given | CHOICES[name]
    leaves = [x.clone().requires_grad_() for x in (q, k, lse)]
    got = readout(name, *leaves, **given)
    numpy = getattr(cuflash, name)
    assert_equal([got], [on_numpy(numpy, q, k, lse, **given)])
    weights = torch.sin(torch.arange(got.numel()).view(got.shape) + 1.0)
    weights = weights.to(got.dtype)
    backward = getattr(cuflash, f"{name}_backward")
    expected = on_numpy(backward, weights, q, k, lse, **given)
    assert_equal(torch.autograd.grad(got, leaves, weights), expected)


@pytest.mark.parametrize("option", ["none", "causal", "bias", "softcap"])
def test_losses_reach_q_and_k_through_lse_too(option):
    """Of the entropy as dense math has it."""
    (q, k, v), given = tensors(requires_grad=True), options()[option]
    p = weights_of(q, k, **given)
    logs = torch.where(p > 0, p, 1).log()
    expected = -(p * logs).sum(-1)
    got = cuflash.torch.entropy(q, k, lse_of(q, k, v, **given), **given)
    assert_allclose(got.detach(), expected.detach(), "entropy", **ROUNDING)
    pairs = zip(gradients(got, (q, k)), gradients(expected, (q, k)))  # noqa: B905
    for x, y in pairs:
        assert_allclose(x, y, "gradient", **ROUNDING)


@by_name
def test_gradcheck(name):
    q, k, v = tensors(batch=1, seqlen_q=3, seqlen_k=5, requires_grad=True)
    lse = lse_of(q, k, v, causal=True).detach().requires_grad_()
    more = {"causal": True, "softcap": 3.0}

    def function(q, k, lse):
        return readout(name, q, k, lse, **more)

    assert gradcheck(function, (q, k, lse))


def test_gradcheck_of_row_weights():
    q, k, v = tensors(batch=2, seqlen_q=3, seqlen_k=5)
    lse, rows = lse_of(q, k, v), torch.randn(q.shape[2], 1).double()

    def function(rows):
        return cuflash.torch.weight_sums(q, k, lse, row_weights=rows)

    assert gradcheck(function, rows.requires_grad_())


@pytest.mark.parametrize(
    "queries",
    [
        slice(None, None, -2),
        range(1, 3),
        torch.tensor([-1, 0]),
        torch.tensor([[0, 2], [-1, 1]], dtype=torch.int32),
    ],
)
def test_choices(queries):
    q, k, v = tensors()
    lse = lse_of(q, k, v)
    got = cuflash.torch.weights(q, k, lse, queries=queries)
    full, rows = cuflash.torch.weights(q, k, lse), torch.arange(q.shape[1])
    chosen = rows.flip(0)[::2] if isinstance(queries, slice) else queries
    rows = rows[torch.as_tensor(chosen)].expand(len(q), -1)
    index = rows[:, None, :, None].expand(got.shape)
    assert_allclose(got, full.gather(2, index), "weights", **ROUNDING)
    sums = cuflash.torch.weight_sums(q, k, lse, queries=queries)
    assert_allclose(sums, got.sum(2), "sums", **ROUNDING)


def test_flags_and_dtypes():
    q, k, v = tensors(torch.bfloat16)
    lse, flags = lse_of(q, k, v), torch.arange(q.shape[1]) % 2 == 0
    got = cuflash.torch.weight_sums(q, k, lse, queries=flags)
    again = cuflash.torch.weight_sums(q, k, lse, queries=flags.tolist())
    assert_arrays_equal(got, again, "sums")
    narrow = cuflash.torch.weights(q, k, lse, dtype=torch.bfloat16)
    assert narrow.dtype is torch.bfloat16


def test_packed_sequences():
    (q, k, v), given = packed_tensors()
    lse = lse_of(q, k, v, **given)
    got = cuflash.torch.weights(q, k, lse, **given)
    assert_equal([got], [on_numpy(cuflash.weights, q, k, lse, **given)])
    assert_allclose(got.sum(-1), torch.ones_like(lse), "rows", **ROUNDING)


@by_name
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(name, dynamic):
    torch._dynamo.reset()
    inputs, given = tensors(requires_grad=True), {"window": (2, None)}

    def function(q, k, v):
        return call(name, q, k, v, given)

    compiled = torch.compile(
        function, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    got, expected = compiled(*inputs), function(*inputs)
    assert_equal([got], [expected])
    q, k, _ = inputs
    assert_equal(gradients(got, (q, k)), gradients(expected, (q, k)))


def test_compiled_slices():
    torch._dynamo.reset()
    q, k, v = tensors()
    lse = lse_of(q, k, v)

    def function(q, k, lse):
        chosen = {"queries": slice(-2, None), "keys": slice(None, None, -1)}
        return cuflash.torch.weights(q, k, lse, **chosen)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal([compiled(q, k, lse)], [function(q, k, lse)])


@by_name
@pytest.mark.parametrize("option", ["causal", "segment_ids", "bias"])
def test_vmap_of_gradients(name, option):
    """By joining batch."""
    size, given = 3, options()[option]
    many = [torch.stack(x) for x in zip(
        *(tensors(seed=seed) for seed in range(size)), strict=True
    )]  # fmt: skip

    def loss(q, k, v):
        return call(name, q, k, v, given).square().sum()

    function = torch.func.grad(loss, argnums=(0, 1))
    got = torch.func.vmap(function)(*many)
    alone = [function(*(x[i] for x in many)) for i in range(size)]
    expected = tuple(map(torch.stack, zip(*alone, strict=True)))
    for x, y in zip(got, expected, strict=True):
        assert_allclose(x, y, "gradient", **ROUNDING)


def test_jacobians():
    """By torch.func, and by the older vmap inside torch.autograd."""
    q, k, v = tensors(batch=1, seqlen_q=2, requires_grad=True)

    def entropy(q):
        return cuflash.torch.entropy(q, k, lse_of(q, k, v))

    expected = torch.autograd.functional.jacobian(entropy, q)
    older = torch.autograd.functional.jacobian(entropy, q, vectorize=True)
    for got in (older, torch.func.jacrev(entropy)(q).detach()):
        assert_allclose(got, expected, "jacobian", **ROUNDING)


def test_vmap_of_choices_and_row_weights():
    q, k, v = tensors(batch=2)
    lse, queries = lse_of(q, k, v), torch.tensor([[0, 1], [2, -1]])
    rows = torch.randn(2, q.shape[2], 1, dtype=lse.dtype)

    def function(queries, rows):
        return cuflash.torch.weight_sums(
            q, k, lse, queries=queries, row_weights=rows
        )

    got = torch.func.vmap(function)(queries, rows)
    each = [function(x, y) for x, y in zip(queries, rows, strict=True)]
    assert_arrays_equal(got, torch.stack(each), "sums")


def test_vmap_of_packed_sequences():
    """Which have no batch: calls run in turn."""
    (q, k, v), given = packed_tensors()
    lse, keys = lse_of(q, k, v, **given), torch.tensor([[0, 1], [2, -1]])

    def function(keys, q):
        return cuflash.torch.weights(q, k, lse, keys=keys, **given)

    queries = torch.stack([q, q.flip(-1)])
    got = torch.func.vmap(function)(keys, queries)
    each = [function(x, y) for x, y in zip(keys, queries, strict=True)]
    assert_arrays_equal(got, torch.stack(each), "weights")


@pytest.mark.parametrize("name", ["keys", "heads"])
def test_vmap_of_keys_and_heads(name):
    q, k, v = tensors()
    lse, chosen = lse_of(q, k, v), torch.tensor([[1, 0], [2, -1], [3, 3]])

    def function(chosen):
        return cuflash.torch.weights(q, k, lse, **{name: chosen})

    each = [function(x) for x in chosen]
    got = torch.func.vmap(function)(chosen)
    assert_arrays_equal(got, torch.stack(each), "weights")


def test_autocast():
    q, k, v = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        lse = lse_of(q, k, v)
        got = cuflash.torch.entropy(q, k, lse)
    narrow = [x.to(torch.bfloat16) for x in (q, k)]
    assert_equal([got], [cuflash.torch.entropy(*narrow, lse)])


@by_name
def test_second_derivatives_are_refused(name):
    q, k, v = tensors(requires_grad=True)
    result = call(name, q, k, v, {})
    (dq,) = torch.autograd.grad(result.sum(), q, create_graph=True)
    with pytest.raises(cuflash.UnsupportedError, match=f"second .*{name}"):
        dq.sum().backward()


def test_bad_input():
    q, k, v = tensors()
    lse = lse_of(q, k, v)
    with pytest.raises(cuflash.ValueRangeError, match="queries"):
        cuflash.torch.weights(q, k, lse, queries=[q.shape[1]])
    with pytest.raises(cuflash.ValueRangeError, match="keys"):
        cuflash.torch.weights(q, k, lse, keys=torch.tensor([-99]))
    with pytest.raises(cuflash.DTypeError, match=r"pass \[3\]"):
        cuflash.torch.weights(q, k, lse, queries=3)
    with pytest.raises(cuflash.ShapeError, match="row_weights"):
        cuflash.torch.weight_sums(q, k, lse, row_weights=lse[..., :2])
    bias = torch.zeros(q.shape[1], k.shape[1]).double().requires_grad_()
    with pytest.raises(cuflash.UnsupportedError, match="bias requires grad"):
        cuflash.torch.entropy(q, k, lse, bias=bias)
    with pytest.raises(cuflash.UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda q: cuflash.torch.entropy(q, k, lse), (q,), (q,))
