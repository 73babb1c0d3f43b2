"""shard_map over batch and heads, on four CPU devices of a child process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="tests of cuflash.jax need it")

pytestmark = pytest.mark.slow

PROGRAM = """
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from cuflash.errors import UnsupportedError
from cuflash.jax import attention
from jax_data import assert_same, inputs, normal

kind = getattr(jax.sharding.AxisType, KIND)
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(kind, kind))
specs = dict.fromkeys("qkv", P("b", None, "h")) | {"sink": P("h")}
given = inputs() | {"sink": normal(4)}
arrays = {n: jax.device_put(x, NamedSharding(mesh, specs[n]))
          for n, x in given.items()}

def plain(x):
    return attention(**x, causal=True)

def total(call, x):
    return (call(x) ** 2).sum()
"""
CALLS = """
sharded = jax.shard_map(plain, mesh=mesh, in_specs=(specs,),
                        out_specs=specs["q"])
got = jax.jit(sharded)(arrays)
assert len(got.sharding.device_set) == 4
assert_same(got, plain(given))
"""
GRADIENTS = """
sharded = jax.shard_map(plain, mesh=mesh, in_specs=(specs,),
                        out_specs=specs["q"])
got = jax.jit(jax.grad(lambda x: total(sharded, x)))(arrays)
expected = jax.grad(lambda x: total(plain, x))(given)
for name in "qkv":
    assert_same(got[name], expected[name])
halves = [{n: x if n == "sink" else x[i:i + 1] for n, x in given.items()}
          for i in range(2)]
parts = [jax.grad(lambda x: total(plain, x))(half) for half in halves]
assert_same(got["sink"], parts[0]["sink"] + parts[1]["sink"])
"""
SECOND = """
def second(call, x):
    moved = jax.tree.map(jax.numpy.cos, x)
    slopes = jax.grad(lambda x: total(call, x))
    pushed = jax.jvp(call, (x,), (moved,)), jax.jvp(slopes, (x,), (moved,))
    norm = lambda x: sum((y ** 2).sum() for y in jax.tree.leaves(slopes(x)))
    return pushed, jax.grad(norm)(x)

del arrays["sink"], given["sink"], specs["sink"]  # summed in another order
sharded = jax.shard_map(plain, mesh=mesh, in_specs=(specs,),
                        out_specs=specs["q"])
got = jax.jit(lambda x: second(sharded, x))(arrays)
jax.tree.map(assert_same, got, jax.jit(lambda x: second(plain, x))(given))
"""
REPLICATED_KEYS = """
specs["k"] = specs["v"] = P("b")
given |= {n: given[n][:, :, :1] for n in "kv"}
arrays |= {n: jax.device_put(given[n], NamedSharding(mesh, P("b")))
           for n in "kv"}
sharded = jax.shard_map(plain, mesh=mesh, in_specs=(specs,),
                        out_specs=specs["q"])
got = jax.jit(jax.grad(lambda x: total(sharded, x)))(arrays)
halves = [{n: x if n in "kv" else x[..., i:i + 2, :] for n, x in given.items()
           if n != "sink"} | {"sink": given["sink"][i:i + 2]}
          for i in (0, 2)]
parts = [jax.grad(lambda x: total(plain, x))(half) for half in halves]
for name in "kv":
    assert_same(got[name], parts[0][name] + parts[1][name])
"""
SCORES = """
def scaled(x):
    gain = x["sink"]
    score = lambda s, b, h, i, j: jax.numpy.tanh(s) * gain[h]
    return attention(x["q"], x["k"], x["v"], score_mod=score)

given = jax.tree.map(jax.numpy.asarray, given)
sharded = jax.shard_map(scaled, mesh=mesh, in_specs=(specs,),
                        out_specs=specs["q"])
assert_same(jax.jit(sharded)(arrays), scaled(given))
"""
WITHOUT = """
got = jax.jit(plain)(arrays)
assert got.sharding.is_fully_replicated
assert_same(got, plain(given))
"""
EXPLICIT_WITHOUT = """
try:
    jax.jit(plain)(arrays)
except UnsupportedError as error:
    assert "jax.shard_map" in str(error)
else:
    raise AssertionError
"""


def run(kind, text):
    """Run a program where JAX has four CPU devices."""
    here = Path(__file__).parent
    path = [str(here), str(here.parent), *sys.path]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "CUFLASH_COMPILE": "lazy",
        "PYTHONPATH": os.pathsep.join(path),
    }
    program = PROGRAM.replace("KIND", repr(kind)) + text
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "text",
    [CALLS, GRADIENTS, SECOND, REPLICATED_KEYS, SCORES],
    ids=["out", "grad", "second", "keys", "scores"],
)
def test_shard_map(kind, text):
    run(kind, text)


def test_without_shard_map_xla_gathers():
    run("Auto", WITHOUT)


def test_explicitly_sharded_arrays_need_shard_map():
    run("Explicit", EXPLICIT_WITHOUT)
