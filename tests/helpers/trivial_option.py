"""An option without an effect, in a copy of cuflash: which calls take it?

`add` edits a copy in the places that CONTRIBUTING's guide to an option names,
but for arithmetic and words. Run there, this module prints a line of JSON for
each entry point: its name, and what is wrong, or "".
"""

import importlib.util
import json
import re

import numpy as np

from cuflash import emulator
from helpers import copies
from helpers.host_compiler import WHY_NONE

NAME = "trivial"
ROW = (
    f'    Option("{NAME}", check=checks.real, default=0.0, nothing=0.0,'
    " with_caches=True),\n"
)
# File: a line, as a pattern, and what follows it in the copy.
EDITS = {
    "cuflash/request/options.py": (r"^TABLE = \(\n", ROW),
    "cuflash/request/problem.py": (
        r"^    softcap: float = .*\n", f"    {NAME}: float = 0.0\n"
    ),
}  # fmt: skip


def add(tree):
    """Add the option to a copy of the checkout."""
    for file, (pattern, line) in EDITS.items():
        text = (tree / file).read_text(encoding="utf-8")
        (place,) = re.findall(pattern, text, re.M)
        copies.replace_in(tree / file, place, place + line)


def calls():
    """Yield the entry points: name, and a function of options to arrays."""
    import cuflash
    from cuflash import distributed

    q = np.random.default_rng(0).standard_normal((1, 6, 2, 8), np.float32)
    out, lse = cuflash.forward(q, q, q, return_lse=True)
    state = (out, q, q, q, out, lse)

    def alone(call):
        return distributed.run_threads(1, call)[0]

    yield "forward", lambda **o: cuflash.forward(q, q, q, **o)
    yield "backward", lambda **o: cuflash.backward(*state, **o)
    yield "vjp", lambda **o: cuflash.vjp(q, q, q, **o)[1](out)
    yield "jvp", lambda **o: cuflash.jvp(q, q, q, q, None, None, **o)
    yield (
        "double_backward",
        lambda **o: cuflash.double_backward(q, None, None, *state, **o),
    )
    yield (
        "forward_kvcache",
        lambda **o: cuflash.forward_kvcache(
            q, q.copy(), q.copy(), cache_seqlens=6, **o
        ),
    )
    yield (
        "distributed.forward",
        lambda **o: alone(
            lambda group: distributed.forward(q, q, q, group=group, **o)
        ),
    )
    yield (
        "distributed.backward",
        lambda **o: alone(
            lambda group: distributed.backward(*state, group=group, **o)
        ),
    )
    if importlib.util.find_spec("torch"):
        yield from calls_of_torch(q)
    if importlib.util.find_spec("jax"):
        yield from calls_of_jax(q)


def calls_of_torch(q):
    """Yield the entry points for tensors."""
    import torch

    import cuflash.flash_attn
    import cuflash.torch
    from cuflash import distributed

    x = torch.from_numpy(q).requires_grad_()

    def with_gradient(call, **options):
        y = call(x, x, x, **options)
        return y.detach().numpy(), torch.autograd.grad(y.sum(), x)[0].numpy()

    yield (
        "torch.attention",
        lambda **o: with_gradient(cuflash.torch.attention, **o),
    )
    yield (
        "torch.distributed_attention",
        lambda **o: distributed.run_threads(
            1,
            lambda group: with_gradient(
                cuflash.torch.distributed_attention, group=group, **o
            ),
        )[0],
    )
    yield (
        "flash_attn.flash_attn_func",
        lambda **o: with_gradient(cuflash.flash_attn.flash_attn_func, **o),
    )


def calls_of_jax(q):
    """Yield the entry points for JAX's arrays."""
    import jax

    import cuflash.jax

    def loss(x, **options):
        return cuflash.jax.attention(x, x, x, **options).sum()

    yield "jax.attention", lambda **o: jax.value_and_grad(loss)(q, **o)


def wrong(call, number):
    """Return what is wrong with a call that has the option."""
    want = call()
    try:
        got = call(**{NAME: number})
    except TypeError as error:
        if f"unexpected keyword argument {NAME!r}" not in str(error):
            raise
        return "no keyword"
    pairs = zip(*map(arrays, (got, want)), strict=True)
    return "" if all(np.array_equal(x, y) for x, y in pairs) else "an effect"


def arrays(x):
    """Yield the arrays of nested results; None where there is none."""
    if x is None or hasattr(x, "shape"):
        yield np.asarray(x)
    else:
        for each in x:
            yield from arrays(each)


def main():
    """Print a line for each entry point, on NumPy arrays and emulated."""
    for name, call in calls():
        said = ""
        try:
            said = wrong(call, 0.5)
            if not said and not WHY_NONE and "." not in name:
                with emulator.active("sm_80"):
                    said = wrong(call, 0.5)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([name, said]))


if __name__ == "__main__":
    main()
