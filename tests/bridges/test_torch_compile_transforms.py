"""Compiled code that transforms, and compiled functions that are."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd import forward_ad  # noqa: E402
from torch_data import assert_equal  # noqa: E402

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.torch import attention, forward_kvcache  # noqa: E402

# torch's own, of what forward mode imports.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(x):
    return attention(x, x, x)


def scaled(x):
    return attention(x, x, x, score_mod=lambda s, b, h, i, j: s * (1 + h))


def tangent(call, x):
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(x, x.cos()))
        return forward_ad.unpack_dual(out).tangent


TRANSFORMS = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x.cos(),))[1],
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vmap": lambda call, x: torch.func.vmap(call)(torch.stack([x, x.sin()])),
    "forward mode": tangent,
}


@pytest.mark.parametrize("call", [plain, scaled])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_of_compiled_code(call, name):
    x, transform = torch.randn(2, 5, 2, 4), TRANSFORMS[name]
    compiled = torch.compile(transform, backend="aot_eager")
    assert_equal([compiled(call, x)], [transform(call, x)])
    if (call, name) != (plain, "vmap"):
        torch._dynamo.reset()
        whole = torch.compile(transform, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="code calls cuflash.torch in"):
            whole(call, x)


def test_a_tangent_of_what_a_score_reads():
    def call(rate):
        x = rate.new_ones(2, 5, 2, 4)
        mod = {"score_mod": lambda s, b, h, i, j: s - rate * abs(i - j)}
        return attention(x, x, x.cumsum(1), **mod)

    rate = torch.ones(())
    transform = TRANSFORMS["jvp"]
    compiled = torch.compile(transform, backend="eager")
    assert_equal([compiled(call, rate)], [transform(call, rate)])


def test_caches_refuse_tangents_in_compiled_code():
    x, keys, values = (torch.randn(2, 5, 2, 4) for _ in range(3))

    def call(x):
        return forward_kvcache(x, keys, values)

    for function in (call, lambda x: TRANSFORMS["jvp"](call, x)):
        compiled = torch.compile(function, backend="aot_eager")
        with pytest.raises(UnsupportedError, match="has a tangent"):
            tangent(compiled, x) if function is call else compiled(x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_tangent_that_enters_compiled_code(backend):
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    x = torch.randn(2, 5, 2, 4)
    compiled(x)
    with pytest.raises(UnsupportedError, match="have no forward mode"):
        tangent(compiled, x)
