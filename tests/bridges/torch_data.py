"""Tensors, and what NumPy's calls make of the same numbers."""

import numpy as np
import torch

import cuflash
from cuflash.torch.dtypes import from_numpy, to_numpy
from helpers.compare import assert_arrays_equal

SIZES = {
    "batch": 2,
    "seqlen_q": 5,
    "seqlen_k": 7,
    "num_heads_q": 4,
    "num_heads_kv": 2,
    "head_dim": 8,
    "head_dim_v": 6,
}


def tensors(dtype=torch.float64, *, requires_grad=False, seed=0, **sizes):
    """Return q, k and v of `SIZES`, or of others given by name."""
    n = SIZES | sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (n["batch"], n["seqlen_q"], n["num_heads_q"], n["head_dim"]),
        (n["batch"], n["seqlen_k"], n["num_heads_kv"], n["head_dim"]),
        (n["batch"], n["seqlen_k"], n["num_heads_kv"], n["head_dim_v"]),
    )
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for shape in shapes
    ]


def packed_tensors(dtype=torch.float64, **more):
    """Return q, k and v of two sequences end to end, and their options."""
    q, k, v = (x[0] for x in tensors(dtype, batch=1, **more))
    offsets = [[0, 2, q.shape[0]], [0, 4, k.shape[0]]]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in offsets)
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
    return leaves, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def options(dtype=torch.float64):
    """Return options by name: each alone, with tensors for `SIZES`."""
    n, generator = SIZES, torch.Generator().manual_seed(1)

    def normal(*shape, dtype=dtype):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    def ids(*shape):
        return torch.randint(3, shape, generator=generator, dtype=torch.int32)

    heads, rows, keys = n["num_heads_q"], n["seqlen_q"], n["seqlen_k"]
    lse = torch.float64 if dtype is torch.float64 else torch.float32
    return {
        "none": {},
        "causal": {"causal": True, "scale": 0.3},
        "window": {"window": (2, None)},
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {
            "alibi_slopes": normal(heads, dtype=torch.float32).abs()
        },
        "bias": {"bias": normal(heads, rows, keys)},
        "mask": {"mask": normal(n["batch"], 1, rows, keys) > 0},
        "sink": {"sink": normal(heads, dtype=lse)},
        "segment_ids": {
            "segment_ids_q": ids(n["batch"], rows),
            "segment_ids_k": ids(n["batch"], keys),
        },
        "dropout": {"dropout": 0.3, "seed": 2**63 + 1},
    }


def on_numpy(function, *arguments, **options):
    """Call a function of cuflash on tensors as NumPy arrays."""

    def array(x):
        return to_numpy(x) if isinstance(x, torch.Tensor) else x

    results = function(
        *map(array, arguments), **{n: array(x) for n, x in options.items()}
    )
    if isinstance(results, np.ndarray):
        return from_numpy(results)
    return tuple(map(from_numpy, results))


def expected_gradients(douts, inputs, options):
    """Return the gradients by `cuflash.backward`, dbias and dsink too.

    douts : the gradients of out and of lse, either may be None.
    """
    out, lse = on_numpy(cuflash.forward, *inputs, return_lse=True, **options)
    dout, dlse = douts
    if dlse is not None:
        options = options | {"dlse": dlse}
    wanted = {
        f"return_d{name}": True for name in ("bias", "sink") if name in options
    }
    dout = torch.zeros_like(out) if dout is None else dout
    return on_numpy(
        cuflash.backward, dout, *inputs, out, lse, **options, **wanted
    )


def assert_equal(got, expected):
    """Assert the same bits: same shapes, dtypes and values."""
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype is y.dtype
        assert_arrays_equal(x, y, "x")


def negated(x):
    """Return a view that equals x, of memory that holds -x."""
    view = torch.complex(x, -x).conj().imag
    assert view.is_neg()
    assert_arrays_equal(view, x, "view")
    return view
