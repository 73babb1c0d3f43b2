"""`cuflash.jax.attention` on a GPU: the bits of cuflash on CuPy arrays.

The plans are the same, and with deterministic=True so is the order of sums.
"""

import threading

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    DTYPES,
    assert_same,
    float64_if,
    inputs,
    normal,
    options,
    packed,
)

import cuflash  # noqa: E402
from cuflash.jax import attention, cuda  # noqa: E402
from helpers.dtypes import lse_dtype  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_option = pytest.mark.parametrize("name", options())
ALIGNED = {"head_dim_v": 8}


@pytest.fixture(autouse=True)
def jax_on_gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("JAX sees no GPU: pip install 'jax[cuda13]'")
    with jax.default_device(device):
        yield


def arrays_of(given):
    return {n: x for n, x in given.items() if isinstance(x, np.ndarray)}


def on_cupy(cp, given):
    """A call's arguments, its arrays as CuPy's."""
    return given | {n: cp.asarray(x) for n, x in arrays_of(given).items()}


def assert_all_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert_same(x, y.get())


def forward(given, **static):
    """A jitted call on arrays of NumPy."""
    static |= {n: x for n, x in given.items() if n not in arrays_of(given)}
    call = jax.jit(lambda x: attention(**x, **static, return_lse=True))
    return call(arrays_of(given))


def gradients(given, dout, dlse):
    """The gradients of a jitted loss, by name."""
    arrays = arrays_of(given)
    static = {n: x for n, x in given.items() if n not in arrays}
    wrt = {n: arrays.pop(n) for n in DIFFERENTIABLE if n in arrays}

    def total(wrt, arrays, dout, dlse):
        out, lse = attention(
            **wrt, **arrays, **static, return_lse=True, deterministic=True
        )
        lse = jax.numpy.where(lse == -np.inf, 0, lse)
        return (out * dout).sum() + (lse * dlse).sum()

    return jax.jit(jax.grad(total))(wrt, arrays, dout, dlse)


@by_dtype
@by_option
def test_results(cp, dtype, name):
    given = inputs(dtype, **ALIGNED) | options(dtype)[name]
    expected = cuflash.forward(**on_cupy(cp, given), return_lse=True)
    with float64_if(dtype):
        assert_all_same(forward(given), expected)


@by_dtype
@by_option
def test_gradients(cp, dtype, name):
    if name in ("bias of all", "bias of keys"):
        pytest.skip("the gradient of a broadcast bias has no order")
    given = inputs(dtype, **ALIGNED) | options(dtype)[name]
    dout = normal(2, 5, 4, 8, dtype=dtype, seed=8)
    dlse = normal(2, 4, 5, dtype=lse_dtype(DTYPES[dtype]).name, seed=9)
    on_gpu = on_cupy(cp, given)
    out, lse = cuflash.forward(**on_gpu, return_lse=True)
    wanted = {f"return_d{n}": n in given for n in ("bias", "sink")}
    masked = cp.where(lse == -np.inf, 0, cp.asarray(dlse))
    expected = cuflash.backward(
        cp.asarray(dout), out=out, lse=lse, dlse=masked, deterministic=True,
        **on_gpu, **wanted,
    )  # fmt: skip
    with float64_if(dtype):
        got = gradients(given, dout, dlse)
        names = [n for n in DIFFERENTIABLE if n in got]
        assert_all_same([got[n] for n in names], expected)


@pytest.mark.parametrize("seqlen", [512, 1000])
def test_long_sequences(cp, seqlen):
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": 64,
             "head_dim_v": 64}  # fmt: skip
    given = inputs("bfloat16", **sizes) | {"causal": True}
    expected = cuflash.forward(**on_cupy(cp, given), return_lse=True)
    assert_all_same(forward(given), expected)


@pytest.mark.parametrize("dims", [(5, 8), (20, 12)])
def test_padded_rows(cp, dims):
    given = inputs("float16", head_dim=dims[0], head_dim_v=dims[1])
    expected = cuflash.forward(**on_cupy(cp, given), return_lse=True)
    assert_all_same(forward(given), expected)


def test_packed_sequences(cp):
    given = packed("bfloat16")
    given["v"] = given["k"]
    expected = cuflash.forward(**on_cupy(cp, given), return_lse=True)
    assert_all_same(forward(given), expected)


def test_no_keys(cp):
    given = inputs(seqlen_k=0, **ALIGNED)
    expected = cuflash.forward(**on_cupy(cp, given), return_lse=True)
    assert_all_same(forward(given), expected)


def test_a_traced_seed(cp):
    given = inputs(**ALIGNED) | {"dropout": 0.5}
    call = jax.jit(lambda seed: attention(**given, seed=seed))
    for seed in (1, 2):
        expected = cuflash.forward(**on_cupy(cp, given), seed=seed)
        assert_same(call(np.uint32(seed)), expected.get())


def test_many_calls_of_one_program(cp):
    """Buffers move from call to call; XLA may replay command buffers."""
    call = jax.jit(lambda x: attention(**x, causal=True))
    given = inputs("bfloat16", **ALIGNED)
    kept = []
    for n in range(20):
        q = (given["q"] * (1 + n)).astype(DTYPES["bfloat16"])
        changed = given | {"q": q}
        expected = cuflash.forward(**on_cupy(cp, changed), causal=True)
        kept.append((call(changed), expected.get()))
    for got, expected in kept:
        assert_same(got, expected)


def test_layers_in_a_scan(cp):
    """Enough operations for command buffers."""
    given = inputs("float32", seqlen_k=5, num_heads_kv=4, head_dim_v=8)
    k, v = given["k"], given["v"]

    def layer(x, _):
        return attention(x, k, v), None

    stacked = jax.jit(lambda x: jax.lax.scan(layer, x, length=6)[0])
    x = cp.asarray(given["q"])
    for _ in range(6):
        x = cuflash.forward(x, cp.asarray(k), cp.asarray(v))
    for _ in range(3):
        assert_same(stacked(given["q"]), x.get())


def test_layers_after_one_another_replay(monkeypatch):
    """Python runs at most once a call; XLA may run it less."""
    runs = []
    known = cuda.Program.__call__
    monkeypatch.setattr(
        cuda.Program, "__call__", lambda *x: (runs.append(1), known(*x))[1]
    )
    given = inputs("float32", seqlen_k=5, num_heads_kv=4, head_dim_v=8)
    k, v = given["k"], given["v"]

    @jax.jit
    def layers(x):
        for _ in range(6):
            x = attention(x, k, v)
        return x

    first = np.asarray(layers(given["q"]))
    for _ in range(3):
        assert_same(layers(given["q"]), first)
    assert 6 <= len(runs) <= 24


def test_decoding_layers_replay(cp):
    """Each in two kernels, of which the second starts early."""
    given = inputs("float16", seqlen_q=1, seqlen_k=3000, head_dim=64,
                   head_dim_v=64)  # fmt: skip
    k, v = given["k"], given["v"]

    @jax.jit
    def layers(x):
        for _ in range(6):
            x = attention(x, k, v)
        return x

    x = cp.asarray(given["q"])
    for _ in range(6):
        x = cuflash.forward(x, cp.asarray(k), cp.asarray(v))
    for _ in range(3):
        assert_same(layers(given["q"]), x.get())


def test_vmap():
    given = inputs("float16", **ALIGNED)
    q = np.stack([given.pop("q")] * 2)
    got = jax.jit(jax.vmap(lambda q: attention(q, **given)))(q)
    assert_same(got[1], attention(q[1], **given))


def test_nothing_is_taken_from_cupys_pool(cp):
    given = inputs("bfloat16", **ALIGNED)
    gradients(given, *zeros_like_results())  # compile
    pool = cp.get_default_memory_pool()
    before = pool.total_bytes()
    gradients(given, *zeros_like_results())
    assert pool.total_bytes() == before


def zeros_like_results():
    dout = np.zeros((2, 5, 4, 8), DTYPES["bfloat16"])
    return dout, np.zeros((2, 4, 5), np.float32)


def test_threads(cp):
    given = inputs(**ALIGNED)
    call = jax.jit(lambda x: attention(**x))
    expected = cuflash.forward(**on_cupy(cp, given)).get()
    results = []

    def work():
        results.extend(call(given) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for got in results:
        assert_same(got, expected)


def test_two_gpus():
    if jax.device_count("cuda") < 2:
        pytest.skip("JAX sees one GPU")
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices("cuda")[:2])
    spec = jax.P("b")
    given = inputs(**ALIGNED)
    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    sharding = jax.NamedSharding(mesh, spec)
    placed = jax.device_put(tuple(given.values()), sharding)
    assert_same(jax.jit(sharded)(*placed), attention(**given))
