"""Calls on NumPy arrays, and how many rows of each the reference computes."""

import numpy as np

import cuflash

from .flagged import rows_counted

BATCH, TOKENS, HEADS, HEADS_KV, DIM = 2, 300, 4, 2, 8
CALLS = "forward", "backward", "jvp", "double_backward"


def arrays():
    """Return q, k, v and dout, and a direction of each of the first three."""
    rng = np.random.default_rng(0)
    heads = HEADS, HEADS_KV, HEADS_KV, HEADS, HEADS, HEADS_KV, HEADS_KV
    names = "q", "k", "v", "dout", "q_dot", "k_dot", "v_dot"
    return {
        name: rng.standard_normal((BATCH, TOKENS, n, DIM), np.float32)
        for name, n in zip(names, heads, strict=True)
    }


def call(name, x, **options):
    """Return the results of one call, with all gradients there are."""
    qkv, dots = ([x[y + z] for y in "qkv"] for z in ("", "_dot"))
    out, lse = cuflash.forward(*qkv, return_lse=True, **options)
    if name == "forward":
        return out, lse
    if name == "jvp":
        return cuflash.jvp(*qkv, *dots, return_lse=True, **options)
    given = x["dout"], *qkv, out, lse
    prefix = "d" if name == "backward" else "d2"
    for option in {"bias", "sink"} & options.keys():
        options[f"return_{prefix}{option}"] = True
    if name == "backward":
        return cuflash.backward(*given, **options)
    options["return_ddlse"] = True
    return cuflash.double_backward(*dots, *given, **options)


def counted(name, x, **options):
    """Return how many rows the reference computes, for each of its calls."""
    with rows_counted() as counts:
        call("forward", x, **options)
        of_forward = len(counts)
        call(name, x, **options)
    # All but forward call it first.
    return counts[of_forward * (1 if name == "forward" else 2) :]
