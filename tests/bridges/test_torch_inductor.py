"""Code that Inductor writes: it calls kernels without the dispatcher."""

import sys
import types
from types import SimpleNamespace as Node

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal, options, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch import inductor  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Inductor
]


@pytest.fixture(autouse=True)
def no_compiled_code(monkeypatch):
    """Nothing from a cache, and operators registered anew."""
    from torch._inductor import config, lowering

    torch._dynamo.reset()
    inductor._register.cache_clear()
    for name in inductor._NAMES:
        overload = getattr(torch.ops.cuflash, name).default
        monkeypatch.delitem(lowering.lowerings, overload, raising=False)
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()
    inductor._register.cache_clear()


def attention(q, k, v):
    return cuflash.torch.attention(q, k, v, causal=True)


def compiled(function, inputs, **more):
    """Return results and code of a compiled call."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    call = torch.compile(function, fullgraph=True, **more)
    results, codes = run_and_get_code(call, *inputs)
    return results, "\n".join(codes)


def called(name):
    return f"torch.ops.cuflash.direct.{name}("


def test_lse_is_left_out_where_nobody_uses_it():
    inputs = tensors(torch.float32)
    out, code = compiled(attention, inputs)
    assert called("plain_attention_out") in code
    assert_arrays_equal(out, attention(*inputs), "out")


def test_lse_is_returned_where_it_is_used():
    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, return_lse=True)[1]

    inputs = tensors(torch.float32)
    lse, code = compiled(call, inputs)
    assert called("plain_attention") in code
    assert_arrays_equal(lse, call(*inputs), "lse")


@pytest.mark.parametrize("name", options())
def test_options_and_gradients(name):
    inputs = tensors(torch.float32, requires_grad=True)
    given = options(torch.float32)[name]

    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, **given)

    def gradients(q, k, v):
        out = call(q, k, v)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    function = torch.compile(call, fullgraph=True)
    out = function(*inputs)
    got = torch.autograd.grad(out.square().sum(), inputs)
    assert_arrays_equal(out, call(*inputs), "out")
    assert_equal(got, gradients(*inputs))


def test_gradients_come_without_the_dispatcher():
    from torch._inductor.utils import run_fw_bw_and_get_code

    inputs = tensors(torch.float32, requires_grad=True)
    call = torch.compile(attention, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: call(*inputs))
    assert called("plain_attention") in codes[0]
    assert called("plain_attention_backward") in codes[1]


def test_many_lengths():
    call = torch.compile(attention, fullgraph=True, dynamic=True)
    for seqlen in (13, 16, 19):
        inputs = tensors(torch.float32, seqlen_q=seqlen, seqlen_k=seqlen + 1)
        assert_arrays_equal(call(*inputs), attention(*inputs), "call(*inputs)")


@pytest.mark.parametrize(
    "name", ["make_fallback", "tag_to_layout_constraint", "lowerings"]
)
def test_an_inductor_that_differs_calls_operators(monkeypatch, name):
    from torch._inductor import lowering

    own = types.ModuleType(lowering.__name__)
    vars(own).update(vars(lowering))
    setattr(own, name, lambda: None)  # takes no arguments, is no dict
    monkeypatch.setitem(sys.modules, lowering.__name__, own)
    inputs = tensors(torch.float32)
    out, code = compiled(attention, inputs)
    assert "torch.ops.cuflash.plain_attention.default(" in code
    assert_arrays_equal(out, attention(*inputs), "out")


def test_only_a_node_that_calls_the_operator_is_renamed():
    overload = torch.ops.cuflash.plain_attention.default
    text = "torch.ops.cuflash.plain_attention.default"
    call = Node(python_kernel_name=text, op_overload=overload)
    box = Node(data=Node(data=Node(inputs=[call])))
    assert inductor.call_of([box], overload) is call
    call.python_kernel_name = "torch.ops.cuflash.plain_attention"
    assert inductor.call_of([box], overload) is None
    other = torch.ops.cuflash.attention.default
    call.python_kernel_name = "torch.ops.cuflash.attention.default"
    for results in ([], [Node()], [Node(data=Node(data=Node(inputs=[])))]):
        assert inductor.call_of(results, other) is None
    assert inductor.call_of([box], other) is None


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code")
def test_a_view_that_negates():
    def call(x, k, v):
        return attention(x.conj().imag, k, v)

    q, k, v = tensors(torch.float32)
    inputs = [torch.complex(q, q), k, v]
    out, _ = compiled(call, inputs)
    assert_arrays_equal(out, attention(-q, k, v), "out")


@pytest.mark.parametrize("name", ["none", "softcap"])
def test_profilers_see_operators(name):
    inputs, given = tensors(torch.float32), options(torch.float32)[name]
    call = torch.compile(
        lambda *x: cuflash.torch.attention(*x, **given), fullgraph=True
    )
    expected = call(*inputs)
    with torch.autograd.profiler.profile() as profile:
        assert_arrays_equal(call(*inputs), expected, "call(*inputs)")
    names = {event.name for event in profile.function_events}
    assert any(name.startswith("cuflash::") for name in names)


def views(dtype):
    """Return inputs by what is special about them."""
    wide = tensors(dtype, head_dim=130, head_dim_v=130)
    return {
        "nothing": [x[..., :64].contiguous() for x in wide],
        "rows that are not aligned": [x[..., 1:65] for x in wide],
        "no batch": [x[0, ..., :64].contiguous() for x in wide],
        "no keys": [wide[0], *(x[:, :0] for x in wide[1:])],
        "no queries": [wide[0][:, :0], *wide[1:]],
    }


@pytest.mark.parametrize("name", views(torch.float32))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repeated_calls_of_kernels(dtype, name):
    inputs = views(dtype)[name]
    with emulated_torch.active("sm_90a"):
        expected = attention(*inputs)
        call = torch.compile(attention, fullgraph=True)
        for _ in range(2):
            assert_arrays_equal(call(*inputs), expected, "call(*inputs)")
