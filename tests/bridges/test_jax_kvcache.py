"""`cuflash.jax.forward_kvcache`: as NumPy's call, and under transforms."""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_data import assert_same, float64_if, normal, on_cpu  # noqa: E402
from jax_machines import by_the_driver  # noqa: E402

import cuflash  # noqa: E402
from cuflash.errors import (  # noqa: E402
    DTypeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.jax import forward_kvcache  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = pytest.mark.slow

LENGTHS = np.array([4, 9], np.int32)
PAGES = np.array([[3, 0, 1], [2, 5, 4]], np.int32)


def given(dtype="float32", head_dim=8, **others):
    """Two sequences with room for 24 tokens, three of which are new."""
    shapes = {
        "q": (2, 3, 4, head_dim),
        "k_cache": (2, 24, 2, head_dim),
        "v_cache": (2, 24, 2, 8),
        "k_new": (2, 3, 2, head_dim),
        "v_new": (2, 3, 2, 8),
    }
    arrays = {
        name: normal(*shape, dtype=dtype, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return arrays | {"cache_seqlens": LENGTHS} | others


def paged(arrays):
    pages = {x: arrays[x].reshape(6, 8, *arrays[x].shape[2:])
             for x in ("k_cache", "v_cache") if x in arrays}  # fmt: skip
    return arrays | pages | {"page_table": PAGES}


def packed(arrays):
    """Sequences of two queries and of four, with as many new tokens."""
    rows = {x: arrays[x].reshape(6, *arrays[x].shape[2:])
            for x in ("q", "k_new", "v_new")}  # fmt: skip
    offsets = np.array([0, 2, 6], np.int32)
    return arrays | rows | {"cu_seqlens_q": offsets}


def without_batch(arrays):
    row = {n: x[0] for n, x in arrays.items() if n != "cache_seqlens"}
    return row | {"cache_seqlens": LENGTHS[0]}


def rotated(arrays):
    tables = {f"rotary_{x}": normal(24, 2, seed=7) for x in ("cos", "sin")}
    return arrays | tables | {"rotary_interleaved": True, "causal": True}


def read_only(arrays):
    return {n: x for n, x in arrays.items() if not n.endswith("_new")}


def latent(arrays):
    """Values are the first columns of keys."""
    values = "v_cache", "v_new"
    keys = {n: x for n, x in arrays.items() if n not in values}
    return keys | {"head_dim_v": 8}


def tree(b, h, q_idx, kv_idx, *, is_ancestor, seqlen_q, seqlen_k):
    context = seqlen_k - seqlen_q
    return (kv_idx < context) | is_ancestor[q_idx, kv_idx - context]


def steep(score, b, h, q_idx, kv_idx, *, table, rate):
    return rate * score - table[h] * kv_idx


def of_request(b, h, q_idx, kv_idx, *, first):
    return kv_idx >= first[b]


ANCESTORS = np.tril(np.ones((3, 3), bool)) & ~np.eye(3, k=-1, dtype=bool)
TREE = {
    "score_mod": steep,
    "mask_mod": tree,
    "mod_arrays": {
        "is_ancestor": ANCESTORS, "table": normal(4, seed=9), "rate": 0.5
    },
}  # fmt: skip
OF_REQUEST = {
    "mask_mod": of_request, "mod_arrays": {"first": np.array([5, 0])}
}  # fmt: skip

CALLS = {
    "new": given(),
    "causal": given(causal=True, window=(5, 0), softcap=2.0),
    "one length": given(cache_seqlens=7, causal=True),
    "slots": given(cache_batch_idx=np.array([1, 0], np.int32)),
    "left": given(cache_leftpad=np.array([2, 0], np.int32)),
    "sink": given(sink=normal(4), alibi_slopes=normal(2, 4)),
    "tree": given(**TREE),
    "of request": paged(given(**OF_REQUEST)),
    "paged": paged(given()),
    "packed": packed(given()),
    "rotated": rotated(given()),
    "read": read_only(given()),
    "bfloat16": given("bfloat16"),
    "float64": given("float64"),
    "no batch": without_batch(given()),
    "latent": paged(latent(given(head_dim=12, causal=True))),
}


def expected(arrays):
    """What NumPy's call returns, and its caches after it."""
    arrays = {n: x.copy() if isinstance(x, np.ndarray) else x
              for n, x in arrays.items()}  # fmt: skip
    found = cuflash.forward_kvcache(**arrays, return_lse=True)
    caches = [arrays[x] for x in ("k_cache", "v_cache") if x in arrays]
    return (*found, *caches) if "k_new" in arrays else found


def split(arrays):
    """Arrays on the CPU, and Python values."""
    moved = {n: on_cpu(x) for n, x in arrays.items()
             if isinstance(x, (np.ndarray, np.generic))}  # fmt: skip
    return moved, {n: x for n, x in arrays.items() if n not in moved}


def assert_all_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_numpy(name):
    with float64_if(name):
        arrays, static = split(CALLS[name])

        def call(arrays):
            return forward_kvcache(**arrays, **static, return_lse=True)

        for function in (call, jax.jit(call)):
            assert_all_same(function(arrays), expected(CALLS[name]))
        assert_same(arrays["k_cache"], CALLS[name]["k_cache"])


@needs_compiler
@pytest.mark.parametrize(
    "name", ["bfloat16", "paged", "rotated", "tree", "latent"]
)
def test_values_are_those_of_the_kernels(name):
    arrays, static = split(CALLS[name])
    with by_the_driver("sm_80"):
        got = jax.jit(
            lambda x: forward_kvcache(**x, **static, return_lse=True)
        )(arrays)
        assert_all_same(got, expected(CALLS[name]))


@needs_compiler
def test_rows_that_are_padded():
    """A head_dim of 20 in bfloat16: XLA pads caches, and cuts new ones."""
    arrays, _ = split(given("bfloat16", head_dim=20))
    with by_the_driver("sm_80"):
        out, k, v = jax.jit(lambda x: forward_kvcache(**x))(arrays)
    wanted = expected(given("bfloat16", head_dim=20))
    assert_all_same((k, v), wanted[2:])
    # 8 bits of out, twice: the kernel's P is rounded, and so is out.
    got, values = (np.asarray(x, "f") for x in (out, wanted[0]))
    assert abs(got - values).max() <= 2 * 2.0**-8 * abs(values).max()


@pytest.mark.parametrize(
    "name", [*("new", "paged", "packed", "rotated"), "read", "tree", "left"]
)
def test_vmap(name):
    arrays, static = split(CALLS[name])
    axes = {n: 1 if n in ("q", "k_cache", "v_cache") else None for n in arrays}
    several = {
        n: x if axes[n] is None else jnp.stack([x, x[::-1]], 1)
        for n, x in arrays.items()
    }

    def call(arrays):
        return forward_kvcache(**arrays, **static, return_lse=True)

    got = jax.vmap(call, (axes,))(several)
    for i in range(2):
        one = {n: x if axes[n] is None else x[:, i]
               for n, x in several.items()}  # fmt: skip
        assert_all_same([x[i] for x in got], call(one))


@pytest.mark.parametrize("options", [TREE, OF_REQUEST])
def test_vmap_of_functions(options):
    """Arrays that they read may be mapped; the request's number is its own."""
    arrays, _ = split(given())
    own, static = split(options["mod_arrays"])
    several = {n: jnp.stack([x, x[::-1]]) for n, x in own.items()}
    queries = jnp.stack([arrays.pop("q")] * 2)

    def call(q, own):
        return forward_kvcache(
            q, **arrays, **options | {"mod_arrays": own | static}
        )

    for axis, mapped in ((0, several), (None, own)):
        got = jax.vmap(call, (0, axis))(queries, mapped)
        for i in range(2):
            each = jax.tree.map(lambda x, i=i: x[i], several)
            wanted = call(queries[i], own if axis is None else each)
            assert_all_same([x[i] for x in got], wanted)


def test_functions_of_jaxs_that_close_over_arrays():
    arrays, _ = split(given())
    table = on_cpu(normal(4, seed=9))

    def closed(score, b, h, q_idx, kv_idx):
        return 0.5 * score - jnp.exp(jnp.log(jnp.abs(table)))[h] * kv_idx

    size = {"table": abs(np.asarray(table)), "rate": 0.5}
    got = jax.jit(lambda x: forward_kvcache(**x, score_mod=closed))(arrays)
    wanted = expected(given(score_mod=steep, mod_arrays=size))
    # exp(log) of numbers up to 3 times 11 keys: weights move by as much.
    bound = 2 * 4 * 3 * 11 * 2.0**-24 * abs(wanted[0]).max()
    assert abs(got[0] - wanted[0]).max() <= bound
    words = r"mod_arrays\['table'\] is differentiated"
    with pytest.raises(UnsupportedError, match=words):
        jax.grad(
            lambda x: forward_kvcache(
                **arrays, score_mod=steep,
                mod_arrays={"table": x, "rate": 1.0},
            )[0].sum()
        )(table)  # fmt: skip


def test_scan_generates_what_a_causal_call_computes():
    q, k, v = (on_cpu(normal(2, 9, 4, 8, seed=x)) for x in range(3))
    caches = jnp.zeros_like(k), jnp.zeros_like(v)

    def step(caches, i):
        new = (jax.lax.dynamic_slice_in_dim(x, i, 1, 1) for x in (q, k, v))
        q_new, k_new, v_new = new
        out, *caches = forward_kvcache(
            q_new, *caches, k_new=k_new, v_new=v_new, cache_seqlens=i
        )
        return tuple(caches), out[:, 0]

    caches, out = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(9)))(
        caches
    )
    assert_all_same(caches, (k, v))
    wanted = cuflash.jax.attention(q, k, v, causal=True)
    # Sums of nine terms in other orders, of numbers up to 4.
    assert abs(jnp.moveaxis(out, 0, 1) - wanted).max() <= 2 * 9 * 4 * 2.0**-24


def test_donated_caches_are_written_in_place():
    arrays, _ = split(given())
    # Memory of JAX's: it cannot donate that of NumPy.
    k, v = (arrays.pop(x) + 0 for x in ("k_cache", "v_cache"))
    step = jax.jit(
        lambda k, v: forward_kvcache(k_cache=k, v_cache=v, **arrays)[1:],
        donate_argnums=(0, 1),
    )
    before = k.unsafe_buffer_pointer()
    assert step(k, v)[0].unsafe_buffer_pointer() == before
    assert k.is_deleted()


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"cache_seqlens": None}, ValueRangeError, "k_new is given without"),
        ({"cache_seqlens": 22}, ValueRangeError, "cache_seqlens is 22"),
        ({"cache_seqlens": LENGTHS + 14}, ValueRangeError, r"\[1\] is 23"),
        ({"cache_seqlens": 2.0}, DTypeError, "cache_seqlens is 2.0"),
        ({"k_cache": [0.0]}, DTypeError, "k_cache is of type list"),
        ({"k_new": np.zeros((2, 3, 2, 8), "e")}, DTypeError, "k_new has dt"),
    ],
)
def test_bad_arguments(changes, error, words):
    with pytest.raises(error, match=words):
        forward_kvcache(**given() | changes)


def test_derivatives_are_refused():
    arrays, _ = split(given())
    k_new = arrays.pop("k_new")
    words = "k_new is differentiated, .* no derivatives: pass jax.lax.stop_gr"
    with pytest.raises(UnsupportedError, match=words):
        jax.grad(lambda x: forward_kvcache(k_new=x, **arrays)[0].sum())(k_new)


def test_a_tracer_for_a_python_value():
    with pytest.raises(UnsupportedError, match="causal is a JAX tracer"):
        jax.jit(lambda x: forward_kvcache(**given(), causal=x))(True)
