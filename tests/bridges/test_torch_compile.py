"""Compiled, traced and transformed calls, which go by operators."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import (  # noqa: E402
    assert_equal,
    options,
    packed_tensors,
    tensors,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.api import attention as api_attention  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

by_option = pytest.mark.parametrize("name", options())


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **more):
    return torch.compile(
        function, fullgraph=True, **{"backend": "aot_eager", **more}
    )


def results(function, inputs):
    """Return out, lse and the gradients of their sum with weights."""
    out, lse = function(*inputs)
    loss = (out * torch.arange(out.numel()).view(out.shape)).sum() + (
        lse * torch.arange(lse.numel()).view(lse.shape)
    ).sum()
    leaves = [x for x in inputs if x.requires_grad]
    return out, lse, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dynamic", [False, True])
@by_option
def test_compiled_calls(name, dynamic):
    inputs, given = tensors(requires_grad=True), options()[name]

    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, return_lse=True, **given)

    got = results(compiled(call, dynamic=dynamic), inputs)
    assert_equal(got, results(call, inputs))


def test_compiled_calls_of_packed_sequences():
    inputs, given = packed_tensors(requires_grad=True)

    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, return_lse=True, **given)

    assert_equal(results(compiled(call), inputs), results(call, inputs))


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_compiled_gradients_of_options(name):
    given = options()[name][name].requires_grad_()

    def call(q, k, v, option):
        return cuflash.torch.attention(
            q, k, v, return_lse=True, **{name: option}
        )

    inputs = [*tensors(), given]
    assert_equal(results(compiled(call), inputs), results(call, inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
def test_compiled_by_inductor():
    inputs = tensors(torch.float32, requires_grad=True)

    def call(q, k, v):
        out, lse = cuflash.torch.attention(q, k, v, return_lse=True)
        return out, lse

    got = results(compiled(call, backend="inductor"), inputs)
    assert_equal(got, results(call, inputs))


def test_compiled_autocast():
    inputs = tensors(torch.float32, requires_grad=True)

    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cuflash.torch.attention(q, k, v, return_lse=True)

    assert_equal(results(compiled(call), inputs), results(call, inputs))


@pytest.mark.parametrize("by_operator", [False, True])
def test_deterministic_algorithms(by_operator, monkeypatch):
    found = []

    def backward(**arguments):
        found.append(arguments["deterministic"])
        return original(**arguments)

    original = api_attention.backward
    monkeypatch.setattr(api_attention, "backward", backward)
    inputs = tensors(requires_grad=True)

    def call(*inputs):
        return cuflash.torch.attention(*inputs).sum()

    if by_operator:
        call = compiled(call)
    torch.use_deterministic_algorithms(True)
    try:
        call(*inputs).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [True]


def test_compiled_dropout_draws_a_seed_at_each_call():
    inputs = tensors()

    @compiled
    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, dropout=0.5)

    torch.manual_seed(0)
    first, second = call(*inputs), call(*inputs)
    torch.manual_seed(0)
    eager = cuflash.torch.attention(*inputs, dropout=0.5)
    assert_arrays_equal(first, eager, "first")
    assert not torch.equal(first, second)


def test_one_graph_for_many_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def causal(q, k, v):
        return cuflash.torch.attention(q, k, v, causal=True)

    call = compiled(causal, dynamic=True, backend=counter)
    graphs = set()
    for seqlen in (13, 16, 19):
        inputs = tensors(seqlen_q=seqlen, seqlen_k=seqlen + 1)
        expected = cuflash.torch.attention(*inputs, causal=True)
        assert_arrays_equal(call(*inputs), expected, "call(*inputs)")
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


def test_wrong_shapes_are_refused():
    q, k, v = tensors()

    @compiled
    def call(q, k, v):
        return cuflash.torch.attention(q, k, v)

    with pytest.raises(Exception, match="k has head_dim 7, expected 8"):
        call(q, k[..., 1:], v)


def test_fake_and_meta_tensors():
    inputs = tensors(torch.bfloat16)
    real = cuflash.torch.attention(*inputs, return_lse=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        fake = cuflash.torch.attention(*fakes, return_lse=True)
    on_meta = [x.to("meta") for x in inputs]
    meta = cuflash.torch.attention(*on_meta, return_lse=True)
    for results in (fake, meta):
        for x, y in zip(real, results, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert x.stride() == y.stride()
