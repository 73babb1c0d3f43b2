"""JAX's dot_product_attention with cuDNN.

JAX uses its own streams, so its calls are timed by the host's clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Before JAX is imported: it would reserve most of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import cupy  # noqa: E402
import jax  # noqa: E402
import jax.nn  # noqa: E402
import jax.numpy  # noqa: E402

from .cells import Cell  # noqa: E402
from .peers import Absent  # noqa: E402
from .runners import Inputs, Runner  # noqa: E402


def find(name: str) -> Runner:
    """The runner."""
    if not any(d.platform in ("gpu", "cuda") for d in jax.devices()):
        raise Absent("jax sees no GPU")
    last: list = []  # results of the latest call, to wait for

    def prepare(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
        cupy.cuda.get_current_stream().synchronize()  # the inputs are there
        q, k, v, dout = (jax.numpy.from_dlpack(x) for x in inputs)

        def attend(q, k, v):
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=cell.causal, implementation="cudnn"
            )

        if cell.direction == "forward":
            forward = jax.jit(attend)
            return lambda: _kept(last, (forward(q, k, v),))
        _, pull = jax.vjp(attend, q, k, v)
        backward = jax.jit(lambda pull, dout: pull(dout))
        return lambda: _kept(last, tuple(backward(pull, dout)))

    return Runner(
        "jax",
        f"cuDNN in JAX {jax.__version__}",
        prepare,
        wait=lambda: jax.block_until_ready(last),
    )


def _kept(last: list, results: tuple) -> tuple:
    last[:] = results
    return results
