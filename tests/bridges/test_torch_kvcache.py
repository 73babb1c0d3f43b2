"""`cuflash.torch.forward_kvcache` on CPU tensors."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.library import opcheck  # noqa: E402
from torch_data import assert_equal, negated, on_numpy  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, CAPACITY, NEW = 2, 12, 2


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def tensors(dtype=torch.float32):
    """Return q, caches and new tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "q": normal(BATCH, NEW, 4, 8),
        "k_cache": normal(BATCH, CAPACITY, 2, 8),
        "v_cache": normal(BATCH, CAPACITY, 2, 6),
        "k_new": normal(BATCH, NEW, 2, 8),
        "v_new": normal(BATCH, NEW, 2, 6),
    }


angles = torch.outer(torch.arange(CAPACITY), 0.1 * torch.arange(1, 4)).float()
CALLS = {
    "int": {"cache_seqlens": 3},
    "lengths": {"cache_seqlens": ints(3, 5), "causal": True},
    "rotary": {
        "cache_seqlens": ints(3, 5),
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
    },
    "slots": {
        "cache_seqlens": ints(3, 5),
        "cache_batch_idx": ints(1, 0),
        "cache_leftpad": ints(1, 0),
    },
    "pages": {
        "cache_seqlens": ints(3, 5),
        "page_table": ints(1, 0).view(2, 1),
    },
    "options": {
        "cache_seqlens": 4,
        "window": (2, 0),
        "softcap": 3.0,
        "alibi_slopes": torch.arange(1, 5) / 8,
        "sink": torch.arange(4.0),
        "scale": 0.5,
    },
}
by_call = pytest.mark.parametrize("name", CALLS)


def copies(given):
    return {name: x.clone() for name, x in given.items()}


@pytest.mark.parametrize("is_view", [False, True])
def test_values_that_are_columns_of_keys(is_view):
    ours, theirs = tensors(), tensors()
    for given in (ours, theirs):
        del given["v_new"]
        given["v_cache"] = given["k_cache"][..., :6] if is_view else None
        given |= {"cache_seqlens": 3} | ({} if is_view else {"head_dim_v": 6})
    got = cuflash.torch.forward_kvcache(**ours)
    assert_equal(got, on_numpy(cuflash.forward_kvcache, **theirs))
    assert_equal(ours["k_cache"], theirs["k_cache"])


@by_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_forward_kvcache(name, dtype):
    ours, theirs = tensors(dtype), tensors(dtype)
    got = cuflash.torch.forward_kvcache(**ours, return_lse=True, **CALLS[name])
    expected = on_numpy(
        cuflash.forward_kvcache, **theirs, return_lse=True, **CALLS[name]
    )
    assert_equal(got, expected)
    assert_equal(ours.values(), theirs.values())
    assert not torch.equal(ours["k_cache"], tensors(dtype)["k_cache"])


@by_call
def test_the_operator(name):
    given, call = tensors(), dict(CALLS[name])
    if "window" in call:
        call["window_left"], call["window_right"] = call.pop("window")
    if isinstance(call["cache_seqlens"], int):
        call["length"] = call.pop("cache_seqlens")
    opcheck(torch.ops.cuflash.forward_kvcache.default, (), given | call)


@by_call
def test_compiled_calls(name):
    ours, theirs = tensors(), tensors()

    def call(given):
        return cuflash.torch.forward_kvcache(
            **given, return_lse=True, **CALLS[name]
        )

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(ours), call(theirs))
    assert_equal(ours.values(), theirs.values())


def test_float8_caches():
    given = tensors(torch.bfloat16)
    scales = {name: torch.ones(2) for name in ("k_scale", "v_scale")}
    results = []
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        caches = {
            name: given[name].to(torch.float8_e4m3fn).view(dtype)
            for name in ("k_cache", "v_cache")
        }
        own = {**given, **caches, **scales}
        results.append(cuflash.torch.forward_kvcache(**own, cache_seqlens=3))
    assert_equal(*([x] for x in results))


def test_out():
    given, out = tensors(), torch.empty(BATCH, NEW, 4, 6)
    got = cuflash.torch.forward_kvcache(**given, cache_seqlens=3, out=out)
    assert got is out
    expected = cuflash.torch.forward_kvcache(**tensors(), cache_seqlens=3)
    assert_arrays_equal(out, expected, "out")


def test_autograd_knows_that_caches_change():
    given = tensors()
    weight = torch.ones(8, requires_grad=True)
    loss = (given["k_cache"] * weight).sum()
    cuflash.torch.forward_kvcache(**given, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_in_inference_mode():
    with torch.inference_mode():
        given = tensors()
        out = cuflash.torch.forward_kvcache(**given, cache_seqlens=3)
    expected = cuflash.torch.forward_kvcache(**tensors(), cache_seqlens=3)
    assert_arrays_equal(out, expected, "out")


def needing(*names):
    given = tensors()
    for name in names:
        given[name].requires_grad_()
    return given


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_raises(compiled):
    def call(given):
        return cuflash.torch.forward_kvcache(**given, cache_seqlens=3)

    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager") if compiled else call
    out = run(needing("q", "k_new"))
    assert_arrays_equal(out, call(tensors()), "out")
    words = "q, k_new require grad and the backward"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        out.sum().backward()
    with torch.no_grad():
        assert not run(needing("q")).requires_grad


def test_a_watched_call_raises_in_backward():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Watch():
        out = cuflash.torch.forward_kvcache(**needing("q"), cache_seqlens=3)
    with pytest.raises(cuflash.UnsupportedError, match="q require grad"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "out"])
def test_what_is_written_may_not_require_grad(name):
    given = {**tensors(), "out": torch.empty(BATCH, NEW, 4, 6)}
    given[name].requires_grad_()
    words = f"{name} requires grad and is written in place"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        cuflash.torch.forward_kvcache(**given, cache_seqlens=3)


def test_out_takes_no_part_in_autograd():
    out = torch.empty(BATCH, NEW, 4, 6)
    with pytest.raises(cuflash.UnsupportedError, match="out is given where q"):
        cuflash.torch.forward_kvcache(**needing("q"), cache_seqlens=3, out=out)


@pytest.mark.parametrize("name", ["q", "k_new", "sink"])
def test_views_that_negate(name):
    given = {**tensors(), "sink": torch.arange(4.0)}
    expected = cuflash.torch.forward_kvcache(**copies(given), cache_seqlens=3)
    given[name] = negated(given[name])
    got = cuflash.torch.forward_kvcache(**given, cache_seqlens=3)
    assert_arrays_equal(got, expected, "got")


def test_caches_that_negate():
    given = tensors()
    given["k_cache"] = negated(given["k_cache"])
    words = "k_cache is a view that negates"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        cuflash.torch.forward_kvcache(**given, cache_seqlens=3)
    read = {name: given[name] for name in ("q", "k_cache", "v_cache")}
    plain = read | {"k_cache": read["k_cache"].resolve_neg()}
    got, expected = (cuflash.torch.forward_kvcache(**x) for x in (read, plain))
    assert_arrays_equal(got, expected, "got")


def test_lengths_are_checked():
    with pytest.raises(cuflash.ValueRangeError, match=r"cache_seqlens\[1\]"):
        cuflash.torch.forward_kvcache(
            **tensors(), cache_seqlens=ints(3, CAPACITY)
        )


def test_autocast():
    given = tensors(torch.bfloat16)
    expected = cuflash.torch.forward_kvcache(**copies(given), cache_seqlens=3)
    for name in ("q", "k_new", "v_new"):
        given[name] = given[name].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = cuflash.torch.forward_kvcache(**given, cache_seqlens=3)
    assert_arrays_equal(got, expected, "got")


def test_autocast_takes_caches_of_its_dtype_only():
    words = "k_cache has dtype float32 under autocast, expected bfloat16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(cuflash.DTypeError, match=words):
            cuflash.torch.forward_kvcache(
                **tensors(torch.float32), cache_seqlens=3
            )


@pytest.mark.parametrize("traced", [False, True])
def test_without_a_batch_axis(traced):
    q, k, v = torch.randn(3, 2, 3, 8)
    cache, out = torch.zeros(2, 1, 4, 3, 8), torch.zeros(2, 3, 8)
    call = cuflash.torch.forward_kvcache
    if traced:
        call = torch.compile(call, backend="eager", fullgraph=True)
    given = {"cache_seqlens": 1, "causal": True, "return_lse": True}
    want = cuflash.torch.forward_kvcache(
        q[None], *cache.clone(), k_new=k[None], v_new=v[None], **given
    )
    got = call(q, *cache[:, 0], k_new=k, v_new=v, out=out, **given)
    assert got[0] is out or traced
    assert_equal(got, [x[0] for x in want])
    assert_arrays_equal(cache[0, 0, 1:3], k, "cache[0, 0, 1:3]")
