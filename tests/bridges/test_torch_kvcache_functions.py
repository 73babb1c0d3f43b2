"""`score_mod` and `mask_mod` of `cuflash.torch.forward_kvcache`."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.library import opcheck  # noqa: E402
from torch_data import assert_equal  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = pytest.mark.slow

# Tokens 5 and 6 of a context of 5 are drafts of the same token.
IS_ANCESTOR = torch.tensor([[True, False], [False, True]])
TABLE = torch.linspace(-1, 1, 12)


def tensors():
    """Return q, the caches and new tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 2, 4, 8), "k_cache": (2, 12, 2, 8), "v_cache": (2, 12, 2, 6),
        "k_new": (2, 2, 2, 8), "v_new": (2, 2, 2, 6),
    }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def tree(b, h, i, j, *, context):
    return (j < context) | IS_ANCESTOR[i, j - context]


def added(s, b, h, i, j, *, scale):
    return s + scale * TABLE[j] + h


def on_tensors(given, **more):
    """Out, lse, and the caches after it."""
    arrays = {"context": 5, "scale": 0.5}
    own = {"score_mod": added, "mask_mod": tree, "mod_arrays": arrays} | more
    found = cuflash.torch.forward_kvcache(
        **given, cache_seqlens=5, return_lse=True, **own
    )
    return [*found, given["k_cache"], given["v_cache"]]


def on_arrays(given):
    arrays = {name: x.numpy().copy() for name, x in given.items()}
    found = cuflash.forward_kvcache(
        **arrays, cache_seqlens=5, return_lse=True,
        score_mod=lambda s, b, h, i, j, *, t, scale: s + scale * t[j] + h,
        mask_mod=lambda b, h, i, j, *, is_ancestor, context: (
            (j < context) | is_ancestor[i, j - context]
        ),
        mod_arrays={
            "t": TABLE.numpy(), "is_ancestor": IS_ANCESTOR.numpy(),
            "context": 5, "scale": 0.5,
        },
    )  # fmt: skip
    found = *found, arrays["k_cache"], arrays["v_cache"]
    return [torch.from_numpy(x) for x in found]


def test_are_those_of_numpy():
    expected = on_arrays(tensors())
    assert_equal(on_tensors(tensors()), expected)


@needs_compiler
def test_on_a_device():
    with emulated_torch.active("sm_80"):
        got = on_tensors(tensors())
        again = on_tensors(tensors(), mod_arrays={"context": 5, "scale": 1.0})
        assert_equal(got, on_arrays(tensors()))
    assert not torch.equal(again[0], got[0])  # a number is no constant


def test_compiled_in_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(on_tensors, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(tensors()), on_arrays(tensors()))


def test_the_operator():
    given = tensors()
    graphs = cuflash.torch.kvcache._functions(
        {"mask_mod": lambda b, h, i, j: j < 6}, given["q"]
    )[0].as_program()
    names = "q", "k_cache", "v_cache"
    opcheck(
        torch.ops.cuflash.function_forward_kvcache,
        (*(given[x] for x in names), *graphs),
        {"length": 5},
    )


def test_gradients_raise_in_backward():
    learned = torch.zeros(4, requires_grad=True)
    given = {x: y for x, y in tensors().items() if "new" not in x}
    out = cuflash.torch.forward_kvcache(
        **given,
        cache_seqlens=7,
        score_mod=lambda s, b, h, i, j: s + learned[h],
    )
    with pytest.raises(cuflash.UnsupportedError, match="has no gradients"):
        out.sum().backward()
