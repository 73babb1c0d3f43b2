"""The CUDA lowering, its kernels run by the emulator: bits of cuflash's own.

In the same order of warps, kernels of the same plans give the same bits.
"""

import re
from types import SimpleNamespace

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax.experimental.buffer_callback import buffer_callback  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    assert_same,
    expected_gradients,
    inputs,
    loss,
    normal,
    options,
    packed,
    split,
)
from jax_machines import emulated, lowered_for  # noqa: E402

import cuflash  # noqa: E402
from cuflash import emulator  # noqa: E402
from cuflash.jax import attention, machine  # noqa: E402
from helpers import fake_cupy  # noqa: E402
from helpers.compare import assert_all  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

WHICH = [
    ("float32", "sm_80", "none"),
    ("float16", "sm_80", "causal"),
    ("bfloat16", "sm_90a", "none"),
    ("bfloat16", "sm_90a", "bias"),
    ("bfloat16", "sm_90a", "bias of keys"),
    ("float16", "sm_90a", "sink"),
    ("float16", "sm_80", "dropout"),
    ("float32", "sm_80", "ids"),
]


def on_emulator(arch, function, *arguments):
    """A jitted function's results, by the CUDA lowering."""
    with emulated(arch) as machine:
        results = jax.jit(function)(*arguments)
        jax.block_until_ready(results)
        return results, machine.runs


def case(dtype, name):
    """Arrays with aligned rows, which JAX need not pad, and an option."""
    given = inputs(dtype, head_dim_v=8) | options(dtype)[name]
    arrays, static = split(given)
    wrt = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
    return wrt, {n: x for n, x in arrays.items() if n not in wrt}, static


@pytest.mark.parametrize("dtype, arch, name", WHICH)
def test_the_bits_are_those_of_cuflash(dtype, arch, name):
    wrt, others, static = case(dtype, name)
    if name != "bias of keys":  # whose gradient has no order
        static["deterministic"] = True
    with emulator.active(arch):
        function, of = loss(wrt, others, **static)
        given = {n: np.asarray(x) for n, x in {**wrt, **others}.items()}
        expected = expected_gradients(given, of, static)
    got, runs = on_emulator(arch, jax.grad(function), wrt)
    assert runs == 2  # forward, gradients
    if name == "bias of keys":
        del expected["bias"], expected["q"]
    for each, gradient in expected.items():
        assert_same(got[each], gradient)


def moved(wrt):
    """A tangent of each array."""
    return {
        n: normal(*x.shape, dtype=x.dtype.name, seed=6) for n, x in wrt.items()
    }


@pytest.mark.parametrize("head_dim_v", [8, 6])
@pytest.mark.parametrize(
    "dtype, name", [("float32", "bias"), ("float16", "sink")]
)
def test_tangents(dtype, name, head_dim_v):
    wrt, static = split(
        inputs(dtype, head_dim_v=head_dim_v) | options(dtype)[name]
    )
    tangents = moved(wrt)

    def call(wrt):
        return attention(**wrt, **static, return_lse=True)

    (_, got), runs = on_emulator(
        "sm_80", lambda *x: jax.jvp(call, *x), (wrt,), (tangents,)
    )
    assert runs == 2  # forward, tangent
    with emulator.active("sm_80"):
        expected = cuflash.jvp(
            **{n: np.asarray(x) for n, x in wrt.items()},
            **{f"{n}_dot": x for n, x in tangents.items()},
            return_lse=True,
            **static,
        )
    for x, y in zip(got, expected[2:], strict=True):
        assert_same(x, y)


def test_several_tangents():
    given = inputs(head_dim=2, head_dim_v=8)
    q_dots = normal(3, *given["q"].shape)

    def push(q_dot):
        call = lambda q: attention(**given | {"q": q})  # noqa: E731
        return jax.jvp(call, (given["q"],), (q_dot,))[1]

    got, runs = on_emulator("sm_80", jax.vmap(push), q_dots)
    assert runs == 1  # of all directions; out is not used
    with emulator.active("sm_80"):
        _, expected = cuflash.jvp(*given.values(), q_dots, None, None)
    assert_same(got, expected)


@pytest.mark.parametrize(
    "dtype, name", [("float32", "bias"), ("float16", "sink")]
)
def test_second_gradients(dtype, name):
    wrt, _, static = case(dtype, name)
    tangents = moved(wrt)
    with emulator.active("sm_80"):
        function, (out, lse, dout, dlse) = loss(wrt, {}, **static)
        found = cuflash.double_backward(
            **{f"dd{n}": x for n, x in tangents.items()},
            **{n: np.asarray(x) for n, x in wrt.items()},
            dout=dout, out=out, lse=lse, dlse=dlse,
            **{f"return_d2{name}": True},
        )  # fmt: skip
    expected = dict(zip(("q", "k", "v", "ddout", name), found, strict=True))

    def penalty(wrt):
        gradients = jax.grad(function)(wrt)
        return sum((gradients[n] * tangents[n]).sum() for n in tangents)

    got, _ = on_emulator("sm_80", jax.grad(penalty), wrt)
    for each, x in got.items():
        assert_same(x, expected[each])


def forward_on_emulator(arch, given):
    arrays, static = split(given)
    (got, _) = on_emulator(
        arch, lambda x: attention(**x, **static, return_lse=True), arrays
    )
    with emulator.active(arch):
        expected = cuflash.forward(**given, return_lse=True)
    for x, y in zip(got, expected, strict=True):
        assert_same(x, y)


def test_packed_sequences():
    forward_on_emulator("sm_90a", packed("float16"))


def test_gradients_of_packed_sequences():
    given = packed("float16") | {"v": packed("float16")["k"]}
    others, _ = split(given)
    wrt = {n: others.pop(n) for n in ("q", "k", "v")}
    with emulator.active("sm_80"):
        function, of = loss(wrt, others, deterministic=True)
        expected = expected_gradients(given, of, {"deterministic": True})
    got, _ = on_emulator("sm_80", jax.grad(function), wrt)
    for each, gradient in expected.items():
        assert_same(got[each], gradient)


def test_no_keys():
    forward_on_emulator("sm_80", inputs(seqlen_k=0, head_dim_v=8))


def test_gradients_without_keys():
    """That of the sink is the only one that is not 0."""
    given = inputs(seqlen_k=0, head_dim_v=8) | options("float32")["sink"]
    wrt, static = split(given)
    with emulator.active("sm_80"):
        function, of = loss(wrt, {}, **static)
        expected = expected_gradients(given, of, static)
    got, _ = on_emulator("sm_80", jax.grad(function), wrt)
    for each, gradient in expected.items():
        assert_same(got[each], gradient)
    assert_all(got["sink"] != 0, True, "sink != 0")
    assert_all(got["q"], 0, "q")


@pytest.mark.parametrize("dims", [(5, 8), (8, 6), (3, 7)])
def test_rows_that_are_not_aligned_are_padded(dims):
    """Columns of 0 change no bit: sums have the same terms, and zeros."""
    sizes = {"head_dim": dims[0], "head_dim_v": dims[1]}
    wrt, others = split(inputs(**sizes))[0], {}
    with emulator.active("sm_80"):
        function, of = loss(wrt, others, deterministic=True)
        expected = expected_gradients(
            inputs(**sizes), of, {"deterministic": True}
        )
    got, _ = on_emulator("sm_80", jax.grad(function), wrt)
    for each, gradient in expected.items():
        assert_same(got[each], gradient)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_ids_of_any_integer_dtype(dtype):
    given, ids = inputs(), np.arange(2).repeat(20)
    lengths = (given[x].shape[1] for x in "qk")
    ids_q, ids_k = (np.resize(ids, (2, n)).astype(dtype) for n in lengths)

    def call(given):
        return attention(**given, segment_ids_q=ids_q, segment_ids_k=ids_k)

    got, _ = on_emulator("sm_80", call, given)
    with emulator.active("sm_80"):
        expected = cuflash.forward(
            **given, segment_ids_q=ids_q, segment_ids_k=ids_k
        )
    assert_same(got, expected)


def test_a_traced_seed():
    given = inputs(head_dim_v=8)

    def call(seed):
        return attention(**given, dropout=0.5, seed=seed)

    got, _ = on_emulator("sm_80", call, jax.numpy.int32(-3))
    with emulator.active("sm_80"):
        expected = cuflash.forward(**given, dropout=0.5, seed=2**64 - 3)
    assert_same(got, expected)


def test_no_queries_have_gradients_of_zero():
    wrt, _ = split(inputs(seqlen_q=0))
    total = jax.grad(lambda wrt: attention(**wrt).sum())
    got, runs = on_emulator("sm_80", total, wrt)
    assert runs == 1
    for name, x in wrt.items():
        assert_same(got[name], np.zeros(x.shape, x.dtype))


def test_repeated_calls_are_recorded_once():
    arrays, _ = split(inputs(head_dim_v=8))
    with emulated("sm_80") as used:
        call = jax.jit(lambda x: attention(**x))
        first = call(arrays)
        planned = used.planned
        second = call({n: 2 * x for n, x in arrays.items()})
        assert used.planned == planned and used.runs == 2
    assert not (np.asarray(first) == np.asarray(second)).all()


def gradients_on_two(*archs):
    """Gradients of a call lowered for the first GPU, run on the second."""
    wrt, _ = split(inputs("float16", head_dim=64, head_dim_v=64))
    with emulated(*archs) as used:
        call = jax.jit(jax.grad(lambda x: attention(**x).sum()))
        first = jax.block_until_ready(call(wrt))
        used.index = 1
        return first, jax.block_until_ready(call(wrt))


def test_a_second_gpu_has_kernels_of_its_own():
    first, second = gradients_on_two("sm_80", "sm_80")
    for name in ("k", "v"):
        assert_same(second[name], first[name])


def test_gpus_of_two_kinds_are_refused():
    errors = (jax.errors.JaxRuntimeError, ValueError)  # by XLA's choice
    with pytest.raises(errors, match="use GPUs of one kind"):
        gradients_on_two("sm_80", "sm_90a")


def targets(function, *arguments):
    """The names of XLA's custom calls in a function lowered for CUDA."""
    with emulated("sm_80", platform="cuda"):
        lowered = jax.jit(function).trace(*arguments)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(\w+)", text)


def test_calls_are_compatible_with_command_buffers():
    compatible = "xla_buffer_python_gpu_callback_cmd_buffer"
    arrays, _ = split(inputs())
    total = jax.grad(lambda x: attention(**x).sum())
    assert targets(total, arrays) == [compatible] * 2


def test_the_host_reads_a_traced_seed():
    def call(seed):
        return attention(**inputs(), dropout=0.5, seed=seed)

    (name,) = targets(call, jax.numpy.uint32(3))
    assert name == "xla_buffer_python_gpu_callback"


def test_workspaces_are_results_of_the_call():
    """Of the backward pass: delta, beside dq, dk and dv."""
    with emulated("sm_80", platform="cuda"):
        arrays, _ = split(inputs(head_dim_v=8))
        total = jax.grad(lambda x: attention(**x).sum())
        lowered = jax.jit(total).trace(arrays)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    (results,) = re.findall(r"custom_call.*-> \((.*xui8.*)\)", text)
    assert len(re.findall("tensor", results)) == 4


class CudaOnCpu(machine.Cuda):
    """CUDA's machine, for callbacks of CPUs, which have no stream."""

    def first_device(self):
        return 0

    def open(self, context, buffers):
        return super().open(SimpleNamespace(stream=42), buffers)


def test_launches_by_cupy_on_the_stream_of_the_callback(monkeypatch):
    fake, _ = fake_cupy.in_place(monkeypatch)
    sizes = {"head_dim": 64, "head_dim_v": 64}
    arrays, _ = split(inputs("float16", **sizes))
    with lowered_for(CudaOnCpu(), "cpu"):
        total = jax.grad(lambda x: attention(**x).sum())
        jax.block_until_ready(jax.jit(total)(arrays))
    launches = fake.logged("launch")
    assert launches and set(launches) == {("launch", 0, 42)}
    assert not fake.logged("alloc")


def test_addresses_from_capsules():
    found = []

    def callback(context, out, *given):
        buffers = [*given, out]
        found.append(machine.located(buffers))
        addresses = [np.asarray(x).ctypes.data for x in buffers]
        found.append((0, addresses))
        np.asarray(out)[...] = 0

    arrays = [jax.numpy.zeros(5, x) for x in ("bfloat16", "bool", "uint32")]
    like = jax.ShapeDtypeStruct((3,), "float16")
    jax.block_until_ready(buffer_callback(callback, like)(*arrays))
    assert found[0] == found[1]
